"""The losses of a training: their mean, and a check for divergence.

A loss on the CPU is read at every step, so a training ends at the step at which it diverges. Reading a number from an
accelerator makes the program wait for all queued work. There, a flag on the device records a wrong loss; it is read
every few steps (`placement.TRICKS`) and at the end. The steps in between are discarded.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.tensors import Weights, finite_there, is_finite
from ..place.placement import full_precision, tricks_of
from .optimizers import Optimizer


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
