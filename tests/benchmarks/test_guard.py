"""The regression guard, with made-up numbers."""

import json

import pytest

from bench import guard
from solera.core.errors import ConfigError

HERE = {"cores": 2, "cpu": "a processor"}


def found(ratio=2.0, share=0.6, growth=1.0, machine=HERE, noise=0.0):
    def spread(v):
        return {"median": v, "q1": v * (1 - noise), "q3": v * (1 + noise)}

    return {
        "format": 1,
        "solera": "0",
        "scale": "quick",
        "date": "2026-01-01",
        "machine": machine,
        "cases": [
            {"case": "a", "growth": False, "ratios": {"plain": spread(ratio)}, "peak_share": spread(share)},
            {"case": "b", "growth": True, "ratios": {"1,000": spread(growth)}},
        ],
    }


def failed(recorded, now):
    verdicts, _ = guard.compare(recorded, now)
    return [v.what for v in verdicts if not v.ok]


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "deep" / "recorded.json"
    guard.record(found(), path)
    return guard.read(path, "quick")


def test_what_did_not_change_passes(recorded):
    assert failed(recorded, found()) == []
    assert failed(recorded, found(ratio=9, share=0.9, growth=0.5)) == []


def test_a_fall_of_a_fifth_passes_and_more_fails(recorded):
    assert failed(recorded, found(ratio=1.601)) == []
    assert failed(recorded, found(ratio=1.599)) == ["a against plain"]


def test_a_fall_within_the_quartiles_is_noise(recorded):
    assert failed(recorded, found(ratio=1.5, noise=0.35)) == []
    assert failed(recorded, found(ratio=1.5, noise=0.3)) == ["a against plain"]


def test_the_share_of_the_peak_is_told_and_not_judged(recorded):
    assert failed(recorded, found(share=0.1)) == []
    _, notes = guard.compare(recorded, found(share=0.1))
    assert notes == ["a: 10% of this machine's peak, recorded 60% (told, not judged)"]


def test_the_bare_loop_is_a_side_too(tmp_path):
    def with_share(share):
        now = found()
        now["cases"][0]["framework_share"] = {"median": share, "q1": share - 0.05, "q3": share + 0.05}
        return now

    path = tmp_path / "recorded.json"
    guard.record(with_share(0.1), path)
    recorded = guard.read(path, "quick")
    assert recorded["ratios"]["a against bare"] == {"median": 0.9, "q1": 0.85, "q3": 0.95}
    assert failed(recorded, with_share(0.2)) == []
    assert failed(recorded, with_share(0.3)) == ["a against bare"]


def test_growth_is_worse_when_it_is_more(recorded):
    assert failed(recorded, found(growth=1.24)) == []
    assert failed(recorded, found(growth=1.26)) == ["b against 1,000"]


def test_only_what_was_measured_is_compared(recorded):
    now = found()
    del now["cases"][0]
    assert failed(recorded, now) == []
    now["cases"] = []
    with pytest.raises(ConfigError, match="nothing to compare"):
        guard.compare(recorded, now)


def test_another_machine_is_mentioned(recorded):
    _, notes = guard.compare(recorded, found(machine={"cores": 8, "cpu": "a processor"}))
    assert [n for n in notes if "another machine" in n] == [
        "recorded on another machine (cores: 2, here 8)",
    ]


def test_a_record_that_is_none(tmp_path):
    path = tmp_path / "recorded.json"
    with pytest.raises(ConfigError, match="--record"):
        guard.read(path, "quick")
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no record"):
        guard.read(path, "quick")
    guard.record(found(), path)
    assert json.loads(path.read_text())["ratios"]["a against plain"]["median"] == 2.0
    with pytest.raises(ConfigError, match="scale 'quick'"):
        guard.read(path, "full")
