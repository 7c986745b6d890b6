"""What engines share: the order in which calls begin, and the number of workers."""

import os
import queue
from collections import deque
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, Le

from ..core.calls import Call, Reply
from ..core.errors import ConfigError
from ..core.settings import Hint

MOST_AT_ONCE = 4096  # workers or threads; larger values are treated as typos
CORES = f"this machine has {os.cpu_count()} cores"
WorkerCount = Annotated[int, Ge(0), Le(MOST_AT_ONCE), Hint(f"0: one for each core; {CORES}")]
ThreadCount = Annotated[int, Ge(1), Le(MOST_AT_ONCE), Hint(CORES)]


class Window:
    """How far calls of one exchange may run ahead of the first that has not been answered.

    Replies are summed in the order of the clients, so those that come before their turn wait in memory. This bounds how
    many: behind one slow client the workers rest, instead of filling the memory with the models of all others.
    """

    SIZE = 64

    def __init__(self) -> None:
        self._first = 0
        self._early: set[int] = set()

    def may_begin(self, position: int) -> bool:
        """Whether the call at this position may begin now."""
        return position < self._first + self.SIZE

    def answered(self, position: int) -> None:
        """The call at this position is over."""
        self._early.add(position)
        while self._first in self._early:
            self._early.remove(self._first)
            self._first += 1


class Exchange:
    """Calls that belong together, and their replies."""

    def __init__(self, calls: Sequence[Call]):
        self.calls = list(calls)
        self.waiting = deque(range(len(self.calls)))  # the positions of those that have not begun
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.window = Window()

    def next(self) -> tuple[int, Call]:
        """The next call and its position."""
        position = self.waiting.popleft()
        return position, self.calls[position]

    def answer(self, position: int, reply: Reply) -> None:
        """The call at this position is over: hand its reply to the collector."""
        self.window.answered(position)
        self.replies.put(reply)


class Backlog(deque[Exchange]):
    """The exchanges with calls that have not begun, the oldest first."""

    def startable(self) -> Exchange | None:
        """The oldest exchange with a call that may begin now."""
        while self and not self[0].waiting:
            self.popleft()
        return next((e for e in list(self) if e.waiting and e.window.may_begin(e.waiting[0])), None)


def check_workers(workers: int) -> int:
    """Refuse a worker count that cannot be."""
    if workers < 1:
        raise ConfigError(f"engine.workers = {workers}: at least 1 is needed")
    return workers


def default_workers() -> int:
    """As many clients at once as cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
