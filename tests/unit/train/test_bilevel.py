"""Trainings inside trainings: PER-1 and PFM-1, HF against exact second derivatives, BatchNorm and dropout."""

import math
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from solera.core.tensors import weights_of
from solera.methods.perfedavg import after_a_step, endless
from solera.methods.pfedme import Envelope, follow_envelope
from solera.methods.steps.personal import batches
from solera.train.fitting import Diverged, Local, cross_entropy, fit
from toys import Conv, Quadratic, images, mlp, quadratic_data, same_bits


def gradient(objective, model, x, y) -> dict[str, torch.Tensor]:
    model.zero_grad()
    objective(model, x, y).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def always(*batch):
    while True:
        yield batch


# ---- Per-FedAvg -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("curved", "expected"), [(False, -1.6), (True, -1.28)])
def test_per_1(curved, expected):
    """f = (x - 1)^2 at 0 with alpha = 0.1: the adapted point is 0.2."""
    data = quadratic_data(2, 1)
    objective = after_a_step(0.1, always(*data), always(*data) if curved else None)
    assert gradient(objective, Quadratic(0.0), *data)["x"].item() == pytest.approx(expected, abs=1e-9)


def test_the_first_order_gradient_is_the_one_at_the_adapted_weights():
    model, (x1, y1), (x2, y2) = mlp(0), images(8, 1), images(8, 2)
    g = gradient(cross_entropy, model, x1, y1)
    adapted = mlp(0)
    adapted.load_state_dict({n: p.detach() - 0.3 * g[n] for n, p in model.named_parameters()})
    found = gradient(after_a_step(0.3, always(x1, y1)), model, x2, y2)
    expected = gradient(cross_entropy, adapted, x2, y2)
    assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected)


def test_the_hessian_free_gradient_is_near_the_exact_one():
    """With one minibatch for all three it is the gradient of w -> f(w - alpha grad f(w)), by autograd twice."""
    model, (x, y) = mlp(0).double(), images(20, 1)
    x, alpha = x.double(), 0.5
    w = dict(model.named_parameters())
    inner = torch.autograd.grad(F.cross_entropy(model(x), y), list(w.values()), create_graph=True)
    moved = {n: p - alpha * g for (n, p), g in zip(w.items(), inner, strict=True)}
    exact = torch.autograd.grad(F.cross_entropy(functional_call(model, moved, (x,)), y), list(w.values()))
    first = gradient(after_a_step(alpha, always(x, y)), model, x, y)
    found = gradient(after_a_step(alpha, always(x, y), always(x, y), 1e-4), model, x, y)
    missed = {n: (first[n] - e).norm().item() for n, e in zip(w, exact, strict=True)}
    for n, e in zip(w, exact, strict=True):
        assert (found[n] - e).norm().item() < 1e-4 * missed[n]


@pytest.mark.parametrize("curved", [False, True])
def test_only_the_pass_that_counts_changes_the_statistics(curved):
    model, one, two = Conv(0), images(8, 1), images(8, 2)
    g = gradient(cross_entropy, Conv(0), *one)
    alone = Conv(0)
    alone.load_state_dict(weights_of(alone) | {n: p.detach() - 0.1 * g[n] for n, p in alone.named_parameters()})
    alone(two[0])
    gradient(after_a_step(0.1, always(*one), always(*one) if curved else None), model, *two)
    assert all(torch.allclose(b, dict(alone.named_buffers())[n], atol=1e-6) for n, b in model.named_buffers())
    assert int(model[1].num_batches_tracked) == 1


def test_dropout_does_not_enter_the_difference_of_gradients():
    """Two masks would differ by far more than delta: the estimate would be noise times 1 / delta."""
    model = Conv(0, dropout=0.5).double().train()
    x, y = images(30)
    data = x.double(), y
    first = gradient(after_a_step(0.01, always(*data)), model, *data)
    found = gradient(after_a_step(0.01, always(*data), always(*data), delta=1e-6), model, *data)
    assert all(found[n].norm() < 10 * first[n].norm() + 1e-3 for n in first)
    assert all(m.training for m in model.modules())


def test_without_a_step_it_is_the_cross_entropy():
    assert after_a_step(0.0, iter(()), iter(())) is cross_entropy


def test_a_single_sample_is_no_minibatch_for_batchnorm_unless_there_are_no_others():
    x, y = images(9)
    sizes = [len(b) for _, b in batches(Conv(0), x, y, Local(epochs=2, batch=4), 0)]
    assert sizes == [4, 4, 4, 4]
    assert [len(b) for _, b in batches(mlp(0), x, y, Local(epochs=1, batch=4), 0)] == [4, 4, 1]
    assert [len(b) for _, b in islice(endless(Conv(0), x[:1], y[:1], 4, 0), 3)] == [1, 1, 1]


