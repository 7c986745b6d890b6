"""Every random choice is seeded by (run seed, round, client, purpose), and never depends on scheduling.

torch, numpy and Python each have one global generator that all threads of a program share; dropout draws from torch's.
Code that may use a global generator runs in `repeatable`. It seeds the generators, and detects whether another thread
was active at the same time.
"""

import contextlib
import contextvars
import dataclasses
import functools
import gc
import hashlib
import logging
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..place.placement import opened
from .errors import SoleraError
from .stopping import inherited

log = logging.getLogger("solera")
T = TypeVar("T")
ATTEMPTS = 8  # at an undisturbed result
OURS = "solera"  # name prefix of the library's own threads; they use the generators only inside `isolated`


class SharedGenerator(SoleraError):
    """Another thread of the program uses a generator that the result depends on."""


def seed_from(*key: Any) -> int:
    """A seed that depends only on the key. Keys are strings and integers."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest())


# ---- the global generators --------------------------------------------------------------------------


class _Sections:
    """One thread at a time may seed the global generators. `entered` counts the sections, `seed` is the current one."""

    def __init__(self) -> None:
        self.lock, self.entered = threading.RLock(), 0
        self.seed: int | None = None


_SECTIONS = _Sections()
os.register_at_fork(after_in_child=_SECTIONS.__init__)  # type: ignore[misc]  # another thread may have held its lock


@contextlib.contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed the global generators (for dropout, torch.rand, numpy, random) and restore them afterwards."""
    # Jobs of `Parallel` do not take the lock: `entered` shows that one was here, and then all jobs are re-run serially.
    in_parallel = getattr(_HERE, "in_parallel", False)
    with contextlib.nullcontext() if in_parallel else _SECTIONS.lock:
        _SECTIONS.entered += 1
        with seeded(seed, current=not in_parallel):  # parallel jobs have no one current seed
            yield


@contextlib.contextmanager
def seeded(seed: int, current: bool = True) -> Iterator[None]:
    """Like `isolated`, for a whole run: `Watch` detects code outside the run that uses the generators."""
    outer, kept = _SECTIONS.seed, _global_state()
    with contextlib.ExitStack() as devices:
        for kind in opened():
            devices.enter_context(_seeded_there(kind, seed))
        # torch.manual_seed would take a millisecond: it formats a stack trace for each accelerator type not in use.
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        _SECTIONS.seed = seed if current else outer
        try:
            yield
        finally:
            if current:
                _SECTIONS.seed = outer
            _restore(kept)


@contextlib.contextmanager
def _seeded_there(kind: str, seed: int) -> Iterator[None]:
    """Seed the generators of the devices of one kind, from which dropout draws there."""
    module = torch.get_device_module(kind)
    every = hasattr(module, "get_rng_state_all")  # mps has only one device
    kept = module.get_rng_state_all() if every else module.get_rng_state()
    getattr(module, "manual_seed_all", module.manual_seed)(seed)
    try:
        yield
    finally:
        getattr(module, "set_rng_state_all", module.set_rng_state)(kept)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off: it could deadlock here. torch holds the generator's lock while it allocates the
    state tensor. A collection at that moment may switch to another thread; if that one draws, it waits for the
    generator's lock while it holds Python's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def _global_state() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


@_no_collection()
def _restore(kept: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])


def fingerprint() -> bytes:
    """A hash of the global generators' state. It changes with every draw."""
    return _fingerprint(*_global_state())


def _fresh(seed: int) -> bytes:
    """The fingerprint of freshly seeded generators. Computed with private generators."""
    numbers = np.random.RandomState(seed % 2**32)
    return _fingerprint(
        torch.Generator().manual_seed(seed).get_state(), numbers.get_state(), random.Random(seed).getstate()
    )


def _fingerprint(state: Tensor, numpys: Any, py: Any) -> bytes:
    _, keys, pos, *_ = numpys
    return hashlib.blake2b(
        state.numpy().tobytes() + keys.tobytes() + str(pos).encode() + repr(py[1][-1]).encode()
    ).digest()


class Watch:
    """Detects whether the global generators were used since it was created."""

    def __init__(self) -> None:
        self._before, self._entered, self._seed = fingerprint(), _SECTIONS.entered, _SECTIONS.seed

    def clean(self) -> bool:
        """True if they were not used. A draw inside `isolated` shows only in `entered`. Code that always sets the same
        seed shows only in a state that does not belong to the current seed."""
        now = fingerprint()
        if now != self._before or _SECTIONS.entered != self._entered:
            return False
        return self._seed is None or now == _fresh(self._seed)


# ---- one piece of work ------------------------------------------------------------------------------


def repeatable(seed: int, work: Callable[[], T]) -> T:
    """Run `work` with seeded global generators, and return the result that it has without other threads.

    A result is accepted if no other thread was active, if no generator was used, or if another seed gives the same
    result. Otherwise `work` is re-run, until it was undisturbed, or until two results in a row are bitwise equal and
    the other threads go on without using the generators. So `work` must have no side effects.
    """
    last: tuple[Any, Exception | None] | None = None
    for attempt in range(ATTEMPTS):
        others, began = _others(), time.monotonic()
        with isolated(seed):
            outcome = _outcome(work)
            accepted = _undisturbed(others) or fingerprint() == _fresh(seed)
            seeded_again = torch.initial_seed() != seed  # by the work or by another thread
        took = time.monotonic() - began
        if not accepted and attempt == 0 and not seeded_again:
            with isolated(seed + 1):
                accepted = _equal(outcome, _outcome(work)) and torch.initial_seed() == seed + 1
        if not accepted and last is not None and _equal(last, outcome):
            with isolated(seed):  # threads that take turns disturb two results in the same way
                others, end = _others(), time.monotonic() + 10 * took + 0.5
                time.sleep(took + 0.001)
                while _undisturbed(others) and time.monotonic() < end:  # until the other threads have run
                    time.sleep(0.001)
                accepted = not _undisturbed(others) and fingerprint() == _fresh(seed)
        if accepted:
            value, error = outcome
            if error is not None:
                raise error
            return value
        last = outcome
    raise SharedGenerator(
        "another thread of this program uses or seeds the global random generators (torch, numpy or random), and so "
        f"does a model or a task of this run (dropout?): {ATTEMPTS} attempts gave no reproducible result. Give that "
        "thread its own generator, stop it during the run, or start the run in its own process (solera run)"
    )


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as e:
        return None, e


