"""The two forms of data in every computation: weights (tensors by name) and samples (tensors by row)."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

# ---- weights ----------------------------------------------------------------------------------------

Weights = dict[str, Tensor]
Shapes = dict[str, list[int]]
LARGE = 1 << 16  # bytes from which on a tensor that another process has sent is not copied


CPU = torch.device("cpu")  # weights are always here; models, samples and answers may be on another device


def weights_of(model: nn.Module) -> Weights:
    """A copy of the parameters and buffers of `model` on the CPU, always in the same memory layout."""
    return {
        name: t.detach().to(CPU, copy=True, memory_format=torch.contiguous_format)
        for name, t in model.state_dict().items()
    }


FROZEN = "frozen_names"  # attribute of a module: names of its buffers that never change, such as LoRA's base


def frozen_of(model: nn.Module) -> Weights:
    """The tensors of `model` that are not part of its weights because they never change; usually none."""
    return {
        f"{path}.{name}" if path else name: getattr(module, name)
        for path, module in model.named_modules()
        for name in getattr(module, FROZEN, ())
    }


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of `model` to train or to load weights into. What is frozen is shared, not copied."""
    return copy.deepcopy(model, {id(t): t for t in frozen_of(model).values()})


def device_of(model: nn.Module, otherwise: torch.device = CPU) -> torch.device:
    """The device of `model`, that of its first tensor; `otherwise` for one without any."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return otherwise


def beside(model: nn.Module, weights: Weights) -> Weights:
    """`weights` on the device of `model`, for a training that uses both; not copied if they are already there."""
    device = device_of(model)
    return weights if device == CPU else {name: sent(t, device) for name, t in weights.items()}


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. Only a copy from an accelerator waits for the work that is queued there."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=tensor.device == CPU)


def is_finite(weights: Weights) -> bool:
    """True if no number in `weights` is infinite or NaN."""
    numbers = [t for t in weights.values() if t.is_floating_point()]
    if not numbers or numbers[0].device == CPU:
        return all(bool(torch.isfinite(t).all()) for t in numbers)
    return bool(finite_there(weights))  # one read from the device


def finite_there(weights: Weights) -> Tensor:
    """The same, as a tensor that stays on the device of the weights. `weights` must not be empty."""
    return torch.stack([torch.isfinite(t).all() for t in weights.values() if t.is_floating_point()]).all()


def to_bytes(t: Tensor) -> Any:
    """A tensor for another process, without a copy: an array of bytes, dtype, shape and strides. The strides are
    kept, because the order in memory determines the order of sums in kernels."""
    if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized or not t.numel():
        return t.__reduce_ex__(2)[:2]
    plain = t.detach()
    if _span(plain) > t.numel():  # with gaps: a part of something larger
        plain = plain.contiguous()
    array = plain.as_strided((_span(plain),), (1,)).view(torch.uint8).numpy()
    return array, t.dtype, tuple(t.shape), plain.stride(), t.requires_grad


def _span(t: Tensor) -> int:
    """The number of elements between a tensor's first and last position in memory, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))


def from_bytes(told: Any) -> Tensor:
    """Rebuild the tensor of `to_bytes`. A large one views memory that processes may share: never write to it."""
    if len(told) == 2:
        make, arguments = told
        return make(*arguments)
    array, dtype, shape, strides, requires_grad = told
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only
        t = torch.from_numpy(array).view(dtype).as_strided(shape, strides)
    return (t if array.nbytes >= LARGE else t.clone()).requires_grad_(requires_grad)


# ---- samples ----------------------------------------------------------------------------------------


class Samples(Protocol):
    """Samples ready for a model. `[]` always gives the same values: it is used to predict and to evaluate.

    A training step uses `draw`: the same rows with the same seed give the same values. If samples are `fresh`,
    another seed gives other values (augmentation). A prediction then holds for one draw and cannot be cached by row.
    """

    @property
    def fresh(self) -> bool: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: Tensor, /) -> Tensor: ...
    def draw(self, rows: Tensor, seed: int) -> Tensor: ...


Inputs = Tensor | Samples  # a tensor has one sample per row, the same at every draw


@dataclass(frozen=True)
class Views:
    """Samples that are computed when they are read: by `[]`, or by `draw` for a seed."""

    size: int
    taken: Callable[[Tensor], Tensor]
    drawn: Callable[[Tensor, int], Tensor]
    fresh: bool = True

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.taken(rows)

    def draw(self, rows: Tensor, seed: int) -> Tensor:
        return self.drawn(rows, seed)


@dataclass(frozen=True)
class Brought:
    """Samples that do not fit on a device: rows are copied there when they are read, and prepared for a model."""

    kept: Tensor
    device: torch.device
    prepare: Callable[[Tensor], Tensor]
    fresh: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.prepare(sent(self.kept.index_select(0, rows.to(CPU)), self.device))

    def draw(self, rows: Tensor, seed: int) -> Tensor:
        return self[rows]


def rows_of(*tables: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The rows of `tables` at some positions, as a function. Tables are copied once to the device of the positions."""
    there: dict[torch.device, tuple[Tensor, ...]] = {}

    def look_up(positions: Tensor) -> tuple[Tensor, ...]:
        device = positions.device
        if device not in there:
            there[device] = tuple(sent(t, device) for t in tables)
        return tuple(t[positions] for t in there[device])

    return look_up


def is_fresh(inputs: Inputs) -> bool:
    """True if samples differ between draws."""
    return getattr(inputs, "fresh", False)


def take(inputs: Inputs, rows: Tensor) -> Tensor:
    """These samples, the same values at every call."""
    if isinstance(inputs, Tensor):
        return inputs.index_select(0, sent(rows, inputs.device))  # five times as fast as []
    return inputs[rows]


def draw(inputs: Inputs, rows: Tensor, seed: int) -> Tensor:
    """These samples as drawn for a training step."""
    return inputs.draw(rows, seed) if is_fresh(inputs) else take(inputs, rows)  # type: ignore[union-attr]


def batches(inputs: Inputs, size: int) -> Iterable[Tensor]:
    """All samples in order, in batches, as `take` gives them."""
    if isinstance(inputs, Tensor):
        return inputs.split(size)
    return (inputs[rows] for rows in torch.arange(len(inputs)).split(size))


def subset(inputs: Inputs, rows: Tensor) -> Inputs:
    """Only these samples, in this order."""
    if isinstance(inputs, Tensor):
        return take(inputs, rows)
    taken, drawn = lambda some: inputs[rows[some]], lambda some, seed: draw(inputs, rows[some], seed)
    return Views(len(rows), taken, drawn, is_fresh(inputs))


def joined(first: Inputs, second: Tensor) -> Inputs:
    """The samples of both, one after the other."""
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    n = len(first)

    def both(look: Callable[..., Tensor], rows: Tensor, *seed: int) -> Tensor:
        own, out = rows < n, second.new_empty((len(rows), *second.shape[1:]))
        mine, others = (mask.nonzero().flatten().to(out.device) for mask in (own, ~own))
        out[mine], out[others] = look(rows[own], *seed), take(second, rows[~own] - n)
        return out

    return Views(
        n + len(second), partial(both, partial(take, first)), partial(both, partial(draw, first)), is_fresh(first)
    )
