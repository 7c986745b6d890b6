"""VGG networks for small images.

Convolutions as in the original, and after five halvings the mean over what is left (one pixel for 32x32), with the
classifier directly on the 512 (or 256) features. Pooling rounds up, so that 28x28 also survives five halvings.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, GlobalMean, Norm, dense, dropout_rate, he_initialise, image_shape, widths_of

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
