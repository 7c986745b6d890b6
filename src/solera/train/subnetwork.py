"""Sub-networks: the first channels of every hidden layer (HeteroFL; Diao et al., ICLR 2021).

A rate r keeps the first ceil(r * width) channels of each hidden layer, and all inputs and logits of the model. The
sub-network of a smaller rate is contained in that of a larger one, so one set of weights serves devices with different
resources. Every tensor of a sub-network is the leading block of the full model's tensor.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.tensors import Shapes, Weights
from .chain import read
from .objectives import Objective


def kept(rate: float, width: int) -> int:
    """ceil(rate * width), robust to rounding of the product: 0.07 of 100 channels are 7."""
    return math.ceil(rate * width - 1e-9)


def sub_shapes(model: nn.Module, rate: float) -> Shapes:
    """The shape of every tensor of the sub-network with this rate; ValueError if the model has none."""
    structure, weights = read(model), model.state_dict()
    whole = (0, structure.output)  # the model's input and its logits
    width = [w if i in whole else kept(rate, w) for i, w in enumerate(structure.widths)]
    shapes = {name: list(t.shape) for name, t in weights.items()}
    for layer in structure.layers:
        for name in layer.own(weights):
            size = shapes[name]
            if layer.kind != "norm" and size:
                size[0] = width[layer.writes]
            if layer.reads not in whole and layer.kind == "norm" and size:
                size[0] = width[layer.reads] * layer.block
            elif layer.reads not in whole and len(size) > 1:
                size[1] = width[layer.reads] * layer.block
        norm = model.get_submodule(layer.name)
        if isinstance(norm, nn.GroupNorm) and shapes[layer.weight][0] % norm.num_groups:
            raise ValueError(
                f"its layer {layer.name!r} has {norm.num_groups} groups, which do not divide the "
                f"{shapes[layer.weight][0]} channels that rate {rate:g} leaves"
            )
    return shapes


def output_tensors(model: nn.Module) -> list[str]:
    """The tensors with a row for each class: those of the layers that output the logits."""
    structure = read(model)
    last = [layer for layer in structure.layers if layer.writes == structure.output and layer.kind != "norm"]
    return [name for layer in last for name in layer.own(model.state_dict())]


def cut(weights: Weights, shapes: Mapping[str, Sequence[int]]) -> Weights:
    """The leading block of every tensor, with these shapes."""
    return {name: _leading(t, shapes[name]).clone(memory_format=torch.contiguous_format) for name, t in weights.items()}


def mean_over_holders(
    old: Weights, groups: Sequence[tuple[Weights, float]], held: Mapping[str, Sequence[Tensor]]
) -> Weights:
    """The element-wise mean over the groups that hold an element; elements that no group holds do not change.

    A group is the mean of its members' weights and their total weight. For the tensors named in `held`, that mean had
    zeros for members without the class of a row, and held[name][g] is the share of group g with the class.
    """
    new = {}
    for name, t in old.items():
        if not t.is_floating_point():  # counters
            new[name] = torch.stack([t, *(weights[name] for weights, _ in groups)]).amax(0)
            continue
        total, count = (torch.zeros_like(t, dtype=torch.float64) for _ in range(2))
        for g, (weights, n) in enumerate(groups):
            part = weights[name]
            _leading(total, part.shape).add_(part.double() * n)
            _leading(count, part.shape).add_(n * by_row(held[name][g].double(), part) if name in held else n)
        new[name] = torch.where(count > 0, total / count.where(count > 0, 1.0), t.double()).to(t.dtype)
    return new


def scale_in_training(model: nn.Module, whole: nn.Module, rate: float) -> None:
    """The scaler: divides the output of a narrowed layer by the rate while the model trains.

    Fewer channels have a smaller sum. Without the scaler, later layers would be trained on smaller inputs than they get
    in the full model, which predicts without a scaler.
    """
    layers = dict(whole.named_modules())
    if rate == 1:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear) and len(layer.weight) < len(layers[name].weight):
            layer.register_forward_hook(lambda m, _, output: output / rate if m.training else output)


def masked_cross_entropy(held: Tensor) -> Objective:
    """Cross-entropy with the logits of classes that are not `held` (a mask of all classes) set to 0."""

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).masked_fill(~held, 0.0), labels)

    return loss


def by_row(values: Tensor, like: Tensor) -> Tensor:
    """One value for each row, shaped to broadcast with `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _leading(t: Tensor, shape: Sequence[int]) -> Tensor:
    return t[tuple(slice(s) for s in shape)]
