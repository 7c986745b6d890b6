"""Configuration: strict TOML into frozen dataclasses, and back.

A key that is unknown, a value of the wrong type or out of range, and a setting that the run would not read are refused
before any work. The error is one line with all of them: each key, its value and the nearest valid key. TOML has no
null: an optional setting is left out, or turned off with the string "none" if its default is not None.
"""

import contextlib
import copy
import dataclasses
import difflib
import importlib.resources
import os
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from annotated_types import Ge, Le

from .. import methods  # noqa: F401  (the import registers them)
from ..core.errors import ConfigError
from ..core.federation import FederationConfig
from ..core.files import MOST_TOML, read_file
from ..core.plugins import allowed, anchored, is_path
from ..core.settings import (
    INVALID,
    OFF,
    Hint,
    NonNegative,
    PositiveInt,
    Problem,
    SettingsError,
    Slot,
    checked,
    declared,
    default_of,
    hints,
    place_of,
    problems_of,
    settings,
    show,
    slot_of,
    table_of,
    unknown_key,
    words,
)
from ..core.wire import safe_name
from ..data.partition import PartitionConfig
from ..data.public import PublicConfig
from ..data.site_data import SiteConfig
from ..data.sources import source_info
from ..engines import ENGINES, EngineConfig, EngineSettings
from ..method import METHODS, Method, name_of
from ..models import model_info
from ..models.factory import ModelsConfig
from ..scenario.task_data import DataConfig
from .supply import supplied
from .tracking import TrackConfig
from .unread import too_many, unread
from .words import dig, flat

GUESSED = 3  # shortest key that is searched for in other tables: shorter ones are similar to too many
Name = Annotated[
    str,
    pydantic.Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._ -]{0,63})?$"),
    Hint("letters, digits, spaces, '.', '_' and '-', at most 64, beginning with a letter or digit"),
]


@settings
class StopConfig:
    """When to end a run early. `run.rounds` is always the limit; without a target and a patience the run reaches it."""

    target: NonNegative | None = None  # stop at or above this accuracy; at or below this loss
    patience: PositiveInt | None = None  # stop after so many rounds without a new best value
    metric: Literal["accuracy", "loss"] = "accuracy"  # which value is used
    split: Literal["validation", "test"] = "validation"  # on which data it is measured

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.target is not None and self.metric == "accuracy" and self.target > 1:
            yield f"target = {self.target:g}: an accuracy is a share, from 0 to 1"
        if not self.active and (self.metric, self.split) != ("accuracy", "validation"):
            yield "target and patience are not set, so metric and split have no effect: set one of the first two"

    @property
    def active(self) -> bool:
        """True if the run may end early."""
        return self.target is not None or self.patience is not None


@settings
class RunConfig:
    """Number of rounds, seed, and how often to evaluate and to save."""

    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    rounds: PositiveInt = 10
    name: Name = ""
    eval_every: PositiveInt = 1  # rounds between evaluations; the last round is always evaluated
    checkpoint_every: PositiveInt = 1  # rounds between checkpoints
    eval_clients: Annotated[int, Ge(0), Hint("0: score none")] = 100  # how many clients' personal models are scored
    stand_ins: dict[str, Any] | None = None  # settings that differ from a paper's -> the paper's value
    stop: StopConfig = dataclasses.field(default_factory=StopConfig)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    run: RunConfig
    data: DataConfig
    partition: PartitionConfig
    public: PublicConfig
    models: ModelsConfig
    federation: FederationConfig
    method: Method  # an instance of a registered method: its fields are the hyper-parameters
    engine: EngineSettings  # an instance of a registered engine's settings
    track: TrackConfig
    sites: dict[str, SiteConfig] = dataclasses.field(default_factory=dict)  # instead of a partition
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # settings that were filled in, and why


SITES = "sites"  # the table of tables [sites.NAME]
PAPER = "paper"  # the table of a recipe for `solera reproduce`: no setting of a run
STAND_INS = "stand_ins"  # in [run]
STANDING_IN = ("data", "partition", "public", "models")  # tables that may have stand-ins: the task and the models
PLACES = ("data.path", "public.path")  # paths are no stand-ins: the same data may be in another folder

