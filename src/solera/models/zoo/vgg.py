"""VGG networks for small images.

Convolutions as in the original, and after five halvings the mean over what is left (one pixel for 32x32), with the
classifier directly on the 512 (or 256) features. Pooling rounds up, so that 28x28 also survives five halvings.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, GlobalMean, dense, dropout_rate, he_initialise, image_shape, widths_of
from solera.models.zoo.norm import Norm

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


@zoo_model(
    "vgg9",
    title="VGG-9 of FedDF (no normalisation)",
    source="Simonyan and Zisserman, ICLR 2015; FedDF (Lin et al., NeurIPS 2020)",
    notes="eight convolutions (32 to 256) and the classifier, never with norm layers: the layout of the 9-layer VGG in "
    "the authors' code, whose width factor is an option there (8 here). The paper also calls it the same as FedMA's: "
    "see vgg9-fedma",
)
def vgg9(shape: tuple[int, ...], hidden: Sequence[int] = (), dropout: float = 0.0) -> Body:
    channels, _, _ = image_shape("vgg9", shape, smallest=16)
    return _vgg(channels, PLAN_9, Norm("none"), hidden, dropout)


@zoo_model(
    "vgg9-fedma",
    title="VGG-9 of FedMA (no normalisation)",
    source="Wang et al., ICLR 2020 (FedMA)",
    notes="six convolutions, dense layers of 512 and 512, never with norm layers: 3,491,530 parameters on 32x32x3, "
    "10 classes",
)
def vgg9_fedma(shape: tuple[int, ...], dropout: float = 0.0) -> Body:
    channels, height, width = image_shape("vgg9-fedma", shape, smallest=8)
    pixels = prod(-(-side // 8) for side in (height, width))  # three halvings, rounded up
    body = nn.Sequential()
    body.add_module("convolutions", _convolutions(channels, PLAN_9_FEDMA, Norm("none")))
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", _dense(256 * pixels, (512, 512), dropout_rate(dropout)))
    return body, 512


@zoo_model(
    "vgg11",
    title="VGG-11",
    source="Simonyan and Zisserman, ICLR 2015",
    notes="9,231,114 parameters on 32x32x3, 10 classes (norm = 'batch')",
)
def vgg11(shape: tuple[int, ...], norm: Norm, hidden: Sequence[int] = (), dropout: float = 0.0) -> Body:
    channels, _, _ = image_shape("vgg11", shape, smallest=16)
    return _vgg(channels, PLAN_11, norm, hidden, dropout)


@zoo_model(
    "vgg19",
    title="VGG-19",
    source="Simonyan and Zisserman, ICLR 2015; the server model of Fed-ET (Cho et al., IJCAI 2022)",
    notes="20,029,514 parameters without norm, 20,040,522 with BatchNorm, on 32x32x3, 10 classes. Fed-ET's 20.9 M is "
    "reached with hidden = [512, 512] (the dense layers of CIFAR VGGs), norm = 'none', head = 'projection', "
    "representation = 128",
)
def vgg19(shape: tuple[int, ...], norm: Norm, hidden: Sequence[int] = (), dropout: float = 0.0) -> Body:
    channels, _, _ = image_shape("vgg19", shape, smallest=16)
    return _vgg(channels, PLAN_19, norm, hidden, dropout)
