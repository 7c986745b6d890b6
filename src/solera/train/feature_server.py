"""A server model on features that clients extract, and the objective for distillation in both directions (FedGKT)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.tensors import Inputs, rows_of
from .distill import kd_loss
from .fitting import logits_of
from .objectives import Objective

# ---- the clients' features --------------------------------------------------------------------------


class _Tapped(nn.Module):
    """A model that also returns the output of one of its layers: flattened features, then logits."""

    def __init__(self, model: nn.Module, layer: str):
        super().__init__()
        self.model, self.layer = model, layer
        self.seen: list[Any] = []
        self.shape: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        hook = self.model.get_submodule(self.layer).register_forward_hook(lambda _, i, out: self.seen.append(out))
        try:
            logits = self.model(x)
        finally:
            hook.remove()
        fine = len(self.seen) == 1 and isinstance(self.seen[0], Tensor) and len(self.seen[0]) == len(x)
        if not fine or self.seen[0].ndim < 2 or not self.seen[0].is_floating_point():
            raise ValueError(f"the layer {self.layer!r} does not give one row of features per sample")
        features = self.seen.pop()
        self.shape = tuple(features.shape[1:])
        return torch.cat([features.flatten(1), logits], 1)


def extract(model: nn.Module, inputs: Inputs, layer: str) -> tuple[Tensor, Tensor]:
    """The output of the layer named `layer` and of the whole model, in evaluation mode: (features, logits)."""
    tapped = _Tapped(model, layer)
    rows = logits_of(tapped, inputs)
    size = torch.Size(tapped.shape).numel()
    return rows[:, :size].reshape(-1, *tapped.shape), rows[:, size:].contiguous()


# ---- the server's model -----------------------------------------------------------------------------


class _Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.layers(x)
        return x + change


class _PixelMean(nn.Module):
    """Mean over height and width: [n, C, H, W] -> [n, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


Kind = Literal["residual", "vgg19"]
VGG19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)  # widths; a halving ends each group


def tower(shape: Sequence[int], classes: int, hidden: int, layers: int, kind: Kind = "residual") -> nn.Module:
    """A network from features of one `shape` to logits: residual (see `_residual`), or a VGG-19 on feature maps."""
    check_shape(shape)
    return _residual(shape, classes, hidden, layers) if kind == "residual" else _vgg19(shape, classes)


def _vgg19(shape: Sequence[int], classes: int) -> nn.Module:
    """The convolutions of a VGG-19 without normalisation, their mean over pixels, and a classifier."""
    if len(shape) != 3:
        raise ValueError(f"a VGG-19 takes feature maps (channels, height, width), not features of shape {tuple(shape)}")
    found, channels = nn.Sequential(), shape[0]
    for widths in VGG19:
        for width in widths:
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            found.extend([convolution, nn.ReLU()])
            channels = width
        found.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*found, _PixelMean(), nn.Linear(channels, classes))


def _residual(shape: Sequence[int], classes: int, hidden: int, layers: int) -> nn.Module:
    """A residual network from features of one `shape` to logits, of width `hidden`, with `layers` residual blocks.

    Feature vectors (one number in `shape`) get dense blocks, feature maps (channels, height, width) 3x3 convolutions
    at half the resolution. Normalisation is by sample, never by batch: one batch mixes clients whose extractors differ
    in scale, and a prediction must not depend on the rest of the batch.
    """
    if len(shape) == 1:
        blocks = [
            _Residual(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
            for _ in range(layers)
        ]
        return nn.Sequential(
            nn.LayerNorm(shape[0]), nn.Linear(shape[0], hidden), *blocks, nn.LayerNorm(hidden), nn.ReLU(),
            nn.Linear(hidden, classes),
        )  # fmt: skip

    def convolution(inputs: int, stride: int = 1) -> nn.Module:
        return nn.Conv2d(inputs, hidden, 3, stride=stride, padding=1)

    maps = [
        _Residual(nn.GroupNorm(1, hidden), convolution(hidden), nn.ReLU(), convolution(hidden)) for _ in range(layers)
    ]
    return nn.Sequential(
        nn.GroupNorm(1, shape[0]), convolution(shape[0], stride=2), *maps, nn.GroupNorm(1, hidden), nn.ReLU(),
        _PixelMean(), nn.Linear(hidden, classes),
    )  # fmt: skip


def tower_with(
    weights: dict[str, Tensor], shape: Sequence[int], classes: int, hidden: int, layers: int, kind: Kind = "residual"
) -> nn.Module:
    """A `tower` with copies of these weights. No random initialisation is computed."""
    with torch.device("meta"):
        made = tower(shape, classes, hidden, layers, kind)
    made.load_state_dict({name: t.clone() for name, t in weights.items()}, assign=True)
    return made


def check_shape(shape: Sequence[int]) -> None:
    """Refuse features of an unsupported shape."""
    if len(shape) not in (1, 3) or min(shape) < 1:
        raise ValueError(f"features are vectors or maps (channels, height, width), not of shape {tuple(shape)}")


# ---- distillation in both directions ----------------------------------------------------------------


def transfer_loss(logits: Tensor, labels: Tensor, teacher: Tensor, alpha: float, temperature: float) -> Tensor:
    """CE(logits, labels) + alpha T^2 KL(softmax(teacher / T) || softmax(logits / T)), mean over the batch."""
    return F.cross_entropy(logits, labels) + alpha * kd_loss(logits, teacher, temperature, t_squared=True)


def taught(labels: Tensor, teacher: Tensor | None, alpha: float, temperature: float) -> Objective:
    """`transfer_loss` as a function of (model, inputs, their positions in the data); without a teacher, CE alone.

    Row i of `labels` and of `teacher` belongs to sample i of the data, for any order of samples and batches.
    """

    rows = rows_of(labels) if teacher is None else rows_of(labels, teacher)

    def objective(model: nn.Module, inputs: Tensor, positions: Tensor) -> Tensor:
        if teacher is None:
            return F.cross_entropy(model(inputs), rows(positions)[0])
        y, said = rows(positions)
        return transfer_loss(model(inputs), y, said, alpha, temperature)

    return objective


def epochs_at(round: int, first: int, rounds: Sequence[int], epochs: Sequence[int]) -> int:
    """The number of epochs in a round: `first`, and from round `rounds[i]` on `epochs[i]`."""
    return [first, *(e for begin, e in zip(rounds, epochs, strict=True) if round >= begin)][-1]
