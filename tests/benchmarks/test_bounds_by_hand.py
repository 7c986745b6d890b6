"""The generalisation statements: terms worked out by hand, and a toy where the truth is known."""

import math

import pytest
import torch

from bounds import (
    Bound,
    Line,
    best_mixture,
    feddf_bound,
    fedet_bound,
    fit_threshold,
    hoeffding,
    proxy_a_distance,
)


def test_hoeffding():
    assert hoeffding(50, 0.1) == pytest.approx(0.173082, abs=1e-6)  # sqrt(2.995732 / 100)


def test_feddf_term_by_term():
    found = feddf_bound(0.1, [0.4, 0.8], [0.05, 0.15], m=8, delta=0.1)
    assert found.empirical == 0.1
    assert found.deviation == pytest.approx(0.480162, abs=1e-6)  # sqrt(log(2 * 2 / 0.1) / 16) = sqrt(3.688879 / 16)
    assert found.divergence == pytest.approx(0.3)  # (0.2 + 0.4) / 2
    assert found.joint == pytest.approx(0.1)
    assert found.total == pytest.approx(0.980162, abs=1e-6)
    assert not found.vacuous
    assert feddf_bound(0.13, [0.4, 0.8], [0.05, 0.15], m=8, delta=0.1).vacuous


def test_fedet_term_by_term():
    given = ([0.25, 0.75], [0.2, 0.4], [4, 16], [1.0, 0.2], [0.1, 0.3], 0.05)
    found = fedet_bound(*given)
    assert found.empirical == pytest.approx(0.35)
    assert found.deviation == pytest.approx(0.540880, abs=1e-6)  # sqrt(2.995732) * (0.25 / 2 + 0.75 / 4)
    assert found.divergence == pytest.approx(0.2)  # (0.25 + 0.15) / 2
    assert found.joint == pytest.approx(0.25)
    assert found.vacuous
    # sqrt(log(2 * 2 / 0.05) / 2) = sqrt(2.191013)
    assert fedet_bound(*given, as_proved=True).deviation == pytest.approx(1.480207 * 0.3125, abs=1e-6)


def test_the_last_step_of_fedets_proof_needs_a_delta_of_at_most_one_half():
    proof, theorem = (lambda d: math.sqrt(math.log(2 / d) / 2)), (lambda d: math.sqrt(math.log(1 / d)))
    assert proof(0.4) < theorem(0.4)
    assert proof(0.5) == pytest.approx(theorem(0.5))
    assert proof(0.6) > theorem(0.6)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: feddf_bound(0.1, [0.1], [0.1], 5, 1.0), "delta = 1.0"),
        (lambda: feddf_bound(0.1, [0.1], [0.1], 0, 0.1), "at least one"),
        (lambda: feddf_bound(0.1, [2.5], [0.1], 5, 0.1), "between 0 and 2"),
        (lambda: feddf_bound(0.1, [0.5], [0.1, 0.2], 5, 0.1), "1 divergences, 2 joint risks"),
        (lambda: fedet_bound([0.5, 0.6], [0, 0], [1, 1], [0, 0], [0, 0], 0.1), "sum to 1"),
        (lambda: proxy_a_distance(torch.zeros(3, 1), torch.zeros(9, 1)), "at least 4 of each"),
    ],
)
def test_impossible_arguments(call, told):
    with pytest.raises(ValueError, match=told):
        call()


# ---- MNFL -------------------------------------------------------------------------------------------


def test_two_models_that_know_half_each_are_better_together():
    knows = torch.tensor([[0.9, 0.9, 0.1, 0.1], [0.1, 0.1, 0.9, 0.9]])
    probs = torch.stack([knows, 1 - knows], -1)
    found = best_mixture(probs, torch.zeros(4, dtype=torch.long), 0)
    assert found.coefficients.tolist() == pytest.approx([0.5, 0.5])
    assert found.loss == pytest.approx(math.log(2))
    assert found.own == pytest.approx(-(math.log(0.9) + math.log(0.1)) / 2)


def test_the_own_model_alone_is_always_a_choice():
    knows = torch.tensor([[0.9, 0.9], [0.5, 0.5]])
    found = best_mixture(torch.stack([knows, 1 - knows], -1), torch.zeros(2, dtype=torch.long), 0)
    assert found.coefficients.tolist() == [1, 0]
    assert found.loss == found.own


def test_the_mixture_is_the_best_on_a_fine_grid():
    g = torch.Generator().manual_seed(0)
    probs = torch.rand(2, 30, 3, generator=g).softmax(-1) ** 3
    probs = probs / probs.sum(-1, keepdim=True)
    labels = torch.randint(0, 3, (30,), generator=g)
    found = best_mixture(probs, labels, 1)
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
    given = probs.double()[:, torch.arange(30), labels]
    losses = -(grid[:, None] * given[0] + (1 - grid[:, None]) * given[1]).log().mean(1)
    assert found.loss <= losses.min().item() + 1e-9
    assert found.loss == pytest.approx(losses.min().item(), abs=1e-5)


# ---- the divergence ---------------------------------------------------------------------------------


def test_the_proxy_distance_of_sets_that_are_alike_and_apart():
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(2000, 5, generator=g), torch.randn(2000, 5, generator=g)
    assert proxy_a_distance(a, b) < 0.15
    assert proxy_a_distance(a, b + 20) == 2
    shifted = b.clone()
    shifted[:, 0] += 1  # the best linear classifier is right with probability Phi(1/2) = 0.6915
    assert proxy_a_distance(a, shifted) == pytest.approx(2 * (1 - 2 * 0.3085), abs=0.12)


