"""The simulated clock: against times worked out by hand, the same on every engine and after a resume."""

import json
import math

import pytest
import torch

from solera.core.accounting import Availability, Clock, next_visit
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig
from solera.engines import EngineConfig
from solera.methods import FedEED
from solera.methods.framework.cohort import Cohort
from solera.runs.config import RunConfig, load_config
from solera.runs.loop import simulate
from solera.testing import toy
from solera.testing.toys import wide
from solera.train.distill import Distill
from solera.train.fitting import Local
from timetable_by_hand import completions, schedule

FAST = {"down_mbit": [1e9], "up_mbit": [1e9]}  # nothing takes time but work


def lines_of(out):
    return [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]


# ---- FedEED's Figures 3 and 4: four clients, a model each, constant times -----------------------------------


def eed(out, monkeypatch, pipeline, rounds=5, **availability):
    """The times at which rounds ended, and who worked for which group: client_s = 10, server_s = 4."""
    local, fusion = Local(steps=10, batch=2), Distill(steps=8, batch=16, patience=None)
    clock = Availability(speed=[2.0], server_speed=32.0, **FAST, **availability)
    groups, start = [], Cohort.start
    monkeypatch.setattr(Cohort, "start", lambda self, *rest: groups.append(self.S) or start(self, *rest))
    simulate(
        toy({"wide": wide}, clients=4),
        FedEED(local, fusion, K=4, pipeline=pipeline),
        out,
        RunConfig(rounds=rounds),
        FederationConfig(availability=clock),
    )
    own = [[S[k][1] for k in sorted(S)] for S in groups[::2]]  # two exchanges a round
    return [m["simulated"] for m in lines_of(out)], own


@pytest.mark.parametrize("period_s", [None, 20.0])
def test_figures_3_and_4(tmp_path, monkeypatch, period_s):
    ends = {}
    for name, pipeline in (("off", False), ("strict", True)):
        times, own = eed(tmp_path / name, monkeypatch, pipeline, period_s=period_s)
        kind = "always" if period_s is None else "uniform"
        expected = completions(schedule(own, 10, 4, name, kind, period_s or 0))
        if pipeline:  # a round ends with its aggregates; the last one distils them, too
            assert math.isclose(times[-1]["end_s"], expected[-1], rel_tol=1e-5)
        else:
            assert [round(t["end_s"], 3) for t in times] == expected
        assert sum(t["server_s"] for t in times) == 5 * 4
        ends[name] = times[-1]["end_s"]
    if period_s is None:  # Figure 3: the designated chain is as long either way
        assert round(ends["off"]) == round(ends["strict"]) == 5 * 14
    else:  # Figure 4
        assert ends["strict"] < ends["off"]


# ---- one call ---------------------------------------------------------------------------------------------------


def test_a_call_takes_its_bytes_and_its_samples():
    clock = Clock(Availability(speed=[10.0, 40.0], down_mbit=[8.0], up_mbit=[4.0, 2.0], server_speed=50.0), 3, 0)
    slow, fast = clock.send(0, "a", 2_000_000, 100), clock.send(1, "b", 2_000_000, 100)
    slow.back(1_000_000)
    fast.back(1_000_000)
    assert slow.end == 2 + 10 + 2  # 1 MB/s down, 10 samples/s, 0.5 MB/s up
    assert fast.end == 2 + 2.5 + 4
    clock.collected({"a": slow, "b": fast})
    clock.worked(100)
    assert clock.now == 14 + 2
    assert clock.send(2, "c", 0, 20).ready == 16 + 2  # the third client has the first values again
    assert clock.timetable() == [["a", 0, 14], ["b", 0, 8.5], ["server", 14, 16]]
    assert clock.facts() == {"start_s": 0, "end_s": 16, "server_s": 2, "online": 3, "lost": 0}


def test_when_a_client_comes_by():
    assert [next_visit(t, 5, 20) for t in (0, 5, 5.1, 25, 26)] == [5, 5, 25, 25, 45]


