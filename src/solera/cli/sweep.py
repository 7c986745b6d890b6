"""`solera sweep`: many runs from one file."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..runs.compare import as_json, printed, rows_in
from ..runs.groups import companions, group_runs
from ..runs.read import read_runs
from ..runs.results import compared_results, main_result, warnings_of
from ..runs.words import human_time
from .compare import print_comparison
from .errors import Debug, Json, fail, reported
from .output import console, print_json

if TYPE_CHECKING:
    from ..lab.sweep import Planned, Progress

RUNNING_SHOWN = 12


@reported
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The sweep file: see docs/compare-and-sweep.md.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run directories. Default: runs/<name of the file>.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Runs in parallel, each on one core. 0: one for each core. 1: one after another.")
    ] = 1,
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting of all runs.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Also show rounds and bytes until this accuracy.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every case and list the runs, without running them.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a grid of settings, named cases and several seeds. Finished runs are skipped, stopped runs are continued.

    Example: [bold]solera sweep my-sweep.toml --workers 2[/bold]; the same command continues a stopped sweep.
    """
    from ..core.plugins import code_allowed

    with code_allowed(file.absolute().parent):  # the user named this file
        _sweep(file, out, workers, set_ or [], target, dry_run, json)


def _sweep(
    file: Path, out: Path | None, workers: int, changes: list[str], target: float | None, dry_run: bool, json: bool
) -> None:
    from ..engines import default_workers
    from ..lab.sweep import check_fits, check_unchanged, is_done, load_sweep, notes, run_all, write_index

    planned = load_sweep(file, changes)
    home = out or Path("runs") / (re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-.") or "sweep")
    check_unchanged(planned, home)
    todo = [run for run in planned if not is_done(home / run.name)]
    for note in notes(todo):
        typer.echo(f"note: {note}", err=True)
    if todo:
        check_fits(todo)
    if dry_run:
        _list(planned, home, json)
        return
    write_index(planned, home, {})
    failed: dict[str, str] = {}
    with SweepDisplay(console(), silent=json) as display:

        def tell(progress: "Progress") -> None:
            display.update(progress)
            if progress.news is not None:
                write_index(planned, home, progress.failed)

        try:
            runs = {run.name: run.config for run in planned}
            failed = run_all(runs, home, workers or default_workers(), tell).failed
        except KeyboardInterrupt as e:
            display.close()
            fail(f"{str(e) or 'interrupted'}; the same command continues the sweep", getattr(e, "exit_code", 130))
    index = write_index(planned, home, failed)
    _report(planned, home, index, target, json)
    if failed:
        for name, why in failed.items():
            typer.echo(f"failed: {name}: {why}", err=True)
        fail(f"{len(failed)} of {len(planned)} runs failed; the same command tries them again", 4)


def _list(planned: "list[Planned]", home: Path, json: bool) -> None:
    from ..lab.sweep import is_done
    from ..method import name_of

    facts = [
        {"out": str(home / r.name), "method": name_of(r.config.method), "rounds": r.config.run.rounds}
        | {"seed": r.config.run.seed, "settings": r.settings, "done": is_done(home / r.name)}
        for r in planned
    ]
    if json:
        print_json(facts)
        return
    for fact in facts:
        done = " (done)" if fact["done"] else ""
        typer.echo(f"{fact['out']}: {fact['method']}, {fact['rounds']} rounds{done}")
    typer.echo(f"{len(facts)} runs, {sum(not f['done'] for f in facts)} of them to do")


def _report(planned: "list[Planned]", home: Path, index: dict[str, Any], target: float | None, json: bool) -> None:
    from ..lab.sweep import is_done

    wanted = {home / run.name for run in planned if is_done(home / run.name)}
    runs = [run for run in read_runs([home]) if run.path in wanted] if wanted else []
    groups = group_runs(runs)
    results = compared_results(groups)
    rows, warnings = rows_in(results, target), warnings_of(runs, results)
    if json:
        main = {"main_result": main_result(results)}
        print_json(index | {"out": str(home)} | main | {"rows": as_json(rows), "warnings": warnings})
    elif runs:
        together = companions(groups)
        print_comparison(console(), printed(rows, target, together), results, runs, warnings, together)


class SweepDisplay:
    """The progress of a sweep: redrawn in place on a terminal, a line for each run elsewhere.

    No thread draws it: a sweep forks, and a fork must not copy a lock that another thread holds.
    """

    def __init__(self, screen: Console, silent: bool = False):
        self.screen, self.silent = screen, silent
        self.live: Live | None = None

    def __enter__(self) -> "SweepDisplay":
        if not self.silent and self.screen.is_terminal and not self.screen.is_dumb_terminal:
            self.live = Live(console=self.screen, auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def update(self, progress: "Progress") -> None:
        """Show the progress of the sweep."""
        if self.silent:
            return
        if progress.news is not None:
            self.screen.print(self._news(progress), markup=False, highlight=False, soft_wrap=True)
        if self.live is not None:
            self.live.update(self.render(progress), refresh=True)

    def _news(self, p: "Progress") -> str:
        over = p.skipped + p.done + len(p.failed)
        left = f", about {human_time(p.left)} left" if p.left else ""
        word = f"failed: {p.failed[p.news]}" if p.news in p.failed else "done"
        return f"[{over}/{p.total}] {p.news} {word}{left}"

    def render(self, p: "Progress") -> RenderableType:
        """The current display."""
        over = p.skipped + p.done + len(p.failed)
        parts = [f"{over}/{p.total} runs"]
        parts += [f"{p.skipped} skipped"] if p.skipped else []
        parts += [f"{len(p.failed)} failed"] if p.failed else []
        parts.append(human_time(p.seconds) + (f", {human_time(p.left)} left" if p.left is not None else ""))
        partial = sum(done / max(1, of) for done, of in p.running.values())
        table = Table.grid(padding=(0, 2))
        for name, (done, of) in list(p.running.items())[:RUNNING_SHOWN]:
            table.add_row(Text(name, overflow="ellipsis", no_wrap=True), Text(f"round {min(done + 1, of)}/{of}"))
        if len(p.running) > RUNNING_SHOWN:
            table.add_row(Text(f"... {len(p.running) - RUNNING_SHOWN} more"))
        bar = ProgressBar(total=max(1, p.total), completed=over + partial)
        return Group(Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis"), bar, table)
