"""Reading finished, running and half-written run directories, and grouping them over seeds.

What is there is read, what is not is named in `missing`; only a folder that holds no run at all is refused. Nothing
here imports torch: comparing and reporting have to be quick.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..files import check_file, read_file
from .words import accuracies

OLD_SPELLINGS = {"optimiser": "optimizer", "distil": "distill"}  # settings of version 0.1
SEED = "run.seed"
# Settings that change no result, or only name it: two runs that differ in nothing else but the seed are one case.
NOT_COMPARED = {SEED, "run.name", "run.checkpoint_every", "engine.name", "engine.workers"}
NOT_COMPARED_TABLES = ("track.",)
MAX_BYTES = 1 << 30  # a metrics.jsonl beyond this is not one of ours
FORMAT = 2  # of the directories whose profile is understood: `store.FORMAT`, which would bring torch along
FORMATS = (1, FORMAT)  # those of version 0.1 as well: what is read here has not changed
PROFILE = "profile/profile.json"
MAX_PROFILE_BYTES = 10_000_000
PHASES = ("clients", "server", "evaluate", "commit")  # of a round's seconds; "total" is their sum
MAX_PHASES = 20  # some may come to be; more are not ours


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory says, as far as it is there."""

    path: Path
    name: str
    method: str
    config: dict[str, Any]  # the tables of config.toml; of a run started from Python, what run.json tells
    rounds: list[dict[str, Any]]  # the lines of metrics.jsonl in order, each round once, every field present
    summary: dict[str, Any] | None
    finished: bool
    missing: list[str]  # what is absent or damaged, each in a few words
    samples: int | None = None  # all clients' training samples together, if partition.json tells

    @property
    def seed(self) -> int | None:
        return self.settings.get(SEED)

    @property
    def rounds_wanted(self) -> int | None:
        """How many rounds the run is meant to have; None if nothing says so."""
        wanted = self.settings.get("run.rounds")
        return wanted if isinstance(wanted, int) else None

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted keys."""
        return flat(self.config)

    def bytes(self, way: str) -> int:
        """What was sent "down" to the clients or "up" from them, in all rounds."""
        return sum(sum(m["bytes"][way].values()) for m in self.rounds)

    @property
    def seconds(self) -> float:
        return sum(m["seconds"].get("total", 0.0) for m in self.rounds)

    @property
    def failures(self) -> int:
        """How many replies were lost."""
        return sum(len(m["failures"]) for m in self.rounds)


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one case that differ in their seed (or in whatever the caller did not group by)."""

    method: str
    settings: dict[str, Any]  # the keys that tell this group from others, and their values (None: not set)
    runs: list[Run]

    @property
    def label(self) -> str:
        """The group in one line: the method and what is special about it."""
        told = [f"{short(k)}={show(v)}" for k, v in self.settings.items() if v is not None and k != "method.name"]
        return " ".join([self.method, *told])


class Point(NamedTuple):
    """One measurement of one series."""

    round: int  # counted from 0, as in metrics.jsonl
    bytes_so_far: int  # both ways, this round included
    accuracy: float


class Target(NamedTuple):
    """What it took to reach an accuracy."""

    rounds: int  # counted: 1 is the first round
    bytes: int


class Cost(NamedTuple):
    """A function or an operator, and what it took."""

    name: str
    where: str  # file:line; empty for what is not written in Python
    calls: int
    own_s: float  # without what it called
    total_s: float | None  # with it; not measured of operators


