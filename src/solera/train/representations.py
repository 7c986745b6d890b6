"""Representations: the output of a split model before its head, and MOON's objective on them.

Here a split model is any model with `represent(x)`, which is the input of its `head`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.tensors import Inputs, Views, draw, is_fresh, take
from .fitting import logits_of
from .objectives import Objective
from .teachers import Targets


class Split(Protocol):
    """A model in two steps: head(represent(x))."""

    head: Callable[[Tensor], Tensor]

    def represent(self, x: Tensor) -> Tensor: ...


class _Encoder(nn.Module):
    """A split model without its head."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return cast(Split, self.model).represent(x)


def representations_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """The representations of `inputs`, in evaluation mode and without gradients; `model` does not change."""
    return logits_of(_Encoder(model), inputs)


def represented(model: nn.Module, inputs: Inputs) -> Inputs:
    """The same as samples to train a head on: fresh samples are represented when they are drawn."""
    if not is_fresh(inputs):
        return representations_of(model, inputs)
    return Views(
        len(inputs),
        lambda rows: representations_of(model, take(inputs, rows)),
        lambda rows, seed: representations_of(model, draw(inputs, rows, seed)),
    )


def contrast(z: Tensor, near: Tensor, far: Sequence[Tensor], temperature: float) -> Tensor:
    """-log(e^(cos(z, near)/T) / (e^(cos(z, near)/T) + sum of e^(cos(z, z')/T) over z' in far)), mean over the batch."""
    alike = torch.stack([F.cosine_similarity(z, other, dim=-1) for other in (near, *far)], 1)
    return F.cross_entropy(alike / temperature, torch.zeros(len(z), dtype=torch.int64, device=z.device))


def contrastive(
    mu: float, temperature: float, labels: Tensor, frozen: Callable[[Tensor, Tensor], Targets]
) -> Objective:
    """Cross-entropy plus mu times `contrast`, as a function of (model, inputs, their positions in the data).

    `frozen(inputs, positions)` are the frozen models' representations of these samples (see `teachers.by_position`),
    that of the near model first. With mu = 0 this is exactly the cross-entropy.
    """

    def objective(model: nn.Module, inputs: Tensor, positions: Tensor) -> Tensor:
        split = cast(Split, model)
        z = split.represent(inputs)
        loss = F.cross_entropy(split.head(z), labels[positions])
        if mu == 0:
            return loss
        near, *far = frozen(inputs, positions)
        return loss + mu * contrast(z, near, far, temperature)

    return objective
