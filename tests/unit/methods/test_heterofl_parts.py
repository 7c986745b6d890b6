"""Networks inside a network: the oracle HET-1, which part is cut, and that it is the whole with the rest at zero."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solera.core.tensors import weights_of
from solera.methods.heterofl import (
    cut,
    kept,
    masked_cross_entropy,
    mean_over_holders,
    output_tensors,
    scale_in_training,
    sub_shapes,
)
from solera.models import build
from solera.train.chain import resized
from solera.train.norms import BATCHNORM

GRAY = (1, 28, 28)


def test_het_1():
    whole, half = {"w": torch.ones(4, 4)}, {"w": torch.full((2, 2), 3.0)}
    new = mean_over_holders({"w": torch.zeros(4, 4)}, [(whole, 1), (half, 1)], {})["w"]
    expected = torch.ones(4, 4)
    expected[:2, :2] = 2
    assert torch.equal(new, expected)
    assert half["w"].numel() / whole["w"].numel() == 4 / 16


def test_what_nobody_holds_stays_as_it_was():
    old = {"w": torch.arange(16.0).reshape(4, 4)}
    new = mean_over_holders(old, [({"w": torch.full((2, 3), -1.0)}, 5)], {})["w"]
    assert bool((new[:2, :3] == -1).all())
    assert torch.equal(new[2:], old["w"][2:])
    assert torch.equal(new[:2, 3:], old["w"][:2, 3:])


def test_groups_count_as_much_as_their_members():
    groups = [({"w": torch.tensor([1.0, 1.0])}, 3), ({"w": torch.tensor([5.0])}, 1)]
    assert mean_over_holders({"w": torch.zeros(2)}, groups, {})["w"].tolist() == [2.0, 1.0]


def test_one_group_of_the_whole_model_is_its_mean_to_the_bit():
    w = {"w": torch.randn(50, 7, generator=torch.Generator().manual_seed(1))}
    for n in (1, 3, 7, 1234567):
        assert torch.equal(mean_over_holders({"w": torch.zeros(50, 7)}, [(w, n)], {})["w"], w["w"])


def test_rows_of_classes_are_averaged_over_those_who_have_the_class():
    """Two groups of two: class 0 is held by all, 1 by one member of the first group, 2 by nobody."""
    held = [torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0])]
    first = torch.tensor([[2.0, 2.0], [4.0 * 0.5, 4.0 * 0.5], [0.0, 0.0]])  # means with zeros of those without
    second = torch.tensor([[6.0, 6.0], [0.0, 0.0], [0.0, 0.0]])
    old = {"head.weight": torch.full((3, 2), 9.0)}
    groups = [({"head.weight": first}, 2), ({"head.weight": second}, 2)]
    new = mean_over_holders(old, groups, {"head.weight": held})["head.weight"]
    assert new[:, 0].tolist() == [4.0, 4.0, 9.0]


def test_counters_become_their_maximum():
    old = {"n": torch.tensor(3)}
    assert int(mean_over_holders(old, [({"n": torch.tensor(5)}, 1), ({"n": torch.tensor(4)}, 9)], {})["n"]) == 5


def test_channels_are_rounded_up_but_not_by_the_last_bit():
    assert kept(0.5, 5) == 3
    assert kept(0.0625, 6) == 1
    assert kept(1.0, 7) == 7
    assert 0.07 * 100 > 7
    assert kept(0.07, 100) == 7


def test_the_shapes_of_half_a_lenet5():
    model = build("lenet5", 10, GRAY)
    shapes = sub_shapes(model, 0.5)
    assert shapes == {
        "body.conv1.weight": [3, 1, 5, 5], "body.conv1.bias": [3],  # the image keeps its channel
        "body.conv2.weight": [8, 3, 5, 5], "body.conv2.bias": [8],
        "body.dense.fc1.weight": [60, 8 * 25], "body.dense.fc1.bias": [60],  # whole channels of 25 pixels
        "body.dense.fc2.weight": [42, 60], "body.dense.fc2.bias": [42],
        "head.weight": [10, 42], "head.bias": [10],  # and the logits stay
    }  # fmt: skip
    assert sub_shapes(model, 1.0) == {n: list(t.shape) for n, t in model.state_dict().items()}
    assert output_tensors(model) == ["head.weight", "head.bias"]


def without_norms(model: nn.Module) -> nn.Module:
    for path, layer in list(model.named_modules()):
        if isinstance(layer, (*BATCHNORM, nn.GroupNorm)):
            model.set_submodule(path, nn.Identity())
    return model


@pytest.mark.parametrize("rate", [0.5, 0.3, 0.0625])
@pytest.mark.parametrize("name", ["mlp", "lenet5", "mcmahan-cnn", "vgg9-fedma", "tiny-cnn", "resnet8", "wrn16-2"])
def test_a_part_is_the_whole_with_all_other_weights_at_zero(name, rate):
    """Which would not be so if, say, a Linear layer kept other columns than those of the channels that are left."""
    torch.manual_seed(0)
    model = without_norms(build(name, 10, GRAY, "none" if name == "vgg9-fedma" else "batch")).double().eval()
    with torch.no_grad():  # nothing may be zero by chance
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype) / max(p[0].numel(), 1) ** 0.5)
    weights = weights_of(model)
    shapes = sub_shapes(model, rate)
    part = cut(weights, shapes)
    padded = {n: torch.zeros_like(t) for n, t in weights.items()}
    for n, t in part.items():
        padded[n][tuple(slice(s) for s in t.shape)] = t
    x = torch.randn(2, *GRAY, dtype=torch.float64)
    small, whole = resized(model, part).eval(), resized(model, padded).eval()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(small(x), whole(x), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["resnet8", "wrn16-2", "vgg11", "tiny-cnn"])
def test_parts_of_models_with_batchnorm_train(name):
    model = build(name, 10, GRAY)
    part = resized(model, cut(weights_of(model), sub_shapes(model, 0.25)))
    F.cross_entropy(part(torch.randn(4, *GRAY)), torch.arange(4)).backward()
    assert all(p.grad is not None for p in part.parameters())


def test_groups_that_do_not_divide_the_channels_left():
    model = nn.Sequential(nn.Linear(8, 12), nn.GroupNorm(3, 12), nn.Linear(12, 2))
    assert sub_shapes(model, 0.5)["1.weight"] == [6]
    with pytest.raises(ValueError, match="'1' has 3 groups, which do not divide the 4"):
        sub_shapes(model, 0.3)


def test_the_scaler_acts_in_training_and_on_narrowed_layers_only():
    whole = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    part = resized(whole, cut(weights_of(whole), sub_shapes(whole, 0.5)))
    x = torch.randn(5, 4)
    plain = part(x).detach()
    scale_in_training(part, whole, 0.5)
    torch.testing.assert_close(part.train()(x).detach(), plain / 0.5)  # once: the last layer is not narrowed
    assert torch.equal(part.eval()(x), plain)


def test_masked_cross_entropy_sets_the_logits_of_missing_classes_to_zero():
    class Says(nn.Module):
        def forward(self, x):
            return x

    logits = torch.tensor([[2.0, 5.0, -1.0]], requires_grad=True)
    loss = masked_cross_entropy(torch.tensor([True, False, True]))(Says(), logits, torch.tensor([0]))
    assert loss.item() == pytest.approx(F.cross_entropy(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])).item())
    loss.backward()
    assert logits.grad[0, 1] == 0
