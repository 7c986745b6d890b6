"""Results by kind, the main result that all cases share, and warnings about results that are not comparable.

An accuracy says little without knowing what was measured. So the kinds of results are never mixed:

    model      one model for all clients, of one architecture; whole test set
    mean       the mean over the architectures that all cases have
    server     the server's own model, larger than the clients' models; whole test set
    part       one of several models of an architecture (IFCA's clusters, the members of Fed-ensemble: NAME, NAME.1,
               ...), or a part of a model (HeteroFL's: NAME-0.5): not a model for all clients; whole test set
    ensemble   several models that predict together; whole test set
    own        clients' own models, each on its client's test split: mean over clients, with equal weights
    weighted   the same, weighted by test samples

A comparison has a main result only if all of its cases have it.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .groups import Group, cautions
from .read import Run
from .record import OWN, RoundRecord
from .words import human_bytes, show, some

WEIGHTED = "own models, weighted by samples"
MAIN = ("server", "own", "mean", "model", "ensemble")  # the first of these that a case has is its main result
EVERYBODY = ("model", "mean", "server", "part", "ensemble")  # evaluated on the whole test set
NEAR = 0.01  # smaller differences in training samples are due to rounding
FAR = 2.0  # a larger ratio of traffic gives a warning


class Point(NamedTuple):
    """One measurement of one series, and all that was sent in both directions up to the end of its round."""

    round: int  # counted from 0, as in metrics.jsonl
    bytes_so_far: int
    accuracy: float = math.nan
    floats_so_far: int = 0  # parameters, predictions
    hours: float | None = None  # by the simulated clock, if the run has one


def spent(run: Run) -> Iterator[tuple[RoundRecord, Point]]:
    """Every round of a run, with its point (accuracy unset)."""
    sent = floats = 0
    for r in run.rounds:
        sent, floats = sent + r.traffic.sent(), floats + sum(r.traffic.floats.values())
        hours = r.simulated["end_s"] / 3600 if "end_s" in r.simulated else None
        yield r, Point(r.round, sent, floats_so_far=floats, hours=hours)


class Result(NamedTuple):
    """A measured quantity: its kind (see above) and its name."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """The result for display."""
        return {"server": f"{self.name} (server)", "ensemble": f"ensemble {self.name}"}.get(self.kind, self.name)

    @property
    def like(self) -> "Result":
        """A key, equal for results that can be ranked together, such as server models of any architecture."""
        return Result("server", "") if self.kind == "server" else self


Lines = dict[Result, list[Point]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of several cases, and the main one."""

    groups: Sequence[Group]
    lines: list[list[Lines]]  # of each group's runs
    shared: Result | None  # the main result, if all cases have it (see `Result.like`)
    main: list[Result | None]  # of each group: the shared one, or else its own
    common: list[str]  # architectures of which every case has a model for all clients (cases without any do not count)

    def of(self, group: int) -> list[Result]:
        """All results of a group."""
        return list(dict.fromkeys(r for found in self.lines[group] for r in found))


def lines_of(run: Run) -> Lines:
    """Every accuracy of a run, by result and round."""
    found: Lines = {}
    for r, so_far in spent(run):
        scores = {Result(r.kinds.get(n, "model"), n): s["accuracy"] for n, s in r.of("model").items()}
        scores |= {Result("ensemble", n): s["accuracy"] for n, s in r.of("ensemble").items()}
        own = r.own
        for metric, result in (("mean", Result("own", OWN)), ("weighted_mean", Result("weighted", WEIGHTED))):
            if metric in own:
                scores[result] = own[metric]
        for result, accuracy in scores.items():
            found.setdefault(result, []).append(so_far._replace(accuracy=accuracy))
    return found


def compared_results(groups: Sequence[Group]) -> Comparison:
    """The results of these cases, and the main one."""
    lines = [[lines_of(run) for run in g.runs] for g in groups]
    names = [list(dict.fromkeys(r.name for found in own for r in found if r.kind == "model")) for own in lines]
    some = [own for own in names if own]
    common = [n for n in some[0] if all(n in own for own in some)] if some else []
    for own, there in zip(lines, names, strict=True):
        over = (common or there) if there else []
        for found in own:
            if len(over) > 1 and all(Result("model", n) in found for n in over):
                found[Result("mean", f"mean of {', '.join(over)}")] = _mean([found[Result("model", n)] for n in over])
    usual = [_candidates(own, common) for own in lines]
    measured = [own for own in usual if own]  # a case without results yet does not change the main result
    first = measured[0] if measured else []
    shared = next((r.like for r in first if all(r.like in [o.like for o in own] for own in measured)), None)
    main = [next((r for r in own if r.like == shared), None) if shared else next(iter(own), None) for own in usual]
    return Comparison(groups, lines, shared, main, common)


def _candidates(lines: Iterable[Lines], common: Sequence[str]) -> list[Result]:
    """Possible main results of a case, in the order of MAIN."""
    found = list(dict.fromkeys(r for own in lines for r in own))
    return [r for kind in MAIN for r in found if r.kind == kind and (kind != "model" or r.name in common or not common)]


