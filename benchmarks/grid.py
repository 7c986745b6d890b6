"""Runs a list of configurations, several in parallel, and skips finished ones. The studies here use it."""

import json
import pathlib
import statistics
from typing import Any

from solera.lab.sweep import Progress, run_all
from solera.runs.config import load_config
from solera.runs.read import read_run

Tables = dict[str, Any]


def merged(*tables: Tables) -> Tables:
    """All tables merged by key; later ones take precedence."""
    out: Tables = {}
    for t in tables:
        for key, value in t.items():
            both = isinstance(value, dict) and isinstance(out.get(key), dict)
            out[key] = merged(out[key], value) if both else value
    return out


def run_grid(
    cases: dict[str, Tables], out: pathlib.Path, workers: int, may_fail: bool = False
) -> dict[str, dict[str, Any]]:
    """Run every case into `out`/its name (one core each) and return the summaries. A stopped grid can be repeated.

    With `may_fail` a case that ends early (a learning rate at which nothing is learned) has no summary.
    """
    one_core = {"engine": {"name": "inprocess", "workers": 1}}
    ended = run_all({n: load_config(merged(case, one_core)) for n, case in cases.items()}, out, workers, _tell)
    if ended.failed and not may_fail:
        raise SystemExit("\n".join(f"{name}: {why}" for name, why in ended.failed.items()))
    return {name: json.loads((out / name / "summary.json").read_text()) for name in cases if name not in ended.failed}


def _tell(state: Progress) -> None:
    if state.news is not None:
        over = state.skipped + state.done + len(state.failed)
        print(f"[{over}/{state.total}] {state.news}   about {(state.left or 0) / 60:.0f} min left", flush=True)


def cpu_seconds(home: pathlib.Path) -> float:
    """Processor seconds of a run; unlike wall-clock time they hardly depend on other programs."""
    return sum(r.cpu_s or 0.0 for r in read_run(home).rounds)


def last_accuracy(home: pathlib.Path, model: str, rounds: int = 3) -> float:
    """Mean accuracy of `model` over the last rounds: single rounds vary with the sampled clients."""
    seen = [found[model]["accuracy"] for r in read_run(home).rounds if model in (found := r.of("model"))]
    return statistics.fmean(seen[-rounds:])


def spread(values: list[float], digits: int = 1) -> str:
    """Mean and standard deviation in percent, as in the papers."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.{digits}f} ± {100 * sd:.{digits}f}"


def put(page: pathlib.Path, mark: str, text: str) -> None:
    """Replace the text between the two comments of this name in a page."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    head, rest = page.read_text().split(begin)
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{rest.split(end)[1]}")
