"""What this machine can do, and what a family of processes takes of it. Reads /proc: Linux only."""

import copy
import os
import pathlib
import platform
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from solera.core.errors import RunError
from solera.core.randomness import one_thread

MARK = "SOLERA_BENCH"  # the environment variable by which a family of processes is known, whoever forked whom
MATRIX = 1024  # a side of the matrices whose product gives the peak
PEAK_S = 0.3  # how long it is measured each time


def describe() -> dict[str, Any]:
    """What numbers measured here depend on."""
    text = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    name = re.search(r"model name\s*:\s*(.+)", text)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": name[1].strip() if name else platform.processor(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def family(mark: str) -> list[int]:
    """The processes that were started, however indirectly, with this mark in their environment."""
    wanted, found = f"{MARK}={mark}\0".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                environment = pathlib.Path("/proc", entry, "environ").read_bytes()
            except OSError:  # gone, or somebody else's
                continue
            if wanted in environment + b"\0":
                found.append(int(entry))
    return found


def memory(pids: Sequence[int]) -> int:
    """Bytes of memory these processes use, pages that several share counted once among them (PSS)."""
    total = 0
    for pid in pids:
        try:
            text = pathlib.Path("/proc", str(pid), "smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += 1024 * int(found[1]) if found else 0
    return total


# ---- arithmetic -------------------------------------------------------------------------------------


def training_flops(model: nn.Module, inputs: Tensor, classes: int) -> float:
    """Floating-point operations of forward and backward for one of `inputs` (matrix products and convolutions)."""
    labels = torch.arange(len(inputs)) % classes
    model = copy.deepcopy(model)
    model.train()
    with FlopCounterMode(display=False) as counted:
        F.cross_entropy(model(inputs), labels).backward()
    return counted.get_total_flops() / len(inputs)


def answering_flops(model: nn.Module, inputs: Tensor) -> float:
    """The same for an answer alone."""
    model = copy.deepcopy(model)
    model.eval()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(inputs)
    return counted.get_total_flops() / len(inputs)


Job = Callable[[], None]


class Crew:
    """Processes of one torch thread each that do their jobs at the same time, when told to."""

    def __init__(self, makers: Sequence[Callable[[], Job]]):
        """Each process makes its job first, so that no two share anything."""
        self._lines: list[tuple[int, int]] = []
        for make in makers:
            to_read, to_write = os.pipe()
            from_read, from_write = os.pipe()
            if os.fork() == 0:
                try:
                    os.close(to_write)
                    os.close(from_read)
                    for line in self._lines:
                        for end in line:
                            os.close(end)
                    _toil(make, to_read, from_write)
                finally:
                    os._exit(1)
            os.close(to_read)
            os.close(from_write)
            self._lines.append((to_write, from_read))
        self._wait()

    def __call__(self) -> float:
        """Let everybody do their job; the seconds until the last was done."""
        began = time.perf_counter()
        for tell, _ in self._lines:
            os.write(tell, b"!")
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        for _, hear in self._lines:
            if not os.read(hear, 1):
                raise RunError("a process of the benchmark's crew died; its message is above")

    def close(self) -> None:
        """Send everybody home."""
        for line in self._lines:
            for end in line:
                os.close(end)
        for _ in self._lines:
            os.wait()
        self._lines = []


def _toil(make: Callable[[], Job], hear: int, tell: int) -> None:
    one_thread()
    job = make()
    os.write(tell, b"!")
    while os.read(hear, 1):
        job()
        os.write(tell, b"!")
    os._exit(0)


class Peak:
    """The machine's matrix-multiply peak: float32, one single-threaded process for each worker, all at once."""

    def __init__(self, workers: int):
        one_thread()
        a = torch.rand(MATRIX, MATRIX)
        a @ a
        began = time.perf_counter()
        a @ a
        self.products = max(1, round(PEAK_S / (time.perf_counter() - began)))
        self.workers = workers
        self._crew = Crew([self._make] * workers)

    def _make(self) -> Job:
        a, b, out = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX), torch.empty(MATRIX, MATRIX)

        def job() -> None:
            for _ in range(self.products):
                torch.mm(a, b, out=out)

        job()
        return job

    def __call__(self) -> float:
        """Operations a second, now."""
        return self.workers * self.products * 2 * MATRIX**3 / self._crew()

    def close(self) -> None:
        """End its processes."""
        self._crew.close()
