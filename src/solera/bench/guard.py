"""The regression guard: what was measured against what was recorded on the same kind of machine."""

import dataclasses
import json
import pathlib
from typing import Any

from ..wire import ConfigError

FALL = 0.2  # the share of a ratio, or of the share of the peak, that may be lost
SAME = ("cores", "cpu")  # of the machine: on another one ratios are others


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One number that is guarded. For all of them more is better."""

    what: str
    recorded: float
    found: float

    @property
    def ok(self) -> bool:
        return self.found >= (1 - FALL) * self.recorded

    def __str__(self) -> str:
        change = 100 * (self.found / self.recorded - 1)
        return f"{self.what}: {self.found:.3g}, recorded {self.recorded:.3g} ({change:+.0f} %)"


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """What is guarded in a measurement, by name. A growth in time for one unit is turned over: more is better."""
    out: dict[str, float] = {}
    for case in found["cases"]:
        for side, ratio in case["ratios"].items():
            value = 1 / ratio["median"] if case["growth"] else ratio["median"]
            out[f"{case['case']} against {side}"] = value
        if "peak_share" in case:
            out[f"{case['case']}, share of the peak"] = case["peak_share"]["median"]
    return out


def record(found: dict[str, Any], path: pathlib.Path) -> None:
    """Write down a measurement as the one to compare with."""
    kept = {k: found[k] for k in ("format", "solera", "scale", "date", "machine")}
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {k: round(v, 4) for k, v in numbers(found).items()}
    path.write_text(json.dumps({**kept, "numbers": rounded}, indent=1) + "\n")


def read(path: pathlib.Path, scale: str) -> dict[str, Any]:
    """What was recorded; refused where it cannot be compared with a measurement of this scale."""
    if not path.is_file():
        raise ConfigError(f"{path}: nothing is recorded there; record this machine with --record {path}")
    try:
        recorded = json.loads(path.read_text())
        known = recorded["scale"], dict(recorded["numbers"]), dict(recorded["machine"])
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no record of a benchmark: {type(e).__name__} {e}") from None
    if known[0] != scale:
        raise ConfigError(f"{path} was recorded with workloads of the scale {known[0]!r}, not {scale!r}")
    return recorded


def compare(recorded: dict[str, Any], found: dict[str, Any]) -> tuple[list[Verdict], list[str]]:
    """Verdicts on all numbers that are in both, and what has to be said about the comparison itself."""
    now = numbers(found)
    verdicts = [Verdict(what, then, now[what]) for what, then in recorded["numbers"].items() if what in now]
    if not verdicts:
        raise ConfigError("nothing that was measured is among what was recorded: there is nothing to compare")
    notes = [
        f"recorded on another machine ({key}: {recorded['machine'].get(key)}, here {found['machine'].get(key)})"
        for key in SAME
        if recorded["machine"].get(key) != found["machine"].get(key)
    ]
    return verdicts, notes