@dataclasses.dataclass(frozen=True)
class ProfiledTask:
    """One client's call of a task, made again for the profile."""

    task: str
    client: str
    seconds: float  # undisturbed
    functions: list[Cost]
    operators: list[Cost]
    trace: str | None  # the file with every operator, below the run directory
    trace_bytes: int | None  # its size; None if it is not there
    untraced: str  # why there is no trace; empty if there is one
    error: str  # what it ended with: then there is nothing else


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the time of one round went, the costliest first; see docs/run-directory.md."""

    round: int  # counted from 0, as in metrics.jsonl
    seconds: dict[str, float]  # by phase, and "total"
    seconds_before: dict[str, float] | None  # of the round before, which was not profiled
    functions: list[Cost]  # of the server's process
    tasks: list[ProfiledTask]


# ---- reading ----------------------------------------------------------------------------------------


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run directories among `paths` and below them, each once, in order. What holds none is refused."""
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            raise _error(f"{given} is no folder; give run directories, or folders that hold some")
        inside = [path] if is_run(path) else sorted(p.parent for p in path.rglob("run.json") if is_run(p.parent))
        if not inside:
            raise _error(f"{given} holds no run: there is no run.json in it or below it")
        found |= dict.fromkeys(inside)
    return list(found)


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in and below `paths`. Those of a sweep carry the name of their case as the setting "case"."""
    return list(each_run(paths))


def each_run(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Run]:
    """The same one by one, for a reader that does not keep all of them."""
    cases: dict[Path, str] = {}
    for given in map(Path, paths):
        index = _read_json(given / "sweep.json", []) or {}
        entries = index.get("runs")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("case") and isinstance(entry.get("out"), str):
                cases[given / entry["out"]] = str(entry["case"])
    for run in map(read_run, find_runs(paths)):
        case = {"case": cases[run.path]} if run.path in cases else {}
        yield dataclasses.replace(run, config=case | run.config)


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run directory, however little of it there is."""
    return any((path / name).is_file() for name in ("run.json", "metrics.jsonl"))


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run in a directory, whatever state it is in."""
    home = Path(path)
    if not home.is_dir():
        raise _error(f"{path} is no folder; give a run directory")
    if not any((home / name).is_file() for name in ("run.json", "config.toml", "metrics.jsonl")):
        raise _error(f"{path} holds no run: there is no run.json in it")
    missing: list[str] = []
    facts = _read_json(home / "run.json", missing) or {}
    summary = _read_json(home / "summary.json", [])  # absent until the run is finished: said below
    config = respelled(_read_config(home, facts, summary, missing))
    rounds = read_rounds(home / "metrics.jsonl", missing)
    wanted = _dig(config, "run", "rounds")
    finished = summary is not None and (not isinstance(wanted, int) or len(rounds) >= wanted)
    if not finished:
        of = f" of {wanted}" if isinstance(wanted, int) else ""
        missing.append(f"not finished: {len(rounds)}{of} rounds are there")
    if summary is None and (home / "summary.json").is_file():
        missing.append("summary.json is damaged")
    gaps = [m["round"] for m, due in zip(rounds, range(len(rounds)), strict=True) if m["round"] != due]
    if gaps:
        missing.append(f"metrics.jsonl has gaps before round {gaps[0]}")
    if rounds and not any(accuracies(m) for m in rounds):
        missing.append("no round was evaluated yet")
    method = _dig(config, "method", "name") or (summary or {}).get("method") or "unknown"
    name = _dig(config, "run", "name") or (summary or {}).get("name") or home.resolve().name
    samples = _dig(_read_json(home / "partition.json", []), "samples")  # the report names it where it is not there
    known = samples if isinstance(samples, int) and not isinstance(samples, bool) and samples > 0 else None
    return Run(home, str(name), str(method), config, rounds, summary, finished, missing, known)


def _read_json(path: Path, missing: list[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(read_file(path))
        if isinstance(found, dict):
            return found
        missing.append(f"{path.name} is damaged")
    except FileNotFoundError:
        missing.append(f"{path.name} is not there")
    except (OSError, ValueError, RecursionError) as e:
        missing.append(f"{path.name} cannot be read ({e.strerror if isinstance(e, OSError) else 'damaged'})")
    return None


def _read_config(
    home: Path, facts: dict[str, Any], summary: dict[str, Any] | None, missing: list[str]
) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(home / "config.toml").decode())
    except FileNotFoundError:  # a run started from Python has none: run.json tells the settings that it knows
        if not isinstance(facts.get("experiment"), dict):
            missing.append("config.toml is not there")
    except (OSError, ValueError, RecursionError) as e:
        missing.append(f"config.toml cannot be read ({e.strerror if isinstance(e, OSError) else 'damaged'})")
    return _from_experiment(facts.get("experiment"), summary)


def _from_experiment(experiment: Any, summary: dict[str, Any] | None) -> dict[str, Any]:
    """What run.json tells about a run without a configuration, under the keys a configuration has."""
    if not isinstance(experiment, dict):
        return {}
    wanted: dict[str, Any] = {
        "run": {"seed": experiment.get("run.seed"), "rounds": (summary or {}).get("rounds")},
        "data": {"name": _dig(experiment, "data", "name")},
        "partition": {"clients": _dig(experiment, "clients", "count")},
        "models": {
            "clients": _dig(experiment, "clients", "architectures"),
            "server": experiment.get("server"),
        },
        "federation": experiment.get("federation"),
        "method": experiment.get("method"),
    }
    return {k: {n: v for n, v in t.items() if v is not None} for k, t in wanted.items() if isinstance(t, dict)}


def read_rounds(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl in order, each round once, every field present; `missing` says what is wrong."""
    try:
        lines = read_file(path, MAX_BYTES).splitlines()
    except FileNotFoundError:
        missing.append(f"{path.name} is not there: no round is done")
        return []
    except OSError as e:
        missing.append(f"{path.name} cannot be read ({e.strerror})")
        return []
    rounds: dict[int, dict[str, Any]] = {}
    bad = 0
    for line in lines:
        try:
            metrics = _whole(json.loads(line))
            rounds[metrics["round"]] = metrics  # a round that was run again counts once
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            bad += 1
    if bad:
        missing.append(f"{path.name} has {bad} line{'s' if bad > 1 else ''} that cannot be read")
    return [rounds[t] for t in sorted(rounds)]


