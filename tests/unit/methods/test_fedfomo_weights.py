"""FedFomo's weights and the choice of models: a worked example, and the edges."""

import math
from collections import Counter

import pytest
import torch

from solera.methods.fedfomo import distance, epsilon_greedy, gains_of, step_towards

THETA = {"w": torch.zeros(2)}
CANDIDATES = [{"w": torch.tensor(w)} for w in ((3.0, 4.0), (1.0, 0.0), (0.0, 0.5))]


def test_fomo1():
    distances = [distance(c, THETA, ["w"]) for c in CANDIDATES]
    assert distances == [5.0, 1.0, 0.5]
    gains = gains_of(1.0, [0.6, 1.2, 0.9], distances)
    assert gains.tolist() == pytest.approx([0.08, -0.2, 0.2])
    weights = gains.clamp_min(0) / gains.clamp_min(0).sum()
    assert weights.tolist() == pytest.approx([0.28571429, 0, 0.71428571], abs=5e-9)
    assert step_towards(THETA, CANDIDATES, gains)["w"].tolist() == pytest.approx([0.85714286, 1.5], abs=5e-8)


def test_without_a_positive_gain_nothing_changes():
    assert step_towards(THETA, CANDIDATES, torch.tensor([-1.0, 0.0, -2.0])) is THETA
    assert step_towards(THETA, [], torch.empty(0)) is THETA


def test_a_candidate_at_distance_0_has_no_weight():
    assert gains_of(1.0, [0.5, 0.5], [0.0, 1.0]).tolist() == [0.0, 0.5]


def test_a_loss_that_is_not_a_number_is_the_worst_there_is():
    gains = gains_of(1.0, [math.nan, math.inf, 0.5], [1.0, 1.0, math.nan])
    assert bool(torch.isfinite(gains).all())
    assert gains.tolist() == [-1e6, -1e6, 0.0]


def test_batchnorm_statistics_are_mixed_and_do_not_count_in_the_distance():
    a = {"w": torch.zeros(1), "mean": torch.tensor([5.0]), "count": torch.tensor(7)}
    b = {"w": torch.ones(1), "mean": torch.tensor([1.0]), "count": torch.tensor(3)}
    assert distance(a, b, ["w"]) == 1.0
    mixed = step_towards(a, [a, b], torch.tensor([1.0, 3.0]))
    assert (mixed["w"].item(), mixed["mean"].item(), mixed["count"].item()) == (0.75, 2.0, 7)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_best_in_order():
    assert epsilon_greedy([0.1, 0.9, -0.5, 0.4], 3, 0.0, rng()) == [1, 3, 0]
    assert epsilon_greedy([0.1, 0.9], 5, 0.0, rng()) == [1, 0]
    assert epsilon_greedy([], 5, 0.5, rng()) == []


def test_exploring_takes_any_and_none_twice():
    draws = [epsilon_greedy([9.0, 8.0, 0.0, 0.0], 2, 1.0, rng(s)) for s in range(400)]
    assert all(len(set(d)) == 2 for d in draws)
    seen = Counter(i for d in draws for i in d)
    assert min(seen.values()) > 150  # 200 each, were they exactly uniform
    first = Counter(epsilon_greedy([9.0, 8.0, 0.0, 0.0], 1, 0.4, rng(s))[0] for s in range(1000))
    assert 0.65 < first[0] / 1000 < 0.75  # 0.6 + 0.4 / 4


def test_equal_scores_are_taken_in_random_order():
    assert {epsilon_greedy([0.0] * 4, 1, 0.0, rng(s))[0] for s in range(50)} == {0, 1, 2, 3}
