"""The devices of this machine, and the settings of an engine that concern them.

`compute_of` refuses, before any work, what is not here, and returns a `Compute`: the devices by name. An engine asks it
for `place(worker)` in the worker's own process. A process that is forked from one with an open CUDA context cannot have
its own; so a child process looks which devices there are.
"""

import dataclasses
import functools
import json
import logging
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
from annotated_types import Gt, Le

from ..core.errors import PORTABLE, ConfigError, NotPortable
from ..core.settings import show
from .placement import TRICKS, Placement, Precision, device_memory

AUTO, CPU = "auto", "cpu"
log = logging.getLogger("solera")
T = TypeVar("T")
Share = Annotated[float, Gt(0), Le(1)]
LOOK_S = 60.0  # the first look at a device loads its driver


@dataclasses.dataclass(frozen=True)
class Device:
    """One device of this machine."""

    name: str  # as torch calls it: "cuda:0"
    title: str
    memory: int | None = None  # bytes
    precisions: tuple[str, ...] = ("float32",)


@dataclasses.dataclass(frozen=True)
class Compute:
    """The devices and the precision of a run. `devices` has the name of every device that it uses."""

    devices: tuple[str, ...] = (CPU,)
    per_device: int = 1
    precision: Precision = "float32"
    deterministic: bool = True
    resident: float = 0.5
    portable: bool = False
    workers_on: str = ""  # the kind of device that the workers have, where this machine has none and they are elsewhere

    @property
    def kind(self) -> str:
        """The kind of the devices, such as "cpu" or "cuda"."""
        return self.devices[0].partition(":")[0]

    @property
    def on_cpu(self) -> bool:
        """True if the run uses no other device."""
        return self.kind == CPU

    @property
    def at_once(self) -> int | None:
        """Clients at once on all devices together; on the CPU the engine decides."""
        return None if self.on_cpu else len(self.devices) * self.per_device

    def device_of(self, worker: int = 0) -> str:
        """The device of a worker by its number: workers are assigned in turn. The server is on the first."""
        return self.devices[worker % len(self.devices)]

    def place(self, worker: int = 0) -> Placement:
        """The place of a worker. Call it in the worker's own process, after the fork: others cannot use it."""
        device = self.device_of(worker)
        sharing = self.per_device + (device == self.devices[0])  # the server is there, too
        precision: Precision = "float32" if self.on_cpu else self.precision
        return Placement(device, self.resident / sharing, precision, self.deterministic, self.portable)

    def facts(self) -> dict[str, Any]:
        """Settings that change results; none on the CPU by default."""
        if self.on_cpu and not self.workers_on:
            return {"portable": True} if self.portable else {}
        return {
            "device": self.workers_on or self.kind,
            "precision": self.precision,
            "deterministic": self.deterministic,
        }


def compute_of(engine: Any) -> Compute:
    """Check the settings of an engine that concern devices. An engine that has none of them computes on the CPU.

    With `elsewhere` it says that its workers are not on this machine: the devices here do not limit them, and where
    there are none, the server computes on the CPU.
    """
    told = {f.name: getattr(engine, f.name) for f in dataclasses.fields(Compute)[1:] if hasattr(engine, f.name)}
    asked = str(getattr(engine, "device", CPU))
    if getattr(engine, "elsewhere", False) and asked in FINDERS and asked not in found():
        compute = Compute(**told, workers_on=asked)
    else:
        compute = Compute(_devices(asked), **told)
        _check_precision(compute)
    if compute.portable:
        _check_portable(compute)
    workers, most = getattr(engine, "workers", 0), compute.at_once
    if most is not None and workers > most and not getattr(engine, "elsewhere", False):
        raise ConfigError(
            f"engine.workers = {workers}: {', '.join(compute.devices)} with engine.per_device = {compute.per_device} "
            f"takes {most} at once; set engine.per_device = {-(-workers // len(compute.devices))}, or leave "
            "engine.workers out"
        )
    if compute.kind == "cuda" and compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a context is opened
    return compute


def resolved(engine: T) -> T:
    """The same settings with the kind of device that "auto" stands for here: a run is continued on the same kind."""
    if getattr(engine, "device", None) != AUTO:
        return engine
    if hint := not_taken():
        log.warning(hint)
    return dataclasses.replace(engine, device=compute_of(engine).kind)  # type: ignore[type-var]


def not_taken() -> str:
    """One line about the accelerators that "auto" does not use; empty if there are none."""
    kinds = [kind for kind in found() if not FINDERS[kind].auto]
    if not kinds:
        return ""
    return (
        f"this machine has {kinds[0]}; engine.device = 'auto' stays on the CPU, because no run on {kinds[0]} has been "
        f"reported yet: --set engine.device={kinds[0]} uses it"
    )


