"""The round loop: what it does in which order, and what it writes of a round. Stopping and resuming: tests/faults."""

import dataclasses
import json

import pytest

from run_directories import lines_of
from solera.core.errors import ConfigError, RunError
from solera.core.federation import FederationConfig, QuorumNotMet
from solera.methods import FedAvg
from solera.place.fingerprint import fingerprint
from solera.runs import loop
from solera.runs.callbacks import Callback
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.runs.record import RoundRecord
from solera.testing import toy, wide
from solera.train.fitting import Local

METHOD = FedAvg(Local(epochs=1, batch=8))


class Listening(Callback):
    """Notes what it is told, in order."""

    def __init__(self):
        self.warnings: list[str] = []
        self.phases: list[tuple[int, str]] = []
        self.records: list[RoundRecord] = []
        self.facts, self.summary = {}, {}

    def begin(self, facts, before):
        self.facts = facts

    def phase(self, round, name):
        self.phases.append((round, name))

    def saved(self, record):
        self.records.append(record)

    def end(self, summary):
        self.summary = summary

    def warn(self, text):
        self.warnings.append(text)


def run(out, method=METHOD, callbacks=(), federation=None, resume=False, **config):
    return simulate(
        toy({"net": wide}), method, out, RunConfig(**config), federation, resume=resume, callbacks=callbacks
    )


def test_a_round_goes_from_the_clients_to_the_commit(tmp_path):
    told = Listening()
    result = run(tmp_path, callbacks=[told], rounds=2)
    order = list(dict.fromkeys(name for _, name in told.phases))
    assert order == ["clients", "server", "evaluate", "commit"]
    assert (told.facts["rounds"], told.facts["start_round"], told.facts["out"]) == (2, 0, str(tmp_path))
    assert told.summary == result.summary
    assert result.out == tmp_path


def test_what_a_callback_is_told_of_a_round_is_what_is_written(tmp_path):
    told = Listening()
    run(tmp_path, callbacks=[told], rounds=2)
    assert [json.loads(r.to_line()) for r in told.records] == lines_of(tmp_path)


def test_the_seconds_of_a_round_are_those_of_its_phases(tmp_path):
    told = Listening()
    run(tmp_path, callbacks=[told], rounds=2)
    for record in told.records:
        phases = [record.seconds[p] for p in ("clients", "server", "evaluate", "commit")]
        assert min(phases) >= 0
        assert sum(phases) == pytest.approx(record.seconds["total"], abs=1e-3)
        assert record.cpu_s is not None
    assert told.records[0].seconds["commit"] == 0  # that of the round before


@pytest.mark.parametrize(("every", "rounds", "evaluated"), [(1, 3, [0, 1, 2]), (2, 5, [1, 3, 4]), (9, 3, [2])])
def test_rounds_are_evaluated_every_so_often_and_the_last_one_always(every, rounds, evaluated, tmp_path):
    told = Listening()
    run(tmp_path, callbacks=[told], rounds=rounds, eval_every=every)
    assert [r.round for r in told.records if r.scores] == evaluated
    assert [m["round"] for m in lines_of(tmp_path) if "models" in m] == evaluated


def test_a_run_that_goes_on_begins_where_it_was(tmp_path):
    run(tmp_path / "whole", rounds=3)
    run(tmp_path / "parts", rounds=1)
    told = Listening()
    again = run(tmp_path / "parts", callbacks=[told], rounds=3, resume=True)
    assert told.facts["start_round"] == 1
    assert [r.round for r in told.records] == [1, 2]
    assert again.digest == json.loads((tmp_path / "whole" / "summary.json").read_text())["digest"]
    assert [m["round"] for m in lines_of(tmp_path / "parts")] == [0, 1, 2]


def fingerprints_of(home):
    return json.loads((home / "run.json").read_text())["fingerprints"]


def test_a_run_records_its_machine_and_says_that_it_goes_on_on_another_one(tmp_path, monkeypatch):
    told = Listening()
    result = run(tmp_path, rounds=1, callbacks=[told])
    here = fingerprint()
    assert fingerprints_of(tmp_path) == [here] == [result.summary["environment"]["fingerprint"]]
    run(tmp_path, rounds=2, callbacks=[told], resume=True)
    assert (told.warnings, fingerprints_of(tmp_path)) == ([], [here])
    monkeypatch.setattr(loop, "fingerprint", lambda portable: "feedfacefeedface")
    finished = run(tmp_path, rounds=2, callbacks=[told], resume=True)
    assert (told.warnings, fingerprints_of(tmp_path)) == ([], [here])  # nothing was left to do
    moved = run(tmp_path, rounds=3, callbacks=[told], resume=True)
    (warning,) = told.warnings
    assert f"other bits (fingerprint feedfacefeedface) than the one that the run was on before ({here})" in warning
    assert fingerprints_of(tmp_path) == [here, "feedfacefeedface"]
    assert (finished.summary["rounds"], moved.summary["rounds"]) == (2, 3)


def test_the_final_step_is_made_once_after_the_last_round(tmp_path):
    calls: list[int] = []

    class Final(FedAvg):
        def finish(self, state, fed, server):
            calls.append(fed.round)
            return state

    final = dataclasses.dataclass(frozen=True)(Final)(METHOD.local)
    run(tmp_path, method=final, rounds=3)
    assert calls == [2]


def test_void_rounds_are_told_and_too_many_of_them_end_the_run(tmp_path):
    class Void(FedAvg):
        def round(self, state, fed, server):
            raise QuorumNotMet("nobody answers")

    void = dataclasses.dataclass(frozen=True)(Void)(METHOD.local)
    told = Listening()
    with pytest.raises(QuorumNotMet, match="2 rounds in a row were void; last: nobody answers"):
        run(tmp_path, method=void, callbacks=[told], federation=FederationConfig(max_empty_rounds=2), rounds=5)
    (record,) = told.records  # the one before the last straw
    assert record.events == [{"kind": "round_empty", "reason": "nobody answers"}]


def test_another_seed_than_the_scenarios_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.seed = 3: the scenario was made with seed 0"):
        run(tmp_path, rounds=1, seed=3)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_resumed_says_why(tmp_path):
    with pytest.raises(RunError, match=r"neither run\.json nor config\.toml"):
        loop.resume(tmp_path)
    run(tmp_path / "own", rounds=1)
    with pytest.raises(RunError, match=r"call solera\.simulate\(\.\.\., resume=True\)"):
        loop.resume(tmp_path / "own")
