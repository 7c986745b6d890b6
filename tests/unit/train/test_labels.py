"""Soft labels: tables of labels (FD) and entropy reduction (DS-FL), against numbers worked out elsewhere."""

import math

import pytest
import torch
import torch.nn.functional as F

from solera.methods.dsfl import reduce_entropy
from solera.methods.fd import LabelSums, label_loss, others
from solera.train.teachers import entropy

TABLES = torch.tensor(
    [[[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.0, 0.0]], [[0.9, 0.1], [0.4, 0.6]]]
)  # client 1 has no 1


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[None]


# ---- tables of labels ------------------------------------------------------------------------------


def test_fd1_each_learns_from_the_mean_of_the_others_that_hold_the_label():
    want = [[[0.75, 0.25], [0.4, 0.6]], [[0.8, 0.2], [0.3, 0.7]], [[0.65, 0.35], [0.2, 0.8]]]
    for own, expected in zip(TABLES, want, strict=True):
        assert torch.allclose(others(TABLES.sum(0), own), torch.tensor(expected), atol=1e-6)


def test_fd2_the_loss():
    logits = rows(0.6, 0.4).log()
    loss = label_loss(logits, torch.tensor([0]), others(TABLES.sum(0), TABLES[1]), 0.01)
    assert loss.item() == pytest.approx(0.5167448102, abs=1e-8)  # the table is float32


def test_a_label_nobody_else_holds_has_no_teacher():
    first, second = torch.tensor([[0.1, 0.9], [0.3, 0.7]]), torch.tensor([[0.2, 0.8], [0.0, 0.0]])
    table = others(first + second, first)
    assert torch.allclose(table, second, atol=1e-6)
    assert table[1].tolist() == [0.0, 0.0]
    logits = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.ones(3, dtype=torch.int64)
    assert torch.equal(label_loss(logits, labels, table, 5.0), F.cross_entropy(logits, labels))


def test_the_mean_of_others_is_exact_enough_for_many_and_never_negative():
    g = torch.Generator().manual_seed(1)
    tables = torch.rand(1000, 5, 5, generator=g).mul(20).softmax(-1)
    found = others(tables.double().mean(0).float() * 1000, tables[7])
    by_hand = (tables.double().sum(0) - tables[7].double()) / 999
    assert torch.allclose(found.double(), by_hand, atol=1e-6)
    assert bool((others(tables[0], tables[0] + 1e-7) == 0).all())  # rounding leaves nothing


def test_sums_by_label_are_means_over_all_batches_and_zero_for_labels_never_seen():
    probs = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    table = LabelSums(3)
    table.add(probs[:2], torch.tensor([0, 0]))
    table.add(probs[2:], torch.tensor([2]))
    table.add(probs[:1], torch.tensor([2]))
    want = torch.tensor([[0.7, 0.175, 0.125], [0.0, 0.0, 0.0], [0.5, 0.1, 0.4]])
    assert torch.allclose(table.means(), want, atol=1e-7)
    assert table.means().dtype == torch.float32


def test_without_weight_the_loss_is_cross_entropy_to_the_bit():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels, table = torch.arange(6) % 4, torch.full((4, 4), 0.25)
    plain = F.cross_entropy(logits, labels)
    assert torch.equal(label_loss(logits, labels, table, 0.0), plain)
    pulled = label_loss(logits, labels, table, 0.3)
    by_hand = plain + 0.3 * F.cross_entropy(logits, table[labels])
    assert pulled.item() == pytest.approx(by_hand.item(), rel=1e-6)


# ---- entropy reduction -----------------------------------------------------------------------------


def test_era1_a_spread_out_mean_gets_sharper():
    mean = rows(0.4, 0.35, 0.25)
    found = reduce_entropy(mean, 0.1)
    assert torch.allclose(found, rows(0.54654939, 0.33149896, 0.12195165), atol=1e-8)
    assert entropy(mean).item() == pytest.approx(1.0805276, abs=1e-7)
    assert entropy(found).item() == pytest.approx(0.9528076, abs=1e-7)


def test_era2_and_era5_a_certain_mean_gets_softer():
    assert torch.allclose(reduce_entropy(rows(1, 0, 0), 0.1), rows(0.99990921, 4.54e-5, 4.54e-5), atol=1e-8)
    certain = torch.eye(100, dtype=torch.float64)[:1]
    assert reduce_entropy(certain, 0.1)[0, 0].item() == pytest.approx(0.99552552, abs=1e-8)


def test_era3_on_logits():
    assert torch.allclose(reduce_entropy(rows(1, 0.5, 0), 0.1), rows(0.99326236, 0.00669255, 0.00004509), atol=1e-8)


def test_era4_ten_classes():
    found = reduce_entropy(rows(0.19, *[0.09] * 9), 0.1)[0]
    assert found[0].item() == pytest.approx(0.23196932, abs=1e-8)
    assert found[1].item() == pytest.approx(0.08533674, abs=1e-8)


def test_era_keeps_the_first_choice_and_the_type():
    means = torch.rand(200, 7, generator=torch.Generator().manual_seed(3)).softmax(-1)
    for temperature in (0.01, 0.1, 0.9):
        found = reduce_entropy(means, temperature)
        assert found.dtype == torch.float32
        assert torch.equal(found.argmax(-1), means.argmax(-1))
        assert torch.allclose(found.sum(-1), torch.ones(200))
    ratio = reduce_entropy(rows(1, 0), 0.5)[0]
    assert (ratio[0] / ratio[1]).item() == pytest.approx(math.exp(2))
