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
from typing import Any, Literal, TypeVar

from ..core.errors import ConfigError
from ..core.settings import SettingsError, settings
from ..runs.config import recipe_names, recipe_text
from ..runs.words import flat, show

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
Value = Literal["accuracy", "rounds", "parameters", "bytes", "megabytes", "relative", "hours", "size", "partition"]
At = Literal["last", "best"] | int  # or the number of a round
Settings = dict[str, Any]  # by dotted key
T = TypeVar("T")


@settings
class Part:
    """The common part of the cells of a row or a column."""

    name: str
    set: Settings = dataclasses.field(default_factory=dict)  # on top of the recipe
    measure: str | None = None  # what is measured; None: as the table says
    at: At | None = None  # in which round
    target: float | None = None  # an accuracy that is to be reached
    skip: str = ""  # why its cells cannot be run
    tune: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # settings that the paper searched over

    def problems(self) -> Iterator[str]:
        for key, values in self.tune.items():
            if len(values) < 2:
                yield f"tune.{key} = {show(values)}: expected a list of the values searched over"


@settings
class Row(Part):
    """A row of a table."""

    printed: tuple[str, ...] = ()  # the paper's numbers, one for each column
    tuned_as: str = ""  # another row, whose tuned settings it has

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for text in self.printed:
            if not PRINTED.fullmatch(text):
                yield f"printed {text!r}: expected a number, '80.69 ± 0.43', 'N/A' or '-'"


@settings
class Column(Part):
    """A column of a table."""

    rows: dict[str, Settings] = dataclasses.field(default_factory=dict)  # settings of single cells


@settings
class Shrink:
    """The changes of one scale beyond the rules for all recipes."""

    set: Settings = dataclasses.field(default_factory=dict)
    stand_ins: dict[str, str] = dataclasses.field(default_factory=dict)  # what is replaced -> by what
    models: dict[str, str] = dataclasses.field(default_factory=dict)  # likewise, wherever a cell has them
    skip: str = ""
    target: float | None = None  # an accuracy that is within reach at this scale, in place of the paper's


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a table: how to get it, and what the paper says."""

    row: str
    column: str
    printed: str
    set: Settings
    value: Value
    measure: str
    at: str | int
    target: float | None
    skip: str
    tune: dict[str, list[Any]]
    tuned_as: str  # the row whose tuned settings it has


@settings
class Paper:
    """A results table or a figure."""

    recipe: str
    paper: Literal["feddf", "fedet", "fedeed", "mnfl"]
    item: str  # Table 2, Figure 4
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    scales: dict[str, Shrink]
    also: tuple[str, ...] = ()  # other tables or figures that show the same runs
    value: Value = "accuracy"
    measure: str = "main"
    at: At = "last"
    target: float | None = None
    seeds: int = 3
    said: str = ""  # what the paper says of it, where it prints no numbers
    open: tuple[str, ...] = ()  # what the paper leaves open or contradicts

    def problems(self) -> Iterator[str]:
        for item in (self.item, *self.also):
            if not ITEM.fullmatch(item):
                yield f"item = {item}: expected a name like Table 2 or Figure 6 (a)"
        for what, names in (("row", [r.name for r in self.rows]), ("column", [c.name for c in self.columns])):
            if not names or len(set(names)) < len(names):
                yield f"{what}: at least one, each with a name of its own; not {show(names)}"
        known, searched = {r.name for r in self.rows}, {r.name for r in self.rows if r.tune}
        for r in self.rows:
            if r.printed and len(r.printed) != len(self.columns):
                numbers = f"{len(r.printed)} printed numbers for {len(self.columns)} columns"
                yield f'row {r.name!r}: {numbers}; write "-" for none'
            if r.tuned_as and r.tuned_as not in searched:
                yield f"row {r.name!r}: tuned_as: {r.tuned_as} is none of {', '.join(sorted(searched))}"
        for c in self.columns:
            for name in c.rows.keys() - known:
                yield f"column {c.name!r}: rows: {name} is none of {', '.join(sorted(known))}"
        if self.value in ("rounds", "parameters", "bytes") and any(c.target is None for c in self.cells()):
            yield f"value = {self.value} counts until a target: set paper.target, or one by column"

    @property
    def trains(self) -> bool:
        """False if the values of the table need no training."""
        return self.value not in ("size", "partition")

    @property
    def names(self) -> list[str]:
        """The names on the command line: feddf/table2, feddf/fig6."""
        found = [i.lower().replace("figure", "fig").split("(")[0].replace(" ", "") for i in (self.item, *self.also)]
        return [f"{self.paper}/{name}" for name in found]

    def cells(self) -> Iterator[Cell]:
        """All cells, row by row. A row overrides its column, and the column's settings for this row override both."""
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
    where = f"{recipe}: paper"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} = {show(given)}: expected a table")
    table = dict(given)
    parts = {
        "rows": tuple(_made(Row, part, f"{where}.row") for part in table.pop("row", ())),
        "columns": tuple(_made(Column, part, f"{where}.column") for part in table.pop("column", [{"name": "result"}])),
        "scales": {scale: _made(Shrink, table.pop(scale, {}), f"{where}.{scale}") for scale in SCALES[1:]},
    }
    return _made(Paper, table | {"recipe": recipe} | parts, where)


def _made(cls: type[T], given: Any, where: str) -> T:
    """An object of one of these classes from a table. Settings in it get dotted keys."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} = {show(given)}: expected a table")
    where += f" {given['name']!r}" if "name" in given else ""
    table = {k: flat(v) if k in ("set", "tune") and isinstance(v, Mapping) else v for k, v in given.items()}
    if cls is Column and isinstance(rows := table.get("rows"), Mapping):
        table["rows"] = {row: flat(settings) for row, settings in rows.items()}
    if cls is Row:
        table["printed"] = [v if isinstance(v, str) else json.dumps(v) for v in table.get("printed", ())]
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [name for name in required if name not in table]:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    try:
        return cls(**table)
    except SettingsError as e:
        raise ConfigError(f"{where}: {e.problems[0]}") from None
