"""Which client begins on which device, and when: by the memory that it needs there.

One fixed share of a device for every client leaves it idle with small models and out of memory with large ones. Here
the first call of every (task, architecture) has its device for itself, and the worker says how much memory it took.
From then on clients begin side by side on a device as long as all of them fit, the longest first, so that small ones
fill what large ones leave free. A client that runs out of memory beside others is run again alone, from its seed. A
device that does not tell what a call took (mps) gets as many clients as `engine.per_device` says.

None of this changes a result: replies are put in order by the federation.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..compute import Compute
from ..devices import tricks_of
from .base import Call, Reply, Roster

log = logging.getLogger("solera")
MIB = 1 << 20
USABLE = 0.95  # of a device's memory: blocks of freed memory do not fit together without loss
NOTED = 200  # clients of a round that are listed in its record

Kind = tuple[str, str]  # task, architecture


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a worker says after a call, in bytes of its device: the most it used at once, and what it keeps."""

    peak: int
    kept: int


@dataclasses.dataclass
class _Known:
    """What one client of a kind takes besides what a worker keeps anyway; measured with so many examples."""

    memory: int
    examples: int
    seconds: float  # for each example


@dataclasses.dataclass
class _Running:
    client: str
    kind: Kind
    memory: int  # that is reserved for it
    alone: bool


