"""The two cases of FedEED's appendix A.7, worked out for constant times: what the simulated clock is compared with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pipeline = Literal["off", "strict"]
Availability = Literal["always", "uniform"]


@dataclass(frozen=True)
class Span:
    """One piece of work: of a client for its group, or (group 0, no client) of the server for the designated model."""

    round: int
    group: int
    client: int | None
    start: float
    end: float


def schedule(
    groups_by_round: Sequence[Sequence[int]],
    client_s: float,
    server_s: float,
    pipeline: Pipeline = "off",
    available: Availability = "always",
    period_s: float = 0.0,
) -> list[Span]:
    """Every piece of work of a run with designated distillation; client i works for group `groups_by_round[t][i]`.

    When round t + 1 of a group may begin:
        off       when the distillation of round t is over
        strict    the designated group (0) as with off; the others when all clients of round t have replied
    A client does one piece of work at a time. With `available = "uniform"` it can start only once every `period_s`;
    these times are evenly spread over the clients.
    """
    n = len(groups_by_round[0])
    free, ready = [0.0] * n, dict.fromkeys(groups_by_round[0], 0.0)
    server_free, spans = 0.0, []
    for t, groups in enumerate(groups_by_round):
        done = dict.fromkeys(groups, 0.0)
        for i, k in enumerate(groups):
            start = max(ready[k], free[i])
            if available == "uniform":
                start = _next_visit(start, i * period_s / n, period_s)
            free[i] = start + client_s
            done[k] = max(done[k], free[i])
            spans.append(Span(t, k, i, start, free[i]))
        everyone = max(done.values())
        start = max(everyone, server_free)
        server_free = start + server_s
        spans.append(Span(t, 0, None, start, server_free))
        ready = {k: _ready(k, pipeline, everyone, server_free) for k in ready}
    return spans


def _ready(k: int, pipeline: Pipeline, everyone: float, distilled: float) -> float:
    if k == 0 or pipeline == "off":
        return distilled
    return everyone


def _next_visit(earliest: float, offset: float, period: float) -> float:
    return offset + max(0, math.ceil((earliest - offset) / period - 1e-9)) * period


def completions(spans: Sequence[Span]) -> list[float]:
    """When each round's designated model was finished."""
    return [s.end for s in spans if s.client is None]
