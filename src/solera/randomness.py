"""Randomness by address: every random choice comes from (run seed, round, client, purpose), never from scheduling.

torch, numpy and Python each have one generator that all threads of a program share, and dropout draws from torch's.
Whatever may use them runs in `repeatable`, which seeds them, and notices when another thread of the program was at
work meanwhile.
"""

import contextlib
import contextvars
import dataclasses
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

from .errors import SoleraError
from .stopping import inherited

log = logging.getLogger("solera")
T = TypeVar("T")
ATTEMPTS = 8  # at a result that nobody disturbs
OURS = "solera"  # what the names of our own threads begin with; they draw nothing outside of `isolated`


class SharedGenerator(SoleraError):
    """Another thread of the program draws from a generator that the result depends on."""


def seed_from(*key: Any) -> int:
    """A seed fixed by its key alone. Keys are strings and integers."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest())


class _Sections:
    """One at a time may seed the global generators; `entered` counts who did, `seed` is the one that holds now."""

    def __init__(self) -> None:
        self.lock, self.entered = threading.RLock(), 0
        self.seed: int | None = None


_SECTIONS = _Sections()
os.register_at_fork(after_in_child=_SECTIONS.__init__)  # type: ignore[misc]  # its lock may be another thread's


@contextlib.contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed the global generators (dropout, a user's own torch.rand, numpy, random) and put them back afterwards."""
    # Jobs of `Parallel` need not wait for each other: that somebody was here shows, and they are run again alone.
    in_parallel = getattr(_HERE, "in_parallel", False)
    with contextlib.nullcontext() if in_parallel else _SECTIONS.lock:
        _SECTIONS.entered += 1
        with _generators_seeded(seed) if in_parallel else seeded(seed):  # they end in any order: none holds
            yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """As `isolated`, for the whole of a run: whoever uses the generators from outside leaves a trace (see `Watch`)."""
    outer = _SECTIONS.seed
    with _generators_seeded(seed):
        _SECTIONS.seed = seed
        try:
            yield
        finally:
            _SECTIONS.seed = outer


@contextlib.contextmanager
def _generators_seeded(seed: int) -> Iterator[None]:
    kept = _global_state()
    # torch.manual_seed also formats a stack trace for every kind of accelerator that is not in use: a millisecond.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        _restore(kept)


def _global_state() -> tuple[Any, Any, Any]:
    with _no_collection():
        return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(kept: tuple[Any, Any, Any]) -> None:
    with _no_collection():
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection here. torch holds the generator's lock while it makes the tensor of its state; a collection
    in that moment lets other threads run, and one that draws then waits for the lock and keeps Python's, for ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fingerprint() -> bytes:
    """Changes when anybody draws from a global generator."""
    return _fingerprint(*_global_state())


def _fresh(seed: int) -> bytes:
    """The fingerprint of generators that have been seeded and not used; none that others could reach."""
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
    """Tells whether anybody has used the global generators since it was made."""

    def __init__(self) -> None:
        self._before, self._entered, self._seed = fingerprint(), _SECTIONS.entered, _SECTIONS.seed

    def clean(self) -> bool:
        """Whether nobody has. Who draws in `isolated` leaves no trace but its count; and who always seeds with the same
        number leaves none but a state that is not ours."""
        now = fingerprint()
        if now != self._before or _SECTIONS.entered != self._entered:
            return False
        return self._seed is None or now == _fresh(self._seed)


def repeatable(seed: int, work: Callable[[], T]) -> T:
    """`work()`, with the global generators seeded, and with the result it has when nobody else draws from them.

    A result counts if no other thread of the program was at work meanwhile, if no generator was used, or if another
    seed gives the same. Otherwise the work is done again, until it went undisturbed, or until two results in a row are
    equal to the bit and the others do as much work again without touching the generators. So `work` must leave nothing
    behind but its result.
    """
    last: _Outcome | None = None
    for attempt in range(ATTEMPTS):
        others, began = _others(), time.monotonic()
        with isolated(seed):
            outcome = _outcome(work)
            if not _at_work(others):
                return outcome.get()
            worked, took = _work_since(others), time.monotonic() - began
            drawn, reseeded = fingerprint() != _fresh(seed), torch.initial_seed() != seed
        if not drawn or (attempt == 0 and not reseeded and _gives_with(seed + 1, work, outcome)):
            return outcome.get()
        if last is not None and last.equals(outcome) and _left_alone(seed, took, worked):
            return outcome.get()
        last = outcome
    raise SharedGenerator(
        "another thread of this program draws from the global random generators (torch, numpy or random) or seeds "
        f"them; a model or a task here uses them, too (dropout?): {ATTEMPTS} attempts gave no result. Give that thread "
        "a generator of its own, stop it while the run lasts, or start the run in a process of its own (solera run)"
    )


