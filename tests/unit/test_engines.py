"""Engines: what only real processes and threads can get wrong."""

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor, nn

import solera.engines.processes
from helpers import Site
from solera.core.errors import ConfigError, SoleraError
from solera.core.federation import Federation, FederationConfig, QuorumNotMet
from solera.core.randomness import Parallel
from solera.core.task import Client, task
from solera.core.tensors import Weights
from solera.core.wire import Packed, at_most
from solera.core.wire import digest as wire_digest
from solera.engines import Call, ClientStates, InProcess, Processes, StateError, Threads, default_engine
from solera.engines.processes import _let_threads_end
from solera.engines.serve import serve


@dataclasses.dataclass(frozen=True)
class Seen:
    t: Tensor = at_most(64)


@dataclasses.dataclass(frozen=True)
class Number:
    t: Tensor = at_most(2, dtype=torch.int64)


@task("test_engines.nap")
def nap(client: Client, seconds: float) -> Number:
    time.sleep(seconds)
    return Number(torch.tensor([os.getpid(), threading.get_ident()]))


@dataclasses.dataclass(frozen=True)
class Met:
    t: Tensor = at_most(3, dtype=torch.int64)


@task("test_engines.meet")
def meet(client: Client, place: str, count: int) -> Met:
    """Come to a place and wait until `count` are there, or for a minute."""
    folder, end = pathlib.Path(place), time.monotonic() + 60
    (folder / client.id).touch()
    while len([*folder.iterdir()]) < count and time.monotonic() < end:
        time.sleep(0.01)
    return Met(torch.tensor([os.getpid(), threading.get_ident(), len([*folder.iterdir()])]))


@task("test_engines.nap_if_first")
def nap_if_first(client: Client, seconds: float) -> Seen:
    time.sleep(seconds if client.id == "c00" else 0)
    client.state["done"] = {"x": torch.ones(1)}
    return Seen(torch.ones(1))


@task("test_engines.crash_if_second")
def crash_if_second(client: Client) -> Number:
    if client.id == "c01":
        os.kill(os.getpid(), signal.SIGKILL)
    return Number(torch.tensor([int(client.id[1:])]))


@task("test_engines.dropped")
def dropped(client: Client) -> Seen:
    return Seen(nn.functional.dropout(torch.ones(64), 0.5))


@task("test_engines.count")
def count(client: Client) -> Seen:
    n = client.state.get("n", {"n": torch.zeros(1)})["n"] + 1
    client.state["n"] = {"n": n}
    return Seen(n)


@task("test_engines.threads_inside")
def threads_inside(client: Client, weights: Weights) -> Number:
    return Number(torch.tensor([torch.get_num_threads(), int(weights["w"].sum())]))


SIZES = (1,) * 6
ENGINES = {"inprocess": InProcess, "threads": Threads, "processes": Processes}


@pytest.fixture(params=list(ENGINES))
def engine(request, tmp_path):
    made = ENGINES[request.param](Site(SIZES), ClientStates(tmp_path), 2)
    yield made
    made.close()


@pytest.fixture
def processes(tmp_path):
    made = Processes(Site(SIZES), ClientStates(tmp_path), 2)
    yield made
    made.close()


def everyone(fed: Federation) -> list[str]:
    return list(fed.clients)


def test_dropout_has_the_same_bits_on_every_engine(engine, tmp_path):
    got = Federation(engine, 5).map(dropped, [f"c{i:02d}" for i in range(6)])
    want = Federation(InProcess(Site(SIZES), ClientStates(tmp_path / "w")), 5).map(dropped, list(got))
    assert all(torch.equal(got[k].t, want[k].t) for k in want)
    assert len({tuple(r.t.tolist()) for r in got.values()}) == 6


def test_one_torch_thread_in_every_task(engine):
    fed = Federation(engine, 0)
    replies = fed.map(threads_inside, everyone(fed), weights={"w": torch.ones(4)})
    assert [r.t.tolist() for r in replies.values()] == [[1, 4]] * 6


