"""What an exchange costs on a real network: a SuperLink and three SuperNodes on the loopback interface, TLS, node keys.

    python benchmarks/flower_exchanges.py --out benchmarks/results/flower-exchanges.json

FedAvg of models that are as large as the message and train in no time: they consist of buffers, which travel and are
averaged. For each size the same file also runs in one process, right after: the ratio is that of two runs of one turn.

- **exchange**: one site gets the model, trains a step, and answers with its own (`clients` of a round with one site).
- **round**: the same with three sites, and all the rest of a round.
- **memory**: the largest resident set of every process, by what it does.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from typing import Any

import tomli_w

from bench.machine import describe

SOLERA = [sys.executable, "-m", "solera.cli.main"]
SITES = ("a", "b", "c")
SIZES = {  # tensors, numbers in each; float32
    "1 KB": (1, 256),
    "5 MB in 120 tensors": (120, 10_923),
    "200 MB": (50, 1_048_576),
    "1 GB": (250, 1_048_576),  # if asked for, with one site: it needs 12 GB of memory
}
CODE = """
import torch
from solera.data import from_tensors
from torch import nn


def draw(n):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 2


def server(path=None):
    return from_tensors(draw(8), draw(16), classes=2)


def site():
    return draw(4)


class Sized(nn.Module):
    def __init__(self, tensors, numbers):
        super().__init__()
        self.last = nn.Linear(4, 2)
        for i in range(tensors):
            self.register_buffer(f"b{i}", torch.full((numbers,), 0.5))

    def forward(self, x):
        return self.last(x)
"""
CONFIG = """
[run]
rounds = {rounds}

[data]
name = "own.py:server"
shape = [4]
classes = ["a", "b"]

[engine]
name = "flower"

[method]
name = "fedavg"

