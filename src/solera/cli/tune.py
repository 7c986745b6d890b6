"""`solera tune`: a search for hyper-parameters on validation samples, fair to every method."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..core.errors import ConfigError
from ..runs.dotted import show
from .errors import Debug, Json, fail, reported
from .output import console, print_json
from .sweep import SweepDisplay

if TYPE_CHECKING:
    from ..lab.tune import Found


@reported
def tune(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE.toml", help="A recipe or a file.")],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...", help="Values to begin with. Default: those of the recipe's [paper] rows."
        ),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Search for these methods. Repeatable.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only [paper] rows with this text in their name.")] = None,
    column: Annotated[str | None, typer.Option(help="The [paper] column to search in. Default: the first.")] = None,
    random: Annotated[
        int | None, typer.Option(min=2, help="Draw so many trials between the smallest and the largest value.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each trial.")] = 1,
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting of all trials.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the trials. Default: runs/tune/<recipe>.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Trials in parallel, each on one core. 0: one for each.")] = 1,
    json: Json = False,
    debug: Debug = False,
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
        with SweepDisplay(console(), silent=json) as display:
            try:
                found = search.tune(tuning, home, workers or default_workers(), display.update)
            except KeyboardInterrupt as e:
                display.close()
                fail(f"{str(e) or 'interrupted'}; the same command continues", getattr(e, "exit_code", 130))
        written = search.write_winners(tuning, found, home)
    if json:
        print_json({"out": str(home), "winners": [str(w) for w in written], "searches": search.as_json(found)})
    else:
        _print(found, written)
    if lost := [f.search.name for f in found if f.best is None]:
        fail(f"no trial of {', '.join(lost)} ended with a score; the logs are in {home}", 4)


def _print(found: "list[Found]", written: list[Path]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("", "settings", "validation %", "best"):
        table.add_column(head, justify="right" if head.endswith("%") else "left")
    for f in found:
        for point, score in f.trials.items():
            settings = ", ".join(f"{key} = {show(value)}" for key, value in point)
            best = "best" if point == f.best else ""
            table.add_row(
                *map(escape, (f.search.name, settings, "failed" if score is None else f"{100 * score:.2f}", best))
            )
    console().print(table)
    for f in found:
        for note in f.notes:
            typer.echo(f"note: {f.search.name}: {note}")
    for file in written:
        typer.echo(f"written: {file}")
