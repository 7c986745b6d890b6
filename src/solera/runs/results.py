"""What can be compared: results by kind, the main result that all cases share, and warnings.

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
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .dotted import show
from .groups import Group
from .read import Run
from .record import OWN
from .series import Point, spent
from .words import human_bytes

WEIGHTED = "own models, weighted by samples"
MAIN = ("server", "own", "mean", "model", "ensemble")  # the first of these that a case has is its main result
EVERYBODY = ("model", "mean", "server", "part", "ensemble")  # evaluated on the whole test set
NEAR = 0.01  # smaller differences in training samples are due to rounding
FAR = 2.0  # a larger ratio of traffic gives a warning
LISTED = 3  # cases that are named; further ones are only counted


class Result(NamedTuple):
    """What was measured: its kind (see above) and its name."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """The result for display."""
        return {"server": f"{self.name} (server)", "ensemble": f"ensemble {self.name}"}.get(self.kind, self.name)

    @property
    def like(self) -> "Result":
        """Equal for all results that can be ranked together: server models of any architecture are."""
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
            found.setdefault(result, []).append(so_far.point(r.round, accuracy))
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


# ---- warnings ---------------------------------------------------------------------------------------


def unlike(found: Comparison) -> list[str]:
    """Where the cases differ in what was measured or in their data, each in one line."""
    if len(found.groups) < 2:
        return []
    told = [_no_shared(found), _left_out(found), _two_tests(found), *_training_data(found.groups)]
    return [text for text in [*told, *_measuring(found), _seeds(found.groups), _traffic(found.groups)] if text]


def _no_shared(found: Comparison) -> str | None:
    main = [(g, r) for g, r in zip(found.groups, found.main, strict=True) if r is not None]
    if found.shared is not None or len(main) < 2:
        return None
    told = _listed([g for g, _ in main], [r.label for _, r in main])
    return f"no main result that all cases have: {told}; these accuracies are not comparable"


def _left_out(found: Comparison) -> str | None:
    """Models for all clients that do not count in the main result, because other cases do not have them."""
    if found.shared is None or found.shared.kind not in ("mean", "model"):
        return None
    few = []
    for i, g in enumerate(found.groups):
        if rest := [r.name for r in found.of(i) if r.kind == "model" and r.name not in found.common]:
            few.append((g, ", ".join(rest)))
    if not few:
        return None
    told = _listed([g for g, _ in few], [names for _, names in few])
    return f"the main result is {found.shared.label}, which all cases have; it leaves out {told}"


def _two_tests(found: Comparison) -> str | None:
    if all(g.runs[0].settings.get("data.client_test") == "common" for g in found.groups):
        return None  # clients' own models are judged on the whole test set, too
    kinds = {r.kind for i in range(len(found.groups)) for r in found.of(i)}
    if "own" not in kinds or not kinds & set(EVERYBODY):
        return None
    return (
        "clients' own models are evaluated on their clients' test splits, which hold few classes; everything else on "
        "the whole test set: do not compare these accuracies with each other"
    )


def _training_data(groups: Sequence[Group]) -> list[str]:
    """Which cases had more training data."""
    samples = [statistics.fmean(known) if (known := [r.samples for r in g.runs if r.samples]) else None for g in groups]
    counts = [n for n in samples if n is not None]
    differ = len(counts) == len(groups) and max(counts) > (1 + NEAR) * min(counts)
    number = f" ({max(counts):.0f} samples against {min(counts):.0f})" if differ else ""
    found = []
    for key, kept in (
        ("data.client_test", "a client's test split"),
        ("data.validation", "the server's validation set"),
    ):
        values = [g.runs[0].settings.get(key) or 0 for g in groups]
        if len(set(map(show, values))) > 1:
            less = f"{kept} is not trained on, so the cases with less of it had more training data{number}"
            found.append(f"different {key}: {_listed(groups, map(show, values))}; {less}: use the same in all cases")
    held = [_held_out(g.runs[0].settings) for g in groups]
    if len(set(held)) > 1:
        less = f"held-out samples are not in the clients' training data{number}, and more of them distil better"
        found.append(f"different public data: {_listed(groups, held)}; {less}")
    same = all(len({show(g.runs[0].settings.get(k)) for g in groups}) == 1 for k in ("data.name", "data.train_size"))
    if differ and not found and same:
        told = _listed(groups, [f"{n:.0f}" for n in counts])
        found.append(f"different numbers of clients' training samples: {told}")
    return found


def _held_out(settings: dict[str, Any]) -> str:
    if settings.get("public.source") != "held-out":
        return "nothing held out"
    return f"{show(size)} held out" if (size := settings.get("public.size")) is not None else "held out"


def _measuring(found: Comparison) -> list[str]:
    """Settings that change what the numbers mean."""
    keys = [("run.eval_every", "the best round is chosen among different rounds")]
    if found.shared is None or found.shared.kind == "own":
        keys.append(("run.eval_clients", "the own models of different clients are scored"))
    if found.shared is not None and found.shared.kind == "server":
        keys.append(("models.server", "a larger model may be better just because of its size"))
    told = []
    for key, why in keys:
        values = [show(g.runs[0].settings[key]) if key in g.runs[0].settings else None for g in found.groups]
        if None not in values and len(set(values)) > 1:
            told.append(f"different {key}: {_listed(found.groups, values)}; {why}")
    return told


def _seeds(groups: Sequence[Group]) -> str | None:
    if any("run.seed" in g.settings or any(r.seed is None for r in g.runs) for g in groups):
        return None  # a comparison of seeds, or unknown seeds
    seeds = [", ".join(show(s) for s in sorted({r.seed for r in g.runs if r.seed is not None})) for g in groups]
    if len(set(seeds)) < 2:
        return None
    told = _listed(groups, [f"seed{'s' if ',' in s else ''} {s}" for s in seeds])
    return f"different seeds: {told}; a seed determines the partition and the initial weights, so use the same seeds"


def _traffic(groups: Sequence[Group]) -> str | None:
    sent = [statistics.fmean(r.bytes("down") + r.bytes("up") for r in g.runs) for g in groups]
    there = sorted((n, name) for n, name in zip(sent, _names(groups), strict=True) if n)
    if len(there) < 2 or there[-1][0] <= FAR * there[0][0]:
        return None
    (least, cheap), (most, dear) = there[0], there[-1]
    return (
        f"different traffic: from {human_bytes(least)} ({cheap}) to {human_bytes(most)} ({dear}); equal rounds are not "
        "equal budgets: also compare the bytes to a target"
    )


def _listed(groups: Sequence[Group], values: Iterable[Any]) -> str:
    """Each value with the cases that have it: 0 (fedavg), 0.2 (mnfl and 4 more)."""
    cases: dict[Any, list[str]] = {}
    for name, value in zip(_names(groups), values, strict=True):
        cases.setdefault(value, []).append(name)
    more = lambda of: f" and {len(of) - LISTED} more" if len(of) > LISTED else ""  # noqa: E731
    return "; ".join(f"{value} ({', '.join(of[:LISTED])}{more(of)})" for value, of in cases.items())


def _names(groups: Sequence[Group]) -> list[str]:
    """The cases by method, or by their labels if a method occurs twice."""
    alone = len({g.method for g in groups}) == len(groups)
    return [g.method if alone else g.label for g in groups]
