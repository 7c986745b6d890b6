"""A second device on a machine that has none: torch's device "sim", whose tensors live in the memory of the CPU.

Every operator runs on the CPU's kernels, so a run on "sim" ends with the bits of a run on the CPU, as long as both use
the same row of `devices.TRICKS`. What is different is what a program may do:

- an operator that gets tensors of both devices raises, as CUDA's would (a number, a tensor without dimensions, may
  come from the CPU; a generator may not);
- copies between the two devices, their bytes, and reads that would make a program wait for the device are counted, over
  all processes of a run;
- the memory has a limit, if one is set: what would exceed it raises `torch.OutOfMemoryError`.

Under `torch.autocast` operators get the types that CUDA's would get (`simulated_autocast.py`).

It shows where tensors are and when they move, not how fast anything is. In table "cpu" dropout draws from the CPU's
generator, for equal bits; in table "accelerator" from one of the device's own, which nobody else can see.

torch can have one kind of device like this in a process, and it stays. Of several devices only the first computes
gradients: torch counts one where a device is written in Python. Register
it (`SIM.register`, or the first `simulated_device`) before the first backward pass of a process, which starts a thread
for every device there is. A process that has such a thread cannot fork workers that compute gradients: as with CUDA.
"""

import contextlib
import dataclasses
import fcntl
import mmap
import os
import threading
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import simulated_autocast as autocast
from solera.place.devices import FINDERS, Device, Finder, _found
from solera.place.placement import _OPENED, TRICKS

NAME = "sim"
Table = Literal["cpu", "accelerator"]
DEVICES, PROCESSES = 4, 512  # at most
MIB = 1 << 20
NO_FLOAT64 = (
    f"Cannot convert a {NAME} Tensor to float64 dtype as the framework doesn't support float64"  # as mps says it
)
aten = torch.ops.aten

# What a process counts. The numbers of all processes are in memory that they share.
COUNTS = ("to", "to_bytes", "back", "back_bytes", "waits", "reads", "operators", "failed")
_USED = len(COUNTS)  # the columns from here on: bytes in use on each device
_COLUMNS = _USED + DEVICES + 1  # and whose row it is


class _Shared:
    """Numbers that the processes of one context write side by side, each in a row of its own.

    Every context has its own. A tensor that outlives its context, or a worker of it that is still ending, goes on
    counting where nobody looks any more.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("solera-sim")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, 8 * (PROCESSES * _COLUMNS + DEVICES + 1))
        whole = np.frombuffer(mmap.mmap(self._file, 0), dtype=np.int64)
        self.next, self.most = whole[:1], whole[1 : 1 + DEVICES]  # the next free row; the most in use at once
        self.rows = whole[1 + DEVICES :].reshape(PROCESSES, _COLUMNS)
        self._mine: tuple[int, Any] = (-1, None)
        # Torch's threads free memory, too. The lock is taken again by its holder where a collection of garbage frees
        # tensors in the middle of a request.
        self.threads = threading.RLock()

    @property
    def mine(self) -> Any:
        """The row of this process."""
        pid = os.getpid()
        if self._mine[0] != pid:
            with self.locked():
                row = int(self.next[0])
                self.next[0] += 1
            self._mine = pid, self.rows[row]
            self.rows[row, -1] = pid
        return self._mine[1]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One thread of one process at a time. The system takes the lock from a process that is killed."""
        with self.threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def used(self, device: int) -> int:
        """Bytes in use by all processes."""
        return int(self.rows[: int(self.next[0]), _USED + device].sum())

    def reap(self) -> None:
        """What a process had that is no more is free, as with any device."""
        for row in self.rows[: int(self.next[0])]:
            if not _runs(int(row[-1])):
                row[_USED:-1] = 0

    def take(self, device: int, size: int) -> None:
        """Note bytes as used; raises if there are no more."""
        mine = self.mine
        with self.locked():  # or two processes that ask at once would both be refused what one of them could have
            used = self.used(device) + size
            if SIM.memory is not None and used > SIM.memory:
                self.reap()
                used = self.used(device) + size
            if SIM.memory is not None and used > SIM.memory:
                self._refuse(device, size, used - size)
            else:
                self.most[device] = max(int(self.most[device]), used)
            mine[_USED + device] += size
            SIM.peak = max(SIM.peak, int(mine[_USED + device]))

    def _refuse(self, device: int, size: int, used: int) -> None:
        self.mine[COUNTS.index("failed")] += 1
        why = (
            f"{NAME}:{device} is out of memory: {size / MIB:.1f} MiB wanted, {used / MIB:.1f} MiB of "
            f"{(SIM.memory or 0) / MIB:.1f} MiB are in use"
        )
        if not _in_a_backward_pass():
            raise torch.OutOfMemoryError(why)
        SIM.failed = why  # torch aborts if a device written in Python raises there: the next operator does

    def give_back(self, device: int, size: int) -> None:
        mine = self.mine
        with self.threads:  # no other process writes to this row
            mine[_USED + device] -= size


