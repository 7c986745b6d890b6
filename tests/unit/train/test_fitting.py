"""Local training and evaluation: order, degenerate batches, blow-ups, and answers independent of the batch."""

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from solera.core.tensors import is_finite, weights_of
from solera.train.fitting import (
    Diverged,
    Local,
    evaluate,
    fit,
    gradient_of,
    logits_of,
    minibatches,
    planned_steps,
    proximal,
)
from toys import Conv, Quadratic, equal_rows, images, mlp, quadratic_data, same_bits


def positions(n: int, cfg: Local, seed: int = 0) -> list[list[int]]:
    index = torch.arange(n)
    return [y.tolist() for _, y in minibatches(index[:, None].float(), index, cfg, seed)]


def test_an_epoch_visits_every_sample_once_and_keeps_the_last_partial_batch():
    batches = positions(10, Local(epochs=3, batch=4))
    assert [len(b) for b in batches] == [4, 4, 2] * 3
    epochs = [[*batches[i], *batches[i + 1], *batches[i + 2]] for i in (0, 3, 6)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


def test_steps_override_epochs_and_run_through_reshuffled_epochs():
    batches = positions(10, Local(epochs=3, steps=5, batch=4))
    assert batches == positions(10, Local(epochs=2, batch=4))[:5]
    assert len(positions(1000, Local(steps=2, batch=4))) == 2


def test_gathering_in_blocks_changes_nothing(monkeypatch):
    expected = positions(50, Local(epochs=2, batch=3))
    monkeypatch.setattr("solera.train.fitting.BLOCK", 2)
    assert positions(50, Local(epochs=2, batch=3)) == expected


def test_inputs_stay_with_their_labels():
    x, y = torch.arange(100)[:, None] * 1.0, torch.arange(100)
    for a, b in minibatches(x, y, Local(epochs=2, batch=7), 5):
        assert torch.equal(a[:, 0].long(), b)


def test_a_batch_larger_than_the_data_is_the_data():
    assert [sorted(b) for b in positions(3, Local(epochs=2, batch=64))] == [[0, 1, 2]] * 2


def test_same_seed_same_bits_other_seed_other_bits():
    x, y = images(50)
    weights = []
    for seed in (1, 1, 2):
        model = Conv(0)
        fit(model, x, y, Local(epochs=2, batch=16), seed)
        weights.append(weights_of(model))
    assert same_bits(weights[0], weights[1])
    assert not same_bits(weights[0], weights[2])


def test_fit_is_plain_sgd():
    x, y = images(32)
    model, reference = mlp(0), mlp(0)
    done = fit(model, x, y, Local(epochs=1, batch=32, lr=0.1), 0)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(reference(x[order]), y[order]).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p -= 0.1 * p.grad
    torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=1e-6, atol=1e-7)
    assert done.steps == 1
    assert done.lr_sum == pytest.approx(0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_zero_learning_rate_moves_no_parameter(optimizer):
    x, y = images(20)
    model = mlp(0)
    before = weights_of(model)
    fit(model, x, y, Local(epochs=2, lr=0.0, optimizer=optimizer), 0)
    assert same_bits(weights_of(model), before)


def test_training_learns_and_leaves_evaluation_mode_without_gradients():
    x, y = images(200)
    model = Conv(0)
    before = evaluate(model, x, y)
    fit(model, x, y, Local(epochs=10, batch=20, momentum=0.9, lr=0.05, weight_decay=1e-4), 0)
    after = evaluate(model, x, y)
    assert after.accuracy > 0.9 > before.accuracy
    assert after.loss < before.loss
    assert not any(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_correct_amends_the_gradient_after_clipping():
    model = Quadratic(0.0)
    x, y = quadratic_data(1, 10)  # gradient -10, clipped to -1, corrected to -0.5
    fit(model, x, y, Local(steps=1, lr=0.1, clip=1.0), 0, correct=lambda name, g: g + 0.5)
    assert model.x.item() == pytest.approx(0.05, abs=1e-6)


def test_empty_client_returns_its_input():
    model = Conv(0)
    before = weights_of(model)
    done = fit(model, torch.empty(0, 1, 8, 8), torch.empty(0, dtype=torch.int64), Local(), 0)
    assert same_bits(weights_of(model), before)
    assert done.steps == 0
    assert math.isnan(done.loss)


# ---- G6: BatchNorm and batches of one --------------------------------------------------------------


def test_g6_a_batch_of_one_is_skipped_with_batchnorm():
    x, y = images(9)
    assert fit(Conv(0), x, y, Local(epochs=3, batch=4), 0).steps == 6
    assert fit(Conv(0, norm=False), x, y, Local(epochs=3, batch=4), 0).steps == 9


def test_g6_a_client_with_one_sample_trains_on_running_statistics():
    x, y = images(1)
    model = Conv(0)
    before = weights_of(model)
    assert fit(model, x, y, Local(epochs=3, batch=4), 0).steps == 3
    after = weights_of(model)
    statistics = {n for n in before if n.startswith("1.") and n not in ("1.weight", "1.bias")}
    assert {n for n in before if torch.equal(before[n], after[n])} == statistics


def test_g6_a_batch_size_of_one_trains_on_running_statistics():
    x, y = images(5)
    model = Conv(0)
    mean = model[1].running_mean.clone()
    assert fit(model, x, y, Local(epochs=2, batch=1), 0).steps == 10
    assert torch.equal(model[1].running_mean, mean)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 12),
    batch=st.integers(1, 8),
    epochs=st.integers(0, 3),
    steps=st.none() | st.integers(0, 9),
    norm=st.booleans(),
)
def test_the_steps_of_a_training_are_known_beforehand(n, batch, epochs, steps, norm):
    cfg = Local(epochs=epochs, steps=steps, batch=batch, lr=0.01)
    assert planned_steps(cfg, n, norm) == fit(Conv(0, norm), *images(n), cfg, 0).steps


