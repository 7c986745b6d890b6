"""Calls and replies: what an engine moves between the federation and its clients, and the list of the clients."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..place.placement import Placement
from .task import Client
from .tensors import Weights
from .wire import Packed, safe_name


@dataclasses.dataclass(frozen=True)
class ClientInfo:
    """The facts that a client registered when it joined; a reply never changes them."""

    architecture: str
    num_examples: int


class Roster(Mapping[str, ClientInfo]):
    """All clients in canonical (sorted) order, as arrays: a million of them cost a few megabytes."""

    def __init__(
        self, sizes: Tensor, architectures: Sequence[str], architecture_of: Tensor, ids: list[str] | None = None
    ):
        self.sizes, self.architectures, self.architecture_of = sizes, list(architectures), architecture_of
        self._ids = ids
        self._index = {k: i for i, k in enumerate(ids)} if ids is not None else None
        self._width = max(2, len(str(len(sizes) - 1)))
        if ids is not None and ids != sorted(set(ids)):
            raise ValueError("client ids must be unique and sorted: use Roster.of")

    @classmethod
    def of(cls, infos: Mapping[str, ClientInfo]) -> "Roster":
        """A roster of named clients, in whatever order they came."""
        ids = sorted(safe_name(k, "client id") for k in infos)
        names = sorted({i.architecture for i in infos.values()})
        return cls(
            torch.tensor([infos[k].num_examples for k in ids], dtype=torch.int64),
            names,
            torch.tensor([names.index(infos[k].architecture) for k in ids], dtype=torch.int64),
            ids,
        )

    def id(self, i: int) -> str:
        """The id of the i-th client; zero-padded, so that sorted order is numeric order."""
        return self._ids[i] if self._ids is not None else f"c{i:0{self._width}d}"

    def index(self, k: str) -> int:
        """The position of client `k` in canonical order."""
        if self._index is not None:
            return self._index[k]
        if not (k.startswith("c") and len(k) == self._width + 1 and k[1:].isdecimal() and int(k[1:]) < len(self)):
            raise KeyError(k)
        return int(k[1:])

    def __getitem__(self, k: str) -> ClientInfo:
        i = self.index(k)
        return ClientInfo(self.architectures[int(self.architecture_of[i])], int(self.sizes[i]))

    def __iter__(self) -> Iterator[str]:
        return (self.id(i) for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.sizes)


SHA256 = re.compile(r"[0-9a-f]{64}")


class Version(NamedTuple):
    """One state of one client: the step that made it, and what it is."""

    step: int
    sha256: str  # of the encoded state


@dataclasses.dataclass(frozen=True)
class Call:
    """One task for one client."""

    client: str
    task: str
    step: int  # round * 1000 + exchange
    seed: int
    run_seed: int  # of the whole run: with it a host elsewhere initialises its models as the server does
    message: Packed  # shared by all calls that send the same
    after: Version | None = None  # the client's state that this call builds on; None: it has none
    keep: tuple[Version, ...] = ()  # states of this client that the run may go back to
    keep_from: int = 0  # the first step of this round: what is older and not in `keep` can go
    deadline_s: float | None = None  # how long the client may take


@dataclasses.dataclass(frozen=True)
class Reply:
    """A message that came back (as an object or as bytes), or the reason why there is none."""

    client: str
    message: Packed | bytes = b""
    version: Version | None = None  # the client's state after the call: a new one, or `Call.after`
    error: str | None = None
    seconds: float = 0.0
    # The run must stop. task: a programming error, which would give other bits elsewhere; run: client state cannot be
    # read or written, which is not the client's failure.
    fatal: Literal["", "task", "run"] = ""


class Host(Protocol):
    """A party that holds clients: their roster, and a `Client` for one call, on the device of its worker."""

    @property
    def roster(self) -> Roster: ...

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement) -> Client: ...


class Engine(Protocol):
    """Three methods, so that the same method gives the same bits on every engine."""

    @property
    def roster(self) -> Roster: ...

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        """Begin; the result is called to collect replies, in any order. Never raises for a client's failure."""
        ...

    def close(self) -> None: ...
