"""Commands of many runs: `solera sweep`, `solera tune` and `solera reproduce`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from ..core.errors import ConfigError
from ..runs.compare import as_json, printed, rows_in
from ..runs.groups import companions, group_runs
from ..runs.read import read_runs
from ..runs.results import compared_results, main_result, warnings_of
from ..runs.words import human_time, show
from .console import Changes, Json, Workers, console, emit, fail, interruption, reported, table
from .read_commands import Target, print_comparison

if TYPE_CHECKING:
    from ..lab.reproduce import PlannedTable
    from ..lab.sweep import Planned, Progress
    from ..lab.tune import Found

RUNNING_SHOWN = 12
STEPS_SHOWN = 4  # measured ones, in a plan
Scale = Literal["full", "small", "tiny"]


# ---- sweep ------------------------------------------------------------------------------------------


@reported
def sweep(
    file: Annotated[Path, Argument(metavar="FILE.toml", help="The sweep file: see docs/compare-and-sweep.md.")],
    out: Annotated[
        Path | None, Option(help="Folder for the run directories. Default: runs/<name of the file>.")
    ] = None,
    workers: Workers = 1,
    set_: Changes = None,
    target: Target = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check every case and list the runs, without running them.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a grid of settings, named cases and several seeds. Finished runs are skipped, stopped runs are continued.

    Example: [bold]solera sweep my-sweep.toml --workers 2[/bold]; the same command continues a stopped sweep.
    """
    from ..core.plugins import code_allowed
    from ..engines import default_workers
    from ..lab.sweep import check_fits, check_unchanged, index_of, is_done, load_sweep, notes, run_planned

    with code_allowed(file.absolute().parent):  # the user named this file
        planned = load_sweep(file, set_ or [])
        home = out or Path("runs") / (re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-.") or "sweep")
        check_unchanged(planned, home)
        todo = [run for run in planned if not is_done(home / run.name)]
        for note in notes(todo):
            typer.echo(f"note: {note}", err=True)
        check_fits(todo)
        if dry_run:
            _list_runs(planned, home, json)
            return
        with SweepDisplay(console(), json, "the same command continues the sweep") as display:
            failed = run_planned(planned, home, workers or default_workers(), display.update).failed
    wanted = {home / run.name for run in planned if is_done(home / run.name)}
    runs = [run for run in read_runs([home]) if run.path in wanted] if wanted else []
    groups = group_runs(runs)
    results = compared_results(groups)
    rows, warnings = rows_in(results, target), warnings_of(runs, results)
    main = {"main_result": main_result(results)}
    found = index_of(planned, home, failed) | {"out": str(home)} | main | {"rows": as_json(rows), "warnings": warnings}

    def compared() -> None:
        if runs:
            together = companions(groups)
            print_comparison(printed(rows, target, together), results, runs, warnings, together)

    emit(found, json, compared)
    _fail_with(failed, f"{len(failed)} of {len(planned)} runs failed; the same command tries them again")


def _list_runs(planned: "Sequence[Planned]", home: Path, json: bool) -> None:
    from ..lab.sweep import is_done
    from ..method import name_of

    runs = [
        {"out": str(home / r.name), "method": name_of(r.config.method), "rounds": r.config.run.rounds}
        | {"seed": r.config.run.seed, "settings": r.settings, "done": is_done(home / r.name)}
        for r in planned
    ]
    lines = [f"{r['out']}: {r['method']}, {r['rounds']} rounds{' (done)' if r['done'] else ''}" for r in runs]
    lines.append(f"{len(runs)} runs, {sum(not r['done'] for r in runs)} of them to do")
    emit(runs, json, lambda: "\n".join(lines))


def _fail_with(failed: dict[str, str], message: str) -> None:
    """Name the runs that failed, if any, and exit."""
    for name, why in failed.items():
        typer.echo(f"failed: {name}: {why}", err=True)
    if failed:
        fail(message, 4)


class SweepDisplay:
    """The progress of a sweep: redrawn in place on a terminal, a line for each run elsewhere.

    A context manager: leaving it restores the terminal, and after an interrupt says how to continue. No thread draws
    it: a sweep forks, and a fork must not copy a lock that another thread holds.
    """

    def __init__(self, screen: Console, silent: bool = False, go_on: str = "the same command continues"):
        self.screen, self.silent, self.go_on = screen, silent, go_on
        self.live: Live | None = None

    def __enter__(self) -> "SweepDisplay":
        if not self.silent and self.screen.is_terminal and not self.screen.is_dumb_terminal:
            self.live = Live(console=self.screen, auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
        if isinstance(error, KeyboardInterrupt):
            message, code = interruption(error)
            fail(f"{message}; {self.go_on}", code)

    def update(self, p: "Progress") -> None:
        """Show the progress of the sweep."""
        if self.silent:
            return
        over = p.skipped + p.done + len(p.failed)
        if p.news is not None:
            left = f", about {human_time(p.left)} left" if p.left else ""
            word = f"failed: {p.failed[p.news]}" if p.news in p.failed else "done"
            news = f"[{over}/{p.total}] {p.news} {word}{left}"
            self.screen.print(news, markup=False, highlight=False, soft_wrap=True)
        if self.live is not None:
            self.live.update(self._render(p, over), refresh=True)

    def _render(self, p: "Progress", over: int) -> RenderableType:
        parts = [f"{over}/{p.total} runs"]
        parts += [f"{p.skipped} skipped"] if p.skipped else []
        parts += [f"{len(p.failed)} failed"] if p.failed else []
        parts.append(human_time(p.seconds) + (f", {human_time(p.left)} left" if p.left is not None else ""))
        partial = sum(done / max(1, of) for done, of in p.running.values())
        running = Table.grid(padding=(0, 2))
        for name, (done, of) in list(p.running.items())[:RUNNING_SHOWN]:
            running.add_row(Text(name, overflow="ellipsis", no_wrap=True), Text(f"round {min(done + 1, of)}/{of}"))
        if len(p.running) > RUNNING_SHOWN:
            running.add_row(Text(f"... {len(p.running) - RUNNING_SHOWN} more"))
        bar = ProgressBar(total=max(1, p.total), completed=over + partial)
        return Group(Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis"), bar, running)


# ---- tune -------------------------------------------------------------------------------------------


@reported
def tune(
    recipe: Annotated[str, Argument(metavar="RECIPE|FILE.toml", help="A recipe or a file.")],
    over: Annotated[
        list[str] | None,
        Option(metavar="KEY=V1,V2,...", help="Values to begin with. Default: those of the recipe's [paper] rows."),
    ] = None,
    method: Annotated[list[str] | None, Option(help="Search for these methods. Repeatable.")] = None,
    row: Annotated[list[str] | None, Option(help="Only [paper] rows with this text in their name.")] = None,
    column: Annotated[str | None, Option(help="The [paper] column to search in. Default: the first.")] = None,
    random: Annotated[
        int | None, Option(min=2, help="Draw so many trials between the smallest and the largest value.")
    ] = None,
    seeds: Annotated[int, Option(min=1, help="Runs of each trial.")] = 1,
    set_: Changes = None,
    out: Annotated[Path | None, Option(help="Folder for the trials. Default: runs/tune/<recipe>.")] = None,
    workers: Workers = 1,
    json: Json = False,
) -> None:
    """Search for the best settings on validation samples; the grid grows while its best lies at an edge.

    Example: [bold]solera tune toy --over method.local.lr=0.01,0.1 --set data.validation=0.1[/bold]
    """
    from ..core.plugins import code_allowed
    from ..engines import default_workers
    from ..lab import tune as search
    from ..runs.config import folder_of

    with code_allowed(folder_of(recipe)):  # the user named this configuration
        if over:
            if row or column:
                raise ConfigError("--row and --column choose [paper] rows, which have values of their own: not --over")
            wanted = search.searches_of(over, method or [], recipe)
        elif method:
            raise ConfigError("--method needs --over KEY=V1,V2,...: the values to begin with")
        else:
            wanted = search.searches_of_paper(recipe, row or [], column)
        tuning = search.Tuning(recipe, tuple(wanted), tuple(set_ or ()), tuple(range(seeds)), random)
        search.check_tuning(tuning)
        home = out or Path("runs/tune") / recipe.removesuffix(".toml")
        with SweepDisplay(console(), json) as display:
            found = search.tune(tuning, home, workers or default_workers(), display.update)
        written = search.write_winners(tuning, found, home)
    result = {"out": str(home), "winners": [str(w) for w in written], "searches": search.as_json(found)}
    emit(result, json, lambda: _print_trials(found, written))
    if lost := [f.search.name for f in found if f.best is None]:
        fail(f"no trial of {', '.join(lost)} ended with a score; the logs are in {home}", 4)


def _print_trials(found: "list[Found]", written: list[Path]) -> None:
    rows = []
    for f in found:
        for point, score in f.trials.items():
            settings = ", ".join(f"{key} = {show(value)}" for key, value in point)
            best = "best" if point == f.best else ""
            rows.append((f.search.name, settings, best, "failed" if score is None else f"{100 * score:.2f}"))
    console().print(table(("", "settings", "", "validation %"), rows, right=1))
    for f in found:
        for note in f.notes:
            typer.echo(f"note: {f.search.name}: {note}")
    for file in written:
        typer.echo(f"written: {file}")


# ---- reproduce --------------------------------------------------------------------------------------


@reported
def reproduce(
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="Such as feddf/table2; a paper (feddf, fedet, fedeed, mnfl); or all."),
    ] = None,
    scale: Annotated[Scale, Option(help="full: the paper's setting; small, tiny: divided by stated factors.")] = "full",
    seeds: Annotated[
        int | None, Option(min=1, help="Runs of each cell. Default: the paper's number; 1 below full scale.")
    ] = None,
    row: Annotated[list[str] | None, Option(help="Only rows with this text in their name. Repeatable.")] = None,
    column: Annotated[list[str] | None, Option(help="The same for columns.")] = None,
    tuned: Annotated[
        Path | None, Option(help="A folder of `solera tune`: rows get the settings that it found.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for the runs. Default: runs/reproduce.")] = None,
    workers: Workers = 1,
    summary: Annotated[Path | None, Option(help="Also write all cells of all tables into this file, as JSON.")] = None,
    list_: Annotated[bool, Option("--list", help="List the tables and figures, and what they need.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Check every cell and plan, without running.")] = False,
    json: Json = False,
) -> None:
    """Run a table or a figure of a paper. Cells that cannot be run say why; the same command continues a stopped one.

    Example: [bold]solera reproduce feddf/table2 --scale tiny[/bold]; [bold]solera reproduce --list[/bold] shows all.
    """
    from rich.markdown import Markdown

    from ..engines import default_workers
    from ..lab import reproduce as paper
    from ..lab.papers import load_paper
    from ..lab.sweep import check_unchanged, run_planned
    from ..lab.tune import read_tuned

    if list_ or name is None:
        if name is None and not list_:
            raise ConfigError("name a table or a figure, such as feddf/table2; `solera reproduce --list` shows all")
        _list_tables(paper.items(name or "all"), scale, json)
        return
    wanted, home = paper.items(name), (out or Path("runs/reproduce")) / scale
    say = (lambda text: None) if json else typer.echo
    planned: dict[str, PlannedTable] = {}
    reasons: dict[str, list[str]] = {}  # why cells cannot be run -> how many of which table
    for i, recipe in enumerate(wanted):
        if len(wanted) > 1:
            say(f"[{i + 1}/{len(wanted)}] checking {recipe}")
        settings = read_tuned(tuned, recipe) if tuned else None
        plan = paper.plan_table(load_paper(recipe), scale, seeds, settings, row or [], column or [])
        absent = paper.missing(plan, home / recipe)
        for why in dict.fromkeys(absent.values()):
            cells = sum(any(absent.get(run) == why for run in cell.runs) for cell in plan.cells)
            reasons.setdefault(why, []).append(f"{recipe} ({cells} of {len(plan.cells)} cells)")
        planned[recipe] = plan.without(absent)
    for why, tables in reasons.items():
        typer.echo(f"cannot be run: {', '.join(tables)}: {' '.join(why.split())}", err=True)
    if not json:
        _print_plan(planned, home)
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for i, (recipe, plan) in enumerate(planned.items()):
        if len(planned) > 1:
            say(f"[{i + 1}/{len(planned)}] {recipe}")
        lost: dict[str, str] = {}
        if plan.runs and not dry_run:
            check_unchanged(plan.runs, home / recipe)
            with SweepDisplay(console(), json) as display:
                lost = run_planned(plan.runs, home / recipe, workers or default_workers(), display.update).failed
        filled = paper.collect(plan, home / recipe, lost)
        found.append(paper.as_json(plan, filled))
        failed |= {f"{recipe}: {run}": why for run, why in lost.items()}
        if not dry_run:
            paper.write_table(plan, filled, home / recipe)
        if not json:
            console().print(Markdown(paper.as_markdown(plan, filled)))
        if summary is not None and not dry_run:
            paper.write_summary(found, summary)
    emit(found, json, lambda: None)
    _fail_with(failed, f"{len(failed)} runs failed; the same command tries them again")


def _print_plan(tables: "dict[str, PlannedTable]", home: Path) -> None:
    """Print the number of runs that are not done, and how long they will take."""
    from ..lab.reproduce import effort

    plan = effort([(table, home / recipe) for recipe, table in tables.items()])
    if not any(plan.runs):
        return
    measured = ", ".join(f"{name} at batch {batch}: {1000 * s:.0f} ms" for name, batch, s in plan.steps[:STEPS_SHOWN])
    more = f", and {len(plan.steps) - STEPS_SHOWN} more" if len(plan.steps) > STEPS_SHOWN else ""
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


def _list_tables(recipes: list[str], scale: str, json: bool) -> None:
    from ..lab.papers import PAPERS, load_paper
    from ..lab.reproduce import needs

    tables: list[dict[str, Any]] = []
    for recipe in recipes:
        paper = load_paper(recipe)
        cells = list(paper.cells())
        tables.append(
            {
                "name": recipe,
                "item": paper.item,
                "paper": PAPERS[paper.paper],
                "title": paper.title,
                "cells": len(cells),
                "skipped": sum(bool(c.skip) for c in cells),
                "trains": paper.trains,
                "needs": needs(paper, scale),
            }
        )
    rows = []
    for t in tables:
        skipped = f" ({t['skipped']} cannot be run)" if t["skipped"] else ""
        rows.append((t["name"], t["item"], t["title"], f"{t['cells']}{skipped}", ", ".join(t["needs"])))
    emit(tables, json, lambda: table(("name", "item", "what", "cells", f"needs ({scale})"), rows, whole=2))
