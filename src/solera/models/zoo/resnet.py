"""Residual networks: the CIFAR ResNets, ResNet-18, and the wide WRN-16-2.

Shortcuts that change the shape are 1x1 convolutions with a norm layer (option B of He et al.): that is what gives the
78,042 parameters of FedDF's ResNet-8 and 272,474 of ResNet-20.

Without normalisation (norm = "none") the sum over the blocks would grow with depth, so each block then starts as its
shortcut alone: the last convolution of a block begins at zero and the first is scaled by 1/sqrt(blocks).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from solera.core.errors import ConfigError
from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, GlobalMean, dropout_rate, he_initialise, image_shape
from solera.models.zoo.norm import Norm


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


@zoo_model(
    "resnet8",
    title="ResNet-8 (CIFAR)",
    source="He et al., CVPR 2016; FedDF (Lin et al., NeurIPS 2020)",
    notes="78,042 parameters and 672 BatchNorm floats on 32x32x3, 10 classes. Not the 5.2 M ResNet8 of Fed-ET: "
    "see resnet8-wide",
)
def resnet8(shape: tuple[int, ...], norm: Norm) -> Body:
    channels, _, _ = image_shape("resnet8", shape, smallest=8)
    return _resnet(channels, (16, 32, 64), 1, norm)


@zoo_model(
    "resnet20",
    title="ResNet-20 (CIFAR)",
    source="He et al., CVPR 2016; FedDF (NeurIPS 2020), FedEED",
    notes="272,474 parameters and 1,568 BatchNorm floats on 32x32x3, 10 classes",
)
def resnet20(shape: tuple[int, ...], norm: Norm) -> Body:
    channels, _, _ = image_shape("resnet20", shape, smallest=8)
    return _resnet(channels, (16, 32, 64), 3, norm)


@zoo_model(
    "resnet32",
    title="ResNet-32 (CIFAR)",
    source="He et al., CVPR 2016; FedDF (Lin et al., NeurIPS 2020)",
    notes="466,906 parameters and 2,464 BatchNorm floats on 32x32x3, 10 classes",
)
def resnet32(shape: tuple[int, ...], norm: Norm) -> Body:
    channels, _, _ = image_shape("resnet32", shape, smallest=8)
    return _resnet(channels, (16, 32, 64), 5, norm)


@zoo_model(
    "resnet56",
    title="ResNet-56 (CIFAR)",
    source="He et al., CVPR 2016; FedEED",
    notes="855,770 parameters on 32x32x3, 10 classes (two-convolution blocks)",
)
def resnet56(shape: tuple[int, ...], norm: Norm) -> Body:
    channels, _, _ = image_shape("resnet56", shape, smallest=8)
    return _resnet(channels, (16, 32, 64), 9, norm)


@zoo_model(
    "resnet18",
    title="ResNet-18",
    source="He et al., CVPR 2016; MNFL, Fed-ET (Cho et al., IJCAI 2022)",
    notes="stem = 'small' (default): one 3x3 convolution, stride 1, no pooling, 11,173,962 parameters on 32x32x3, "
    "10 classes; 'large': the ImageNet stem, 7x7 stride 2 and max-pooling, 11,181,642. "
    "Fed-ET's 11.5 M is reached with head = 'projection', representation = 128",
)
def resnet18(shape: tuple[int, ...], norm: Norm, stem: Literal["small", "large"] = "small") -> Body:
    channels, _, _ = image_shape("resnet18", shape, smallest=8 if stem == "small" else 16)
    return _resnet(channels, (64, 128, 256, 512), 2, norm, _is_large("resnet18", stem))


@zoo_model(
    "resnet8-wide",
    title="ResNet with one block in each of ResNet-18's four stages",
    source="our reading of the ResNet8 of Fed-ET (Cho et al., IJCAI 2022)",
    notes="the paper gives 5.2 M parameters and no architecture. This one has 4.90 M plain, and 5.2 M with "
    "head = 'projection', representation = 128, the head that also explains the paper's 11.5 M for ResNet18",
)
def resnet8_wide(shape: tuple[int, ...], norm: Norm, stem: Literal["small", "large"] = "small") -> Body:
    channels, _, _ = image_shape("resnet8-wide", shape, smallest=8 if stem == "small" else 16)
    return _resnet(channels, (64, 128, 256, 512), 1, norm, _is_large("resnet8-wide", stem))


@zoo_model(
    "wrn16-2",
    title="Wide ResNet 16-2",
    source="Zagoruyko and Komodakis, BMVC 2016; FedEED",
    notes="691,674 parameters on 32x32x3, 10 classes; dropout (default 0) between a block's convolutions",
)
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


def _is_large(name: str, stem: str) -> bool:
    if stem not in ("small", "large"):
        raise ConfigError(f"model {name!r}: stem = {stem!r} is unknown; choose 'small' or 'large'")
    return stem == "large"
