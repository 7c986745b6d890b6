"""Accuracies of a run over its rounds, and what it took to reach one."""

from collections.abc import Iterable
from typing import NamedTuple

from .read import Run


class Point(NamedTuple):
    """One measurement of one series."""

    round: int  # counted from 0, as in metrics.jsonl
    bytes_so_far: int  # both ways, this round included
    accuracy: float


class Target(NamedTuple):
    """What it took to reach an accuracy."""

    rounds: int  # counted: 1 is the first round
    bytes: int


def series(run: Run) -> dict[str, list[Point]]:
    """Accuracy by what was measured: a model's name, "ensemble NAME", or "own models" (mean over clients)."""
    found: dict[str, list[Point]] = {}
    sent = 0
    for r in run.rounds:
        sent += r.traffic.sent()
        for label, accuracy in r.accuracies().items():
            found.setdefault(label, []).append(Point(r.round, sent, accuracy))
    return found


def reached(points: Iterable[Point], target: float) -> Target | None:
    """Rounds and bytes until `target` was first reached; None if it never was."""
    return next((Target(p.round + 1, p.bytes_so_far) for p in points if p.accuracy >= target), None)


def to_target(run: Run, target: float, label: str) -> Target | None:
    """The same of the series `label` of a run."""
    return reached(series(run).get(label, ()), target)