def _whole(line: dict[str, Any]) -> dict[str, Any]:
    """A line with every field a reader relies on, of the right kind; raises if it is something else."""
    t = line["round"]
    if not isinstance(t, int) or isinstance(t, bool) or t < 0:
        raise TypeError("round")
    sent = line.get("bytes") or {}
    out = {
        **line,
        "bytes": {way: {str(k): int(n) for k, n in (sent.get(way) or {}).items()} for way in ("down", "up")},
        "seconds": {str(k): _time(s) for k, s in (line.get("seconds") or {}).items()},
        "failures": [f for f in line.get("failures") or [] if isinstance(f, dict)],
        "events": [e for e in line.get("events") or [] if isinstance(e, dict)],
    }
    for group in ("models", "ensembles", "averages"):
        out[group] = {
            str(n): {**s, "accuracy": _number(s["accuracy"]), "loss": float(s.get("loss", "nan"))}
            for n, s in (line.get(group) or {}).items()
        }
    own = line.get("personal") or {}
    out["personal"] = {str(k): v if k == "clients" else float(v) for k, v in own.items()}
    if "mean" in own:  # the accuracy that stands for all of them
        out["personal"]["mean"] = _number(own["mean"])
    out["personal_accuracies"] = {str(k): _number(a) for k, a in (line.get("personal_accuracies") or {}).items()}
    return out


