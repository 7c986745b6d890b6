"""The numbers behind the figures of time and of an ensemble's members: who worked when, and how different they are."""

import statistics
from collections.abc import Sequence
from typing import Any

from ..runs.read import Run

POINTS = 300  # of one line
SPANS = 2000  # of a timeline
METRICS = ("disagreement", "kl")


def timeline(run: Run) -> list[list[Any]] | None:
    """[round, what, start, end] of all timed work, in seconds since the start of the run."""
    spans: list[list[Any]] = []
    began = 0.0
    for r in run.rounds:
        for e in r.events:
            start, end = e.get("start"), e.get("end")
            if e.get("kind") == "timeline" and isinstance(start, int | float) and isinstance(end, int | float):
                groups = e.get("groups")
                where = f" {', '.join(map(str, groups))}" if isinstance(groups, list) else ""
                spans.append([r.round + 1, f"{e.get('what')}{where}", round(began + start, 3), round(began + end, 3)])
        began += r.seconds.get("total", 0.0)
    return spans[-SPANS:] or None


def timetable(run: Run) -> list[list[Any]] | None:
    """[round, client or "server", start, end] by the simulated clock, in hours since the start of the run."""
    spans = [
        [r.round + 1, str(who), start / 3600, end / 3600]
        for r in run.rounds
        for e in r.events
        if e.get("kind") == "timetable" and isinstance(e.get("spans"), list)
        for who, start, end in (
            s
            for s in e["spans"]
            if isinstance(s, list) and len(s) == 3 and all(isinstance(v, int | float) for v in s[1:])
        )
    ]
    return spans[-SPANS:] or None


def diversity(runs: Sequence[Run]) -> list[dict[str, Any]] | None:
    """How different the members of each ensemble are, by round, as mean over seeds."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    for run in runs:
        for r in run.rounds:
            for name, scores in r.of("diversity").items():
                if all(m in scores for m in METRICS):
                    found.setdefault(name, {}).setdefault(r.round, []).append(scores)
    lines = []
    for name, by_round in found.items():
        rounds = sorted(by_round)[-POINTS:]
        means = {m: [round(statistics.fmean(s[m] for s in by_round[t]), 5) for t in rounds] for m in METRICS}
        lines.append({"name": name, "round": [t + 1 for t in rounds], **means})
    return lines or None


def adapters(run: Run) -> dict[str, Any] | None:
    """What LoRA keeps off the wire: bytes of a model as it is sent and whole, by architecture; and, from the number of
    clients of each, what whole models would have added to the run's traffic."""
    found = (run.summary or {}).get("lora")
    if not isinstance(found, dict) or not found:
        return None
    try:
        rows: list[list[Any]] = [
            [str(A), int(of["sent"]), int(of["whole"]), int(of["clients"])] for A, of in found.items()
        ]
    except (KeyError, TypeError, ValueError):
        return None
    sent, whole = (sum(row[i] * row[3] for row in rows) for i in (1, 2))
    parameters = (content([run]) or {}).get("parameters", 0)
    return {"rows": rows, "saved": round(parameters * (whole / sent - 1)) if sent else 0}


def content(runs: Sequence[Run]) -> dict[str, float] | None:
    """Bytes of a run by what they carry, both ways together, as mean over seeds."""
    found: dict[str, int] = {}
    for run in runs:
        for r in run.rounds:
            for kinds in r.traffic.content.values():
                for kind, count in kinds.items():
                    found[kind] = found.get(kind, 0) + count
    return {kind: total / len(runs) for kind, total in found.items()} if any(found.values()) else None
