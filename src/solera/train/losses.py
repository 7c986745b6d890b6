"""The losses of a training: their mean, and a check for divergence.

A loss on the CPU is read at every step, so a training ends at the step at which it diverges. Reading a number from an
accelerator makes the program wait for all queued work. There, a flag on the device records a wrong loss; it is read
every few steps (`placement.TRICKS`) and at the end. The steps in between are discarded.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.stopping import check_stop
from ..core.tensors import Weights, finite_there, is_finite
from ..place.placement import Tricks, full_precision, tricks_of

# ---- SGD and Adam on torch's fused kernels (`placement.TRICKS`), without the hooks and bookkeeping of `torch.optim`


class Optimizer(ABC):
    """Steps of `lr` along the gradients of `parameters`; those without a gradient are unchanged."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, weight_decay: float):
        self.parameters: list[Tensor] = list(parameters)
        self.lr, self.weight_decay = lr, weight_decay
        self._memory: list[dict[Tensor, Tensor]] = []
        # A kernel takes tensors of one type on one device.
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in self.parameters:
            kinds.setdefault((p.device, p.dtype), []).append(p)
        self._kinds = [(tricks_of(device), kind) for (device, _), kind in kinds.items()]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient. Raises if the run is to stop."""
        check_stop()
        for on, kind in self._kinds:
            moving: list[Tensor] = [p for p in kind if p.grad is not None]
            if moving:
                gradients = [p.grad for p in moving if p.grad is not None]
                self._move(on, moving, gradients, [[m[p] for p in moving] for m in self._memory])

    @abstractmethod
    def _move(self, on: Tricks, moving: list[Tensor], gradients: list[Tensor], memory: list[list[Tensor]]) -> None:
        """Move parameters of one kind; `memory` has the state kept for each of them, such as velocities."""


class Sgd(Optimizer):
    """w <- w - lr (g + weight_decay w), through a velocity v <- momentum v + g if there is momentum."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        super().__init__(parameters, lr, weight_decay)
        self.momentum = momentum
        self._memory = [{p: torch.zeros_like(p) for p in self.parameters}] if momentum else []

    def _move(self, on: Tricks, moving: list[Tensor], gradients: list[Tensor], memory: list[list[Tensor]]) -> None:
        on.sgd(
            moving, gradients, memory[0] if memory else [], weight_decay=self.weight_decay, momentum=self.momentum,
            lr=self.lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


class Adam(Optimizer):
    """Kingma and Ba, ICLR 2015, with beta = (0.9, 0.999), epsilon = 1e-8; weight decay is added to the gradient."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, weight_decay: float = 0.0):
        super().__init__(parameters, lr, weight_decay)
        first, second = ({p: torch.zeros_like(p) for p in self.parameters} for _ in range(2))
        steps = {p: torch.zeros((), device=p.device) for p in self.parameters}
        self._memory = [first, second, steps]

    def _move(self, on: Tricks, moving: list[Tensor], gradients: list[Tensor], memory: list[list[Tensor]]) -> None:
        first, second, steps = memory
        torch._foreach_add_(steps, 1)
        on.adam(
            moving, gradients, first, second, [], steps, lr=self.lr, beta1=0.9, beta2=0.999,
            weight_decay=self.weight_decay, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


def finite_loss(loss: Any) -> Any:
    """True if a loss, a number or a tensor, is finite."""
    return abs(loss) < math.inf


class Losses:
    """The losses of one training on `device`. `fine(loss)` checks one; `recent` is the mean of the last `kept`."""

    def __init__(self, device: torch.device, fine: Callable[[Any], Any], kept: int = 0):
        self.every = tricks_of(device).look_every
        self.steps = 0  # steps whose loss was fine, as far as is known
        self._fine = fine
        self._total: Any = 0.0
        self._last: deque[Any] = deque(maxlen=kept)
        self._flag: Tensor | None = None
        self.worst = math.nan  # the loss that was not fine, if it was read

    def add(self, loss: Tensor) -> bool:
        """Note the loss of a step before the step is taken; False if the training is known to have diverged."""
        if self.every == 1:
            value: Any = loss.item()
            if not self._fine(value):
                self.worst = value
                return False
        else:
            value = loss.detach().float()  # a sum of half precision would lose digits
            now = self._fine(value)
            self._flag = now if self._flag is None else self._flag & now
        self.steps, self._total = self.steps + 1, self._total + value
        self._last.append(value)
        return self.every == 1 or self.steps % self.every != 0 or self.look()

    def look(self) -> bool:
        """True if all losses so far were fine."""
        return self._flag is None or bool(self._flag)

    @property
    def mean(self) -> float:
        """The mean of all losses; nan without any."""
        return float(self._total) / self.steps if self.steps else math.nan

    def end(self, weights: Weights) -> tuple[bool, bool, float]:
        """Two flags, all losses were fine and the final weights are finite, and the mean loss.

        It takes one read from the device.
        """
        if not self.steps or self._flag is None:
            return True, not self.steps or is_finite(weights), self.mean
        told = torch.stack([self._flag.float(), finite_there(weights).float(), self._total.float()])
        fine, finite, total = told.tolist()
        return fine > 0, finite > 0, total / self.steps

    @property
    def recent(self) -> float | None:
        """The mean of the kept losses that are fine; None without any."""
        last = list(self._last) if self.every == 1 else [v for v in _read(self._last) if self._fine(v)]
        return sum(last) / len(last) if last else None


def _read(values: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(values)).tolist() if values else []


def backward(loss: Tensor, optimizer: Optimizer, inputs: Sequence[Tensor] | None = None) -> None:
    """Give the parameters of `optimizer` (or `inputs` alone) the gradient of `loss`, before the next step."""
    optimizer.zero_grad()
    with full_precision(loss.device):
        loss.backward(inputs=inputs)
