"""Settings that check themselves: types, choices and ranges, on construction, both from TOML and from Python.

    @settings
    class Distill:
        steps: NonNegativeInt = 500
        optimizer: Literal["sgd", "adam"] = "adam"

    Distill(optimizer="Adam")
    # ConfigError: Distill.optimizer = "Adam": expected one of 'sgd', 'adam'; did you mean 'adam'?

A class may have `problems(self)`, which yields settings that contradict each other. A method checks itself in the same
way. Conflicts between a setting and the data or the models are not known here: `Method.fits(server)` reports them.

pydantic checks single values; this module adds what its dataclasses lack: messages that name the way out, and checks of
users' plain subclasses.
"""

import collections.abc
import dataclasses
import difflib
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import pydantic
from annotated_types import Ge, Gt, Le, Lt

from .errors import ConfigError

C = TypeVar("C", bound=type)
MOST = 2**31 - 1  # of an integer that declares no limit of its own: no count or size of a run is larger
MOST_64 = 2**63 - 1
OFF = "none"  # None in TOML, which has no null
UNIONS = (typing.Union, types.UnionType)
Problem = str  # "key = value: reason", with the key as the class spells it


class OfCohort:
    """Marker of a number for `Annotated`: of clients among those of one round."""


class OrInf:
    """Marker of a number for `Annotated`: infinity is allowed. (NaN never is.)"""


class Replaceable:
    """Marker of a field for `Annotated`: a user's own object with the same methods is also accepted."""


@dataclasses.dataclass(frozen=True)
class Hint:
    """Marker of a field for `Annotated`: text that an error adds in brackets, such as what 0 means."""

    text: str


# Common ranges.
NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
ByzantineCount = Annotated[int, Ge(0), OfCohort]  # Byzantine clients in a round's cohort
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]


class SettingsError(ConfigError, ValueError):
    """Invalid settings. `problems` name the keys as their class spells them; `str` puts the class name in front.

    `made` has the valid settings, and defaults for the others, so that other tables of a file can be checked as well.
    It is None if a setting without a default is missing."""

    def __init__(self, owner: str, problems: Iterable[Problem], made: Any = None):
        self.made = made
        self.problems = list(dict.fromkeys(problems))
        super().__init__("; ".join(f"{owner}.{p}" if owner else p for p in self.problems))


INVALID: Any = object()  # in the place of a value that the caller has refused itself


def problems_of(error: ConfigError) -> list[Problem]:
    """The problems in an error, each by itself."""
    return error.problems if isinstance(error, SettingsError) else [str(error)]


def same_source(a: Any, b: Any) -> bool:
    """True if two classes or functions are one definition: run again, or of a file imported by name and by path."""
    files = [getattr(sys.modules.get(x.__module__), "__file__", None) or x.__module__ for x in (a, b)]
    same = a.__module__ == b.__module__ or os.path.realpath(files[0]) == os.path.realpath(files[1])
    return same and a.__qualname__ == b.__qualname__


class Slot:
    """Base of settings that come in several kinds, such as the ways to upload a model.

    Each kind is a class with its mathematics, derived from that of the default. Its `kind` is the name by which a
    configuration chooses it, `[method.upload] kind = "low-bit"`: `kind: str = field(default="low-bit", init=False)`.
    A class without such a line has its full name as its kind.
    """

    kind: str
    BESIDE: typing.ClassVar[Mapping[str, str]] = {}  # keys that were once beside the slot, and their new names

    def __init_subclass__(cls) -> None:
        if "kind" not in vars(cls):
            cls.kind = f"{cls.__module__}.{cls.__qualname__}"

    @classmethod
    def kinds(cls) -> dict[str, type]:
        """The classes by kind: this one and those derived from it, a user's own included."""
        if "__annotations__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
            raise ConfigError(f"{cls.__qualname__} must be decorated with @settings")
        found: dict[str, type] = {cls.kind: cls}
        for derived in cls.__subclasses__():
            for kind, other in derived.kinds().items():
                if not same_source(found.setdefault(kind, other), other):
                    both = " and ".join(f"{c.__module__}.{c.__qualname__}" for c in (found[kind], other))
                    raise ConfigError(f"kind = {kind!r}: {both} have this kind; give one of them another")
                found[kind] = other
        return found

    def fits(self, server: Any) -> Iterable[Problem]:
        """Every reason why this cannot work with the server's data and models, each with a way out."""
        return ()

    def for_dry_run(self) -> typing.Self:
        """The same without rules that judge trained models: a dry run trains none."""
        return self


