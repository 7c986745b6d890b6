"""Workers that serve calls: which call begins next, which worker is idle, which has died or overstays its deadline."""

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le

from ..core.calls import Call, Host, Reply, Roster
from ..core.errors import ConfigError, SoleraError, one_line
from ..core.randomness import OURS
from ..core.settings import Hint
from ..core.stopping import check_stop
from .states import StateError

MOST_AT_ONCE = 4096  # workers or threads; larger values are treated as typos
CORES = f"this machine has {os.cpu_count()} cores"
WorkerCount = Annotated[int, Ge(0), Le(MOST_AT_ONCE), Hint(f"0: one for each core; {CORES}")]
ThreadCount = Annotated[int, Ge(1), Le(MOST_AT_ONCE), Hint(CORES)]
PATIENCE_S = 5.0  # with a system that gives no new thread or process just now
LOOK_S = 0.5  # how often a wait for a reply looks whether the run was asked to stop
T = TypeVar("T")


def check_workers(workers: int) -> int:
    """Refuse an invalid number of workers."""
    if workers < 1:
        raise ConfigError(f"engine.workers = {workers}: at least 1 is needed")
    return workers


def default_workers() -> int:
    """As many clients at once as cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def patiently(start: Callable[[], T], refused: type[Exception]) -> T:
    """Start a thread or a process; retry for a while if the system gives none."""
    end, pause = time.monotonic() + PATIENCE_S, 0.01
    while True:
        try:
            return start()
        except refused:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause *= 2


class Window:
    """A limit to how far calls of one exchange may run ahead of the first that has not been answered.

    Replies are summed in the order of the clients, so those that come before their turn wait in memory. This bounds how
    many: behind one slow client the workers rest, instead of filling the memory with the models of all others.
    """

    SIZE = 64

    def __init__(self) -> None:
        self._first = 0
        self._early: set[int] = set()

    def may_begin(self, position: int) -> bool:
        """True if the call at this position may begin now."""
        return position < self._first + self.SIZE

    def answered(self, position: int) -> None:
        """Record that the call at this position is over."""
        self._early.add(position)
        while self._first in self._early:
            self._early.remove(self._first)
            self._first += 1


class Exchange:
    """Calls that belong together, and their replies."""

    def __init__(self, calls: Sequence[Call]):
        self.waiting = deque(enumerate(calls))  # those that have not begun, each with its position
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.window = Window()


class Seat:
    """A worker as the server sees it, and the call that it serves."""

    def __init__(self, number: int):
        self.number = number
        self.exchange: Exchange | None = None
        self.position = 0  # of its call in the exchange
        self.call: Call | None = None
        self.ends: float | None = None  # the deadline of its call
        self.gone = False  # its process has ended, or has to


class Pool(ABC):
    """An engine with `count` workers. A thread of its own hands calls to those that are idle, and their replies to
    the collectors. A worker that dies costs one client."""

    GRACE_S = 0.05  # beside a deadline, for the way there and back

    def __init__(self, host: Host, count: int):
        self.host, self.count = host, check_workers(count)
        self.idle: list[Any] = []
        self.busy: list[Any] = []
        self._backlog: deque[Exchange] = deque()  # those with calls that have not begun, the oldest first
        self._closing, self._broken = False, ""
        self._thread = threading.Thread(target=self._run, name=f"{OURS}-pool", daemon=True)

    # -- of each engine --

    def hire(self) -> Seat | None:
        """Start one more worker; None if that is impossible."""
        return None

    @abstractmethod
    def give(self, seat: Any) -> None:
        """Send its call to a worker."""

    @abstractmethod
    def wait(self, seconds: float | None) -> list[Any]:
        """Wait for messages; returns the busy workers that sent some. `wake` or the timeout ends the wait."""

    @abstractmethod
    def take(self, seat: Any) -> Reply | None:
        """The reply of a worker; None for any other message. Sets `seat.gone` if the worker has ended."""

    @abstractmethod
    def kill(self, seat: Any) -> None:
        """End a worker that does not react."""

    def replace(self, seat: Any) -> None:  # noqa: B027  (most have nothing to do)
        """Handle the end of a worker: another one is started for the next call, if none is left."""

    @abstractmethod
    def wake(self) -> None:
        """End a `wait`."""

    @abstractmethod
    def end(self) -> None:
        """End all workers; the thread has ended before."""

    # -- of all --

    @property
    def roster(self) -> Roster:
        return self.host.roster

    def begin(self) -> None:
        """Hand out calls from now on."""
        try:
            patiently(self._thread.start, RuntimeError)
        except RuntimeError as e:
            self.end()
            raise SoleraError(f"the system gives no new thread ({e}): see `ulimit -u`; resume the run later") from None

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        """Workers begin at once, whether or not replies are being collected."""
        exchange = Exchange(calls)
        self._backlog.append(exchange)
        self.wake()
        return lambda: (self._next(exchange) for _ in calls)

    def _next(self, exchange: Exchange) -> Reply:
        while True:
            try:
                return exchange.replies.get(timeout=LOOK_S)
            except queue.Empty:
                check_stop()
                if not self._thread.is_alive():
                    raise SoleraError(f"the worker processes broke down ({self._broken}); resume the run") from None

    def close(self) -> None:
        """End the workers."""
        if not self._closing:
            self._closing = True
            self.wake()
            self._thread.join()
            self.end()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._hand_out()
                ends = [seat.ends for seat in self.busy if seat.ends is not None]
                self.listen(max(0.0, min(ends) - time.monotonic()) if ends else None)
                now = time.monotonic()
                for seat in [s for s in self.busy if s.ends is not None and now > s.ends]:
                    self.busy.remove(seat)
                    self.kill(seat)
                    limit_s = seat.call.deadline_s
                    self._answer(seat, Reply(seat.call.client, error=f"no reply within the deadline of {limit_s:g} s"))
                    self.replace(seat)
        except Exception as e:  # no fork server, no cluster, no memory: `_next` tells the collector
            self._broken = one_line(e) if isinstance(e, SoleraError) else f"{type(e).__name__}: {one_line(e)}"

    def listen(self, seconds: float | None) -> None:
        """Process messages of workers, for at most this time."""
        for seat in self.wait(seconds):
            self.busy.remove(seat)
            self._answer(seat, self.take(seat))
            if seat.gone:
                self.replace(seat)
            else:
                self.idle.append(seat)

    def _hand_out(self) -> None:
        """Give calls to idle workers, those of the oldest exchange first."""
        while self.idle or len(self.busy) < self.count:
            while self._backlog and not self._backlog[0].waiting:
                self._backlog.popleft()
            startable = (e for e in list(self._backlog) if e.waiting and e.window.may_begin(e.waiting[0][0]))
            if (exchange := next(startable, None)) is None:
                return
            seat = self.idle.pop() if self.idle else self.hire()
            if seat is None:
                return
            seat.exchange = exchange
            seat.position, seat.call = exchange.waiting.popleft()
            limit_s = seat.call.deadline_s  # a client at its deadline notices it by its own clock
            seat.ends = None if limit_s is None else time.monotonic() + limit_s * 1.05 + self.GRACE_S
            try:
                self.give(seat)
                self.busy.append(seat)
            except StateError as e:
                self._answer(seat, Reply(seat.call.client, error=str(e), fatal="run"))
                self.idle.append(seat)

    def _answer(self, seat: Seat, reply: Reply | None) -> None:
        """End the call of a worker: its reply goes to the collector."""
        if reply is not None and seat.exchange is not None:
            seat.exchange.window.answered(seat.position)
            seat.exchange.replies.put(reply)
        seat.exchange = seat.call = seat.ends = None
