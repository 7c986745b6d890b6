"""Clients in one batched pass (`engine.vectorize`): the results of one after another, within a stated tolerance."""

import json

import pytest
import torch
from torch import nn

import solera.methods  # noqa: F401  (registers them)
from closeness import apart, plain_models
from solera.config import RunConfig
from solera.engines import EngineConfig
from solera.errors import ConfigError, RunError
from solera.federation import FederationConfig
from solera.method import METHODS, find_method
from solera.runner.loop import simulate
from solera.testing import small, toy, toy_for, wide

# Two rounds of training differ by 1e-7; a distillation with Adam makes more of it, because its first steps have the
# size of the learning rate however small a gradient is.
STATED = 1e-3
FEW = ("fedavg", "fedprox", "scaffold", "ditto", "feddf", "fedmd", "pfedme")


def run(name, out, **engine):
    method = small(find_method(name)())
    scenario = toy_for(method, models=plain_models(method), samples=200, workers=1)
    found = simulate(
        scenario,
        method,
        out,
        RunConfig(rounds=2, eval_clients=2),
        FederationConfig(),
        EngineConfig("inprocess", 1, **engine),
    )
    assert not found.summary["failures"]
    return found


def batched(out):
    """How many trainings were batched, and how many were not and why."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    notes = [e for line in lines for e in json.loads(line)["events"] if e["kind"] == "vectorized"]
    return sum(n["together"] for n in notes), {why for n in notes for why in n["alone"]}


def check(name, tmp_path):
    one = run(name, tmp_path / "one")
    many = run(name, tmp_path / "many", vectorize=True, per_device=4)
    assert apart(one, many) <= STATED
    return batched(tmp_path / "many")


@pytest.mark.parametrize("name", FEW)
def test_a_method_gives_the_same_within_the_tolerance(name, tmp_path):
    together, alone = check(name, tmp_path)
    assert together >= 16  # eight clients, two rounds
    assert alone == ({"the method's own loss"} if name == "fedmd" else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - set(FEW)))
def test_every_other_method_does(name, tmp_path):
    _, alone = check(name, tmp_path)
    assert alone <= {"the method's own loss", "no other training of its kind"}


def test_it_is_recorded_and_a_run_is_continued_with_it(tmp_path):
    run("fedavg", tmp_path, vectorize=True, per_device=4)
    assert json.loads((tmp_path / "run.json").read_text())["experiment"]["engine"] == {"vectorize": True}
    method = small(find_method("fedavg")())
    scenario = toy_for(method, models=plain_models(method), samples=200, workers=1)
    with pytest.raises(RunError, match="engine"):
        simulate(
            scenario,
            method,
            tmp_path,
            RunConfig(rounds=3),
            FederationConfig(),
            EngineConfig("inprocess", 1),
            resume=True,
        )


def test_a_repeated_run_has_the_same_bits(tmp_path):
    runs = [run("feddf", tmp_path / str(i), vectorize=True, per_device=3) for i in range(2)]
    assert runs[0].digest == runs[1].digest


def bad(layer):
    return lambda: nn.Sequential(nn.Linear(8, 12), layer, nn.Linear(12, 3))


@pytest.mark.parametrize(
    ("layer", "why"),
    [(nn.BatchNorm1d(12), "BatchNorm in training"), (nn.Dropout(0.5), "Dropout draws other numbers")],
)
def test_a_model_that_cannot_be_batched_is_refused_before_any_work(layer, why, tmp_path):
    method = small(find_method("fedavg")())
    engine = EngineConfig(vectorize=True, per_device=4)
    with pytest.raises(ConfigError, match=f"engine.vectorize = true: 'odd' cannot be batched: {why}"):
        simulate(toy({"odd": bad(layer), "wide": wide}), method, tmp_path / "out", RunConfig(rounds=1), None, engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"name": "processes", "per_device": 2}, "only with engine.name = 'inprocess'"),
        ({}, "engine.per_device clients are batched: set it"),
        ({"per_device": 2, "precision": "fp16"}, "not with engine.precision = 'fp16'"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        EngineConfig(vectorize=True, **settings)


def test_a_client_that_fails_costs_itself_alone(tmp_path):
    method = small(find_method("fedavg")())
    scenario = toy({"wide": wide}, samples=200)
    rows = scenario._train.indices(1)
    scenario.dataset.train.inputs[rows] = torch.nan
    simulate(scenario, method, tmp_path, RunConfig(rounds=1), None, EngineConfig(vectorize=True, per_device=8))
    (line,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [f["client"] for f in line["failures"]] == ["c01"]