def test_a_call_builds_on_the_version_it_names(engine):
    fed = Federation(engine, 0)
    assert fed.map(count, ["c00"])["c00"].t.item() == 1
    assert fed.map(count, ["c00"])["c00"].t.item() == 2
    then = dict(fed.ledger)
    fed.begin(1)
    assert fed.map(count, ["c00"])["c00"].t.item() == 3
    back = Federation(engine, 0, ledger=then)  # a server that fell back: the client is as it was then
    back.begin(1)
    assert back.map(count, ["c00"])["c00"].t.item() == 3
    assert back.ledger == fed.ledger
    assert Federation(engine, 0).map(count, ["c00"])["c00"].t.item() == 1


def test_a_reply_tells_the_version_it_leaves(engine):
    fed = Federation(engine, 0)
    fed.map(count, ["c00"])
    first = fed.ledger["c00"]
    assert (first.step, len(first.sha256)) == (0, 64)
    fed.map(dropped, ["c00", "c01"])  # keeps nothing, changes nothing
    assert fed.ledger == {"c00": first}
    fed.map(count, ["c00"])
    assert fed.ledger["c00"].step == 2
    assert fed.ledger["c00"].sha256 != first.sha256


def test_a_void_round_and_late_replies_leave_the_ledger_as_it_was(engine):
    fed = Federation(engine, 0, FederationConfig(min_replies=2))
    fed.map(count, ["c00", "c01"])
    before = dict(fed.ledger)
    fed.begin(1)
    late = fed.submit(count, ["c02", "c03"])
    with pytest.raises(QuorumNotMet):
        fed.map(count, ["c00"])
    assert fed.ledger == before, "an exchange that is void moves nobody"
    fed.map(count, ["c00", "c01"])
    fed.void()
    assert fed.ledger == before
    late()
    assert fed.ledger == before, "a reply that came after the round was void"
    fed.begin(2)
    late = fed.submit(count, ["c02", "c03"])
    fed.begin(3)
    late()
    assert fed.ledger == before, "a reply of the round before"
    assert fed.map(count, ["c00", "c01"])["c00"].t.item() == 2


def test_a_rejected_reply_leaves_the_client_as_it_was(engine):
    fed = Federation(engine, 0)
    fed.map(count, ["c00", "c01"])
    before = dict(fed.ledger)
    replies = fed.map(count, ["c00", "c01", "c02"])
    fed.reject(replies, "c01", "of no use")
    fed.reject(replies, "c02", "of no use either")
    assert list(replies) == ["c00"]
    assert fed.ledger == {"c00": fed.ledger["c00"], "c01": before["c01"]}
    assert fed.ledger["c00"] != before["c00"]
    with pytest.raises(QuorumNotMet):
        fed.reject(replies, "c00", "nor this one")
    assert fed.ledger == before


def test_the_digest_is_of_the_server_state_and_of_what_clients_have(engine):
    fed = Federation(engine, 0)
    nobody = fed.digest({"w": torch.ones(2)})
    assert nobody == wire_digest({"w": torch.ones(2)})
    fed.map(count, ["c03"])
    one = fed.digest({"w": torch.ones(2)})
    fed.begin(7)  # the same state made by another step
    fed.ledger.clear()
    fed.map(count, ["c03"])
    assert one == fed.digest({"w": torch.ones(2)}) != nobody
    fed.ledger.clear()
    fed.map(count, ["c02"])
    assert fed.digest({"w": torch.ones(2)}) not in (one, nobody), "the same state, but another client's"


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_clients_really_run_at_once(kind, tmp_path):
    """Each of three waits for the others: one after another, they would never meet."""
    engine = ENGINES[kind](Site(SIZES), ClientStates(tmp_path), 3)
    (tmp_path / "place").mkdir()
    try:
        fed = Federation(engine, 0)
        replies = fed.map(meet, everyone(fed)[:3], place=str(tmp_path / "place"), count=3)
        assert [r.t[2].item() for r in replies.values()] == [3] * 3
        assert len({tuple(r.t[:2].tolist()) for r in replies.values()}) == 3
    finally:
        engine.close()


def test_submitted_work_overlaps_the_servers(processes, tmp_path):
    """The clients wait for a third, which the server only sends after `submit` has returned."""
    (tmp_path / "place").mkdir()
    pending = Federation(processes, 0).submit(meet, ["c00", "c01"], place=str(tmp_path / "place"), count=3)
    (tmp_path / "place" / "server").touch()
    assert [r.t[2].item() for r in pending().values()] == [3, 3]


