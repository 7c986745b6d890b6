"""Small image models: MLP, LeNet-5, a tiny CNN, McMahan's CNN, Fed-ET's CNN, a small AlexNet.

Maxima are taken before the ReLU that the papers put first: the result and the gradient are the same to the bit, for a
quarter of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, Norm, dense, dropout_rate, he_initialise, image_shape, widths_of


@zoo_model("mlp")
def mlp(shape: tuple[int, ...], hidden: Sequence[int] = (200, 200), dropout: float = 0.0) -> Body:
    widths = widths_of("hidden", hidden)
    inputs = prod(shape)
    body = nn.Sequential()
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", dense(inputs, widths, dropout_rate(dropout)))
    he_initialise(body)
    return body, widths[-1] if widths else inputs


@zoo_model("lenet5")
def lenet5(shape: tuple[int, ...]) -> Body:
    channels, height, width = image_shape("lenet5", shape, smallest=12)
    padding = 2 if min(height, width) < 32 else 0
    pixels = prod(_two_unpadded_convolutions(side + 2 * padding) for side in (height, width))
    body = nn.Sequential()
    body.add_module("conv1", nn.Conv2d(channels, 6, 5, padding=padding))
    body.add_module("pool1", nn.MaxPool2d(2))
    body.add_module("relu1", nn.ReLU())
    body.add_module("conv2", nn.Conv2d(6, 16, 5))
    body.add_module("pool2", nn.MaxPool2d(2))
    body.add_module("relu2", nn.ReLU())
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", dense(16 * pixels, (120, 84)))
    he_initialise(body)
    return body, 84


@zoo_model("tiny-cnn")
def tiny_cnn(shape: tuple[int, ...], norm: Norm) -> Body:
    channels, *_ = image_shape("tiny-cnn", shape, smallest=8)
    body = nn.Sequential()
    for i, (inputs, outputs) in enumerate([(channels, 16), (16, 32), (32, 64)], start=1):
        body.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=norm.bias))
        body.add_module(f"norm{i}", norm(outputs))
        body.add_module(f"relu{i}", nn.ReLU())
    body.add_module("mean", nn.AdaptiveAvgPool2d(1))
    body.add_module("flatten", nn.Flatten())
    he_initialise(body, normalised=norm.kind != "none")
    return body, 64


@zoo_model("mcmahan-cnn")
def mcmahan_cnn(shape: tuple[int, ...]) -> Body:
    channels, height, width = image_shape("mcmahan-cnn", shape, smallest=4)
    body = nn.Sequential()
    body.add_module("conv1", nn.Conv2d(channels, 32, 5, padding=2))
    body.add_module("pool1", nn.MaxPool2d(2))
    body.add_module("relu1", nn.ReLU())
    body.add_module("conv2", nn.Conv2d(32, 64, 5, padding=2))
    body.add_module("pool2", nn.MaxPool2d(2))
    body.add_module("relu2", nn.ReLU())
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", dense(64 * (height // 4) * (width // 4), (512,)))
    he_initialise(body)
    return body, 512


@zoo_model("fedet-cnn")
def fedet_cnn(shape: tuple[int, ...], channels: Sequence[int] = (32, 96)) -> Body:
    inputs, height, width = image_shape("fedet-cnn", shape, smallest=16)
    first, second = widths_of("channels", channels, count=2)
    pixels = prod(_two_unpadded_convolutions(side) for side in (height, width))
    body = nn.Sequential()
    body.add_module("conv1", nn.Conv2d(inputs, first, 5))
    body.add_module("pool1", nn.MaxPool2d(2))
    body.add_module("relu1", nn.ReLU())
    body.add_module("conv2", nn.Conv2d(first, second, 5))
    body.add_module("pool2", nn.MaxPool2d(2))
    body.add_module("relu2", nn.ReLU())
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", dense(second * pixels, (120, 100, 84, 50)))
    he_initialise(body)
    return body, 50


@zoo_model("alexnet-small")
def alexnet_small(shape: tuple[int, ...], hidden: Sequence[int] = (512, 512), dropout: float = 0.5) -> Body:
    channels, height, width = image_shape("alexnet-small", shape, smallest=15)
    widths = widths_of("hidden", hidden)
    pixels = prod((side + 1) // 2 // 8 for side in (height, width))  # one stride of 2, three poolings
    body = nn.Sequential()
    for i, (inputs, outputs, stride, pool) in enumerate(
        [
            (channels, 64, 2, True),
            (64, 192, 1, True),
            (192, 384, 1, False),
            (384, 256, 1, False),
            (256, 256, 1, True),
        ],
        start=1,
    ):
        body.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1))
        if pool:
            body.add_module(f"pool{i}", nn.MaxPool2d(2))
        body.add_module(f"relu{i}", nn.ReLU())
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", dense(256 * pixels, widths, dropout_rate(dropout)))
    he_initialise(body)
    return body, widths[-1] if widths else 256 * pixels


def _two_unpadded_convolutions(side: int) -> int:
    """Pixels a side after two 5x5 convolutions without padding, each followed by 2x2 pooling."""
    return ((side - 4) // 2 - 4) // 2
