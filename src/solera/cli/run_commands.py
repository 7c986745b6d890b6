"""`solera quickstart`, `solera run` (also dry) and `solera resume`."""

import contextlib
import dataclasses
import json as json_
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group
from rich.table import Table
from typer import Argument, Option

from ..core.errors import ConfigError
from ..runs.display import choose_display
from ..runs.record import WAYS
from ..runs.words import human_bytes, human_time, percent
from .console import Changes, Json, RunDir, TrustCode, console, emit, facts, reported, resumable, table, warnings_to
from .read_commands import live_view

if TYPE_CHECKING:
    from ..runs.config import Config
    from ..runs.rehearsal import Rehearsal

QUICKSTART = {"fedavg": "quickstart/fedavg", "large": "quickstart/large"}
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the outcome.")]


@reported
def run(
    recipe: Annotated[
        str, Argument(metavar="RECIPE|FILE.toml", help="A recipe (see `solera ls recipes`) or a file.")
    ] = "toy",
    set_: Changes = None,
    out: Annotated[Path | None, Option(help="The run directory. Default: a new one in runs/.")] = None,
    engine: Annotated[str | None, Option(help="How clients run; the same as --set engine.name=...")] = None,
    workers: Annotated[int | None, Option(help="Parallel clients; the same as --set engine.workers=...")] = None,
    rounds: Annotated[int | None, Option(help="The same as --set run.rounds=...")] = None,
    seed: Annotated[int | None, Option(help="The same as --set run.seed=...")] = None,
    watch: Annotated[bool, Option("--watch", help="Also show the run in a browser on this machine.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check the run and show what it will send, without training or writing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a recipe or a configuration file.

    Example: [bold]solera run quickstart/feddf --rounds 5 --set partition.alpha=1 --set method.fusion.steps=100[/bold]
    """
    from ..core.plugins import code_allowed
    from ..runs.config import folder_of, load_config
    from ..runs.rehearsal import rehearse_config

    options = {"engine.name": engine, "engine.workers": workers, "run.rounds": rounds, "run.seed": seed}
    given = [f"{k}={json_.dumps(v)}" for k, v in options.items() if v is not None]
    with code_allowed(folder_of(recipe)):  # the user named this configuration
        config = named(load_config(recipe, [*(set_ or []), *given]), recipe)
        home = out or default_out(config)
        if dry_run:
            if watch:
                raise ConfigError("--dry-run trains nothing to watch: leave out --watch")
            with warnings_to(choose_display(json, quiet=True)):
                found = rehearse_config(config)
            planned = {"name": config.run.name, **found.facts(), "out": str(home)}
            emit(planned, json, lambda: _rehearsed(found, home))
            return
        short = {"--engine": engine, "--workers": workers, "--rounds": rounds, "--seed": seed, "--out": home}
        words = [w for text in set_ or [] for w in ("--set", text)]
        words += [w for option, value in short.items() if value is not None for w in (option, str(value))]
        with live_view(home) if watch else contextlib.nullcontext():
            command = shlex.join(["solera", "run", recipe, *words])
            summary = _perform(config, home, json, quiet, command)
    emit(summary, json, lambda: None)


@reported
def resume(directory: RunDir, trust_code: TrustCode = False, json: Json = False, quiet: Quiet = False) -> None:
    """Continue a run that was stopped. The result is the same as without the stop.

    Example: [bold]solera resume runs/toy-feddf-s0[/bold]
    """
    from ..runs import loop

    display = choose_display(json, quiet)
    with warnings_to(display), resumable(directory):
        result = loop.resume(directory, callbacks=[display], trust_code=trust_code)
    emit(result.summary, json, lambda: None)


def _perform(config: "Config", out: Path, json: bool, quiet: bool, command: str) -> dict[str, Any]:
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


def _rehearsed(found: "Rehearsal", out: Path) -> Group:
    """The messages of a dry run: equal consecutive rounds are one row."""
    models = [f"{name} ({human_bytes(facts['bytes'])})" for name, facts in found.models.items()]
    overview = facts(
        (
            ("method", found.method),
            ("clients", f"{found.cohort} of {found.clients} in each of {len(found.rounds)} rounds"),
            ("models", ", ".join(models) or "none on the server"),
            ("bytes", how_exact(found)),
            ("written", f"nothing; the run would write {out}"),
        )
    )

    def rows() -> Iterator[list[str]]:
        for sent, alike in groupby(enumerate(found.rounds, 1), lambda numbered: numbered[1].bytes):
            numbers = [t for t, _ in alike]
            rounds = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}, each"
            for task in sent["down"]:
                yield [rounds, task, *(human_bytes(sent[way].get(task, 0)) for way in WAYS)]
        yield ["all", "", *(human_bytes(found.total(way)) for way in WAYS)]

    return Group(overview, "", table(("rounds", "exchange", *WAYS), rows(), right=len(WAYS), whole=1))


def how_exact(found: "Rehearsal") -> str:
    """The accuracy of the bytes of a dry run, in words."""
    if found.varies:
        return f"approximate: {found.varies}, and a dry run learns nothing"
    if found.bounded:
        return f"an upper limit: clients decide how large their replies to {', '.join(found.bounded)} are"
    return "exact, if every client answers"


# ---- quickstart -------------------------------------------------------------------------------------


@reported
def quickstart(
    out: Annotated[Path, Option(help="Folder for the two run directories.")] = Path("runs/quickstart"),
    rounds: Annotated[int | None, Option(help="Number of rounds, instead of the recipes' number.")] = None,
) -> None:
    """Train three architectures on 20 clients by averaging alone, then with FedDF and a large model on the server.

    Example: [bold]solera quickstart[/bold] takes about a minute on two cores and needs no download.
    """
    from ..runs.config import load_config

    overrides = [] if rounds is None else [f"run.rounds={rounds}"]
    configs = {name: load_config(recipe, overrides) for name, recipe in QUICKSTART.items()}
    home, screen, shared = fresh(out), console(), configs["large"]
    screen.print(
        f"{shared.partition.clients} clients hold very different parts of {shared.data.name}, with different models: "
        f"{', '.join(shared.models.clients)}. First each architecture is averaged over its own clients. Then FedDF "
        "also distils what all clients know together into each of them, and the same teachers train "
        f"{shared.models.server}, a larger model that only the server has.\n",
        highlight=False,
    )
    summaries = {}
    for name, config in configs.items():
        length = [] if rounds is None else ["--rounds", str(rounds)]
        command = shlex.join(["solera", "run", QUICKSTART[name], *length, "--out", str(home / name)])
        summaries[name] = _perform(config, home / name, json=False, quiet=False, command=command)
        screen.print()
    screen.print("test accuracy after the last round", style="italic")
    screen.print(side_by_side(summaries["fedavg"], summaries["large"]))
    for line in (
        f"run directories: {home / 'fedavg'}, {home / 'large'}",
        "next:",
        f"  solera report {shlex.quote(str(home))} -o report.html           (figures of both, for the browser)",
        f"  solera show {shlex.quote(str(home / 'large'))}",
        "  solera run quickstart/large --set partition.alpha=1      (clients that are more alike)",
        "  solera run quickstart/feddf --set method.fusion.steps=0  (FedDF without its distillation)",
        "  solera ls methods",
    ):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def side_by_side(averaging: dict[str, Any], distilling: dict[str, Any]) -> Table:
    """The two runs of the quickstart in one table. The small models of the second are those of FedDF to the bit."""
    rows: list[Sequence[str]] = []
    for name, score in averaging["models"].items():
        a, b = score["accuracy"], distilling["models"][name]["accuracy"]
        rows.append((name, percent(a), percent(b), f"{100 * (b - a):+.1f}"))
    for name in distilling["models"].keys() - averaging["models"].keys():
        rows.append((f"{name} (the server's own)", "-", percent(distilling["models"][name]["accuracy"]), ""))
    for name, score in distilling["ensembles"].items():
        rows.append((f"ensemble ({name})", "-", percent(score["accuracy"]), ""))
    both = (averaging, distilling)
    for way, name in (("down", "sent to clients"), ("up", "sent by clients")):
        rows.append((name, *(human_bytes(s["bytes"][way]) for s in both), ""))
    rows.append(("time", *(human_time(s["seconds"]) for s in both), ""))
    heads = ("", "averaging alone", "FedDF", "gain")
    return table(heads, rows, right=3)
