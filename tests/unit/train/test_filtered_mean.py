"""The mean that leaves out what stands out (Cronus), against a slow one written with numpy."""

import math

import numpy as np
import pytest
import torch

from solera.methods.cronus import filtered_mean

HONEST = ((0.8, 0.1, 0.1), (0.7, 0.2, 0.1), (0.75, 0.15, 0.1), (0.8, 0.15, 0.05))


def by_hand(answers: np.ndarray, epsilon: float, passes: int = 2) -> np.ndarray:
    """One sample: [teachers, classes]."""
    dropped = math.floor(epsilon * len(answers) / passes + 0.5)
    for _ in range(passes):
        if dropped and len(answers) > dropped:
            centred = answers - answers.mean(0)
            far = np.abs(centred @ np.linalg.svd(centred, full_matrices=False)[2][0]).round(9)
            answers = answers[np.sort(np.argsort(far, kind="stable")[: len(answers) - dropped])]
    return answers.mean(0)


def test_cro1_a_liar_is_left_out():
    answers = torch.tensor([*HONEST, (0.05, 0.05, 0.9)], dtype=torch.float64)[:, None]
    assert torch.allclose(filtered_mean(answers, 0.0), torch.tensor([[0.62, 0.13, 0.25]]).double())
    want = torch.tensor([[0.7833333, 0.1333333, 0.0833333]]).double()
    assert torch.allclose(filtered_mean(answers, 0.4), want, atol=1e-7)


@pytest.mark.parametrize(("teachers", "classes"), [(5, 3), (12, 10), (3, 6), (20, 2)])
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.45])
def test_every_sample_is_filtered_by_itself(teachers, classes, epsilon):
    g = torch.Generator().manual_seed(teachers)
    answers = torch.randn(teachers, 30, classes, generator=g).double().mul(2).softmax(-1)
    found = filtered_mean(answers, epsilon)
    for i in range(30):
        assert np.allclose(found[i], by_hand(answers[:, i].numpy(), epsilon), atol=1e-12)
    assert torch.allclose(found.sum(-1), torch.ones(30).double())


def test_it_does_not_matter_which_samples_are_filtered_together(monkeypatch):
    answers = torch.rand(7, 25, 4, generator=torch.Generator().manual_seed(2)).softmax(-1)
    whole = filtered_mean(answers, 0.3)
    monkeypatch.setattr("solera.methods.cronus.FILTERED", 4)
    assert torch.equal(filtered_mean(answers, 0.3), whole)
    assert whole.dtype == torch.float32


def test_of_two_that_are_equally_far_the_first_stays():
    answers = torch.rand(3, 200, 5, generator=torch.Generator().manual_seed(4)).mul(4).softmax(-1).double()
    found = filtered_mean(answers, 0.45)  # one goes, and then one of the two that are left
    which = (found[None] - answers).abs().sum(-1).argmin(0)
    assert set(which.tolist()) == {0, 1}  # the last goes first or is the second of two


def test_equal_answers_stay_what_they_are_and_few_are_all_kept():
    same = torch.tensor([0.2, 0.5, 0.3]).expand(6, 2, 3)
    assert torch.allclose(filtered_mean(same, 0.4), same[0])
    two = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]])
    assert torch.allclose(filtered_mean(two, 0.49), torch.tensor([[0.5, 0.5]]))
    assert torch.equal(filtered_mean(two[:1], 0.49), two[0])


def test_no_share_of_liars_can_move_it_far_below_the_bound():
    g = torch.Generator().manual_seed(5)
    honest = (torch.tensor([2.0, 0.0, 0.0, 0.0]) + 0.3 * torch.randn(16, 50, 4, generator=g)).softmax(-1)
    liars = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(4, 50, 4)
    found = filtered_mean(torch.cat([honest, liars]).double(), 0.2)
    plain = torch.cat([honest, liars]).double().mean(0)
    truth = honest.double().mean(0)
    assert (found - truth).abs().max() < 0.06 < 0.15 < (plain - truth).abs().max()


@pytest.mark.parametrize("epsilon", [-0.1, 0.5, 1.0])
def test_impossible_shares(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        filtered_mean(torch.ones(3, 1, 2), epsilon)
