"""`solera watch`: a live report of a run, in a browser on this machine."""

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
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders that contain run directories.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0: any free port.")] = 0,
    target: Target = None,
    for_parent: Annotated[bool, typer.Option("--for-parent", hidden=True)] = False,
    debug: Debug = False,
) -> None:
    """Show a run in the browser and update it while the run continues. On this machine only; Ctrl-C ends it.

    Example: [bold]solera watch runs/toy-feddf-s0 --port 8000[/bold]
    """
    from ..report.live import LiveView, Source, end_with_parent

    if not for_parent:
        _check(directories)
    try:
        view = LiveView(Source(directories, target), port)
    except OSError as e:
        from ..core.errors import ConfigError

        raise ConfigError(f"--port {port} cannot be used: {e.strerror}; leave it out to use any free port") from None
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
            from ..core.errors import RunError

            raise RunError(f"{directory} is not a folder; give the run directory that `solera run` printed")


@contextlib.contextmanager
def live_view(out: Path) -> Iterator[None]:
    """Serve the live view of a run that is about to start, and after the run until Ctrl-C.

    It is a separate process, because it must not disturb the run: a thread would be unsafe when workers are forked,
    and would slow the run down.
    """
    command = [sys.executable, "-m", "solera.cli.main", "watch", str(out), "--for-parent"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  (this program)
    try:
        url = child.stdout.readline().strip() if child.stdout else ""
        typer.echo(f"watch it at {url}" if url else "the live view did not start; the run continues", err=True)
        yield
        if child.poll() is None:
            typer.echo(f"the run has ended; {url} shows it until Ctrl-C", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                child.wait()
    finally:
        child.terminate()
        child.wait()
