"""Reading the time profile of a run with `--profile`; `runner.profile` writes it."""

import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..files import check_file
from .keys import dig
from .read import read_json
from .record import FORMAT, FORMATS, duration, whole

PROFILE = "profile/profile.json"
MAX_PROFILE_BYTES = 10_000_000
PHASES = ("clients", "server", "evaluate", "commit")  # of a round's seconds; "total" is their sum
MAX_PHASES = 20  # later versions may have more phases than PHASES, but no run writes more than this


class Cost(NamedTuple):
    """A function or an operator, and its time."""

    name: str
    where: str  # file:line; empty if it is not written in Python
    calls: int
    own_s: float  # without the functions it called
    total_s: float | None  # with them; None for operators


@dataclasses.dataclass(frozen=True)
class ProfiledTask:
    """One client's call of a task, re-run for the profile."""

    task: str
    client: str
    seconds: float  # without the profiler
    functions: list[Cost]
    operators: list[Cost]
    trace: str | None  # the file with every operator, relative to the run directory
    trace_bytes: int | None  # its size; None if it does not exist
    untraced: str  # why there is no trace; empty if there is one
    error: str  # why the call failed: then the other fields are empty


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time profile of one round, the most expensive first; see docs/run-directory.md."""

    round: int  # counted from 0, as in metrics.jsonl
    seconds: dict[str, float]  # by phase, and "total"
    seconds_before: dict[str, float] | None  # of the previous round, which was not profiled
    functions: list[Cost]  # of the server's process
    tasks: list[ProfiledTask]


def read_profile(home: Path, missing: list[str]) -> Profile | None:
    """The time profile of a run with `--profile`. None if there is none, or if it is invalid: `missing` says why."""
    path = home / PROFILE
    try:
        check_file(path, MAX_PROFILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        missing.append(f"{PROFILE} cannot be read ({e.strerror})")
        return None
    told = read_json(home / "run.json", []) or {}
    if (found := told.get("format")) is not None and found not in FORMATS:
        by = str(told.get("solera"))[:40]
        missing.append(
            f"{PROFILE} was written in format {str(found)[:40]} by solera {by}; this version reads format {FORMAT} and "
            "older"
        )
        return None
    facts = read_json(path, missing)
    if facts is None:
        return None
    try:
        return Profile(
            round=whole(facts["round"]),
            seconds=_phases(facts["seconds"]),
            seconds_before=None if facts.get("seconds_before") is None else _phases(facts["seconds_before"]),
            functions=_functions(dig(facts, "server", "functions")),
            tasks=[_profiled_task(home, task) for task in facts.get("tasks") or []],
        )
    except KeyError as e:
        missing.append(f"{PROFILE} is damaged ({e.args[0]!r} is missing)")
    except ValueError as e:
        missing.append(f"{PROFILE} is damaged ({e})")
    except (TypeError, AttributeError, OverflowError):
        missing.append(f"{PROFILE} is damaged (it has values of the wrong type)")
    return None


def _phases(seconds: dict[str, Any]) -> dict[str, float]:
    found = {str(phase): duration(s) for phase, s in seconds.items()}
    if len(found) > MAX_PHASES:
        raise ValueError(f"{len(found)} phases")
    return {phase: found[phase] for phase in (*PHASES, "total")} | found


def _profiled_task(home: Path, task: dict[str, Any]) -> ProfiledTask:
    trace, size = task.get("trace"), None
    if trace is not None:
        folder, _, name = str(trace).partition("/")
        if folder != "profile" or not 0 < len(name) < 256 or "/" in name:
            raise ValueError(f"{str(trace)[:40]!r} is not a trace of this run")
        trace = f"{folder}/{name}"
        with contextlib.suppress(OSError):
            size = (home / trace).stat().st_size
    return ProfiledTask(
        task=str(task["task"]),
        client=str(task["client"]),
        seconds=duration(task["seconds"]),
        functions=_functions(task.get("functions")),
        operators=_costliest(
            Cost(str(r["operator"]), "", whole(r["calls"]), duration(r["own_ms"]) / 1000, None)
            for r in task.get("operators") or []
        ),
        trace=trace,
        trace_bytes=size,
        untraced=str(task.get("why") or ""),
        error=str(task.get("error") or ""),
    )


def _functions(rows: list[dict[str, Any]] | None) -> list[Cost]:
    def where(row: dict[str, Any]) -> str:
        return "" if row["file"] == "~" else f"{row['file']}:{whole(row['line'])}"  # cProfile's sign for built-ins

    return _costliest(
        Cost(str(r["function"]), where(r), whole(r["calls"]), duration(r["own_s"]), duration(r["total_s"]))
        for r in rows or []
    )


def _costliest(rows: Iterable[Cost]) -> list[Cost]:
    return sorted(rows, key=lambda r: -r.own_s)
