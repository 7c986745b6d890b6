"""What commands print with."""

import json
from typing import Any

import typer
from rich.console import Console

WIDE = 160  # columns where there is no terminal to fit: files and pipes are searched by line


def console() -> Console:
    """The terminal, or something wide enough not to break lines where there is none."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, WIDE))


def print_json(found: Any) -> None:
    """A result for a program to read."""
    typer.echo(json.dumps(found, indent=2))