TABLES: dict[str, type] = {
    "run": RunConfig,
    "data": DataConfig,
    "partition": PartitionConfig,
    "public": PublicConfig,
    "models": ModelsConfig,
    "federation": FederationConfig,
    "engine": EngineConfig,
    "track": TrackConfig,
}


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, trusted: bool = False
) -> Config:
    """The configuration in `source`: a recipe's name, a TOML file, or the tables themselves.

    `overrides` are "key=value" with dotted keys; a value is read as TOML, or else as a string. Overriding `method.name`
    keeps the source's [method.local] and drops the other settings of its method: they are not meant for the new method.
    Settings that the method needs and the source leaves open get a value; `notes` says which and why. Relative paths
    become absolute, so that the run can be resumed from any folder. A path to code is refused outside
    `plugins.code_allowed`; files of code are looked up beside the TOML. Of `run.stand_ins` only those stay that differ
    from the paper's value; an override of a paper's recipe adds to them.

    A file that sends results elsewhere (`track.mlflow`) is refused unless it is `trusted`: it may be another person's.
    """
    given, decided, notes = _merged(source, overrides)
    config = _built(given, flat(_parse_overrides(overrides)), notes)
    if not trusted and not isinstance(source, Mapping):
        refuse_outside(config, str(source), overrides)
    if config.sites:
        decided = {*decided, "public.source"}  # no samples can be held out
    for key, value, why in supplied(
        config.method, config.data, config.partition, config.public, config.models, config.federation, decided
    ):
        notes.append(f"{key} = {show(value)} is set for {name_of(config.method)}: {why}")
        table, _, name = key.partition(".")
        try:
            changed: Any = dataclasses.replace(getattr(config, table), **{name: value})
        except SettingsError as e:
            raise SettingsError(table, e.problems) from None
        config = dataclasses.replace(config, **{table: changed})
    run = config.run
    if run.stand_ins:  # an override may have set some of them to the paper's value
        ours = _values_of(config)
        run = dataclasses.replace(run, stand_ins={k: v for k, v in run.stand_ins.items() if ours.get(k, OFF) != v})
    return dataclasses.replace(
        config,
        run=run,
        data=_absolute(config.data, "path"),
        public=_absolute(config.public, "path"),
        sites={k: _absolute(site, "data", "key") for k, site in config.sites.items()},
        track=config.track.absolute(),
        notes=tuple(notes),
    )


def refuse_outside(config: Config, file: str, overrides: Sequence[str]) -> None:
    """Refuse a file whose run would write or send anything outside its directory, unless an override says the same."""
    if (told := config.track.outside()) and "mlflow" not in _parse_overrides(overrides).get("track", {}):
        raise ConfigError(
            f"{file}: {told}, outside the run directory. If you want that, say so yourself: --set "
            f"track.mlflow={config.track.mlflow} (in Python: load_config(..., trusted=True))"
        )


