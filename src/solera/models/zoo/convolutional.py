"""Residual networks: the CIFAR ResNets, ResNet-18, and the wide WRN-16-2.

Shortcuts that change the shape are 1x1 convolutions with a norm layer (option B of He et al.): that is what gives the
78,042 parameters of FedDF's ResNet-8 and 272,474 of ResNet-20.

Without normalisation (norm = "none") the sum over the blocks would grow with depth, so each block then starts as its
shortcut alone: the last convolution of a block begins at zero and the first is scaled by 1/sqrt(blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import channel_shuffle, relu

from solera.core.errors import ConfigError
from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, GlobalMean, Norm, dense, dropout_rate, he_initialise, image_shape, widths_of


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, ReLU after the sum (He et al., CVPR 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=norm.bias)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=norm.bias)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=norm.bias),
                norm(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(x)))
        inner = self.norm2(self.conv2(inner))
        return relu(inner + self.shortcut(x))


class PreBlock(nn.Module):
    """Norm and ReLU before each convolution, the sum left as it is (Zagoruyko and Komodakis, BMVC 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.norm1 = norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=norm.bias)
        self.norm2 = norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=norm.bias)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        active = relu(self.norm1(x))
        inner = self.conv1(active)
        inner = self.conv2(self.dropout(relu(self.norm2(inner))))
        # A shortcut that changes the shape takes the activated input, as in the original.
        beside = x if self.shortcut is None else self.shortcut(active)
        total: Tensor = inner + beside
        return total


def _initialise(body: nn.Module, norm: Norm) -> None:
    he_initialise(body, normalised=norm.kind != "none")
    if norm.kind != "none":
        return
    blocks = [module for module in body.modules() if isinstance(module, Block | PreBlock)]
    with torch.no_grad():
        for block in blocks:
            block.conv1.weight.mul_(len(blocks) ** -0.5)
            block.conv2.weight.zero_()


def _resnet(channels: int, widths: tuple[int, ...], blocks: int, norm: Norm, large_stem: bool = False) -> Body:
    body = nn.Sequential()
    if large_stem:
        stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 7, stride=2, padding=3, bias=norm.bias),
            norm(widths[0]),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.ReLU(),
        )
    else:
        stem = nn.Sequential(nn.Conv2d(channels, widths[0], 3, padding=1, bias=norm.bias), norm(widths[0]), nn.ReLU())
    body.add_module("stem", stem)
    inputs = widths[0]
    for number, width in enumerate(widths, start=1):
        stage = nn.Sequential()
        for i in range(blocks):
            stride = 2 if i == 0 and number > 1 else 1
            stage.append(Block(inputs, width, stride, norm))
            inputs = width
        body.add_module(f"stage{number}", stage)
    body.add_module("pool", GlobalMean())
    _initialise(body, norm)
    return body, widths[-1]


def _add_cifar(name: str, blocks: int) -> None:
    @zoo_model(name)
    def resnet(shape: tuple[int, ...], norm: Norm) -> Body:
        return _resnet(image_shape(name, shape, smallest=8)[0], (16, 32, 64), blocks, norm)


def _add_wide(name: str, blocks: int) -> None:
    @zoo_model(name)
    def resnet(shape: tuple[int, ...], norm: Norm, stem: Literal["small", "large"] = "small") -> Body:
        channels, _, _ = image_shape(name, shape, smallest=8 if stem == "small" else 16)
        if stem not in ("small", "large"):
            raise ConfigError(f"model {name!r}: stem = {stem!r} is unknown; choose 'small' or 'large'")
        return _resnet(channels, (64, 128, 256, 512), blocks, norm, stem == "large")


for _name, _blocks in {"resnet8": 1, "resnet20": 3, "resnet32": 5, "resnet56": 9}.items():
    _add_cifar(_name, _blocks)
for _name, _blocks in {"resnet18": 2, "resnet8-wide": 1}.items():
    _add_wide(_name, _blocks)


