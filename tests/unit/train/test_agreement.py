"""How a round's teachers stand to each other, worked out by hand."""

import pytest
import torch

from solera.train.consensus import agreement

# Two sure teachers agree; the third is unsure and says class 1 of the first sample.
PROBS = torch.tensor(
    [[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], [[0.4, 0.6], [0.6, 0.4]]], dtype=torch.float64
)


def test_agreement_by_hand():
    found = agreement(PROBS)
    # variances over the classes: 0.25, 0.25 and 0.01
    assert found.confidence.tolist() == pytest.approx([0.25 / 0.51, 0.25 / 0.51, 0.01 / 0.51])
    assert found.agrees.tolist() == [1.0, 1.0, 0.5]
    assert found.dissenting == pytest.approx(1 / 6)  # one of three, for one of two samples
    assert found.unanimous == 0.5


def test_a_teacher_drawn_twice_counts_twice():
    found = agreement(PROBS, torch.tensor([1, 1, 2]))
    assert found.dissenting == pytest.approx(2 / 4 / 2)
    assert found.confidence.sum().item() == pytest.approx(1)


def test_one_teacher_agrees_with_itself():
    found = agreement(PROBS[2:])
    assert (found.dissenting, found.unanimous, found.agrees.tolist()) == (0.0, 1.0, [1.0])
