"""Reliability list, number 20: wrong configurations are refused, in one line that names the key."""

import copy
import dataclasses
import tomllib
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import tomli_w

from solera.core.errors import ConfigError
from solera.method import find_method
from solera.runs.config import TABLES, load_config, to_toml

METHOD = "feddf"
GOOD: dict[str, Any] = tomllib.loads(to_toml(load_config({"method": {"name": METHOD}})))


def settings() -> Iterator[tuple[str, Any]]:
    """Every dotted key and its type."""

    def walk(cls: type, path: str) -> Iterator[tuple[str, Any]]:
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[f.name]):
                yield from walk(hints[f.name], f"{path}.{f.name}")
            else:
                yield f"{path}.{f.name}", hints[f.name]

    for name, cls in {**TABLES, "method": find_method(METHOD)}.items():
        yield from walk(cls, name)


def edited(key: str, value: Any, remove: str | None = None) -> dict[str, Any]:
    tables = copy.deepcopy(GOOD)
    *path, leaf = key.split(".")
    table = tables
    for name in path:
        table = table.setdefault(name, {})
    table[leaf] = value
    if remove:
        table.pop(remove, None)
    return tables


def typos() -> Iterator[tuple[dict[str, Any], str, str]]:
    for key, _ in settings():
        table, _, leaf = key.rpartition(".")
        wrong = leaf[:-1] + leaf[-1] * 2  # clients -> clientss
        yield edited(f"{table}.{wrong}", 1, remove=leaf), f"{table}.{wrong}", key


def wrong_types() -> Iterator[tuple[dict[str, Any], str, str]]:
    for key, kind in settings():
        text = str(kind)
        value: Any = 3.5 if "int" in text and "float" not in text and "list" not in text else "0.5"
        if kind is str or "str" in text or "Literal" in text:
            value = 3
        yield edited(key, value), key, repr(value)[1:-1] if isinstance(value, str) else str(value)