def _devices(asked: str) -> tuple[str, ...]:
    """The names of the requested devices; refused if one is missing."""
    if asked == AUTO:
        return next((tuple(d.name for d in there) for kind, there in found().items() if FINDERS[kind].auto), (CPU,))
    if not (match := re.fullmatch(r"([a-z]+)(?::([0-9]+(?:,[0-9]+)*))?", asked)):
        raise ConfigError(f'engine.device = {show(asked)}: expected "auto", "cpu", "cuda", "cuda:0,1" or "mps"')
    kind, listed = match[1], match[2]
    if kind not in TRICKS:
        raise ConfigError(f"engine.device = {show(asked)}: no such kind of device; there is auto, {', '.join(TRICKS)}")
    if kind == CPU:
        if listed is not None:
            raise ConfigError(f'engine.device = {show(asked)}: the CPU has no number; write "cpu"')
        return (CPU,)
    there = found().get(kind, [])
    if not there:
        why = f"no {kind} device is here, or its driver does not answer"
        if not FINDERS[kind].built():
            why = f"this torch ({torch.__version__}) is built without {kind}"
        elif kind in _ERRORS:
            why = f"looking for a {kind} device failed with {_ERRORS[kind]}"
        raise ConfigError(f'engine.device = {show(asked)}: {why}; set engine.device = "cpu" or "auto"')
    if listed is None:
        return tuple(d.name for d in there)
    numbers = [int(n) for n in listed.split(",")]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"engine.device = {show(asked)}: a device is named twice; raise engine.per_device instead")
    if missing := [n for n in numbers if n >= len(there)]:
        has = f"{len(there)} device{'s' * (len(there) > 1)} of that kind, {kind}:0"
        has += f" to {kind}:{len(there) - 1}" if len(there) > 1 else ""
        raise ConfigError(f"engine.device = {show(asked)}: there is no {kind}:{missing[0]}; this machine has {has}")
    return tuple(there[n].name for n in numbers)


def _check_precision(compute: Compute) -> None:
    precision = compute.precision
    if precision == "float32":
        return
    if compute.on_cpu:
        raise ConfigError(f'engine.precision = {show(precision)}: on the CPU everything is "float32"; leave it out')
    for device in (d for d in found()[compute.kind] if d.name in compute.devices):
        if precision not in device.precisions:
            has = ", ".join(device.precisions)
            raise ConfigError(f"engine.precision = {show(precision)}: {device.name} ({device.title}) has {has}")


def _check_portable(compute: Compute) -> None:
    if not compute.on_cpu:
        raise ConfigError(f"engine.portable = true with engine.device = {show(compute.kind)}: only on the CPU")
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkl.is_available():
        raise ConfigError("engine.portable = true: only on an x86 processor, with a torch that is built with MKL")
    if any(os.environ.get(name) != value for name, value in PORTABLE.items()):
        named = " and ".join(f"{name}={value}" for name, value in PORTABLE.items())
        raise NotPortable(
            f"engine.portable = true needs {named} in the environment before torch is loaded: start the program with "
            "them (solera run does so itself)"
        )
    if (used := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise ConfigError(
            f"engine.portable = true: torch computes with {used} here, not with AVX2: the processor has none, or torch "
            "was loaded before the environment was set; leave it out, or start the program with the variables"
        )


def can_fork(compute: Compute) -> bool:
    """True if processes forked from this one can open the devices: false for those that the program has used itself."""
    finder = None if compute.on_cpu else FINDERS[compute.kind]
    return finder is None or not finder.elsewhere or not isinstance(_in_a_child(finder.look), str)


def check_fork(compute: Compute) -> None:
    """Refuse to fork workers for a device that this process has used."""
    if not can_fork(compute):
        kind = compute.kind
        raise ConfigError(
            f"this program has used {kind} already (torch.{kind}.is_available() is enough), so processes forked from "
            "it cannot: set engine.name = 'inprocess', or start the run first, in a process of its own (solera run)"
        )


# ---- the devices of this machine --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finder:
    """The search for devices of one kind. `built`: true if torch supports the kind, known without opening a device."""

    built: Callable[[], bool]
    look: Callable[[], list[Device]]
    auto: bool = False  # whether "auto" takes one: not before a report of a run on such hardware
    elsewhere: bool = True  # whether looking opens it, so that a child process has to look


def _cuda() -> list[Device]:
    there = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(i)
        newer = ("tf32", "bf16") if about.major >= 8 else ()
        there.append(Device(f"cuda:{i}", about.name, about.total_memory, ("float32", *newer)))
    return there


def _mps() -> list[Device]:
    if not torch.backends.mps.is_available():
        return []
    return [Device("mps", "Apple GPU", device_memory(torch.device("mps")), ("float32", "bf16"))]


FINDERS: dict[str, Finder] = {
    "cuda": Finder(torch.backends.cuda.is_built, _cuda),
    "mps": Finder(torch.backends.mps.is_built, _mps, elsewhere=False),
}


def found() -> dict[str, list[Device]]:
    """The devices of this machine besides the CPU, by kind; kinds without any are left out."""
    there = {kind: _found(kind) for kind in FINDERS}
    return {kind: devices for kind, devices in there.items() if devices}


@functools.cache
def _found(kind: str) -> list[Device]:
    finder = FINDERS[kind]
    if not finder.built():
        return []
    _ERRORS.pop(kind, None)
    if not finder.elsewhere or sys.platform != "linux":
        return finder.look()
    seen = _in_a_child(finder.look)
    if isinstance(seen, str):  # also where the program has used the devices: then they can be seen from here alone
        try:
            return finder.look()
        except Exception:
            _ERRORS[kind] = seen
            return []
    return [Device(**{**d, "precisions": tuple(d["precisions"])}) for d in seen]


_ERRORS: dict[str, str] = {}  # by kind: why a look at its devices failed


def _in_a_child(look: Callable[[], list[Device]]) -> list[dict[str, Any]] | str:
    """The devices that a forked process sees, or its error; none if it does not answer in time."""
    here, there = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        try:
            seen: Any = [dataclasses.asdict(d) for d in look()]
        except Exception as e:
            seen = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        there.send_bytes(json.dumps(seen).encode())

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    there.close()
    try:
        return json.loads(here.recv_bytes()) if here.poll(LOOK_S) else []
    except EOFError:  # it has died
        return []
    finally:
        child.kill()
        child.join()
        here.close()
