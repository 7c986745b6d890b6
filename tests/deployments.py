"""Real deployments on the loopback interface: a SuperLink and SuperNodes with TLS and authentication, in processes of
their own, from the commands that people use. Whatever was started ends with the test."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

SOLERA = [sys.executable, "-m", "solera.cli.main"]
SITES = ("east", "north", "west")
CODE = """
import torch
from solera.data import from_tensors
from solera.models import wrap
from torch import nn

CENTRES = torch.randn(3, 8, generator=torch.Generator().manual_seed(7)) * 2


def draw(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return CENTRES[y] + torch.randn(n, 8, generator=g), y


def server(path=None):
    return from_tensors(draw(30, 1), draw(150, 2), classes=3)


def public(path=None):
    return from_tensors(draw(60, 3), draw(4, 4), classes=3)


def east():
    return draw(60, 11)


def north():
    return draw(50, 12)


def west():
    return draw(40, 13)


def wide():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def deep():
    return nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def split_wide():
    return wrap(wide(), classifier="2", head="shared", representation=8, head_hidden=8)


def split_deep():
    return wrap(deep(), classifier="6", head="shared", representation=8, head_hidden=8)


def split_slim():
    return wrap(
        nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), classifier="2", head="shared", representation=8,
        head_hidden=8,
    )


def large():
    whole = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    return wrap(whole, classifier="4", head="shared", representation=8, head_hidden=8)
"""
CONFIG = """
[run]
seed = 5
rounds = {rounds}

[data]
name = "own.py:server"
shape = [8]
classes = ["a", "b", "c"]
client_test = 0.2

[public]
source = "dataset"
name = "own.py:public"
where = "server"

[models]
{server}

[sites.east]
data = "own.py:east"
model = "own.py:{east}"

[sites.north]
data = "own.py:north"
model = "own.py:{north}"

[sites.west]
data = "own.py:west"
model = "own.py:{west}"

[engine]
name = "flower"
wait_s = 240
grace_s = 60

[federation]
{federation}

[method]
{method}
"""
MOODY = (
    CODE
    + """
import os
import pathlib
import time

MOOD = pathlib.Path("mood")  # in the folder of the site whose task is to misbehave, once


class Moody(nn.Sequential):
    def forward(self, x):
        if self.training and MOOD.is_file():
            mood = MOOD.read_text()
            MOOD.rename("was")
            if mood == "raise":
                raise RuntimeError("the scanner is broken")
            if mood == "die":
                os._exit(9)
            while mood in ("sleep", "hang"):
                try:
                    time.sleep(600)
                except TimeoutError:  # what the deadline raises
                    if mood == "sleep":
                        raise
        return super().forward(x)


