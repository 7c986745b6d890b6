"""`solera quickstart`: compares averaging with distillation, and distils small models into a large one.

The small models of the second run are bitwise equal to those of FedDF (a test checks it). In addition it trains the
server's own model.
"""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..runs.words import human_bytes, human_time, percent
from .errors import Debug, reported
from .output import console
from .run import fresh, perform

RECIPES = {"fedavg": "quickstart/fedavg", "large": "quickstart/large"}


@reported
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the two run directories.")] = Path("runs/quickstart"),
    rounds: Annotated[int | None, typer.Option(help="Number of rounds, instead of the recipes' number.")] = None,
    debug: Debug = False,
) -> None:
    """Train three architectures on 20 clients by averaging alone, then with FedDF and a large model on the server.

    Example: [bold]solera quickstart[/bold] takes about a minute on two cores and needs no download.
    """
    from ..runs.config import load_config

    overrides = [] if rounds is None else [f"run.rounds={rounds}"]
    configs = {name: load_config(recipe, overrides) for name, recipe in RECIPES.items()}
    home = fresh(out)
    screen = console()
    shared = configs["large"]
    screen.print(
        f"{shared.partition.clients} clients hold very different parts of {shared.data.name}, with different models: "
        f"{', '.join(shared.models.clients)}. First each architecture is averaged over its own clients. Then FedDF "
        "also distils what all clients know together into each of them, and the same teachers train "
        f"{shared.models.server}, a larger model that only the server has.\n",
        highlight=False,
    )
    summaries = {}
    for name, config in configs.items():
        summaries[name] = perform(config, home / name, command=_command(RECIPES[name], home / name, rounds))
        screen.print()
    screen.print(compare(summaries["fedavg"], summaries["large"]))
    _next_steps(screen, home)


def _command(recipe: str, out: Path, rounds: int | None) -> str:
    """The command for one of the two runs."""
    length = [] if rounds is None else ["--rounds", str(rounds)]
    return shlex.join(["solera", "run", recipe, *length, "--out", str(out)])


def compare(averaging: dict[str, Any], distilling: dict[str, Any]) -> Table:
    """The two runs side by side."""
    table = Table(title="test accuracy after the last round", title_justify="left", header_style="bold")
    table.add_column("", overflow="fold")
    for column in ("averaging alone", "FedDF", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, score in averaging["models"].items():
        a, b = score["accuracy"], distilling["models"][name]["accuracy"]
        table.add_row(name, percent(a), percent(b), f"{100 * (b - a):+.1f}")
    for name in distilling["models"].keys() - averaging["models"].keys():
        table.add_row(f"{name} (the server's own)", "-", percent(distilling["models"][name]["accuracy"]), "")
    for name, score in distilling["ensembles"].items():
        table.add_row(f"ensemble ({name})", "-", percent(score["accuracy"]), "")
    table.add_section()
    both = (averaging, distilling)
    table.add_row("sent to clients", *(human_bytes(s["bytes"]["down"]) for s in both), "")
    table.add_row("sent by clients", *(human_bytes(s["bytes"]["up"]) for s in both), "")
    table.add_row("time", *(human_time(s["seconds"]) for s in both), "")
    return table


def _next_steps(screen: Console, home: Path) -> None:
    lines = [
        f"run directories: {home / 'fedavg'}, {home / 'large'}",
        "next:",
        f"  solera report {shlex.quote(str(home))} -o report.html           (figures of both, for the browser)",
        f"  solera show {shlex.quote(str(home / 'large'))}",
        "  solera run quickstart/large --set partition.alpha=1      (clients that are more alike)",
        "  solera run quickstart/feddf --set method.fusion.steps=0  (FedDF without its distillation)",
        "  solera ls methods",
    ]
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