@zoo_model("wrn16-2")
def wrn16_2(shape: tuple[int, ...], norm: Norm, dropout: float = 0.0) -> Body:
    channels, _, _ = image_shape("wrn16-2", shape, smallest=8)
    rate = dropout_rate(dropout)
    body = nn.Sequential()
    body.add_module("stem", nn.Conv2d(channels, 16, 3, padding=1, bias=norm.bias))
    inputs = 16
    for number, width in enumerate((32, 64, 128), start=1):
        first = PreBlock(inputs, width, 1 if number == 1 else 2, norm, rate)
        body.add_module(f"stage{number}", nn.Sequential(first, PreBlock(width, width, 1, norm, rate)))
        inputs = width
    body.add_module("norm", norm(inputs))
    body.add_module("relu", nn.ReLU())
    body.add_module("pool", GlobalMean())
    _initialise(body, norm)
    return body, inputs


# ---- ShuffleNetV2 for small images: a stem of stride 1 without pooling, then the three stages of the original


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


# ---- VGG networks for small images ---------------------------------------------------------------


# Widths of the convolutions, a group for each pooling that ends it.
Plan = tuple[tuple[int, ...], ...]

PLAN_9: Plan = ((32,), (64,), (128, 128), (256, 256), (256, 256))
PLAN_9_FEDMA: Plan = ((32, 64), (128, 128), (256, 256))
PLAN_11: Plan = ((64,), (128,), (256, 256), (512, 512), (512, 512))
PLAN_19: Plan = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)


def _convolutions(channels: int, plan: Plan, norm: Norm) -> nn.Sequential:
    layers = nn.Sequential()
    for stage, widths in enumerate(plan, start=1):
        for i, width in enumerate(widths, start=1):
            layers.add_module(f"conv{stage}_{i}", nn.Conv2d(channels, width, 3, padding=1))
            layers.add_module(f"norm{stage}_{i}", norm(width))
            if i == len(widths):  # before the ReLU: the same to the bit, for a quarter of the work
                layers.add_module(f"pool{stage}", nn.MaxPool2d(2, ceil_mode=True))
            layers.add_module(f"relu{stage}_{i}", nn.ReLU())
            channels = width
    he_initialise(layers, normalised=norm.kind != "none")
    return layers


def _dense(inputs: int, widths: Sequence[int], dropout: float) -> nn.Sequential:
    layers = dense(inputs, widths, dropout)
    he_initialise(layers)
    return layers


def _vgg(channels: int, plan: Plan, norm: Norm, hidden: Sequence[int], dropout: float) -> Body:
    widths = widths_of("hidden", hidden)
    rate = dropout_rate(dropout)
    features = plan[-1][-1]
    body = nn.Sequential()
    body.add_module("convolutions", _convolutions(channels, plan, norm))
    body.add_module("pool", GlobalMean())
    if widths:
        body.add_module("dense", _dense(features, widths, rate))
    elif rate:
        body.add_module("dropout", nn.Dropout(rate))
    return body, widths[-1] if widths else features


@zoo_model("vgg9")
def vgg9(shape: tuple[int, ...], hidden: Sequence[int] = (), dropout: float = 0.0) -> Body:
    channels, _, _ = image_shape("vgg9", shape, smallest=16)
    return _vgg(channels, PLAN_9, Norm("none"), hidden, dropout)


@zoo_model("vgg9-fedma")
def vgg9_fedma(shape: tuple[int, ...], dropout: float = 0.0) -> Body:
    channels, height, width = image_shape("vgg9-fedma", shape, smallest=8)
    pixels = prod(-(-side // 8) for side in (height, width))  # three halvings, rounded up
    body = nn.Sequential()
    body.add_module("convolutions", _convolutions(channels, PLAN_9_FEDMA, Norm("none")))
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", _dense(256 * pixels, (512, 512), dropout_rate(dropout)))
    return body, 512


def _add(name: str, plan: Plan) -> None:
    @zoo_model(name)
    def vgg(shape: tuple[int, ...], norm: Norm, hidden: Sequence[int] = (), dropout: float = 0.0) -> Body:
        return _vgg(image_shape(name, shape, smallest=16)[0], plan, norm, hidden, dropout)


_add("vgg11", PLAN_11)
_add("vgg19", PLAN_19)
