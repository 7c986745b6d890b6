"""Representations: the output of a split model before its head, and MOON's objective on them.

Here a split model is any model with `represent(x)`, which is the input of its `head`.
"""

from collections.abc import Callable
from typing import Protocol, cast

from torch import Tensor, nn

from ..core.tensors import Inputs, Views, draw, is_fresh, take
from .fitting import logits_of


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
