"""Accuracies of a run over its rounds, and what it took until a target: rounds, bytes, parameters, simulated hours."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .read import Run
from .record import RoundRecord


class Point(NamedTuple):
    """One measurement of one series."""

    round: int  # counted from 0, as in metrics.jsonl
    bytes_so_far: int  # in both directions, including this round
    accuracy: float
    floats_so_far: int = 0  # numbers sent in both directions: parameters, predictions
    hours: float | None = None  # by the simulated clock, if the run has one


class Target(NamedTuple):
    """What it took until an accuracy was reached."""

    rounds: int  # 1: in the first round
    bytes: int
    floats: int = 0
    hours: float | None = None


class Spent(NamedTuple):
    """What a run has taken up to the end of a round."""

    bytes: int
    floats: int
    hours: float | None

    def point(self, round: int, accuracy: float) -> Point:
        """An accuracy that was measured then."""
        return Point(round, self.bytes, accuracy, self.floats, self.hours)


def spent(run: Run) -> Iterator[tuple[RoundRecord, Spent]]:
    """Every round of a run, and what was taken up to its end."""
    sent = floats = 0
    for r in run.rounds:
        sent, floats = sent + r.traffic.sent(), floats + sum(r.traffic.floats.values())
        yield r, Spent(sent, floats, r.simulated["end_s"] / 3600 if "end_s" in r.simulated else None)


def series(run: Run) -> dict[str, list[Point]]:
    """Accuracies by name: a model's name, "ensemble NAME", or "own models" (mean over clients)."""
    found: dict[str, list[Point]] = {}
    for r, so_far in spent(run):
        for label, accuracy in r.accuracies().items():
            found.setdefault(label, []).append(so_far.point(r.round, accuracy))
    return found


def reached(points: Iterable[Point], target: float) -> Target | None:
    """What it took until `target` was first reached; None if it never was."""
    first = next((p for p in points if p.accuracy >= target), None)
    return None if first is None else Target(first.round + 1, first.bytes_so_far, first.floats_so_far, first.hours)


def to_target(run: Run, target: float, label: str) -> Target | None:
    """The same for the series `label` of a run."""
    return reached(series(run).get(label, ()), target)
