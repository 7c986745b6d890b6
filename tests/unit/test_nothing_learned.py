"""A run that learned nothing says so, with the first reason, in its last line and by its exit code."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from solera.cli.console import EXIT_CODES
from solera.core.federation import FederationConfig, QuorumNotMet
from solera.method import METHODS, Model, register
from solera.methods import FedAvg
from solera.runs.callbacks import Callback
from solera.runs.config import EngineConfig, RunConfig
from solera.runs.loop import NothingLearned, simulate
from solera.testing import check_method, small, toy, wide


class Broken(nn.Sequential):
    """Answers with numbers that are none, and has no trouble with that: its gradient does not show it."""

    def __init__(self, value):
        super().__init__(*wide())
        self.value = value

    def forward(self, x):
        answer = super().forward(x)
        return answer if self.training else answer + self.value


class Ungraded(nn.Sequential):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


def frozen():
    return nn.Sequential(*wide()).requires_grad_(False)


def run(out, build, rounds=2, resume=False, others=None, callbacks=()):
    models = {"model": build, **(others or {})}
    federation = FederationConfig(fraction=1.0)
    engine = EngineConfig("inprocess")
    config = RunConfig(rounds=rounds)
    return simulate(
        toy(models=models), small(FedAvg()), out, config, federation, engine, resume=resume, callbacks=callbacks
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_models_whose_loss_is_not_finite_end_a_run_with_an_error_and_a_whole_directory(tmp_path, value):
    with pytest.raises(NothingLearned, match=r"nothing was learned: at the end the loss of model is not finite") as e:
        run(tmp_path / "run", lambda: Broken(value))
    assert (e.value.exit_code, "6 nothing was learned" in EXIT_CODES) == (6, True)
    assert str(tmp_path / "run") in str(e.value)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2
    assert (tmp_path / "run" / "models" / "model.safetensors").is_file()
    with pytest.raises(NothingLearned):  # nothing is left to do, and it is no better for that
        run(tmp_path / "run", lambda: Broken(value), resume=True)


def test_one_model_that_is_not_finite_is_named_and_the_others_count(tmp_path):
    class Listener(Callback):
        def warn(self, text):
            said.append(text)

    said: list[str] = []
    result = run(tmp_path / "run", lambda: Broken(float("nan")), others={"fine": wide}, callbacks=[Listener()])
    assert result.summary["models"]["fine"]["loss"] < 10
    named = [text for text in said if "not finite" in text]
    assert named == ["round 0: the loss is not finite: model", "round 1: the loss is not finite: model"]
    assert said[1] == "round 0: the loss of model has grown to nan: a lower learning rate may help"


@pytest.mark.parametrize("build", [frozen, lambda: Ungraded(*wide())])
def test_the_reason_that_clients_gave_is_in_the_last_line(tmp_path, build):
    with pytest.raises(QuorumNotMet, match=r"nothing was learned; the first: round 0: .* first reason: .+") as e:
        run(tmp_path / "run", build)
    reason = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["failures"][0]["reason"]
    assert reason[:100] in str(e.value)


def test_void_rounds_before_a_run_was_resumed_count_too(tmp_path):
    with pytest.raises(QuorumNotMet):
        run(tmp_path / "run", frozen, rounds=1)
    with pytest.raises(QuorumNotMet, match="none of the 2 rounds"):
        run(tmp_path / "run", frozen, rounds=2, resume=True)


def test_a_method_whose_loss_is_not_a_number_breaks_the_contract(tmp_path):
    @register("blows-up")
    @dataclasses.dataclass(frozen=True)
    class BlowsUp(FedAvg):
        State = FedAvg.State

        def models(self, state):
            return {P: Model(P, {n: t + nan(t) for n, t in w.items()}) for P, w in state.weights.items()}

    def nan(t):
        return float("nan") if t.is_floating_point() else 0

    try:
        with pytest.raises(AssertionError, match=r"blows-up: .*loss of .* is not finite"):
            check_method(BlowsUp(), tmp_path)
    finally:
        del METHODS["blows-up"]
