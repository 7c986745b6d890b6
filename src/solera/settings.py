"""Settings that check themselves: types, choices and ranges, on construction, from TOML and from Python alike.

    @settings
    class Distill:
        steps: Annotated[int, Ge(0)] = 500
        optimizer: Literal["sgd", "adam"] = "adam"

    Distill(optimizer="Adam")
    # ConfigError: Distill.optimizer = "Adam": one of 'sgd', 'adam' is wanted; did you mean 'adam'?

A class may have `problems(self)`, which yields what is wrong between several of its settings, and `RENAMED`, old
spellings with the new ones. What concerns a setting together with the data or the models is not known here: that is
`Method.fits`.
"""

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import annotated_types
import pydantic

from .errors import ConfigError

C = TypeVar("C", bound=type)
OFF = "none"  # how None is written in TOML, which has no null
Problem = str  # "key = value: why", with the key as the class spells it


class SettingsError(ConfigError, ValueError):
    """Settings that cannot be. `problems` name the keys as their class spells them; `str` puts the class in front."""

    def __init__(self, owner: str, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__("; ".join(f"{owner}.{p}" for p in self.problems))


class Replaceable:
    """Marker of a field for `Annotated`: an object of the user's own with the same methods may take its place."""


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: C) -> C:
    """Make `cls` a frozen dataclass that refuses wrong values when it is made."""
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    assign = made.__init__

    @functools.wraps(assign)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        fields = [f.name for f in dataclasses.fields(self) if f.init]
        if unknown := [k for k in kwargs if k not in fields]:
            raise SettingsError(cls.__name__, [unknown_key(type(self), k, kwargs[k]) for k in unknown])
        assign(self, *args, **kwargs)
        if type(self) is made:  # a subclass that is settings too checks everything itself
            check(self)

    made.__init__ = init
    return made


def check(made: Any) -> None:
    """Refuse values of the wrong type or out of range; put numbers and lists into their declared form."""
    found: list[Problem] = []
    cls: Any = type(made)
    for name, wanted in hints(cls).items():
        try:
            object.__setattr__(made, name, checked(wanted, getattr(made, name), name))
        except SettingsError as e:
            found += e.problems
    if not found and hasattr(made, "problems"):
        found = list(made.problems())
    if found:
        raise SettingsError(cls.__name__, found)


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The declared types of a settings class's fields, with their ranges."""
    every = typing.get_type_hints(cls, include_extras=True)
    return {f.name: every[f.name] for f in dataclasses.fields(cls) if f.init}


def checked(wanted: Any, value: Any, key: str) -> Any:
    """`value` in the form that `wanted` declares; refused with the reason where it cannot be had."""
    table = table_of(wanted)
    if table is not None:
        if value is None and optional(wanted):
            return None
        if isinstance(value, table) or any(isinstance(m, Replaceable) for m in _markers(wanted)):
            return value
        raise SettingsError("", [f"{key} = {show(value)}: {article(table.__name__)} is wanted"])
    try:
        return _adapter(wanted).validate_python(list(value) if isinstance(value, tuple) else value, strict=True)
    except pydantic.ValidationError as e:
        raise SettingsError("", [_explain(wanted, value, key, e)]) from None