def _runs(pid: int) -> bool:
    """Whether there is such a process. One that has ended stays in the list until its parent has asked how."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


class _Block:
    """Memory of the device: of one storage, whatever the number of tensors that look at it."""

    def __init__(self, device: int, size: int):
        self.device, self.size, self.pid, self.shared = device, 0, os.getpid(), SIM.shared
        self.shared.take(device, size)
        self.size = size

    def __del__(self) -> None:
        if self.size and self.pid == os.getpid():
            self.shared.give_back(self.device, self.size)


class SimTensor(torch.Tensor):
    """A tensor of the device. `raw` is where its numbers are."""

    raw: Tensor
    block: _Block

    @staticmethod
    def __new__(cls, raw: Tensor, block: _Block | None = None, index: int = 0) -> "SimTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, index),
            requires_grad=False,
        )
        if raw.dtype == torch.float64 and not SIM.float64:
            raise TypeError(NO_FLOAT64)
        made.raw = raw
        made.block = block or _Block(index, raw.untyped_storage().nbytes())
        return made

    def __init__(self, raw: Tensor, block: _Block | None = None, index: int = 0):
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"sim({self.raw!r})"

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, SimTensor)
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.raw, self.block = other.raw, other.block

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SimTensor":
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


# ---- operators --------------------------------------------------------------------------------------

# These give the program something that depends on numbers of the device: it waits for them.
_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if SIM.failed and not _in_a_backward_pass():
        why, SIM.failed = SIM.failed, ""
        raise torch.OutOfMemoryError(why)
    counted = SIM.shared.mine
    counted[COUNTS.index("operators")] += 1
    _same_threads()
    kwargs = dict(kwargs)
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if func is aten._to_copy.default:
        return _copied(func, args[0], target, kwargs)
    if func is aten.copy_.default:
        return _written(*args, **kwargs)
    given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor | torch.Generator)]
    sims = [a for a in given if isinstance(a, SimTensor)]
    index = sims[0].device.index if sims else (target.index or 0) if target is not None else 0
    _refuse_mixed(func, given, index)
    if func in _READS or (func is aten.index.Tensor and _by_mask(args[1])):
        counted[COUNTS.index("reads")] += 1
    if target is not None and target.type == NAME:
        kwargs["device"] = torch.device("cpu")
    plain_args, plain_kwargs = tree_map(_raw, (args, kwargs))
    with _drawing(func, plain_kwargs):
        out = func(*plain_args, **plain_kwargs)
    known = {id(a.raw): a for a in sims}  # in place and out=: what comes back is what was given
    blocks = {a.raw.untyped_storage().data_ptr(): a.block for a in sims}  # a view has the memory of its base

    def wrap(o: Any) -> Any:
        if not isinstance(o, Tensor):
            return o
        if id(o) in known:
            return known[id(o)]
        return SimTensor(o, blocks.get(o.untyped_storage().data_ptr()) if o.numel() else None, index)

    return tree_map(wrap, out)


# torch makes these of other operators on a device than on the CPU. Here they run as one, on the CPU's kernels.
_WHOLE = {"lstm.input": aten.lstm.input, "scaled_dot_product_attention": aten.scaled_dot_product_attention.default}


class _Whole(torch.autograd.Function):
    """One of them, and its gradient: the CPU's bits. What it keeps for the backward pass counts as no memory."""

    @staticmethod
    def forward(ctx: Any, op: Any, form: Any, index: int, *leaves: Any) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[3:]
        raw = [leaf.raw.detach().requires_grad_(w) if isinstance(leaf, SimTensor) else leaf
               for leaf, w in zip(leaves, wanted, strict=True)]  # fmt: skip
        args, kwargs = tree_unflatten(raw, form)
        with torch.set_grad_enabled(any(wanted)), _drawing(op, {}):
            out = op(*args, **kwargs)
        ctx.out = (out,) if isinstance(out, Tensor) else tuple(out)
        ctx.given, ctx.wanted, ctx.index = raw, wanted, index
        ctx.set_materialize_grads(False)
        return tuple(SimTensor(o.detach(), None, index) for o in ctx.out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _same_threads()
        pairs = [(o, g.raw) for o, g in zip(ctx.out, grads, strict=True) if g is not None]
        given = [t for t, w in zip(ctx.given, ctx.wanted, strict=True) if w]
        found = iter(torch.autograd.grad([o for o, _ in pairs], given, [g for _, g in pairs], allow_unused=True))
        back = [next(found) if w else None for w in ctx.wanted]
        return None, None, None, *(None if g is None else SimTensor(g, None, ctx.index) for g in back)


def _as_one(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        sims = [a for a in leaves if isinstance(a, SimTensor)]
        _refuse_mixed(op, [a for a in leaves if isinstance(a, Tensor)], sims[0].device.index)
        SIM.shared.mine[COUNTS.index("operators")] += 1
        _same_threads()
        out = _Whole.apply(op, form, sims[0].device.index, *leaves)
        return out if len(out) > 1 else out[0]

    return kernel


def _raw(a: Any) -> Any:
    return a.raw if isinstance(a, SimTensor) else a


def _copied(func: Any, source: Tensor, target: torch.device | None, kwargs: dict[str, Any]) -> Tensor:
    """`Tensor.to`: within a device, or between the two."""
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    out = func(_raw(source), **kwargs)
    there = isinstance(source, SimTensor) if target is None else target.type == NAME
    if there != isinstance(source, SimTensor):
        _moved("to" if there else "back", source, kwargs.get("non_blocking", False))
    if not there:
        return out
    index = target.index if target is not None and target.index is not None else None
    return SimTensor(out, None, index if index is not None else source.device.index or 0)


def _written(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`Tensor.copy_`, also between the two devices."""
    if isinstance(into, SimTensor) != isinstance(source, SimTensor):
        _moved("to" if isinstance(into, SimTensor) else "back", source, non_blocking)
    _raw(into).copy_(_raw(source))
    return into


def _moved(way: str, source: Tensor, non_blocking: bool) -> None:
    SIM.used = True
    counted = SIM.shared.mine
    if way == "to":
        SIM.copied[source.untyped_storage().data_ptr()] += 1
    if not non_blocking:
        counted[COUNTS.index("waits")] += 1
    elif way == "back":
        raise RuntimeError("non_blocking=True from the device: the program would read numbers that are not there yet")
    counted[COUNTS.index(way)] += 1
    counted[COUNTS.index(f"{way}_bytes")] += source.nbytes


def _refuse_mixed(func: Any, given: Sequence[Any], index: int) -> None:
    for a in given:
        if isinstance(a, torch.Generator):
            raise RuntimeError(f"{func}: expected a {NAME!r} device type for generator but found {a.device.type!r}")
        alike = a.device == torch.device(NAME, index)
        if not alike and (isinstance(a, SimTensor) or a.dim() > 0):
            raise RuntimeError(f"{func}: expected all tensors on one device, found {NAME}:{index} and {a.device}")


def _by_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


@contextlib.contextmanager
def _drawing(func: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let an operator that draws do so from the device's own generator, where it has one."""
    if SIM.table == "cpu" or torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(SIM.generator.get_state())
    try:
        yield
    finally:
        SIM.generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


_HERE = threading.local()


def _in_a_backward_pass() -> bool:
    """Whether this is a thread of torch's own."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _same_threads() -> None:
    """Backward passes run in a thread of torch's, which would compute with another number of threads: other bits."""
    if _in_a_backward_pass():
        if getattr(_HERE, "threads", None) != SIM.threads:
            torch.set_num_threads(SIM.threads)
            _HERE.threads = SIM.threads
    else:
        SIM.threads = torch.get_num_threads()


# ---- the device as torch knows it -------------------------------------------------------------------


class _Module(types.ModuleType):
    """`torch.sim`: what a program asks about the device, under the names that `torch.cuda` has for it."""

    def is_available(self) -> bool:
        return SIM.count > 0

    def is_initialized(self) -> bool:
        return SIM.used

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return SIM.count

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        """Everything is done at once."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        SIM.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return SIM.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        SIM.generator.set_state(state)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = SIM.memory or 1 << 40
        return total - SIM.shared.used(_index(device)), total

    def memory_allocated(self, device: Any = None) -> int:
        return int(SIM.shared.mine[_USED + _index(device)])

    def max_memory_allocated(self, device: Any = None) -> int:
        return SIM.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        if not SIM.used:
            raise RuntimeError("Invalid device argument: the device is not initialized")  # as CUDA's does
        SIM.peak = self.memory_allocated(device)

    def empty_cache(self) -> None:
        """Nothing is kept that is not in use."""

    max_memory_reserved, memory_reserved = max_memory_allocated, memory_allocated


def _index(device: Any) -> int:
    return 0 if device is None else device if isinstance(device, int) else torch.device(device).index or 0


class _Sim:
    """The device of this process."""

    def __init__(self) -> None:
        self.shared = _Shared()
        self.table: Table = "cpu"
        self.float64 = True
        self.count, self.used, self.peak, self.threads = 0, False, 0, 1
        self.memory: int | None = None
        self.copied: Counter[int] = Counter()  # to the device by this process, by where they were
        self.failed = ""  # why memory ran out, if nobody has been told
        self.generator = torch.Generator()
        self.libraries: list[torch.library.Library] = []  # they hold what is registered

    def register(self) -> None:
        """Make torch know the device. Once in a process, for good."""
        if self.libraries:
            return
        _setup_privateuseone_for_python_backend(NAME, _Module(f"torch.{NAME}"))
        others, aten_library = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
        others.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
        others.fallback(torch.library.fallthrough_kernel, autocast.KEY)
        autocast.register(aten_library, lambda a: isinstance(a, SimTensor))
        for name, op in _WHOLE.items():
            aten_library.impl(name, _as_one(op), "AutogradPrivateUse1")
        self.libraries = [others, aten_library]


SIM = _Sim()


def _after_a_fork() -> None:
    """A thread that the child has not may have had the lock."""
    SIM.shared.threads = threading.RLock()


os.register_at_fork(after_in_child=_after_a_fork)


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What happened on the device so far, in all processes."""

    shared: _Shared

    def counts(self) -> dict[str, int]:
        """Copies to the device and back, their bytes, how many of them a program waits for, reads that it waits for,
        operators, failed requests."""
        return dict(zip(COUNTS, self.shared.rows[:, :_USED].sum(0).tolist(), strict=True))

    def most_used(self, device: int = 0) -> int:
        """The most bytes that were in use at once."""
        return int(self.shared.most[device])

    def in_use(self, device: int = 0) -> int:
        """Bytes in use now."""
        return self.shared.used(device)

    def copies_of(self, tensor: Tensor) -> int:
        """How often this tensor of the CPU, or a part of it, was copied to the device as it is, by this process."""
        return SIM.copied[tensor.untyped_storage().data_ptr()]

    def reset(self) -> None:
        """Count from zero."""
        SIM.copied.clear()
        with self.shared.locked():
            self.shared.rows[:, :_USED] = 0
            self.shared.reap()
            self.shared.most[:] = [self.shared.used(d) for d in range(DEVICES)]


def _look() -> list[Device]:
    known = ("float32", "bf16")
    return [Device(f"{NAME}:{i}", "simulated device", SIM.memory, known) for i in range(SIM.count)]


@contextlib.contextmanager
def simulated_device(
    table: Table = "cpu", count: int = 1, memory: int | None = None, auto: bool = False, float64: bool = True
) -> Iterator[Simulated]:
    """`count` devices "sim" with so many bytes of `memory` each (None: no limit), for as long as the context lasts.

    `table` says which row of `devices.TRICKS` they get: the CPU's, or that of an accelerator. `auto`: whether
    `engine.device = "auto"` takes one. Without `float64` a tensor of that type is refused there, as Apple's "mps" does.
    """
    if not 1 <= count <= DEVICES:
        raise ValueError(f"count = {count}: 1 to {DEVICES}")
    SIM.register()
    SIM.shared, SIM.table, SIM.count, SIM.memory, SIM.failed = _Shared(), table, count, memory, ""
    SIM.float64 = float64
    SIM.generator.manual_seed(0)
    row = TRICKS["cpu" if table == "cpu" else "cuda"]
    TRICKS[NAME] = dataclasses.replace(row, float64=float64)
    FINDERS[NAME] = Finder(lambda: True, _look, auto, elsewhere=False)
    _found.cache_clear()
    SIM.copied.clear()
    try:
        yield Simulated(SIM.shared)
    finally:
        SIM.count, SIM.memory, SIM.float64 = 0, None, True
        del TRICKS[NAME], FINDERS[NAME]
        _OPENED.discard(NAME)
        _found.cache_clear()
