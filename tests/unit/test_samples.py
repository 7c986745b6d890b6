"""Samples: what a tensor and samples drawn anew have in common, and how models are trained and asked on them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solera.core.randomness import seed_from
from solera.core.tensors import Views, batches, draw, is_fresh, joined, subset, take, weights_of
from solera.train.fitting import Local, evaluate, fit, gradient_of, logits_of, minibatches
from solera.train.norms import reestimate
from solera.train.teachers import by_position
from toys import Conv, images, mlp, same_bits

X, Y = images(40)
ROWS = torch.tensor([3, 39, 0, 3])


def noise(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noisy(x=X) -> Views:
    """Samples that are drawn with noise."""
    return Views(len(x), lambda rows: x[rows], lambda rows, seed: x[rows] + noise(x[rows].shape, seed))


def test_a_tensor_is_the_same_at_each_draw():
    assert not is_fresh(X)
    for look in (take(X, ROWS), draw(X, ROWS, 1), draw(X, ROWS, 2)):
        assert torch.equal(look, X[ROWS])
    assert torch.equal(torch.cat(list(batches(X, 7))), X)


def test_samples_drawn_anew():
    samples = noisy()
    assert is_fresh(samples)
    assert torch.equal(take(samples, ROWS), X[ROWS])
    assert torch.equal(draw(samples, ROWS, 4), X[ROWS] + noise(X[ROWS].shape, 4))
    assert [len(x) for x in batches(samples, 16)] == [16, 16, 8]
    assert torch.equal(torch.cat(list(batches(samples, 16))), X)


@pytest.mark.parametrize("inputs", [X, noisy()], ids=["tensor", "fresh"])
def test_parts_and_sums_of_samples(inputs):
    part = subset(inputs, torch.arange(10, 20))
    assert (len(part), is_fresh(part)) == (10, is_fresh(inputs))
    assert torch.equal(take(part, torch.tensor([2, 0])), X[[12, 10]])
    assert torch.equal(draw(part, torch.tensor([2, 0]), 5), draw(inputs, torch.tensor([12, 10]), 5))
    more = images(5, seed=9)[0]
    both, rows = joined(inputs, more), torch.tensor([44, 1, 40, 7])
    assert (len(both), is_fresh(both)) == (45, is_fresh(inputs))
    assert torch.equal(take(both, rows), torch.stack([more[4], X[1], more[0], X[7]]))
    drawn = draw(both, rows, 5)
    assert torch.equal(drawn[[0, 2]], more[[4, 0]])
    assert torch.equal(drawn[[1, 3]], draw(inputs, torch.tensor([1, 7]), 5))
    assert draw(both, rows[:0], 5).shape == X[:0].shape


def test_training_draws_each_step_by_seed_and_step():
    cfg = Local(epochs=2, batch=16, lr=0.05)
    model, hand = mlp(0), mlp(0)
    done = fit(model, noisy(), Y, cfg, seed=7)
    order, optimizer, step = torch.Generator().manual_seed(7), torch.optim.SGD(hand.parameters(), 0.05), 0
    for _ in range(2):
        for rows in torch.randperm(40, generator=order).split(16):
            x = X[rows] + noise(X[rows].shape, seed_from(7, "draw", step))
            optimizer.zero_grad()
            F.cross_entropy(hand(x), Y[rows]).backward()
            optimizer.step()
            step += 1
    assert done.steps == step == 6
    for name, t in weights_of(model).items():
        torch.testing.assert_close(t, hand.state_dict()[name], rtol=0, atol=1e-6)


def test_two_trainings_with_one_seed_see_the_same_and_no_two_steps_do():
    cfg = Local(epochs=3, batch=40)
    zeros = Views(40, lambda rows: X[rows] * 0, lambda rows, seed: noise(X[rows].shape, seed))
    steps = [x for x, _ in minibatches(zeros, Y, cfg, 3)]
    again = [x for x, _ in minibatches(zeros, Y, cfg, 3)]
    assert all(torch.equal(a, b) for a, b in zip(steps, again, strict=True))
    assert len({x.numpy().tobytes() for x in [*steps, *(x for x, _ in minibatches(zeros, Y, cfg, 4))]}) == 6


def test_labels_stay_with_their_samples():
    index = torch.arange(100)
    samples = Views(100, lambda rows: index[rows, None], lambda rows, seed: index[rows, None] + 0)
    for a, b in minibatches(samples, index, Local(epochs=2, batch=7), 5):
        assert torch.equal(a[:, 0], b)


def test_models_are_asked_and_judged_on_samples_as_they_are():
    model = Conv(0)
    assert torch.equal(logits_of(model, noisy()), logits_of(model, X))
    assert evaluate(model, noisy(), Y) == evaluate(model, X, Y)
    statistics = [Conv(0), Conv(0)]
    reestimate(statistics[0], X, batch=16)
    reestimate(statistics[1], noisy(), batch=16)
    assert same_bits(*map(weights_of, statistics))


def test_a_gradient_is_of_what_is_drawn():
    got = gradient_of(mlp(0), noisy(), Y, batch=40, seed=3)
    expected = gradient_of(mlp(0), X + noise(X.shape, seed_from(3, "draw", 0)), Y, batch=40)
    assert same_bits(got, expected)
    assert not same_bits(got, gradient_of(mlp(0), X, Y, batch=40))


def test_answers_kept_by_position_are_computed_anew_where_samples_are_fresh():
    asked: list[int] = []

    def teacher(x):
        asked.append(len(x))
        return (logits_of(frozen, x),)

    frozen: nn.Module = Conv(1)
    kept = by_position(teacher, X)
    assert torch.equal(kept(X[ROWS] * 0, ROWS)[0], logits_of(frozen, X)[ROWS])
    assert asked == [40]
    anew = by_position(teacher, noisy())
    drawn = draw(noisy(), ROWS, 8)
    assert asked == [40]
    assert torch.equal(anew(drawn, ROWS)[0], logits_of(frozen, drawn))
