"""What commands print with."""

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
WIDE = 160  # columns where there is no terminal to fit: files and pipes are searched by line


class Unwritable(OSError):
    """What is printed goes to where nothing can be written: a full disk, a file that may not grow."""


class _Careful(io.TextIOWrapper):
    """Standard output that tells its own failures from those of other files, and prints what it has no letter for as
    a question mark. Once it has failed it fails for good: who only tried it out may have kept quiet about it."""

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
        except BrokenPipeError:  # whoever reads has read enough
            raise
        except OSError as e:
            self._failure = Unwritable(e.errno, e.strerror)
            with open(os.devnull, "wb") as nothing:  # where what is still in the buffer goes when the program ends
                os.dup2(nothing.fileno(), self.fileno())
            raise self._failure from None


def careful(out: TextIO) -> TextIO:
    """Standard output in a form that can be relied on to say what is wrong with it; anything else as it is."""
    if not isinstance(out, io.TextIOWrapper):
        return out
    out.flush()
    return _Careful(out.buffer, out.encoding, "replace", None, out.line_buffering, out.write_through)


def console() -> Console:
    """The terminal, or something wide enough not to break lines where there is none."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, WIDE))


def print_json(found: Any) -> None:
    """A result for a program to read. JSON knows no `nan`: the loss of a model that has blown up is null."""
    typer.echo(json.dumps(_finite(found), indent=2, allow_nan=False))


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
