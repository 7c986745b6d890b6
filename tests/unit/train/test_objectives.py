"""Objectives with a row of targets for each sample."""

import math

import pytest
import torch
import torch.nn.functional as F

from solera.core.tensors import weights_of
from solera.methods.steps.predictions import towards_targets
from solera.train.distill import kd_loss
from solera.train.fitting import Local, cross_entropy, fit, logits_of, proximal, towards
from toys import Constant, Conv, images, mlp, same_bits


def gradient(objective, targets):
    model, (x, _) = mlp(0), images(12)
    objective(model, x, targets).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def test_towards_soft_labels_has_the_gradient_of_their_cross_entropy():
    targets = torch.rand(12, 4, generator=torch.Generator().manual_seed(1)).mul(3).softmax(-1)
    ours, torchs = gradient(towards_targets(), targets), gradient(towards(F.cross_entropy), targets)
    assert all(torch.allclose(g, torchs[n], atol=1e-6) for n, g in ours.items())


def test_the_proximal_term_by_hand():
    """Logits (1, 0, -1), of which (0, 0, 2) was received: squares of 1, 0 and 9. Label 1 costs log(e + 1 + 1/e)."""
    model, x, y = Constant(1.0, 0.0, -1.0), torch.zeros(5, 2), torch.ones(5, dtype=torch.int64)
    own = math.log(math.e + 1 + 1 / math.e)
    assert cross_entropy(model, x, y).item() == pytest.approx(own, rel=1e-12)
    received = {"logits": torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)}
    assert proximal(0.6, received)(model, x, y).item() == pytest.approx(own + 0.3 * 10, rel=1e-12)
    assert proximal(0.0, received) is cross_entropy
    two = mlp(0)
    zeros = {name: torch.zeros_like(p) for name, p in two.named_parameters()}
    two[1].weight.requires_grad = False  # what is not trained is not pulled back
    pull = sum(p.square().sum().item() for name, p in two.named_parameters() if name != "1.weight")
    inputs, labels = images(6)
    expected = F.cross_entropy(two(inputs), labels).item() + pull
    assert proximal(2.0, zeros)(two, inputs, labels).item() == pytest.approx(expected, rel=1e-6)


def test_a_model_that_agrees_already_is_not_moved():
    x, _ = images(40)
    for loss in (F.l1_loss, kd_loss):
        model = mlp(3)
        before, consensus = weights_of(model), logits_of(model, x)
        done = fit(model, x, consensus, Local(epochs=2, batch=40, lr=0.1, optimizer="adam"), 0, towards(loss))
        assert done.loss < 1e-6
        assert all(torch.allclose(t, before[n], atol=1e-4) for n, t in weights_of(model).items())


def test_frozen_statistics_stay():
    x, _ = images(20)
    for frozen in (True, False):
        model = Conv(0)
        before = weights_of(model)
        fit(model, x, torch.zeros(20, 4), Local(epochs=1, batch=10), 0, towards(F.l1_loss, frozen))
        after = weights_of(model)
        stats = [n for n in after if "running" in n]
        assert same_bits({n: before[n] for n in stats}, {n: after[n] for n in stats}) == frozen
        assert not torch.equal(after["0.weight"], before["0.weight"])
