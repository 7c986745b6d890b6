"""The numbers behind every figure of the report, as plain data for the page's JSON.

Rounds are counted from 1 here. A group is the runs of one case over its seeds; figures of a single run (a timeline, a
matrix) show the first one.
"""

import base64
import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.plugins import label
from ..runs.callbacks import KINDS
from ..runs.groups import Group, cautions, companions, group_runs
from ..runs.read import Run
from ..runs.results import Comparison, Lines, Point, Result, compared_results, unlike
from ..runs.words import show
from .loading import Matrix, Record

# Limits, so that the page stays small.
POINTS = 300  # of one line
SPANS = 2000  # of a timeline
CLIENTS = 120  # in the coefficient matrix
BUBBLES = 6000  # classes times clients
CELLS = 1_500_000  # of coefficients in the whole report
ROWS = 300  # of a table
PHASES = ("clients", "server", "evaluate", "commit")  # of a round's seconds
LISTED = 12  # entries of a list among the facts of an event
TEACHERS = 60
METRICS = ("disagreement", "kl")  # between the members of an ensemble
STEPS = [round(0.05 * i, 2) for i in range(1, 20)]  # the targets to choose from
NAMING = ("case", "data.name")  # always part of a case's label if they differ
DRAWN = {"coefficients", "timeline", "timetable", "distilled", "teachers"}  # events that have a figure
PLAIN = {"variates", "public_sent"}  # events that are not listed; `variates_grow` reports a problem


def report_data(records: Sequence[Record], target: float | None = None) -> dict[str, Any]:
    """All data of the page."""
    groups = group_runs([r.run for r in records])
    by_run = {id(r.run): r for r in records}
    members = [[by_run[id(run)] for run in g.runs] for g in groups]
    ordered = [r for own in members for r in own]
    partitions: list[dict[str, Any]] = []  # each once: cases often share theirs
    labels = _labels(groups)
    cells = CELLS // max(1, sum(bool(own[0].matrices) for own in members))
    results = compared_results(groups)
    measured = [
        [_with_averages(r, of) for r, of in zip(g.runs, own, strict=True)]
        for g, own in zip(groups, results.lines, strict=True)
    ]
    data = {
        "title": _title(groups),
        "subtitle": _subtitle(groups, ordered),
        "notes": [*_cautions(results, ordered), *_missing(ordered)],
        "main_shared": results.shared is not None,
        "groups": [
            {"label": label, "main": None if main is None else list(main), **_group(g, own, lines, partitions, cells)}
            for label, g, own, lines, main in zip(labels, groups, members, measured, results.main, strict=True)
        ],
        "runs": [_run(r, i) for i, own in enumerate(members) for r in own],
        "targets": targets(measured, results.main, target),
        "partitions": partitions,
    }
    return finite(data)


