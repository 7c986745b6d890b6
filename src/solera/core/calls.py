"""Calls and replies: what an engine moves between the federation and its clients, and the list of the clients."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..place.placement import Placement
from .task import Client
from .tensors import Weights
from .wire import Packed, WireError, safe_name


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
        """A roster of named clients, given in any order."""
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
STEPS_END = 10**12  # a step has at most the twelve digits that it has in the name of a state file
LONGEST_S = 1e9  # no deadline and no duration is longer
LONGEST_TEXT, LONGEST_ERROR = 200, 1000  # characters of a name, and of the reason why there is no reply


class Version(NamedTuple):
    """One state of one client: the step that made it, and what it is."""

    step: int
    sha256: str  # of the encoded state

    @classmethod
    def of(cls, told: Any) -> "Version | None":
        """The version in these facts; None for None. Raises WireError for anything else."""
        if told is None:
            return None
        match told:
            case (step, str(sha256)) if _is_number(step, STEPS_END) and SHA256.fullmatch(sha256):
                return cls(step, sha256)
        raise WireError(f"version {str(told)[:80]!r}")


@dataclasses.dataclass(frozen=True)
class Call:
    """One task for one client."""

    client: str
    task: str
    step: int  # round * 1000 + exchange
    seed: int
    run_seed: int  # the run's seed: a remote host initialises its models from it, as the server does
    message: Packed  # one object for all calls with equal content
    after: Version | None = None  # the client's state that this call builds on; None: it has none
    keep: tuple[Version, ...] = ()  # states of this client that the run may go back to
    keep_from: int = 0  # the first step of this round: older states that are not in `keep` can be deleted
    deadline_s: float | None = None  # time limit of the client

    def facts(self) -> dict[str, Any]:
        """All of the call except its message, as JSON values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "message"}

    @classmethod
    def of(cls, facts: Mapping[str, Any], message: Packed) -> "Call":
        """The call with these facts from an untrusted sender. Raises WireError if one is missing or impossible."""
        ends = {"step": STEPS_END, "keep_from": STEPS_END, "seed": 1 << 63, "run_seed": 1 << 63}
        for name, end in ends.items():
            if not _is_number(facts.get(name), end):
                raise WireError(f"{name} = {str(facts.get(name))[:20]!r}")
        deadline_s, keep = facts.get("deadline_s"), facts.get("keep")
        if deadline_s is not None and not (isinstance(deadline_s, int | float) and 0 < deadline_s < LONGEST_S):
            raise WireError(f"deadline_s = {str(deadline_s)[:20]!r}")
        if not isinstance(keep, list | tuple):
            raise WireError("keep is no list")
        return cls(
            client=text_in(facts, "client"),
            task=text_in(facts, "task"),
            message=message,
            after=Version.of(facts.get("after")),
            keep=tuple(v for v in map(Version.of, keep) if v is not None),
            deadline_s=deadline_s,
            **{name: facts[name] for name in ends},
        )


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

    def facts(self) -> dict[str, Any]:
        """All of the reply except its message and its sender, as JSON values."""
        return {name: getattr(self, name) for name in ("version", "error", "seconds", "fatal")}

    @classmethod
    def of(cls, facts: Mapping[str, Any], client: str, message: bytes) -> "Reply":
        """The reply with these facts from an untrusted sender. Raises WireError if one is missing or impossible."""
        fatal, seconds = facts.get("fatal", ""), facts.get("seconds")
        if fatal not in ("", "task", "run"):
            raise WireError(f"fatal = {str(fatal)[:20]!r}")
        if facts.get("error") is not None:
            return cls(client, error=str(facts["error"])[:LONGEST_ERROR], fatal=fatal)
        if not isinstance(seconds, int | float) or not 0 <= seconds < LONGEST_S:
            raise WireError(f"seconds = {str(seconds)[:20]!r}")
        return cls(client, message, Version.of(facts.get("version")), seconds=float(seconds), fatal=fatal)


def text_in(facts: Mapping[str, Any], name: str) -> str:
    """The short text `name` among facts. Raises WireError if it is missing."""
    text = facts.get(name)
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise WireError(f"{name} = {str(text)[:40]!r}: expected a short text")
    return text


def _is_number(told: Any, end: int) -> bool:
    return type(told) is int and 0 <= told < end


class Host(Protocol):
    """The holder of clients: gives their list, and a `Client` for one call on the device of its worker."""

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
