"""A whole measurement: cases one after another, each with the frameworks that can do the same work."""

import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from solera.core import __version__
from solera.core.errors import ConfigError

from . import peers
from .contest import hold
from .machine import describe
from .workloads import Case, Scale, every_case

FORMAT = 1
SAME = ("format", "solera", "scale", "machine")  # of measurements that can be put together
PROGRAMS = pathlib.Path("benchmarks/peers")  # seen from the repository's root


def nothing_yet(scale: Scale) -> dict[str, Any]:
    """A measurement without cases."""
    return {
        "format": FORMAT,
        "solera": __version__,
        "scale": scale,
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "cases": [],
    }


def measure(
    cases: Sequence[Case],
    scale: Scale,
    frameworks: Sequence[str] = (),
    peers_dir: pathlib.Path | None = None,
    repeats: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Everything that was found, ready to be written as JSON; `save` gets it after each case."""
    found = nothing_yet(scale)
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
        save(found)
    return found


def merged(path: pathlib.Path, found: dict[str, Any]) -> dict[str, Any]:
    """What the file holds with its cases replaced by those found now: a long measurement can be made in parts.

    A file of another machine, version or scale is no part of this measurement, and is refused.
    """
    if not path.is_file():
        return found
    try:
        before = json.loads(path.read_text())
        facts = {k: before[k] for k in SAME}
        cases = {c["case"]: c for c in before["cases"]}
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no measurement ({type(e).__name__} {e}): choose another --out") from None
    for key, value in facts.items():
        if value != found[key]:
            raise ConfigError(f"{path} was measured with {key} = {value}, not {found[key]}: choose another --out")
    cases |= {c["case"]: c for c in found["cases"]}
    order = {c.name: i for i, c in enumerate(every_case(found["scale"]))}
    return {**found, "cases": sorted(cases.values(), key=lambda c: order.get(c["case"], len(order)))}


def wrong(found: dict[str, Any]) -> list[str]:
    """The checks that failed, in words."""
    return [
        f"{c['case']}: {check}: {said}" for c in found["cases"] for check, said in c["checks"].items() if said != "ok"
    ]
