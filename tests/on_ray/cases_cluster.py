"""Ray on two machines (two network namespaces, joined by a cable), and what ends a run that has started a Ray itself.

`contract/test_on_ray.py` runs this file in a network namespace of its own, which is the first machine.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from namespaces import mine
from solera.methods import FedDF, Scaffold
from solera.testing import run_toy, small

pytest.importorskip("ray", reason="needs the extra 'ray'")
HEAD, OTHER, PORT = "10.77.0.1", "10.77.0.2", 6379
ENV = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
RAY = pathlib.Path(sys.executable).with_name("ray")


def sh(command: str) -> None:
    subprocess.run(["sh", "-ec", command], check=True)


def wait_until(true, otherwise: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.2)


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


@pytest.fixture
def machines(tmp_path_factory):
    """Two machines with a Ray that makes them one cluster; a command's prefix that runs it on the second."""
    before = mine()
    holder = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
    there = ["nsenter", "-t", str(holder.pid), "-n"]
    nodes = []
    try:
        wait_until(lambda: holder.pid not in mine(), "there is no second machine", 10)
        sh(f"""
            ip link add cable0 type veth peer name cable1; ip link set cable1 netns {holder.pid}
            ip addr add {HEAD}/24 dev cable0; ip link set cable0 up
            {" ".join(there)} sh -ec 'ip link set lo up; ip addr add {OTHER}/24 dev cable1; ip link set cable1 up'
        """)
        home = f"/tmp/ray-{os.getpid()}"
        head = [RAY, "start", "--block", "--head", "--node-ip-address", HEAD, "--port", str(PORT), "--num-cpus", "1"]
        nodes.append(
            subprocess.Popen(
                [*head, "--include-dashboard", "false", "--temp-dir", home], env=ENV, stdout=subprocess.DEVNULL
            )
        )
        wait_until(lambda: answers(HEAD, PORT), "the head does not start", 60)
        other = [*there, RAY, "start", "--block", "--address", f"{HEAD}:{PORT}", "--node-ip-address", OTHER]
        nodes.append(subprocess.Popen([*other, "--num-cpus", "2"], env=ENV, stdout=subprocess.DEVNULL))
        yield nodes
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
            node.wait(60)
        holder.kill()
        holder.wait()
    wait_until(lambda: mine() <= before, "processes of Ray stay behind", 30)


RUN = """
import pathlib, sys, torch
from solera.runs.config import RunConfig
from solera.engines.engine_settings import RayConfig
from solera.core.federation import FederationConfig
from solera.runs.loop import simulate
from solera.core.task import task, Client
from solera.testing import small, toy_for
import solera.methods
from solera.method import find_method

name, out, address, workers, rounds = sys.argv[1:]
method = small(find_method(name)())
print("go", flush=True)
done = simulate(toy_for(method), method, pathlib.Path(out), RunConfig(rounds=int(rounds)),
    FederationConfig(fraction=0.75), RayConfig(address=address, workers=int(workers)), resume=True)
print(done.digest, done.summary["workers"], sum(map(int, map(len, done.summary["failures"].values()))), flush=True)
"""


def program(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)


def lines_in(file: pathlib.Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def test_two_machines_by_address_and_one_of_them_is_switched_off(machines, tmp_path):
    """The digest of one process; a machine that is gone costs the replies that were under way there, and no run."""
    from ray import init, nodes, shutdown

    init(address=f"{HEAD}:{PORT}", log_to_driver=False, configure_logging=False)
    wait_until(lambda: len(nodes()) == 2, "the second machine does not join", 60)
    shutdown()
    wanted = run_toy(small(Scaffold()), tmp_path / "here")
    process = program("scaffold", tmp_path / "two", f"{HEAD}:{PORT}", 0, 3)
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    assert out.split()[-3:-1] == [wanted.digest, "3"]

    process = program("scaffold", tmp_path / "off", f"{HEAD}:{PORT}", 3, 300)
    wait_until(lambda: lines_in(tmp_path / "off" / "metrics.jsonl") > 20, "no rounds are done", 120)
    machines.pop().kill()
    at = lines_in(tmp_path / "off" / "metrics.jsonl")
    wait_until(lambda: lines_in(tmp_path / "off" / "metrics.jsonl") > at + 20, "the run does not go on", 120)
    process.terminate()
    process.communicate(timeout=60)


def test_nobody_is_left_behind_when_a_run_that_started_ray_is_stopped(tmp_path):
    before, folders = mine(), set(pathlib.Path("/tmp").glob("solera-ray-*"))
    wanted = run_toy(small(FedDF()), tmp_path / "here", rounds=40)
    for number, code in ((signal.SIGINT, {-2, 130, 1}), (signal.SIGTERM, {143, 1}), (signal.SIGKILL, {-9})):
        process = program("feddf", tmp_path / "run", "", 1, 40)
        begun = lines_in(tmp_path / "run" / "metrics.jsonl")
        wait_until(lambda: lines_in(tmp_path / "run" / "metrics.jsonl") > begun, "no round is done", 120)  # noqa: B023
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode in code
        # After kill -9 two agents of Ray wait a while for the rest of it, which the kernel has ended.
        wait_until(lambda: mine() <= before, f"processes live on after {number.name}", 180)
        if number != signal.SIGKILL:
            assert set(pathlib.Path("/tmp").glob("solera-ray-*")) == folders
    assert lines_in(tmp_path / "run" / "metrics.jsonl") < 40
    out, err = program("feddf", tmp_path / "run", "", 2, 40).communicate()
    assert out.split()[-3] == wanted.digest, err[-2000:]


OWN = """
import dataclasses, pathlib, sys
import torch
from torch import nn
import solera
from solera.engines.engine_settings import RayConfig
from solera.method import Method, Model
from solera.testing import run_toy, toy
from solera.methods import FedAvg
from solera.runs.config import RunConfig

class Net(nn.Module):  # of the program itself: no other process can import it
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)
    def forward(self, x):
        return self.inner(x)

models = {"lambda": lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)), "net": Net}
digests = []
for engine in ("inprocess", RayConfig(workers=1)):
    out = pathlib.Path(sys.argv[1]) / str(len(digests))
    digests.append(solera.simulate(toy(models=models), FedAvg(), out, RunConfig(rounds=1), engine=engine).digest)
assert digests[0] == digests[1]
"""


def test_models_of_the_program_itself_reach_the_workers(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(OWN)
    done = subprocess.run([sys.executable, script, tmp_path / "runs"], capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr[-3000:]
