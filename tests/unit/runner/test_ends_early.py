"""`run.stop` in a run: it ends early, finishes the method's work, says why, and resumes to the same end."""

import json

import pytest

from run_directories import lines_of
from solera.core.errors import ConfigError
from solera.methods import FedAvg, FedEED, LocalOnly
from solera.runs.config import EngineConfig, RunConfig, StopConfig
from solera.runs.loop import simulate
from solera.runs.read import read_run
from solera.testing import run_toy, small, toy, wide
from solera.train.distill import Distill
from solera.train.fitting import Local

LOCAL = Local(epochs=1, batch=8, lr=0.01)
METHOD = FedAvg(LOCAL)
EVERY_ROUND = StopConfig(target=0.0)  # reached by whatever there is


def run(out, stop, method=METHOD, rounds=6, resume=False, options=None, **config):
    scenario = toy({"net": wide}, **(options or {}))
    config = RunConfig(rounds=rounds, stop=stop, **config)
    return simulate(scenario, method, out, config, engine=EngineConfig("inprocess"), resume=resume)


def first_at(out, target):
    lines = lines_of(out)
    return next(i for i, line in enumerate(lines) if line["validation"]["net"]["accuracy"] >= target)


def test_a_run_ends_at_its_target_and_says_so(tmp_path):
    whole = run(tmp_path / "whole", StopConfig(patience=100))
    target = sorted(line["validation"]["net"]["accuracy"] for line in lines_of(whole.out))[3]  # not the first
    due = first_at(whole.out, target)
    result = run(tmp_path / "cut", StopConfig(target=target))
    assert result.summary["rounds"] == len(lines_of(result.out)) == due + 1 < 6
    assert result.summary["stopped"].endswith(f"the target of {target:g} is reached")
    (event,) = (e for e in lines_of(result.out)[-1]["events"] if e["kind"] == "stopped")
    assert event["reason"] == result.summary["stopped"]
    assert (result.out / "confusion.json").is_file()
    assert json.loads((result.out / "confusion.json").read_text())["round"] == due
    assert read_run(result.out).finished


def test_it_has_the_bits_of_a_run_of_so_many_rounds(tmp_path):
    cut = run(tmp_path / "cut", EVERY_ROUND)
    assert cut.summary["rounds"] == 1
    assert cut.digest == run(tmp_path / "short", StopConfig(), rounds=1).digest


def test_resuming_leaves_it_ended_unless_the_rule_is_another(tmp_path):
    first = run(tmp_path, EVERY_ROUND)
    again = run(tmp_path, EVERY_ROUND, resume=True)
    assert (again.summary["rounds"], again.digest) == (1, first.digest)
    on = run(tmp_path, StopConfig(), rounds=3, resume=True)
    assert on.summary["rounds"] == 3
    assert "stopped" not in on.summary
    assert on.digest == run(tmp_path / "whole", StopConfig(), rounds=3).digest


def test_a_method_with_work_at_the_end_does_it(tmp_path):
    """FedEED with overlap distils the last round in `finish`."""
    method = small(FedEED(LOCAL, Distill(steps=6, batch=16), K=2, pipeline=True))
    cut = run(tmp_path / "cut", EVERY_ROUND, method)
    short = run(tmp_path / "short", StopConfig(), method, rounds=1)
    assert cut.digest == short.digest
    assert cut.summary["models"] == short.summary["models"]
    assert run(tmp_path / "cut", EVERY_ROUND, method, resume=True).digest == cut.digest


def test_only_evaluated_rounds_can_end_it(tmp_path):
    assert run(tmp_path, EVERY_ROUND, eval_every=3).summary["rounds"] == 3


def test_own_models_count_where_there_are_no_others(tmp_path):
    stop = StopConfig(target=0.0, split="test")
    assert run(tmp_path, stop, LocalOnly(LOCAL)).summary["rounds"] == 1
    with pytest.raises(ConfigError, match=r"'local' are all on the clients.*run\.stop\.split = 'test'"):
        run(tmp_path / "no", EVERY_ROUND, LocalOnly(LOCAL))


def test_without_a_validation_set_there_is_nothing_to_look_at(tmp_path):
    with pytest.raises(ConfigError, match=r"set data\.validation"):
        run(tmp_path / "no", EVERY_ROUND, options={"validation": 0.0})
    assert not (tmp_path / "no").exists()


def test_without_a_rule_nothing_is_measured_for_it(tmp_path):
    result = run_toy(METHOD, tmp_path, rounds=1)
    assert "validation" not in lines_of(result.out)[0]
