"""The console: results as tables or JSON, errors in one line with an exit code, and options that commands share.

No module of this package imports torch before a command needs it, so that `solera --help` is quick.
"""

import contextlib
import functools
import inspect
import io
import json as json_
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from ..core.errors import PORTABLE, NotPortable, SoleraError
from ..runs.display import Display

EXIT_CODES = (
    "Exit codes: 0 done; 1 unexpected error; 2 configuration or usage; 3 data; 4 run directory; "
    "5 too few clients answered; 6 nothing was learned; 130 interrupted (Ctrl-C); 143 terminated."
)
WIDE = 160  # columns in files and pipes: people search them by line
P = ParamSpec("P")
R = TypeVar("R")

Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, Option("--json", help="Print only the result, as JSON.")]
TrustCode = Annotated[
    bool,
    Option(
        "--trust-code",
        help="Import the code, and use the tracker, that the run's configuration names, even if the run is not yours.",
    ),
]
RunDir = Annotated[Path, Argument(metavar="DIR", help="The run directory.")]
Changes = Annotated[
    list[str] | None,
    Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting, e.g. partition.alpha=1. Repeatable."),
]
Workers = Annotated[int, Option(min=0, help="Runs in parallel, each on one core; 0: as many as there are cores.")]
RunDirs = Annotated[
    list[Path], Argument(metavar="RUN...", help="Run directories, or folders that contain run directories.")
]


# ---- results ----------------------------------------------------------------------------------------


def console() -> Console:
    """A console for the terminal; without a terminal, one that is wide enough not to break lines."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, WIDE))


def emit(found: Any, json: bool, shown: Callable[[], RenderableType | None]) -> None:
    """Print a result: as JSON for programs, otherwise as `shown` returns it, or has printed it itself.

    JSON has no `nan`: the loss of a model that has diverged is null. Text is printed as it is, without markup.
    """
    if json:
        typer.echo(json_.dumps(_finite(found), indent=2, allow_nan=False))
    elif isinstance(printed := shown(), str):
        typer.echo(printed)
    elif printed is not None:
        console().print(printed)


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0, whole: int = 0) -> Table:
    """A table of plain text. The last `right` columns hold numbers; the first `whole` columns are not wrapped."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        number = i >= len(heads) - right
        made.add_column(
            escape(head), justify="right" if number else "left", overflow="fold", no_wrap=number or i < whole
        )
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """A name and a text in each row."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, escape(text))
    return grid


class Unwritable(OSError):
    """Standard output cannot be written: for example because the disk is full."""


class _Careful(io.TextIOWrapper):
    """Standard output with its own error type. It prints a character that it cannot encode as a question mark. After
    the first failure every write fails: the caller of the first one may have ignored the error."""

    _failure: Unwritable | None = None

    def write(self, text: str, /) -> int:
        return self._tried(super().write, text)

    def flush(self) -> None:
        self._tried(super().flush)

    def _tried(self, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._failure is not None:
            raise self._failure
        try:
            return action(*args, **kwargs)
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except OSError as e:
            self._failure = Unwritable(e.errno, e.strerror)
            with open(os.devnull, "wb") as nothing:  # takes the rest of the buffer when the program ends
                os.dup2(nothing.fileno(), self.fileno())
            raise self._failure from None


def careful(out: TextIO) -> TextIO:
    """Standard output that raises `Unwritable` when it fails; any other stream unchanged."""
    if not isinstance(out, io.TextIOWrapper):
        return out
    out.flush()
    return _Careful(out.buffer, out.encoding, "replace", None, out.line_buffering, out.write_through)


# ---- errors -----------------------------------------------------------------------------------------


def reported(command: Callable[..., R]) -> Callable[..., R]:
    """Make a command report an error in one line and exit with its code. It gets the option --debug, which shows the
    traceback."""

    @functools.wraps(command)
    def guarded(*args: Any, debug: bool = False, **kwargs: Any) -> R:
        if debug:
            logging.getLogger("solera").setLevel(logging.DEBUG)
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt as e:
            fail(*interruption(e))
        except (typer.Exit, typer.Abort, BrokenPipeError, Unwritable):
            raise
        except MemoryError as e:
            if debug:
                raise
            fail(f"out of memory{f': {e}' if str(e) else ''}: free some, raise the limit (ulimit -v), or run less", 1)
        except Exception as e:
            if isinstance(e, NotPortable):  # torch has been loaded without `PORTABLE`: start this command again with it
                sys.stdout.flush()
                sys.stderr.flush()
                os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **PORTABLE})  # noqa: S606
            if debug:
                raise
            if isinstance(e, SoleraError):
                fail(str(e), e.exit_code)
            fail(f"unexpected {type(e).__name__}: {str(e) or 'no message'} (--debug shows the traceback)", 1)

    given, option = inspect.signature(command), inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY)
    option = option.replace(default=False, annotation=Debug)
    guarded.__signature__ = given.replace(parameters=[*given.parameters.values(), option])  # type: ignore[attr-defined]
    guarded.__annotations__ = {**command.__annotations__, "debug": Debug}
    return guarded


def fail(message: str, code: int) -> NoReturn:
    """Print the error in one line and exit."""
    typer.echo(f"solera: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def interruption(e: KeyboardInterrupt) -> tuple[str, int]:
    """Message and exit code for Ctrl-C, or for a signal that `stopping` turned into such an exception."""
    return str(e) or "interrupted", getattr(e, "exit_code", 130)


@contextlib.contextmanager
def resumable(out: Path) -> Iterator[None]:
    """If something stops the run in `out`, say how to continue it."""

    def go_on() -> str:
        return f"; continue with: {resume_command(out)}" if (out / "run.json").is_file() else ""

    try:
        yield
    except KeyboardInterrupt as e:
        message, code = interruption(e)
        fail(message + go_on(), code)
    except SoleraError as e:
        if e.exit_code in (5, 143):
            fail(f"{e}{go_on()}", e.exit_code)
        raise


def resume_command(out: str | os.PathLike[str]) -> str:
    """The command that continues the run in `out`."""
    return f"solera resume {shlex.quote(str(out))}"


class _ToDisplay(logging.Handler):
    def __init__(self, display: Display):
        super().__init__(logging.WARNING)
        self.display, self.pid = display, os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() == self.pid:  # a forked worker has no display
            self.display.warn(record.getMessage())


@contextlib.contextmanager
def warnings_to(display: Display) -> Iterator[None]:
    """Show the library's warnings in the display of the run."""
    log, handler = logging.getLogger("solera"), _ToDisplay(display)
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