def finite(value: Any) -> Any:
    """The same, with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


# ---- text -------------------------------------------------------------------------------------------


def _title(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return f"{groups[0].runs[0].name}: {groups[0].method}"
    methods = list(dict.fromkeys(g.method for g in groups))
    return ", ".join(methods) + " compared" if len(methods) <= 5 else f"{len(methods)} methods compared"


def _labels(groups: Sequence[Group]) -> list[str]:
    """The method, the data set if it differs, and the settings that differ from other cases of the method."""

    def of(g: Group, keys: Iterable[str]) -> Group:
        return Group(g.method, {k: g.settings[k] for k in keys}, g.runs)

    found = []
    for g in groups:
        same = [other for other in groups if other.method == g.method]
        keys = [k for k in g.settings if k in NAMING or any(o.settings[k] != g.settings[k] for o in same)]
        found.append(of(g, companions([of(o, keys) for o in same])).label)
    return found if len(set(found)) == len(found) else [g.label for g in groups]


def _subtitle(groups: Sequence[Group], records: Sequence[Record]) -> str:
    """The settings that all cases share: data, clients, models. The labels show the differences."""
    every = [g.runs[0].settings for g in groups]
    agreed = {k: v for k, v in every[0].items() if all(k in s and s[k] == v for s in every)}
    told = [f"{len(records)} runs" if len(records) > 1 else f"seed {show(groups[0].runs[0].seed)}"]
    told.append(", ".join(dict.fromkeys(label(str(s.get("data.name", "own data"))) for s in every)))
    if (clients := agreed.get("partition.clients")) is not None:
        kind, alpha = agreed.get("partition.kind", ""), agreed.get("partition.alpha")
        skewed = alpha is not None and kind in ("dirichlet", "quantity")
        told.append(f"{clients} clients" + (f", {kind}" if kind else "") + (f" alpha {show(alpha)}" if skewed else ""))
    models = list(dict.fromkeys(label(m) for m in agreed.get("models.clients") or [] if isinstance(m, str)))
    if models:
        told.append(", ".join(models))
    return " · ".join(told)


def _cautions(results: Comparison, records: Sequence[Record]) -> list[str]:
    """Reasons why the cases may not be comparable. A single running run needs no warning that it is not finished."""
    alone = len(records) == 1 and records[0].status == "running"
    found = [c for c in cautions(results.groups) if not (alone and c.startswith("not finished"))]
    return unlike(results) + found


def _missing(records: Sequence[Record]) -> list[str]:
    """Missing parts, each once, with the runs that lack them."""
    of: dict[str, list[str]] = {}
    for r in records:
        for note in r.notes:
            of.setdefault(note, []).append(str(r.run.path))

    def named(paths: list[str]) -> str:
        return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")

    return [f"{note} ({named(paths)})" if len(records) > 1 else note for note, paths in of.items()]


# ---- accuracy ---------------------------------------------------------------------------------------


def _with_averages(run: Run, lines: Lines) -> Lines:
    """The results of a run, and the averages of the clients' models before distillation."""
    found = dict(lines)
    sent = {p.round: p for points in lines.values() for p in points}
    for r in run.rounds:
        for name, score in r.of("average").items():
            if r.round in sent:
                point = sent[r.round]._replace(accuracy=score["accuracy"])
                found.setdefault(Result("average", name), []).append(point)
    return found


def _bands(each: Sequence[Lines]) -> list[dict[str, Any]]:
    """Each line's mean over the seeds, and the lowest and highest seed."""
    bands = []
    for result in dict.fromkeys(r for found in each for r in found):
        there = [found[result] for found in each if found.get(result)]
        by_round: dict[int, list[Point]] = {}
        for p in (p for points in there for p in points):
            by_round.setdefault(p.round, []).append(p)
        rounds = thinned([by_round[t] for t in sorted(by_round)], POINTS)
        values = [[p.accuracy for p in same] for same in rounds]
        hours = [[p.hours for p in same if p.hours is not None] for same in rounds]
        bands.append(
            {
                "kind": result.kind,
                "name": result.name,
                "round": [same[0].round + 1 for same in rounds],
                "bytes": [round(statistics.fmean(p.bytes_so_far for p in same)) for same in rounds],
                "hours": [_short(statistics.fmean(h)) for h in hours] if hours and all(hours) else None,
                "mean": [_short(statistics.fmean(v)) for v in values],
                "low": [_short(min(v)) for v in values],
                "high": [_short(max(v)) for v in values],
                "runs": [len(v) for v in values],
                "last": mean_std([points[-1].accuracy for points in there]),
                "best": mean_std([max(p.accuracy for p in points) for points in there]),
            }
        )
    return bands