def merged(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of `source` with the overrides applied, as `load_config` starts from them."""
    return _merged(source, overrides)[0]


def _merged(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """The tables, the keys that were given for their method, and the notes."""
    given = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else _read(source)
    paper = given.pop(PAPER) if isinstance(given.get(PAPER), Mapping) else None
    folder = folder_of(source)
    given, wanted = anchored(given, folder), anchored(_parse_overrides(overrides), folder)
    if paper is not None and isinstance(given.get("run", {}), dict):
        given["run"] = {STAND_INS: _deviations(given, wanted, paper), **given.get("run", {})}
    exchanged, notes = _exchange_method(given, wanted)
    notes += _exchange_engine(given, wanted)
    _merge(given, wanted, "")
    return given, set(flat(wanted if exchanged else given)), notes


def _built(given: dict[str, Any], chosen: Collection[str], notes: list[str]) -> Config:
    """The configuration in these tables. Raises SettingsError with everything that is wrong with them.

    A setting that overrides (`chosen`) have made unread is meant for another choice: it is left out, with a note."""
    changed = set(chosen)
    while True:
        tables, wrong = _tables(given)
        ignored, left = list(unread(tables)), False
        for u in ignored:
            decided = [key for key in u.choices if key in changed]
            if decided and not any(key == u.key or key.startswith(f"{u.key}.") for key in chosen):
                *path, name = u.key.split(".", 2)
                dig(given, *path).pop(name)
                notes.append(f"{u.key} did not carry over: {decided[0]} was changed")
                changed.add(u.key)
                left = True
        if not left:  # a setting that was left out may decide whether others are read
            break
    wrong += [u.problem for u in ignored if not any(p.startswith(u.choices) for p in wrong)]
    if wrong:
        raise SettingsError("", wrong)
    return Config(**tables)


def _tables(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The tables of a configuration, with defaults instead of invalid values, and all problems except settings that
    are not read."""
    wrong: list[Problem] = []

    def attempt(make: Callable[..., Any], *args: Any) -> Any:
        try:
            return make(*args)
        except ConfigError as e:
            wrong.extend(problems_of(e))
            return e.made if isinstance(e, SettingsError) else None

    method = attempt(_class, "method", given.get("method"))
    for key, value in given.items():
        if key not in TABLES and key not in ("method", SITES):
            wrong.append(_unknown(None, "", key, value, method))
        elif not isinstance(value, Mapping):
            wrong.append(_no_table(key, value))
    given = {key: value if isinstance(value, Mapping) else {} for key, value in given.items()}
    if method is None and not wrong and "name" not in given.get("method", {}):
        wrong.append(f"method.name is missing: choose one of {', '.join(sorted(METHODS.names()))}")
    classes = {**TABLES, "engine": attempt(_class, "engine", given.get("engine")), "method": method}
    tables = {name: given.get(name, {}) for name, cls in classes.items() if cls is not None}
    for name in tables.keys() & {"engine", "method"}:  # the name has selected the class, which may have no such field
        if "name" not in hints(classes[name]):
            tables[name] = {k: v for k, v in tables[name].items() if k != "name"}
    sites = {}
    for k, table in given.get(SITES, {}).items():
        if isinstance(table, Mapping):
            attempt(safe_name, k, "site")
        else:
            wrong.append(_no_table(f"sites.{k}", table))
        sites[k] = attempt(_build, SiteConfig, table if isinstance(table, Mapping) else {}, f"sites.{k}", None, None)
    if sites and None not in sites.values():
        tables = _with_sites(tables, sites, wrong)
    if isinstance(stand_ins := tables["run"].get(STAND_INS), Mapping):  # data.name = ... and "data.name" = ... alike
        tables["run"] = {**tables["run"], STAND_INS: flat(stand_ins)}
    built = {name: attempt(_build, classes[name], table, name, None, method) for name, table in tables.items()}
    built = {name: table for name, table in built.items() if table is not None}
    if None not in sites.values():
        built[SITES] = sites
    if {"data", "public", "models", SITES} <= built.keys():
        if built["public"].source == "dataset" and not built["public"].name:
            wrong.append("public.name is missing: public.source = 'dataset' needs the name of a data set")
        for find, name, key in _names(built):
            attempt(find, name, key)
    if "run" in built:
        wrong += _stand_in_problems(built["run"].stand_ins or {})
    if not any(p.startswith(("partition.clients", "federation.fraction", SITES)) for p in wrong):
        wrong += too_many(built)
    return built, wrong


def _class(kind: str, table: Any) -> type | None:
    """The class that a [method] or an [engine] table names; None if it names no method."""
    name = table.get("name") if isinstance(table, Mapping) else None
    if name is None:
        return None if kind == "method" else EngineConfig
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.name = {show(name)}: expected a string")
    return METHODS.find(name, "method.name") if kind == "method" else ENGINES.find(name, "engine.name")


def _no_table(key: str, value: Any) -> Problem:
    return f"{key} = {show(value)}: this is a table; write [{key}] and its settings below"


def _with_sites(tables: dict[str, Any], sites: Mapping[str, SiteConfig], wrong: list[Problem]) -> dict[str, Any]:
    """The tables, with the number of clients and their models filled in from the sites. Contradictions are added to
    `wrong`."""
    names = [site.model for _, site in sorted(sites.items()) if site.model is not None]
    if tables["partition"]:
        wrong.append("[partition] with [sites]: each site brings its own data; leave [partition] out")
    for key, default in (("clients", names), ("assign", "even")):
        if (given := tables["models"].get(key, default)) != default:
            wrong.append(f"models.{key} = {show(given)}: with [sites], each names its own model")
    if tables["public"].get("source") == "held-out":
        wrong.append(
            'public.source = "held-out": no samples are taken out of what a site holds; use "dataset", "generator" or '
            '"noise", or "none"'
        )
    return {
        **tables,
        "partition": {"kind": "iid", "clients": len(sites)},
        "models": {**tables["models"], **({"clients": names} if names else {})},
        "public": {"source": "none", **tables["public"]},
    }


def _names(tables: Mapping[str, Any]) -> Iterator[tuple[Callable[[str, str], Any], str, str]]:
    """The names that are looked up before any data is loaded: the function that does it, name and key."""
    data, public, models, sites = tables["data"], tables["public"], tables["models"], tables[SITES]
    named = [(f"sites.{k}.model", site.model) for k, site in sites.items()]
    named += [("models.clients", name) for name in ([] if sites else models.clients)]
    for key, name in [*named, ("models.server", models.server)]:
        if name is not None:
            model = models.variant(name).model
            other = model != name and key.startswith("models.")
            yield model_info, model, f"models.options.{name}.model" if other else key
    for key, source in (("data.name", data.name), ("public.name", public.name)):
        if source is not None and is_path(source):  # other names are looked up when the data is loaded
            yield source_info, source, key


# ---- stand-ins --------------------------------------------------------------------------------------


def differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configurations differ, except stand-ins: key -> both values (None: unset)."""
    first, second = _values_of(before), _values_of(after)
    return {k: (first.get(k), second.get(k)) for k in {**first, **second} if first.get(k) != second.get(k)}


def is_stand_in(key: str) -> bool:
    """True if a run must have the paper's value of this setting to count as the paper's row."""
    return key.partition(".")[0] in STANDING_IN and key not in PLACES


def with_stand_ins(config: Config, papers: Config) -> Config:
    """The configuration, with its differences from the paper's as its stand-ins."""
    found = {k: OFF if old is None else old for k, (old, _) in differences(papers, config).items() if is_stand_in(k)}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, stand_ins=found))


