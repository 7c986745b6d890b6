"""The [paper] table of a recipe: which results table or figure it reproduces, and which settings make which cell.

A recipe is the configuration of one cell; every other cell is that configuration with the settings of its column and of
its row. The printed numbers stand beside the settings that are meant to give them, so `solera reproduce` can run a
table and show both. A plain `solera run` ignores the table. docs/recipes.md describes the form.
"""

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from ..core.errors import ConfigError
from ..runs.config import recipe_names, recipe_text
from ..runs.dotted import flat, show

Value = Literal["accuracy", "rounds", "parameters", "bytes", "megabytes", "relative", "hours", "size", "partition"]
PAPERS = {
    "feddf": "FedDF (Lin et al., NeurIPS 2020)",
    "fedet": "Fed-ET (Cho et al., IJCAI 2022)",
    "fedeed": "FedEED (anonymous ICLR submission)",
    "mnfl": "MNFL, also called KT-pFL (Zhang et al., NeurIPS 2021)",
}
SCALES = ("full", "small", "tiny")
NOT_PRINTED = "-"
PRINTED = re.compile(r"(-|N/A|\d+(\.\d+)?([eE]\d+)?( ± \d*\.?\d+)?)")
ITEM = re.compile(r"(Table|Figure|Section|Appendix) [A-Z]?\d*(\.\d+)?( \([a-z]\))?")
AT = ("last", "best")  # or a number of rounds


@dataclasses.dataclass(frozen=True)
class Part:
    """A row or a column: what its cells have in common."""

    name: str
    set: dict[str, Any]  # settings by dotted key, on top of the recipe
    measure: str | None = None  # what is measured; None: as the table says
    at: str | int | None = None  # in which round
    target: float | None = None  # an accuracy that is to be reached
    skip: str = ""  # why its cells cannot be run
    tune: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # settings that the paper searched over
    printed: tuple[str, ...] = ()  # of a row: the paper's numbers, one for each column
    rows: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # of a column: settings of single cells
    tuned_as: str = ""  # of a row: another one, whose tuned settings it has