OUT_OF_RANGE = {
    "run.seed": -1,
    "run.rounds": 0,
    "run.eval_every": 0,
    "run.checkpoint_every": -3,
    "run.eval_clients": -1,
    "run.name": "../../etc",
    "data.validation": 1.0,
    "data.client_test": -0.1,
    "data.train_size": 0,
    "data.test_size": -5,
    "partition.clients": 0,
    "partition.alpha": 0.0,
    "partition.classes_per_client": 0,
    "partition.min_size": 0,
    "partition.kind": "dirchlet",
    "partition.variant": "blocks",
    "public.size": 0,
    "public.fraction": 1.5,
    "public.per_round": 0,
    "public.source": "heldout",
    "public.augment": "always",
    "models.clients": [],
    "models.server": "resnet9",
    "models.norm": "layer",
    "federation.fraction": 0.0,
    "federation.min_replies": 0,
    "federation.deadline_s": -1.0,
    "federation.max_empty_rounds": 0,
    "federation.sampling": "sizes",
    "method.ensemble": "avg_logit",
    "method.local.epochs": -1,
    "method.local.batch": 0,
    "method.local.lr": -0.1,
    "method.local.momentum": 1.0,
    "method.local.weight_decay": -1.0,
    "method.local.clip": 0.0,
    "method.local.optimizer": "sdg",
    "method.fusion.steps": -1,
    "method.fusion.temperature": 0.0,
    "method.fusion.every": 0,
    "method.fusion.patience": 0,
    "method.fusion.lr": float("inf"),
    "method.fusion.clip": float("nan"),
    "engine.name": "thread",
    "engine.workers": -1,
    "engine.threads": 0,
}
SHAPES = [  # tables that are values, values that are tables, what is missing
    ({"method": {}}, "method.name", "fedavg"),
    ({}, "method.name", "feddf"),
    ({"run": {"rounds": 3}}, "method.name", "scaffold"),
    ({"method": {"name": "feddff"}}, "method.name", "feddf"),
    ({"method": {"name": 3}}, "method.name", "string"),
    ({"method": "feddf"}, "method", "table"),
    ({"run": 3, "method": {"name": "feddf"}}, "run = 3", "[run]"),
    ({"runs": {"rounds": 3}, "method": {"name": "feddf"}}, "runs", "'run'"),
    ({"rounds": 3, "method": {"name": "feddf"}}, "rounds", "run.rounds"),
    ({"run": {"alpha": 3}, "method": {"name": "feddf"}}, "run.alpha", "partition.alpha"),
    ({"run": {"zzz": 3}, "method": {"name": "feddf"}}, "run.zzz", "seed, rounds"),
    ({"zzz": {"a": 3}, "method": {"name": "feddf"}}, "[zzz]", "run, data"),
    ({"method": {"name": "feddf", "lr": 0.1}}, "method.lr", "method.local.lr"),
    ({"method": {"name": "feddf", "fuson": {}}}, "[method.fuson]", "method.fusion"),
    ({"method": {"name": "feddf", "local": 3}}, "method.local = 3", "[method.local]"),
    ({"method": {"name": "feddf", "local": {"steps": {"a": 1}}}}, "method.local.steps", "integer"),
    ({"models": {"clients": "lenet5"}, "method": {"name": "feddf"}}, "models.clients", '["lenet5"]'),
    ({"models": {"clients": ["lenet5", 3]}, "method": {"name": "feddf"}}, "models.clients[1] = 3", "string"),
    ({"models": {"clients": ["lenet6"]}, "method": {"name": "feddf"}}, "models.clients", "lenet5"),
    ({"models": {"lora": {"r": 8}}, "method": {"name": "feddf"}}, "models.lora.r", "rank, alpha, dropout, layers"),
    ({"models": {"lora": True}, "method": {"name": "feddf"}}, "models.lora = true", "[models.lora]"),
    ({"engine": {"name": "processes", "threads": 4}, "method": {"name": "feddf"}}, "engine.threads", "inprocess"),
    ({"federation": {"replacement": True}, "method": {"name": "feddf"}}, "federation.replacement", "size"),
    ({"method": {"name": "fedprox", "mu": -1.0}}, "method.mu", "at least 0"),
    ({"method": {"name": "fedavgm", "momentum": 1.0}}, "method.momentum", "at least 0 and below 1"),
    ({"method": {"name": "fedavg", "fusion": {"steps": 3}}}, "[method.fusion]", "local"),
]
MISTAKES = [
    *typos(),
    *wrong_types(),
    *((edited(k, v), k, "") for k, v in OUT_OF_RANGE.items()),
    *SHAPES,
]


def test_there_are_enough():
    assert len(MISTAKES) >= 100


def test_what_they_are_made_from_is_right():
    assert to_toml(load_config(GOOD)) == to_toml(load_config({"method": {"name": METHOD}}))


@pytest.mark.parametrize(("tables", "key", "hint"), MISTAKES, ids=[f"{i}-{k}" for i, (_, k, _) in enumerate(MISTAKES)])
def test_a_mistake_is_refused_in_one_line_that_names_the_key(tables, key, hint, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(tomli_w.dumps(tables))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert key in message
    assert hint in message
    assert "\n" not in message
    assert len(message) < 500
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", ["2026-11-16", "2026-11-16T10:00:00Z", "10:00:00"])
def test_dates_are_no_settings(value, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(f'[run]\nrounds = {value}\n[method]\nname = "feddf"\n')
    with pytest.raises(ConfigError, match=r"run\.rounds = .*an integer"):
        load_config(path)


@pytest.mark.parametrize(
    ("key", "value"), [("run.rounds", True), ("partition.alpha", True), ("public.labels", 1), ("run.rounds", 3.0)]
)
def test_booleans_integers_and_numbers_are_three_things(key, value):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config(edited(key, value))


def test_a_long_value_is_cut():
    with pytest.raises(ConfigError) as caught:
        load_config(edited("run.rounds", "x" * 10_000))
    assert len(str(caught.value)) < 200