def _gives_with(seed: int, work: Callable[[], Any], outcome: "_Outcome") -> bool:
    """Whether the work has the same outcome with another seed, so that it does not use the generators."""
    with isolated(seed):
        return outcome.equals(_outcome(work)) and torch.initial_seed() == seed


def _left_alone(seed: int, seconds: float, worked_ns: int | None) -> bool:
    """Whether the others leave the generators alone while they do as much work again as they have done beside ours.

    Two results can be disturbed in the same way, where threads take turns. What cannot be told in time is not so.
    """
    with isolated(seed):
        others, end = _others(), time.monotonic() + 10 * seconds + 0.5
        time.sleep(0.001 if worked_ns is not None else seconds)
        while worked_ns is not None and (_work_since(others) or 0) < worked_ns:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return fingerprint() == _fresh(seed)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What came of some work: a value, or an error."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def equals(self, other: "_Outcome") -> bool:
        return repr(self.error) == repr(other.error) and same_bits(self.value, other.value)


def _outcome(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(work())
    except Exception as e:
        return _Outcome(error=e)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are equal to the bit: tensors, models, what is built of them, and what knows `==`."""
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
    """The program's other threads that run Python, and how much work each has done so far; None: unknown."""
    here = threading.get_native_id()
    known = {t.native_id: t for t in threading.enumerate() if t.native_id is not None}
    running = set(sys._current_frames())
    ids = {n for n, t in known.items() if t.ident in running and n != here and not t.name.startswith(OURS)}
    if not running <= {t.ident for t in known.values()}:  # started without `threading`: it may be any of the rest
        ids |= _all_threads() - known.keys()
    return {n: _worked_ns(n) for n in ids}


def _all_threads() -> set[int]:
    """The system's numbers of this process's threads, of whatever kind; where it does not tell: one that is unknown."""
    return {int(n) for n in os.listdir("/proc/self/task")} if sys.platform == "linux" else {-1}


def _worked_ns(native_id: int) -> int | None:
    """Processor time of a thread."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime_ns(~native_id << 3 | 6)  # how the kernel numbers the clock of a thread
    except OSError:  # it has ended
        return None


def _at_work(before: dict[int, int | None]) -> bool:
    """Whether another thread has done anything since, or may have."""
    now = _others()
    return now.keys() != before.keys() or any(w is None or w != before[n] for n, w in now.items())


def _work_since(before: dict[int, int | None]) -> int | None:
    """Processor time that the other threads have used since; None if it cannot be told."""
    total = 0
    for n, worked in _others().items():
        then = before.get(n, 0)
        if worked is None or then is None:
            return None
        total += worked - then
    return total


def thread_pool(
    workers: int, initializer: Callable[..., None], initargs: tuple[Any, ...] = ()
) -> ThreadPoolExecutor | None:
    """A pool whose threads are there already: fewer than asked for where the system gives no more; None for none."""
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
            log.warning("%d threads are more than the system gives now (%s): going on with fewer", workers, e)
            workers //= 2
    return None


class Parallel:
    """Runs independent functions side by side in threads, with the bits of running them one after another.

    Threads share torch's global generator, so whatever draws from it (dropout) would depend on scheduling. A draw
    shows in the generators' state: then everything is run again one after another, each from its own seed, and this
    object stays serial. So it is if the draw was another thread's of the program: slower, with the same bits.
    """

    def __init__(self, workers: int):
        self.workers = workers
        self.alone = workers < 2
        self._lock = threading.Lock()

    def __call__(self, functions: Sequence[Callable[[], T]], seeds: Sequence[int]) -> list[T]:
        """The results in order. `seeds` feed the global generators where a function uses them."""
        if getattr(_HERE, "in_parallel", False):  # a job of a job: the outer one watches the generators for both
            return [f() for f in functions]
        if not self.alone and len(functions) > 1:
            with self._lock:
                kept, watch = _global_state(), Watch()
                # As many torch threads as here: their number changes the bits.
                wanted = min(self.workers, len(functions))
                pool = thread_pool(wanted, _enter, (torch.get_num_threads(),)) if watch.clean() else None
                if pool is not None:
                    try:
                        contexts = [contextvars.copy_context() for _ in functions]  # of whoever asks for the work
                        results = list(pool.map(contextvars.Context.run, contexts, functions))
                    except BaseException:
                        pool.shutdown(wait=False, cancel_futures=True)  # whoever is interrupted need not wait
                        raise
                    pool.shutdown(wait=True)  # all is done; threads that are still ending would disturb a fork
                    if watch.clean():
                        return results
                    _restore(kept)
                    self.alone = True
                    log.info("torch's global generator was drawn from (dropout?): server work runs one at a time")
        return [repeatable(seed, f) for f, seed in zip(functions, seeds, strict=True)]


_HERE = threading.local()


def _enter(threads: int) -> None:
    _HERE.in_parallel = True
    torch.set_num_threads(threads)


def one_thread() -> None:
    """Pin this thread to one intra-operation thread: their number changes the bits of a sum."""
    torch.set_num_threads(1)