def test_a_crash_costs_one_client_and_the_pool_recovers(processes):
    fed = Federation(processes, 0)
    for _ in range(3):
        replies = fed.map(crash_if_second, everyone(fed))
        assert replies.failures == {"c01": "its process died"}
        assert [r.t.item() for r in replies.values()] == [0, 2, 3, 4, 5]
    assert len(fed.map(dropped, everyone(fed))) == 6


def test_a_worker_that_ends_with_an_error_says_which(tmp_path, monkeypatch):
    """What goes wrong around a task, as on a device that cannot be opened, is not told as a bare death."""

    def broken(call, *rest):
        if call.client == "c01":
            raise RuntimeError("Invalid device argument")
        return serve(call, *rest)

    monkeypatch.setattr(solera.engines.processes, "serve", broken)
    engine = Processes(Site(SIZES), ClientStates(tmp_path), 2)
    try:
        fed = Federation(engine, 0)
        for _ in range(2):
            replies = fed.map(nap, everyone(fed), seconds=0.0)
            assert list(replies.failures) == ["c01"]
            said = replies.failures["c01"]
            assert said.startswith("its process ended with RuntimeError: Invalid device argument (test_engines.py:")
    finally:
        engine.close()


@pytest.mark.parametrize("kind", list(ENGINES))
def test_a_straggler_loses_its_seat_and_its_state_does_not_advance(kind, tmp_path):
    states = ClientStates(tmp_path)
    engine = ENGINES[kind](Site(SIZES), states, 2)
    try:
        fed = Federation(engine, 0, FederationConfig(deadline_s=2.0))
        # A worker process is ended at its deadline; waiting for it would take longer than a test may.
        replies = fed.map(nap_if_first, everyone(fed), seconds=2.5 if kind != "processes" else 3600.0)
        assert list(replies.failures) == ["c00"]
        assert "deadline" in replies.failures["c00"]
        assert "c00" not in fed.ledger
        assert "done" in states.load("c01", fed.ledger["c01"])
    finally:
        engine.close()


def test_an_engine_that_is_closed_leaves_no_process_behind(tmp_path):
    engine = Processes(Site(SIZES), ClientStates(tmp_path), 2)
    fed = Federation(engine, 0)
    pids = {int(r.t[0]) for r in fed.map(nap, everyone(fed), seconds=0.0).values()}
    fork_server = engine._fork_server.pid
    engine.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(_alive(p) for p in [*pids, fork_server]):
        time.sleep(0.02)
    assert not [p for p in [*pids, fork_server] if _alive(p)]
    engine.close()  # twice is harmless


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[0] != "Z"


KILLED_SERVER = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
from helpers import Site
from solera.engines import ClientStates, Processes
from solera.core.federation import Federation
from solera.core.task import Client, task
from solera.core.wire import at_most
import dataclasses, os

@dataclasses.dataclass(frozen=True)
class Number:
    t: torch.Tensor = at_most(1, dtype=torch.int64)

@task("test_engines.pid")
def pid(client: Client, nap: float) -> Number:
    time.sleep(nap)
    return Number(torch.tensor([os.getpid()]))