def without_stand_ins(config: Config) -> Config:
    """The configuration with `run.stand_ins` unset."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, stand_ins=None))


def _values_of(config: Config) -> dict[str, Any]:
    """Every setting except stand-ins, by its dotted key. An unset one has the value OFF."""
    return flat(_plain(without_stand_ins(config)))


def _deviations(given: dict[str, Any], wanted: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides of a paper's recipe that no cell of its table has: key -> the recipe's value."""
    new = {k: v for k, v in flat(wanted).items() if is_stand_in(k)}
    if not new:
        return {}
    parts = [part for kind in ("row", "column") for part in paper.get(kind, []) if isinstance(part, Mapping)]
    cells = [flat(part.get("set", {})) for part in parts]
    papers = _values_of(_built(given, (), []))
    return {k: papers.get(k, OFF) for k, v in new.items() if not any(cell.get(k) == v for cell in cells)}


def _stand_in_problems(stand_ins: Mapping[str, Any]) -> Iterator[Problem]:
    """Report stand-ins for settings that do not exist, or with invalid values."""
    for key, value in stand_ins.items():
        name, *path = key.split(".")
        if name not in STANDING_IN or not path:
            tables = ", ".join(f"[{t}]" for t in STANDING_IN)
            yield f"run.{STAND_INS}: {show(key)} is no setting of {tables}: only these have stand-ins"
            continue
        try:
            _check_setting(TABLES[name], name, path, value)
        except ConfigError as e:
            yield from (f"run.{STAND_INS}: {why}" for why in problems_of(e))


def _check_setting(cls: type, table: str, path: Sequence[str], value: Any, may_lack: bool = False) -> None:
    """Refuse a path that leads to no setting of `cls`, and a value that it cannot have. `may_lack`: a table above it is
    optional, so the setting may be unset."""
    leaf, *rest = path
    if leaf not in (known := hints(cls)):
        raise ConfigError(_unknown(cls, table, leaf, value, None))
    wanted, key, kind = known[leaf], f"{table}.{leaf}", declared(known[leaf])
    may_lack = may_lack or kind.optional
    if rest and (inner := table_of(wanted)) is not None:
        _check_setting(inner, key, rest, value, may_lack)
    elif rest and not any(typing.get_origin(k) is dict for k in (kind.inner, *typing.get_args(kind.inner))):
        raise ConfigError(f"{key} is a value, not a table")
    elif not rest and not (value == OFF and may_lack):
        checked(wanted, value, key)


def to_toml(config: Config) -> str:
    """Every setting, defaults included, as TOML that loads to an equal configuration."""
    return "# Every setting of this run, defaults included.\n\n" + tomli_w.dumps(_plain(config))


