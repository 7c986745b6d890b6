"""Groups of clients (EED-1) and Fed-ensemble's schedule (ENS-1)."""

import pytest

from solera.methods.framework.grouping import group_sizes, latin


@pytest.mark.parametrize(
    ("active", "K", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (8, 3, [3, 3, 2]), (20, 4, [5] * 4), (14, 7, [2] * 7), (2, 4, [1, 1, 0, 0]), (5, 1, [5])],
)
def test_eed_1_group_sizes(active, K, sizes):
    assert group_sizes(active, [1] * K) == sizes


def test_uneven_shares():
    assert group_sizes(8, [4, 2, 2]) == [4, 2, 2]
    assert group_sizes(16, [4, 2, 2]) == [8, 4, 4]
    assert group_sizes(7, [4, 2, 2]) == [3, 2, 2]  # 3.5, 1.75, 1.75
    assert group_sizes(0, [3, 1]) == [0, 0]
    for active in range(30):
        assert sum(group_sizes(active, [5, 1, 3])) == active


def test_ens_1_the_latin_schedule():
    assert [latin([2, 0, 1], r) for r in range(3)] == [[2, 0, 1], [0, 1, 2], [1, 2, 0]]


def test_every_model_meets_every_stratum_once_in_an_age():
    rounds = [latin([3, 1, 0, 2], r) for r in range(4)]
    assert all(sorted(r) == [0, 1, 2, 3] for r in rounds)
    assert all(sorted(r[k] for r in rounds) == [0, 1, 2, 3] for k in range(4))
