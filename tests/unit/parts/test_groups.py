"""Groups of clients (EED-1), Fed-ensemble's schedule (ENS-1) and the timeline of overlapping rounds (EED-5)."""

import pytest

from solera.parts.groups import group_sizes, latin
from solera.parts.timeline import completions, schedule


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


@pytest.mark.parametrize("shares", [[], [1, 0], [2, -1]])
def test_shares_that_make_no_group_are_refused(shares):
    with pytest.raises(ValueError, match="share"):
        group_sizes(4, shares)


def test_ens_1_the_latin_schedule():
    assert [latin([2, 0, 1], r) for r in range(3)] == [[2, 0, 1], [0, 1, 2], [1, 2, 0]]


def test_every_model_meets_every_stratum_once_in_an_age():
    rounds = [latin([3, 1, 0, 2], r) for r in range(4)]
    assert all(sorted(r) == [0, 1, 2, 3] for r in rounds)
    assert all(sorted(r[k] for r in rounds) == [0, 1, 2, 3] for k in range(4))


# ---- overlap: FedEED's appendix A.7, four clients with a model each --------------------------------------


def begins(spans, round, group):
    return min(s.start for s in spans if s.round == round and s.group == group and s.client is not None)


@pytest.mark.parametrize("pipeline", ["off", "strict", "eager"])
def test_eed_5_always_available(pipeline):
    spans = schedule(3, [0, 1, 2, 3], client_s=10, server_s=4, pipeline=pipeline)
    assert completions(spans) == [14, 28, 42]  # the designated chain is serial
    assert begins(spans, 1, 0) == 14
    assert [begins(spans, 1, k) for k in (1, 2, 3)] == [14 if pipeline == "off" else 10] * 3


def test_eager_groups_run_ahead_of_the_designated_one():
    assert begins(schedule(3, [0, 1], 10, 4, "strict"), 2, 1) == 24
    assert begins(schedule(3, [0, 1], 10, 4, "eager"), 2, 1) == 20


def test_uniform_arrival_makes_overlap_worth_it():
    def ends(pipeline):
        return completions(schedule(8, [0, 1, 2, 3], 10, 4, pipeline, "uniform", period_s=20))

    off, strict, eager = ends("off"), ends("strict"), ends("eager")
    assert off[0] == strict[0] == eager[0] == 29  # the last client comes by at 15
    assert off[:3] == [29, 59, 89]
    assert strict[:3] == [29, 54, 79]
    assert eager[-1] <= strict[-1] < off[-1]


def test_clients_of_a_group_are_all_waited_for_and_do_one_thing_at_a_time():
    spans = schedule(2, [0, 0, 1], 10, 4, "strict", "uniform", period_s=30)
    by_client = [[s for s in spans if s.client == i] for i in range(3)]
    assert [own[0].start for own in by_client] == [0, 10, 20]
    assert all(own[0].end <= own[1].start for own in by_client)
    assert completions(spans)[0] == 34


def test_schedules_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="period_s"):
        schedule(1, [0], 1, 1, available="uniform")
    with pytest.raises(ValueError, match="designated"):
        schedule(1, [1, 2], 1, 1)