# ---- G8: blow-ups ----------------------------------------------------------------------------------


def test_g8_a_loss_above_1000_raises():
    model = Quadratic(0.0)
    x, y = quadratic_data(3, 10)  # lr 1 with curvature 3 doubles the distance at every step
    with pytest.raises(Diverged, match=r"a loss of .* at step 3; lower lr \(1\)") as caught:
        fit(model, x, y, Local(steps=50, lr=1.0), 0)
    assert caught.value.steps == 2  # distances 10, 20: losses 150, 600; the third, at distance 40, is 2400
    assert abs(model.x.item() - 10) == pytest.approx(40)


def test_g8_a_loss_that_is_no_number_raises():
    model = mlp(0)
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    before = weights_of(model)
    with pytest.raises(Diverged, match="a loss of nan at step 1; no weight has changed yet: look at the model"):
        fit(model, *images(10), Local(), 0)
    assert torch.equal(weights_of(model)["3.bias"], before["3.bias"])


def test_g8_weights_that_the_last_step_makes_infinite_raise():
    """The loss of every step was fine; nobody would have looked at what the last one left."""
    model = Quadratic(0.0)
    with pytest.raises(Diverged, match="weights that are not finite after 1 steps"):
        fit(model, *quadratic_data(3, 10), Local(steps=1, lr=1e308), 0)
    assert not is_finite(weights_of(model))


# ---- objectives ------------------------------------------------------------------------------------


def test_fp_1():
    received = {"x": torch.zeros(1, dtype=torch.float64)}
    for a, b, minimiser in ((1, 1, 0.5), (2, -1, -2 / 3)):
        model = Quadratic(0.0)
        fit(model, *quadratic_data(a, b), Local(steps=400, lr=0.1), 0, proximal(1.0, received))
        assert model.x.item() == pytest.approx(minimiser, abs=1e-12)
    model = Quadratic(0.5)
    fit(model, *quadratic_data(1, 1), Local(steps=1, lr=0.1), 0, proximal(1.0, received))
    assert model.x.item() == pytest.approx(0.5, abs=1e-15)


