"""`solera report`: one HTML file from one or many run directories."""

import datetime
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..core.files import open_file
from ..core.version import __version__
from .errors import Debug, reported

Target = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Target accuracy for the table of rounds and bytes, such as 0.7.")
]


@reported
def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain run directories.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    target: Target = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is not a report.")] = False,
    debug: Debug = False,
) -> None:
    """Make a report of one or more runs: figures, tables and settings in one HTML file.

    Example: [bold]solera report runs/toy-feddf-s0 runs/toy-fedavg-s0 -o report.html[/bold]
    """
    from ..report.figures import report_data
    from ..report.loading import read_all
    from ..report.page import render

    _check(out, force)
    records = read_all(directories)
    data = report_data(records, target)
    made = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    content = render(data, __version__, made).encode()
    _write(out, content)
    for note in data["notes"]:
        typer.echo(f"note: {note}", err=True)
    runs = f"{len(records)} runs" if len(records) > 1 else "1 run"
    typer.echo(f"{shlex.quote(str(out))}: {runs}, {len(content) / 1e6:.1f} MB; open it in a browser")


def _check(out: Path, force: bool) -> None:
    """Refuse to overwrite a file that is neither a report nor empty."""
    from ..core.errors import ConfigError
    from ..report.page import GENERATOR

    try:
        with open_file(out, None) as file:
            begins = file.read(4096)
    except OSError:  # it does not exist, or writing will say why it cannot be
        return
    if begins and GENERATOR not in begins and not force:
        raise ConfigError(f"{out} exists and is not a report of Solera: choose another --out, or add --force")


def _write(out: Path, content: bytes) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as e:
        from ..core.errors import RunError

        raise RunError(f"{out} cannot be written: {e.strerror}; choose another --out") from None
