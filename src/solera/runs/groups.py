"""Runs grouped over seeds, and the settings that differ between the groups."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from ..core.errors import ConfigError
from .read import SEED, Run
from .words import MARK, StandIns, short, show, some, verdict

# Settings that do not change a result: two runs that differ only in these and in the seed are one case.
NOT_COMPARED = {SEED, "run.name", "run.checkpoint_every"}
NOT_COMPARED_TABLES = ("track.", "engine.", "run.stand_ins.")
CHANGES_BITS = "engine.threads"  # devices change bits too, but runs are compared across them


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one case that differ in their seed (or in settings that the caller did not group by)."""

    method: str
    settings: dict[str, Any]  # the keys that differ between groups, with their values (None: not set)
    runs: list[Run]

    @property
    def stand_ins(self) -> StandIns:
        """The stand-ins of its first run that has any."""
        return next((r.stand_ins for r in self.runs if r.stand_ins), {})

    @property
    def label(self) -> str:
        """The group in one line: the method and the settings that differ."""
        told = [f"{short(k)}={show(v)}" for k, v in self.settings.items() if v is not None and k != "method.name"]
        return " ".join([self.method, *told])


def group_runs(runs: Sequence[Run], by: Sequence[str] | None = None) -> list[Group]:
    """Groups of runs that differ only in their seed, in the given order.

    With `by`, dotted keys such as "method.name" or "partition.alpha": groups of runs that agree in these.
    """
    columns = list(by) if by is not None else distinguishing(runs)
    cases: dict[str, list[Run]] = {}
    for run in runs:
        told = run.settings
        key = {k: told.get(k) for k in by} if by is not None else {k: v for k, v in told.items() if compared(k)}
        cases.setdefault(json.dumps([run.method if by is None else "", key], sort_keys=True, default=str), []).append(
            run
        )
    groups = []
    for members in cases.values():
        told = members[0].settings
        methods = list(dict.fromkeys(r.method for r in members))
        groups.append(Group(", ".join(methods), {k: told.get(k) for k in columns}, members))
    return groups


def grouping(runs: Sequence[Run], by: Sequence[str] | None) -> list[str] | None:
    """The keys to group by; "method" and "seed" are short for their settings. A key that no run has is refused."""
    if not by:
        return None
    known = list(dict.fromkeys(k for run in runs for k in run.settings))
    wanted = [{"method": "method.name", "seed": "run.seed"}.get(k, k) for text in by for k in text.split(",") if k]
    for key in wanted:
        if key not in known:
            near = get_close_matches(key, known, 1, 0.4) or distinguishing(runs)[:1] or ["method.name"]
            raise ConfigError(f"--by {key}: no run has this setting; did you mean {near[0]!r}?")
    return list(dict.fromkeys(wanted))


def distinguishing(runs: Sequence[Run]) -> list[str]:
    """The settings that differ between the rows of a comparison, besides the method and the seed.

    A method's setting is included if it differs between runs of that method. Settings that differ only because two
    methods have different defaults are in `between_methods`.
    """
    everything = _keys(runs)
    methods = {r.method for r in runs}

    def differs(key: str) -> bool:
        if not key.startswith("method."):
            return len(_values(runs, key)) > 1
        return any(len(_values([r for r in runs if r.method == name], key)) > 1 for name in methods)

    return [k for k in everything if k != "method.name" and differs(k)]


def companions(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The settings of the groups, each with the later ones that always change together with it: for example a data
    set's name with its path. The case of a sweep comes first."""
    found: dict[str, list[str]] = {}
    leads: dict[tuple[int, ...], str] = {}
    for key in groups[0].settings if groups else ():
        values = [_canonical(g.settings.get(key)) for g in groups]
        pattern = tuple(values.index(v) for v in values)
        if any(pattern) and pattern in leads:
            found[leads[pattern]].append(key)
        else:
            leads[pattern] = key
            found[key] = []
    return found


def between_methods(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Settings that several methods have, with values that differ only between methods: key -> method -> value."""
    apart, found = set(distinguishing(runs)), {}
    for key in _keys(runs):
        if not key.startswith("method.") or key == "method.name" or key in apart:
            continue
        values = {r.method: r.settings[key] for r in runs if key in r.settings}
        if len({_canonical(v) for v in values.values()}) > 1:
            found[key] = values
    return found


def compared(key: str) -> bool:
    """True if a setting makes two runs different cases."""
    return key == CHANGES_BITS or not (key in NOT_COMPARED or key.startswith(NOT_COMPARED_TABLES))


def cautions(groups: Sequence[Group]) -> list[str]:
    """Reasons why the runs may not be comparable, each in one line."""
    every = [r for g in groups for r in g.runs]
    runs = [r for r in every if r.config]  # the others have unknown settings; `missing` says so
    found = []
    for key, words in (("data.name", "data sets"), ("data.test_size", "test sets (data.test_size)")):
        if len(seen := _counted(runs, key)) > 1:
            found.append(f"different {words}: {_listed(seen)}; their accuracies are not comparable")
    for key in (k for k in _keys(runs) if k.startswith("partition.") or k == "data.train_size"):
        if len(seen := _counted(runs, key)) > 1:
            found.append(f"different {key}: {_listed(seen)}; compare rows that agree in it")
    for model in dict.fromkeys(m for r in every for m in r.weights):
        if len(seen := Counter(r.weights[model] for r in every if model in r.weights)) > 1:
            found.append(f"different weights of {model}: {_listed(seen)}; their accuracies are not comparable")
    if len(seen := _counted(runs, "run.rounds")) > 1:
        found.append(f"different run.rounds: {_listed(seen)}; bytes, seconds and last accuracies depend on it")
    if len(seen := Counter(f for r in every for f in dict.fromkeys(r.fingerprints))) > 1:
        found.append(
            f"machines with different fingerprints: {_listed(seen)}; the same seed does not give the same bits there"
        )
    found += _stand_ins(groups)
    if unfinished := [r for r in every if not r.finished]:
        named = some([f"{r.path} ({len(r.rounds)} of {r.rounds_wanted or '?'})" for r in unfinished])
        found.append(f"not finished, only the rounds so far count: {named}")
    for g in groups:
        twice = [s for s, n in Counter(r.seed for r in g.runs).items() if n > 1]
        if twice:
            found.append(f"{g.label}: several runs of seed {show(twice[0])}; the spread is not only over seeds")
        if pooled := [k for k in distinguishing(g.runs) if k not in g.settings]:
            found.append(f"{g.label}: pooled over runs that differ in {', '.join(pooled[:4])}")
    return found


def _stand_ins(groups: Sequence[Group]) -> list[str]:
    """The cases that are not the paper's row, with the reason; cases with one reason share a line."""
    cases: dict[str, list[str]] = {}
    for g in groups:
        if stand_ins := g.stand_ins:
            cases.setdefault(verdict(stand_ins), []).append(g.label)
    return [f"{MARK} {some(of)}: {text}" for text, of in cases.items()]


def _keys(runs: Sequence[Run]) -> list[str]:
    return [k for k in dict.fromkeys(k for r in runs for k in r.settings) if compared(k)]


def _values(runs: Iterable[Run], key: str) -> set[str]:
    return {_canonical(r.settings.get(key)) for r in runs}


def _counted(runs: Iterable[Run], key: str) -> Counter[str]:
    return Counter(show(r.settings.get(key)) for r in runs)


def _listed(seen: Counter[str]) -> str:
    return ", ".join(f"{value} ({n} run{'s' if n > 1 else ''})" for value, n in seen.items())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