class Admission:
    """The devices of one run, what is running on each, and what is known of its clients."""

    def __init__(self, roster: Roster, compute: Compute):
        self.roster, self.devices, self.per_device = roster, compute.devices, compute.per_device
        self.memory = {d: total if _measures(d) else None for d, total in compute.memory().items()}
        self.known: dict[Kind, _Known] = {}
        self.notes: list[dict[str, Any]] = []  # what happened, for the record of the round
        self._running: dict[str, dict[int, _Running]] = {d: {} for d in self.devices}  # by the worker's number
        self._kept: dict[str, dict[int, int]] = {d: {} for d in self.devices}
        self._alone: set[tuple[str, int]] = set()  # (client, step) that ran out of memory beside others

    def choose(self, calls: Sequence[Call]) -> tuple[int, str, bool] | None:
        """The next of these calls to begin: its position, its device and whether it is alone there; None: not now."""
        order = sorted(range(len(calls)), key=lambda i: self._length(calls[i]), reverse=True)
        for device in sorted(self.devices, key=lambda d: len(self._running[d])):
            there = self._running[device].values()
            if len(there) >= self.per_device or any(r.alone for r in there):
                continue
            for i in order:
                if (alone := self._admitted(calls[i], device)) is not None:
                    return i, device, alone
        return None

    def _admitted(self, call: Call, device: str) -> bool | None:
        """Whether a call would be alone on the device; None: it cannot begin there now."""
        there = self._running[device].values()
        if self.per_device == 1 or self.memory.get(device) is None:
            return self.per_device == 1
        need = self.need(call)
        if need is None and any(r.kind == self.kind(call) for d in self.devices for r in self._running[d].values()):
            return None  # it is being measured
        if need is None or (call.client, call.step) in self._alone or need > self._free(device):
            return None if there else True
        return False

    def begins(self, call: Call, device: str, worker: int, alone: bool) -> None:
        """A worker has got a call."""
        memory = self.need(call) or 0
        self._running[device][worker] = _Running(call.client, self.kind(call), memory, alone)
        total, (task, A) = self.memory.get(device), self.kind(call)
        share = round(memory / total, 4) if total and memory else None
        beside = len(self._running[device]) - 1
        told = f"{memory / MIB:.1f} MiB, {share:.1%} of it" if share else "to be measured" if total else "all of it"
        log.info("%s (%s) begins %s on %s beside %d: %s", call.client, A, task, device, beside, told)
        if len(self.notes) < NOTED:
            self.notes.append(
                {"kind": "admitted", "client": call.client, "task": task, "architecture": A, "device": device,
                 "share": share, "beside": beside}
            )  # fmt: skip

    def ended(self, call: Call, device: str, worker: int, memory: Memory | None, seconds: float) -> None:
        """A call is over, and what is known of it."""
        self._running[device].pop(worker, None)
        if memory is None:
            return
        self._kept[device][worker] = memory.kept
        kind, examples = self.kind(call), max(1, self.roster[call.client].num_examples)
        took = _Known(memory.peak - memory.kept, examples, seconds / examples)
        if (before := self.known.get(kind)) is None:
            log.info("one client of %s takes %.1f MiB for %s", kind[1], took.memory / MIB, kind[0])
        else:  # the first call of a worker warms it up: the shortest time tells most
            most = before if before.memory >= took.memory else took
            took = dataclasses.replace(most, seconds=min(before.seconds, took.seconds))
        self.known[kind] = took

    def short(self, call: Call, device: str, worker: int) -> None:
        """A client ran out of memory beside others: it is to run alone."""
        self._running[device].pop(worker, None)
        self._alone.add((call.client, call.step))
        log.warning(
            "%s ran out of memory on %s beside others: it runs again, alone, from its seed", call.client, device
        )
        self.notes.append({"kind": "out_of_memory", "client": call.client, "task": call.task, "device": device})

    def gone(self, device: str, worker: int) -> None:
        """A worker has ended: what it kept is free."""
        self._running[device].pop(worker, None)
        self._kept[device].pop(worker, None)

    def kind(self, call: Call) -> Kind:
        """Calls of one kind take the same memory."""
        return call.task, self.roster[call.client].architecture

    def need(self, call: Call) -> int | None:
        """Bytes that a call will take at most, as far as is known: more for a client with more samples."""
        if (known := self.known.get(self.kind(call))) is None:
            return None
        return int(known.memory * max(1.0, self.roster[call.client].num_examples / known.examples))

    def _length(self, call: Call) -> tuple[bool, float]:
        """For sorting: those of which nothing is known are the longest, then those with most to do."""
        known, examples = self.known.get(self.kind(call)), self.roster[call.client].num_examples
        return known is None, examples * (1.0 if known is None else known.seconds)

    def _free(self, device: str) -> float:
        """Bytes of a device that nobody uses and that are promised to nobody, for a worker that may be new there."""
        total, kept = self.memory[device], self._kept[device]
        assert total is not None
        context = tricks_of(torch.device(device)).context
        held = sum(kept.values()) + context * len(kept)
        if len(self._running[device]) >= len(kept):  # no worker that is known is idle: the next one brings its own data
            held += max(kept.values(), default=0) + context
        if device == self.devices[0]:  # the server is there, too
            held += torch.get_device_module(device).memory_reserved(device) + context
        return total * USABLE - held - sum(r.memory for r in self._running[device].values())


def _measures(device: str) -> bool:
    """Whether a device tells how much memory a call took (mps does not): else nobody may wait for the number."""
    return hasattr(torch.get_device_module(device), "max_memory_reserved")


def note_pieces(reply: Reply, call: Call) -> list[dict[str, Any]]:
    """For the record of the round: that a client's minibatches did not fit into memory as a whole."""
    if reply.pieces == 1:
        return []
    log.warning(
        "%s: too little memory for a minibatch of %s: computed in %d pieces", call.client, call.task, reply.pieces
    )
    return [{"kind": "minibatches_in_pieces", "client": call.client, "task": call.task, "pieces": reply.pieces}]


def read_memory(told: Any) -> Memory | None:
    """What a worker has said about memory, as it comes out of JSON; ValueError if it is nonsense."""
    if told is None:
        return None
    peak, kept = told
    if type(peak) is not int or type(kept) is not int or not 0 <= kept <= peak:
        raise ValueError(f"memory {str(told)[:40]}")
    return Memory(peak, kept)
