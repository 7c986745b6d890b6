"""Callbacks of one's own: what they see, what they may ask for, and that they change no training."""

import random

import numpy as np
import pytest
import torch

from run_directories import lines_of
from solera import methods
from solera.core.errors import ConfigError, RunError
from solera.runs.callbacks import Callback
from solera.runs.config import RunConfig, StopConfig
from solera.runs.loop import simulate
from solera.runs.read import rows
from solera.runs.record import RoundRecord
from solera.testing import small, toy, wide


def run(out, *callbacks, rounds=3, method=None, resume=False, **config):
    method = method or small(methods.FedAvg())
    return simulate(
        toy({"net": wide}, validation=0.2), method, out, RunConfig(rounds=rounds, **config),
        engine="inprocess", resume=resume, callbacks=callbacks,
    )  # fmt: skip


class Noting(Callback):
    """Notes what it is told."""

    def __init__(self):
        self.said = []

    def begin(self, facts, before):
        self.said.append(("begin", facts["start_round"], [r.round for r in before]))

    def round(self, record):
        self.said.append(("round", record.round))

    def saved(self, record):
        self.said.append(("saved", record.round))

    def end(self, summary):
        self.said.append(("end", summary and summary["rounds"]))


class Numbers(Callback):
    name = "gaps"

    def round(self, record):
        return {"round": record.round, "gap": np.float32(0.5)}


class Until(Callback):
    """Ends a run after a round."""

    def __init__(self, last):
        self.last = last

    def round(self, record):
        if record.round == self.last:
            self.stop(f"round {self.last} is enough")


def test_it_is_told_of_the_rounds_and_what_a_resumed_run_has_recorded(tmp_path):
    first, second = Noting(), Noting()
    run(tmp_path, first, rounds=2)
    run(tmp_path, second, rounds=3, resume=True)
    rounds = [("round", 0), ("saved", 0), ("round", 1), ("saved", 1)]
    assert first.said == [("begin", 0, []), *rounds, ("end", 2)]
    assert second.said == [("begin", 2, [0, 1]), ("round", 2), ("saved", 2), ("end", 3)]


def test_its_numbers_are_in_the_line_under_its_name_and_in_the_frame(tmp_path):
    told = Noting()
    run(tmp_path, Numbers(), told, rounds=2)
    assert [line["callbacks"] for line in lines_of(tmp_path)] == [{"gaps": {"round": t, "gap": 0.5}} for t in (0, 1)]
    found = [(r.round, r.name, r.metric, r.value) for r in rows(tmp_path) if r.kind == "callback"]
    assert found == [(t, "gaps", metric, value) for t in (0, 1) for metric, value in (("round", t), ("gap", 0.5))]


def test_without_numbers_a_line_is_as_it_was(tmp_path):
    run(tmp_path, Noting(), rounds=1)
    assert "callbacks" not in lines_of(tmp_path)[0]


@pytest.mark.parametrize("eval_every", [1, 3])
def test_it_can_end_the_run(tmp_path, eval_every):
    """The last round is evaluated and the method's last step made, as if it had been the last one planned."""
    told = Noting()
    ended = run(tmp_path / "a", Until(1), told, rounds=5, eval_every=eval_every)
    planned = run(tmp_path / "b", rounds=2, eval_every=eval_every)
    assert ended.digest == planned.digest
    assert ended.summary["stopped"] == "round 1 is enough"
    assert told.said[-3:] == [("round", 1), ("saved", 1), ("end", 2)]
    last = lines_of(tmp_path / "a")[-1]
    assert last["models"]["net"] == lines_of(tmp_path / "b")[-1]["models"]["net"]
    assert {"kind": "stopped", "reason": "round 1 is enough", "callback": "Until"} in last["events"]


def test_a_run_that_it_has_ended_stays_ended(tmp_path):
    ended = run(tmp_path, Until(0), rounds=3)
    again = run(tmp_path, rounds=3, resume=True)
    assert (again.digest, again.summary["rounds"]) == (ended.digest, 1)


def test_a_wish_to_stop_in_the_last_round_changes_nothing(tmp_path):
    result = run(tmp_path, Until(1), rounds=2)
    assert "stopped" not in result.summary
    assert lines_of(tmp_path)[-1]["events"] == []


def test_the_rule_of_the_configuration_comes_first(tmp_path):
    """A callback sees the record of the round that the rule has ended, with its event."""
    kinds = []

    class Events(Callback):
        def round(self, record):
            kinds.append([e["kind"] for e in record.events])

    run(tmp_path, Events(), rounds=5, stop=StopConfig(target=0.0))
    assert kinds == [["stopped"]]


@pytest.mark.parametrize("hook", ["begin", "phase", "round", "saved"])
def test_an_error_ends_the_run_and_names_the_callback(tmp_path, hook):
    class Wrong(Callback):
        pass

    def fails(self, *args):
        raise ZeroDivisionError("one by\nzero")

    setattr(Wrong, hook, fails)
    told = Noting()
    with pytest.raises(RunError, match=rf"callback Wrong failed in `{hook}`: ZeroDivisionError: one by zero") as error:
        run(tmp_path / "run", told, Wrong())
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert told.said[-1] == ("end", None)
    assert run(tmp_path / "run", resume=True).digest == run(tmp_path / "whole").digest


def test_an_error_in_an_optional_callback_is_a_warning(tmp_path):
    class Wrong(Callback):
        optional = True
        calls = 0

        def round(self, record):
            self.calls += 1
            raise ZeroDivisionError

    class Hearing(Callback):
        def __init__(self):
            self.heard = []

        def warn(self, text):
            self.heard.append(text)

    wrong, hearing = Wrong(), Hearing()
    run(tmp_path, wrong, hearing)
    assert wrong.calls == 1
    assert hearing.heard == ["Wrong is off for the rest of this run: ZeroDivisionError: "]


@pytest.mark.parametrize("said", [{"gap": float("nan")}, {"gap": "wide"}, [1.0]])
def test_numbers_that_are_none_are_refused(tmp_path, said):
    class Wrong(Callback):
        def round(self, record):
            return said

    with pytest.raises(RunError, match=r"callback Wrong failed in `round`: (Value|Attribute)Error"):
        run(tmp_path, Wrong())


def test_what_is_no_callback_and_what_has_a_name_twice_is_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match=r"is no solera\.Callback"):
        run(tmp_path / "run", print)
    with pytest.raises(ConfigError, match="two are named 'Noting'; set the attribute `name`"):
        run(tmp_path / "run", Noting(), Noting())
    assert not (tmp_path / "run").exists()


def test_it_changes_no_training(tmp_path):
    """Not even if it draws from every generator that the run uses."""

    class Drawing(Callback):
        def begin(self, facts, before):
            self.round(None)

        def round(self, record):
            torch.rand(3), np.random.rand(3), random.random()

    method = small(methods.FedDF())
    assert run(tmp_path / "a", Drawing(), method=method).digest == run(tmp_path / "b", method=method).digest


def test_a_line_with_numbers_of_another_kind_is_not_read():
    line = '{"round": 0, "callbacks": {"gaps": {"gap": "wide"}}}'
    with pytest.raises(ValueError, match="not a number"):
        RoundRecord.from_line(line)
