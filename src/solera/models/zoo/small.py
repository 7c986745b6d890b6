"""Small image models: MLP, LeNet-5, a tiny CNN, McMahan's CNN, Fed-ET's CNN, a small AlexNet.

Maxima are taken before the ReLU that the papers put first: the result and the gradient are the same to the bit, for a
quarter of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, dense, dropout_rate, he_initialise, image_shape, widths_of
from solera.models.zoo.norm import Norm


@zoo_model(
    "mlp",
    title="Multi-layer perceptron",
    source="McMahan et al., AISTATS 2017 (2NN)",
    notes="hidden layers of 200 and 200: 199,210 parameters on 28x28x1, 10 classes. Takes inputs of any shape",
)
def mlp(shape: tuple[int, ...], hidden: Sequence[int] = (200, 200), dropout: float = 0.0) -> Body:
    widths = widths_of("hidden", hidden)
    inputs = prod(shape)
    body = nn.Sequential()
    body.add_module("flatten", nn.Flatten())
    body.add_module("dense", dense(inputs, widths, dropout_rate(dropout)))
    he_initialise(body)
    return body, widths[-1] if widths else inputs


@zoo_model(
    "lenet5",
    title="LeNet-5",
    source="LeCun et al., Proc. IEEE 1998; a client model of MNFL",
    notes="ReLU and max-pooling. Inputs under 32 pixels are padded by 2, as LeCun padded MNIST: "
    "61,706 parameters on 28x28x1 and on 32x32x1 alike, 62,006 on 32x32x3 (10 classes)",
)
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


@zoo_model(
    "tiny-cnn",
    title="Tiny CNN",
    source="this library",
    notes="three strided 3x3 convolutions (16, 32, 64) with normalisation, then a mean over pixels: 24,058 parameters "
    "on 28x28x1, 10 classes. The cheapest model with BatchNorm here: for a device's smallest models, and for trials",
)
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


@zoo_model(
    "mcmahan-cnn",
    title="CNN of FedAvg",
    source="McMahan et al., AISTATS 2017; MNFL's homogeneous experiments",
    notes="two padded 5x5 convolutions (32, 64) with max-pooling, one dense layer of 512: "
    "1,663,370 parameters on 28x28x1, 10 classes",
)
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


@zoo_model(
    "fedet-cnn",
    title="CNN of Fed-ET",
    source="Cho et al., IJCAI 2022 (Fed-ET)",
    notes="two 5x5 convolutions with max-pooling, dense layers of 120, 100, 84, 50. The paper gives 0.4 M parameters "
    "but not the channels; 32 and 96 (option channels) make 0.39 M plain, 0.42 M with the shared head on 32x32x3",
)
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


@zoo_model(
    "alexnet-small",
    title="AlexNet for small images",
    source="Krizhevsky et al., NeurIPS 2012; a client model of MNFL",
    notes="AlexNet's five convolutions with 3x3 kernels, dense layers of 512 and 512 with the original's dropout of "
    "0.5. hidden = [4096, 4096] gives the original's dense layers (23 M parameters)",
)
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
