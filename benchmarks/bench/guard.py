"""The regression guard: what was measured against what was recorded on the same kind of machine."""

import dataclasses
import json
import pathlib
from typing import Any

from solera.core.errors import ConfigError

FALL = 0.2  # the share of a ratio that may be lost
SAME = ("cores", "cpu")  # of the machine; ratios differ less between machines than seconds, but they do

Spread = dict[str, float]  # median, q1, q3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One ratio within one run that is guarded. For all of them more is better."""

    what: str
    recorded: Spread
    found: Spread

    @property
    def ok(self) -> bool:
        """A fall counts if the median fell by more than a fifth and the quartiles lie apart: noise is not a fall."""
        fell = self.found["median"] < (1 - FALL) * self.recorded["median"]
        return not (fell and self.found["q3"] < self.recorded["q1"])

    def __str__(self) -> str:
        change = 100 * (self.found["median"] / self.recorded["median"] - 1)
        return f"{self.what}: {_show(self.found)}, recorded {_show(self.recorded)} ({change:+.0f} %)"


def _show(value: Spread) -> str:
    return f"{value['median']:.3g} [{value['q1']:.3g}, {value['q3']:.3g}]"


def numbers(found: dict[str, Any]) -> dict[str, Spread]:
    """What is guarded in a measurement: ratios against sides of the same run, never the share of a machine's peak.

    A growth in time for one unit is turned over: more is better.
    """
    out: dict[str, Spread] = {}
    for case in found["cases"]:
        for side, ratio in case["ratios"].items():
            value = _inverted(ratio) if case["growth"] else {k: ratio[k] for k in QUARTILES}
            out[f"{case['case']} against {side}"] = value
        if (share := case.get("framework_share")) is not None:  # 1 - bare / ours
            out[f"{case['case']} against bare"] = {a: 1 - share[b] for a, b in zip(QUARTILES, MIRRORED, strict=True)}
    return out


QUARTILES = ("median", "q1", "q3")
MIRRORED = ("median", "q3", "q1")


def _inverted(ratio: Spread) -> Spread:
    return {"median": 1 / ratio["median"], "q1": 1 / ratio["q3"], "q3": 1 / ratio["q1"]}


def peaks(found: dict[str, Any]) -> dict[str, float]:
    """The shares of the machine's peak: told beside the verdicts, because another machine has another peak."""
    return {c["case"]: c["peak_share"]["median"] for c in found["cases"] if "peak_share" in c}


def record(found: dict[str, Any], path: pathlib.Path) -> None:
    """Write down a measurement as the one to compare with."""
    kept = {k: found[k] for k in ("format", "solera", "scale", "date", "machine")}
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {k: {q: round(x, 4) for q, x in v.items()} for k, v in numbers(found).items()}
    told = {k: round(v, 4) for k, v in peaks(found).items()}
    path.write_text(json.dumps({**kept, "ratios": rounded, "peak_shares": told}, indent=1) + "\n")


def read(path: pathlib.Path, scale: str) -> dict[str, Any]:
    """What was recorded; refused where it cannot be compared with a measurement of this scale."""
    if not path.is_file():
        raise ConfigError(f"{path}: nothing is recorded there; record this machine with --record {path}")
    try:
        recorded = json.loads(path.read_text())
        known = recorded["scale"], dict(recorded["ratios"]), dict(recorded["machine"])
        _ = [ratio[q] for ratio in known[1].values() for q in QUARTILES]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no record of a benchmark: {type(e).__name__} {e}") from None
    if known[0] != scale:
        raise ConfigError(f"{path} was recorded with workloads of the scale {known[0]!r}, not {scale!r}")
    return recorded


def compare(recorded: dict[str, Any], found: dict[str, Any]) -> tuple[list[Verdict], list[str]]:
    """Verdicts on all numbers that are in both, and what has to be said about the comparison itself."""
    now = numbers(found)
    verdicts = [Verdict(what, then, now[what]) for what, then in recorded["ratios"].items() if what in now]
    if not verdicts:
        raise ConfigError("nothing that was measured is among what was recorded: there is nothing to compare")
    notes = [
        f"recorded on another machine ({key}: {recorded['machine'].get(key)}, here {found['machine'].get(key)})"
        for key in SAME
        if recorded["machine"].get(key) != found["machine"].get(key)
    ]
    then = recorded.get("peak_shares", {})
    for case, share in peaks(found).items():
        before = f", recorded {then[case]:.0%}" if case in then else ""
        notes.append(f"{case}: {share:.0%} of this machine's peak{before} (told, not judged)")
    return verdicts, notes
