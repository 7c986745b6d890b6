"""`solera run --dry-run`: what a run will send and write, without any training."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ..runs.display import choose_display
from ..runs.record import WAYS
from ..runs.words import human_bytes
from .errors import warnings_to
from .output import console, print_json

if TYPE_CHECKING:
    from ..runs.config import Config
    from ..runs.rehearsal import Rehearsal


def rehearse(config: "Config", out: Path, json: bool) -> None:
    """Rehearse the run that would write into `out`, and print what it will send."""
    from ..runs.rehearsal import rehearse_config

    with warnings_to(choose_display(json, quiet=True)):
        found = rehearse_config(config)
    if json:
        print_json({"name": config.run.name, **found.facts(), "out": str(out)})
    else:
        _print(found, out)


def _print(found: "Rehearsal", out: Path) -> None:
    screen, grid = console(), Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    models = [f"{name} ({human_bytes(facts['bytes'])})" for name, facts in found.models.items()]
    for name, text in (
        ("method", found.method),
        ("clients", f"{found.cohort} of {found.clients} in each of {len(found.rounds)} rounds"),
        ("models", ", ".join(models) or "none on the server"),
        ("bytes", _how_exact(found)),
        ("written", f"nothing; the run would write {out}"),
    ):
        grid.add_row(name, escape(text))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rounds", no_wrap=True)
    table.add_column("exchange", overflow="fold")
    for way in WAYS:
        table.add_column(way, justify="right", no_wrap=True)
    for row in _rows(found):
        table.add_row(*map(escape, row))
    screen.print(grid)
    screen.print()
    screen.print(table)


def _rows(found: "Rehearsal") -> Iterator[list[str]]:
    """The exchanges of each round, with equal consecutive rounds as one row; then the sum."""
    for sent, alike in groupby(enumerate(found.rounds, 1), lambda numbered: numbered[1].bytes):
        numbers = [t for t, _ in alike]
        rounds = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}, each"
        for task in sent["down"]:
            yield [rounds, task, *(human_bytes(sent[way].get(task, 0)) for way in WAYS)]
    yield ["all", "", *(human_bytes(found.total(way)) for way in WAYS)]


def _how_exact(found: "Rehearsal") -> str:
    if found.varies:
        return f"approximate: {found.varies}, and a dry run learns nothing"
    if found.bounded:
        return f"an upper limit: clients decide how large their replies to {', '.join(found.bounded)} are"
    return "exact, if every client answers"
