"""Accuracies of a run over its rounds, and the rounds and bytes until a target."""

from collections.abc import Iterable
from typing import NamedTuple

from .read import Run


class Point(NamedTuple):
    """One measurement of one series."""

    round: int  # counted from 0, as in metrics.jsonl
    bytes_so_far: int  # in both directions, including this round
    accuracy: float


class Target(NamedTuple):
    """Rounds and bytes until an accuracy was reached."""

    rounds: int  # 1: in the first round
    bytes: int


def series(run: Run) -> dict[str, list[Point]]:
    """Accuracies by name: a model's name, "ensemble NAME", or "own models" (mean over clients)."""
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
    """The same for the series `label` of a run."""
    return reached(series(run).get(label, ()), target)
