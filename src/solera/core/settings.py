"""Settings that check themselves: types, choices and ranges, on construction, both from TOML and from Python.

    @settings
    class Distill:
        steps: NonNegativeInt = 500
        optimizer: Literal["sgd", "adam"] = "adam"

    Distill(optimizer="Adam")
    # ConfigError: Distill.optimizer = "Adam": expected one of 'sgd', 'adam'; did you mean 'adam'?

A class may have `problems(self)`, which yields settings that contradict each other. `register` makes a method check
itself in the same way. Conflicts between a setting and the data or the models are not known here: `Method.fits(server)`
reports them.
"""

import collections.abc
import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pydantic
from annotated_types import Ge, Gt, Le, Lt

from .errors import ConfigError

C = TypeVar("C", bound=type)
MOST = 2**31 - 1  # of an integer that declares no limit of its own: no count or size of a run is larger
MOST_64 = 2**63 - 1
OFF = "none"  # how None is written in TOML, which has no null
Problem = str  # "key = value: reason", with the key as the class spells it


class OfCohort:
    """Marker of a number for `Annotated`: of clients among those of one round."""


# Common ranges.
NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Liars = Annotated[int, Ge(0), OfCohort]  # how many clients of a round may lie
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]


class SettingsError(ConfigError, ValueError):
    """Invalid settings. `problems` name the keys as their class spells them; `str` puts the class name in front.

    `made` has the valid ones of them, and defaults: so that more can be said about the other tables of a file."""

    def __init__(self, owner: str, problems: Iterable[Problem], made: Any = None):
        self.made = made
        self.problems = list(dict.fromkeys(problems))
        super().__init__("; ".join(f"{owner}.{p}" if owner else p for p in self.problems))


def problems_of(error: ConfigError) -> list[Problem]:
    """What an error says is wrong, each by itself."""
    return error.problems if isinstance(error, SettingsError) else [str(error)]


class Replaceable:
    """Marker of a field for `Annotated`: a user's own object with the same methods is also accepted."""


class Slot:
    """Base of settings that come in several kinds, such as the ways to upload a model.

    Each kind is a class with its mathematics, derived from that of the default. Its `kind` is the name by which a
    configuration chooses it, `[method.upload] kind = "low-bit"`: `kind: str = field(default="low-bit", init=False)`.
    A class without such a line has its full name as its kind.
    """

    kind: str
    BESIDE: typing.ClassVar[Mapping[str, str]] = {}  # keys that once stood beside the slot, and what they are now

    def __init_subclass__(cls) -> None:
        if "kind" not in vars(cls):
            cls.kind = f"{cls.__module__}.{cls.__qualname__}"

    @classmethod
    def kinds(cls) -> dict[str, type]:
        """The classes by kind: this one and those derived from it, a user's own included."""
        found: dict[str, type] = {cls.kind: cls}
        for derived in cls.__subclasses__():
            found |= derived.kinds()
        return found

    def fits(self, server: Any) -> Iterable[Problem]:
        """Every reason why this cannot work with the server's data and models, each with a way out."""
        return ()


class OrInf:
    """Marker of a number for `Annotated`: infinity is allowed. (NaN never is.)"""


@dataclasses.dataclass(frozen=True)
class Hint:
    """Marker of a field for `Annotated`: text that an error adds in brackets, such as what 0 means."""

    text: str


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: C) -> C:
    """Make `cls` a frozen dataclass that refuses invalid values on construction."""
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    return checks_itself(made)


def checks_itself(cls: C) -> C:
    """Make a dataclass and its subclasses refuse invalid values on construction. A second call changes nothing."""
    made: Any = cls
    if made.__dict__.get("__post_init__") in _CHECKING:
        return cls
    if "__init__" in made.__dict__ and made.__init__ not in _CHECKING:  # an inherited __init__ already checks
        made.__init__ = _checking_init(made.__init__)
    made.__post_init__ = _checking_post_init(getattr(made, "__post_init__", None))
    return cls


_CHECKING: set[Any] = set()  # every __init__ and __post_init__ that ends with a check


def _checking_init(assign: Any) -> Any:
    @functools.wraps(assign)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made: Any = type(self)
        known = hints(made)
        if unknown := [k for k in kwargs if k not in known]:
            raise SettingsError(made.__name__, [unknown_key(made, k, kwargs[k]) for k in unknown])
        assign(self, *args, **kwargs)
        if made.__init__ is init or made.__init__ not in _CHECKING:
            check(self)

    _CHECKING.add(init)
    return init