[method.local]
steps = 1
batch = 4
"""


def main() -> None:
    """Measure, and write what was found."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=pathlib.Path, required=True)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=[s for s in SIZES if s != "1 GB"])
    asked = options.parse_args()
    found: dict[str, Any] = {
        "command": "python benchmarks/flower_exchanges.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe(),
        "rounds": asked.rounds,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as home:
        for one in measure(pathlib.Path(home), asked.sizes, asked.rounds):
            found["rows"].append(one)  # written as it comes: the largest take long
            asked.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(home: pathlib.Path, sizes: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each size."""
    code = CODE + "".join(
        f"\n\ndef size{i}():\n    return Sized({tensors}, {numbers})\n"
        for i, (tensors, numbers) in enumerate(SIZES.values())
    )
    (home / "own.py").write_text(code)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    deployment = init(home, "first", sizes[0], rounds, address)
    with running(deployment):
        for size in sizes:
            other = init(home, f"of-{len(list(home.iterdir()))}", size, rounds, address)
            for site in SITES:
                shutil.copy(other / "sites" / site / "site.toml", deployment / "sites" / site / "site.toml")
            yield row(home, deployment, other, size)


def init(home: pathlib.Path, name: str, size: str, rounds: int, address: str) -> pathlib.Path:
    """The folders of a deployment whose model has that size."""
    model = f"own.py:size{list(SIZES).index(size)}"
    sites = "".join(f'\n[sites.{k}]\ndata = "own.py:site"\nmodel = "{model}"\n' for k in SITES)
    (home / f"{name}.toml").write_text(CONFIG.format(rounds=rounds) + sites)
    solera("deploy", "init", home / f"{name}.toml", "--out", home / name, "--address", address)
    return home / name


def row(home: pathlib.Path, deployment: pathlib.Path, other: pathlib.Path, size: str) -> dict[str, Any]:
    """One size: one site, three sites, and both in one process."""
    several = 1 if size == "1 GB" else 3
    with Memory() as memory:
        found = {n: network(deployment, other, n) for n in (1, several)}
    alone = {n: simulated(home, other, n) for n in (1, several)}
    out = {
        "engine": "flower: SuperLink and SuperNodes, TLS, node keys",
        "size": size,
        "exchange_s": median(found[1], "clients"),
        "sites_of_a_round": several,
        "round_s": median(found[several], "total"),
        "exchange_in_one_process_s": median(alone[1], "clients"),
        "round_in_one_process_s": median(alone[several], "total"),
        "exchanges_s": [round(s["clients"], 3) for s in found[1]],
        "rounds_s": [round(s["total"], 3) for s in found[several]],
        "server_mb": memory.most.get("server program", 0),
        "client_mb": memory.most.get("site's task", 0),
        "memory_mb": dict(sorted(memory.most.items())),
    }
    out["exchange_ratio"] = round(out["exchange_s"] / max(out["exchange_in_one_process_s"], 1e-4))
    out["round_ratio"] = round(out["round_s"] / max(out["round_in_one_process_s"], 1e-4))
    print(json.dumps(out), flush=True)
    return out


def median(seconds: list[dict[str, float]], what: str) -> float:
    """Of some rounds."""
    return round(statistics.median(s[what] for s in seconds), 4)


def network(deployment: pathlib.Path, other: pathlib.Path, sites: int) -> list[dict[str, float]]:
    """The rounds of a run with so many sites."""
    name = f"{other.name}-{sites}"
    tables = tomllib.loads((other / "server" / "server.toml").read_text())
    tables["sites"] = {k: tables["sites"][k] for k in SITES[:sites]}
    (deployment / "server" / f"{name}.toml").write_text(tomli_w.dumps(tables))
    solera("deploy", "submit", deployment / "server", "--name", name, "--config", f"{name}.toml", "--wait")
    return rounds_of(deployment / "server" / "runs" / name)


def simulated(home: pathlib.Path, other: pathlib.Path, sites: int) -> list[dict[str, float]]:
    """The same in one process."""
    tables = tomllib.loads((home / f"{other.name}.toml").read_text())
    tables["sites"] = {k: tables["sites"][k] for k in SITES[:sites]}
    (home / f"alone-{sites}.toml").write_text(tomli_w.dumps(tables))
    out = home / f"alone-{other.name}-{sites}"
    solera("run", home / f"alone-{sites}.toml", "--engine", "inprocess", "--quiet", "--out", out)
    found = rounds_of(out)
    shutil.rmtree(out)
    return found


def rounds_of(run: pathlib.Path) -> list[dict[str, float]]:
    """The seconds of each round, by what they were spent on."""
    return [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def solera(*words: object) -> None:
    """A command."""
    subprocess.run([*SOLERA, *map(str, words)], check=True, stdout=subprocess.DEVNULL)  # noqa: S603


@contextlib.contextmanager
def running(deployment: pathlib.Path) -> Iterator[None]:
    """The server and its sites."""
    places = [("server", deployment / "server"), *(("client", deployment / "sites" / k) for k in SITES)]
    processes = []
    try:
        for command, folder in places:
            words = [*SOLERA, "deploy", command, str(folder)]
            processes.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))  # noqa: S603
            if command == "server":
                while "the server listens" not in said(deployment):
                    time.sleep(0.2)
        yield
    finally:
        for p in processes:
            p.send_signal(signal.SIGTERM)
        for p in processes:
            p.wait(60)


def said(deployment: pathlib.Path) -> str:
    """The server's log."""
    file = deployment / "server" / "log" / "server.jsonl"
    return file.read_text() if file.is_file() else ""


class Memory:
    """The largest resident set of every process that this one has started, by what it does, in MB."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self._over = threading.Event()

    def __enter__(self) -> "Memory":
        for status in pathlib.Path("/proc").glob("[0-9]*/clear_refs"):
            if self._mine(status.parent.name):
                with contextlib.suppress(OSError):
                    status.write_text("5")  # begin anew: what it held for the last size does not count
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for entry in pathlib.Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, StopIteration):
                    if self._mine(entry.name) and (role := self._role(entry)):
                        lines = (entry / "status").read_text().splitlines()
                        most = next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) // 1024
                        self.most[role] = max(self.most.get(role, 0), most)

    def _mine(self, pid: str) -> bool:
        try:
            while pid not in ("0", "1"):
                if pid == str(os.getpid()):
                    return True
                pid = pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            pass
        return False

    def _role(self, entry: pathlib.Path) -> str | None:
        words = (entry / "cmdline").read_text().replace("\0", " ")
        parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        if "solera.deploy.standby" in words:
            above = pathlib.Path("/proc", parent, "cmdline").read_text()
            return "site's task" if "solera.deploy.standby" in above else "standby"
        roles = {
            "flwr-serverapp": "server program",
            "flower-superlink": "superlink",
            "flower-supernode": "supernode",
            "flower-superexec": "superexec",
            "deploy server": "solera deploy server",
            "deploy client": "solera deploy client",
        }
        return next((role for word, role in roles.items() if word in words), None)


if __name__ == "__main__":
    main()
