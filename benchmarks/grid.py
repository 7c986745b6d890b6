"""Runs a list of configurations, several at once, skipping what is done: the engine room of the studies here."""

import json
import os
import pathlib
import statistics
import time
import traceback
from typing import Any

import torch

from solera.config import load_config
from solera.run import execute

Tables = dict[str, Any]


def merged(*tables: Tables) -> Tables:
    """Later tables win, key by key."""
    out: Tables = {}
    for t in tables:
        for key, value in t.items():
            both = isinstance(value, dict) and isinstance(out.get(key), dict)
            out[key] = merged(out[key], value) if both else value
    return out


def run_grid(cases: dict[str, Tables], out: pathlib.Path, workers: int) -> dict[str, dict[str, Any]]:
    """Run every case into `out`/its name (one core each) and return the summaries. A stopped grid can be repeated.

    Each run is a forked copy of this process: importing torch and its optimisers takes longer than a small run.
    """
    out.mkdir(parents=True, exist_ok=True)
    todo = [name for name in cases if not (out / name / "summary.json").is_file()]
    print(f"{len(cases) - len(todo)} of {len(cases)} runs are there already", flush=True)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    began, running, waiting, done = time.monotonic(), {}, list(reversed(todo)), 0
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            pid = os.fork()
            if pid == 0:
                os._exit(_one(cases[name], out / name))
            running[pid] = name
        pid, status = os.wait()
        name = running.pop(pid)
        if status:
            raise SystemExit(f"{name}: {(out / f'{name}.log').read_text()[-2000:]}")
        done += 1
        left = (time.monotonic() - began) / done * (len(todo) - done)
        print(f"[{done}/{len(todo)}] {name}   about {left / 60:.0f} min left", flush=True)
    return {name: json.loads((out / name / "summary.json").read_text()) for name in cases}


def _one(case: Tables, home: pathlib.Path) -> int:
    """One run, in a process of its own; what goes wrong is in the log beside its directory."""
    home.parent.mkdir(parents=True, exist_ok=True)
    try:
        config = load_config(merged(case, {"engine": {"name": "inprocess", "workers": 1}}))
        execute(config, home, resume=(home / "run.json").is_file())
        return 0
    except BaseException:
        home.with_name(home.name + ".log").write_text(traceback.format_exc())
        return 1


def last_accuracy(home: pathlib.Path, model: str, rounds: int = 3) -> float:
    """Mean accuracy of `model` over the last rounds: single rounds swing with who takes part."""
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    seen = [m["models"][model]["accuracy"] for m in lines if model in m.get("models", {})]
    return statistics.fmean(seen[-rounds:])


def spread(values: list[float], digits: int = 1) -> str:
    """Mean and standard deviation in percent, as in the papers."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.{digits}f} ± {100 * sd:.{digits}f}"
