"""When a run ends early: `run.stop`, by target and by patience."""

import pytest

from solera.runs.callbacks import STOPPED, Stopping
from solera.runs.config import StopConfig
from solera.runs.record import OWN, RoundRecord, Score, Traffic

NOTHING = Traffic({"down": {}, "up": {}}, {"down": 0, "up": 0}, {"down": 0, "up": 0})


def scores(kind="validation", metric="accuracy", **values):
    return [Score(kind, name, metric, value) for name, value in values.items()]


def look(stopping, t, measured):
    """The facts of the event that ends a run after round t; None if it goes on."""
    stopping.round(RoundRecord(t, 1, measured, NOTHING, {}, [], []))
    return stopping.asked


def rounds_until(stopping, values, **told):
    """The round that ends a run with these values; None if none does."""
    return next((t for t, v in enumerate(values) if look(stopping, t, scores(m=v, **told))), None)


@pytest.mark.parametrize(
    ("config", "values", "last"),
    [
        ({"target": 0.6}, [0.5, 0.59, 0.6, 0.9], 2),
        ({"target": 0.6}, [0.5, 0.59], None),
        ({"target": 0.4, "metric": "loss"}, [0.9, 0.41, 0.4], 2),
        ({"patience": 2}, [0.5, 0.4, 0.5, 0.6], 2),  # as good is no better
        ({"patience": 2}, [0.1, 0.2, 0.1, 0.3, 0.2, 0.2], 5),
        ({"patience": 2, "metric": "loss"}, [0.9, 0.8, 0.8, 0.85], 3),
        ({"target": 0.6, "patience": 2}, [0.5, 0.4, 0.3], 2),
        ({}, [0.5] * 20, None),
    ],
)
def test_the_round_that_ends_a_run(config, values, last):
    stopping = Stopping(StopConfig(**config), None)
    assert rounds_until(stopping, values, metric=config.get("metric", "accuracy")) == last


def test_rounds_without_an_evaluation_count_for_patience_and_say_nothing():
    stopping = Stopping(StopConfig(patience=3), None)
    assert look(stopping, 0, scores(m=0.5)) is None
    assert all(look(stopping, t, []) is None for t in (1, 2, 3))
    assert look(stopping, 4, scores(m=0.4))["value"] == 0.4


def test_the_servers_own_model_counts_and_else_the_mean_of_all():
    both = scores(large=0.7, small=0.1)
    assert Stopping(StopConfig(target=0.6), "large").value(both) == 0.7
    assert Stopping(StopConfig(target=0.6), None).value(both) == pytest.approx(0.4)
    assert Stopping(StopConfig(target=0.6), "absent").value(both) == pytest.approx(0.4)


def test_what_is_measured_on_the_test_set_does_not_count_unless_asked_for():
    tested = scores("model", m=0.9)
    assert Stopping(StopConfig(target=0.6), None).value(tested) is None
    assert Stopping(StopConfig(target=0.6, split="test"), None).value(tested) == 0.9
    own = [Score("own", OWN, "mean", 0.8)]
    assert Stopping(StopConfig(target=0.6, split="test"), None).value(own) == 0.8
    assert Stopping(StopConfig(target=0.6), None).value(own) is None


def test_the_reason_says_what_was_looked_at():
    stopping = Stopping(StopConfig(target=0.6), None)
    event = look(stopping, 3, scores(m=0.61))
    assert event["reason"] == "the accuracy on the validation set is 0.6100: the target of 0.6 is reached"
    stopping = Stopping(StopConfig(patience=1, metric="loss", split="test"), None)
    look(stopping, 0, scores("model", "loss", m=0.5))
    event = look(stopping, 1, scores("model", "loss", m=0.6))
    assert event["reason"] == "the loss on the test set has not improved for 1 rounds (best: 0.5000, in round 0)"


def resumed(rule, records):
    """Why a resumed run has already ended; None if it goes on."""
    stopping = Stopping(rule, None)
    stopping.begin({}, records)
    assert stopping.asked is None
    return stopping.reason


def test_a_run_that_was_ended_stays_ended_under_the_same_rule_only():
    rule = StopConfig(target=0.6)
    event = {"kind": STOPPED, **look(Stopping(rule, None), 1, scores(m=0.7))}
    records = [
        RoundRecord(t, 1, scores(m=0.5), NOTHING, {}, [], [event] if t == 1 else []) for t in range(2)
    ]  # the scores are those after the method's last work, which has made them worse
    assert resumed(rule, records) == event["reason"]
    assert resumed(StopConfig(target=0.9), records) is None
    assert resumed(StopConfig(), records) is None


def test_a_run_that_a_callback_has_ended_stays_ended():
    event = {"kind": STOPPED, "reason": "enough", "callback": "Mine"}
    assert resumed(StopConfig(), [RoundRecord(0, 1, [], NOTHING, {}, [], [event])]) == "enough"
