"""Clients in threads of this process: nothing is copied, nothing isolated.

Threads share torch's global generator, so a model with dropout would get numbers that depend on scheduling. A draw
shows in the generators' state; calls that may have seen it are run again one after another, each from its own seed,
and the engine stays serial from then on. Client work starts when replies are collected.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ..core.calls import Call, Host, Reply, Roster
from ..core.randomness import Watch, one_thread, thread_pool
from ..place.devices import Compute
from .pool import Window, check_workers
from .serve import serve
from .states import ClientStates

# ---- Every client in this process, one after another. The reference the other engines must equal to the bit


class InProcess:
    """Clients run lazily, when their replies are collected, so only one reply is in memory at a time."""

    def __init__(self, host: Host, states: ClientStates, workers: int = 1, compute: Compute | None = None):
        self.host, self.states, self.place = host, states, (compute or Compute()).place()

    @property
    def roster(self) -> Roster:
        return self.host.roster

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        return lambda: (serve(c, self.host, self.states, self.place) for c in calls)

    def close(self) -> None:
        pass


log = logging.getLogger("solera")


class Threads:
    """A pool of threads, one torch thread each."""

    def __init__(self, host: Host, states: ClientStates, workers: int = 2, compute: Compute | None = None):
        self.host, self.states, self.place = host, states, (compute or Compute()).place()
        self.workers = check_workers(workers)
        self.pool = thread_pool(self.workers, one_thread)
        self.alone = self.pool is None

    @property
    def roster(self) -> Roster:
        return self.host.roster

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        return lambda: self._collect(list(calls))

    def _collect(self, calls: list[Call]) -> Iterator[Reply]:
        todo = list(reversed(calls))
        running: dict[Future[Reply], Call] = {}
        window, position = Window(), {c.client: i for i, c in enumerate(calls)}
        watch = Watch()
        self.alone = self.alone or not watch.clean()
        while todo or running:
            while todo and not self.alone and len(running) < self.workers:
                if not window.may_begin(position[todo[-1].client]):
                    break
                call = todo.pop()
                assert self.pool is not None
                running[self.pool.submit(serve, call, self.host, self.states, self.place, False)] = call
            if self.alone:
                yield serve(todo.pop(), self.host, self.states, self.place)
                continue
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            if not watch.clean():  # wherever the draw came from, every call not handed out yet may be affected
                wait(running)
                todo += running.values()
                running = {}
                self.alone = True
                log.warning(
                    "clients (dropout?) or other threads of the program draw from torch's global generator: threads "
                    "run one at a time to keep the bits; the engine 'processes' stays parallel"
                )
                continue
            for future in done:
                window.answered(position[running.pop(future).client])
                yield future.result()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