def _checking_post_init(own: Any) -> Any:
    """For a class's own `__post_init__`, which then sees checked fields; and for plain dataclasses that inherit from
    settings: their new `__init__` ends with it."""

    def post_init(self: Any) -> None:
        if own is not None:
            _check_fields(self)
            own(self)
        if type(self).__init__ not in _CHECKING:
            check(self)

    _CHECKING.add(post_init)
    return post_init


def check(made: Any) -> None:
    """Refuse values of the wrong type or out of range, and settings that contradict each other."""
    _check_fields(made)
    if found := list(getattr(made, "problems", tuple)()):
        raise SettingsError(type(made).__name__, found)


def _check_fields(made: Any) -> None:
    """Refuse values of the wrong type or out of range; convert numbers and lists to their declared types."""
    found: list[Problem] = []
    cls: Any = type(made)
    for name, wanted in hints(cls).items():
        given = getattr(made, name)
        try:
            value = checked(wanted, given, name)
        except SettingsError as e:
            found += e.problems
        else:
            if value is not given:
                object.__setattr__(made, name, value)
    if found:
        raise SettingsError(cls.__name__, found)


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The declared types of the fields of a settings class, with their ranges."""
    every = typing.get_type_hints(cls, include_extras=True)
    return {f.name: every[f.name] for f in dataclasses.fields(cls) if f.init}


def checked(wanted: Any, value: Any, key: str) -> Any:
    """`value` converted to the declared type `wanted`. Raises SettingsError with the reason if that is not possible."""
    replaceable, table, adapter = _reading(wanted)
    if replaceable or (table is not None and isinstance(value, table)):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    own = strip(wanted) is float or any(isinstance(m, Le) for m in _markers(wanted))
    if (huge := _above(value, MOST_64 if own else MOST)) is not None:
        raise SettingsError("", [f"{key} = {show(huge)}: expected an integer of at most {MOST_64 if own else MOST:,}"])
    if adapter is not None:
        try:
            return adapter.validate_python(list(value) if isinstance(value, tuple) else value, strict=True)
        except pydantic.ValidationError as e:
            raise SettingsError("", [_explain(wanted, value, key, e)]) from None
    assert table is not None
    if value is None and optional(wanted):
        return None
    raise SettingsError("", [f"{key} = {show(value)}: expected {article(table.__name__)}"])


def _above(value: Any, most: int) -> int | None:
    """An integer in a value that is larger than `most`, of either sign; None if there is none."""
    if isinstance(value, int):
        return value if abs(value) > most else None
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for v in inside if (found := _above(v, most)) is not None), None)


def at_once(wanted: Any) -> bool:
    """Whether a setting counts clients of one round."""
    return any(m is OfCohort or isinstance(m, OfCohort) for m in _markers(wanted))


@functools.cache
def _reading(wanted: Any) -> tuple[bool, type | None, pydantic.TypeAdapter[Any] | None]:
    """How a value of the type is checked: not at all, as a table of settings, or by pydantic."""
    inner, markers = strip(wanted), list(_markers(wanted))
    if any(isinstance(m, Replaceable) for m in markers) or getattr(inner, "_is_protocol", False):
        return True, None, None
    if (table := table_of(wanted)) is not None:
        return False, table, None
    infinite = any(m is OrInf or isinstance(m, OrInf) for m in markers)
    config = pydantic.ConfigDict(allow_inf_nan=infinite, arbitrary_types_allowed=True)
    return False, None, pydantic.TypeAdapter(_lists(wanted), config=config)


def _lists(wanted: Any) -> Any:
    """The type, with lists accepted as tuples: pydantic's strict mode does not convert them."""
    return Annotated[wanted, pydantic.BeforeValidator(_as_tuple)] if _is_tuple(strip(wanted)) else wanted


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_tuple(wanted: Any) -> bool:
    return typing.get_origin(wanted) is tuple


def _explain(wanted: Any, value: Any, key: str, error: pydantic.ValidationError) -> Problem:
    inside = error.errors(include_url=False)[0]["loc"]
    inner = strip(wanted)
    if inside and isinstance(value, list | tuple) and isinstance(inside[0], int):
        key, value, wanted = f"{key}[{inside[0]}]", value[inside[0]], typing.get_args(inner)[0]
        inner = strip(wanted)
    text = f"{key} = {show(value)}: expected {words(wanted)}"
    text += "".join(f" ({m.text})" for m in _markers(wanted) if isinstance(m, Hint))
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
    kinds = (Annotated, typing.Union, types.UnionType)
    return [c for a in typing.get_args(wanted) for c in _choices(a)] if typing.get_origin(wanted) in kinds else []


