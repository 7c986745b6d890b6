"""Parameter counts against the papers and against arithmetic."""

import pytest
import torch

from solera.models import MODELS, build, size_of

CIFAR = (3, 32, 32)


def on_meta(*args, **options):
    """A model without memory or arithmetic: sizes and shapes only."""
    with torch.device("meta"):
        return build(*args, **options)


@pytest.mark.parametrize(
    ("name", "shape", "parameters", "buffers"),
    [
        ("mlp", (1, 28, 28), 199_210, 0),  # McMahan et al.: 2NN
        ("lenet5", (1, 28, 28), 61_706, 0),  # padded by 2 ...
        ("lenet5", (1, 32, 32), 61_706, 0),  # ... and LeCun's own input size
        ("lenet5", CIFAR, 62_006, 0),
        ("mcmahan-cnn", (1, 28, 28), 1_663_370, 0),  # McMahan et al.
        ("fedet-cnn", CIFAR, 392_792, 0),
        ("alexnet-small", CIFAR, 3_044_170, 0),
        ("resnet8", CIFAR, 78_042, 672),  # FedDF
        ("resnet20", CIFAR, 272_474, 1_568),
        ("resnet32", CIFAR, 466_906, 2_464),
        ("resnet56", CIFAR, 855_770, 4_256),
        ("resnet18", CIFAR, 11_173_962, 9_600),
        ("resnet8-wide", CIFAR, 4_903_242, 5_760),
        ("wrn16-2", CIFAR, 691_674, 1_824),
        ("tiny-cnn", (1, 28, 28), 24_058, 224),
        ("vgg9", CIFAR, 2_308_810, 0),
        ("vgg9-fedma", CIFAR, 3_491_530, 0),
        ("vgg11", CIFAR, 9_231_114, 5_504),
        ("vgg19", CIFAR, 20_040_522, 11_008),
        ("shufflenetv2", CIFAR, 1_263_854, 16_180),
    ],
)
def test_sizes_of_the_zoo(name, shape, parameters, buffers):
    size = size_of(on_meta(name, 10, shape))
    assert (size.parameters, size.buffers) == (parameters, buffers)
    assert size.floats == parameters + buffers


def test_every_image_model_has_a_counted_size():
    counted = {mark.args[1][i][0] for mark in test_sizes_of_the_zoo.pytestmark for i in range(len(mark.args[1]))}
    assert counted == {name for name, info in MODELS.items() if info.kind == "image" and not info.own}


def test_resnet18_with_the_imagenet_stem():
    assert size_of(on_meta("resnet18", 10, CIFAR, stem="large")).parameters == 11_181_642
    assert size_of(on_meta("resnet18", 1000, (3, 64, 64), stem="large")).parameters == 11_689_512


def test_shufflenet_widths():
    sizes = [size_of(on_meta("shufflenetv2", 10, CIFAR, width=width)).parameters for width in (0.5, 1, 1.5, 2)]
    assert sizes[0] == 352_042
    assert sizes == sorted(sizes)


def test_group_norm_has_batch_norms_parameters_and_no_buffers():
    size = size_of(on_meta("resnet20", 10, CIFAR, norm="group"))
    assert (size.parameters, size.buffers) == (272_474, 0)


def test_without_norm_convolutions_have_biases_instead():
    # 784 normalised channels: a bias each, in place of a scale and a shift each
    assert size_of(on_meta("resnet20", 10, CIFAR, norm="none")).parameters == 272_474 - 784
    assert size_of(on_meta("vgg19", 10, CIFAR, norm="none")).parameters == 20_029_514


@pytest.mark.parametrize(("classes", "parameters"), [(10, 17_802), (100, 29_412), (2, 16_770)])
def test_shared_head_sizes(classes, parameters):
    assert size_of(on_meta("resnet8", classes, CIFAR, head="shared").head).parameters == parameters


def test_linear_shared_head():
    model = on_meta("resnet8", 10, CIFAR, head="shared", head_hidden=0)
    assert size_of(model.head).parameters == 128 * 10 + 10
    assert size_of(model.adapter).parameters == 64 * 128 + 128


@pytest.mark.parametrize(
    ("name", "millions", "options"),
    [
        ("vgg19", 20.9, {"hidden": [512, 512]}),
        ("resnet18", 11.5, {}),
        ("resnet8-wide", 5.2, {}),
        ("fedet-cnn", 0.4, {}),
    ],
)
def test_fedet_table_6(name, millions, options):
    model = on_meta(name, 10, CIFAR, norm="none", head="projection", representation=128, **options)
    assert round(size_of(model).parameters / 1e6, 1) == millions


def test_alexnet_with_the_original_dense_layers():
    assert round(size_of(on_meta("alexnet-small", 10, CIFAR, hidden=(4096, 4096))).parameters / 1e6) == 23


def test_text_sizes():
    assert size_of(on_meta("text-bag", 4, (50,), vocabulary=1000, embedding=64)).parameters == 64_000 + 64 * 4 + 4
    layers = 4 * 256 * (128 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    model = on_meta("lstm", 2, (256,), vocabulary=12_000)
    assert size_of(model).parameters == 12_000 * 128 + layers + 256 * 2 + 2
    shared = on_meta("lstm", 2, (256,), head="shared", vocabulary=12_000)
    assert round(size_of(shared).parameters / 1e6, 1) == 2.5  # Fed-ET's Table 6
