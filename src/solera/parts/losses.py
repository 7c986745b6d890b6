"""The losses of a training: whether it still goes well, and their mean.

A loss on the CPU is read at every step, so a training ends at the very step at which it diverges. Reading a number from
an accelerator makes the program wait for all work that was queued before it. There, a flag remembers that a loss was
wrong; it is read every so many steps (`devices.TRICKS`) and at the end. What was trained in between is thrown away.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import full_precision, tricks_of
from ..tensors import Weights, finite_there, is_finite
from .optimizers import Optimizer


def finite_loss(loss: Any) -> Any:
    """Whether a loss, a number or a tensor, is a finite number."""
    return abs(loss) < math.inf


class Losses:
    """The losses of one training on `device`. `fine(loss)` says which are; the last `kept` of them have a mean."""

    def __init__(self, device: torch.device, fine: Callable[[Any], Any], kept: int = 0):
        self.every = tricks_of(device).look_every
        self.steps = 0  # whose loss was fine, as far as is known
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
        """Whether all losses so far were fine."""
        return self._flag is None or bool(self._flag)

    @property
    def mean(self) -> float:
        """Of all losses; nan without any."""
        return float(self._total) / self.steps if self.steps else math.nan

    def end(self, weights: Weights) -> tuple[bool, bool, float]:
        """Whether all losses were fine, whether the weights after the last step are finite, and the mean loss.

        From a device it is one read.
        """
        if not self.steps or self._flag is None:
            return True, not self.steps or is_finite(weights), self.mean
        told = torch.stack([self._flag.float(), finite_there(weights).float(), self._total.float()])
        fine, finite, total = told.tolist()
        return fine > 0, finite > 0, total / self.steps

    @property
    def recent(self) -> float | None:
        """The mean of the last ones that were kept and fine; None without any."""
        last = list(self._last) if self.every == 1 else [v for v in _read(self._last) if self._fine(v)]
        return sum(last) / len(last) if last else None


def _read(values: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(values)).tolist() if values else []


class Skipped(NamedTuple):
    """What the scale did to a training."""

    steps: int = 0  # that were not taken, because their gradients were not finite
    rates: float = 0.0  # the sum of the learning rates of those that were
    all_lost: bool = False  # none was, or gradients overflow that are not even scaled


class Scaler:
    """Keeps small gradients of half precision (fp16) from vanishing: losses are multiplied, gradients divided again.

    A step whose gradients are not finite is skipped, and the factor is halved; after many good steps it is doubled.
    All of it stays on the device. `Scaler.of` gives none where nothing is computed in fp16.
    """

    # torch's, but for the first, which is 2^16 there: it lost five of the first six steps of a CNN until the factor was
    # small enough. A client's training may have no more.
    BEGIN, GROWTH, BACKOFF, PATIENCE = 2.0**10, 2.0, 0.5, 2000

    def __init__(self, device: torch.device):
        self.scale = torch.full((1,), self.BEGIN, device=device)
        self._good = torch.zeros(1, dtype=torch.int32, device=device)
        self.bad = torch.zeros(1, device=device)
        self._skipped, self._taken, self._rates = (torch.zeros(1, device=device) for _ in range(3))

    @classmethod
    def of(cls, device: torch.device) -> "Scaler | None":
        """For a training on `device`; None unless products are computed in fp16 there."""
        if device.type == "cpu" or not torch.is_autocast_enabled(device.type):
            return None
        return cls(device) if torch.get_autocast_dtype(device.type) == torch.float16 else None

    def unscale(self, parameters: Sequence[Tensor], lr: float = 0.0) -> Tensor:
        """Divide the gradients again, for a step of `lr`; returns 1 if one of them is not finite, and 0 otherwise."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.bad.zero_()
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.bad, self.scale.reciprocal())
            torch._amp_update_scale_(self.scale, self._good, self.bad, self.GROWTH, self.BACKOFF, self.PATIENCE)
        self._skipped += self.bad
        self._taken += 1 - self.bad
        self._rates += lr * (1 - self.bad)
        return self.bad

    def skipped(self) -> Skipped:
        """What came of all steps so far: one read."""
        skipped, taken, rates, scale = torch.cat([self._skipped, self._taken, self._rates, self.scale]).tolist()
        return Skipped(int(skipped), rates, skipped > 0 and (taken == 0 or scale < 1))


def backward(loss: Tensor, optimizer: Optimizer, scaler: Scaler | None, inputs: Sequence[Tensor] | None = None) -> None:
    """Give the parameters of `optimizer` (or `inputs` alone) the gradient of `loss`, before the next step.

    With a `scaler` it is scaled meanwhile, and the next step is skipped if it is not finite.
    """
    optimizer.zero_grad()
    with full_precision(loss.device):
        if scaler is None:
            loss.backward(inputs=inputs)
            return
        (loss * scaler.scale[0]).backward(inputs=inputs)
    optimizer.skip = scaler.unscale(optimizer.parameters, optimizer.lr)