def thinned(items: list[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spaced, including the last one."""
    if len(items) <= most:
        return items
    return [items[(i + 1) * len(items) // most - 1] for i in range(most)]


def mean_std(values: Sequence[float]) -> list[float] | None:
    """[mean, standard deviation over seeds]; a single value has no deviation."""
    if not values:
        return None
    return [_short(statistics.fmean(values)), *([_short(statistics.stdev(values))] if len(values) > 1 else [])]


def _short(x: float) -> float:
    return round(x, 5)


def targets(
    measured: Sequence[Sequence[Lines]], main: Sequence[Result | None], wanted: float | None = None
) -> dict[str, Any]:
    """Rounds and bytes until a target accuracy was first reached, for all targets in STEPS.

    The default target is the highest multiple of 5 % that the main result of at least half of the groups reaches.
    """
    values = sorted({*STEPS, *([wanted] if wanted is not None else [])})
    rows = []
    peaks = []
    for number, (each, result) in enumerate(zip(measured, main, strict=True)):
        for kind, name in dict.fromkeys(r for found in each for r in found if r.kind != "average"):
            own = [found.get(Result(kind, name), []) for found in each]
            rows.append({"group": number, "kind": kind, "name": name, "at": [_reached(own, v) for v in values]})
        if points := next((found[result] for found in each if result is not None and found.get(result)), None):
            peaks.append(max(p.accuracy for p in points))
    if wanted is None:
        common = sorted(peaks)[(len(peaks) - 1) // 2] if peaks else 0.0
        wanted = max((v for v in values if v <= common), default=values[0])
    return {"values": values, "shown": values.index(wanted), "rows": rows}


def _reached(each: Sequence[Sequence[Point]], target: float) -> list[Any]:
    """[runs that reached it, all runs, rounds (mean, std), bytes (mean, std)]"""
    first = [next((p for p in points if p.accuracy >= target), None) for points in each]
    found = [p for p in first if p is not None]
    rounds, sent = mean_std([p.round + 1 for p in found]), mean_std([p.bytes_so_far for p in found])
    return [len(found), len(each), rounds, sent]


# ---- one group --------------------------------------------------------------------------------------


def _group(
    g: Group, records: Sequence[Record], lines: Sequence[Lines], partitions: list[dict[str, Any]], cells: int
) -> dict[str, Any]:
    first, held = records[0], records[0].partition
    if held and held["shown"]:  # as many clients as a readable figure can show
        held = {**held, "shown": thinned(held["shown"], max(1, BUBBLES // max(1, held["classes"])))}
        partitions += [] if held in partitions else [held]
    else:
        held = None
    return {
        "method": g.method,
        "runs": len(g.runs),
        "lines": _bands(lines),
        "partition": None if held is None else partitions.index(held),
        "personal": personal(g.runs),
        "coefficients": coefficients(first.matrices, cells),
        "timeline": timeline(first.run),
        "timetable": timetable(first.run),
        "diversity": diversity(g.runs),
        "teachers": teachers(first.run),
        "confusion": confusion([r.confusion for r in records if r.confusion]),
        "regions": regions(first.regions),
        "seconds": seconds(g.runs),
        "traffic": {way: mean_std([float(run.bytes(way)) for run in g.runs]) for way in ("down", "up")},
        "content": content(g.runs),
        "adapters": adapters(first.run),
        "time": mean_std([run.seconds for run in g.runs]),
    }


def personal(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Accuracy of clients' own models: both means and the worst tenth by round, and every client after the last
    evaluation. Unknown values are NaN."""
    by_round: dict[int, list[dict[str, float]]] = {}
    latest: list[list[Any]] = []
    for run in runs:
        scored = [r for r in run.rounds if "mean" in r.own]
        for r in scored:
            by_round.setdefault(r.round, []).append(r.own)
        seed = f" (seed {show(run.seed)})" if len(runs) > 1 else ""
        each = scored[-1].of("client") if scored else {}
        latest += [[f"{k}{seed}", float(s["accuracy"])] for k, s in each.items()]
    if not by_round:
        return None
    rounds = thinned(sorted(by_round), POINTS)

    def by(key: str) -> list[float]:
        return [_short(statistics.fmean(p.get(key, math.nan) for p in by_round[t])) for t in rounds]

    return {
        "round": [t + 1 for t in rounds],
        "mean": by("mean"),
        "weighted": by("weighted_mean"),
        "worst": by("worst_decile"),
        "clients": sorted(latest, key=lambda pair: pair[1]),
    }


def coefficients(matrices: Sequence[Matrix], cells: int) -> dict[str, Any] | None:
    """The matrix after each round, one byte per cell, with clients ordered by similarity in the last one."""
    if not matrices:
        return None
    names = matrices[-1].clients
    N = len(names)
    kept = [i * N // min(N, CLIENTS) for i in range(min(N, CLIENTS))]
    last = matrices[-1].values
    order = similar_order([[last[i * N + j] + last[j * N + i] for j in kept] for i in kept])
    kept = [kept[i] for i in order]
    frames = thinned(list(matrices), max(1, cells // len(kept) ** 2))
    shown = [[m.values[i * N + j] for i in kept for j in kept] for m in frames]
    known = [v for values in shown for v in values if math.isfinite(v)] or [0.0]
    low, top = min(known), max(known)
    scale = 255 / (top - low) if top > low else 0.0
    return {
        "clients": [names[i] for i in kept],
        "left_out": N - len(kept),
        "round": [m.round + 1 for m in frames],
        "frames": [_bytes(scale * (v - low) for v in values) for values in shown],
        "low": _short(low),
        "top": _short(top),
        "givers": [_givers(m.values, N) for m in frames],
    }


def similar_order(similarity: Sequence[Sequence[float]]) -> list[int]:
    """Positions of a symmetric similarity matrix, with similar ones side by side. For a few hundred items at most.

    The order of a dendrogram's leaves. There are four ways to join two groups; it takes the one whose adjacent ends are
    most similar. Ties go to the first, so the order is always the same.
    """
    n = len(similarity)
    groups = {i: [i] for i in range(n)}  # number of a group -> its positions in order
    near = [list(row) for row in similarity]  # between groups: the mean over their members
    while len(groups) > 1:
        numbers = sorted(groups)
        pairs = ((i, j) for at, i in enumerate(numbers) for j in numbers[at + 1 :])
        a, b = max(pairs, key=lambda pair: near[pair[0]][pair[1]])
        size_a, size_b = len(groups[a]), len(groups[b])
        for c in numbers:
            near[a][c] = near[c][a] = (size_a * near[a][c] + size_b * near[b][c]) / (size_a + size_b)
        left, right = groups[a], groups.pop(b)
        ways = [(x, y) for x in (left, left[::-1]) for y in (right, right[::-1])]
        x, y = max(ways, key=lambda way: similarity[way[0][-1]][way[1][0]])
        groups[a] = x + y
    return next(iter(groups.values()), [])


def _givers(values: Sequence[float], N: int) -> list[float]:
    """The effective number of teachers of a student: lowest, mean and highest exp(entropy of a column)."""
    found = []
    for j in range(N):
        column = [max(0.0, values[i * N + j]) for i in range(N)]
        total = sum(column)
        shares = [c / total for c in column if c > 0] if math.isfinite(total) else []
        found.append(math.exp(-sum(p * math.log(p) for p in shares)))
    return [round(f(found), 3) for f in (min, statistics.fmean, max)]


def _bytes(values: Iterable[float]) -> str:
    """Numbers from 0 to 255 as text."""
    whole = bytes(min(255, max(0, round(v))) if math.isfinite(v) else 0 for v in values)
    return base64.b64encode(whole).decode()


def teachers(run: Run) -> dict[str, Any] | None:
    """The agreement of the teachers of each round, and the weight of each teacher by its confidence."""

    def number(value: Any) -> float | None:
        return float(value) if isinstance(value, int | float) else None

    found: list[tuple[int, dict[str, Any], float | None]] = []
    for r in run.rounds:
        event = next((e for e in r.events if e.get("kind") == "teachers"), None)
        shares = event.get("confidence") if event else None
        whole = isinstance(shares, list) and all(isinstance(v, int | float) for v in shares)
        if event is not None and whole and isinstance(event.get("clients"), list):
            dissent = next((e.get("dissent") for e in r.events if e.get("kind") == "distilled"), None)
            found.append((r.round, event, number(dissent)))
    if not found:
        return None
    found = thinned(found, POINTS)
    often: dict[str, int] = {}
    for _, e, _ in found:
        for k in e["clients"]:
            often[str(k)] = often.get(str(k), 0) + 1
    shown = sorted(sorted(often, key=lambda k: -often[k])[:TEACHERS])
    weights = []
    for _, e, _ in found:
        of = dict(zip(map(str, e["clients"]), e["confidence"], strict=False))
        equal = 1 / max(1, len(e["clients"]))
        weights.append([round(of[k] / equal, 3) if k in of else None for k in shown])
    return {
        "round": [t + 1 for t, _, _ in found],
        **{key: [number(e.get(key)) for _, e, _ in found] for key in ("dissenting", "unanimous")},
        "dissent": [d for _, _, d in found],
        "clients": shown,
        "left_out": len(often) - len(shown),
        "weights": weights,
    }


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
    """The differences between the members of each ensemble, by round, as mean over seeds."""
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
    """Savings by LoRA: bytes of a model as it is sent and whole, by architecture; and, from the number of clients of
    each, the bytes that whole models would have added to the run's traffic."""
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


def confusion(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The confusion matrices of all seeds, added up."""
    same = [c for c in found if len(c["total"]) == len(found[0]["total"])]
    if not same:
        return None
    items = []
    for item in same[0]["items"]:
        of = [i for c in same for i in c["items"] if (i["kind"], i["name"]) == (item["kind"], item["name"])]
        matrices = [i["matrix"] for i in of]
        whole = all(m is not None for m in matrices)
        items.append(
            {
                **item,
                "right": [sum(column) for column in zip(*(i["right"] for i in of), strict=True)],
                "total": [len(of) * n for n in same[0]["total"]],
                "matrix": [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
                if whole
                else None,
            }
        )
    return {"round": same[0]["round"] + 1, "items": items} if items else None


def regions(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Decision regions, one byte for each class at each grid point."""
    if found is None:
        return None
    panels = [{**p, "percent": _bytes(v for row in p["percent"] for v in row)} for p in found["panels"]]
    return {**found, "round": found["round"] + 1, "panels": panels}


def seconds(runs: Sequence[Run]) -> dict[str, float] | None:
    """Seconds of a whole run by phase, as mean over seeds."""
    of = {p: statistics.fmean(sum(r.seconds.get(p, 0.0) for r in run.rounds) for run in runs) for p in PHASES}
    return {p: round(s, 3) for p, s in of.items()} if any(run.rounds for run in runs) else None


# ---- one run ----------------------------------------------------------------------------------------


def _run(r: Record, group: int) -> dict[str, Any]:
    run = r.run
    failures = [
        [done.round + 1, *(str(f.get(k, "")) for k in ("client", "task", "reason"))]
        for done in run.rounds
        for f in done.failures
    ]
    events = [
        [done.round + 1, str(e.get("kind", "")), _facts(e)]
        for done in run.rounds
        for e in done.events
        if e.get("kind") not in DRAWN | PLAIN
    ]
    events.sort(key=lambda row: row[1] not in KINDS)  # problems first, the others in their order
    summary = run.summary or {}
    environment = summary.get("environment")
    config = run.path / "config.toml"
    readable = config.is_file() and not any(what.startswith("config.toml") for what in run.missing)
    return {
        "group": group,
        "path": str(run.path),
        "name": run.name,
        "seed": show(run.seed),
        "status": r.status,
        "done": len(run.rounds),
        "wanted": run.rounds_wanted,
        "down": run.bytes("down"),
        "up": run.bytes("up"),
        "seconds": round(run.seconds, 1),
        "digest": str(summary.get("digest") or ""),
        "command": r.command,
        "again": f"solera run {shlex.quote(str(config))}" if readable else None,
        "environment": [[str(k), str(v)] for k, v in environment.items()] if isinstance(environment, dict) else [],
        "settings": [[k, show(v)] for k, v in run.settings.items()],
        "failures": failures[:ROWS],
        "failures_total": len(failures),
        "events": events[:ROWS],
        "events_total": len(events),
    }


def _facts(event: dict[str, Any]) -> str:
    told = [f"{k} {_brief(v)}" if k != "reason" else show(v) for k, v in event.items() if k != "kind"]
    text = ", ".join(told)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _brief(value: Any) -> str:
    """A fact as short text: for a long list its length, for a table the keys of each value."""
    if isinstance(value, list) and len(value) > LISTED:
        return f"({len(value)} entries)"
    if not isinstance(value, dict):
        return show(value)
    same: dict[str, list[str]] = {}
    for k, v in value.items():
        same.setdefault(_brief(v), []).append(str(k))
    return "; ".join(f"{v}: {' '.join(keys)}" for v, keys in sorted(same.items()))