def test_the_divergence_on_a_line_by_hand():
    line = Line((0.0, 1.0), 1.0, 1.0, 0.1)
    assert [line.divergence(k) for k in (0, 1)] == pytest.approx([1, 1])  # of [0, 1]: probabilities 1 and 1/2
    # [0, 1], [0.5, 1.5]: of [0, 0.5] the first has 1/2 and the target 1/4
    assert Line((0.0, 0.5), 1.0, 0.7, 0.0).divergence(0) == pytest.approx(0.5)
    assert Line((0.0, 0.0), 1.0, 0.5, 0.0).divergence(1) == 0
    assert line.joint == pytest.approx(0.2)


def test_the_divergence_is_the_supremum_over_intervals():
    line = Line((0.0, 0.2, 0.9), 0.5, 0.4, 0.0)
    at = torch.linspace(-0.1, 1.5, 321, dtype=torch.float64)
    for k in range(3):
        gap = line.cdf(k, at) - line.target_cdf(at)
        most = (gap[None, :] - gap[:, None]).abs().max().item()
        assert line.divergence(k) == pytest.approx(2 * most, abs=1e-9)


def test_risks_on_a_line_by_hand():
    line = Line((0.0, 1.0), 1.0, 0.5, 0.1)
    at = torch.tensor(0.75, dtype=torch.float64)
    assert line.risk(at, 0).item() == pytest.approx(0.1 + 0.8 * 0.25)
    assert line.risk(at, 1).item() == pytest.approx(0.1)  # nothing of client 1 lies between
    assert line.risk(at).item() == pytest.approx(0.1 + 0.8 * 0.125)


def test_risks_are_the_frequencies_of_mistakes():
    line = Line((0.0, 0.3), 0.5, 0.4, 0.2)
    x, y = line.draw(1, 200_000, torch.Generator().manual_seed(2))
    wrong = ((x > 0.6) != y).double().mean().item()
    assert wrong == pytest.approx(line.risk(torch.tensor(0.6, dtype=torch.float64), 1).item(), abs=0.005)


@pytest.mark.parametrize(
    ("y", "threshold", "risk"),
    [([0, 0, 1, 1], 2.5, 0.0), ([1, 1, 1, 1], 0.0, 0.0), ([0, 0, 0, 0], 5.0, 0.0), ([1, 0, 1, 1], 0.0, 0.25)],
)
def test_the_best_threshold(y, threshold, risk):
    x = torch.tensor([3.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    assert fit_threshold(x, torch.tensor(y)[order].bool()) == (threshold, risk)


@pytest.mark.parametrize(
    ("x", "y", "threshold", "risk"),
    [
        ([1, 1], [0, 1], 0.0, 0.5),  # no threshold lies between them
        ([1, 1, 2], [0, 1, 1], 0.0, 1 / 3),
        ([1, 2, 2, 2, 3], [0, 0, 1, 0, 1], 2.5, 0.2),
        ([2, 2, 2], [1, 0, 0], 3.0, 1 / 3),
        ([1.0, 1.0 + 2**-52], [0, 1], 1.0, 0.0),  # their middle is rounded to the right one, which it must not be
    ],
)
def test_equal_samples_are_on_one_side_of_the_best_threshold(x, y, threshold, risk):
    inputs, labels = torch.tensor(x, dtype=torch.float64), torch.tensor(y).bool()
    for order in (range(len(x)), reversed(range(len(x)))):
        rows = torch.tensor(list(order))
        at, found = fit_threshold(inputs[rows], labels[rows])
        assert (at, found) == (pytest.approx(threshold), pytest.approx(risk))
        assert ((inputs > at) != labels).double().mean().item() == found, "the risk is that of the threshold"


def test_more_noise_than_a_half_is_refused():
    assert Line((0.0,), 1.0, 0.5, 0.5).joint == 1.0
    for noise in (0.51, 0.9, -0.1):
        with pytest.raises(ValueError, match=r"noise = .*between 0 and 1/2"):
            Line((0.0,), 1.0, 0.5, noise)


def test_the_bounds_hold_in_the_toy_far_more_often_than_they_say():
    line = Line(tuple(0.06 * k for k in range(5)), 0.4, 0.3, 0.1)
    g = torch.Generator().manual_seed(0)
    distance, joint = [line.divergence(k) for k in range(5)], [line.joint] * 5
    broken = 0
    for _ in range(100):
        drawn = [line.draw(k, 50, g) for k in range(5)]
        fits = [fit_threshold(x, y) for x, y in drawn]
        _, pooled = fit_threshold(torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn]))
        risk = line.risk(torch.tensor([at for at, _ in fits], dtype=torch.float64)).mean().item()
        assert risk >= line.noise
        bounds = [
            feddf_bound(pooled, distance, joint, 50, 0.05),
            fedet_bound([0.2] * 5, [r for _, r in fits], [50] * 5, distance, joint, 0.05),
        ]
        broken += any(risk > b.total for b in bounds)
    assert broken == 0


def test_hoeffding_does_not_hold_for_a_hypothesis_that_knows_its_samples():
    """What both proofs do: a model that remembers its samples has no mistakes on them, whatever the labels are."""
    m, delta = 100, 0.05
    g = torch.Generator().manual_seed(3)
    labels = torch.rand(1000, m, generator=g) < 0.5  # unrelated to the inputs
    remembered = torch.zeros(1000)  # risk on the training samples
    true = torch.full((1000,), 0.5)
    assert (true > remembered + hoeffding(m, delta)).all()  # in every draw, not in one of twenty
    fixed = labels.double().mean(1)  # the mistakes of "always 0", chosen before
    assert (fixed + hoeffding(m, delta) < 0.5).double().mean().item() <= delta


def test_a_bound_is_the_sum_of_its_terms():
    assert Bound(0.1, 0.2, 0.3, 0.4).total == pytest.approx(1.0)
