"""Torch's global state while a run computes, and what is particular to one kind of device.

A program may have turned on autocast, another default type or a faster kind of matrix product for work of its own.
Each of these changes the bits of a result, or ends a run with an error that says nothing, and some hold in one
thread only, so that engines would differ. Repeatable work is done in `numerics`, one context that sets that state,
records it and restores it.

`TRICKS` is a table of what is done for the speed or the bits of one kind of device; `Placement` puts data and models
on one. Which devices this machine has, and what the settings of an engine say about them, is in `devices.py`.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils._device import DeviceContext

from ..core.errors import ConfigError, SoleraError
from ..core.tensors import CPU, device_of

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Knob:
    """One global setting: how to read it, how to set it, and what a run needs."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    needed: Any


def _flag(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _matmul_precision() -> str | None:
    """None where torch cannot tell: the program has used its newer settings too, which are knobs of their own."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _fp32_precision(backend: str, what: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    def get() -> str:
        precision = torch._C._get_fp32_precision_getter(backend, what)
        return "none" if precision == "ieee" else precision  # full precision, by default or because it was said

    return get, lambda value: torch._C._set_fp32_precision_setter(backend, what, value)


def _flushes_denormals() -> bool:
    """There is nothing to ask: it is a mode of this thread's processor, and shows in what it computes."""
    smallest = float.fromhex("0x1p-1070")
    return smallest * float("1") == 0.0


_PRECISIONS = (("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
_EINSUM = torch.backends.opt_einsum
# In the order in which they are set, and put back: the precision of matrix products also sets those after it.
_KNOBS = (
    _Knob("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    _Knob("gradients", torch.is_grad_enabled, torch.set_grad_enabled, True),
    _Knob("float32 matmul precision", _matmul_precision, _set_matmul_precision, "highest"),
    *(
        _Knob(f"fp32 precision of {backend} {what}", *_fp32_precision(backend, what), "none")  # torch's default: full
        for backend, what in _PRECISIONS
    ),
    _Knob("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    _Knob("flush denormals", _flushes_denormals, torch.set_flush_denormal, False),
    _Knob("oneDNN", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),
    _Knob("oneDNN deterministic", torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic, False),
    _Knob("NNPACK", torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, True),
    _Knob("opt_einsum", *_flag(_EINSUM, "enabled"), _EINSUM.is_available()),
    _Knob("opt_einsum strategy", *_flag(_EINSUM, "strategy"), "auto" if _EINSUM.is_available() else None),
    _Knob("flash attention", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, True),
    _Knob("plain attention", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
    _Knob(
        "memory-efficient attention",
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
        True,
    ),
    _Knob(
        "attention fast path", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, True
    ),
)
Precision = Literal["float32", "tf32", "bf16"]
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16}


# oneDNN and NNPACK have no setting for the same bits on another processor. Without them, products and convolutions are
# MKL's, and all else torch's own; the environment fixes the kernels of both (`errors.PORTABLE`).
_PORTABLE_KNOBS = tuple(dataclasses.replace(knob, needed=False) for knob in _KNOBS if knob.name in ("oneDNN", "NNPACK"))


# torch's older setting for all float32 products sets these, too, and cannot be read while they say something else. So
# where a run needs one of them to differ, it leaves the older setting alone; everywhere else they are put back with it.
_CUDA_PRECISIONS = tuple(
    _Knob(
        f"fp32 precision of cuda {what}",
        functools.partial(torch._C._get_fp32_precision_getter, "cuda", what),
        functools.partial(torch._C._set_fp32_precision_setter, "cuda", what),
        "ieee",
    )
    for what in ("matmul", "conv", "rnn")
)


def _device_knobs(kind: str, precision: Precision, deterministic: bool) -> tuple[_Knob, ...]:
    """The settings beside `_KNOBS` for a run on a device of this kind. None of them opens the device."""
    if kind == "cpu":
        return ()
    knobs = [_Knob("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode,
                   2 * deterministic)]  # fmt: skip
    if kind == "cuda":
        wanted = "tf32" if precision == "tf32" else "ieee"  # torch's default for convolutions is tf32
        knobs += [dataclasses.replace(knob, needed=wanted) for knob in _CUDA_PRECISIONS]
        cudnn = torch.backends.cudnn
        knobs += [
            _Knob("cuDNN deterministic", *_flag(cudnn, "deterministic"), deterministic),
            _Knob("cuDNN benchmark", *_flag(cudnn, "benchmark"), not deterministic),  # its choice varies with timing
        ]
    return tuple(knobs)


_HOOKS: dict[str, dict] = {
    name.removeprefix("_global_"): registered
    for owner in (module, optimizer)
    for name, registered in vars(owner).items()
    if name.startswith("_global_") and isinstance(registered, dict)
}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The settings that a run computes with, and those that the program had before."""

    needed: dict[str, Any]
    found: dict[str, Any]
    _knobs: tuple[_Knob, ...] = ()

    def check(self) -> None:
        """Refuse to go on if a setting was changed meanwhile: the result could not be repeated."""
        for knob in self._knobs:
            if (now := knob.get()) != knob.needed:
                raise SoleraError(
                    f"torch's global setting {knob.name!r} was changed to {_plain(now)} during the run, which needs "
                    f"{_plain(knob.needed)}: by a model or a task, or by another thread of the program; leave it alone"
                )


@contextlib.contextmanager
def numerics(
    threads: int | None = None,
    kind: str = "cpu",
    precision: Precision = "float32",
    deterministic: bool = True,
    portable: bool = False,
) -> Iterator[Numerics]:
    """Compute as if nothing had been set in torch, with so many `threads` (left out: as many as there are).

    On a `kind` of device other than the CPU it is set besides how precise products are, and whether only deterministic
    algorithms are used; `portable` leaves out what has other bits on another CPU. All that was set otherwise is put
    back at the end, whatever happens. What cannot be set aside is refused.
    """
    _refuse_what_stays()
    own = (*_device_knobs(kind, precision, deterministic), *(_PORTABLE_KNOBS if portable else ()))
    replaced = {o.name for o in own}
    if kind == "cuda" and precision == "tf32":
        replaced.add("float32 matmul precision")
    knobs = (*(k for k in _KNOBS if k.name not in replaced), *own)
    if threads is not None:  # their number changes the bits of a sum
        knobs += (_Knob("threads", torch.get_num_threads, torch.set_num_threads, threads),)
    with contextlib.ExitStack() as aside:
        found: dict[str, Any] = {}
        if torch.is_inference_mode_enabled():
            found["inference mode"] = "on"
            aside.enter_context(torch.inference_mode(False))
        for on in TRICKS:
            if _casts(on):
                found[f"autocast on {on}"] = str(torch.get_autocast_dtype(on))
                aside.enter_context(torch.autocast(on, enabled=False))
        if (device := torch.get_default_device()) != torch.device("cpu"):
            found["default device"] = str(device)
            aside.enter_context(torch.device("cpu"))
        before = [knob.get() for knob in knobs]
        beside = [knob.get() for knob in _CUDA_PRECISIONS]
        needed = {knob.name: _plain(knob.needed) for knob in knobs}
        usual = ("threads", *(k.name for k in _PORTABLE_KNOBS if portable))  # of these the program is not to be told
        found |= {
            k.name: _plain(b) for k, b in zip(knobs, before, strict=True) if b != k.needed and k.name not in usual
        }
        try:
            _set(knobs, [knob.needed for knob in knobs])
            half = f"{HALF[precision]} on {kind}" if precision in HALF else "off"  # `Placement.autocast` turns it on
            yield Numerics({**needed, "autocast": half, "default device": "cpu"}, found, knobs)
        finally:
            _set(knobs, before)
            _set(_CUDA_PRECISIONS, beside)


def _casts(kind: str) -> bool:
    """True if autocast is on there. Some kinds of devices (meta) have none."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _set(knobs: tuple[_Knob, ...], values: list[Any]) -> None:
    """Set what is not so already."""
    for knob, value in zip(knobs, values, strict=True):
        if knob.get() != value:
            knob.set(value)


def _refuse_what_stays() -> None:
    """Refuse to run under torch modes and global hooks that alter operations."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    foreign = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    foreign += ["a torch dispatch mode"] if torch._C._len_torch_dispatch_stack() else []
    foreign += ["a transform of torch.func"] if torch._C._functorch.maybe_current_level() is not None else []
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        foreign.append("torch.autograd.graph.saved_tensors_hooks")
    if foreign:
        raise ConfigError(f"{foreign[0]} is active and would change or see every operation: leave it first")
    for name, registered in _HOOKS.items():
        if registered:
            what = "every optimizer" if "optimizer" in name else "every module"
            raise ConfigError(
                f"a global hook for {what} of the program is registered ({name}) and may "
                "change results: remove it first (call .remove() on what its registration returned)"
            )


def _plain(value: Any) -> Any:
    """As it can be written to JSON."""
    return value if isinstance(value, bool | int | str | None) else str(value)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of glibc's settings (malloc.h)
LARGEST = 32 << 20  # bytes of one block; glibc allows no more
KEPT = 256 << 20  # bytes that stay although they are free


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory instead of returning it to the system; False if it cannot be asked.

    A training step takes and frees the same megabytes again and again. As it comes, glibc returns large blocks at once,
    and the system clears every page of the next one: up to a tenth of the time of a step. For the whole process, until
    it ends; nothing but speed and the memory that it seems to use depends on it.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is None:  # not glibc
        return False
    return bool(setting(MMAP_THRESHOLD, LARGEST)) and bool(setting(TRIM_THRESHOLD, KEPT))


# ---- devices ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tricks:
    """The settings that make one kind of device fast, or keep its bits. `TRICKS` has the reasons."""

    asked: int
    least_rows: int
    layout: torch.memory_format
    sgd: Callable[..., None]
    adam: Callable[..., None]
    set_allocator: Callable[[], bool]
    look_every: int
    reads_in_steps: bool
    float64: bool = True


def _leave_alone() -> bool:
    return False


_ACCELERATOR = Tricks(
    asked=1024,  # a small batch leaves most of an accelerator idle
    least_rows=1,  # nothing is gained by padding: kernels are chosen by the whole shape
    layout=torch.channels_last,  # what convolutions of half precision want; full precision takes either
    sgd=torch._fused_sgd_,  # one kernel, where each parameter's own would take longer to launch than to run
    adam=torch._fused_adam_,
    set_allocator=_leave_alone,  # torch keeps what is freed on a device anyway
    look_every=50,  # steps: reading a loss makes the program wait for all that was queued before it
    reads_in_steps=False,  # so what a step does may not depend on numbers that it would have to read, either
)

TRICKS: dict[str, Tricks] = {
    "cpu": Tricks(
        asked=128,  # samples a model is asked about at a time: of more, what a layer passes on leaves the caches
        least_rows=32,  # of a batch that is asked about: with fewer the kernels add up in another order
        layout=torch.channels_last,  # convolutions are up to a fifth faster to train, and up to a half to ask
        sgd=torch._fused_sgd_,  # all parameters in one call: of a small model's step a tenth would be bookkeeping
        adam=torch._fused_adam_,
        set_allocator=keep_freed_memory,  # pages that are cleared again and again take up to a tenth of a step
        look_every=1,  # a loss is there as soon as it is computed: a training that diverges ends at that very step
        reads_in_steps=True,  # texts by their lengths: a fifth less time than with all padding
    ),
    "cuda": _ACCELERATOR,
    "mps": dataclasses.replace(_ACCELERATOR, float64=False),  # Metal has no such type: torch raises
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
    """The kinds of devices, besides the CPU, whose generators count here."""
    return _OPENED


def device_memory(device: torch.device) -> int | None:
    """All the memory of a device, in bytes; None of one that does not tell. It opens the device."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[1])
    limit = getattr(module, "recommended_max_memory", None)  # mps
    return None if limit is None else int(limit())


def room_for(device: torch.device, size: int) -> torch.device:
    """`device`, if so many bytes leave half of its free memory to others, and the CPU if they do not."""
    if device == CPU:
        return device
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return device if ask is None or 2 * size <= ask(device)[0] else CPU


class OutOfMemory(SoleraError):
    """A device has too little memory for a run's settings."""


def within_memory(place: "Placement", work: Callable[[], T], way_out: str) -> T:
    """The result of `work`; one line that names the way out where the device has too little memory for it."""
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
        """From now on this process computes there: seeding also seeds the device's generators."""
        if self.device.type != "cpu":
            _OPENED.add(self.device.type)

    def release(self) -> None:
        """Give back what is not in use, to the other processes on this device."""
        gc.collect()
        getattr(torch.get_device_module(self.device), "empty_cache", lambda: None)()

    def numerics(self, threads: int | None = None) -> contextlib.AbstractContextManager[Numerics]:
        """Compute with the settings of this place, and with nothing that the program has set."""
        return numerics(threads, self.device.type, self.precision, self.deterministic, self.portable)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Have the device compute products in half precision, if that is what is set."""
        if self.precision not in HALF:
            return contextlib.nullcontext()
        # With its cache torch would use the weights of the first step until the end of this context, in every step.
        return torch.autocast(self.device.type, HALF[self.precision], cache_enabled=False)

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on this device: itself, or one copy, made when it is first asked for."""
        return tensor if tensor.device == self.device else self._once(tensor, lambda: self._bring(tensor))

    def _bring(self, tensor: Tensor) -> Tensor:
        self._kept += tensor.nbytes
        return tensor.to(self.device)

    def fits(self, tensor: Tensor) -> bool:
        """True if the tensor is here, or the budget has room for it."""
        if tensor.device == self.device or id(tensor) in self._there:
            return True
        budget = self.budget
        return budget is None or self._kept + tensor.nbytes <= budget

    @property
    def budget(self) -> int | None:
        """Bytes of data that may stay on the device; None: no limit is known."""
        if not hasattr(self, "_budget"):
            total = None if self.device.type == "cpu" else device_memory(self.device)
            self._budget = None if total is None else int(total * self.resident)
        return self._budget

    def module(self, template: nn.Module) -> nn.Module:
        """The same of a model that is never trained; copies of the result are on this device."""
        here = device_of(template) == self.device
        return template if here else self._once(template, lambda: copy.deepcopy(template).to(self.device))

    def _once(self, what: T, make: Callable[[], T]) -> T:
        if id(what) not in self._there:
            self._there[id(what)] = what, make()
        return self._there[id(what)][1]
