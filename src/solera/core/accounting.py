"""Accounting: the bytes of messages by kind, which clients are online, and a clock for the hours a run would take.

Nothing here waits. Times follow from bytes, training samples and the settings below, so they are the same on every
engine and after every resume. What is counted: the bytes of each message, the samples that a client or the server
trains on (passes times samples), and the time until a client is there. Predictions, evaluation and the server's sums
are not counted.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from torch import Tensor

from .randomness import seed_from
from .settings import BelowOne, Positive, Problem, settings

SPANS = 64  # limit of a round's spans in its record
LOST = "dropped out during the round (federation.availability.dropout)"  # reason of a failure
LATE = "late: "  # the start of another reason
HALFWAY = 0.5  # a client that drops out is lost after this share of its work


@settings
class Availability:
    """Simulated times and speeds of clients and the server. Of a list, clients have one value each, in turn."""

    online: list[Annotated[float, Gt(0), Le(1)]] = dataclasses.field(default_factory=lambda: [1.0])  # share of rounds
    dropout: BelowOne = 0.0  # probability that a client of the cohort is lost during a round
    period_s: Positive | None = None  # a client can start only once in so many seconds; these times are evenly spread
    deadline_s: Positive | None = None  # replies that take longer are lost
    speed: list[Positive] = dataclasses.field(default_factory=lambda: [1000.0])  # training samples per second
    down_mbit: list[Positive] = dataclasses.field(default_factory=lambda: [100.0])  # megabits per second, to a client
    up_mbit: list[Positive] = dataclasses.field(default_factory=lambda: [20.0])  # from a client
    server_speed: Positive = 10000.0  # training samples per second

    def problems(self) -> Iterator[Problem]:
        """Report lists without a value."""
        for name in ("online", "speed", "down_mbit", "up_mbit"):
            if not getattr(self, name):
                yield f"{name} = []: give one value for all clients, or several that they have in turn"


@dataclasses.dataclass
class Trip:
    """The times of one call by the simulated clock."""

    sent: float
    start: float  # when its client is there
    ready: float  # when its reply is ready to be sent
    end: float
    up_bytes_s: float
    lost: bool = False

    def back(self, size: int) -> None:
        """Record that a reply of `size` bytes is sent."""
        self.end = self.ready + size / self.up_bytes_s


class Clock:
    """The simulated time of a run. Between two rounds nothing is under way, so `now` is all of its state."""

    def __init__(self, config: Availability, clients: int, seed: int, now: float = 0.0):
        self.config, self.clients, self.seed, self.now = config, clients, seed, now
        self.begin(0)

    def begin(self, round: int) -> None:
        """Start a round."""
        self.round, self.started = round, self.now
        self.server_s, self.there, self.dropped = 0.0, self.clients, 0
        self.spans: list[tuple[float, str, float]] = []  # start, client or "server", end

    def _of(self, values: Sequence[float], i: int) -> float:
        return values[i % len(values)]

    def online(self) -> Tensor:
        """The clients that are online in this round; if none is, the next one to arrive. bool [clients]"""
        g = torch.Generator().manual_seed(seed_from(self.seed, self.round, "online"))
        share = torch.tensor([self._of(self.config.online, i) for i in range(self.clients)], dtype=torch.float64)
        drawn = torch.rand(self.clients, dtype=torch.float64, generator=g) / share
        found = drawn < 1
        if not bool(found.any()):
            found[drawn.argmin()] = True
        self.there = int(found.sum())
        return found

    def send(self, i: int, k: str, size: int, samples: int) -> Trip:
        """Send a call of `size` bytes to the client with number `i`, which trains on `samples` samples."""
        c = self.config
        start = self.now if c.period_s is None else next_visit(self.now, i * c.period_s / self.clients, c.period_s)
        works = size / _bytes_s(self._of(c.down_mbit, i)) + samples / self._of(c.speed, i)
        trip = Trip(self.now, start, start + works, start + works, _bytes_s(self._of(c.up_mbit, i)))
        g = torch.Generator().manual_seed(seed_from(self.seed, self.round, k, "dropout"))
        if torch.rand((), dtype=torch.float64, generator=g).item() < c.dropout:
            trip.lost, trip.end = True, start + HALFWAY * works
        return trip

    def late(self, trip: Trip) -> str | None:
        """The reason why a reply does not count, if it took too long."""
        limit, took = self.config.deadline_s, trip.end - trip.sent
        if limit is None or took <= limit:
            return None
        return f"{LATE}{took:.0f} simulated seconds, federation.availability.deadline_s is {limit:g}"

    def collected(self, trips: Mapping[str, Trip]) -> None:
        """Advance the clock to the end of the server's wait for these calls."""
        limit = math.inf if self.config.deadline_s is None else self.config.deadline_s
        for k, trip in trips.items():
            self.dropped += trip.lost
            self.spans.append((trip.start, k, trip.end))
            self.now = max(self.now, min(trip.end, trip.sent + limit))

    def worked(self, samples: float) -> None:
        """Advance the clock by the server's training on `samples` samples."""
        took = samples / self.config.server_speed
        if took:
            self.spans.append((self.now, "server", self.now + took))
        self.now, self.server_s = self.now + took, self.server_s + took

    def facts(self) -> dict[str, float]:
        """The round's times, in seconds since the run began, and how many clients were online and lost."""
        times = {"start_s": self.started, "end_s": self.now, "server_s": self.server_s}
        return {**times, "online": self.there, "lost": self.dropped}

    def timetable(self) -> list[list[Any]]:
        """The first pieces of work of the round: [client or "server", start, end]."""
        return [[who, round(start, 3), round(end, 3)] for start, who, end in sorted(self.spans)[:SPANS]]


def next_visit(earliest: float, offset: float, period: float) -> float:
    """The first of the times offset, offset + period, ... that is not before `earliest`."""
    return offset + max(0, math.ceil((earliest - offset) / period - 1e-9)) * period


def _bytes_s(mbit: float) -> float:
    return mbit * 1e6 / 8


# ---- bytes ------------------------------------------------------------------------------------------

# The bars of MNFL's Figure 3. data: public samples, which clients are sent once if they do not
# hold them (public.where = "server"); parameters: weights of models, tables of tensors; predictions: other
# floating-point tensors (probabilities, logits, features). The rest (indices, numbers, the header) is neither.
KINDS = ("data", "parameters", "predictions")


def content_of(value: Any) -> Counter[str]:
    """Bytes by kind of the tensors in a message."""
    found: Counter[str] = Counter()
    if isinstance(value, Tensor):
        if value.is_floating_point():
            found["predictions"] = value.numel() * value.element_size()
    elif isinstance(value, Mapping) and value and all(isinstance(t, Tensor) for t in value.values()):
        found["parameters"] = sum(t.numel() * t.element_size() for t in value.values())
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            found += content_of(getattr(value, f.name))
    else:
        for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
            found += content_of(inner)
    return found
