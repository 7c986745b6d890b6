"""A Flower grid inside this process: nodes answer at once with the program of a site, or misbehave as told."""

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.supercore.task_identity import TaskIdentity

from solera.core.calls import Host
from solera.deploy.site import answer
from solera.place.placement import Placement

Misbehaviour = Callable[[Message], Message | None]  # None: the node does not answer


@dataclasses.dataclass
class Node:
    """What a grid tells of a node."""

    node_id: int
    public_key: bytes


@dataclasses.dataclass
class LocalSite:
    """A site whose data is here."""

    name: str
    folder: pathlib.Path
    clients: Host
    place: Placement = dataclasses.field(default_factory=Placement)

    def host(self, run_seed: int) -> Host:
        return self.clients

    def about(self, run_seed: int) -> dict[str, Any]:
        info = self.clients.roster[self.name]
        return {"architecture": info.architecture, "num_examples": info.num_examples}

    def check(self, task: str, arguments: Mapping[str, Any], host: Host) -> None:
        """It answers everything."""

    def hello(self, host: Host) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()


class LocalGrid:
    """Nodes 101, 102, ... for the sites, in order. `faults` maps a site to what it does instead of answering."""

    def __init__(self, sites: Iterable[LocalSite]):
        self.sites = {100 + i: site for i, site in enumerate(sites, 1)}
        self.offline: set[str] = set()
        self.faults: dict[str, Misbehaviour] = {}
        self.sent: list[Message] = []
        self.uploads: list[set[int]] = []  # of each push, the distinct payloads, by identity
        self._replies: dict[str, Message | None] = {}
        self._names = (f"m{i}" for i in itertools.count())

    def get_nodes(self) -> list[Node]:
        return [Node(n, s.name.encode()) for n, s in self.sites.items() if s.name not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        self.uploads.append({id(m.content["message"]) for m in messages if "message" in m.content})
        for m in messages:
            name = next(self._names)
            m.metadata.__dict__["_message_id"] = name
            site = self.sites[m.metadata.dst_node_id]
            self.sent.append(m)
            TaskIdentity.node_id = m.metadata.dst_node_id
            fault = self.faults.get(site.name)
            self._replies[name] = fault(m) if fault else Message(answer(m.content, site), reply_to=m)
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        found = [self._replies.pop(n) for n in names if self._replies.get(n) is not None]
        return [m for m in found if m is not None]


def error(code: int, reason: str = "") -> Misbehaviour:
    """A node that Flower answers for."""
    return lambda m: Message(Error(code=code, reason=reason), reply_to=m)


def site_of(key: bytes) -> str | None:
    return key.decode() if key != b"stranger" else None


@pytest.fixture
def in_a_flower_task(monkeypatch: Any) -> None:
    """Flower's messages know the run and the node that make them: here it is always the same."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
