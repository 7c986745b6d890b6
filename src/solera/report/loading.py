"""Run directories for the report: the content that `runs.read` reads, and the files that only the report uses.

Missing or damaged files are listed in `notes` and left out.
"""

import array
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.files import read_file
from ..runs.read import Run, each_run


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The coefficients between clients after one round, by rows: from teacher (row) to student (column)."""

    round: int
    clients: list[str]
    values: array.array


@dataclasses.dataclass(frozen=True)
class Record:
    """One run directory."""

    run: Run
    status: str  # finished, running, stopped
    command: str | None
    partition: dict[str, Any] | None
    confusion: dict[str, Any] | None
    regions: dict[str, Any] | None
    matrices: list[Matrix]
    notes: list[str]


class _Damaged(Exception):
    """A file does not have the expected content."""


def read_all(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """The runs in these directories and their subfolders. Refuses a directory without any."""
    return [read_record(run) for run in each_run(list(paths))]


def read_record(run: Run) -> Record:
    """The run together with the report's own files in its directory."""
    path = run.path
    status = "finished" if run.finished else "running" if in_use(path) else "stopped"
    notes = [n for n in run.missing if not n.startswith("not finished")]  # `cautions` says it once for all runs
    matrices = _matrices(run)
    found: dict[str, dict[str, Any] | None] = {}
    for name, check in (("partition", _partition), ("confusion", _confusion), ("regions", _regions)):
        try:
            found[name] = check(_content(path / f"{name}.json"))
        except FileNotFoundError:
            found[name] = None
            if name == "partition" or (name == "confusion" and run.finished):
                notes.append(f"{name}.json does not exist (the run is of an older version): its figure is left out")
        except (_Damaged, OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            found[name] = None
            why = e if isinstance(e, _Damaged) else e.strerror if isinstance(e, OSError) else "unexpected content"
            notes.append(f"{name}.json is damaged ({why}): its figure is left out")
    try:
        command = _content(path / "run.json").get("command")
    except (_Damaged, OSError, ValueError, RecursionError):
        command = None  # read_run has already reported it
    command = command if isinstance(command, str) else None
    return Record(run, status, command, **found, matrices=matrices, notes=notes)


def in_use(directory: Path) -> bool:
    """True if the directory's lock is held: then a run of this or another process is writing there."""
    try:
        lock = os.open(directory / ".lock", os.O_RDONLY | os.O_NONBLOCK)  # do not wait, also if it is a named pipe
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _content(path: Path) -> dict[str, Any]:
    found = json.loads(read_file(path))
    if not isinstance(found, dict):
        raise _Damaged("not an object")
    return found


# ---- files of the report ----------------------------------------------------------------------------


def _partition(facts: dict[str, Any]) -> dict[str, Any]:
    classes, sizes = _whole(facts["classes"]), facts["sizes"]
    return {
        "clients": _whole(facts["clients"]),
        "classes": classes,
        "samples": _whole(facts["samples"]),
        "sizes": {k: _whole(sizes[k]) for k in ("min", "median", "max", "empty")},
        "shown": [
            {"client": str(c["client"]), "model": str(c["model"]), "counts": _wholes(c["counts"], classes)}
            for c in facts["shown"]
        ],
    }


def _confusion(facts: dict[str, Any]) -> dict[str, Any]:
    classes = _whole(facts["classes"])
    items = []
    for kind in ("models", "ensembles"):
        for name, item in facts[kind].items():
            matrix = item.get("matrix")
            if matrix is not None:
                _expect(len(matrix) == classes, "a matrix of another size")
                matrix = [_wholes(row, classes) for row in matrix]
            right = _wholes(item["right"], classes)
            items.append({"kind": kind.removesuffix("s"), "name": str(name), "right": right, "matrix": matrix})
    return {"round": _whole(facts["round"]), "total": _wholes(facts["total"], classes), "items": items}


def _regions(facts: dict[str, Any]) -> dict[str, Any]:
    size, classes = _whole(facts["size"]), _whole(facts["classes"])
    panels = []
    for panel in facts["panels"]:
        percent = panel["percent"]
        _expect(len(percent) == size * size, "a grid of another size")
        rows = [_wholes(p, classes) for p in percent]
        _expect(all(p <= 100 for row in rows for p in row), "more than 100 percent")
        panels.append({"kind": str(panel["kind"]), "name": str(panel["name"]), "percent": rows})
    return {
        "round": _whole(facts["round"]),
        "size": size,
        "classes": classes,
        "x": [float(v) for v in facts["x"]],
        "y": [float(v) for v in facts["y"]],
        "panels": panels,
        "points": {str(k): [[float(v) for v in p] for p in points] for k, points in facts["points"].items()},
        "public": [[float(v) for v in p] for p in facts["public"]],
    }


def _matrices(run: Run) -> list[Matrix]:
    """Move the coefficients from the run's events into a form that needs little memory."""
    found = []
    for r in run.rounds:
        for event in [e for e in r.events if e.get("kind") == "coefficients"]:
            r.events.remove(event)
            try:
                clients = [str(k) for k in event["clients"]]
                values = array.array("f", (float(c) for row in event["matrix"] for c in row))
                _expect(len(values) == len(clients) ** 2 > 0, "a matrix that is not square")
            except (_Damaged, ValueError, KeyError, TypeError):
                continue
            found.append(Matrix(r.round, clients, values))
    return [m for m in found if m.clients == found[-1].clients]


def _expect(fits: bool, what: str) -> None:
    if not fits:
        raise _Damaged(what)


def _whole(value: Any) -> int:
    count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    _expect(count, f"{str(value)[:40]!r} is not a count")
    return value


def _wholes(values: Any, count: int) -> list[int]:
    _expect(isinstance(values, list) and len(values) == count, f"not {count} counts in a row")
    return [_whole(v) for v in values]
