"""A system that is short of something: of threads, processes or file size, for a moment or for good."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from helpers import Site
from solera.core import randomness
from solera.core.errors import ConfigError, SoleraError
from solera.core.federation import Federation
from solera.core.randomness import Parallel
from solera.core.task import Client, task
from solera.core.wire import sized
from solera.engines import ClientStates, InProcess, Processes, Threads, pool, processes
from solera.runs.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class Answer:
    w: torch.Tensor = sized("size")


@dataclasses.dataclass(frozen=True)
class Value:
    value: float


@task("test_scarce.answer")
def answer(client: Client, size: int) -> Answer:
    return Answer(torch.full((size,), float(client.seed % 1000)))


@task("test_scarce.sleep")
def sleep(client: Client, seconds: float) -> Value:
    time.sleep(seconds)
    return Value(0.0)


@pytest.mark.parametrize("key", ["threads", "workers"])
def test_a_number_of_threads_that_is_a_slip_of_the_pen_is_refused(key):
    with pytest.raises(ConfigError, match=rf"EngineConfig.{key} = 1000000000000: .* of at most 4096 .*cores"):
        EngineConfig("inprocess", **{key: 10**12})


# ---- threads and processes that cannot be had -------------------------------------------------------


@pytest.fixture
def no_threads(monkeypatch):
    """Refuses new threads, the first `n` times they are wanted."""

    def refuse(n):
        left = [n]
        start = threading.Thread.start

        def refusing(self):
            if left[0] > 0:
                left[0] -= 1
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", refusing)

    return refuse


@pytest.mark.parametrize("times", [1, 2, 10**6])
def test_server_work_goes_on_with_fewer_threads_or_none(no_threads, times):
    jobs = [lambda i=i: torch.full((3,), float(i)) for i in range(5)]
    expected = Parallel(1)(jobs, range(5))
    no_threads(times)
    parallel = Parallel(4)
    for _ in range(2):
        assert randomness.same_bits(parallel(jobs, range(5)), expected)


@pytest.mark.parametrize("times", [1, 2, 10**6])
def test_the_engine_threads_goes_on_with_fewer_threads_or_none(no_threads, times, tmp_path):
    def answers(make, where):
        engine = make(Site(), ClientStates(tmp_path / where), 4)
        try:
            fed = Federation(engine, 0)
            return dict(fed.map(answer, list(fed.clients), size=5))
        finally:
            engine.close()

    expected = answers(InProcess, "reference")
    no_threads(times)
    assert randomness.same_bits(answers(Threads, "threads"), expected)


def test_the_engine_processes_waits_a_moment_for_its_thread(no_threads, tmp_path):
    no_threads(3)
    engine = Processes(Site(), ClientStates(tmp_path), 2)
    fed = Federation(engine, 0)
    assert len(fed.map(answer, list(fed.clients), size=5)) == 4
    engine.close()


def children() -> set[str]:
    """The processes that this one has started and that are not gone."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_no_thread_at_all_is_told_and_leaves_no_process(no_threads, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    no_threads(10**6)
    before = children()
    with pytest.raises(SoleraError, match="the system gives no new thread"):
        Processes(Site(), ClientStates(tmp_path), 2)
    assert children() <= before  # the fork server is gone


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_processes_that_cannot_be_forked(tmp_path, monkeypatch, allowed):
    """The fork server is there; it gets no more than so many workers."""
    monkeypatch.setattr(pool, "PATIENCE_S", 0.1)
    fork, calls, server = os.fork, [], os.getpid()

    def scarce():
        calls.append(os.getpid())
        if os.getpid() != server and len([pid for pid in calls if pid != server]) > allowed:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", scarce)
    engine = Processes(Site(), ClientStates(tmp_path), 3)
    try:
        fed = Federation(engine, 0)
        if allowed:
            assert len(fed.map(answer, list(fed.clients), size=5)) == 4
            assert engine.count == allowed
        else:
            with pytest.raises(SoleraError, match="the system gives no new process"):
                fed.map(answer, list(fed.clients), size=5)
    finally:
        engine.close()


