"""A run in company: other runs and other threads in the same process must not change its result."""

import _thread
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from helpers import Site
from solera.core import randomness
from solera.core.errors import RunError
from solera.core.federation import Federation, TaskError
from solera.core.randomness import Parallel, SharedGenerator, isolated, repeatable, same_bits
from solera.core.task import Client, task
from solera.core.wire import sized
from solera.engines import ClientStates, InProcess
from solera.methods import FedDF
from solera.runs.callbacks import Callback
from solera.runs.config import EngineConfig, RunConfig
from solera.runs.loop import simulate
from solera.scenario.server import Server
from solera.testing import ENGINES_TO_COMPARE, Echo, small, toy, wide


def run(out, engine="inprocess", callbacks=(), scenario=None):
    scenario = scenario or toy(workers=2)
    config = RunConfig(rounds=2)
    return simulate(scenario, small(FedDF()), out, config, engine=EngineConfig(engine, workers=2), callbacks=callbacks)


def refusal():
    """A run that is refused is no wrong result: how often another thread gets in between is the system's business."""
    return contextlib.suppress(SharedGenerator, TaskError)


@contextlib.contextmanager
def in_company_of(act, pause=0.0):
    """Another thread of the program that does the same over and over."""
    done = threading.Event()

    def live():
        while not done.is_set():
            act()
            time.sleep(pause)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def eventually(true):
    """Soon, on an idle machine; on a busy one it may take its time."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def fork_and_draw():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


COMPANY = {
    "torch": lambda: torch.rand(3),
    "numpy": lambda: np.random.rand(3),
    "random": random.random,
    "seeding": lambda: torch.manual_seed(0),
    "forking": fork_and_draw,
}


def plain():
    """A federation in which nothing uses the global generators, once its models are made."""
    return toy(models={"wide": wide}, workers=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Digests without company."""
    home = tmp_path_factory.mktemp("alone")
    return {"dropout": run(home / "dropout").digest, "plain": run(home / "plain", scenario=plain()).digest}


# ---- two runs at once -------------------------------------------------------------------------------


