"""The parts that several models share: pooling, dense layers, normalisation, initialisation, and checks of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from solera.core.errors import ConfigError

# A model without its last layers: the module, and how many features it gives per sample.
Body = tuple[nn.Module, int]


class GlobalMean(nn.Module):
    """Mean over height and width: [n, C, H, W] -> [n, C]."""

    def forward(self, x: Tensor) -> Tensor:
        # Not AdaptiveAvgPool2d, whose gradient is not deterministic on CUDA.
        return x.mean(dim=(2, 3))


def dense(inputs: int, widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Fully connected layers with ReLU; dropout (if any) acts on the output of each."""
    layers = nn.Sequential()
    for i, width in enumerate(widths, start=1):
        layers.add_module(f"fc{i}", nn.Linear(inputs, width))
        layers.add_module(f"relu{i}", nn.ReLU())
        if dropout:
            layers.add_module(f"dropout{i}", nn.Dropout(dropout))
        inputs = width
    return layers


def he_initialise(module: nn.Module, normalised: bool = False) -> None:
    """He's normal initialisation of every convolution and dense layer in `module`, biases zero.

    Use it on layers that ReLU follows; the last layer of a head keeps PyTorch's own. Without normalisation layers the
    variance is set by a layer's inputs, which alone keeps the signal's scale through a deep model; with them
    (`normalised`) by its outputs, as the residual networks' authors do, for then only the gradients' scale matters.
    """
    for layer in module.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        if isinstance(layer, nn.Conv2d) and layer.groups > 1:  # depthwise: no ReLU follows
            nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="linear")
        else:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out" if normalised else "fan_in", nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def image_shape(name: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """The (channels, height, width) of an image model's input, at least `smallest` pixels a side."""
    if len(shape) != 3:
        raise ConfigError(
            f"model {name!r} takes images of shape (channels, height, width), not {shape}; "
            f"for token sequences use a text model such as 'text-bag'"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise ConfigError(
            f"model {name!r} needs images of at least {smallest}x{smallest} pixels, not {height}x{width}; "
            f"enlarge the images, or use a model with less pooling such as 'mcmahan-cnn' or 'mlp'"
        )
    return channels, height, width


def positive(option: str, value: int) -> int:
    """`value` if it is a whole number above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model option {option} = {value!r} is not a positive whole number")
    return value


def widths_of(option: str, values: Sequence[int], count: int | None = None) -> tuple[int, ...]:
    """`values` as a tuple if they are layer widths (`count` of them, if given)."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"model option {option} = {values!r} is not a list of whole numbers, such as [200, 200]")
    if count is not None and len(values) != count:
        raise ConfigError(f"model option {option} = {list(values)} must have {count} entries, not {len(values)}")
    return tuple(positive(option, value) for value in values)


def dropout_rate(value: float) -> float:
    """`value` if it can be a dropout probability."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"model option dropout = {value!r} must be at least 0 and below 1")
    return float(value)


# ---- the normalisation switch: batch, group or none, the same for every layer of a model ----

NormKind = Literal["batch", "group", "none"]

# Two groups is the most that every layer of every model here can be cut into: ShuffleNetV2 has layers of 58 channels.
DEFAULT_GROUPS = 2


@dataclass(frozen=True)
class Norm:
    """Gives the normalisation layer for a number of channels: `norm(64)`.

    `kind` "batch" is BatchNorm2d, "group" is GroupNorm with `groups` groups, "none" is nothing at all.
    """

    kind: NormKind = "batch"
    groups: int = DEFAULT_GROUPS

    def __post_init__(self) -> None:
        if self.kind not in get_args(NormKind):
            raise ConfigError(f"norm = {self.kind!r} is unknown; choose one of {', '.join(get_args(NormKind))}")
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or self.groups < 1:
            raise ConfigError(f"groups = {self.groups!r} is not a positive whole number")

    def __call__(self, channels: int) -> nn.Module:
        if self.kind == "batch":
            return nn.BatchNorm2d(channels)
        if self.kind == "none":
            return nn.Identity()
        if channels % self.groups:
            raise ConfigError(
                f"groups = {self.groups} does not divide the {channels} channels of a layer; "
                f"choose a divisor of every layer's channels ({DEFAULT_GROUPS} fits all models of `solera ls models`)"
            )
        return nn.GroupNorm(self.groups, channels)

    @property
    def bias(self) -> bool:
        """True if the convolution before the layer needs a bias of its own (a norm layer brings one)."""
        return self.kind == "none"
