"""Selective fusion: the numbers of GEM-1, and the mistakes of others."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from solera.methods.fedgems import fused_logits, reliable_weights, selective_loss
from solera.train.teachers import entropy, soft_targets

P = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1]], dtype=torch.float64)[:, None]  # three clients
Y = torch.tensor([0])
SERVER = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()


def close(found, expected):
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9)


def test_gem_1_clients_that_are_right_count_by_how_sure_they_are():
    close(entropy(P)[:, 0], [0.63903186, 1.02965301, 0.63903186])
    close(reliable_weights(P, Y)[:, 0], [0.64420591, 0.35579409, 0.0])


def test_gem_1_teacher_and_loss():
    targets, surprise = soft_targets(fused_logits(P, reliable_weights(P, Y)))
    close(targets[0], [0.71048114, 0.15518301, 0.13433585])
    loss = selective_loss(SERVER, Y, targets, surprise, torch.tensor([0.75], dtype=torch.float64))
    assert loss.item() == pytest.approx(1.3598605257, abs=5e-11)


def test_the_unreliable_are_not_in_the_softmax_as_they_are_in_aijack():
    """With a score of 0 instead of none, the wrong client would still get a share."""
    weights = reliable_weights(P, Y)[:, 0]
    assert weights[2] == 0
    assert weights.sum().item() == pytest.approx(1, abs=1e-15)
    with_zero = torch.tensor([1 / 0.63903186, 1 / 1.02965301, 0.0]).softmax(0)
    assert with_zero[2] > 0.1


def test_the_divergence_has_the_teacher_first_and_is_summed_over_classes_unlike_aijack():
    """AIJack swaps the arguments of the KL and divides by the number of classes."""
    targets, surprise = soft_targets(torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 1.0]]))
    logits = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    labels, only_kl = torch.tensor([0, 1]), torch.zeros(2)
    found = selective_loss(logits, labels, targets, surprise, only_kl)
    right = F.kl_div(logits.log_softmax(-1), targets, reduction="batchmean")
    swapped = F.kl_div(targets.log(), logits.softmax(-1), reduction="none").mean()
    torch.testing.assert_close(found, right)
    assert abs(found - swapped) > 0.1
    both = selective_loss(logits, labels, targets, surprise, torch.full((2,), 0.75))
    torch.testing.assert_close(both, 0.75 * F.cross_entropy(logits, labels) + 0.25 * right)


def test_the_share_is_of_each_sample():
    targets, surprise = soft_targets(torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 1.0]]))
    logits, labels = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([0, 1])
    found = selective_loss(logits, labels, targets, surprise, torch.tensor([1.0, 0.0]))
    kl = F.kl_div(logits[1].log_softmax(-1), targets[1], reduction="sum")
    torch.testing.assert_close(found, (F.cross_entropy(logits[:1], labels[:1]) + kl) / 2)


def test_a_sample_nobody_gets_right_has_no_teacher():
    weights = reliable_weights(P, torch.tensor([2]))
    assert weights.tolist() == [[0.0], [0.0], [0.0]]


def test_a_client_without_any_doubt_is_finite():
    sure = torch.tensor([[1.0, 0.0], [0.6, 0.4]], dtype=torch.float32)[:, None]
    weights = reliable_weights(sure, torch.tensor([0]))
    assert weights[:, 0].tolist() == [1.0, 0.0]
    assert torch.isfinite(fused_logits(sure, weights)).all()
    two = reliable_weights(sure[:1].expand(2, 1, 2), torch.tensor([0]))
    assert two[:, 0].tolist() == [0.5, 0.5]


def test_log_probabilities_are_as_good_as_logits():
    """A softmax does not see the number by which they differ."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 5, generator=g, dtype=torch.float64) * 3
    weights = torch.rand(4, 6, generator=g, dtype=torch.float64).softmax(0)
    fused = fused_logits(logits.softmax(-1), weights)
    torch.testing.assert_close(fused.softmax(-1), (weights[..., None] * logits).sum(0).softmax(-1))


@given(st.lists(st.lists(st.floats(-8, 8), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(0, 2))
def test_weights_are_shares_of_those_who_are_right(rows, label):
    probs = torch.tensor(rows, dtype=torch.float64).softmax(-1)[:, None]
    weights = reliable_weights(probs, torch.tensor([label]))[:, 0]
    right = probs[:, 0].argmax(-1) == label
    assert bool((weights[~right] == 0).all())
    assert math.isclose(weights.sum().item(), float(right.any()), abs_tol=1e-12)
    for i in right.nonzero().flatten().tolist():  # the surer of two that are right counts at least as much
        for j in right.nonzero().flatten().tolist():
            if entropy(probs[i]) < entropy(probs[j]):
                assert weights[i] >= weights[j]
