"""Runs a list of configurations, several at once, skipping what is done: the engine room of the studies here."""

import concurrent.futures
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import tomli_w

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
    """Run every case into `out`/its name (one core each) and return the summaries. A stopped grid can be repeated."""
    out.mkdir(parents=True, exist_ok=True)
    began, done, found = time.monotonic(), 0, {}
    todo = [name for name in cases if not (out / name / "summary.json").is_file()]
    print(f"{len(cases) - len(todo)} of {len(cases)} runs are there already", flush=True)

    def one(name: str) -> str:
        home = out / name
        if (home / "run.json").is_file():
            command = ["resume", str(home)]
        else:
            home.parent.mkdir(parents=True, exist_ok=True)
            config = home.with_name(home.name + ".toml")
            config.write_text(tomli_w.dumps(cases[name]))
            command = ["run", str(config), "--out", str(home), "--engine", "inprocess", "--workers", "1"]
        ended = subprocess.run(
            [sys.executable, "-m", "solera.cli.main", *command, "--json"], capture_output=True, text=True
        )
        if ended.returncode:
            raise SystemExit(f"{name}: {ended.stderr.strip()[-2000:]}")
        return name

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for name in pool.map(one, todo):
            done += 1
            left = (time.monotonic() - began) / done * (len(todo) - done)
            print(f"[{done}/{len(todo)}] {name}   about {left / 60:.0f} min left", flush=True)
    for name in cases:
        found[name] = json.loads((out / name / "summary.json").read_text())
    return found


def last_accuracy(home: pathlib.Path, model: str, rounds: int = 3) -> float:
    """Mean accuracy of `model` over the last rounds: single rounds swing with who takes part."""
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    seen = [m["models"][model]["accuracy"] for m in lines if model in m.get("models", {})]
    return statistics.fmean(seen[-rounds:])


def spread(values: list[float], digits: int = 1) -> str:
    """Mean and standard deviation in percent, as in the papers."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.{digits}f} ± {100 * sd:.{digits}f}"