def test_endless_minibatches_are_shuffled_anew_each_epoch():
    x, _ = images(8)
    seen = [b.tolist() for _, b in islice(endless(mlp(0), x, torch.arange(8), 4, 0), 6)]
    assert all(sorted(a + b) == list(range(8)) for a, b in zip(seen[::2], seen[1::2], strict=True))
    assert len({tuple(b) for b in seen}) == 6
    for epoch in range(3):  # each has a seed of its own
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert seen[2 * epoch] + seen[2 * epoch + 1] == order


# ---- pFedMe -----------------------------------------------------------------------------------------

EXACT = Envelope(steps=1, lr=0.005, lam=15.0, inner_steps=100, inner_lr=0.05)


def test_pfm_1():
    theta = Quadratic(0.0)
    w, _ = follow_envelope(theta, *quadratic_data(2, 1), EXACT, 0)
    assert theta.x.item() == pytest.approx(0.1176470588, abs=5e-11)
    assert w["x"].item() == pytest.approx(0.0088235294, abs=5e-11)


def test_theta_goes_on_from_where_it_was_while_w_follows():
    """Two steps with one gradient step each, by hand."""
    theta = Quadratic(0.0)
    w, _ = follow_envelope(theta, *quadratic_data(2, 1), Envelope(2, 20, 0.01, 15.0, 1, 0.05), 0)
    t1 = 0 - 0.05 * (2 * (0 - 1) + 15 * 0)
    w1 = 0 - 0.01 * 15 * (0 - t1)
    t2 = t1 - 0.05 * (2 * (t1 - 1) + 15 * (t1 - w1))
    assert theta.x.item() == pytest.approx(t2, abs=1e-12)
    assert w["x"].item() == pytest.approx(w1 - 0.15 * (w1 - t2), abs=1e-12)


def test_the_inner_steps_see_one_minibatch():
    x, y = images(12)
    theta, cfg = mlp(0), Envelope(steps=2, batch=6, inner_steps=3)
    follow_envelope(theta, x, y, cfg, 5)
    by_hand, w = mlp(0), {n: p.detach().clone() for n, p in mlp(0).named_parameters()}
    for a, b in batches(by_hand, x, y, Local(steps=2, batch=6), 5):
        for _ in range(3):
            g = gradient(cross_entropy, by_hand, a, b)
            with torch.no_grad():
                for n, p in by_hand.named_parameters():
                    p -= 0.09 * (g[n] + 15 * (p - w[n]))
        w = {n: w[n] - 0.005 * 15 * (w[n] - p.detach()) for n, p in by_hand.named_parameters()}
    assert all(torch.allclose(p, dict(by_hand.named_parameters())[n], atol=1e-6) for n, p in theta.named_parameters())


def test_no_samples_or_no_steps_leave_both_where_they_were():
    for n, steps in ((0, 20), (8, 0)):
        theta = Conv(0)
        before = weights_of(theta)
        w, _ = follow_envelope(theta, *images(n), Envelope(steps=steps), 0)
        assert same_bits(weights_of(theta), before)
        assert same_bits(before | w, before)


def test_a_tied_parameter_has_both_its_names_in_w():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = nn.Linear(64, 64)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x.flatten(1)).relu())

    theta = Tied()
    w, _ = follow_envelope(theta, *images(8), Envelope(), 0)
    assert torch.equal(w["a.weight"], w["b.weight"])


def test_a_training_that_blows_up_raises():
    x, y = images(40)
    with pytest.raises(Diverged, match="training diverged"):
        follow_envelope(mlp(0), 1e30 * x, y, Envelope(), 0)


def test_settings_without_sense_are_refused():
    for wrong in ({"lam": 0.0}, {"lam": -1.0}, {"lr": 0.2}, {"inner_lr": 0.2}, {"lam": math.inf}, {"lam": math.nan}):
        with pytest.raises(ValueError, match=r"lam = .*(above 0|below 2)"):
            Envelope(**wrong)
    for name in ("steps", "inner_steps", "lr", "inner_lr"):
        with pytest.raises(ValueError, match=name):
            Envelope(**{name: -1})


def test_fit_can_use_the_objective_where_minibatches_end_in_single_samples():
    x, y = images(9)
    model = Conv(0)
    inner, curvature = (endless(model, x, y, 4, s) for s in (1, 2))
    done = fit(model, x, y, Local(epochs=2, batch=4, lr=0.05), 0, after_a_step(0.05, inner, curvature))
    assert done.steps == 4


def test_the_second_order_term_has_a_gradient_but_no_value():
    """Otherwise a step that blows up would lower the "loss" without end, and nothing would stop the training."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(6, 3) * 30, torch.tensor([0, 1, 0, 1, 1, 0])
    again = lambda: iter([(x, y)] * 2)  # noqa: E731
    first, second = after_a_step(0.1, again()), after_a_step(0.1, again(), again(), 1e-3)
    losses = [objective(model, x, y) for objective in (first, second)]
    gradients = [torch.autograd.grad(loss, list(model.parameters()))[0] for loss in losses]
    assert losses[1].item() == losses[0].item()
    assert not torch.allclose(*gradients)
