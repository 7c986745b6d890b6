"""`solera compare`: runs side by side, over seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..runs.compare import Printed, as_csv, as_latex, printed, rows_in
from ..runs.dotted import show
from ..runs.frame import compare as as_facts
from ..runs.groups import between_methods, companions, group_runs, grouping
from ..runs.read import Run, read_runs
from ..runs.results import Comparison, compared_results, main_result, warnings_of
from .errors import Debug, Json, reported
from .output import console, print_json

TOLD = 6  # differences between methods that are listed; further ones are only counted


@reported
def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain run directories.")
    ],
    target: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Also show rounds, bytes, numbers and hours to this accuracy, such as 0.7."
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Group by these settings only, such as method.name. Repeatable."),
    ] = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV, with unrounded numbers.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print the table for LaTeX (booktabs).")] = False,
    debug: Debug = False,
) -> None:
    """Compare runs: accuracy (mean ± standard deviation over seeds), traffic, time, and settings that differ.

    Example: [bold]solera compare runs/toy-feddf-s0 runs/toy-fedavg-s0 --target 0.5[/bold]
    """
    from ..core.errors import ConfigError

    if json + csv + latex > 1:
        raise ConfigError("--json, --csv and --latex cannot be used together")
    if json:
        print_json(as_facts(directories, target, by))
        return
    runs = read_runs(directories)
    wanted = grouping(runs, by)
    groups = group_runs(runs, wanted)
    results = compared_results(groups)
    rows = rows_in(results, target)
    warnings = warnings_of(runs, results)
    for text in warnings if csv or latex else ():
        typer.echo(f"warning: {text}", err=True)
    if csv:
        typer.echo(as_csv(rows), nl=False)
        return
    together = companions(groups) if wanted is None else dict.fromkeys(wanted, ())
    tables = printed(rows, target, together)
    if latex:
        typer.echo(as_latex(tables), nl=False)
    else:
        print_comparison(console(), tables, results, runs, warnings, together)


def print_comparison(
    out: Console,
    tables: Sequence[Printed],
    results: Comparison,
    runs: Sequence[Run],
    warnings: Sequence[str],
    together: Mapping[str, Sequence[str]],
) -> None:
    """A table for each kind of result, then other settings that differ, then warnings."""
    for i, found in enumerate(tables):
        out.print(("\n" if i else "") + found.title, style="italic", markup=False, highlight=False, soft_wrap=True)
        out.print(table_of(found))
    if len(results.groups) > 1 and (main := main_result(results)):
        out.print(f"\nmain result (all cases have it): {main}", markup=False, highlight=False, soft_wrap=True)
    for key, others in together.items():
        if others:
            out.print(f"{key} changes together with {', '.join(others)}", markup=False, highlight=False, soft_wrap=True)
    apart = between_methods(runs)
    if apart:
        out.print("\nother settings that differ between methods:", highlight=False)
    for key, values in list(apart.items())[:TOLD]:
        told = ", ".join(f"{show(v)} ({m})" for m, v in values.items())
        out.print(f"  {key}: {told}", markup=False, highlight=False, soft_wrap=True)
    if len(apart) > TOLD:
        out.print(f"  ... and {len(apart) - TOLD} more settings (--json lists them)", highlight=False)
    for text in warnings:
        out.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def table_of(found: Printed) -> Table:
    """Results of one kind as a table for the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(found.heads):
        if i < found.words:
            table.add_column(escape(head), overflow="fold", justify="right" if head == "runs" else "left")
        else:
            table.add_column(escape(head), justify="right", overflow="fold")
    for cells, begins in zip(found.cells, found.first, strict=True):
        if begins and table.row_count:
            table.add_section()
        table.add_row(*map(escape, cells))
    return table
