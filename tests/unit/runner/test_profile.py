"""A profiled run has the bits of any other, and says where its time went."""

import gzip
import json

import pytest

from solera.config import load_config
from solera.runner.loop import execute

SMALL = {
    "run": {"rounds": 2},
    "data": {"train_size": 200, "test_size": 50, "client_test": 0.2},
    "partition": {"kind": "iid", "clients": 3},
    "public": {"size": 40},
    "models": {"clients": ["mlp", "lenet5"]},
}
FEDDF = {"name": "feddf", "local": {"epochs": 1}, "fusion": {"steps": 3}}
MNFL = {"name": "mnfl", "local": {"epochs": 1}, "distill": {"epochs": 1}}


@pytest.mark.parametrize("engine", ["inprocess", "threads", "processes"])
@pytest.mark.parametrize("method", [FEDDF, MNFL], ids=["feddf", "mnfl"])
def test_the_bits_are_those_of_any_other_run(engine, method, tmp_path):
    config = load_config(SMALL | {"method": method, "engine": {"name": engine, "workers": 2}})
    plain = execute(config, tmp_path / "plain")
    profiled = execute(config, tmp_path / "profiled", profile=True)
    assert profiled["digest"] == plain["digest"]
    assert profiled["models"] == plain["models"]
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "profiled" / "profile"
    facts = json.loads((folder / "profile.json").read_text())
    assert facts["round"] == 1
    assert set(facts["seconds"]) == set(facts["seconds_before"])
    names = [f["function"] for f in facts["server"]["functions"]]
    assert names
    expected = 1 if method is FEDDF else 3  # MNFL: predict, distil, and the scoring of personal models
    assert len(facts["tasks"]) == expected
    for task in facts["tasks"]:
        assert "error" not in task
        with gzip.open(tmp_path / "profiled" / task["trace"]) as trace:
            assert json.load(trace)["traceEvents"]
        assert task["operators"][0]["own_ms"] >= task["operators"][-1]["own_ms"]
    assert "under cProfile" in (folder / "summary.txt").read_text()


def test_a_single_round_is_profiled_too(tmp_path):
    config = load_config(SMALL | {"run": {"rounds": 1}, "method": FEDDF, "engine": {"name": "inprocess"}})
    execute(config, tmp_path / "run", profile=True)
    facts = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    assert (facts["round"], facts["seconds_before"]) == (0, None)


def test_long_tasks_are_not_traced(tmp_path, monkeypatch):
    monkeypatch.setattr("solera.runner.profile.TRACE_S", 0.0)
    config = load_config(SMALL | {"method": FEDDF, "engine": {"name": "inprocess"}})
    execute(config, tmp_path / "run", profile=True)
    (task,) = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())["tasks"]
    assert task["trace"] is None
    assert task["functions"]
