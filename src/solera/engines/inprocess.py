"""Every client in this process, one after another. The reference the other engines must equal to the bit."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..compute import Compute
from .admission import note_pieces
from .base import Call, Host, Reply, Roster
from .serve import serve
from .states import ClientStates
from .together import note_of, serve_together


class InProcess:
    """Lazy: a client runs when its reply is asked for, so only one reply is in memory at a time.

    With `engine.vectorize` clients of one architecture run together, as many as `engine.per_device` says.
    """

    def __init__(self, host: Host, states: ClientStates, workers: int = 1, compute: Compute | None = None):
        self.host, self.states, self.place = host, states, (compute or Compute()).place()
        self.together = compute.per_device if compute is not None and compute.vectorize else 1
        self.notes: deque[dict[str, Any]] = deque()  # what happened, for the record of the round

    @property
    def roster(self) -> Roster:
        return self.host.roster

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        if self.together > 1:
            return lambda: self._batched(calls)
        return lambda: (self._noted(serve(c, self.host, self.states, self.place), c) for c in calls)

    def _batched(self, calls: Sequence[Call]) -> Iterator[Reply]:
        """Clients of one architecture side by side, as many at once as there may be."""
        alike: dict[str, list[Call]] = {}
        for c in calls:
            alike.setdefault(self.roster[c.client].architecture, []).append(c)
        counted: Counter[str] = Counter()
        for group in alike.values():
            for i in range(0, len(group), self.together):
                some = group[i : i + self.together]
                replies = serve_together(some, self.host, self.states, self.place, counted)
                yield from map(self._noted, replies, some)
        if counted:
            self.notes.append(note_of(counted) | {"task": calls[0].task})

    def _noted(self, reply: Reply, call: Call) -> Reply:
        self.notes.extend(note_pieces(reply, call))
        return reply

    def close(self) -> None:
        pass