# ---- classes that check themselves ------------------------------------------------------------------


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: C) -> C:
    """Make `cls` a frozen dataclass that refuses invalid values on construction."""
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    return checks_itself(made)


def checks_itself(cls: C) -> C:
    """Make a dataclass and its subclasses refuse invalid values on construction. A second call changes nothing."""
    made: Any = cls
    own, assign = getattr(made, "__post_init__", None), made.__init__
    if not hasattr(own, "checks"):

        def post_init(self: Any) -> None:
            _check(self, own)

        post_init.checks = True  # type: ignore[attr-defined]
        made.__post_init__ = post_init
    if not hasattr(assign, "__wrapped__"):

        @functools.wraps(assign)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made: Any = type(self)
            if unknown := [k for k in kwargs if k not in hints(made)]:
                raise SettingsError(made.__name__, [unknown_key(made, k, kwargs[k]) for k in unknown])
            assign(self, *args, **kwargs)
            if own is None:  # otherwise the dataclass calls it
                self.__post_init__()

        made.__init__ = init
    return cls


def _check(made: Any, own: Any) -> None:
    """Convert values to their declared types; refuse those that are wrong, and settings that contradict each other.
    A class's `own` `__post_init__` comes between the two, so it sees checked fields."""
    cls: Any = type(made)
    found: list[Problem] = []
    invalid: set[str] = set()
    for name, wanted in hints(cls).items():
        given = getattr(made, name)
        try:
            value = checked(wanted, given, name)
        except SettingsError as e:
            found += e.problems
            invalid.add(name)
            value = default_of(cls.__dataclass_fields__[name])
        if value is not given:
            object.__setattr__(made, name, value)
    if any(value is dataclasses.MISSING for value in vars(made).values()):
        raise SettingsError(cls.__name__, found)
    if own is not None and not invalid:
        own(made)
    said: Iterable[Problem] = getattr(made, "problems", tuple)()
    found += [p for p in said if not any(re.search(rf"\b{name}\b", p) for name in invalid)]
    if found or invalid:
        raise SettingsError(cls.__name__, found, made)


def default_of(f: dataclasses.Field[Any]) -> Any:
    """The default of a field; MISSING if it has none."""
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The declared types of the fields of a settings class, with their ranges."""
    every = typing.get_type_hints(cls, include_extras=True)
    return {f.name: every[f.name] for f in dataclasses.fields(cls) if f.init}


# ---- declared types ---------------------------------------------------------------------------------


class Declared(NamedTuple):
    """A declared type in parts."""

    inner: Any  # without Annotated, and without None where one type is left
    optional: bool  # None is allowed
    markers: tuple[Any, ...]  # of Annotated, also inside an optional type

    def has(self, marker: type) -> bool:
        """True if the type has this marker: the class or an instance of it."""
        return any(m is marker or isinstance(m, marker) for m in self.markers)


def declared(wanted: Any) -> Declared:
    """The parts of a declared type. (Not cached: types with the same choices in another order are equal.)"""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        inner = declared(args[0])
        return inner._replace(markers=(*args[1:], *inner.markers))
    if origin not in UNIONS:
        return Declared(wanted, False, ())
    kinds = [declared(a) for a in args if a is not type(None)]
    inner = kinds[0].inner if len(kinds) == 1 else wanted
    return Declared(inner, len(kinds) < len(args), tuple(m for kind in kinds for m in kind.markers))


def slot_of(wanted: Any) -> type[Slot] | None:
    """The class of a field's slot, also of a tuple of them."""
    inner = declared(wanted).inner
    inner = declared(typing.get_args(inner)[0]).inner if typing.get_origin(inner) is tuple else inner
    return inner if isinstance(inner, type) and issubclass(inner, Slot) else None