def _plain(config: Config) -> dict[str, Any]:
    """Every setting as plain tables."""
    tables = {name: _dump(getattr(config, name), None) for name in (*TABLES, "method")}
    for name, registry in (("method", METHODS), ("engine", ENGINES)):
        tables[name] = {"name": registry.name_of(type(getattr(config, name))), **tables[name]}
    if config.sites:
        del tables["partition"]  # it follows from the sites
        tables[SITES] = {k: _dump(site, None) for k, site in config.sites.items()}
    order = [f.name for f in dataclasses.fields(config)]
    return {name: tables[name] for name in order if name in tables}


# ---- sources ----------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    """The names of the recipes inside the package."""
    return sorted(_recipes())


def recipe_text(name: str) -> str:
    """The text of a recipe, including its comments."""
    found = _recipes()
    if name not in found:
        near = difflib.get_close_matches(name, found, 1)
        hint = f"did you mean {near[0]!r}?" if near else "recipes are: " + ", ".join(sorted(found))
        raise ConfigError(f"{show(name)} is neither a recipe nor a .toml file; {hint}")
    return found[name].read_text("utf-8")


def _recipes() -> dict[str, Traversable]:
    def walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
        for entry in folder.iterdir():
            if entry.is_dir():
                yield from walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".toml"):
                yield prefix + entry.name.removesuffix(".toml"), entry

    return dict(walk(importlib.resources.files("solera.lab") / "recipes", ""))


def folder_of(source: str | Path | Mapping[str, Any]) -> Path:
    """The folder of the code files that a configuration names: the folder of its TOML. A recipe and tables have no
    file; for them it is the folder given to `code_allowed`, or the current one."""
    if not isinstance(source, Mapping) and not _is_recipe(source):
        return Path(source).absolute().parent
    return allowed() or Path.cwd()


def _is_recipe(source: str | Path) -> bool:
    by_name = isinstance(source, str) and not source.endswith(".toml")
    return by_name and (source in recipe_names() or not Path(source).is_file())


