"""Randomness by address: every random choice comes from (run seed, round, client, purpose), never from scheduling."""

import contextlib
import hashlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

log = logging.getLogger("solera")
T = TypeVar("T")


def seed_from(*key: Any) -> int:
    """A seed fixed by its key alone. Keys are strings and integers."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest())


@contextlib.contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed the global generators (dropout, a user's own torch.rand, numpy, random) and put them back afterwards."""
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
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


def _global_state() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def fingerprint() -> bytes:
    """Changes when anybody draws from a global generator."""
    state, (_, keys, pos, *_), py = _global_state()
    return hashlib.blake2b(
        state.numpy().tobytes() + keys.tobytes() + str(pos).encode() + repr(py[1][-1]).encode()
    ).digest()


class Parallel:
    """Runs independent functions side by side in threads, with the bits of running them one after another.

    Threads share torch's global generator, so whatever draws from it (dropout) would depend on scheduling. A draw
    shows in the generators' state: then everything is run again one after another, each from its own seed, and this
    object stays serial.
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
                before = fingerprint()
                pool = ThreadPoolExecutor(
                    min(self.workers, len(functions)),
                    initializer=_enter,
                    initargs=(torch.get_num_threads(),),  # as many as here: their number changes the bits
                )
                try:
                    results = list(pool.map(lambda f: f(), functions))
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)  # whoever is interrupted need not wait for the rest
                    raise
                pool.shutdown(wait=True)  # all is done; threads that are still ending would disturb a fork
                if fingerprint() == before:
                    return results
            self.alone = True
            log.info("a model draws from torch's global generator (dropout?): server work runs one at a time")
        results = []
        for f, seed in zip(functions, seeds, strict=True):
            with isolated(seed):
                results.append(f())
        return results


_HERE = threading.local()


def _enter(threads: int) -> None:
    _HERE.in_parallel = True
    torch.set_num_threads(threads)


def one_thread() -> None:
    """Pin this thread to one intra-operation thread: their number changes the bits of a sum."""
    torch.set_num_threads(1)
