"""Reading finished, running and half-written run directories, one by one or as one table of numbers.

Missing or damaged parts are listed in `missing`; only a folder without any run is refused. This module does not import
torch, so that comparisons and reports are quick; only `frame` needs pandas, and imports it.
"""

import dataclasses
import functools
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import ConfigError, RunError
from ..core.files import MOST_TOML, read_file
from ..core.plugins import label
from .record import WAYS, RoundRecord, read_records
from .words import StandIns, dig, flat, read_stand_ins

if TYPE_CHECKING:
    import pandas

SEED = "run.seed"
FINGERPRINTS = "fingerprints"  # in run.json: the numeric fingerprints of the machines that the run was on, in order


@dataclasses.dataclass(frozen=True)
class Run:
    """The content of a run directory, as far as it exists."""

    path: Path
    name: str
    method: str
    config: dict[str, Any]  # the tables of config.toml; for a run started from Python, the settings in run.json
    rounds: list[RoundRecord]  # in order, each once
    summary: dict[str, Any] | None
    finished: bool
    missing: list[str]  # what is missing or damaged, each in a few words
    samples: int | None = None  # the training samples of all clients, if partition.json has them
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)  # pretrained models, with their digests
    stand_ins: StandIns = dataclasses.field(default_factory=dict)  # settings that differ from a paper's row
    fingerprints: Sequence[str] = ()  # numeric, of the machines that it ran on

    @property
    def seed(self) -> int | None:
        return self.settings.get(SEED)

    @property
    def rounds_wanted(self) -> int | None:
        """The planned number of rounds; None if unknown."""
        wanted = self.settings.get("run.rounds")
        return wanted if isinstance(wanted, int) else None

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted keys."""
        return flat(self.config)

    def bytes(self, way: str) -> int:
        """The bytes sent "down" to the clients or "up" from them, in all rounds."""
        return sum(r.traffic.sent(way) for r in self.rounds)

    @property
    def seconds(self) -> float:
        return sum(r.seconds.get("total", 0.0) for r in self.rounds)

    @property
    def failures(self) -> int:
        """The number of lost replies."""
        return sum(len(r.failures) for r in self.rounds)


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run directories in `paths` and their subfolders, each once, in order. Refuses a path without any."""
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            raise RunError(f"{given} is not a folder; give run directories, or folders that contain run directories")
        inside = [path] if is_run(path) else sorted(p.parent for p in path.rglob("run.json") if is_run(p.parent))
        if not inside:
            raise RunError(f"{given} holds no run: there is no run.json in it or in its subfolders")
        found |= dict.fromkeys(inside)
    return list(found)


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in `paths` and their subfolders. Runs of a sweep have the name of their case as the setting "case"."""
    return list(each_run(paths))


def each_run(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Run]:
    """The same one by one, for a caller that does not keep all of them."""
    cases: dict[Path, str] = {}
    for given in map(Path, paths):
        index = read_json(given / "sweep.json", []) or {}
        entries = index.get("runs")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("case") and isinstance(entry.get("out"), str):
                cases[given / entry["out"]] = str(entry["case"])
    for run in map(read_run, find_runs(paths)):
        case = {"case": cases[run.path]} if run.path in cases else {}
        yield dataclasses.replace(run, config=case | run.config)


def is_run(path: Path) -> bool:
    """True if a folder looks like a run directory, even if most of its files are missing."""
    return any((path / name).is_file() for name in ("run.json", "metrics.jsonl"))


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run in a directory, in any state."""
    home = Path(path)
    if not home.is_dir():
        raise RunError(f"{path} is not a folder; give a run directory")
    if not any((home / name).is_file() for name in ("run.json", "config.toml", "metrics.jsonl")):
        raise RunError(f"{path} holds no run: there is no run.json in it")
    missing: list[str] = []
    facts = read_json(home / "run.json", missing) or {}
    summary = read_json(home / "summary.json", [])  # absent until the run is finished: reported below
    config = _read_config(home, facts, summary, missing)
    rounds = read_records(home, missing)
    wanted = dig(config, "run", "rounds")
    early = summary is not None and "stopped" in summary and summary.get("rounds") == len(rounds)
    finished = summary is not None and (not isinstance(wanted, int) or len(rounds) >= wanted or early)
    if not finished:
        of = f" of {wanted}" if isinstance(wanted, int) else ""
        missing.append(f"not finished: it has {len(rounds)}{of} rounds")
    if summary is None and (home / "summary.json").is_file():
        missing.append("summary.json is damaged")
    gaps = [r.round for due, r in enumerate(rounds) if r.round != due]
    if gaps:
        missing.append(f"metrics.jsonl has gaps before round {gaps[0]}")
    if rounds and not any(r.accuracies() for r in rounds):
        missing.append("no round was evaluated yet")
    method = dig(config, "method", "name") or (summary or {}).get("method") or "unknown"
    name = dig(config, "run", "name") or (summary or {}).get("name") or home.resolve().name
    samples = dig(read_json(home / "partition.json", []), "samples")  # the report says if the file is missing
    known = samples if isinstance(samples, int) and not isinstance(samples, bool) and samples > 0 else None
    origins, stand_ins, machines = _weights(facts), read_stand_ins(facts), fingerprints_in(facts)
    return Run(
        home, str(name), label(str(method)), config, rounds, summary, finished, missing, known, origins, stand_ins,
        machines,
    )  # fmt: skip


