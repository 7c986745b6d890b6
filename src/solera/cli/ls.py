"""`solera ls`: lists methods, models, data sets, recipes and engines."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .errors import Debug, Json, reported
from .output import console, print_json

Rows = list[dict[str, Any]]


class Kind(enum.StrEnum):
    """What can be listed."""

    methods = "methods"
    models = "models"
    data = "data"
    recipes = "recipes"
    engines = "engines"


@reported
def ls(
    what: Annotated[Kind, typer.Argument(help="What to list.", show_choices=True)],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List methods, models, data sets, recipes or engines, with the names that a configuration uses.

    Example: [bold]solera ls methods[/bold], or for a program: [bold]solera ls models --json[/bold]
    """
    rows = LISTS[what]()
    if json:
        print_json(rows)
    else:
        print_table(rows, HIDDEN.get(what, ()))


def print_table(rows: Rows, hidden: tuple[str, ...] = ()) -> None:
    """Print rows as a table; the first column is the name in a configuration."""
    columns = [c for c in (rows[0] if rows else {}) if c not in hidden]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, c in enumerate(columns):
        table.add_column(c.replace("_", " "), overflow="fold", no_wrap=i == 0, style="cyan" if i == 0 else None)
    for row in rows:
        table.add_row(*(escape(_text(row[c])) for c in columns))
    console().print(table)


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _methods() -> Rows:
    from .. import methods  # noqa: F401  (the import registers them)
    from ..method import METHODS, described

    METHODS.load_entry_points()
    rows = []
    for name, cls in sorted(METHODS.items()):
        method = cls()
        told = {"name": name, **described(method)._asdict(), "traits": dataclasses.asdict(method.traits())}
        rows.append({**told, "settings": _settings(cls)})
    return rows


def _settings(cls: type) -> dict[str, Any]:
    """The hyper-parameters of a method and their defaults, by the keys a configuration uses."""
    found: dict[str, Any] = {}

    def walk(settings: Any, path: str) -> None:
        for f in dataclasses.fields(settings):
            value = getattr(settings, f.name)
            if dataclasses.is_dataclass(value):
                walk(value, f"{path}{f.name}.")
            else:
                found[path + f.name] = value

    walk(cls(), "method.")
    return found


def _models() -> Rows:
    from ..models import MODELS

    MODELS.load_entry_points()
    return [
        {"name": n, "title": m.title, "kind": m.kind, "norm": m.has_norm, "source": m.source, "notes": m.notes}
        for n, m in MODELS.items()
    ]


def _data() -> Rows:
    from ..data import SOURCES

    SOURCES.load_entry_points()
    return [
        {
            "name": n,
            "title": s.title,
            "classes": s.classes,
            "shape": "x".join(map(str, s.shape)),
            "train": s.rows[0] if s.rows else None,
            "test": s.rows[1] if s.rows else None,
            "formats": list(s.formats),
            "licence": s.licence,
            "hub": s.hub,
        }
        for n, s in SOURCES.items()
    ]


def _recipes() -> Rows:
    from ..method import name_of
    from ..runs.config import load_config, recipe_names, recipe_text

    rows = []
    for name in recipe_names():
        config = load_config(name)
        rows.append(
            {
                "name": name,
                "method": name_of(config.method),
                "data": config.data.name,
                "clients": config.partition.clients,
                "rounds": config.run.rounds,
                "about": recipe_text(name).splitlines()[0].lstrip("# "),
            }
        )
    return rows


def _engines() -> Rows:
    from ..engines import ENGINES, default_engine, default_workers, engine_info

    ENGINES.load_entry_points()
    default = default_engine(default_workers())
    infos = [engine_info(name) for name in ENGINES if name != "auto"]
    return [
        {"name": i.name, "title": i.title, "a_crash_costs": i.crash, "default_here": i.name == default} for i in infos
    ]


LISTS: dict[Kind, Callable[[], Rows]] = {
    Kind.methods: _methods,
    Kind.models: _models,
    Kind.data: _data,
    Kind.recipes: _recipes,
    Kind.engines: _engines,
}
HIDDEN: dict[Kind, tuple[str, ...]] = {Kind.methods: ("traits", "settings")}