def table_of(wanted: Any) -> type | None:
    """The settings class of a field, if it holds one."""
    inner = declared(wanted).inner
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


# ---- values -----------------------------------------------------------------------------------------


def checked(wanted: Any, value: Any, key: str) -> Any:
    """`value` converted to the declared type `wanted`. Raises SettingsError with the reason if that is not possible."""
    if value is INVALID:
        raise SettingsError("", ())
    anything, table, most, adapter = _reading(wanted)
    if anything or (table and isinstance(value, table)):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if (huge := _above(value, most)) is not None:
        raise SettingsError("", [f"{key} = {show(huge)}: expected an integer of at most {most:,}"])
    if adapter is not None:
        try:
            return adapter.validate_python(list(value) if isinstance(value, tuple) else value, strict=True)
        except pydantic.ValidationError as e:
            raise SettingsError("", [_explain(wanted, value, key, e)]) from None
    assert table is not None
    if value is None and declared(wanted).optional:
        return None
    raise SettingsError("", [f"{key} = {show(value)}: expected {_article(table.__name__)}"])


@functools.cache
def _reading(wanted: Any) -> tuple[bool, type | None, int, pydantic.TypeAdapter[Any] | None]:
    """The check of a value of the type: whether it may be anything, the class of its table, its largest integer, and
    pydantic's part, which a table does not have."""
    kind, table = declared(wanted), table_of(wanted)
    anything = kind.has(Replaceable) or getattr(kind.inner, "_is_protocol", False)
    most = MOST_64 if kind.inner is float or kind.has(Le) else MOST
    if anything or table:
        return anything, table, most, None
    if typing.get_origin(kind.inner) is tuple:  # strict, pydantic takes no list for one
        wanted = Annotated[wanted, pydantic.BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
    config = pydantic.ConfigDict(allow_inf_nan=kind.has(OrInf), arbitrary_types_allowed=True)
    return False, None, most, pydantic.TypeAdapter(wanted, config=config)


def _above(value: Any, most: int) -> int | None:
    """An integer in a value that is larger than `most`, of either sign; None if there is none."""
    if isinstance(value, int):
        return value if abs(value) > most else None
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for v in inside if (found := _above(v, most)) is not None), None)


def _explain(wanted: Any, value: Any, key: str, error: pydantic.ValidationError) -> Problem:
    inside = error.errors(include_url=False)[0]["loc"]
    inner = declared(wanted).inner
    if inside and isinstance(value, list | tuple) and isinstance(inside[0], int):
        key, value, wanted = f"{key}[{inside[0]}]", value[inside[0]], typing.get_args(inner)[0]
        inner = declared(wanted).inner
    text = f"{key} = {show(value)}: expected {words(wanted)}"
    text += "".join(f" ({m.text})" for m in declared(wanted).markers if isinstance(m, Hint))
    if choices := _choices(wanted):
        near = difflib.get_close_matches(str(value), choices, 1, 0.5)
        near = near or [c for c in choices if c.lower() == str(value).lower()]
        return text + (f"; did you mean {near[0]!r}?" if near else "")
    if typing.get_origin(inner) in (list, tuple) and not isinstance(value, list | tuple | dict):
        return f"{text}: write [{show(value)}]"
    if isinstance(value, str) and inner in (int, float, bool) and value.strip():
        return f"{text}, without quotes"
    return text


