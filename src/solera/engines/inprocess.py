"""Every client in this process, one after another. The reference the other engines must equal to the bit."""

from collections.abc import Callable, Iterator, Sequence

from ..core.calls import Call, Host, Reply, Roster
from ..place.devices import Compute
from .serve import serve
from .states import ClientStates


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
