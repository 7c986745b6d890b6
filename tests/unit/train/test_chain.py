"""Reading models layer by layer: what is understood, what is refused, and layers of another size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solera.core.tensors import weights_of
from solera.methods.fedma import redraw
from solera.models import build
from solera.train.chain import Layer, chain, read, resized
from toys import same_bits

GRAY = (1, 28, 28)


class Written(nn.Module):
    """A chain whose forward is written out, as most people's models are."""

    def __init__(self, flatten="view"):
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(1, 4, 3), nn.Linear(4 * 9, 5), nn.Linear(5, 3)
        self.flatten = flatten

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        if self.flatten == "view":
            x = x.view(x.size(0), -1)
        elif self.flatten == "shape":
            x = x.reshape(x.shape[0], -1)
        else:
            x = torch.flatten(x, 1)
        return self.fc2(F.dropout(torch.relu(self.fc1(x)), 0.1, self.training))


@pytest.mark.parametrize("flatten", ["view", "shape", "flatten"])
def test_a_chain_with_a_forward_of_its_own(flatten):
    assert chain(Written(flatten)) == [
        Layer("conv", "conv", 0, 1, 1),
        Layer("fc1", "linear", 1, 2, 9),  # nine pixels for each of the four channels
        Layer("fc2", "linear", 2, 3, 1),
    ]


def test_the_layers_of_lenet5():
    layers = chain(build("lenet5", 10, GRAY))
    assert [(a.kind, a.block) for a in layers] == [("conv", 1)] * 2 + [("linear", 25), ("linear", 1), ("linear", 1)]
    assert [a.name for a in layers] == ["body.conv1", "body.conv2", "body.dense.fc1", "body.dense.fc2", "head"]
    assert layers[0].own(build("lenet5", 10, GRAY).state_dict()) == ["body.conv1.weight", "body.conv1.bias"]


@pytest.mark.parametrize(
    ("name", "norm", "layers"),
    [("mlp", "batch", 3), ("mcmahan-cnn", "batch", 4), ("fedet-cnn", "batch", 7), ("alexnet-small", "batch", 8),
     ("vgg9", "batch", 9), ("vgg9-fedma", "batch", 9), ("vgg11", "none", 9), ("tiny-cnn", "none", 4)],
)  # fmt: skip
def test_chains_of_the_zoo(name, norm, layers):
    model = build(name, 10, GRAY, norm)
    found = chain(model)
    assert len(found) == layers
    assert {n for a in found for n in a.own(model.state_dict())} == set(model.state_dict())


@pytest.mark.parametrize(
    ("name", "norm", "why"),
    [("tiny-cnn", "batch", "'body.norm1' is a BatchNorm2d"), ("resnet8", "batch", "'body.stem.1' is a BatchNorm2d"),
     ("resnet8", "none", "no plain chain"), ("resnet20", "none", "no plain chain")],
)  # fmt: skip
def test_what_is_no_chain(name, norm, why):
    with pytest.raises(ValueError, match=why):
        chain(build(name, 10, GRAY, norm))


def test_residual_networks_can_be_read():
    model = build("resnet8", 10, GRAY)
    structure = read(model)
    layers = {a.name: a for a in structure.layers}
    stem, second = layers["body.stem.0"], layers["body.stage1.0.conv2"]
    assert stem.writes == second.writes, "what is added up is one set of channels"
    assert structure.widths[structure.output] == 10
    assert layers["head"].reads == layers["body.stage3.0.shortcut.0"].writes


@pytest.mark.parametrize("name", ["shufflenetv2", "lstm", "text-bag"])
def test_what_cannot_be_read(name):
    options = {"vocabulary": 50} if name in ("lstm", "text-bag") else {}
    with pytest.raises(ValueError, match=r"not supported|no supported layer|cannot be traced"):
        read(build(name, 10, (12,) if options else GRAY, **options))


class Odd(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.a, self.b, self.c, self.what = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 3), what
        self.free = nn.Parameter(torch.zeros(4)) if what == "free" else None

    def forward(self, x):
        h = self.a(x)
        if self.what == "twice":
            return self.c(self.b(self.b(h)))
        if self.what == "concatenated":
            return self.c(torch.cat([h[:, :2], self.b(h)[:, :2]], 1))
        if self.what == "softmax":
            return self.c(self.b(h).softmax(-1))
        if self.what == "free":
            return self.c(self.b(h) + self.free)
        if self.what == "branch":
            return self.c(self.b(h) if x.sum() > 0 else h)
        return self.c(h)  # unused: b belongs to nothing


@pytest.mark.parametrize(
    ("what", "why"),
    [("twice", "'b' is used twice"), ("concatenated", "'getitem' is not supported"),
     ("softmax", "'softmax' is not supported"), ("free", "not the output of a layer|is not supported"),
     ("branch", "forward cannot be traced"), ("unused", "'b.weight' belongs to no supported layer")],
)  # fmt: skip
def test_steps_that_are_not_understood_are_named(what, why):
    with pytest.raises(ValueError, match=why):
        read(Odd(what))


def test_a_view_of_a_fixed_width_is_refused():
    """It would not fit once channels are cut or added."""

    class Fixed(Written):
        def forward(self, x):
            return self.fc2(self.fc1(self.conv(x).view(-1, 36)))

    with pytest.raises(ValueError, match="'view' is not supported"):
        read(Fixed())


def test_pixels_that_do_not_come_from_a_convolution_are_refused():
    with pytest.raises(ValueError, match="takes 12 inputs, but receives 4 channels"):
        read(nn.Sequential(nn.Linear(5, 4), nn.Flatten(), nn.Linear(12, 2)))


def test_resized_to_its_own_size_is_a_copy():
    model = build("resnet8", 10, GRAY)
    weights = weights_of(model)
    copy = resized(model, weights)
    assert same_bits(weights_of(copy), weights)
    assert not set(map(id, copy.parameters())) & set(map(id, model.parameters()))


def test_resized_layers_work_and_say_their_size():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    weights = {n: t[:2] if t.ndim and n.startswith(("0", "1")) else t for n, t in weights_of(model).items()}
    weights["3.weight"] = weights["3.weight"][:, :2]
    small = resized(model, weights).eval()
    assert (small[0].out_features, small[1].num_features, small[3].in_features) == (2, 2, 2)
    assert small(torch.zeros(6, 5)).shape == (6, 3)
    assert same_bits(weights_of(small), weights)


def test_statistics_may_be_left_out_only_if_said_so():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    model[1].running_mean.copy_(torch.arange(4.0))
    few = {n: t[:3] for n, t in weights_of(model).items() if "running" not in n and "num" not in n}
    assert resized(model, few, buffers=False)[1].running_mean.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="running_mean"):
        resized(model, few)


def test_what_has_one_size_only():
    with pytest.raises(ValueError, match="LayerNorm"):
        resized(nn.Sequential(nn.LayerNorm(4)), {"0.weight": torch.ones(3), "0.bias": torch.zeros(3)})


def test_redrawn_weights_follow_the_generator():
    a, b = (build("lenet5", 10, GRAY) for _ in range(2))
    for model in (a, b):
        redraw(model, torch.Generator().manual_seed(3))
    assert same_bits(weights_of(a), weights_of(b))
    assert not a.head.bias.any()
