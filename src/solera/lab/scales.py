"""The scales of a reproduction: `full` is the paper's setting, `small` and `tiny` are divided by stated factors.

The rules in scales.toml are the same for all recipes, so that rows and columns keep their ratios: 20, 40 and 80 epochs
become 1, 2 and 4. `tiny` also replaces data and models by those in the package. `Scaled.changes` and `Scaled.stand_ins`
name everything that changed. The [paper] table of a recipe can add to the rules.
"""

import dataclasses
import importlib.resources
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.catalogue import SOURCES, named_classes
from ..models import MODELS
from ..runs.config import Config, differences, load_config, to_toml, with_stand_ins
from ..runs.words import dig, show
from .papers import Shrink

EMBEDDED = "fashion-mnist"
EMBEDDED_ROWS = (10_000, 2_000)
CLASSES = 10
CLIENTS = 10  # most clients of `tiny`
LEAST_FRACTION = 0.4  # of the clients, where `tiny` has fewer of them


RULES: dict[str, dict[str, list[float]]] = tomllib.loads(
    (importlib.resources.files(__package__) / "scales.toml").read_text("utf-8")
)
# `tiny`: models of the package that stand for others, the first that is free. With norm layers first.
SMALL_MODELS = {True: ("tiny-cnn", "lenet5", "mlp", "fedet-cnn"), False: ("lenet5", "mlp", "tiny-cnn", "fedet-cnn")}
SMALL_SERVER = "mcmahan-cnn"


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The configuration of a scale, and how it differs from the paper's."""

    config: Config
    whole: Config  # the paper's
    stand_ins: dict[str, str]  # what is replaced -> by what

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The differences: key -> the paper's value, ours."""
        return differences(self.whole, self.config)


def scaled(config: Config, scale: str, extra: Shrink | None = None) -> Scaled:
    """The configuration at a scale."""
    if scale != "tiny" and config.data.name == EMBEDDED and config.data.path is None:
        folder = Path(os.environ.get("SOLERA_DATA") or "data") / EMBEDDED  # the papers mean all of it, not the sample
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(folder)))
    if scale == "full":
        return Scaled(with_stand_ins(config, config), config, {})
    tables = tomllib.loads(to_toml(config))
    tables["run"].pop("stand_ins", None)  # those of this scale are found below
    names: dict[str, str] = {}
    chosen = config.data.user_min > 1 or config.data.test_users > 0  # how many rows their users have is not known
    for at, key in ((0, "train_size"), (1, "test_size")):  # so that the rules can divide them
        if (rows := rows_of(config)) is not None and not chosen and not SOURCES[config.data.name].made:
            tables["data"].setdefault(key, rows[at])
    source = SOURCES.get(tables["public"].get("name", ""))
    if source and source.rows and tables["public"]["source"] == "dataset":
        tables["public"].setdefault("size", source.rows[0])
    if scale == "tiny":
        names = _stand_ins(tables)
    for key, rule in RULES[scale].items():
        *path, leaf = key.split(".")
        table = dig(tables, *path)
        value = table.get(leaf) if isinstance(table, dict) else None
        if leaf == "epochs" and isinstance(table, dict) and "steps" in table:
            continue  # these count instead
        if isinstance(value, int | float) and not isinstance(value, bool):
            table[leaf] = shrunk(value, *rule)
    if scale == "tiny":
        partition, federation = tables["partition"], tables["federation"]
        if partition.get("kind") == "user":  # the embedded sample has no users
            tables["partition"] = {"kind": "dirichlet", "alpha": 1.0, "clients": 10}
        elif partition["clients"] > CLIENTS:
            partition["clients"] = CLIENTS
            if isinstance(federation.get("fraction"), float):
                federation["fraction"] = max(federation["fraction"], LEAST_FRACTION)
        tables["engine"] = {"name": "inprocess"}  # runs of seconds do not pay for worker processes
    for key, value in (extra.set if extra else {}).items():
        *path, leaf = key.split(".")
        if (table := dig(tables, *path)) is not None:  # not every method of a table has every setting
            table[leaf] = value
    if extra:
        models, by = tables["models"], extra.models
        names |= extra.stand_ins | {n: by[n] for n in by if n in (*models["clients"], models.get("server"))}
        models["clients"] = [by.get(name, name) for name in models["clients"]]
        if models.get("server") in by:
            models["server"] = by[models["server"]]
    return Scaled(with_stand_ins(load_config(tables), config), config, names)


