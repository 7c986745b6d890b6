"""`solera reproduce`: a results table or a figure of a paper, our numbers beside the printed ones."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markdown import Markdown
from rich.table import Table

from ..core.errors import ConfigError
from .errors import Debug, Json, fail, reported
from .output import console, print_json
from .sweep import SweepDisplay

if TYPE_CHECKING:
    from ..lab.reproduce import Filled, PlannedTable


class Scale(StrEnum):
    """How much of a paper's setting is run."""

    full = "full"
    small = "small"
    tiny = "tiny"


@reported
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Such as feddf/table2; a paper (feddf, fedet, fedeed, mnfl); or all."),
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="full: the paper's setting; small, tiny: divided by stated factors.")
    ] = Scale.full,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each cell. Default: the paper's number; 1 below full scale.")
    ] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only rows with this text in their name. Repeatable.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="The same for columns.")] = None,
    tuned: Annotated[
        Path | None, typer.Option(help="A folder of `solera tune`: rows get the settings that it found.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs. Default: runs/reproduce.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Runs in parallel, each on one core. 0: one for each core.")] = 1,
    summary: Annotated[
        Path | None, typer.Option(help="Also write all cells of all tables into this file, as JSON.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the tables and figures, and what they need.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every cell and plan, without running.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a table or a figure of a paper. Cells that cannot be run say why; the same command continues a stopped one.

    Example: [bold]solera reproduce feddf/table2 --scale tiny[/bold]; [bold]solera reproduce --list[/bold] shows all.
    """
    from ..lab.reproduce import items, write_summary

    if list_ or name is None:
        if name is None and not list_:
            raise ConfigError("name a table or a figure, such as feddf/table2; `solera reproduce --list` shows all")
        _list(items(name or "all"), str(scale), json)
        return
    from ..lab.papers import load_paper
    from ..lab.reproduce import collect, missing, plan_table
    from ..lab.tune import read_tuned

    wanted, home = items(name), (out or Path("runs/reproduce")) / scale
    planned: dict[str, PlannedTable] = {}
    reasons: dict[str, dict[str, int]] = {}  # why cells cannot be run -> how many of which table
    for i, recipe in enumerate(wanted):
        if len(wanted) > 1 and not json:
            typer.echo(f"[{i + 1}/{len(wanted)}] checking {recipe}")
        settings = read_tuned(tuned, recipe) if tuned else None
        table = plan_table(load_paper(recipe), str(scale), seeds, settings, row or [], column or [])
        absent = missing(table, home / recipe)
        for why in dict.fromkeys(absent.values()):
            cells = sum(any(absent.get(run) == why for run in cell.runs) for cell in table.cells)
            reasons.setdefault(why, {})[f"{recipe} ({cells} of {len(table.cells)} cells)"] = cells
        planned[recipe] = table.without(absent)
    for why, tables in reasons.items():
        typer.echo(f"cannot be run: {', '.join(tables)}: {' '.join(why.split())}", err=True)
    if not json:
        _plan(planned, home)
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for i, (recipe, table) in enumerate(planned.items()):
        if len(planned) > 1 and not json:
            typer.echo(f"[{i + 1}/{len(planned)}] {recipe}")
        lost = {} if dry_run else _run(table, home / recipe, workers, json)
        filled = collect(table, home / recipe, lost)
        facts = _told(table, filled, home / recipe, dry_run, json)
        found.append(facts)
        failed |= {f"{recipe}: {run}": why for run, why in lost.items()}
        if summary is not None and not dry_run:
            write_summary(found, summary)
    if json:
        print_json(found)
    if failed:
        for run, why in failed.items():
            typer.echo(f"failed: {run}: {why}", err=True)
        fail(f"{len(failed)} runs failed; the same command tries them again", 4)


def _run(table: "PlannedTable", home: Path, workers: int, json: bool) -> dict[str, str]:
    """Run a table. Returns the runs that failed, each with the reason."""
    from ..engines import default_workers
    from ..lab.reproduce import run_table

    if not table.runs:
        return {}
    with SweepDisplay(console(), silent=json) as display:
        try:
            return run_table(table, home, workers or default_workers(), display.update).failed
        except KeyboardInterrupt as e:
            display.close()
            fail(f"{str(e) or 'interrupted'}; the same command continues", getattr(e, "exit_code", 130))


def _told(table: "PlannedTable", filled: "list[Filled]", home: Path, dry_run: bool, json: bool) -> dict[str, Any]:
    """Print and write a table. Returns its facts."""
    from ..lab.reproduce import as_json, as_markdown, write_table

    if not dry_run:
        write_table(table, filled, home)
    if not json:
        console().print(Markdown(as_markdown(table, filled)))
    return as_json(table, filled)


def _plan(tables: "dict[str, PlannedTable]", home: Path) -> None:
    """Print what will be done, and how long it will take."""
    from ..lab.reproduce import effort

    plan = effort([(table, home / recipe) for recipe, table in tables.items()])
    if not any(plan.runs):
        return
    measured = ", ".join(f"{name} at batch {batch}: {1000 * s:.0f} ms" for name, batch, s in plan.steps[:4])
    more = f", and {len(plan.steps) - 4} more" if len(plan.steps) > 4 else ""
    without = f"; without {', '.join(plan.unknown)}, which were not timed" if plan.unknown else ""
    if len(tables) > 1:
        for recipe, runs, hours in zip(tables, plan.runs, plan.hours, strict=True):
            typer.echo(f"{recipe}: {runs} runs, about {_hours(hours)}" if runs else f"{recipe}: nothing to run")
    into = home / next(iter(tables)) if len(tables) == 1 else home
    typer.echo(
        f"{sum(plan.runs)} runs into {into}, about {_hours(sum(plan.hours))} on one core "
        f"(measured steps: {measured}{more}{without})"
    )


def _hours(hours: float) -> str:
    if hours < 0.1:
        return f"{max(1, round(60 * hours))} CPU minutes"
    return f"{hours:.1f} CPU hours" if hours < 10 else f"{hours:,.0f} CPU hours"


def _list(recipes: list[str], scale: str, json: bool) -> None:
    from ..lab.papers import PAPERS, load_paper
    from ..lab.reproduce import needs, without_runs

    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        paper = load_paper(recipe)
        cells = list(paper.cells())
        rows.append(
            {
                "name": recipe,
                "item": paper.item,
                "paper": PAPERS[paper.paper],
                "title": paper.title,
                "cells": len(cells),
                "skipped": sum(bool(c.skip) for c in cells),
                "trains": not without_runs(paper),
                "needs": needs(paper, scale),
            }
        )
    if json:
        print_json(rows)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("name", "item", "what", "cells", f"needs ({scale})"):
        table.add_column(head, overflow="fold", no_wrap=head in ("name", "item"))
    for r in rows:
        skipped = f" ({r['skipped']} cannot be run)" if r["skipped"] else ""
        table.add_row(r["name"], r["item"], r["title"], f"{r['cells']}{skipped}", ", ".join(r["needs"]))
    console().print(table)