def test_a_late_reply_does_not_count_and_nobody_waits_longer_than_the_deadline():
    clock = Clock(Availability(speed=[1.0], deadline_s=50, **FAST), 2, 0)
    fine, late = clock.send(0, "a", 0, 50), clock.send(1, "b", 0, 51)
    assert clock.late(fine) is None
    assert "51 simulated seconds, federation.availability.deadline_s is 50" in clock.late(late)
    clock.collected({"a": fine, "b": late})
    assert clock.now == 50


def test_shares_online_and_dropouts_are_those_that_were_set():
    clock = Clock(Availability(online=[0.25, 0.75], dropout=0.2), 200, 3)
    there, lost = torch.zeros(200), 0
    for t in range(100):
        clock.begin(t)
        there += clock.online()
        lost += sum(clock.send(i, f"c{i}", 0, 1).lost for i in range(20))
    assert abs(there[::2].mean() / 100 - 0.25) < 0.02
    assert abs(there[1::2].mean() / 100 - 0.75) < 0.02
    assert abs(lost / 2000 - 0.2) < 0.03


def test_somebody_is_always_online():
    clock = Clock(Availability(online=[1e-9]), 5, 0)
    assert clock.online().sum() == 1


# ---- whole runs -------------------------------------------------------------------------------------------------

UNSTEADY = Availability(online=[0.6, 0.9], dropout=0.2, speed=[5.0, 50.0], period_s=30, server_speed=100)


def run(out, engine="inprocess", rounds=4, **more):
    method = FedEED(Local(epochs=1, batch=16), Distill(steps=6, batch=16), K=2, pipeline=True)
    config = FederationConfig(0.75, availability=UNSTEADY, **more)
    return simulate(
        toy({"wide": wide}), method, out, RunConfig(rounds=rounds), config, EngineConfig(engine, 2), resume=True
    )


def test_the_same_hours_on_every_engine_and_after_a_resume(tmp_path):
    once = run(tmp_path / "once")
    side = run(tmp_path / "side", "processes")
    for rounds in (2, 4):
        again = run(tmp_path / "again", rounds=rounds)
    assert once.digest == side.digest
    clocks = [[m["simulated"] for m in lines_of(tmp_path / name)] for name in ("once", "side")]
    assert clocks[0] == clocks[1]
    assert once.summary["simulated_hours"] == clocks[0][-1]["end_s"] / 3600 > 0
    assert again.digest == once.digest  # a pipeline reports its last distillation at the end of the first two rounds
    ends = [m["simulated"]["start_s"] for m in lines_of(tmp_path / "again")]
    assert ends == sorted(ends)
    assert any(m["simulated"]["lost"] for m in lines_of(tmp_path / "once"))
    reasons = {f["reason"] for m in lines_of(tmp_path / "once") for f in m["failures"]}
    assert reasons == {"dropped out during the round (federation.availability.dropout)"}


def test_a_clock_alone_changes_no_bit(tmp_path):
    method = FedEED(Local(epochs=1, batch=16), Distill(steps=6, batch=16), K=2)
    found = [
        simulate(toy({"wide": wide}), method, tmp_path / name, RunConfig(rounds=2), FederationConfig(0.75, **more))
        for name, more in (("plain", {}), ("timed", {"availability": Availability()}))
    ]
    assert found[0].digest == found[1].digest
    assert "simulated_hours" not in found[0].summary


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"online": [0.0]}, r"federation.availability.online\[0\] = 0.0: expected a number above 0"),
        ({"online": 0.5}, r"federation.availability.online = 0.5: .*write \[0.5\]"),
        ({"speed": []}, r"federation.availability.speed = \[\]: give one value"),
        ({"dropout": 1.0}, "federation.availability.dropout = 1.0"),
        ({"spead": [1.0]}, "did you mean 'federation.availability.speed'"),
    ],
)
def test_mistakes_name_their_key(table, words):
    with pytest.raises(ConfigError, match=words):
        load_config({"method": {"name": "fedavg"}, "federation": {"availability": table}})
