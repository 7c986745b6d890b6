"""ShuffleNetV2 for small images: a stem of stride 1 without pooling, then the three stages of the original."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import channel_shuffle

from solera.core.errors import ConfigError
from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, GlobalMean, Norm, he_initialise, image_shape

# Channels of the three stages and of the last convolution, by width.
WIDTHS = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
STAGE_UNITS = (4, 8, 4)


def _pointwise(inputs: int, outputs: int, norm: Norm) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 1, bias=norm.bias), norm(outputs), nn.ReLU()]


def _depthwise(channels: int, stride: int, norm: Norm) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, groups=channels, bias=norm.bias)
    return [conv, norm(channels)]


class Unit(nn.Module):
    """Half of the channels pass, the other half is convolved; then the halves are shuffled."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            *_pointwise(half, half, norm), *_depthwise(half, 1, norm), *_pointwise(half, half, norm)
        )

    def forward(self, x: Tensor) -> Tensor:
        passed, convolved = x.chunk(2, dim=1)
        return channel_shuffle(torch.cat([passed, self.branch(convolved)], dim=1), 2)


class DownUnit(nn.Module):
    """Halves height and width: both branches see all channels, each gives half of the new ones."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        half = outputs // 2
        self.left = nn.Sequential(*_depthwise(inputs, 2, norm), *_pointwise(inputs, half, norm))
        self.right = nn.Sequential(
            *_pointwise(inputs, half, norm), *_depthwise(half, 2, norm), *_pointwise(half, half, norm)
        )

    def forward(self, x: Tensor) -> Tensor:
        return channel_shuffle(torch.cat([self.left(x), self.right(x)], dim=1), 2)


@zoo_model("shufflenetv2")
def shufflenetv2(shape: tuple[int, ...], norm: Norm, width: float = 1.0) -> Body:
    channels, _, _ = image_shape("shufflenetv2", shape, smallest=8)
    if width not in WIDTHS:
        raise ConfigError(f"model 'shufflenetv2': width = {width!r} is unknown; choose one of 0.5, 1, 1.5, 2")
    *stages, last = WIDTHS[width]
    body = nn.Sequential()
    body.add_module("stem", nn.Sequential(nn.Conv2d(channels, 24, 3, padding=1, bias=norm.bias), norm(24), nn.ReLU()))
    inputs = 24
    for number, (outputs, units) in enumerate(zip(stages, STAGE_UNITS, strict=True), start=1):
        following = [Unit(outputs, norm) for _ in range(units - 1)]
        body.add_module(f"stage{number}", nn.Sequential(DownUnit(inputs, outputs, norm), *following))
        inputs = outputs
    body.add_module("last", nn.Sequential(*_pointwise(inputs, last, norm)))
    body.add_module("pool", GlobalMean())
    he_initialise(body, normalised=norm.kind != "none")
    return body, last