def read_profile(home: Path, missing: list[str]) -> Profile | None:
    """What a run with `--profile` wrote about its time. None without one; if it is no good, `missing` says why."""
    path = home / PROFILE
    try:
        check_file(path, MAX_PROFILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        missing.append(f"{PROFILE} cannot be read ({e.strerror})")
        return None
    told = _read_json(home / "run.json", []) or {}
    if (found := told.get("format")) is not None and found not in FORMATS:
        by = str(told.get("solera"))[:40]
        missing.append(
            f"{PROFILE} was written in format {str(found)[:40]} by solera {by}; this version reads format {FORMAT} and "
            "older"
        )
        return None
    facts = _read_json(path, missing)
    if facts is None:
        return None
    try:
        return Profile(
            round=_count(facts["round"]),
            seconds=_phases(facts["seconds"]),
            seconds_before=None if facts.get("seconds_before") is None else _phases(facts["seconds_before"]),
            functions=_functions(_dig(facts, "server", "functions")),
            tasks=[_profiled_task(home, task) for task in facts.get("tasks") or []],
        )
    except KeyError as e:
        missing.append(f"{PROFILE} is damaged (it has no {e.args[0]!r} where there should be one)")
    except ValueError as e:
        missing.append(f"{PROFILE} is damaged ({e})")
    except (TypeError, AttributeError, OverflowError):
        missing.append(f"{PROFILE} is damaged (not what a run writes)")
    return None


def _phases(seconds: dict[str, Any]) -> dict[str, float]:
    found = {str(phase): _time(s) for phase, s in seconds.items()}
    if len(found) > MAX_PHASES:
        raise ValueError(f"{len(found)} phases")
    return {phase: found[phase] for phase in (*PHASES, "total")} | found


def _profiled_task(home: Path, task: dict[str, Any]) -> ProfiledTask:
    trace, size = task.get("trace"), None
    if trace is not None:
        folder, _, name = str(trace).partition("/")
        if folder != "profile" or not 0 < len(name) < 256 or "/" in name:
            raise ValueError(f"{str(trace)[:40]!r} is no trace of this run")
        trace = f"{folder}/{name}"
        with contextlib.suppress(OSError):
            size = (home / trace).stat().st_size
    return ProfiledTask(
        task=str(task["task"]),
        client=str(task["client"]),
        seconds=_time(task["seconds"]),
        functions=_functions(task.get("functions")),
        operators=_costliest(
            Cost(str(r["operator"]), "", _count(r["calls"]), _time(r["own_ms"]) / 1000, None)
            for r in task.get("operators") or []
        ),
        trace=trace,
        trace_bytes=size,
        untraced=str(task.get("why") or ""),
        error=str(task.get("error") or ""),
    )


def _functions(rows: list[dict[str, Any]] | None) -> list[Cost]:
    def where(row: dict[str, Any]) -> str:
        return "" if row["file"] == "~" else f"{row['file']}:{_count(row['line'])}"  # cProfile's sign for built-ins

    return _costliest(
        Cost(str(r["function"]), where(r), _count(r["calls"]), _time(r["own_s"]), _time(r["total_s"]))
        for r in rows or []
    )


def _costliest(rows: Iterable[Cost]) -> list[Cost]:
    return sorted(rows, key=lambda r: -r.own_s)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _number(value: Any) -> int | float:
    """What a run measures is a number; only a loss may be none (`nan`), when a model has blown up."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{str(value)[:40]!r} is no time")
    return float(value)


def _dig(tree: Any, *path: str) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _error(message: str) -> Exception:
    from ..errors import RunError  # imports torch: only where something is wrong

    return RunError(message)


# ---- series -----------------------------------------------------------------------------------------


def series(run: Run) -> dict[str, list[Point]]:
    """Accuracy by what was measured: a model's name, "ensemble NAME", or "own models" (mean over clients)."""
    found: dict[str, list[Point]] = {}
    sent = 0
    for m in run.rounds:
        sent += sum(sum(m["bytes"][way].values()) for way in ("down", "up"))
        for label, accuracy in accuracies(m).items():
            found.setdefault(label, []).append(Point(m["round"], sent, accuracy))
    return found


def to_target(run: Run, target: float, label: str) -> Target | None:
    """Rounds and bytes until the series `label` first reached `target`; None if it never did."""
    for point in series(run).get(label, ()):
        if point.accuracy >= target:
            return Target(point.round + 1, point.bytes_so_far)
    return None


# ---- grouping ---------------------------------------------------------------------------------------


def group_runs(runs: Sequence[Run], by: Sequence[str] | None = None) -> list[Group]:
    """Runs that differ in nothing but their seed, together; in the order in which they were given.

    With `by`, dotted keys such as "method.name" or "partition.alpha": the runs that agree in these.
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


def distinguishing(runs: Sequence[Run]) -> list[str]:
    """The settings that tell rows of a comparison apart, besides the method and the seed.

    A method's setting is among them if it differs between runs of that method; what differs only because two methods
    have different defaults is told by `between_methods`.
    """
    everything = _keys(runs)
    methods = {r.method for r in runs}

    def differs(key: str) -> bool:
        if not key.startswith("method."):
            return len(_values(runs, key)) > 1
        return any(len(_values([r for r in runs if r.method == name], key)) > 1 for name in methods)

    return [k for k in everything if k != "method.name" and differs(k)]


def companions(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The settings of the groups, each with the later ones that change only together with it and so tell nothing more:
    a data set's name with its path. What names a group, the case of a sweep, comes first."""
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
    """Whether a setting counts when runs are told apart."""
    return key not in NOT_COMPARED and not key.startswith(NOT_COMPARED_TABLES)


def cautions(groups: Sequence[Group]) -> list[str]:
    """Why the runs may not be comparable, each in one line."""
    every = [r for g in groups for r in g.runs]
    runs = [r for r in every if r.config]  # without its settings nothing is known of a run; `missing` says so
    found = []
    for key, words in (("data.name", "data sets"), ("data.test_size", "test sets (data.test_size)")):
        if len(seen := _counted(runs, key)) > 1:
            found.append(f"different {words}: {_listed(seen)}; their accuracies are not comparable")
    for key in (k for k in _keys(runs) if k.startswith("partition.") or k == "data.train_size"):
        if len(seen := _counted(runs, key)) > 1:
            found.append(f"different {key}: {_listed(seen)}; compare rows that agree in it")
    if len(seen := _counted(runs, "run.rounds")) > 1:
        found.append(f"different run.rounds: {_listed(seen)}; bytes, seconds and last accuracies depend on it")
    if unfinished := [r for r in every if not r.finished]:
        named = ", ".join(f"{r.path} ({len(r.rounds)} of {r.rounds_wanted or '?'})" for r in unfinished[:3])
        more = f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else ""
        found.append(f"not finished, counted as far as they are: {named}{more}")
    for g in groups:
        twice = [s for s, n in Counter(r.seed for r in g.runs).items() if n > 1]
        if twice:
            found.append(f"{g.label}: several runs of seed {show(twice[0])}; the spread is not one over seeds alone")
        if pooled := [k for k in distinguishing(g.runs) if k not in g.settings]:
            found.append(f"{g.label}: pooled over runs that differ in {', '.join(pooled[:4])}")
    return found


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


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of nested tables by their dotted keys."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        out |= flat(value, key) if isinstance(value, dict) else {key: value}
    return out


def respelled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a configuration with the settings of version 0.1 under the names that they have now."""
    return {
        OLD_SPELLINGS.get(name, name): respelled(value) if isinstance(value, dict) else value
        for name, value in tree.items()
    }


def short(key: str) -> str:
    """A dotted key without the tables that say little: method.local.lr is local.lr, partition.alpha is alpha."""
    table, _, rest = key.partition(".")
    return rest if table in ("method", "partition", "run") else key


def show(value: Any) -> str:
    """A setting's value as a short text."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(show(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