def fingerprints_in(facts: Mapping[str, Any]) -> list[str]:
    """The numeric fingerprints in the content of run.json; runs of older versions have none."""
    told = facts.get(FINGERPRINTS)
    return [f for f in told if isinstance(f, str) and len(f) <= 64] if isinstance(told, list) else []


def _weights(facts: dict[str, Any]) -> dict[str, str]:
    """The digests of pretrained weights, by the names of their models."""
    origins = dig(facts, "experiment", "weights")
    told = [o for o in origins.values() if isinstance(o, dict)] if isinstance(origins, dict) else []
    return {str(o["model"]): str(o["digest"]) for o in told if "model" in o and "digest" in o}


def read_json(path: Path, missing: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file; None if it cannot be read: then `missing` says why."""
    try:
        found = json.loads(read_file(path))
        if isinstance(found, dict):
            return found
        missing.append(f"{path.name} is damaged")
    except FileNotFoundError:
        missing.append(f"{path.name} does not exist")
    except (OSError, ValueError, RecursionError) as e:
        missing.append(f"{path.name} cannot be read ({e.strerror if isinstance(e, OSError) else 'damaged'})")
    return None


def _read_config(
    home: Path, facts: dict[str, Any], summary: dict[str, Any] | None, missing: list[str]
) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(home / "config.toml", MOST_TOML).decode())
    except FileNotFoundError:  # a run started from Python has none: run.json has some of its settings
        if not isinstance(facts.get("experiment"), dict):
            missing.append("config.toml does not exist")
    except (OSError, ValueError, RecursionError) as e:
        missing.append(f"config.toml cannot be read ({e.strerror if isinstance(e, OSError) else 'damaged'})")
    return _from_experiment(facts.get("experiment"), summary)


def _from_experiment(experiment: Any, summary: dict[str, Any] | None) -> dict[str, Any]:
    """The settings in run.json of a run without a configuration, under the keys of a configuration."""
    if not isinstance(experiment, dict):
        return {}
    wanted: dict[str, Any] = {
        "run": {"seed": experiment.get("run.seed"), "rounds": (summary or {}).get("rounds")},
        "data": {"name": dig(experiment, "data", "name"), "augment": dig(experiment, "data", "augment")},
        "partition": {"clients": dig(experiment, "clients", "count")},
        "models": {
            "clients": dig(experiment, "clients", "architectures"),
            "server": experiment.get("server"),
        },
        "federation": experiment.get("federation"),
        "method": experiment.get("method"),
    }
    return {k: {n: v for n, v in t.items() if v is not None} for k, t in wanted.items() if isinstance(t, dict)}


# ---- as a table of numbers --------------------------------------------------------------------------

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Row(NamedTuple):
    """One number of one round of one run. The kinds are those of `record.Score`, "traffic", "seconds", "simulated" and
    "callback"."""

    run: str  # its directory
    case: str  # of a sweep; otherwise the method
    seed: int | None
    round: int  # counted from 0
    kind: str
    name: str
    metric: str
    value: float


def rows(paths: Paths) -> Iterator[Row]:
    """The numbers of all runs in these directories and their subfolders, by run and round."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    for run in each_run(given):
        yield from _rows(run)


def _rows(run: Run) -> Iterator[Row]:
    case = str(run.settings.get("case") or run.method)
    seed = run.seed if isinstance(run.seed, int) else None
    for r in run.rounds:
        first = (str(run.path), case, seed, r.round)
        for score in r.scores:
            yield Row(*first, *score)
        for way in WAYS:
            yield Row(*first, "traffic", way, "bytes", r.traffic.sent(way))
            yield Row(*first, "traffic", way, "floats", r.traffic.floats[way])
            yield Row(*first, "traffic", way, "integers", r.traffic.integers[way])
            for kind, count in r.traffic.content[way].items():
                yield Row(*first, "traffic", way, f"{kind} bytes", count)
        for what, value in r.simulated.items():
            yield Row(*first, "simulated", what, "seconds" if what.endswith("_s") else "clients", value)
        for name, numbers in r.callbacks.items():
            for metric, value in numbers.items():
                yield Row(*first, "callback", name, metric, value)
        for phase, seconds in r.seconds.items():
            yield Row(*first, "seconds", phase, "seconds", seconds)


def frame(paths: Paths) -> "pandas.DataFrame":
    """The runs in these directories and their subfolders as a pandas DataFrame, with the columns of `Row`."""
    try:
        import pandas
    except ImportError:
        raise ConfigError("solera.frame needs the package pandas: pip install 'solera[frame]'") from None
    found = pandas.DataFrame(list(rows(paths)), columns=list(Row._fields))
    return found.astype({"seed": "Int64", "round": "int64", "value": "float64"})  # a run may have no seed
