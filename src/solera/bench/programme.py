"""A whole measurement: cases one after another, each with the frameworks that can do the same work."""

import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..version import __version__
from . import peers
from .contest import hold
from .machine import describe
from .workloads import Case, Scale

FORMAT = 1
PROGRAMS = pathlib.Path("benchmarks/peers")  # seen from the repository's root


def measure(
    cases: Sequence[Case],
    scale: Scale,
    frameworks: Sequence[str] = (),
    peers_dir: pathlib.Path | None = None,
    repeats: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything that was found, ready to be written as JSON."""
    found: dict[str, Any] = {
        "format": FORMAT,
        "solera": __version__,
        "scale": scale,
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "cases": [],
    }
    home = peers_dir or pathlib.Path(tempfile.gettempdir()) / "solera-peers"
    wanted = frameworks if any(c.fleet for c in cases) else ()
    installed = {name: peers.install(name, home, tell) for name in wanted}
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="solera-bench-") as folder:
            here = pathlib.Path(folder)
            others = {}
            if case.fleet is not None and installed:
                timed = case.laps - case.warm_up if repeats is None else repeats
                peers.hand_out(case.fleet, here / "work", case.warm_up + timed)
                others = {n: peers.start_of(n, PROGRAMS, python, here / "work") for n, python in installed.items()}
            found["cases"].append(hold(case, scale, here, repeats, others, tell))
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    """The checks that failed, in words."""
    return [
        f"{c['case']}: {check}: {said}" for c in found["cases"] for check, said in c["checks"].items() if said != "ok"
    ]
