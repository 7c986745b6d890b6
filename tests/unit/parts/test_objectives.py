"""Objectives with a row of targets for each sample."""

import torch
import torch.nn.functional as F

from solera.methods.predictions import towards_targets
from solera.parts.distill import kd_loss
from solera.parts.local import Local, fit, logits_of, weights_of
from solera.parts.objectives import towards
from toys import Conv, images, mlp, same_bits


def gradient(objective, targets):
    model, (x, _) = mlp(0), images(12)
    objective(model, x, targets).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def test_towards_soft_labels_has_the_gradient_of_their_cross_entropy():
    targets = torch.rand(12, 4, generator=torch.Generator().manual_seed(1)).mul(3).softmax(-1)
    ours, torchs = gradient(towards_targets(), targets), gradient(towards(F.cross_entropy), targets)
    assert all(torch.allclose(g, torchs[n], atol=1e-6) for n, g in ours.items())


def test_a_model_that_agrees_already_is_not_moved():
    x, _ = images(40)
    for loss in (F.l1_loss, kd_loss):
        model = mlp(3)
        before, consensus = weights_of(model), logits_of(model, x)
        done = fit(model, x, consensus, Local(epochs=2, batch=40, lr=0.1, optimiser="adam"), 0, towards(loss))
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