@pytest.mark.parametrize("hangs", [1, 10**6])
def test_a_fork_that_finds_a_lock_taken_is_tried_again_and_then_told(tmp_path, monkeypatch, hangs):
    monkeypatch.setattr(processes, "QUIET_S", 3.0)
    fork, forks = os.fork, []

    def counting():
        forks.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", counting)
    monkeypatch.setattr(processes, "fingerprint", lambda: time.sleep(60 if len(forks) <= hangs else 0))
    if hangs > 1:
        with pytest.raises(SoleraError, match="holds a lock of torch or numpy"):
            Processes(Site(), ClientStates(tmp_path), 2)
        return
    engine = Processes(Site(), ClientStates(tmp_path), 2)
    fed = Federation(engine, 0)
    assert len(fed.map(answer, list(fed.clients), size=5)) == 4
    engine.close()


# ---- the size of files ------------------------------------------------------------------------------


@task("test_scarce.take")
def take(client: Client, weights: dict[str, torch.Tensor]) -> Value:
    return Value(float(sum(w.numel() for w in weights.values())))


@pytest.mark.timeout(120)
def test_a_message_larger_than_a_file_may_be_is_told_at_once(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = Processes(Site(), ClientStates(tmp_path), 2)
    fed = Federation(engine, 0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(SoleraError, match=r"cannot be passed on: File too large; `ulimit -f` limits it"):
            fed.map(take, list(fed.clients), weights={"w": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        engine.close()


@pytest.mark.timeout(120)
def test_a_reply_larger_than_a_file_may_be_stops_the_run_and_names_the_limit(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        engine = Processes(Site(), ClientStates(tmp_path), 2)  # workers have the limit, too
        fed = Federation(engine, 0)
        with pytest.raises(SoleraError, match=r"cannot be passed on: File too large; `ulimit -f` limits it"):
            fed.map(answer, list(fed.clients), size=10_000)
        engine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- kill -9 of the parent --------------------------------------------------------------------------

PARENT = """
import os, sys, threading, time
from helpers import Site
from solera.engines import ClientStates, Processes
from solera.core.federation import Federation
import test_scarce

def work():
    engine = Processes(Site(), ClientStates(sys.argv[1]), 2)
    if sys.argv[2] == "with a child" and os.fork() == 0:  # it holds the server's ends of the sockets
        time.sleep(60)
        os._exit(0)
    Federation(engine, 0).map(test_scarce.sleep, list(engine.roster), seconds=60.0)
if sys.argv[2] == "in a thread":
    thread = threading.Thread(target=work); thread.start(); thread.join()
else:
    work()
"""


def descendants(pid):
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                after = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            children.setdefault(int(after[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        of = children.get(todo.pop(), [])
        found += of
        todo += of
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ["plain", "in a thread", "with a child"])
@pytest.mark.parametrize("killed", ["server", "fork server"])
def test_workers_end_with_their_parent(tmp_path, how, killed):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path])
    words = [sys.executable, "-c", PARENT, str(tmp_path), how]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths}) as server:
        children = 4 if how == "with a child" else 3
        end = time.monotonic() + 60
        while len(descendants(server.pid)) < children and time.monotonic() < end:
            time.sleep(0.05)
        everybody = descendants(server.pid)
        assert len(everybody) == children
        fork_server = next(p for p in everybody if len(descendants(p)) == 2)
        workers = descendants(fork_server)
        os.kill(server.pid if killed == "server" else fork_server, signal.SIGKILL)
        end = time.monotonic() + 60  # it takes a second on an idle machine
        while any(alive(p) for p in workers) and time.monotonic() < end:
            time.sleep(0.02)
        left = [p for p in workers if alive(p)]
        for p in [server.pid, *everybody]:
            if alive(p):
                os.kill(p, signal.SIGKILL)
    assert left == []
