"""The scales of a reproduction: `full` is the paper's setting, `small` and `tiny` are divided by stated factors.

The rules are the same for all recipes, so that rows and columns keep their ratios: 20, 40 and 80 epochs become 1, 2 and
4. `tiny` also replaces data and models by what the package contains. Everything that changed is told: `Scaled.changes`
and `Scaled.stand_ins`. The [paper] table of a recipe can add to the rules.
"""

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.catalogue import SOURCES, named_classes
from ..models import MODELS
from ..runs.config import Config, differences, load_config, to_toml, with_stand_ins
from ..runs.dotted import dig, show
from .papers import Shrink

EMBEDDED = "fashion-mnist"
EMBEDDED_ROWS = (10_000, 2_000)
CLASSES = 10
CLIENTS = 10  # most clients of `tiny`
LEAST_FRACTION = 0.4  # of the clients, where `tiny` has fewer of them


@dataclasses.dataclass(frozen=True)
class Rule:
    """A number is divided by `by`, and kept between `least` and `most`. Never does it grow."""

    key: str
    by: float = 1.0
    least: float = 1
    most: float = math.inf

    def new(self, value: float) -> float:
        """The number of the scale."""
        wanted = min(max(value / self.by, self.least), self.most, value)
        return wanted if isinstance(value, float) else round(wanted)


OWN = ("local", "private", "pretrain", "revisit")  # trainings on samples with labels; the last three are FedMD's
TOWARDS = ("distill", "digest")  # trainings towards what others say

RULES: dict[str, tuple[Rule, ...]] = {
    "full": (),
    "small": (
        Rule("run.rounds", 10, 3),
        Rule("run.eval_every", 10),
        *(Rule(f"method.{training}.epochs", 10) for training in OWN),
        Rule("method.local.steps", 3, 5),
        Rule("method.fusion.steps", 20, 50),
        Rule("method.fusion.every", 5, 10),
        Rule("method.fusion.patience", 10, 50),
        *(Rule(f"method.{training}.epochs", 5) for training in TOWARDS),
        Rule("data.train_size", 5),
        Rule("data.test_size", 5),
        Rule("public.size", 5, 10),
        Rule("public.per_round", 5, 2),
    ),
    "tiny": (
        Rule("run.rounds", 50, 2, 2),
        Rule("run.eval_every", 100),
        *(Rule(f"method.{training}.epochs", 20) for training in OWN),
        Rule("method.local.steps", 10, 3),
        *(Rule(f"method.{training}.batch", 4, 8, 16) for training in OWN),
        *(Rule(f"method.{training}.lr", 1, 0, 0.1) for training in OWN),
        Rule("method.local.inner_lr", 1, 0, 0.01),
        Rule("method.fusion.steps", 500, 10),
        Rule("method.fusion.batch", 4, 16, 32),
        Rule("method.fusion.every", 10, 5),
        Rule("method.fusion.patience", 50, 10),
        *(Rule(f"method.{training}.batch", 8, 16, 32) for training in TOWARDS),
        Rule("method.server.epochs", 20),
        Rule("method.c_batch", 8, 16, 32),
        Rule("method.teaching.samples", 5, 2),
        Rule("method.ensemble_trainer.samples", 5, 2),
        Rule("method.global_trainer.warmup", 40),
        Rule("data.train_size", 1, 1, 500),
        Rule("data.test_size", 1, 1, 150),
        Rule("public.size", 50, 20, 100),
        Rule("public.per_round", 50, 2, 100),
        Rule("partition.min_size", 5, 1, 2),
    ),
}
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
        """What differs: key -> the paper's value, ours."""
        return differences(self.whole, self.config)


def scaled(config: Config, scale: str, extra: Shrink | None = None) -> Scaled:
    """The configuration at a scale."""
    if scale != "tiny":
        config = _whole_set(config)
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
    for rule in RULES[scale]:
        *path, leaf = rule.key.split(".")
        table = dig(tables, *path)
        value = table.get(leaf) if isinstance(table, dict) else None
        if leaf == "epochs" and isinstance(table, dict) and "steps" in table:
            continue  # these count instead
        if isinstance(value, int | float) and not isinstance(value, bool):
            table[leaf] = rule.new(value)
    if scale == "tiny":
        _fewer_clients(tables)
        tables["engine"] = {"name": "inprocess"}  # runs of seconds do not pay for worker processes
    for key, value in (extra.set if extra else {}).items():
        if dig(tables, *key.split(".")[:-1]) is not None:  # not every method of a table has every setting
            _put(tables, key, value)
    if extra:
        names |= extra.stand_ins | _replaced(tables["models"], extra.models)
    return Scaled(with_stand_ins(load_config(tables), config), config, names)


def scaled_round(at: int, before: int, after: int) -> int:
    """The round that stands for round `at` of `before`, when there are `after` rounds."""
    return max(1, round(at * after / before))


def told(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """The changes in words: "run.rounds: 100 -> 2"."""
    return [f"{key}: {show(old)} -> {show(new)}" for key, (old, new) in changes.items()]


def rows_of(config: Config) -> tuple[int, int] | None:
    """Training and test samples of the task, if they are known before the data is read."""
    whole = _whole(config)
    if whole is None:
        return None
    asked = (config.data.train_size, config.data.test_size)
    return min(asked[0] or whole[0], whole[0]), min(asked[1] or whole[1], whole[1])


def _whole_set(config: Config) -> Config:
    """With the whole of the data set of which the package contains a sample: the papers mean all of it."""
    if config.data.name != EMBEDDED or config.data.path is not None:
        return config
    folder = Path(os.environ.get("SOLERA_DATA") or "data") / EMBEDDED
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(folder)))


def _whole(config: Config) -> tuple[int, int] | None:
    if config.data.name == EMBEDDED and config.data.path is None:
        return EMBEDDED_ROWS
    info = SOURCES.get(config.data.name)
    return info.rows if info is not None else None


def _replaced(models: dict[str, Any], by: Mapping[str, str]) -> dict[str, str]:
    """Put other models in the place of some. Returns what stands for what, of those that are there."""
    there = {name for name in (*models["clients"], models.get("server")) if name in by}
    models["clients"] = [by.get(name, name) for name in models["clients"]]
    if models.get("server") in by:
        models["server"] = by[models["server"]]
    return {name: by[name] for name in by if name in there}


def _put(tables: dict[str, Any], key: str, value: Any) -> None:
    *path, leaf = key.split(".")
    for name in path:
        tables = tables.setdefault(name, {})
    tables[leaf] = value


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


def _fewer_clients(tables: dict[str, Any]) -> None:
    partition, federation = tables["partition"], tables["federation"]
    if partition.get("kind") == "user":  # the embedded sample has no users
        tables["partition"] = {"kind": "dirichlet", "alpha": 1.0, "clients": 10}
        return
    if partition["clients"] > CLIENTS:
        partition["clients"] = CLIENTS
        if isinstance(federation.get("fraction"), float):
            federation["fraction"] = max(federation["fraction"], LEAST_FRACTION)


__all__ = ["RULES", "Rule", "Scaled", "rows_of", "scaled", "scaled_round", "told"]
