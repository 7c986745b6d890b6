"""Run directories for programs: as one tidy table with a row for each measured number, and compared. Only `frame` needs
pandas and imports it. This module does not import torch."""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import ConfigError
from .compare import as_json, rows_in
from .groups import between_methods, group_runs, grouping
from .read import Run, each_run, read_runs
from .record import WAYS
from .results import compared_results, main_result, warnings_of

if TYPE_CHECKING:
    import pandas

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
    for run in each_run(_each(paths)):
        yield from _rows(run)


def _each(paths: Paths) -> list[str | os.PathLike[str]]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)


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


def compare(paths: Paths, target: float | None = None, by: Sequence[str] | None = None) -> dict[str, Any]:
    """The runs in these directories and their subfolders side by side, over seeds: the content of `solera compare
    --json`. `target` is an accuracy, `by` are the settings to group by."""
    runs = read_runs(_each(paths))
    wanted = grouping(runs, by)
    results = compared_results(group_runs(runs, wanted))
    return {
        "target": target,
        "by": wanted,
        "main_result": main_result(results),
        "rows": as_json(rows_in(results, target)),
        "between_methods": between_methods(runs),
        "warnings": warnings_of(runs, results),
    }
