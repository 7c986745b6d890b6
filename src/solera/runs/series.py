"""Accuracies of a run over its rounds, each with what the run had taken by then: bytes, numbers, simulated hours."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from .read import Run
from .record import RoundRecord


class Point(NamedTuple):
    """One measurement of one series, and all that was sent in both directions up to the end of its round."""

    round: int  # counted from 0, as in metrics.jsonl
    bytes_so_far: int
    accuracy: float = math.nan
    floats_so_far: int = 0  # parameters, predictions
    hours: float | None = None  # by the simulated clock, if the run has one


def spent(run: Run) -> Iterator[tuple[RoundRecord, Point]]:
    """Every round of a run, and its point without an accuracy."""
    sent = floats = 0
    for r in run.rounds:
        sent, floats = sent + r.traffic.sent(), floats + sum(r.traffic.floats.values())
        hours = r.simulated["end_s"] / 3600 if "end_s" in r.simulated else None
        yield r, Point(r.round, sent, floats_so_far=floats, hours=hours)
