"""What each step of a training sees, on a model whose gradient is 1: where it ends is minus the sum of its rates."""

import itertools
import math

import pytest
import torch
from torch import nn

from solera.core.tensors import Views, subset
from solera.train.fitting import Local, fit, gradient_of
from toys import images, mlp


class Slope(nn.Module):
    """One number; `falling` has gradient 1 by it."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs):
        return self.p.expand(len(inputs), 1)


def rates(cfg: Local, n: int = 1) -> list[float]:
    """The learning rate of each step of a training on n samples."""
    model, seen = Slope(), []

    def falling(model, x, y):
        seen.append(-model.p.item())
        return model.p.sum()

    fit(model, torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64), cfg, 0, falling)
    seen.append(-model.p.item())
    return [b - a for a, b in itertools.pairwise(seen)]


@pytest.mark.parametrize(
    ("steps", "factors"),
    [
        (8, [1] * 4 + [0.1] * 2 + [0.01] * 2),  # from half of the steps on, from three quarters on
        (7, [1] * 4 + [0.1] * 2 + [0.01]),
        (6, [1] * 3 + [0.1] * 2 + [0.01]),
        (5, [1] * 3 + [0.1] + [0.01]),
        (4, [1, 1, 0.1, 0.01]),
        (1, [1]),
    ],
)
def test_multistep_drops_at_half_and_at_three_quarters_of_the_steps(steps, factors):
    expected = [0.5 * f for f in factors]
    assert rates(Local(steps=steps, batch=1, lr=0.5, schedule="multistep")) == pytest.approx(expected, rel=1e-6)
    assert rates(Local(epochs=steps, batch=2, lr=0.5, schedule="multistep"), 2) == pytest.approx(expected, rel=1e-6)


def test_cosine_begins_at_lr_and_would_end_at_0_one_step_later():
    expected = [0.5 * (1 + math.cos(math.pi * s / 5)) / 2 for s in range(5)]
    assert rates(Local(steps=5, batch=1, lr=0.5, schedule="cosine")) == pytest.approx(expected, rel=1e-6)


# ---- minibatches of unequal size --------------------------------------------------------------------


@pytest.mark.parametrize("batch", [5, 12, 64])
def test_the_full_gradient_does_not_depend_on_how_samples_are_cut(batch):
    x, y = images(12)
    model = mlp(0)
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    found = gradient_of(mlp(0), x, y, batch)
    for g, e in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-7)


# ---- samples that are drawn anew at each step -------------------------------------------------------


def watched(n: int) -> tuple[Views, list[tuple[int, tuple[int, ...]]]]:
    """Samples that are drawn anew, and what was drawn: seed and rows."""
    x, seen = images(n)[0], []

    def drawn(rows, seed):
        seen.append((seed, tuple(rows.tolist())))
        return x[rows]

    return Views(n, lambda rows: x[rows], drawn), seen


def test_every_step_of_every_epoch_draws_its_samples_anew():
    views, seen = watched(10)
    y = images(10)[1]
    fit(mlp(0), views, y, Local(epochs=3, batch=4, lr=0.0), 7)
    assert [len(rows) for _, rows in seen] == [4, 4, 2] * 3
    assert len({seed for seed, _ in seen}) == 9
    again = list(seen)
    fit(mlp(0), views, y, Local(epochs=3, batch=4, lr=0.0), 7)
    assert seen[9:] == again  # the same seed, the same draws
    fit(mlp(0), views, y, Local(epochs=3, batch=4, lr=0.0), 8)
    assert not {seed for seed, _ in seen[18:]} & {seed for seed, _ in again}


def test_every_part_of_the_full_gradient_draws_anew_too():
    views, seen = watched(10)
    gradient_of(mlp(0), views, images(10)[1], 4, seed=3)
    assert [rows for _, rows in seen] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert len({seed for seed, _ in seen}) == 3


def test_a_subset_draws_its_own_rows():
    views, seen = watched(10)
    chosen = subset(views, torch.tensor([7, 2, 5]))
    assert chosen.fresh
    drawn = chosen.draw(torch.tensor([2, 0]), 11)
    assert seen == [(11, (5, 7))]
    assert torch.equal(drawn, images(10)[0][[5, 7]])
    assert torch.equal(chosen[torch.tensor([1])], images(10)[0][[2]])
