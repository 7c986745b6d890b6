"""`solera watch`: the report while a run goes on, in a browser on this machine."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from .errors import Debug, reported
from .report import Target


@reported
def watch(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders with run directories below.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0: any that is free.")] = 0,
    target: Target = None,
    for_parent: Annotated[bool, typer.Option("--for-parent", hidden=True)] = False,
    debug: Debug = False,
) -> None:
    """Show a run in the browser and keep it current while the run goes on. On this machine only; Ctrl-C ends it.

    Example: [bold]solera watch runs/toy-feddf-s0 --port 8000[/bold]
    """
    from ..report.serve import LiveView, Source, end_with_parent

    if not for_parent:
        _check(directories)
    try:
        view = LiveView(Source(directories, target), port)
    except OSError as e:
        from ..errors import ConfigError

        raise ConfigError(f"--port {port} cannot be used: {e.strerror}; leave it out for any free one") from None
    with contextlib.closing(view.socket):
        typer.echo(view.url if for_parent else f"{view.url} shows {', '.join(map(str, directories))}; Ctrl-C ends it")
        sys.stdout.flush()
        if for_parent:
            end_with_parent(view)
        with contextlib.suppress(KeyboardInterrupt):
            view.serve_forever(poll_interval=0.2)


def _check(directories: list[Path]) -> None:
    for directory in directories:
        if not directory.is_dir():
            from ..errors import RunError

            raise RunError(f"{directory} is no folder; give the run directory that `solera run` printed or --out named")


@contextlib.contextmanager
def live_view(out: Path) -> Iterator[None]:
    """Serve the view of a run that is about to start, from a process of its own, and after the run until Ctrl-C.

    A process, because nothing may disturb the run: not its threads when workers are forked, not its speed.
    """
    command = [sys.executable, "-m", "solera.cli.main", "watch", str(out), "--for-parent"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  (this program)
    try:
        url = child.stdout.readline().strip() if child.stdout else ""
        typer.echo(f"watch it at {url}" if url else "the live view did not start; the run goes on without it", err=True)
        yield
        if child.poll() is None:
            typer.echo(f"the run is over; {url} shows it until Ctrl-C", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                child.wait()
    finally:
        child.terminate()
        child.wait()