class Halt(Callback):
    """Holds a run up in its first round."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def saved(self, record):
        self.reached.set()
        assert self.go_on.wait(60)


def test_a_second_run_in_the_same_process_is_refused_and_the_first_not_disturbed(tmp_path, alone):
    async def both():
        halt = Halt()
        first = asyncio.create_task(asyncio.to_thread(run, tmp_path / "first", callbacks=[halt]))
        try:
            await asyncio.to_thread(halt.reached.wait, 60)
            with pytest.raises(RunError, match="another run is going on in this process"):
                await asyncio.to_thread(run, tmp_path / "second")
        finally:
            halt.go_on.set()
        return await first

    assert asyncio.run(both()).digest == alone["dropout"]
    assert not (tmp_path / "second").exists()
    assert run(tmp_path / "second").digest == alone["dropout"], "the first run is over: the second may begin"


def test_a_child_forked_during_a_run_may_have_a_run_of_its_own(tmp_path):
    class Forking(Callback):
        code = None

        def saved(self, record):
            if self.code is None:
                pid = os.fork()
                if pid == 0:
                    try:
                        run(tmp_path / "child")
                        os._exit(0)
                    finally:
                        os._exit(1)
                self.code = os.waitpid(pid, 0)[1]

    forking = Forking()
    run(tmp_path / "parent", callbacks=[forking])
    assert forking.code == 0


# ---- other threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES_TO_COMPARE)
@pytest.mark.parametrize("company", COMPANY)
def test_where_nothing_uses_the_generators_company_does_not_matter(tmp_path, alone, company, engine):
    scenario = plain()
    with in_company_of(COMPANY[company], 0.0005), refusal() if company == "seeding" else contextlib.nullcontext():
        assert run(tmp_path / "run", engine, scenario=scenario).digest == alone["plain"]


@pytest.mark.parametrize("engine", ENGINES_TO_COMPARE)
@pytest.mark.parametrize("company", COMPANY)
def test_with_dropout_it_is_the_same_result_or_none(tmp_path, alone, company, engine):
    for pause in (0.1, 0.0):
        with in_company_of(COMPANY[company], pause), refusal():
            assert run(tmp_path / f"run{pause}", engine).digest == alone["dropout"]


def test_one_draw_at_the_wrong_moment_is_noticed():
    """A thread that draws once, in the middle of our work, and never again."""
    began, drawn = threading.Event(), threading.Event()

    def stranger():
        began.wait()
        torch.rand(1)
        drawn.set()
        threading.Event().wait(5)

    def work():
        first = torch.rand(1)
        began.set()
        drawn.wait()
        return first, torch.rand(1)

    with isolated(3):
        expected = torch.rand(1), torch.rand(1)
    threading.Thread(target=stranger, daemon=True).start()
    time.sleep(0.1)
    assert same_bits(repeatable(3, work), expected)


def test_a_thread_that_only_waits_is_not_taken_for_one_at_work():
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()

    def rests():
        before = randomness._others()[thread.native_id]
        sum(range(10**5))
        return randomness._others()[thread.native_id] == before

    eventually(rests)  # once it has begun to wait
    release.set()
    thread.join()
    with in_company_of(lambda: None):
        others = randomness._others()
        eventually(lambda: not randomness._undisturbed(others))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the clock of such a thread is unknown, and it counts")
def test_a_thread_that_python_does_not_list_counts_when_it_works():
    stop, work, done, ident = threading.Event(), threading.Event(), threading.Event(), []

    def live():
        ident.append(threading.get_native_id())
        work.wait()
        while not stop.is_set():
            sum(range(1000))
        done.set()

    def rests():
        before = randomness._others()
        sum(range(10**5))
        return randomness._undisturbed(before)

    _thread.start_new_thread(live, ())
    eventually(lambda: ident)
    assert ident[0] in randomness._others()
    eventually(rests)
    others = randomness._others()
    work.set()
    eventually(lambda: not randomness._undisturbed(others))
    stop.set()
    done.wait()


def test_work_that_seeds_the_generators_itself_is_no_strangers_doing():
    def work():
        torch.manual_seed(7)
        return torch.rand(3)

    with isolated(7):
        expected = torch.rand(3)
    with in_company_of(lambda: None, 0.0001):
        assert same_bits(repeatable(1, work), expected)


def test_work_that_cannot_be_repeated_is_refused_in_one_line():
    drawn = [0]

    def stranger():
        torch.rand(1)
        drawn[0] += 1

    def work():
        first, before = torch.rand(1), drawn[0]
        eventually(lambda: drawn[0] > before + 500)  # in every attempt, and never as many as in another one
        return [first, torch.rand(1)]

    with in_company_of(stranger), pytest.raises(SharedGenerator, match="its own generator"):
        repeatable(1, work)


def test_an_error_is_a_result_too():
    def work():
        raise ValueError(f"{torch.rand(1).item()}")

    with isolated(2):
        expected = torch.rand(1).item()
    with in_company_of(lambda: torch.rand(1), 0.01), pytest.raises(ValueError, match=str(expected)):
        repeatable(2, work)


def test_initial_weights_do_not_depend_on_company():
    def build():
        return nn.Sequential(*[nn.Linear(40, 40) for _ in range(10)])

    expected = Server({"net": build}, ["net"], 0, 3).init("net")
    for _ in range(5):
        with in_company_of(lambda: torch.rand(1), 0.002), refusal():
            assert same_bits(Server({"net": build}, ["net"], 0, 3).init("net"), expected)


def test_server_work_does_not_depend_on_company():
    def job():
        return torch.stack([nn.functional.dropout(torch.ones(8), 0.5) for _ in range(50)])

    expected = Parallel(1)([job] * 3, range(3))
    for workers in (1, 2):
        with in_company_of(lambda: torch.rand(1), 0.002), refusal():
            assert same_bits(Parallel(workers)([job] * 3, range(3)), expected)


def test_jobs_that_seed_the_generators_themselves_are_run_again_alone():
    """`isolated` leaves no trace in the generators; two of them in two threads would take each other's numbers."""

    def job(i):
        def draw():
            with isolated(i):
                return torch.stack([torch.rand(3) for _ in range(100)])

        return draw

    jobs = [job(i) for i in range(4)]
    before = torch.get_rng_state()
    assert same_bits(Parallel(4)(jobs, range(4)), [f() for f in jobs])
    assert torch.equal(torch.get_rng_state(), before)


@dataclasses.dataclass(frozen=True)
class Drawn:
    numbers: torch.Tensor = sized(3000, 3)


@task("test_company.draw_much")
def draw_much(client: Client) -> Drawn:
    return Drawn(torch.stack([torch.rand(3) for _ in range(3000)]))


def test_a_task_that_cannot_be_repeated_stops_the_run_instead_of_costing_a_client(tmp_path):
    fed = Federation(InProcess(Site(), ClientStates(tmp_path)), 0)
    with in_company_of(lambda: torch.rand(1)), pytest.raises(TaskError, match="another thread of this program uses"):
        fed.map(draw_much, list(fed.clients))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.zeros(1), -torch.zeros(1), False),
        ({"a": [1.0, (2, None)]}, {"a": [1.0, (2, None)]}, True),
        ({"a": 1}, {"a": 2}, False),
        (float("nan"), float("nan"), True),
        (np.ones(2), np.ones(2), True),
        (Echo(1.0, {"w": torch.ones(1)}), Echo(1.0, {"w": torch.zeros(1)}), False),
        (torch.empty(0), torch.empty(0), True),
        (object(), object(), False),
    ],
)
def test_same_bits(a, b, same):
    assert same_bits(a, b) == same


def test_a_lock_held_at_the_fork_does_not_hang_the_child():
    taken, release = threading.Event(), threading.Event()

    def hold():
        with isolated(1):
            taken.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        with randomness.isolated(2):
            os._exit(0)
    code = os.waitpid(pid, 0)[1]
    release.set()
    thread.join()
    assert code == 0