fed = Federation(Processes(Site((1,) * 4), ClientStates(sys.argv[1]), 2), 0)
print(*{int(r.t) for r in fed.map(pid, list(fed.clients), nap=0.0).values()}, flush=True)
fed.map(pid, ["c00"], nap=60.0)  # one worker is busy, the other idle
"""


def test_workers_end_when_the_server_is_killed(tmp_path):
    tests = os.path.dirname(os.path.dirname(__file__))
    server = subprocess.Popen(
        [sys.executable, "-c", KILLED_SERVER, str(tmp_path), tests], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    pids = [int(p) for p in server.stdout.readline().split()]
    server.kill()
    server.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(_alive(p) for p in pids):
        time.sleep(0.02)
    assert pids
    assert not [p for p in pids if _alive(p)]


def test_an_unknown_task_is_an_answer_not_a_crash(engine):
    (reply,) = engine.start([Call("c00", "os.system", 0, 0, 0, Packed({}))])()
    assert "unknown task 'os.system'" in reply.error


def test_client_states_keep_what_a_run_may_fall_back_to(tmp_path):
    states, made = ClientStates(tmp_path), {}
    for step in (0, 1000, 1001, 2000, 3000):  # 1001: of a reply that did not count
        state = {"s": {"t": torch.tensor([float(step)])}}
        keep = [made[1000]] if step > 1000 else ()
        made[step] = states.save("c00", step, state, keep, keep_from=min(step, 2000))
    assert states.versions("c00") == [made[1000], made[2000], made[3000]]
    assert {step: states.load("c00", made[step])["s"]["t"].item() for step in (1000, 2000)} == {1000: 1000, 2000: 2000}
    assert states.load("c01", None) == {}


def test_damaged_client_state_is_an_error_that_names_the_file(tmp_path):
    states = ClientStates(tmp_path)
    version = states.save("c00", 0, {"s": {"t": torch.ones(2)}})
    (path,) = (tmp_path / "c00").iterdir()
    content = path.read_bytes()
    for damaged in (content[:-3], bytes([*content[:-1], content[-1] ^ 1]), b"", content + b"\0"):
        path.write_bytes(damaged)
        for look in (lambda: states.load("c00", version), lambda: states.check({"c00": version})):
            with pytest.raises(StateError, match=rf"state of c00 is damaged: {path} does not match"):
                look()
    path.unlink()
    path.mkdir()
    with pytest.raises(StateError, match=rf"state of c00 is missing: {path}"):
        states.check({"c00": version})


def test_worker_counts(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.workers = 0"):
        Threads(Site(), ClientStates(tmp_path), 0)
    assert default_engine(1) == "inprocess"
    assert default_engine(2) in ("processes", "threads")


@task("test_engines.assign_twice")
def assign_twice(client: Client) -> Seen:
    n = client.state.get("n", {"n": torch.zeros(1)})["n"] + 1
    client.state["n"] = {"n": n - 100}  # the old value is gone now, and its address free for the next one
    client.state["n"] = {"n": n}
    return Seen(n)


@task("test_engines.change_inside")
def change_inside(client: Client) -> Seen:
    n = client.state.setdefault("n", {"n": torch.zeros(1)})
    n["n"] = n["n"] + 1
    return Seen(n["n"])


@task("test_engines.write_in_place")
def write_in_place(client: Client) -> Seen:
    n = client.state.setdefault("n", {"n": torch.zeros(1)})["n"].add_(1)
    return Seen(n.clone())


@pytest.mark.parametrize("counting", [assign_twice, change_inside, write_in_place], ids=lambda t: t.name)
def test_state_is_kept_however_it_was_changed(engine, counting):
    fed = Federation(engine, 0)
    assert [fed.map(counting, ["c00"])["c00"].t.item() for _ in range(5)] == [1, 2, 3, 4, 5]


@task("test_engines.count_and_fail")
def count_and_fail(client: Client, what: str) -> Seen:
    client.state["n"] = {"n": torch.ones(1)}
    return Seen(torch.tensor([float("nan")]) if what == "nan" else {"t": "text"})  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["nan", "type"])
def test_a_client_whose_reply_is_refused_is_left_as_it_was(engine, what):
    fed = Federation(engine, 0)
    assert "c00" in fed.map(count_and_fail, ["c00"], min_replies=0, what=what).failures
    assert fed.ledger == {}
    assert engine.states.versions("c00") == []


def test_state_that_is_not_finite_or_large_is_read_back_as_it_was_written(tmp_path):
    states = ClientStates(tmp_path)
    version = states.save("c00", 0, {"s": {"t": torch.tensor([float("nan"), float("inf")])}})
    assert states.load("c00", version)["s"]["t"].isfinite().logical_not().all()


def test_foreign_files_among_client_states_are_left_alone(tmp_path):
    states = ClientStates(tmp_path)
    states.save("c00", 5, {"s": {"t": torch.ones(1)}})
    (tmp_path / "c00" / "abcdefghijkl.safetensors").write_text("")
    newer = states.save("c00", 1005, {"s": {"t": torch.ones(2)}}, keep_from=1000)
    assert states.versions("c00") == [newer]
    assert (tmp_path / "c00" / "abcdefghijkl.safetensors").exists()


def test_two_engines_at_once_close_in_any_order(tmp_path):
    first, second = (Processes(Site(SIZES), ClientStates(tmp_path), 2) for _ in range(2))
    for e in (first, second):
        assert len(Federation(e, 0).map(dropped, ["c00", "c01"])) == 2
    closing = threading.Thread(target=first.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive(), "the other engine's processes keep it waiting"
    second.close()


@task("test_engines.who")
def who(client: Client) -> Number:
    return Number(torch.tensor([os.getpid()]))


@task("test_engines.swallow")
def swallow(client: Client, weights: Weights) -> Number:
    return Number(torch.tensor([os.getpid()]))


def test_a_worker_that_hangs_does_not_hold_up_the_others(tmp_path):
    engine = Processes(Site(SIZES), ClientStates(tmp_path), 2)
    try:
        fed = Federation(engine, 0, FederationConfig(deadline_s=5.0))
        hung = int(next(iter(fed.map(who, ["c00"]).values())).t)
        os.kill(hung, signal.SIGSTOP)  # it is idle: it will not even read its next call
        replies = fed.map(swallow, everyone(fed), weights={"w": torch.zeros(1_000_000)})
        assert len(replies.failures) == 1
        assert "deadline" in next(iter(replies.failures.values()))
        assert hung not in {int(r.t) for r in replies.values()}
    finally:
        engine.close()


@task("test_engines.in_a_process_of_its_own")
def in_a_process_of_its_own(client: Client) -> Number:
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join(5)
    return Number(torch.tensor([-1 if child.exitcode is None else child.exitcode]))


def test_a_task_may_use_processes_of_its_own(processes):
    assert Federation(processes, 0).map(in_a_process_of_its_own, ["c00"])["c00"].t.item() == 0


def test_an_engine_whose_fork_server_died_says_so_instead_of_waiting(processes, capfd):
    os.kill(processes._fork_server.pid, signal.SIGKILL)
    with pytest.raises(SoleraError, match=r"worker processes broke down .*; resume the run"):
        Federation(processes, 0).map(dropped, ["c00"])
    assert "Traceback" not in capfd.readouterr().err


@task("test_engines.leave")
def leave(client: Client) -> None:
    sys.exit("a task has no business ending the program")


def test_a_task_that_exits_costs_one_client(engine):
    fed = Federation(engine, 0)
    assert "SystemExit: a task has no business" in fed.map(leave, ["c00"], min_replies=0).failures["c00"]


@task("test_engines.talk_nonsense")
def talk_nonsense(client: Client, frame: str) -> None:
    """Writes to the server behind the engine's back, as a process gone wild might."""
    if client.id == "c01":
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, struct.pack("<QQ", len(frame), 0) + frame.encode())