def _read(source: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(recipe_text(str(source)) if _is_recipe(source) else read_file(source, MOST_TOML).decode())
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{source} is not valid TOML: {e}") from None
    except (OSError, ValueError) as e:  # ValueError: not UTF-8, or a NUL in the name
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {str(source)!r}: {why}") from None


# ---- overrides --------------------------------------------------------------------------------------


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The overrides as nested tables; a later one wins."""
    wanted: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        names = key.split(".")
        if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", n) for n in names):
            raise ConfigError(f"{show(text)} is not key=value, such as run.rounds=5")
        nested: Any = value
        with contextlib.suppress(tomllib.TOMLDecodeError):
            parsed = tomllib.loads(f"value = {value}")
            nested = parsed["value"] if list(parsed) == ["value"] else value  # a line break must not add other keys
        for name in reversed(names):
            nested = {name: nested}
        _merge(wanted, nested, "")
    return wanted


def _merge(into: dict[str, Any], wanted: Mapping[str, Any], path: str) -> None:
    for name, value in wanted.items():
        key = f"{path}{name}"
        old = into.get(name)
        if not isinstance(value, dict) or old is None:
            into[name] = value
        elif isinstance(old, dict):
            _merge(old, value, f"{key}.")
        elif isinstance(old, str) and path == "method.":  # the kind of a slot, in short
            into[name] = {"kind": old, **value}
        else:
            inner = next(iter(value), "...")
            raise ConfigError(f"{key}.{inner} = {show(value.get(inner))}: {key} is a value, not a table")


def _exchange_method(given: dict[str, Any], wanted: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """If an override names another method, keep [method.local]; check the other settings, then drop them: they are
    tuned for the first method and would make the comparison unfair. A method that is derived from the first one differs
    in an equation only: it keeps them all. Returns whether the method changed, and notes."""
    old, new = given.get("method"), wanted.get("method")
    if not (isinstance(old, dict) and isinstance(new, dict) and old.get("name") and new.get("name")):
        return False, []
    before, after = _class("method", old), _class("method", new)
    if before is None or after is None or issubclass(after, before):
        return False, []
    theirs = {k: v for k, v in old.items() if k != "name"}
    first = _build(before, theirs, "method", None, before)
    given["method"], notes = _local_for(after, first, {k: v for k, v in new.items() if k != "name"})
    if dropped := [f"method.{key}" for key in flat(theirs) if key.partition(".")[0] not in given["method"]]:
        kept = f"method.{LOCAL} is kept; " if given["method"] else ""
        notes.insert(0, f"{new['name']} instead of {old['name']}: {kept}{', '.join(dropped)} did not carry over")
    return True, notes


def _exchange_engine(given: dict[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """If an override names another engine, keep the settings that both engines have. Returns notes."""
    old, new = given.get("engine"), wanted.get("engine")
    if not (isinstance(old, dict) and isinstance(new, dict) and isinstance(new.get("name"), str)):
        return []
    after = _class("engine", new)
    dropped = [k for k in old if k not in hints(after) and k != "name"]
    if _class("engine", old) is after or not dropped:
        return []
    given["engine"] = {k: v for k, v in old.items() if k not in dropped}
    return [f"engine {new['name']}: {', '.join(f'engine.{k}' for k in dropped)} did not carry over"]


LOCAL = "local"  # the setting of a method for local training
BUDGET = ("epochs", "steps", "batch")  # the amount of local training


def _local_for(after: type, first: Any, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The [method.local] of the method `first` for another method: all of it, or the part that the other accepts."""
    before: Any = type(first)
    theirs, ours = hints(after), hints(before)
    if LOCAL not in ours or theirs.get(LOCAL) != ours[LOCAL]:
        return {}, []
    own = _default(after, LOCAL, None)
    whole = _dump(getattr(first, LOCAL), own)
    asked = wanted.get(LOCAL)
    if isinstance(asked, Mapping):  # steps replace epochs, and the reverse
        if asked.get("steps", OFF) != OFF and "epochs" not in asked:
            whole.pop("epochs")
        elif "epochs" in asked and "steps" not in asked:
            whole["steps"] = OFF
    refused = ""
    rate = () if own is dataclasses.MISSING or own.optimizer != first.local.optimizer else ("lr",)
    for keys in (tuple(whole), (*BUDGET, *rate), BUDGET):
        carried = {LOCAL: {k: whole[k] for k in keys if k in whole}}
        merged_with = copy.deepcopy(carried)
        try:
            _merge(merged_with, wanted, "method.")
            _build(after, merged_with, "method", None, after)
        except ConfigError as e:
            refused = refused or str(e)
            continue
        if len(keys) == len(whole):
            return carried, []
        return carried, [f"of method.local only {', '.join(carried[LOCAL])} carry over: {refused}"]
    return {LOCAL: whole}, []  # invalid whatever is kept: `_built` raises the error


# ---- from tables to dataclasses and back ------------------------------------------------------------


def _build(cls: type, given: Mapping[str, Any], path: str, base: Any, method: type | None) -> Any:
    """An instance of `cls` with the settings in `given`; the others are those of `base`, or the defaults.

    The class checks its own values. This function checks only what exists in files: unknown and missing keys, tables
    and "none". Raises SettingsError with all problems."""
    values: dict[str, Any] = {}
    wrong = [_unknown(cls, path, key, value, method) for key, value in given.items() if key not in hints(cls)]
    for name, wanted in hints(cls).items():
        default = values[name] = _default(cls, name, base)
        if name in given:
            try:
                values[name] = _value(wanted, given[name], f"{path}.{name}", default, method)
            except ConfigError as e:
                wrong += problems_of(e)
                values[name] = INVALID
        elif default is dataclasses.MISSING:
            wrong.append(f"{path}.{name} is missing: expected {words(wanted)}")
            values[name] = INVALID
    made = None
    try:
        made = cls(**values)
    except SettingsError as e:
        made = e.made
        wrong += [f"{path}.{p}" for p in e.problems]
    except (ConfigError, ValueError, TypeError) as e:  # from a `__post_init__` of the class
        wrong.append(f"[{path}] {e}")
    if wrong:
        raise SettingsError("", wrong, made)
    return made


def _value(wanted: Any, value: Any, key: str, default: Any, method: type | None) -> Any:
    """A value from a file in the form that its class expects: tables are built, "none" is None."""
    table, slot = table_of(wanted), slot_of(wanted)
    if declared(wanted).optional and (value == OFF or (value is False and table is not None)):
        return None
    if table is None and slot is not None and isinstance(value, list):  # a list of tables, each of some kind
        return tuple(_value(slot, v, f"{key}[{i}]", None, method) for i, v in enumerate(value))
    if table is None:
        return value
    if slot is not None:
        value = {"kind": value} if isinstance(value, str) else value
        table = _kind(slot, value, f"{key}.kind", default)
        value = {k: v for k, v in value.items() if k != "kind"} if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping):
        raise ConfigError(_no_table(key, value))
    return _build(table, value, key, _base(default, table), method)