def test_proximal_pulls_parameters_only_and_mu_zero_is_free():
    x, y = images(30)
    model, plain, pulled = Conv(0), Conv(0), Conv(0)
    received = weights_of(model)
    cfg = Local(epochs=3, batch=10, lr=0.05)
    fit(model, x, y, cfg, 0)
    fit(plain, x, y, cfg, 0, proximal(0.0, received))
    fit(pulled, x, y, cfg, 0, proximal(10.0, received))
    assert same_bits(weights_of(model), weights_of(plain))

    def moved(m: nn.Module) -> float:
        return sum((p - received[n]).square().sum().item() for n, p in m.named_parameters())

    assert moved(pulled) < moved(model) / 4
    with pytest.raises(ValueError, match="mu"):
        proximal(-1.0, received)


# ---- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Conv, mlp])
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(make):
    model, (x, _) = make(0), images(300)
    same, everything = equal_rows(model), logits_of(model, x)
    for batch in (1, 2, 3, 7, 15, 16, 31, 33, 128):
        assert same(logits_of(model, x, batch), everything), batch
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert same(logits_of(model, x[order], 64), everything[order])
    assert same(logits_of(model, x[:5]), everything[:5])


def test_logits_leave_the_model_as_it_was_layer_by_layer():
    model = Conv(0)
    model.train()
    model[1].eval()  # somebody froze this one
    before = weights_of(model)
    out = logits_of(model, images(40)[0])
    assert not out.requires_grad
    assert model.training
    assert model[0].training
    assert not model[1].training
    assert same_bits(weights_of(model), before)


def test_evaluate_counts_and_ties_go_to_the_lowest_class():
    model = nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [1.0], [0.0]]))
    score = evaluate(model, torch.ones(4, 1), torch.tensor([0, 0, 1, 2]))
    assert (score.correct, score.total, score.accuracy) == (2, 4, 0.5)
    lse = math.log(2 * math.e + 1)
    assert score.loss == pytest.approx((3 * (lse - 1) + lse) / 4, rel=1e-6)
    empty = evaluate(model, torch.empty(0, 1), torch.empty(0, dtype=torch.int64))
    assert (empty.correct, empty.total, empty.accuracy) == (0, 0, 0.0)


def test_weights_are_copies_in_one_layout():
    model = Conv(0).to(memory_format=torch.channels_last)
    weights = weights_of(model)
    assert all(t.is_contiguous() for t in weights.values())
    weights["0.weight"].zero_()
    assert model[0].weight.abs().sum() > 0


def test_a_single_sample_has_a_gradient_with_batchnorm_too():
    x, y = images(1)
    model, reference = Conv(0), Conv(0).eval()  # by the running statistics: one sample has no variance
    F.cross_entropy(reference(x), y).backward()
    got = gradient_of(model, x, y, batch=5)
    torch.testing.assert_close(got, {n: p.grad for n, p in reference.named_parameters()}, rtol=1e-5, atol=1e-7)
    assert got["8.weight"].abs().sum() > 0


def test_no_gradient_is_left_behind():
    x, y = images(6)
    model = mlp(0)
    fit(model, x, y, Local(epochs=1, batch=3), 0)
    assert all(p.grad is None for p in model.parameters())


def test_full_gradient_equals_autograd_over_everything():
    x, y = images(23)
    model, reference = mlp(0), mlp(0)
    F.cross_entropy(reference(x), y).backward()
    got = gradient_of(model, x, y, batch=5)
    torch.testing.assert_close(got, {n: p.grad for n, p in reference.named_parameters()}, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", -1),
        ("steps", -1),
        ("batch", 0),
        ("lr", -0.1),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("weight_decay", -1.0),
        ("clip", 0.0),
    ],
)
def test_impossible_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Local(**{field: value})


def test_adam_has_no_momentum_setting():
    with pytest.raises(ValueError, match="momentum"):
        Local(optimizer="adam", momentum=0.9)
