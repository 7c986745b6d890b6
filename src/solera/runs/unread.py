"""The table of settings that a run ignores because of another setting.

A setting that is set and ignored is a mistake, so `load_config` refuses it. If the cause is an override (a recipe with
a server model, run with a method that has none), the recipe's setting is left out, with a note.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..core.errors import ConfigError
from ..core.settings import OfCohort, declared, default_of, hints, show
from ..models import model_info


class Unread(NamedTuple):
    """A setting that is not read."""

    key: str
    problem: str
    choices: tuple[str, ...]  # the settings that decide


class Rule(NamedTuple):
    """Settings that are read only with some values of other settings."""

    keys: tuple[str, ...]
    read: Callable[[Any], bool]  # of a namespace of the tables
    why: str  # their owner, or the values with which they are read
    choices: tuple[str, ...]


def _images(t: Any) -> bool:
    """True if every client's model is known to take images."""
    infos = [model_info(name) for name in t.models.built]
    return all(info.kind == "image" and not info.own for info in infos)


def _only_with(key: str, choice: str, *values: str) -> Rule:
    table, _, name = choice.partition(".")
    why = f"only with {choice} = " + " or ".join(map(show, values))
    return Rule((key,), lambda t: getattr(getattr(t, table), name) in values, why, (choice,))


OF_PUBLIC = ("size", "users", "fraction", "classes", "per_round", "labels", "augment", "fresh", "noise")
RULES = (
    Rule(("data.shape", "data.classes"), lambda t: t.sites, "of [sites]; a data set has its own", ("sites",)),
    Rule(
        ("data.text_column", "data.pair_column", "data.length"),
        lambda t: not _images(t),
        "of texts, and models.clients take images",
        ("models.clients", "data.name"),
    ),
    Rule(
        tuple(f"public.{key}" for key in OF_PUBLIC),
        lambda t: t.public.source != "none",
        'of public samples, and public.source = "none"',
        ("public.source",),
    ),
    _only_with("public.name", "public.source", "dataset"),
    _only_with("public.path", "public.source", "dataset", "generator"),
    _only_with("public.noise", "public.source", "noise"),
    Rule(
        ("models.server",),
        lambda t: t.method.traits().server_model == "larger" or t.method.traits().may_name_server,
        "only with a method that trains such a model (`solera ls methods`)",
        ("method.name",),
    ),
    _only_with("partition.alpha", "partition.kind", "dirichlet", "quantity"),
    _only_with("partition.variant", "partition.kind", "dirichlet"),
    _only_with("partition.classes_per_client", "partition.kind", "classes"),
    Rule(("track.mlflow_experiment",), lambda t: t.track.mlflow is not None, "of track.mlflow", ("track.mlflow",)),
)


def unread(tables: Mapping[str, Any]) -> Iterator[Unread]:
    """The settings with another value than their default that a run with these tables does not read."""
    t = types.SimpleNamespace(**tables)
    for rule in RULES:
        try:
            if rule.read(t):
                continue
        except (AttributeError, ConfigError):  # an invalid table or an unknown model: reported elsewhere
            continue
        for key in rule.keys:
            table, _, name = key.partition(".")
            if table in tables and (value := getattr(tables[table], name)) != _default(tables[table], name):
                yield Unread(key, f"{key} = {show(value)}: it is not read: {rule.why}; leave it out", rule.choices)
    if "models" in tables and "sites" in tables:
        yield from _options(tables["models"])


def _options(models: Any) -> Iterator[Unread]:
    """Report [models.options.NAME] of architectures that the run does not have."""
    names = [*models.clients, *([models.server] if models.server else [])]
    used = {*names, *(models.variant(name).model for name in names)}
    for name in models.options:
        if name not in used:
            told = f"[models.options.{name}] is not read: models.clients and models.server are {', '.join(names)}"
            yield Unread(f"models.options.{name}", f"{told}; leave it out", ("models.clients", "models.server"))


def _default(table: Any, name: str) -> Any:
    return default_of(table.__dataclass_fields__[name])


def too_many(tables: Mapping[str, Any]) -> Iterator[str]:
    """Report a method's numbers of clients (`OfCohort`) that exceed a round's, where that is known."""
    if not {"sites", "partition", "federation", "method"} <= tables.keys():
        return
    clients, method = len(tables["sites"]) or tables["partition"].clients, tables["method"]
    if clients is None:
        return
    most = tables["federation"].cohort(clients)

    def walk(table: Any, path: str) -> Iterator[str]:
        cls: type = type(table)
        for name, wanted in hints(cls).items():
            value, key = getattr(table, name), f"{path}.{name}"
            if dataclasses.is_dataclass(value):
                yield from walk(value, key)
            elif declared(wanted).has(OfCohort) and value != _default(table, name) and value >= most:
                yield f"{key} = {value}: a round has {most} of {clients} clients; choose less"

    yield from walk(method, "method")
