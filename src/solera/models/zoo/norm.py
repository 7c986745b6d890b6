"""The normalisation switch: batch, group or none, the same for every layer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from solera.core.errors import ConfigError

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
        """Whether the convolution before the layer needs a bias of its own (a norm layer brings one)."""
        return self.kind == "none"
