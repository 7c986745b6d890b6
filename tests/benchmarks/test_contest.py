"""Turns, ratios and what happens to a program that does not keep to the conversation."""

import pathlib
import shutil
import sys

import pytest

from bench import pace
from bench.contest import Dropped, Measured, Runner, checks, outcome, spread
from bench.machine import family
from bench.workloads import Case, Fleet

PROGRAM = """
import os, sys, time
sys.path.insert(0, {folder!r})
from pace import Pace
print("noise before")
pace = Pace()
print("noise")
held = bytearray(64 << 20)
{begin}
pace.ready()
while pace.go():
    {lap}
    pace.lap(less=0.5)
pace.end(steps=7)
"""


@pytest.fixture
def program(tmp_path):
    """A program that talks to the benchmark; `begin` and `lap` are lines of it."""
    shutil.copy(pace.__file__, tmp_path / "pace.py")

    def start(begin="", lap="pass", noise=""):
        text = PROGRAM.format(folder=str(tmp_path), begin=begin, lap=lap).replace('print("noise before")', noise)
        return Runner("a side", [sys.executable, "-c", text], tmp_path)

    return start


def nothing(*_):
    raise AssertionError


def case(**more):
    return Case("c", "title", {"ours": nothing, "other": nothing}, laps=3, **more)


def test_a_conversation(program):
    runner = program(lap="time.sleep(0.05)")
    runner.lap(sample=True)
    runner.lap(sample=False)
    assert [-0.46 < lap["seconds"] < 0.5 for lap in runner.laps] == [True, True]  # less half a second
    assert runner.finish() == {"end": True, "steps": 7}
    assert runner.startup_s > 0
    assert runner.memory >= 64 << 20
    assert family(runner.mark) == []


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ({"begin": "sys.exit('no data')"}, "code 1: no data"),
        ({"noise": "print('hello', flush=True)"}, "it said b'hello'"),
    ],
)
def test_a_program_that_cannot_begin(program, lines, reason):
    with pytest.raises(Dropped, match=reason):
        program(**lines)


def test_a_program_that_breaks_down(program):
    runner = program(lap="raise SystemExit('out of memory')")
    with pytest.raises(Dropped, match="code 1: out of memory"):
        runner.lap(sample=False)
    runner.close()


def test_what_a_program_leaves_behind_is_ended(program):
    runner = program(begin="os.fork() == 0 and (os.setsid(), time.sleep(600))")
    assert len(family(runner.mark)) == 2
    runner.finish()
    assert family(runner.mark) == []


def test_median_and_quartiles():
    assert spread([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_ratios_compare_laps_of_the_same_turn():
    slow = [9.0, 1.0, 10.0]  # the machine was ten times slower in the last turn: so it was for both
    found = outcome(
        case(), {"ours": Measured(slow), "other": Measured([9.0, 3.0, 30.0])}, {"flower": "not measured: x"}, "full"
    )
    assert found["ratios"]["other"] == {"median": 3.0, "q1": 3.0, "q3": 3.0}
    assert found["sides"]["ours"]["laps"] == [1.0, 10.0]  # the first lap warms up
    assert found["sides"]["ours"]["first_lap_s"] == 9.0
    assert found["sides"]["flower"] == {"not_measured": "not measured: x"}


def test_shares_and_totals():
    fleet = Fleet("mlp", (1, 28, 28), 4, 40, 2)
    sides = {
        "ours": Measured([4.0, 2.0, 2.0], startup_s=3.0),
        "other": Measured([4.0, 5.0, 5.0], startup_s=16.0),
        "bare": Measured([1.0, 1.5, 1.5]),
        "peak": Measured([1.0, 1.0, 1.0], flops=(1.0, 100.0, 100.0)),
    }
    found = outcome(case(flops=lambda: 120.0, fleet=fleet), sides, {}, "full")
    assert found["peak_share"]["median"] == pytest.approx(0.6)
    assert found["framework_share"]["median"] == pytest.approx(0.25)
    assert found["total_ratios"] == {"other": pytest.approx((16 + 4 + 45) / (3 + 4 + 18))}
    assert list(found["ratios"]) == ["other"]


def test_growth_is_counted_for_one_unit():
    sides = {"ours": Measured([1.0, 1.0, 1.0]), "other": Measured([20.0, 22.0, 22.0])}
    found = outcome(case(units={"ours": 10, "other": 200}), sides, {}, "full")
    assert found["growth"] is True
    assert found["ratios"]["other"]["median"] == pytest.approx(1.1)


def test_checks():
    ours = {"digest": "aa", "steps": 10, "accuracy": 0.8}
    fine = {"digest": "aa", "steps": 10, "accuracy": 0.75}
    assert set(checks(case(same_digest=True), {"ours": ours, "other": fine}, "full").values()) == {"ok"}
    bad = checks(case(same_digest=True), {"ours": ours, "other": {"digest": "ab", "steps": 9, "accuracy": 0.6}}, "full")
    assert {k: v.partition(":")[0] for k, v in bad.items()} == {
        "equal bits": "differ",
        "equal steps": "differ",
        "accuracy in one range": "differ",
    }
    assert checks(case(), {"ours": ours, "other": {}}, "full") == {}
    sizes = case(units={"ours": 1, "other": 2})
    assert checks(sizes, {"ours": {"accuracy": 0.9}, "other": {"accuracy": 0.1}}, "full") == {}
    apart = {"ours": {"steps": 2, "accuracy": 0.9}, "other": {"steps": 2, "accuracy": 0.1}}
    assert checks(case(), apart, "quick") == {"equal steps": "ok"}


def test_the_copy_of_the_conversation_needs_nothing():
    """Other frameworks' environments have neither Solera nor anything it needs."""
    lines = pathlib.Path(pace.__file__).read_text().splitlines()
    assert {t for t in lines if t.startswith(("import", "from"))} == {
        "import json",
        "import os",
        "import sys",
        "import time",
        "from typing import Any",
    }