def shrunk(value: float, by: float, least: float = 1, most: float = math.inf) -> float:
    """A number divided by `by`, and kept between `least` and `most`. It never grows."""
    wanted = min(max(value / by, least), most, value)
    return wanted if isinstance(value, float) else round(wanted)


def scaled_round(at: int, before: int, after: int) -> int:
    """The round that stands for round `at` of `before`, when there are `after` rounds."""
    return max(1, round(at * after / before))


def told(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """The changes in words: "run.rounds: 100 -> 2"."""
    return [f"{key}: {show(old)} -> {show(new)}" for key, (old, new) in changes.items()]


def rows_of(config: Config) -> tuple[int, int] | None:
    """Training and test samples of the task, if they are known before the data is read."""
    info = SOURCES.get(config.data.name)
    whole = EMBEDDED_ROWS if config.data.name == EMBEDDED and config.data.path is None else info.rows if info else None
    if whole is None:
        return None
    asked = (config.data.train_size, config.data.test_size)
    return min(asked[0] or whole[0], whole[0]), min(asked[1] or whole[1], whole[1])


# ---- tiny: what the package contains ----------------------------------------------------------------


def _stand_ins(tables: dict[str, Any]) -> dict[str, str]:
    """Replace data and models by those of the package. Returns what stands for what."""
    names: dict[str, str] = {}
    data, public = tables["data"], tables["public"]
    info = SOURCES.get(data["name"])
    if not (info and info.made):
        if data["name"] != EMBEDDED or "path" in data:
            names[data["name"]] = f"{EMBEDDED} (the package's sample)"
        kept = ("train_size", "test_size", "validation", "client_test", "split", "augment")
        tables["data"] = {"name": EMBEDDED} | {k: v for k, v in data.items() if k in kept}
        for key in ("mean", "std"):
            if isinstance(data.get(key), list) and data[key]:
                tables["data"][key] = data[key][:1]
        for key, most in zip(("train_size", "test_size"), EMBEDDED_ROWS, strict=True):
            tables["data"][key] = min(tables["data"].get(key, most), most)
        _public(public, names)
        _models(tables["models"], names)
        if tables["method"].get("server_model") == "vgg19":  # FedGKT's, on features
            tables["method"]["server_model"] = "residual"
            names["the vgg19 on features"] = "FedGKT's residual tower"
    return names


def _public(public: dict[str, Any], names: dict[str, str]) -> None:
    """Public samples are held out of the embedded sample; a generator's are noise."""
    source = public.get("source")
    if source == "dataset":
        names[f"public {public.pop('name')}"] = "samples held out of the task's own"
        public["source"] = "held-out"
        public.setdefault("size", 10_000)
        if classes := public.get("classes"):
            count = len(named_classes(classes) if isinstance(classes, str) else classes)
            public["classes"] = list(range(max(1, min(CLASSES, count // 10))))
    elif source == "generator":
        names["the generator"] = "uniform noise"
        public["source"] = "noise"
        public.setdefault("size", 10_000)
    public.pop("path", None)


def _models(models: dict[str, Any], names: dict[str, str]) -> None:
    """Small models for large ones; different ones stay different."""
    replaced: dict[str, str] = {}
    for name in models["clients"]:
        if name not in replaced:
            known = MODELS.get(name)
            pool = SMALL_MODELS[bool(known and known.has_norm and models.get("norm") != "none")]
            small = name if name in pool else next(m for m in pool if m not in replaced.values())
            replaced[name] = small
    server = models.get("server")
    if server is not None and server not in replaced:
        replaced[server] = SMALL_SERVER
    models["clients"] = [replaced[name] for name in models["clients"]]
    if server is not None:
        models["server"] = replaced[server]
    if isinstance(models.get("assign"), dict):
        models["assign"] = {k: replaced.get(v, v) for k, v in models["assign"].items()}
    options = {replaced.get(name, name): of for name, of in models.get("options", {}).items()}
    bits = {name: {k: v for k, v in of.items() if k == "bits"} for name, of in options.items()}
    if "options" in models:  # the other options are those of the large models
        models["options"] = {name: of for name, of in bits.items() if of}
    for key in ("lora", "weights"):
        models.pop(key, None)
    names |= {old: new for old, new in replaced.items() if old != new}