def _choices(wanted: Any) -> list[str]:
    """The values of a setting that has a fixed set of choices; empty otherwise."""
    if typing.get_origin(wanted) is Literal:
        return [str(a) for a in typing.get_args(wanted)]
    inside = typing.get_args(wanted) if typing.get_origin(wanted) in (Annotated, *UNIONS) else ()
    return [c for a in inside for c in _choices(a)]


def unknown_key(cls: type, key: str, value: Any, near: Iterable[str] = ()) -> Problem:
    """The message for a key that `cls` does not have: with its new place, or the nearest one (`near`, where known)."""
    names = list(hints(cls))
    if elsewhere := place_of(cls, key):
        return f"{key} = {show(value)}: {elsewhere}"
    near = list(near) or difflib.get_close_matches(key, names, 1)
    hint = f"did you mean {' or '.join(repr(n) for n in near[:2])}?" if near else f"the settings are {', '.join(names)}"
    return f"{key} = {show(value)}: there is no such setting; {hint}"


def place_of(cls: type, key: str) -> str:
    """The place of a key that `cls` does not have: a slot, or another kind of this one; "" if there is none."""
    if key in (renamed := getattr(cls, "RENAMED", {})):
        return f"this setting is now called {renamed[key]!r}"
    own = () if issubclass(cls, Slot) else (cls,)
    for owner in (*own, *filter(None, map(slot_of, hints(cls).values()))):
        if key in (beside := getattr(owner, "BESIDE", {})):
            return f"this setting is now {beside[key]}"
    if issubclass(cls, Slot):
        first = [c for c in cls.__mro__ if issubclass(c, Slot)][-2]  # the last one is Slot itself
        if kinds := [kind for kind, other in first.kinds().items() if key in hints(other)]:
            return f"only kind = {' or '.join(map(repr, kinds))} has this setting, not kind = {cls.kind!r}"
    return ""


# ---- types and values as text -----------------------------------------------------------------------

SINGLE = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
SEVERAL = {int: "integers", float: "numbers", bool: "booleans", str: "strings"}


def words(wanted: Any) -> str:
    """The values that a setting accepts, as text."""
    inner, optional, _ = declared(wanted)
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if inner in SINGLE:
        text = SINGLE[inner]
    elif origin is Literal:
        text = "one of " + ", ".join(repr(a) for a in args)
    elif origin in (list, tuple):
        other = "tables" if table_of(args[0]) else "values"
        several = SEVERAL.get(declared(args[0]).inner, ", ".join(map(repr, _choices(args[0]))) or other)
        text = f"a list of {several} {_limits(args[0])}".rstrip()
    elif origin is dict or table_of(inner):
        text = "a table"
    elif origin in UNIONS:
        text = " or ".join(words(a) for a in args if a is not type(None))
    elif origin is collections.abc.Callable:
        text = "a function"
    else:
        text = _article(inner.__name__) if isinstance(inner, type) else str(inner)
    if origin not in UNIONS:  # its members already printed their own limits
        text = f"{text} {_limits(wanted)}".rstrip()
    return f'{text} (or "{OFF}")' if optional else text


def _limits(wanted: Any) -> str:
    """The range of a setting, as text: "above 0 and of at most 1"."""
    said = {Gt: ("above", "gt"), Ge: ("of at least", "ge"), Lt: ("below", "lt"), Le: ("of at most", "le")}
    found = [(said[type(m)], m) for m in declared(wanted).markers if type(m) in said]
    numbers = [(word, getattr(m, name)) for (word, name), m in found]
    return " and ".join(f"{word} {n if isinstance(n, int) else f'{n:g}'}" for word, n in numbers)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def show(value: Any) -> str:
    """A value in one short line, as TOML writes it."""
    if isinstance(value, tuple):
        value = list(value)
    plain = isinstance(value, bool | str | list | dict)
    text = json.dumps(value, ensure_ascii=False, default=str) if plain else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
