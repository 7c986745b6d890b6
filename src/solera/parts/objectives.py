"""What a client minimises on its own data: functions of (model, inputs, labels)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norms import train_mode

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


def in_pieces(objective: Callable[..., Tensor], n: int) -> Callable[..., Tensor]:
    """`objective(model, inputs, *what belongs to them)`, a mean over samples, computed in n pieces of a minibatch.

    Only one piece's activations are in memory: its gradient is computed before the next piece. `backward` of the result
    gives the parameters the sum.
    """

    def divided(model: nn.Module, inputs: Tensor, *others: Tensor) -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        value, total = inputs.new_zeros((), dtype=torch.float32), [torch.zeros_like(p) for p in parameters]
        for part in zip(*(t.chunk(n) for t in (inputs, *others)), strict=True):
            loss = objective(model, *part) * (len(part[0]) / len(inputs))
            gradient = torch.autograd.grad(loss, parameters, materialize_grads=True)
            torch._foreach_add_(total, gradient)
            value = value + loss.detach()
        return _WithGradient.apply(value, total, *parameters)

    return divided


class _WithGradient(torch.autograd.Function):
    """A number with a gradient that is known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, None, *(outer[0] * g for g in ctx.gradient)


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the batch."""
    return log_loss(model(inputs), labels)


# A loss with this mark is a mean over samples, plus what does not depend on them: it can be computed in pieces.
cross_entropy.of_samples = True  # type: ignore[attr-defined]


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits [..., classes] against labels [...]: one label for each sample, or for each token of
    a sample."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def proximal(mu: float, received: dict[str, Tensor], objective: Objective = cross_entropy) -> Objective:
    """`objective` plus mu/2 ||y - x||^2, with x the weights the client `received` (FedProx).

    The term covers parameters, not buffers. With mu = 0 this is exactly `objective`.
    """
    if mu < 0:
        raise ValueError(f"mu (the proximal factor) must not be negative, not {mu}")
    return objective if mu == 0 else Proximal(mu, received, objective)


@dataclass(frozen=True, eq=False)
class Proximal:
    """What `proximal` returns."""

    mu: float
    received: dict[str, Tensor]
    objective: Objective

    @property
    def of_samples(self) -> bool:
        """Whether it can be computed in pieces."""
        return getattr(self.objective, "of_samples", False)

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        pairs = ((p, self.received[name]) for name, p in model.named_parameters() if p.requires_grad)
        squares = [(p - x).square().sum() for p, x in pairs]
        return self.objective(model, inputs, labels) + self.mu / 2 * torch.stack(squares).sum()


def towards(loss: Callable[[Tensor, Tensor], Tensor], frozen: bool = False) -> Objective:
    """`loss(logits, targets)`, for samples with a row of targets instead of a label.

    With `frozen`, BatchNorm layers use their running statistics.
    """

    def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        if frozen:
            train_mode(model, frozen=True)
        return loss(model(inputs), targets)

    return objective
