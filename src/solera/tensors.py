"""Weights: a model's state dict as tensors by name, and what is asked of them everywhere."""

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
Shapes = dict[str, list[int]]


def weights_of(model: nn.Module) -> Weights:
    """A copy of the parameters and buffers of `model`, in one memory layout whatever the model's own."""
    return {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in model.state_dict().items()}


def is_finite(weights: Weights) -> bool:
    """Whether no number in `weights` is infinite or not a number."""
    return all(bool(torch.isfinite(t).all()) for t in weights.values() if t.is_floating_point())