def _base(default: Any, table: type) -> Any:
    """The default whose settings `table` starts from: one of its own class, or another kind of its slot."""
    return default if isinstance(default, table) or (isinstance(default, Slot) and issubclass(table, Slot)) else None


def _kind(slot: type[Slot], given: Any, key: str, default: Any) -> type:
    """The class of the kind that a table names; without a name, that of the default."""
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if kind is None:
        return type(default) if isinstance(default, slot) else slot
    own = Hint("your own is known once method.name = 'file.py:Method' names its file")
    return slot.kinds()[checked(Annotated[Literal[*sorted(slot.kinds())], own], kind, key)]


def _default(cls: Any, name: str, base: Any) -> Any:
    if base is not None and hasattr(base, name):  # another kind of a slot has some of the settings
        return getattr(base, name)
    return default_of(cls.__dataclass_fields__[name])


def _unknown(cls: type | None, table: str, leaf: str, value: Any, method: type | None) -> str:
    """The message for an unknown key: with its new name, or the key that was probably meant, in any table."""
    key = f"{table}.{leaf}".lstrip(".")
    if cls is not None and place_of(cls, leaf):
        return f"{table}.{unknown_key(cls, leaf, value)}"
    known = list(_keys(method))
    siblings = [k for k in known if k.rpartition(".")[0] == table]
    if table == "engine" and cls is not None:  # the selected engine, which may be a plug-in
        siblings = [f"engine.{name}" for name in dict.fromkeys(["name", *hints(cls)])]
    near = [k for k in known if "." in k and k.rpartition(".")[2] == leaf]  # right name, wrong table
    near = near or [f"{table}.{n}".lstrip(".") for n in _close(leaf, siblings)]
    if len(leaf) >= GUESSED:
        near = near or [k for n in _close(leaf, known)[:1] for k in known if k.rpartition(".")[2] == n]
    if near:
        hint = "did you mean " + " or ".join(repr(k) for k in near[:2]) + "?"
    else:
        hint = f"[{table}] has " if table else "the tables are "
        hint += ", ".join(k.rpartition(".")[2] for k in siblings) or "no settings"
    if isinstance(value, Mapping):
        return f"[{key}]: there is no such table; {hint}"
    return f"{key} = {show(value)}: there is no such setting; {hint}"


def _close(leaf: str, keys: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in keys], 1)


def _keys(method: type | None) -> Iterator[str]:
    """Every dotted key, including tables."""

    def walk(cls: type, path: str) -> Iterator[str]:
        yield path
        for name, wanted in hints(cls).items():
            table = table_of(wanted)
            tables = list(table.kinds().values()) if table and issubclass(table, Slot) else [table] if table else []
            for table in tables:
                yield from walk(table, f"{path}.{name}")
            yield from () if tables else [f"{path}.{name}"]

    for name, cls in TABLES.items():
        yield from walk(cls, name)
    yield "method.name"
    yield from walk(method, "method") if method else ["method"]


def _dump(table: Any, base: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": table.kind} if isinstance(table, Slot) else {}
    for f in dataclasses.fields(table):
        value, default = getattr(table, f.name), _default(type(table), f.name, base)
        if value is None:
            if default is not None:
                out[f.name] = OFF
        elif dataclasses.is_dataclass(value):
            out[f.name] = _dump(value, _base(default, type(value)))
        elif f.init:
            listed = isinstance(value, tuple)
            out[f.name] = [_dump(v, None) if dataclasses.is_dataclass(v) else v for v in value] if listed else value
    return out


def _absolute(table: Any, *names: str) -> Any:
    """The table with absolute paths in these settings; paths of code stay."""
    given = {name: getattr(table, name) for name in names}
    paths = {n: os.path.abspath(os.path.expanduser(p)) for n, p in given.items() if p is not None and not is_path(p)}
    return dataclasses.replace(table, **paths) if paths else table