@functools.cache
def _adapter(wanted: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(_lists(wanted), config=pydantic.ConfigDict(allow_inf_nan=False))


def _lists(wanted: Any) -> Any:
    """The type with a tuple taken from any list: strict checking of Python values knows no list that is a tuple."""
    return typing.Annotated[wanted, pydantic.BeforeValidator(_as_tuple)] if _is_tuple(strip(wanted)) else wanted


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
    text = f"{key} = {show(value)}: {words(wanted)} is wanted"
    if typing.get_origin(inner) is Literal:
        near = difflib.get_close_matches(str(value), [str(a) for a in typing.get_args(inner)], 1, 0.5)
        near = near or [str(a) for a in typing.get_args(inner) if str(a).lower() == str(value).lower()]
        return text + (f"; did you mean {near[0]!r}?" if near else "")
    if typing.get_origin(inner) in (list, tuple) and not isinstance(value, list | tuple | dict):
        return f"{text}: write {key} = [{show(value)}]"
    if isinstance(value, str) and inner in (int, float, bool) and value.strip():
        return f"{text}, without quotes"
    return text


def unknown_key(cls: type, key: str, value: Any) -> Problem:
    """What to say of a key that `cls` does not have: its new spelling, or the nearest one."""
    names = list(hints(cls))
    renamed: Mapping[str, str] = getattr(cls, "RENAMED", {})
    if key in renamed:
        return f"{key} = {show(value)}: this setting is called {renamed[key]!r} now"
    near = difflib.get_close_matches(key, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    return f"{key} = {show(value)}: there is no such setting; {hint}"


# ---- types and values in words ----------------------------------------------------------------------


def strip(wanted: Any) -> Any:
    """The type without Annotated and without its None."""
    if typing.get_origin(wanted) is typing.Annotated:
        return strip(typing.get_args(wanted)[0])
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        kinds = [a for a in typing.get_args(wanted) if a is not type(None)]
        return strip(kinds[0]) if len(kinds) == 1 else wanted
    return wanted


def optional(wanted: Any) -> bool:
    """Whether None is allowed."""
    if typing.get_origin(wanted) is typing.Annotated:
        return optional(typing.get_args(wanted)[0])
    return typing.get_origin(wanted) in (typing.Union, types.UnionType) and type(None) in typing.get_args(wanted)


def table_of(wanted: Any) -> type | None:
    """The settings class that a field holds, if it holds one."""
    inner = strip(wanted)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def _markers(wanted: Any) -> Iterator[Any]:
    """What Annotated carries, also inside of an optional type."""
    if typing.get_origin(wanted) is typing.Annotated:
        inner, *markers = typing.get_args(wanted)
        yield from markers
        yield from _markers(inner)
    elif typing.get_origin(wanted) in (typing.Union, types.UnionType):
        for kind in typing.get_args(wanted):
            yield from _markers(kind)


def words(wanted: Any) -> str:
    """What a setting takes, in words."""
    inner = strip(wanted)
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    many = {int: "integers", float: "numbers", bool: "booleans", str: "strings"}
    if inner in plain:
        text = plain[inner]
    elif typing.get_origin(inner) is Literal:
        text = "one of " + ", ".join(repr(a) for a in typing.get_args(inner))
    elif typing.get_origin(inner) in (list, tuple):
        text = f"a list of {many.get(strip(typing.get_args(inner)[0]), 'values')}"
    elif typing.get_origin(inner) is dict or table_of(inner):
        text = "a table"
    elif typing.get_origin(inner) in (typing.Union, types.UnionType):
        text = " or ".join(words(a) for a in typing.get_args(inner) if a is not type(None))
    else:
        text = str(inner)
    text += "".join(f" {r}" for r in [limits(wanted)] if r)
    return f'{text} (or "{OFF}")' if optional(wanted) else text


def limits(wanted: Any) -> str:
    """The range of a setting, in words: "above 0 and at most 1"."""
    said = {
        annotated_types.Gt: ("above", "gt"),
        annotated_types.Ge: ("of at least", "ge"),
        annotated_types.Lt: ("below", "lt"),
        annotated_types.Le: ("of at most", "le"),
    }
    found = [
        f"{word} {getattr(m, name):g}" for m in _markers(wanted) for k, (word, name) in said.items() if type(m) is k
    ]
    return " and ".join(found)


def article(name: str) -> str:
    """The name with its article."""
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def show(value: Any) -> str:
    """A value in one short line, as TOML writes it."""
    if isinstance(value, tuple):
        value = list(value)
    plain = isinstance(value, bool | str | list | dict)
    text = json.dumps(value, ensure_ascii=False, default=str) if plain else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
