"""Runs as one tidy table: a row for each measured number. Only `frame` needs pandas and imports it. This module does
not import torch."""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import ConfigError
from .read import Run, each_run
from .record import WAYS

if TYPE_CHECKING:
    import pandas

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Row(NamedTuple):
    """One number of one round of one run. The kinds are those of `record.Score`, "traffic", "seconds", "simulated"."""

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
