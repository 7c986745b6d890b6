"""Printing: the console, JSON, and errors of standard output."""

import io
import json
import math
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")
WIDE = 160  # columns in files and pipes: people search them by line


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


def console() -> Console:
    """A console for the terminal; without a terminal, one that is wide enough not to break lines."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, WIDE))


def print_json(found: Any) -> None:
    """Print a result for programs. JSON has no `nan`: the loss of a model that has diverged is null."""
    typer.echo(json.dumps(_finite(found), indent=2, allow_nan=False))


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