FACTS = '{"error": null, "seconds": 0, "version": %s, "fatal": %s}'


@pytest.mark.parametrize(
    "frame",
    [
        "[1]", '{"error": null}', FACTS.replace("0", '"x"') % ("null", '""'), FACTS % ("null", "0"),
        FACTS % ("[1]", '""'), FACTS % ('[0, "../../c02"]', '""'), FACTS % ('[[], {}]', '""'), "[" * 9999,
    ],
)  # fmt: skip
def test_a_worker_that_sends_nonsense_costs_one_client(processes, frame):
    fed = Federation(processes, 0)
    assert list(fed.map(talk_nonsense, everyone(fed), frame=frame).failures) == ["c01"]
    assert len(fed.map(dropped, everyone(fed))) == 6


def test_a_fork_right_after_threads_have_worked_does_not_hang():
    """A thread that is just ending holds a lock of the matrix library; a process forked then would spin for ever."""
    side_by_side, square = Parallel(4), torch.ones(64, 64)
    work = [lambda: (square @ square).sum()] * 4
    for _ in range(100):
        side_by_side(work, range(4))
        _let_threads_end()
        pid = os.fork()
        if pid == 0:
            _ = square @ square
            os._exit(0)
        end = time.monotonic() + 20
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pytest.fail("the forked process hangs")
            time.sleep(0.0005)