def unknown_key(cls: type, key: str, value: Any, near: Iterable[str] = ()) -> Problem:
    """The message for a key that `cls` does not have: with its new place, or the nearest one (`near`, where known)."""
    names = list(hints(cls))
    if elsewhere := place_of(cls, key):
        return f"{key} = {show(value)}: {elsewhere}"
    near = list(near) or difflib.get_close_matches(key, names, 1)
    hint = f"did you mean {' or '.join(repr(n) for n in near[:2])}?" if near else f"the settings are {', '.join(names)}"
    return f"{key} = {show(value)}: there is no such setting; {hint}"


def place_of(cls: type, key: str) -> str:
    """Where a key is that `cls` does not have: in one of its slots, or in another kind of this one; "" if nowhere."""
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


def strip(wanted: Any) -> Any:
    """The type without Annotated and without its None."""
    if typing.get_origin(wanted) is Annotated:
        return strip(typing.get_args(wanted)[0])
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        kinds = [a for a in typing.get_args(wanted) if a is not type(None)]
        return strip(kinds[0]) if len(kinds) == 1 else wanted
    return wanted


def optional(wanted: Any) -> bool:
    """Whether None is allowed."""
    if typing.get_origin(wanted) is Annotated:
        return optional(typing.get_args(wanted)[0])
    return typing.get_origin(wanted) in (typing.Union, types.UnionType) and type(None) in typing.get_args(wanted)


def slot_of(wanted: Any) -> type[Slot] | None:
    """The class of a field's slot, also of a tuple of them."""
    inner = strip(wanted)
    inner = strip(typing.get_args(inner)[0]) if _is_tuple(inner) else inner
    return inner if isinstance(inner, type) and issubclass(inner, Slot) else None


def table_of(wanted: Any) -> type | None:
    """The settings class of a field, if it holds one."""
    inner = strip(wanted)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def _markers(wanted: Any) -> Iterator[Any]:
    """The markers in Annotated, also inside an optional type."""
    if typing.get_origin(wanted) is Annotated:
        inner, *markers = typing.get_args(wanted)
        yield from markers
        yield from _markers(inner)
    elif typing.get_origin(wanted) in (typing.Union, types.UnionType):
        for kind in typing.get_args(wanted):
            yield from _markers(kind)


def words(wanted: Any) -> str:
    """What a setting accepts, as text."""
    inner = strip(wanted)
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    many = {int: "integers", float: "numbers", bool: "booleans", str: "strings"}
    if inner in plain:
        text = plain[inner]
    elif typing.get_origin(inner) is Literal:
        text = "one of " + ", ".join(repr(a) for a in typing.get_args(inner))
    elif typing.get_origin(inner) in (list, tuple):
        member = typing.get_args(inner)[0]
        other = "tables" if table_of(member) else "values"
        kinds = many.get(strip(member), ", ".join(map(repr, _choices(member))) or other)
        text = " ".join(["a list of", kinds, limits(member)]).rstrip()
    elif typing.get_origin(inner) is dict or table_of(inner):
        text = "a table"
    elif typing.get_origin(inner) in (typing.Union, types.UnionType):
        text = " or ".join(words(a) for a in typing.get_args(inner) if a is not type(None))
    elif typing.get_origin(inner) is collections.abc.Callable:
        text = "a function"
    else:
        text = article(inner.__name__) if isinstance(inner, type) else str(inner)
    text = f"{text} {limits(wanted)}".rstrip()
    return f'{text} (or "{OFF}")' if optional(wanted) else text


def limits(wanted: Any) -> str:
    """The range of a setting, as text: "above 0 and of at most 1"."""
    said = {Gt: ("above", "gt"), Ge: ("of at least", "ge"), Lt: ("below", "lt"), Le: ("of at most", "le")}
    found = [(said[type(m)], m) for m in _markers(wanted) if type(m) in said]
    return " and ".join(f"{word} {_number(getattr(m, name))}" for (word, name), m in found)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def article(name: str) -> str:
    """The name with "a" or "an" in front."""
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def show(value: Any) -> str:
    """A value in one short line, as TOML writes it."""
    if isinstance(value, tuple):
        value = list(value)
    plain = isinstance(value, bool | str | list | dict)
    text = json.dumps(value, ensure_ascii=False, default=str) if plain else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
