"""Objectives of training on a client's own data: functions of (model, inputs, labels)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norms import train_mode

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the batch."""
    return log_loss(model(inputs), labels)


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
    """The objective that `proximal` returns."""

    mu: float
    received: dict[str, Tensor]
    objective: Objective

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
