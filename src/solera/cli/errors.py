"""Errors as the user sees them: one line on stderr and a documented exit code; a traceback only with --debug.

This module does not import torch, so that `solera --help` is quick.
"""

import contextlib
import functools
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from ..core.errors import PORTABLE, NotPortable, SoleraError
from ..runs.display import Display
from .output import Unwritable

EXIT_CODES = (
    "Exit codes: 0 done; 1 unexpected error; 2 configuration or usage; 3 data; 4 run directory; "
    "5 too few clients answered; 6 nothing was learned; 130 interrupted (Ctrl-C); 143 terminated."
)
P = ParamSpec("P")
R = TypeVar("R")

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Import the code, and use the tracker, that the run's configuration names, even if the run is not yours.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")]


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Make a command report an error in one line and exit with its code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        debug = bool(kwargs.get("debug"))
        if debug:
            logging.getLogger("solera").setLevel(logging.DEBUG)
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt as e:
            fail(*_interruption(e))
        except (typer.Exit, typer.Abort, BrokenPipeError, Unwritable):
            raise
        except MemoryError as e:
            if debug:
                raise
            fail(f"out of memory{f': {e}' if str(e) else ''}: free some, raise the limit (ulimit -v), or run less", 1)
        except Exception as e:
            if isinstance(e, NotPortable):
                _begin_again()
            if debug:
                raise
            if is_ours(e):
                fail(str(e), e.exit_code)  # type: ignore[attr-defined]
            fail(f"unexpected {type(e).__name__}: {str(e) or 'no message'} (--debug shows the traceback)", 1)

    return guarded


def _begin_again() -> NoReturn:
    """Put this command in the place of itself, with `PORTABLE` in its environment: torch has been loaded without it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **PORTABLE})  # noqa: S606


def is_ours(error: BaseException) -> bool:
    """Whether the library explains this error itself."""
    return isinstance(error, SoleraError)


def fail(message: str, code: int) -> NoReturn:
    """Print the error in one line and exit."""
    typer.echo(f"solera: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def resumable(out: Path) -> Iterator[None]:
    """If something stops the run in `out`, say how to continue it."""
    try:
        yield
    except KeyboardInterrupt as e:
        message, code = _interruption(e)
        fail(message + _go_on(out), code)
    except Exception as e:
        if is_ours(e) and e.exit_code in (5, 143):  # type: ignore[attr-defined]
            fail(f"{e}{_go_on(out)}", e.exit_code)  # type: ignore[attr-defined]
        raise


def _interruption(e: KeyboardInterrupt) -> tuple[str, int]:
    """Message and exit code for Ctrl-C, or for a signal that `stopping` turned into such an exception."""
    return str(e) or "interrupted", getattr(e, "exit_code", 130)


def _go_on(out: Path) -> str:
    return f"; continue with: {resume_command(out)}" if (out / "run.json").is_file() else ""


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
def warnings_to(display: Display) -> Iterator[Any]:
    """Show the library's warnings in the display of the run."""
    log, handler = logging.getLogger("solera"), _ToDisplay(display)
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
