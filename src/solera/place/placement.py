"""The place of a computation: torch's global state meanwhile, and what is particular to one kind of device.

A program may have turned on autocast, another default type or a faster kind of matrix product. Each changes the bits of
a result, and some hold in one thread only, so engines would differ. `numerics` sets that state for a piece of work,
records it and puts it back. What it yields, a `Training`, is the only thing that `fit`, `distill` and `evaluate` obey
without being given it.

`TRICKS` is a table of what is done for the speed or the bits of one kind of device; `Placement` puts data and models
on one. Which devices this machine has, and what the settings of an engine say about them, is in `devices.py`.
"""

import contextlib
import contextvars
import copy
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, SoleraError
from ..core.tensors import CPU, device_of

T = TypeVar("T")
Precision = Literal["float32", "tf32", "bf16"]
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16}


class _Knob(NamedTuple):
    """One global setting: how to read it, how to set it, and what a run needs (None: it is only put back)."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    needed: Any


def _flag(name: str, owner: Any, attribute: str, needed: Any) -> _Knob:
    get: Callable[[], Any] = lambda: getattr(owner, attribute)  # noqa: E731
    if needed == "none":  # full precision by default; "ieee" is the same because it was said
        get = lambda: owner.fp32_precision.replace("ieee", "none")  # noqa: E731
    return _Knob(name, get, lambda value: setattr(owner, attribute, value), needed)


def _matmul_precision() -> str | None:
    """The precision of matrix products; None if torch cannot report it (its newer settings, other knobs, are used)."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _flushes_denormals() -> bool:
    """True if denormals are flushed. torch cannot report this mode of the thread's processor, so it is computed."""
    return float.fromhex("0x1p-1070") * float("1") == 0.0


