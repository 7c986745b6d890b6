"""`solera run` and `solera resume`."""

import contextlib
import dataclasses
import json as json_
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import ConfigError
from ..runs.display import choose_display
from .dry import rehearse
from .errors import Debug, Json, TrustCode, reported, resumable, warnings_to
from .output import print_json
from .watch import live_view

if TYPE_CHECKING:
    from ..runs.config import Config

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the outcome.")]


@reported
def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE.toml", help="A recipe (see `solera ls recipes`) or a file.")
    ] = "toy",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting, e.g. partition.alpha=1. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory. Default: a new one in runs/.")] = None,
    engine: Annotated[str | None, typer.Option(help="How clients run; the same as --set engine.name=...")] = None,
    workers: Annotated[int | None, typer.Option(help="Parallel clients; the same as --set engine.workers=...")] = None,
    rounds: Annotated[int | None, typer.Option(help="The same as --set run.rounds=...")] = None,
    seed: Annotated[int | None, typer.Option(help="The same as --set run.seed=...")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Also show the run in a browser on this machine.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run and show what it will send, without training or writing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a recipe or a configuration file.

    Example: [bold]solera run quickstart/feddf --rounds 5 --set partition.alpha=1 --set method.fusion.steps=100[/bold]
    """
    from ..core.plugins import code_allowed
    from ..runs.config import folder_of, load_config

    options = {"engine.name": engine, "engine.workers": workers, "run.rounds": rounds, "run.seed": seed}
    given = [f"{k}={json_.dumps(v)}" for k, v in options.items() if v is not None]
    with code_allowed(folder_of(recipe)):  # the user named this configuration
        config = named(load_config(recipe, [*(set_ or []), *given]), recipe)
        home = out or default_out(config)
        if dry_run:
            if watch:
                raise ConfigError("--dry-run trains nothing to watch: leave out --watch")
            rehearse(config, home, json)
            return
        short = {"--engine": engine, "--workers": workers, "--rounds": rounds, "--seed": seed, "--out": home}
        words = [w for text in set_ or [] for w in ("--set", text)]
        words += [w for option, value in short.items() if value is not None for w in (option, str(value))]
        with live_view(home) if watch else contextlib.nullcontext():
            command = shlex.join(["solera", "run", recipe, *words])
            summary = perform(config, home, json, quiet, command)
    if json:
        print_json(summary)


@reported
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    trust_code: TrustCode = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue a run that was stopped. The result is the same as without the stop.

    Example: [bold]solera resume runs/toy-feddf-s0[/bold]
    """
    from ..runs import loop

    display = choose_display(json, quiet)
    with warnings_to(display), resumable(directory):
        result = loop.resume(directory, callbacks=[display], trust_code=trust_code)
    if json:
        print_json(result.summary)


def perform(
    config: "Config",
    out: Path,
    json: bool = False,
    quiet: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Run a configuration with a suitable display; returns the summary. `command` is recorded in run.json."""
    from ..runs import loop

    display = choose_display(json, quiet)
    with warnings_to(display), resumable(out):
        return loop.run(config, out, callbacks=[display], command=command).summary


def named(config: "Config", recipe: str) -> "Config":
    """The configuration with a name: its own, or that of its recipe or file."""
    from ..runs.config import recipe_names

    stem = recipe if recipe in recipe_names() else Path(recipe).stem
    name = config.run.name or re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:64] or "run"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))


def default_out(config: "Config") -> Path:
    """runs/<name>-<method>-s<seed>; with -2, -3, ... if it exists."""
    from ..core.plugins import short
    from ..method import name_of

    name, method = config.run.name.replace(" ", "-"), short(name_of(config.method))
    stem = name if name.endswith(method) else f"{name}-{method}"
    return fresh(Path("runs") / f"{stem}-s{config.run.seed}")


def fresh(path: Path) -> Path:
    """`path`; or path-2, path-3, ... if it exists."""
    candidate, n = path, 1
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.name}-{n}")
    return candidate
