"""`python -m bench`, with this folder's parent on the path: how fast Solera is, against what, on this machine."""

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from solera.cli.console import Json, console, emit, fail, reported

if TYPE_CHECKING:
    from .workloads import Case, Scale


@reported
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD...]", help="Workloads, or single cases; all, if none.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The small sizes of the regression guard.")] = False,
    peers: Annotated[
        str, typer.Option(help="Other frameworks to measure beside us: none, all, or names with commas.")
    ] = "none",
    peers_dir: Annotated[
        Path | None, typer.Option(help="Where they are installed; a temporary folder if not given.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed laps of each side, instead of the usual.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all that was measured as JSON; what is there is added to.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Put the tables into this page.")] = None,
    against: Annotated[Path | None, typer.Option(help="Fail if a ratio fell by a fifth against this record.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write such a record.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the workloads; measure nothing.")] = False,
    json: Json = False,
) -> None:
    """Measure named workloads, each in turn with a reference that does the same work in the same minutes.

    Example: [bold]python -m bench --list[/bold] names the workloads; `python -m bench fedavg-cnn --peers all` runs one.
    """
    from . import guard, page, programme
    from .peers import chosen
    from .workloads import find

    scale: Scale = "quick" if quick else "full"
    cases = find(names or [], scale)
    frameworks = chosen(peers)
    if list_:
        _list(cases, json)
        return
    recorded = guard.read(against, scale) if against else None

    def whole(found: dict[str, Any]) -> dict[str, Any]:
        return programme.merged(out, found) if out else found

    def save(found: dict[str, Any]) -> None:
        if out:
            out.write_text(json_.dumps(whole(found), indent=1) + "\n")

    whole(programme.nothing_yet(scale))  # a file that cannot be added to is refused before any work
    found = programme.measure(
        cases, scale, frameworks, peers_dir, repeats, lambda text: typer.echo(text, err=True), save
    )
    if write:
        page.write(whole(found), write)
    if record:
        guard.record(found, record)
    emit(found, json, lambda: _print(found))
    wrong = programme.wrong(found)
    if recorded is not None:
        verdicts, notes = guard.compare(recorded, found)
        for text in [*notes, *map(str, verdicts)]:
            typer.echo(text, err=True)
        wrong += [f"fell by more than a fifth: {v}" for v in verdicts if not v.ok]
    if wrong:
        fail("; ".join(wrong), 1)


def _list(cases: "list[Case]", json: bool) -> None:
    lines = [f"{c.name}: {c.title} ({', '.join(c.sides)})" for c in cases]
    emit([{"case": c.name, "title": c.title, "sides": list(c.sides)} for c in cases], json, lambda: "\n".join(lines))


def _print(found: dict[str, Any]) -> None:
    from . import page

    screen = console()
    screen.print(escape(page.machine_line(found)))
    for heads, rows in (page.ratio_table(found), page.side_table(found)):
        table = Table(*heads)
        for row in rows:
            table.add_row(*map(escape, row))
        screen.print(table)


if __name__ == "__main__":
    typer.run(bench)
