"""The program `solera`: its commands and its global options."""

import contextlib
import os
import sys
from typing import Annotated

import typer
from typer import Option

from ..core import __version__
from .console import EXIT_CODES, Unwritable, careful
from .deploy_commands import app as deploy
from .info_commands import doctor, ls
from .lab_commands import reproduce, sweep, tune
from .read_commands import compare, report, show, watch
from .run_commands import quickstart, resume, run
from .use_commands import export, predict

COMMANDS = (quickstart, run, resume, show, report, watch, compare, sweep, tune, reproduce, predict, export, ls, doctor)
app = typer.Typer(
    name="solera",
    epilog=EXIT_CODES,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command(epilog=EXIT_CODES)(command)
app.add_typer(deploy, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"solera {__version__}")
        raise typer.Exit


@app.callback()
def solera(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning across different models, by ensemble distillation.

    Example: [bold]solera quickstart[/bold] compares averaging with FedDF on embedded data, in about a minute.
    """


def main() -> None:
    """The entry point."""
    sys.stdout = careful(sys.stdout)
    try:
        try:
            app(prog_name="solera")
        except SystemExit as e:
            if e.code in (130, 143):  # interrupted: threads that are still training must not keep the program alive
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                sys.stderr.flush()
                os._exit(e.code)
            sys.stdout.flush()
            raise
    except Unwritable as e:
        sys.stdout = sys.__stdout__  # otherwise the interpreter reports the same error again when it exits
        typer.echo(f"solera: the output cannot be written: {e.strerror}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