def _equal(a: tuple[Any, Exception | None], b: tuple[Any, Exception | None]) -> bool:
    return repr(a[1]) == repr(b[1]) and same_bits(a[0], b[0])


def same_bits(a: Any, b: Any) -> bool:
    """True if two results are bitwise equal: tensors, models, containers of them, and anything with `==`."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, nn.Module):
        return same_bits(a.state_dict(), b.state_dict())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if dataclasses.is_dataclass(a):
        return all(same_bits(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _bytes(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _others() -> dict[int, int | None]:
    """The other threads of the program that run Python, with the processor time of each so far; None: unknown."""
    known = {t.native_id: t for t in threading.enumerate() if t.native_id is not None}
    running = sys._current_frames().keys() - {threading.get_ident()}
    ids = {n for n, t in known.items() if t.ident in running and not t.name.startswith(OURS)}
    if not running <= {t.ident for t in known.values()}:  # one was not started by `threading`: it may be any other one
        ids |= {int(n) for n in os.listdir("/proc/self/task")} - known.keys() if sys.platform == "linux" else {-1}
    return {n: _worked_ns(n) for n in ids}


def _worked_ns(native_id: int) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime_ns(~native_id << 3 | 6)  # the kernel's clock id of a thread
    except OSError:  # it has ended
        return None


def _undisturbed(before: dict[int, int | None]) -> bool:
    """True if no other thread was active since `before`."""
    return None not in before.values() and _others() == before


# ---- several at once --------------------------------------------------------------------------------


def thread_pool(
    workers: int, initializer: Callable[..., None], initargs: tuple[Any, ...] = ()
) -> ThreadPoolExecutor | None:
    """A pool of started threads: fewer than `workers` if the system cannot start more, None if it starts none."""
    while workers:
        pool = ThreadPoolExecutor(workers, OURS, inherited(initializer), initargs)
        started = threading.Barrier(workers + 1)
        try:
            for _ in range(workers):
                pool.submit(started.wait)
            started.wait()
            return pool
        except BaseException as e:
            started.abort()
            pool.shutdown(wait=True, cancel_futures=True)
            if not isinstance(e, RuntimeError):  # "can't start new thread"
                raise
            log.warning("the system cannot start %d threads now (%s): continuing with fewer", workers, e)
            workers //= 2
    return None


class Parallel:
    """Runs independent functions in parallel threads. The result is bitwise equal to a serial run.

    Threads share torch's global generator, so the result of a function that draws from it (dropout) would depend on
    scheduling. A draw shows in the generators' state. Then all functions are re-run one after another, each with its
    own seed, and this object stays serial. A draw by another thread of the program has the same effect: slower, but
    the same bits.
    """

    def __init__(self, workers: int, attempt: Callable[[Callable[[], Any]], Any] = lambda job: job()):
        """`attempt` runs a job of a serial run (`devices.within_memory`)."""
        self.workers, self.attempt = workers, attempt
        self.alone = workers < 2
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Parallel"], tuple[int]]:
        """A copy in another process has a lock of its own."""
        return Parallel, (self.workers,)

    def __call__(self, functions: Sequence[Callable[[], T]], seeds: Sequence[int]) -> list[T]:
        """The results in order. `seeds` seed the global generators for functions that use them."""
        if getattr(_HERE, "in_parallel", False):  # a nested call: the outer one watches the generators for both
            return [f() for f in functions]
        if not self.alone and len(functions) > 1:
            with self._lock:
                kept, watch = _global_state(), Watch()
                # The same number of torch threads as here: it changes the bits.
                wanted = min(self.workers, len(functions))
                pool = thread_pool(wanted, _enter, (torch.get_num_threads(),)) if watch.clean() else None
                if pool is not None:
                    try:
                        contexts = [contextvars.copy_context() for _ in functions]  # the caller's
                        results = list(pool.map(contextvars.Context.run, contexts, functions))
                    except BaseException:
                        pool.shutdown(wait=False, cancel_futures=True)  # do not wait after an interrupt
                        raise
                    pool.shutdown(wait=True)  # all work is done; threads that are still ending would disturb a fork
                    if watch.clean():
                        return results
                    _restore(kept)
                    self.alone = True
                    log.info("something used torch's global generator (dropout?): server work now runs serially")
        jobs = [functools.partial(repeatable, seed, f) for f, seed in zip(functions, seeds, strict=True)]
        return [self.attempt(job) for job in jobs]


_HERE = threading.local()


def _enter(threads: int) -> None:
    _HERE.in_parallel = True
    torch.set_num_threads(threads)


def one_thread() -> None:
    """Let torch operations of this thread use one thread: the number of threads changes the bits of a sum."""
    torch.set_num_threads(1)