@functools.cache
def _knobs(kind: str, precision: Precision, deterministic: bool, portable: bool) -> tuple[_Knob, ...]:
    """The settings of a run, in the order in which they are set: the precision of products also sets those after it."""
    b: Any = torch.backends
    cuda, tf32 = kind == "cuda", kind == "cuda" and precision == "tf32"
    get_mode, set_mode = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    on_cuda = ("tf32" if tf32 else "ieee") if cuda else None  # torch's default for convolutions is tf32
    found = [
        _Knob("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        _Knob("gradients", torch.is_grad_enabled, torch.set_grad_enabled, True),
        # torch cannot tell this while those of CUDA differ, so where a run needs them to, it leaves it alone.
        _Knob("float32 matmul precision", _matmul_precision, torch.set_float32_matmul_precision,
              None if tf32 else "highest"),
        *(_flag(f"fp32 precision of {what}", owner, "fp32_precision", needed) for what, owner, needed in (
            ("generic all", b, "none"), ("mkldnn all", b.mkldnn, "none"), ("mkldnn matmul", b.mkldnn.matmul, "none"),
            ("mkldnn conv", b.mkldnn.conv, "none"), ("mkldnn rnn", b.mkldnn.rnn, "none"),
            ("cuda matmul", b.cuda.matmul, on_cuda), ("cuda conv", b.cudnn.conv, on_cuda),
            ("cuda rnn", b.cudnn.rnn, on_cuda))),
        _Knob("deterministic algorithms", get_mode, set_mode, 0 if kind == "cpu" else 2 * deterministic),
        _Knob("flush denormals", _flushes_denormals, torch.set_flush_denormal, False),
        # Neither has a setting for the same bits on another processor. Without them, products and convolutions are
        # MKL's, and all else torch's own; the environment fixes the kernels of both (`errors.PORTABLE`).
        _flag("oneDNN", b.mkldnn, "enabled", not portable),
        _Knob("NNPACK", torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, not portable),
    ]  # fmt: skip
    if cuda:
        found.append(_flag("cuDNN deterministic", b.cudnn, "deterministic", deterministic))
        found.append(_flag("cuDNN benchmark", b.cudnn, "benchmark", not deterministic))  # its choice varies with timing
    return tuple(found)


def _set(knobs: tuple[_Knob, ...], values: list[Any]) -> None:
    """Set the values that differ; None where torch could not report one."""
    for knob, value in zip(knobs, values, strict=True):
        if value is not None and knob.get() != value:
            knob.set(value)


class Training:
    """The state in which trainings run: torch's settings as they are `needed`, those that the program had set otherwise
    (`found`), and whether this is a dry run (`dry`), in which they take no steps."""

    def __init__(self, knobs: tuple[_Knob, ...], before: list[Any], aside: dict[str, Any], half: str, dry: bool):
        self._knobs, self._before, self._aside, self._half, self.dry = knobs, before, aside, half, dry

    @property
    def needed(self) -> dict[str, Any]:
        """The settings by name, as JSON."""
        there = {k.name: _plain(k.needed) for k in self._knobs if k.needed is not None}
        return {**there, "autocast": self._half, "default device": "cpu"}

    @property
    def found(self) -> dict[str, Any]:
        """Settings of the program that were replaced, as JSON; without threads, and what `portable` leaves out."""
        pairs = zip(self._knobs, self._before, strict=True)
        odd = {k.name: _plain(b) for k, b in pairs if k.needed is not None and b != k.needed}
        return self._aside | {n: b for n, b in odd.items() if n != "threads" and not (n in _LIBRARIES and b is True)}

    def check(self) -> None:
        """Refuse to go on if a setting was changed meanwhile: the result could not be repeated."""
        for knob in self._knobs:
            if knob.needed is not None and (now := knob.get()) != knob.needed:
                raise SoleraError(
                    f"torch's global setting {knob.name!r} was changed to {_plain(now)} during the run, which needs "
                    f"{_plain(knob.needed)}: by a model or a task, or by another thread of the program; leave it alone"
                )


_LIBRARIES = ("oneDNN", "NNPACK")
_CURRENT: contextvars.ContextVar[Training | None] = contextvars.ContextVar("training", default=None)


def steps_to_take(planned: int) -> int:
    """The steps that a training takes: as planned, or none in a dry run."""
    current = _CURRENT.get()
    return 0 if current is not None and current.dry else planned


@contextlib.contextmanager
def numerics(
    threads: int | None = None,
    kind: str = "cpu",
    precision: Precision = "float32",
    deterministic: bool = True,
    portable: bool = False,
    dry: bool = False,
) -> Iterator[Training]:
    """Compute as if nothing had been set in torch, with so many `threads` (unset: as many as there are).

    On a `kind` of device other than the CPU, also set how precise products are, and whether only deterministic
    algorithms are used; `portable` leaves out what has other bits on another CPU. With `dry`, here or around this,
    trainings take no steps. All that was set otherwise is put back at the end.
    """
    outer = _CURRENT.get()
    dry = dry or (outer is not None and outer.dry)
    knobs = _knobs(kind, precision, deterministic, portable)
    if threads is not None:  # their number changes the bits of a sum
        knobs += (_Knob("threads", torch.get_num_threads, torch.set_num_threads, threads),)
    with contextlib.ExitStack() as stack:
        aside: dict[str, Any] = {}
        if torch.is_inference_mode_enabled():
            aside["inference mode"] = "on"
            stack.enter_context(torch.inference_mode(False))
        for on in TRICKS:
            if _casts(on):
                aside[f"autocast on {on}"] = str(torch.get_autocast_dtype(on))
                stack.enter_context(torch.autocast(on, enabled=False))
        if (device := torch.get_default_device()) != CPU:
            aside["default device"] = str(device)
            stack.enter_context(CPU)
        before = [knob.get() for knob in knobs]
        stack.callback(_set, knobs, before)
        if before != [b if knob.needed is None else knob.needed for knob, b in zip(knobs, before, strict=True)]:
            _set(knobs, [knob.needed for knob in knobs])
        half = "off"
        if precision in HALF:
            half = f"{HALF[precision]} on {kind}"
            # With its cache torch would use the weights of the first step until the end of this context, in every step.
            stack.enter_context(torch.autocast(kind, HALF[precision], cache_enabled=False))
        made = Training(knobs, before, aside, half, dry)
        stack.callback(_CURRENT.reset, _CURRENT.set(made))
        yield made


def _casts(kind: str) -> bool:
    """True if autocast is on for this kind of device. Some kinds (meta) have none."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _plain(value: Any) -> Any:
    """The value in a form that JSON can have."""
    return value if isinstance(value, bool | int | str | None) else str(value)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of glibc's settings (malloc.h)
LARGEST = 32 << 20  # bytes of one block; glibc allows no more
KEPT = 256 << 20  # bytes that stay although they are free


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory instead of returning it to the system; False if that is impossible.

    A training step takes and frees the same megabytes again and again. glibc returns large blocks at once, and the
    system clears every page of the next one: up to a tenth of the time of a step. For the whole process, until it ends;
    only speed, and the memory that it seems to use, depend on it.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is None:  # not glibc
        return False
    return bool(setting(MMAP_THRESHOLD, LARGEST)) and bool(setting(TRIM_THRESHOLD, KEPT))


# ---- devices ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tricks:
    """The choices that make one kind of device fast, or keep its bits. `TRICKS` has the reasons."""

    asked: int
    least_rows: int
    layout: torch.memory_format
    sgd: Callable[..., None]
    adam: Callable[..., None]
    set_allocator: Callable[[], bool]
    look_every: int
    reads_in_steps: bool
    float64: bool = True


_ACCELERATOR = Tricks(
    asked=1024,  # a small batch leaves most of an accelerator idle
    least_rows=1,  # nothing is gained by padding: kernels are chosen by the whole shape
    layout=torch.channels_last,  # fast for convolutions in half precision; full precision takes either
    sgd=torch._fused_sgd_,  # one kernel: one for each parameter would take longer to launch than to run
    adam=torch._fused_adam_,
    set_allocator=lambda: False,  # torch keeps freed memory of a device anyway
    look_every=50,  # steps: reading a loss waits for all queued work
    reads_in_steps=False,  # for the same reason a step must not depend on numbers read from the device
)

TRICKS: dict[str, Tricks] = {
    "cpu": Tricks(
        asked=128,  # samples in one forward pass: with more, activations do not fit into the caches
        least_rows=32,  # rows of such a batch: with fewer the kernels sum in another order
        layout=torch.channels_last,  # convolutions are up to a fifth faster in training, and up to a half in evaluation
        sgd=torch._fused_sgd_,  # all parameters in one call: bookkeeping would be a tenth of a small model's step
        adam=torch._fused_adam_,
        set_allocator=keep_freed_memory,  # clearing pages again and again takes up to a tenth of a step
        look_every=1,  # a loss can be read at once, so a training that diverges ends at that step
        reads_in_steps=True,  # reads texts by their lengths: a fifth less time than with all padding
    ),
    "cuda": _ACCELERATOR,
    "mps": replace(_ACCELERATOR, float64=False),  # Metal has no such type: torch raises
}


def tricks_of(device: torch.device) -> Tricks:
    """The tricks of a device's kind; a kind without a row in the table is refused."""
    try:
        return TRICKS[device.type]
    except KeyError:
        raise ConfigError(f"nothing can be computed on {str(device)!r}; there is {', '.join(TRICKS)}") from None


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Compute on `device` as if `engine.precision` were not half: gradients that are no step's direction, but results.

    Backward passes, too: their operators get the types of those of the forward pass without being told.
    """
    return torch.autocast(device.type, enabled=False) if _casts(device.type) else contextlib.nullcontext()


def finest_type(device: torch.device) -> torch.dtype:
    """The type for sums on a device: float64, or float32 where it has no other."""
    return torch.float64 if tricks_of(device).float64 else torch.float32


def finest(tensor: Tensor) -> Tensor:
    """`tensor` in the type for sums on its device.

    It stays there: on the CPU a sum would be finer, but a training that asks its teachers at every step would wait for
    the device as often.
    """
    return tensor.to(finest_type(tensor.device))


_OPENED: set[str] = set()  # kinds of devices, besides the CPU, that this process computes on


def opened() -> set[str]:
    """The kinds of devices, besides the CPU, whose generators are seeded."""
    return _OPENED


def device_memory(device: torch.device) -> int | None:
    """All the memory of a device, in bytes; None if unknown. It opens the device."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[1])
    limit = getattr(module, "recommended_max_memory", None)  # mps
    return None if limit is None else int(limit())


def room_for(device: torch.device, size: int) -> torch.device:
    """`device` if `size` bytes take at most half of its free memory, otherwise the CPU."""
    if device == CPU:
        return device
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return device if ask is None or 2 * size <= ask(device)[0] else CPU


class OutOfMemory(SoleraError):
    """A device has too little memory for a run's settings."""


def within_memory(place: "Placement", work: Callable[[], T], way_out: str) -> T:
    """The result of `work`. An out-of-memory error becomes one line that names the way out."""
    try:
        return work()
    except torch.OutOfMemoryError as e:
        why = " ".join(str(e).split())[:160]
    place.release()  # not in the handler: the error holds on to all that was computed
    raise OutOfMemory(f"{place.device} has too little memory: {why}; {way_out}")


class Placement:
    """The device of one process, or of one worker of it, and what is there already.

    Never shared between processes: a worker makes its own after the fork, because what another process put on a
    device does not help it. Making one does not open the device; the first use does.

    `resident` is the share of the device's memory that data may occupy for good.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        resident: float = 1.0,
        precision: Precision = "float32",
        deterministic: bool = True,
        portable: bool = False,
    ):
        self.device = torch.device(device)
        self.tricks = tricks_of(self.device)
        self.resident, self.precision, self.deterministic = resident, precision, deterministic
        self.portable = portable
        self._there: dict[int, tuple[Any, Any]] = {}  # by identity: what was put, which stays alive, and its copy
        self._kept = 0  # bytes of it

    def open(self) -> None:
        """Open the device for this process: from now on seeding also seeds its generators."""
        if self.device.type != "cpu":
            _OPENED.add(self.device.type)

    def release(self) -> None:
        """Return unused memory to the other processes on this device."""
        gc.collect()
        getattr(torch.get_device_module(self.device), "empty_cache", lambda: None)()

    def training(self, threads: int | None = None) -> contextlib.AbstractContextManager[Training]:
        """Compute with the settings of this place, in half precision if that is what is set, and with nothing that the
        program has set."""
        return numerics(threads, self.device.type, self.precision, self.deterministic, self.portable)

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on this device: itself, or one copy, made at the first use."""
        if tensor.device == self.device:
            return tensor
        if id(tensor) not in self._there:
            self._kept += tensor.nbytes
        return self._once(tensor, lambda: tensor.to(self.device))

    def fits(self, tensor: Tensor) -> bool:
        """True if the tensor is on the device already, or fits into the budget."""
        if tensor.device == self.device or id(tensor) in self._there:
            return True
        return self.budget is None or self._kept + tensor.nbytes <= self.budget

    @functools.cached_property
    def budget(self) -> int | None:
        """Bytes of data that may stay on the device; None: no limit is known."""
        total = None if self.device.type == "cpu" else device_memory(self.device)
        return None if total is None else int(total * self.resident)

    def module(self, template: nn.Module) -> nn.Module:
        """A model that is never trained, on this device; copies of the result are there too."""
        here = device_of(template) == self.device
        return template if here else self._once(template, lambda: copy.deepcopy(template).to(self.device))

    def _once(self, what: T, make: Callable[[], T]) -> T:
        if id(what) not in self._there:
            self._there[id(what)] = what, make()
        return self._there[id(what)][1]
