"""What moving messages costs on each engine: seconds per exchange and per round, memory of every process.

    export PYTHONPATH=benchmarks
    python benchmarks/exchanges.py --out benchmarks/results/exchanges.json --write docs/howto/ray.md

Every engine is a program of its own, with the clients' task "add one to the weights and send them back". It takes turns
with a program that does the same in one process, a lap each, so what slows down the machine slows down both; a ratio
compares laps of the same turn.

- **exchange**: one client gets a message and answers with one of the same size.
- **round**: four clients, which all get the same message; their replies are averaged.
- **beyond the work**: eight clients that get 5 MB, work for 0.1 s each (asleep, so that cores do not count) and answer:
  the seconds of the round less 0.8 s divided by the workers.

Ray runs in a network namespace of its own where one can be made, because it listens on all interfaces.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

import namespaces
from bench import page
from bench.machine import MARK as FAMILY
from bench.machine import describe, family
from solera.core import __version__
from solera.core.federation import Federation
from solera.core.task import Client, Data, task
from solera.core.tensors import Weights
from solera.core.wire import like
from solera.engines import ClientStates, Roster, engine_named
from solera.place.placement import TRICKS

ENGINES: dict[str, dict[str, Any]] = {
    "inprocess": {"name": "inprocess", "workers": 1},
    "threads, 2 workers": {"name": "threads", "workers": 2},
    "processes, 2 workers": {"name": "processes", "workers": 2},
    "ray, 1 worker": {"name": "ray", "workers": 1},
    "ray, 2 workers": {"name": "ray", "workers": 2},
    "ray, 4 workers": {"name": "ray", "workers": 4},
}
SIZES = {  # tensors, numbers in each; float32
    "1 KB": (1, 256),
    "5 MB in 120 tensors": (120, 10_923),
    "200 MB": (50, 1_048_576),
}
TIMES = {"1 KB": 21, "5 MB in 120 tensors": 11, "200 MB": 3}  # laps after the warm-up
LAPS = [(what, size) for size in SIZES for what in ("exchange", "round")] + [("work", "5 MB in 120 tensors")]
COHORT, WORKING, WORK_S = 4, 8, 0.1
FLOWER = pathlib.Path(__file__).parent / "results" / "flower-exchanges.json"
MARK = "exchanges"


# ---- one side: an engine ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Back:
    """What a client answers."""

    weights: Weights = like("weights")


@task("exchanges.back")
def back(client: Client, weights: Weights, seconds: float) -> Back:
    """Works for so long, and sends the weights back."""
    time.sleep(seconds)
    return Back({name: w + 1 for name, w in weights.items()})


class Host:
    """Clients without data."""

    def __init__(self) -> None:
        self.roster = Roster(torch.ones(WORKING, dtype=torch.int64), ["none"], torch.zeros(WORKING, dtype=torch.int64))

    def client(self, k: str, seed: int, state: Any, place: Any) -> Client:
        """A client, as a task sees it."""
        data = Data(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
        return Client(k, "none", data, data, None, 2, seed, state, torch.nn.Identity())


def side(settings: dict[str, Any]) -> None:
    """Open the engine, then do the laps that are asked for on the standard input, one a line."""
    torch.set_num_threads(1)
    TRICKS["cpu"].set_allocator()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        with contextlib.closing(engine_named(**settings).open(Host(), ClientStates(home))) as engine:
            fed = Federation(engine, 0)
            say(startup_s=time.perf_counter() - began)
            for turn, line in enumerate(sys.stdin):
                asked = json.loads(line)
                tensors, numbers = SIZES[asked["size"]]
                weights = {f"w{i}": torch.randn(numbers) for i in range(tensors)}
                clients = list(fed.clients)[: {"exchange": 1, "round": COHORT, "work": WORKING}[asked["what"]]]
                work_s = WORK_S if asked["what"] == "work" else 0.0
                fed.begin(turn)
                _forget_peaks()
                began = time.perf_counter()
                fed.mean(back, clients, weights=weights, seconds=work_s)
                say(seconds=time.perf_counter() - began, memory=_peaks())


def _family() -> dict[int, str]:
    """This process and all that it has started, however indirectly, by what they are."""
    kinds = {}
    for pid in family(os.environ[FAMILY]):
        with contextlib.suppress(OSError):
            told = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            of_ray = "/site-packages/ray/" in told or (told.startswith("ray::") and not told.startswith("ray::Worker"))
            kinds[pid] = "server" if pid == os.getpid() else "Ray's own" if of_ray else "worker"
    return kinds


def _forget_peaks() -> None:
    for pid in _family():
        with contextlib.suppress(OSError):
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peaks() -> dict[str, list[int]]:
    """The most memory that each process has had since, in megabytes, by kind. What they share counts for each."""
    found: dict[str, list[int]] = {}
    for pid, kind in _family().items():
        with contextlib.suppress(OSError):
            told = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())
            if told:
                found.setdefault(kind, []).append(int(told[1]) >> 10)
    return found


# ---- all of them, in turn ---------------------------------------------------------------------------


class Side:
    """One engine, in a program of its own."""

    def __init__(self, name: str):
        self.name, settings = name, ENGINES[name]
        command: list[Any] = [sys.executable, __file__, "--side", json.dumps(settings)]
        env = {**os.environ, FAMILY: f"exchanges-{os.getpid()}-{id(self)}-{name}"}
        if settings["name"] == "ray" and not namespaces.why_not():
            command = namespaces.inside(*command)
        self.process = subprocess.Popen(  # noqa: S603 (ourselves)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.startup_s = self._hear()["startup_s"]

    def lap(self, what: str, size: str) -> dict[str, Any]:
        """One lap."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, "size": size}) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """No more laps."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(sizes: Sequence[str]) -> dict[str, Any]:
    """Every engine in turn with the one in this process: two programs at a time, as both hold messages of 200 MB."""
    found = {}
    for name in ENGINES:
        reference, other = Side("inprocess"), Side(name)
        kept: dict[str, Any] = {"startup_s": other.startup_s, "laps": {}}
        for lap in [lap for lap in LAPS if lap[1] in sizes]:
            told: dict[str, Any] = {"seconds": [], "reference_s": [], "memory": {}}
            for turn in range(TIMES[lap[1]] + 1):
                one, two = reference.lap(*lap), other.lap(*lap)
                if turn:  # the first is a warm-up
                    told["reference_s"].append(round(one["seconds"], 5))
                    told["seconds"].append(round(two["seconds"], 5))
                    for kind, peaks in two["memory"].items():
                        told["memory"][kind] = max(told["memory"].get(kind, 0), *peaks)
            kept["laps"][", ".join(lap)] = told
        found[name] = kept
        reference.close()
        other.close()
        print(f"{name}: done", file=sys.stderr)
    return found