def wide():
    return Moody(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
"""
)
DIFFERENT = {"east": "split_wide", "north": "split_deep", "west": "split_slim"}
EQUAL = dict.fromkeys(SITES, "wide")


def config_of(method, models=EQUAL, rounds=1, federation="", server=""):
    """A small federation of the three sites, as TOML."""
    return CONFIG.format(**models, method=method, rounds=rounds, federation=federation, server=server)


class Deployment:
    """Folders for a server and three sites, and the processes that were started from them."""

    def __init__(self, home: pathlib.Path, config: str, code: str = CODE):
        self.home, self.root = home, home / "deployment"
        self.server, self.processes = self.root / "server", {}
        home.mkdir(parents=True, exist_ok=True)
        (home / "own.py").write_text(code)
        (home / "federation.toml").write_text(config)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{s.getsockname()[1]}"
        solera("deploy", "init", home / "federation.toml", "--out", self.root, "--address", self.address)

    def reconfigure(self, name, config):
        """Have the sites take part in another federation from now on; the server gets its configuration `name`.toml.

        Sites read their files anew for each message, so nothing has to be started again. Keys stay as they are.
        """
        (self.home / f"{name}.toml").write_text(config)
        other = self.home / f"{name}-deployment"
        solera("deploy", "init", self.home / f"{name}.toml", "--out", other, "--address", self.address)
        shutil.copy(other / "server" / "server.toml", self.server / f"{name}.toml")
        for site in SITES:
            shutil.copy(other / "sites" / site / "site.toml", self.site(site) / "site.toml")

    def site(self, name: str) -> pathlib.Path:
        return self.root / "sites" / name

    # -- processes --

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.stop(name, wait=False)
        for p in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)

    def _start(self, name, *words):
        with (self.home / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [*SOLERA, *map(str, words)], stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return self.processes[name]

    def start_server(self, *options):
        before = len(self.log("server"))
        p = self._start("server", "deploy", "server", self.server, *options)
        until(lambda: "the server listens" in self.said("server", before) or p.poll() is not None, 180)
        assert p.poll() is None, self.output("server")

    def start_sites(self, *names):
        for name in names or SITES:
            self._start(name, "deploy", "client", self.site(name))

    def stop(self, name, number=signal.SIGTERM, wait=True):
        """Send a signal to what looks after the server or a site; with SIGTERM it ends its programs."""
        p = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.kill(p.pid, number)
        if wait:
            p.wait(60)

    def pid_of(self, where, program):
        """The newest process of one of Flower's programs."""
        found = re.findall(rf"{program} started \(pid (\d+)\)", self.said(where))
        return int(found[-1])

    def mood(self, site, what):
        """Have the next training task of a site misbehave; the result tells whether it has begun to."""
        was = self.site(site) / "was"
        was.unlink(missing_ok=True)
        (self.site(site) / "mood").write_text(what)
        return was.is_file

    # -- what happened --

    def folder(self, where):
        return self.server if where == "server" else self.site(where)

    def log(self, where, file=None):
        path = self.folder(where) / "log" / (file or ("server.jsonl" if where == "server" else "site.jsonl"))
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def said(self, where, since=0):
        return "\n".join(line["says"] for line in self.log(where)[since:])

    def asked(self, site):
        return self.log(site, "asked.jsonl")

    def output(self, name):
        return (self.home / f"{name}.out").read_text()[-3000:]

    # -- runs --

    def submit(self, name="first", config="server.toml"):
        out = solera("deploy", "submit", self.server, "--name", name, "--config", config, "--json")
        return json.loads(out)

    def finish(self, name="first", config="server.toml", timeout=400):
        out = solera(
            "deploy",
            "submit",
            self.server,
            "--name",
            name,
            "--config",
            config,
            "--wait",
            "--timeout",
            timeout,
            "--json",
        )
        return json.loads(out)["digest"]

    def wait_for_end(self, name="first", timeout=400):
        """Until the run's directory has its summary; the digest."""
        summary = self.server / "runs" / name / "summary.json"
        until(summary.is_file, timeout)
        return json.loads(summary.read_text())["digest"]

    def failures(self, name="first"):
        lines = (self.server / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [f for line in lines for f in json.loads(line)["failures"]]

    def rounds(self, name="first"):
        file = self.server / "runs" / name / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def seconds(self, name="first"):
        """How long each round took."""
        lines = (self.server / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["seconds"]["total"] for line in lines]

    def simulated(self, config=None, name="simulated"):
        """The digest of a simulation of the same sites, in one process."""
        file = self.home / (f"{name}.toml" if config else "federation.toml")
        if config:
            file.write_text(config)
        out = self.home / name
        solera("run", file, "--out", out, "--engine", "inprocess", "--quiet")
        return json.loads((out / "summary.json").read_text())["digest"]


def solera(*words, check=True, timeout=900):
    """A command; what it printed."""
    done = subprocess.run([*SOLERA, *map(str, words)], capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout if check else f"{done.returncode} {done.stdout}{done.stderr}"


def until(true, seconds, every=0.2):
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(every)
