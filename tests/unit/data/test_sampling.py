"""Seeds, hold-outs and balanced samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solera.core.errors import ConfigError
from solera.data import balanced, hold_out
from solera.data.partition import largest_remainder, numpy_rng, rank_within, torch_rng


def test_generators_depend_on_seed_and_purpose_only():
    a = torch.rand(4, generator=torch_rng(1, "x"))
    assert torch.equal(a, torch.rand(4, generator=torch_rng(1, "x")))
    assert not torch.equal(a, torch.rand(4, generator=torch_rng(2, "x")))
    assert not torch.equal(a, torch.rand(4, generator=torch_rng(1, "y")))
    assert numpy_rng(-3, "x").random() == numpy_rng(-3, "x").random() != numpy_rng(3, "x").random()


def test_largest_remainder_by_hand():
    # 10 over shares 1:1:1 -> 3.33 each; the odd one goes to the lowest position.
    assert largest_remainder(np.array([1.0, 1.0, 1.0]), 10).tolist() == [4, 3, 3]
    # 7 over .5 .3 .2 -> 3.5, 2.1, 1.4
    assert largest_remainder(np.array([0.5, 0.3, 0.2]), 7).tolist() == [4, 2, 1]


def test_rank_within_counts_earlier_members():
    assert rank_within(np.array([2, 0, 2, 2, 0])).tolist() == [0, 0, 1, 2, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=80), st.data())
def test_hold_out_is_a_split_in_proportion(labels, data):
    labels = torch.tensor(labels)
    count = data.draw(st.integers(0, len(labels) - 1))
    kept, held = hold_out(labels, count, seed=3)
    assert len(held) == count
    assert sorted(torch.cat([kept, held]).tolist()) == list(range(len(labels)))
    assert kept.tolist() == sorted(kept.tolist())
    for c in labels.unique():
        fair = count * int((labels == c).sum()) / len(labels)
        assert abs(int((labels[held] == c).sum()) - fair) < 1


def test_hold_out_depends_on_the_seed_alone():
    labels = torch.arange(100) % 10
    before = torch.random.get_rng_state()
    first, again, other = (hold_out(labels, 20, seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_hold_out_without_strata_still_takes_the_exact_count():
    kept, held = hold_out(torch.zeros(10, dtype=torch.int64), 4, seed=0, stratified=False)
    assert (len(kept), len(held)) == (6, 4)


@pytest.mark.parametrize("count", [-1, 10, 11])
def test_hold_out_refuses_to_leave_nothing(count):
    with pytest.raises(ConfigError, match=f"cannot hold out {count} of 10"):
        hold_out(torch.zeros(10, dtype=torch.int64), count, seed=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_balanced_classes_differ_only_where_they_run_out(labels, data):
    labels = torch.tensor(labels)
    count = data.draw(st.integers(1, len(labels)))
    chosen = balanced(labels, count, seed=0)
    assert len(set(chosen.tolist())) == count
    have, got = labels.bincount(), labels[chosen].bincount(minlength=int(labels.max()) + 1)
    most = int(got.max())
    for c in labels.unique():
        assert got[c] >= min(int(have[c]), most - 1)