def ratio(laps: dict[str, Any]) -> str:
    """How many times as long as in one process: the median over the turns, and the range."""
    ratios = [mine / other for mine, other in zip(laps["seconds"], laps["reference_s"], strict=True)]
    return f"{statistics.median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f})"


def table(found: dict[str, Any]) -> page.Table:
    """Engines by sizes: seconds, ratios, memory."""
    heads = ["engine", "message", "exchange, s", "ratio", "round of 4, s", "ratio", "peak MB: server", "a worker"]
    rows = []
    for size in SIZES:
        for name in found:
            laps = found[name]["laps"]
            one, four = laps[f"exchange, {size}"], laps[f"round, {size}"]
            cells = [name, size]
            for told in (one, four):
                cells += [f"{statistics.median(told['seconds']):.4f}", ratio(told)]
            memory = four["memory"]
            rows.append([*cells, str(memory["server"]), str(memory.get("worker", "-"))])
        if FLOWER.exists():
            rows += [_flower_row(row) for row in json.loads(FLOWER.read_text())["rows"] if row["size"] == size]
    return heads, rows


def _flower_row(row: dict[str, Any]) -> list[str]:
    """A deployment, measured by a benchmark of its own (`flower_exchanges.py`), with ratios of its own."""
    cells = [row["engine"], row["size"]]
    for what in ("exchange", "round"):
        cells += [f"{row[f'{what}_s']:.2f}", f"{row[f'{what}_ratio']:g}"]
    return [*cells, str(row["server_mb"]), str(row["client_mb"])]


def work_table(found: dict[str, Any]) -> page.Table:
    """What a round takes beyond the work of the clients."""
    heads = ["engine", "start-up, s", "round of 8 with 0.1 s of work each, s", "of these beyond the work, s"]
    heads += ["peak MB of Ray's own largest process"]
    rows = []
    for name in found:
        told = found[name]["laps"][", ".join(LAPS[-1])]
        middle = statistics.median(told["seconds"])
        beyond = middle - WORKING * WORK_S / ENGINES[name]["workers"]
        own = str(told["memory"].get("Ray's own", "-"))
        rows.append([name, f"{found[name]['startup_s']:.1f}", f"{middle:.3f}", f"{beyond:.3f}", own])
    return heads, rows


def main() -> None:
    """Measure, and write down what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="where the numbers go, as JSON")
    parser.add_argument("--write", type=pathlib.Path, help="put the tables into this page")
    parser.add_argument("--only", nargs="*", choices=SIZES, help="measure these sizes; --out has the others")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        return side(json.loads(asked.side))
    load = [round(os.getloadavg()[0], 1)]
    sizes = list(SIZES) if asked.only is None else asked.only
    found = measure(sizes) if sizes else {}
    load.append(round(os.getloadavg()[0], 1))
    told = {"machine": describe(), "solera": __version__, "load": {}, "engines": found}
    if asked.only is not None:
        told = json.loads(asked.out.read_text())
        for name, kept in found.items():
            told["engines"][name]["laps"] |= kept["laps"]
    told |= {"date": datetime.date.today().isoformat()}
    told["load"] |= dict.fromkeys(sizes, load)
    if asked.out:
        asked.out.write_text(json.dumps(told, indent=1) + "\n")
    if asked.write:
        m = told["machine"]
        loads = [n for pair in told["load"].values() for n in pair]
        laps = told["engines"]["inprocess"]["laps"]
        times = ", ".join(f"{len(laps[f'round, {size}']['seconds'])} of {size}" for size in SIZES)
        line = (
            f"{told['date']}, solera {told['solera']}, torch {m['torch']}, {m['cores']} cores ({m['cpu']}), busy with "
            f"other work (load {min(loads)} to {max(loads)}). Medians, and the range of the ratios, over laps: {times}."
        )
        page.put(asked.write, MARK, f"{line}\n\n{page.markdown(table(told['engines']))}")
        page.put(asked.write, f"{MARK}-work", page.markdown(work_table(told["engines"])))
    return None


if __name__ == "__main__":
    main()
