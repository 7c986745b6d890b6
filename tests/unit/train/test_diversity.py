"""How different the members of an ensemble are, against numbers worked out pair by pair."""

import math

import torch

from solera.runs.measure import diversity


def test_two_members_by_hand():
    p, q = [0.5, 0.5], [0.9, 0.1]
    logits = torch.tensor([[p, p, q], [p, q, q[::-1]]]).log()  # argmax: 0 0 0 against 0 0 1
    found = diversity(logits, [[0, 1]])
    kl = lambda a, b: sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))  # noqa: E731
    by_hand = (0 + (kl(p, q) + kl(q, p)) / 2 + kl(q, q[::-1])) / 3
    assert math.isclose(found.disagreement, 1 / 3)
    assert math.isclose(found.kl, by_hand, rel_tol=1e-6)  # the logits are float32
    assert found.pairs == 1


def test_only_pairs_within_a_set_count():
    logits = torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]], [[9.0, 0.0]], [[0.0, 9.0]]])
    assert diversity(logits, [[0, 1, 2, 3]]).disagreement == 4 / 6
    assert diversity(logits, [[0, 2], [1, 3]]).disagreement == 0
    assert diversity(logits, [[0, 2], [1, 3]]).kl == 0
    assert diversity(logits, [[0, 1], [1, 0]]).pairs == 1  # a pair counts once


def test_nothing_to_compare():
    assert diversity(torch.zeros(2, 3, 4), [[0], [1]]) is None
    assert diversity(torch.zeros(2, 0, 4), [[0, 1]]) is None
