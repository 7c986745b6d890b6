"""Every setting of every table and method refuses what it cannot be, from Python and from TOML with the same words."""

import dataclasses
import inspect
import math
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from solera.core.errors import ConfigError
from solera.core.settings import OrInf, Slot, declared, hints, table_of
from solera.method import METHODS
from solera.runs.config import TABLES, load_config

Place = tuple[str, type, tuple[str, ...]]  # method, class of the settings, and the table they are in


def places() -> Iterator[Place]:
    """Every table of settings once, with a method that has it."""
    seen: set[type] = set()

    def walk(method: str, cls: type, path: tuple[str, ...]) -> Iterator[Place]:
        if cls not in seen:
            seen.add(cls)
            yield method, cls, path
        for name, wanted in hints(cls).items():
            table = table_of(wanted)
            kinds = table.kinds().values() if table and issubclass(table, Slot) else [table] if table else []
            for kind in (k for k in kinds if k.__module__.startswith("solera.")):
                yield from walk(method, kind, (*path, name))

    for name, cls in TABLES.items():
        yield from walk("fedavg", cls, (name,))
    for name, cls in sorted(METHODS.items()):
        if cls.__module__.startswith("solera.methods."):
            yield from walk(name, cls, ("method",))


def markers(wanted: Any) -> Iterator[Any]:
    if typing.get_origin(wanted) is typing.Annotated:
        yield from typing.get_args(wanted)[1:]
    for kind in typing.get_args(wanted):
        if typing.get_origin(declared(wanted).inner) not in (list, tuple):
            yield from markers(kind)


def wrong_values(wanted: Any) -> Iterator[Any]:
    """Values next to what the type allows."""
    inner, limits = declared(wanted).inner, list(markers(wanted))
    if typing.get_origin(inner) is Literal:
        for choice in map(str, typing.get_args(inner)):
            yield from (choice.upper() if choice.islower() else choice.lower(), choice[:-1] + "_")
    if inner not in (int, float):
        return
    one = 1 if inner is int else 1e-6
    for limit in limits:
        if isinstance(limit, Ge):
            yield limit.ge - one
        elif isinstance(limit, Gt):
            yield limit.gt
        elif isinstance(limit, Le):
            yield limit.le + one
        elif isinstance(limit, Lt):
            yield limit.lt
    yield "3"
    yield math.nan
    yield -math.inf
    if not any(isinstance(m, OrInf) for m in limits):
        yield math.inf


def said(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


ALL = list(places())


@pytest.mark.parametrize(("method", "cls", "path"), ALL, ids=[cls.__name__ for _, cls, _ in ALL])
def test_wrong_values_are_refused_with_the_same_words_from_python_and_from_toml(method, cls, path):
    for name, wanted in hints(cls).items():
        for value in wrong_values(wanted):
            here = said(cls, **{name: value})
            tables: dict[str, Any] = {"method": {"name": method}}
            inner = tables
            for table in path:
                inner = inner.setdefault(table, {})
            inner |= {"kind": cls.kind} if issubclass(cls, Slot) else {}
            inner[name] = value
            there = said(load_config, tables)
            assert here.startswith(f"{cls.__name__}.{name} = ")
            assert there == here.replace(cls.__name__, ".".join(path), 1)
            choices = [str(a) for a in typing.get_args(declared(wanted).inner)]
            if typing.get_origin(declared(wanted).inner) is Literal and str(value).lower() in map(str.lower, choices):
                assert "did you mean" in here


@pytest.mark.parametrize("cls", [cls for _, cls, _ in ALL], ids=lambda cls: cls.__name__)
def test_defaults_pass_the_checks_and_the_signature_is_kept(cls):
    made = cls()
    assert made == dataclasses.replace(made)
    signature = inspect.signature(cls)
    assert list(signature.parameters) == list(hints(cls))


def test_every_kind_of_a_slot_is_tried():
    tried = {cls.kind for _, cls, _ in ALL if issubclass(cls, Slot)}
    assert tried >= {"whole", "low-bit", "all", "robust", "clients", "several", "swag", "memory", "low-entropy"}