def _mean(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of several lines, in the rounds that all of them have."""
    by_round: dict[int, list[Point]] = {}
    for points in lines:
        for p in points:
            by_round.setdefault(p.round, []).append(p)
    return [
        same[0]._replace(accuracy=statistics.fmean(p.accuracy for p in same))
        for _, same in sorted(by_round.items())
        if len(same) == len(lines)
    ]


def warnings_of(runs: Sequence[Run], results: Comparison) -> list[str]:
    """Missing parts of the runs, and reasons why the runs may not be comparable."""
    missing = [f"{run.path}: {what}" for run in runs for what in run.missing if not what.startswith("not finished")]
    return missing + unlike(results) + cautions(results.groups)


def main_result(results: Comparison) -> str | None:
    """The label of the result by which all cases can be compared; None if there is no such result."""
    there = [r for r in results.main if r is not None]
    if results.shared is None or not there:
        return None
    return "the server's own model" if results.shared.kind == "server" else there[0].label


def unlike(found: Comparison) -> list[str]:
    """Differences between the cases in their results or their data, each in one line."""
    return list(_differences(found)) if len(found.groups) > 1 else []


def _differences(found: Comparison) -> Iterator[str]:
    groups, shared = found.groups, found.shared
    first = [g.runs[0].settings for g in groups]
    main = [(g, r.label) for g, r in zip(groups, found.main, strict=True) if r is not None]
    if shared is None and len(main) > 1:
        yield f"no main result that all cases have: {_listed(main)}; these accuracies are not comparable"
    if shared is not None and shared.kind in ("mean", "model"):  # some models are left out
        rest = [(g, [r.name for r in found.of(i) if r.kind == "model"]) for i, g in enumerate(groups)]
        few = [(g, ", ".join(n for n in own if n not in found.common)) for g, own in rest]
        if few := [(g, names) for g, names in few if names]:
            yield f"the main result is {shared.label}, which all cases have; it leaves out {_listed(few)}"
    kinds = {r.kind for i in range(len(groups)) for r in found.of(i)}
    common = all(s.get("data.client_test") == "common" for s in first)
    if not common and "own" in kinds and kinds & set(EVERYBODY):
        yield (
            "clients' own models are evaluated on their clients' test splits, which hold few classes; everything else "
            "on the whole test set: do not compare these accuracies with each other"
        )
    yield from _training_data(groups)
    keys = [("run.eval_every", "the best round is chosen among different rounds")]
    if shared is None or shared.kind == "own":
        keys.append(("run.eval_clients", "the own models of different clients are scored"))
    if shared is not None and shared.kind == "server":
        keys.append(("models.server", "a larger model may be better just because of its size"))
    for key, why in keys:
        values = [show(s[key]) for s in first if key in s]
        if len(values) == len(groups) and len(set(values)) > 1:
            yield f"different {key}: {_listed(zip(groups, values, strict=True))}; {why}"
    if not any("run.seed" in g.settings or any(r.seed is None for r in g.runs) for g in groups):
        of = [", ".join(show(s) for s in sorted({r.seed for r in g.runs if r.seed is not None})) for g in groups]
        if len(set(of)) > 1:
            told = _listed((g, f"seed{'s' if ',' in s else ''} {s}") for g, s in zip(groups, of, strict=True))
            yield (
                f"different seeds: {told}; a seed determines the partition and the initial weights, so use the "
                "same seeds"
            )
    sent = [statistics.fmean(r.bytes("down") + r.bytes("up") for r in g.runs) for g in groups]
    there = sorted((n, name) for n, name in zip(sent, _names(groups), strict=True) if n)
    if len(there) > 1 and there[-1][0] > FAR * there[0][0]:
        (least, cheap), (most, dear) = there[0], there[-1]
        yield (
            f"different traffic: from {human_bytes(least)} ({cheap}) to {human_bytes(most)} ({dear}); equal rounds are "
            "not equal budgets: also compare the bytes to a target"
        )


def _training_data(groups: Sequence[Group]) -> Iterator[str]:
    """Warnings about cases with different numbers of training samples."""
    first = [g.runs[0].settings for g in groups]
    counts = [statistics.fmean(known) for g in groups if (known := [r.samples for r in g.runs if r.samples])]
    differ = len(counts) == len(groups) and max(counts) > (1 + NEAR) * min(counts)
    number = f" ({max(counts):.0f} samples against {min(counts):.0f})" if differ else ""
    explained = False
    for key, kept in (
        ("data.client_test", "a client's test split"),
        ("data.validation", "the server's validation set"),
    ):
        values = [show(s.get(key) or 0) for s in first]
        if len(set(values)) > 1:
            explained = True
            less = f"{kept} is not trained on, so the cases with less of it had more training data{number}"
            told = _listed(zip(groups, values, strict=True))
            yield f"different {key}: {told}; {less}: use the same in all cases"
    held = [_held_out(s) for s in first]
    if len(set(held)) > 1:
        explained = True
        less = f"held-out samples are not in the clients' training data{number}, and more of them distil better"
        yield f"different public data: {_listed(zip(groups, held, strict=True))}; {less}"
    same = all(len({show(s.get(key)) for s in first}) == 1 for key in ("data.name", "data.train_size"))
    if differ and not explained and same:
        told = _listed((g, f"{n:.0f}") for g, n in zip(groups, counts, strict=True))
        yield f"different numbers of clients' training samples: {told}"


def _held_out(settings: dict[str, Any]) -> str:
    if settings.get("public.source") != "held-out":
        return "nothing held out"
    return f"{show(size)} held out" if (size := settings.get("public.size")) is not None else "held out"


def _listed(told: Iterable[tuple[Group, Any]]) -> str:
    """Each value with the cases that have it: 0 (fedavg), 0.2 (mnfl and 4 more)."""
    given, cases = list(told), dict[Any, list[str]]()
    for name, (_, value) in zip(_names([g for g, _ in given]), given, strict=True):
        cases.setdefault(value, []).append(name)
    return "; ".join(f"{value} ({some(of)})" for value, of in cases.items())


def _names(groups: Sequence[Group]) -> list[str]:
    """The cases by method, or by their labels if a method occurs twice."""
    alone = len({g.method for g in groups}) == len(groups)
    return [g.method if alone else g.label for g in groups]