@dataclasses.dataclass(frozen=True)
class Shrink:
    """What one scale changes beyond the rules for all recipes."""

    set: dict[str, Any]
    stand_ins: dict[str, str]  # what is replaced -> by what
    models: dict[str, str]  # the same for models, which are replaced wherever a cell has them
    skip: str = ""
    target: float | None = None  # an accuracy that is within reach at this scale, in place of the paper's


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a table: how to get it, and what the paper says."""

    row: str
    column: str
    printed: str
    set: dict[str, Any]
    value: Value
    measure: str
    at: str | int
    target: float | None
    skip: str
    tune: dict[str, list[Any]]
    tuned_as: str  # the row whose tuned settings it has


@dataclasses.dataclass(frozen=True)
class Paper:
    """A results table or a figure."""

    recipe: str
    paper: str  # a key of PAPERS
    item: str  # Table 2, Figure 4
    also: tuple[str, ...]  # other tables or figures that show the same runs
    title: str
    value: Value
    measure: str
    at: str | int
    target: float | None
    seeds: int
    said: str  # what the paper says of it, where it prints no numbers
    open: tuple[str, ...]  # what the paper leaves open or contradicts
    rows: tuple[Part, ...]
    columns: tuple[Part, ...]
    scales: dict[str, Shrink]

    @property
    def names(self) -> list[str]:
        """What the table is called on the command line: feddf/table2, feddf/fig6."""
        found = [i.lower().replace("figure", "fig").split("(")[0].replace(" ", "") for i in (self.item, *self.also)]
        return [f"{self.paper}/{name}" for name in found]

    def cells(self) -> Iterator[Cell]:
        """All cells, row by row. A row counts more than its column, and what the column says of this row most."""
        for row in self.rows:
            for i, column in enumerate(self.columns):
                target = self.target if column.target is None else column.target
                yield Cell(
                    row.name,
                    column.name,
                    row.printed[i] if row.printed else NOT_PRINTED,
                    column.set | row.set | column.rows.get(row.name, {}),
                    self.value,
                    row.measure or column.measure or self.measure,
                    next((at for at in (row.at, column.at) if at is not None), self.at),
                    target if row.target is None else row.target,
                    row.skip or column.skip,
                    column.tune | row.tune,
                    row.tuned_as or row.name,
                )


def paper_names() -> list[str]:
    """The recipes that have a [paper] table."""
    return [name for name in recipe_names() if "paper" in tomllib.loads(recipe_text(name))]


def load_paper(recipe: str) -> Paper:
    """The [paper] table of a recipe. Raises ConfigError if there is none, or if it is invalid."""
    try:
        given = tomllib.loads(recipe_text(recipe)).get("paper")
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{recipe} is not valid TOML: {e}") from None
    if given is None:
        near = difflib.get_close_matches(recipe, paper_names(), 1)
        hint = f"did you mean {near[0]!r}?" if near else "`solera reproduce --list` names those that have one"
        raise ConfigError(f"{recipe} reproduces no table or figure: it has no [paper] table; {hint}")
    return read_paper(given, recipe)


def read_paper(given: Any, recipe: str) -> Paper:
    """A [paper] table as read from TOML, checked."""
    table = _Table(given, f"{recipe}: paper")
    paper = table.take("paper", str)
    if paper not in PAPERS:
        raise ConfigError(f"{recipe}: paper.paper = {show(paper)}: expected one of {', '.join(PAPERS)}")
    item = table.take("item", str)
    if wrong := [i for i in (item, *table.left.get("also", [])) if not ITEM.fullmatch(str(i))]:
        raise ConfigError(f"{recipe}: paper.item = {show(wrong[0])}: expected a name like Table 2 or Figure 6 (a)")
    also = tuple(table.take("also", list, []))
    value = table.take("value", str, "accuracy")
    if value not in get_args(Value):
        raise ConfigError(f"{recipe}: paper.value = {show(value)}: expected one of {', '.join(get_args(Value))}")
    columns = tuple(_part(p, f"{recipe}: paper.column", None) for p in table.take("column", list, [{"name": "result"}]))
    rows = tuple(_part(p, f"{recipe}: paper.row", len(columns)) for p in table.take("row", list))
    for what, parts in (("row", rows), ("column", columns)):
        names = [p.name for p in parts]
        if not parts or len(set(names)) < len(names):
            raise ConfigError(f"{recipe}: paper.{what}: at least one, each with a name of its own; not {show(names)}")
    known, searched = {r.name for r in rows}, {r.name for r in rows if r.tune}
    for where, given_, allowed in (
        *((f"column {c.name!r}: rows", c.rows, known) for c in columns),
        *((f"row {r.name!r}: tuned_as", [r.tuned_as], searched | {""}) for r in rows),
    ):
        if strange := [name for name in given_ if name not in allowed]:
            raise ConfigError(f"{recipe}: paper.{where}: {show(strange[0])} is none of {', '.join(sorted(allowed))}")
    found = Paper(
        recipe,
        paper,
        item,
        also,
        table.take("title", str),
        value,
        table.take("measure", str, "main"),
        _at(table.take("at", (str, int), "last"), table.where),
        table.take("target", float, None),
        table.take("seeds", int, 3),
        table.take("said", str, ""),
        tuple(table.take("open", list, [])),
        rows,
        columns,
        {scale: _shrink(table.take(scale, dict, {}), f"{table.where}.{scale}") for scale in SCALES[1:]},
    )
    table.end()
    if value in ("rounds", "parameters", "bytes") and any(c.target is None for c in found.cells()):
        raise ConfigError(f"{recipe}: paper.value = {value} counts until a target: set paper.target, or one by column")
    return found


def _part(given: Any, where: str, width: int | None) -> Part:
    """A row (`width` is the number of columns) or a column (None)."""
    table = _Table(given, where)
    name = table.take("name", str)
    table.where = f"{where} {name!r}"
    at = table.take("at", (str, int), None)
    printed = tuple(map(_printed, table.take("printed", list, []))) if width is not None else ()
    part = Part(
        name,
        flat(table.take("set", dict, {})),
        table.take("measure", str, None),
        at if at is None else _at(at, table.where),
        table.take("target", float, None),
        table.take("skip", str, ""),
        flat(table.take("tune", dict, {})),
        printed,
        {row: flat(settings) for row, settings in table.take("rows", dict, {}).items()} if width is None else {},
        table.take("tuned_as", str, "") if width is not None else "",
    )
    table.end()
    if printed and len(printed) != width:
        raise ConfigError(f'{table.where}: {len(printed)} printed numbers for {width} columns; write "-" for none')
    for text in printed:
        if not PRINTED.fullmatch(text):
            raise ConfigError(f"{table.where}: printed {text!r}: expected a number, '80.69 ± 0.43', 'N/A' or '-'")
    for key, values in part.tune.items():
        if not isinstance(values, list) or len(values) < 2:
            raise ConfigError(
                f"{table.where}: tune.{key} = {show(values)}: expected a list of the values searched over"
            )
    return part


def _printed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shrink(given: Mapping[str, Any], where: str) -> Shrink:
    table = _Table(given, where)
    found = Shrink(
        flat(table.take("set", dict, {})),
        dict(table.take("stand_ins", dict, {})),
        dict(table.take("models", dict, {})),
        table.take("skip", str, ""),
        table.take("target", float, None),
    )
    table.end()
    return found


def _at(value: str | int, where: str) -> str | int:
    if value in AT or (isinstance(value, int) and value > 0):
        return value
    raise ConfigError(f"{where}: at = {show(value)}: expected last, best or a number of rounds")


class _Table:
    """Takes the keys out of a table and refuses those that are left."""

    def __init__(self, given: Any, where: str):
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} = {show(given)}: expected a table")
        self.left, self.where = dict(given), where
        self.known: list[str] = []

    def take(self, key: str, kind: Any, *default: Any) -> Any:
        self.known.append(key)
        if key not in self.left:
            if default:
                return default[0]
            raise ConfigError(f"{self.where}: {key} is missing")
        value = self.left.pop(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"{self.where}: {key} = {show(value)}: wrong type")
        return value

    def end(self) -> None:
        for key in self.left:
            near = difflib.get_close_matches(key, self.known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self.known)}"
            raise ConfigError(f"{self.where}: there is no {key!r}; {hint}")


__all__ = [
    "NOT_PRINTED",
    "PAPERS",
    "SCALES",
    "Cell",
    "Paper",
    "Part",
    "Shrink",
    "load_paper",
    "paper_names",
    "read_paper",
]
