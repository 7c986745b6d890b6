"""An engine that injects faults into the replies of any other engine, for tests."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from ..core.calls import Call, Engine, Reply, Roster
from ..core.wire import Packed

BEHAVIOURS = ("drop", "raise", "nan", "inf", "shape", "dtype", "extra", "garbage", "empty", "truncate", "duplicate",
              "impersonate", "stranger")  # fmt: skip
Plan = Callable[[Call], str | None]


class Faulty:
    """An engine with faults: `plan(call)` names the fault of a call, or None. `reverse`: replies in reverse order."""

    def __init__(self, inner: Engine, plan: Plan, reverse: bool = False):
        self.inner, self.plan, self.reverse = inner, plan, reverse

    @property
    def roster(self) -> Roster:
        return self.inner.roster

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        faults = {c.client: self.plan(c) for c in calls}
        unknown = {f for f in faults.values() if f} - set(BEHAVIOURS)
        if unknown:
            raise ValueError(f"no such misbehaviour: {unknown}")
        collect = self.inner.start([c for c in calls if faults[c.client] != "drop"])

        def replies() -> Iterator[Reply]:
            others = itertools.cycle(c.client for c in calls)
            for r in collect():
                yield from _spoil(r, faults[r.client], others)

        return (lambda: iter(list(replies())[::-1])) if self.reverse else replies

    def close(self) -> None:
        self.inner.close()


def _spoil(r: Reply, fault: str | None, others: Iterator[str]) -> Iterator[Reply]:
    if fault is None or r.error is not None:
        yield r
        return
    message = r.message
    blob = message.blob if isinstance(message, Packed) else message
    if fault == "raise":
        yield dataclasses.replace(r, message=b"", error="RuntimeError: out of memory")
    elif fault == "garbage":
        yield dataclasses.replace(r, message=bytes(range(256)) * 4)
    elif fault == "empty":
        yield dataclasses.replace(r, message=b"")
    elif fault == "truncate":
        yield dataclasses.replace(r, message=blob[: len(blob) * 2 // 3])
    elif fault == "duplicate":
        yield from (r, r)
    elif fault == "impersonate":  # another client's name on this reply
        yield dataclasses.replace(r, client=next(k for k in others if k != r.client), message=blob)
    elif fault == "stranger":
        yield dataclasses.replace(r, client="../../etc/passwd", message=blob)
    else:
        yield dataclasses.replace(r, message=_corrupt(message, blob, fault))


def _corrupt(message: Packed | bytes, blob: bytes, fault: str) -> bytes:
    """The reply with one fault in it. Changes the flattened value, as a hostile client would."""
    import json
    import struct

    import safetensors.torch

    (n,) = struct.unpack("<Q", blob[:8])
    metadata = json.loads(blob[8 : 8 + n])["__metadata__"]
    tensors = safetensors.torch.load(blob)
    name = next((k for k, t in sorted(tensors.items()) if t.is_floating_point()), None)
    if name is None:  # nothing to corrupt: a lie in the tree will do
        return safetensors.torch.save(tensors, {"tree": '{"surprise": 1}'})
    t = tensors[name]
    if fault in ("nan", "inf"):
        t.view(-1)[0] = float(fault)
    elif fault == "shape":
        tensors[name] = torch.zeros(1)
    elif fault == "dtype":
        tensors[name] = t.double()
    elif fault == "extra":
        tensors["99999"] = torch.zeros(3)
    return safetensors.torch.save(tensors, metadata)
