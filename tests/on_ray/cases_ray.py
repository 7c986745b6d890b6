"""The Ray engine on a Ray of its own. `contract/test_on_ray.py` runs this file in a network namespace of its own.

One Ray serves all tests: starting it takes longer than all they do with it.
"""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import ray_tasks
from helpers import Site
from namespaces import mine
from solera.core.errors import ConfigError, RunError
from solera.core.federation import Federation, FederationConfig
from solera.engines import ClientStates
from solera.engines import ray as engine_ray
from solera.engines.engine_settings import RayConfig
from solera.methods import MNFL, FedAvg, FedDF, FedEED, FedET, Scaffold
from solera.place.devices import Compute
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import check_engine, run_toy, small, toy_for

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
SIZES = (1,) * 6


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray that the engine itself has started."""
    before = signal.getsignal(signal.SIGTERM), mine()
    disconnect = engine_ray.connect("", 4)
    assert signal.getsignal(signal.SIGTERM) is before[0], "a run's own handler is replaced"
    folder = pathlib.Path(ray._private.worker._global_node.get_temp_dir_path())
    yield ray.get_runtime_context().gcs_address
    disconnect()
    assert not folder.exists(), "files of a Ray that has ended stay behind"
    _wait_until(lambda: mine() <= before[1], "processes of Ray stay behind")


@pytest.fixture(scope="module")
def opened(cluster, tmp_path_factory):
    """An engine with two workers."""
    made = RayConfig(workers=2).open(Site(SIZES), ClientStates(tmp_path_factory.mktemp("states")))
    yield made
    made.close()
    assert ray.is_initialized(), "a connection that somebody else has made stays"


@pytest.fixture
def plain(opened, tmp_path):
    """The same engine, with clients that have no data."""
    Reused(engine=opened).open(Site(SIZES), ClientStates(tmp_path))
    return opened


def _wait_until(true, otherwise: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


def everyone(fed: Federation) -> list[str]:
    return list(fed.clients)


def begin_again(worker: Any, *given: Any) -> Any:
    """In an actor: what Ray does when it starts one."""
    worker.__init__(*given)
    return worker.about()


@dataclasses.dataclass
class Reused:
    """Settings that open the engine again with another host, in workers that are there: starting one takes seconds."""

    workers: int = 2
    threads: int = 1
    engine: Any = None

    def open(self, host, states):
        engine = self.engine
        engine.host, engine.states = host, states
        engine.again = engine_ray.luggage(host, Compute(), 1)
        told = ray.get([s.actor.__ray_call__.remote(begin_again, *engine.again) for s in engine._seats])
        assert all(isinstance(about, dict) for about in told)
        return Borrowed(engine)


class Borrowed:
    """An engine that its owner closes."""

    def __init__(self, engine):
        self.roster, self.start, self.count = engine.roster, engine.start, engine.count

    def close(self):
        pass


# ---- bits -------------------------------------------------------------------------------------------


def test_the_contract_of_an_engine(opened, tmp_path):
    check_engine(Reused(engine=opened).open, tmp_path)


METHODS = {
    "fedavg": FedAvg(),
    "scaffold": Scaffold(),  # clients keep state, which travels
    "feddf": FedDF(),  # different models
    "fedet": FedET(),
    "fedeed, pipelined": FedEED(pipeline=True),  # two exchanges at once
    "mnfl": MNFL(),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_has_the_digest_of_a_run_in_this_process(name, opened, tmp_path):
    method = small(METHODS[name])
    wanted = run_toy(method, tmp_path / "here")
    found = simulate(
        toy_for(method),
        method,
        tmp_path / "ray",
        RunConfig(rounds=3),
        FederationConfig(fraction=0.75),
        Reused(engine=opened),
    )
    assert found.digest == wanted.digest
    assert not found.summary["failures"]
    assert found.summary["workers"] == 2


# ---- what travels, and how often --------------------------------------------------------------------


def test_a_message_is_put_into_the_store_once_for_all_clients(plain, monkeypatch):
    puts, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value, **given: puts.append(len(value)) or put(value, **given))
    fed = Federation(plain, 0)
    replies = fed.map(ray_tasks.back, everyone(fed), weights={"w": torch.zeros(1000)})
    assert len(replies) == 6
    assert len(puts) == 1
    assert 4000 < puts[0] < 5000
    _wait_until(lambda: not plain._references, "a message that no call needs stays in the store")


def test_state_travels_with_calls_and_stays_in_the_run_directory(plain, tmp_path):
    fed = Federation(plain, 0)
    for n in (1, 2, 3):
        fed.begin(n)
        assert [r.t.item() for r in fed.map(ray_tasks.count, everyone(fed)).values()] == [n] * 6
    for k, version in fed.ledger.items():
        assert plain.states.load(k, version)["n"]["n"].item() == 3
    plain.states.path("c02", fed.ledger["c02"]).unlink()
    fed.begin(4)
    with pytest.raises(RunError, match="state of c02 is missing"):
        fed.map(ray_tasks.count, everyone(fed))
    assert not pathlib.Path("carried").exists()


class Counted(Site):
    """A host that notes in a file when it is rebuilt elsewhere."""

    def __init__(self, note):
        super().__init__(SIZES)
        self.note, self.data = note, torch.arange(100_000.0)

    def __setstate__(self, state):
        self.__dict__.update(state)
        with open(self.note, "a") as file:
            file.write(f"{os.getpid()}\n")


def test_data_reaches_each_worker_once(cluster, tmp_path):
    note = tmp_path / "note"
    engine = RayConfig(workers=2).open(Counted(note), ClientStates(tmp_path / "states"))
    try:
        fed = Federation(engine, 0)
        pids = set()
        for t in range(4):
            fed.begin(t)
            pids |= {int(r.t[0]) for r in fed.map(ray_tasks.who, everyone(fed), seconds=0.02).values()}
    finally:
        engine.close()
    assert len(pids) == 2
    assert sorted(map(int, note.read_text().split())) == sorted(pids)
    _wait_until(lambda: not pids & mine(), "workers live on after their engine is closed")


def test_clients_run_at_once_with_one_torch_thread(plain):
    fed = Federation(plain, 0)
    replies = fed.map(ray_tasks.who, everyone(fed), seconds=0.1)
    assert len({int(r.t[0]) for r in replies.values()}) == 2
    assert {int(r.t[1]) for r in replies.values()} == {1}


# ---- what breaks ------------------------------------------------------------------------------------


def test_a_worker_that_dies_costs_one_client_and_is_replaced(plain):
    fed = Federation(plain, 0)
    for _ in range(2):
        replies = fed.map(ray_tasks.die_if_second, everyone(fed))
        assert list(replies.failures) == ["c01"]
        assert "its process died (worker" in replies.failures["c01"]
        assert [r.t.item() for r in replies.values()] == [0, 2, 3, 4, 5]
    _wait_until(lambda: len(plain.idle) == 2, "a dead worker is not replaced")
    assert len({int(r.t[0]) for r in fed.map(ray_tasks.who, everyone(fed), seconds=0.1).values()}) == 2


def test_a_straggler_loses_its_seat_and_its_state_does_not_advance(plain):
    fed = Federation(plain, 0, FederationConfig(deadline_s=2.0))
    began = time.monotonic()
    replies = fed.map(ray_tasks.nap_if_first, everyone(fed), seconds=60.0)
    assert time.monotonic() - began < 30
    assert list(replies.failures) == ["c00"]
    assert "deadline of 2 s" in replies.failures["c00"]
    assert "c00" not in fed.ledger
    assert "done" in plain.states.load("c01", fed.ledger["c01"])


def test_too_many_workers_are_refused(cluster, tmp_path):
    with pytest.raises(ConfigError, match=r"engine.workers = 5: the cluster of 1 machine has room for 4 workers"):
        RayConfig(workers=5).open(Site(SIZES), ClientStates(tmp_path))


def test_a_worker_with_other_versions_is_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_ray, "versions", lambda: {"python": "3.11", "torch": "1.0", "solera": "0.0"})
    with pytest.raises(ConfigError, match=r"has torch .*, this machine 1\.0: install the same versions"):
        RayConfig(workers=1).open(Site(SIZES), ClientStates(tmp_path))


def test_data_that_cannot_be_sent_is_refused(cluster, tmp_path):
    host = Site(SIZES)
    host.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to its workers: cannot pickle '_thread.lock' object"):
        RayConfig(workers=1).open(host, ClientStates(tmp_path))


def test_another_cluster_than_the_one_this_program_is_connected_to_is_refused(cluster, tmp_path):
    with pytest.raises(ConfigError, match=f"connected to the Ray cluster at {cluster}"):
        engine_ray.connect("127.0.0.1:1", 1)


RUN = """
import pathlib, sys
from solera.engines.engine_settings import RayConfig
from solera.methods import Scaffold
from solera.testing import run_toy, small
out, address, rounds = sys.argv[1:]
print(run_toy(small(Scaffold()), pathlib.Path(out), RayConfig(address=address, workers=1), rounds=int(rounds)).digest)
"""


def test_kill_nine_and_resume_to_the_same_digest(cluster, tmp_path):
    wanted = run_toy(small(Scaffold()), tmp_path / "here", rounds=30)
    out, records = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    command = [sys.executable, "-c", RUN, out, cluster, "30"]
    first = subprocess.Popen(command)
    _wait_until(lambda: records.exists() and records.read_text().count("\n") >= 2, "no round is done", 60)
    first.kill()
    first.wait()
    assert records.read_text().count("\n") < 30, "killed too late to show anything"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split()[-1] == wanted.digest, done.stderr[-2000:]


def test_memory_is_flat_over_the_rounds(plain):
    """Of this process, of the workers, and of the store."""

    def own(pid: object) -> int:  # without what is shared: pages of the store count for whoever looked at them
        (line,) = re.findall(r"RssAnon:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())
        return int(line) << 10

    fed, seen = Federation(plain, 0), []
    pids = [s.about["pid"] for s in plain._seats]
    weights = {"w": torch.zeros(250_000)}  # 1 MB
    for t in range(60):
        fed.begin(t)
        fed.map(ray_tasks.back, everyone(fed), weights=weights)
        held = ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]
        seen.append((own("self"), *map(own, pids), held))
    grown = [late - early for early, late in zip(seen[19], seen[59], strict=True)]
    assert max(grown) < 10 << 20, f"40 rounds of 12 MB each, and memory grew by {grown} bytes"
