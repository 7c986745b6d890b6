"""The record of a round: what is written is what is read."""

import json
import math

import pytest

from solera.runs.record import OWN, RoundRecord, Score, Traffic, each_line, read_records, write_records

WHOLE = RoundRecord(
    round=3,
    cohort=2,
    scores=[
        Score("model", "mlp", "accuracy", 0.5),
        Score("model", "mlp", "loss", 1.25),
        Score("ensemble", "teachers", "accuracy", 0.625),
        Score("ensemble", "teachers", "loss", math.inf),
        Score("average", "mlp", "accuracy", 0.25),
        Score("average", "mlp", "loss", 2.0),
        Score("own", OWN, "mean", 0.75),
        Score("own", OWN, "clients", 2),
        Score("stage", "after_training", "mean", 0.7),
        Score("client", "c00", "accuracy", 0.5),
        Score("client", "c01", "accuracy", 1.0),
    ],
    traffic=Traffic({"down": {"a": 5, "b": 7}, "up": {"a": 1}}, {"down": 3, "up": 2}, {"down": 1, "up": 0}),
    seconds={"clients": 0.5, "total": 1.5},
    failures=[{"client": "c02", "task": "a", "reason": "no reply"}],
    events=[{"kind": "distilled", "steps": 4}],
    privacy={"epsilon": 0.5},
    cpu_s=0.125,
)


def test_what_is_written_is_what_is_read():
    assert RoundRecord.from_line(WHOLE.to_line()) == WHOLE


def test_on_the_disk_a_line_has_the_documented_keys():
    line = json.loads(WHOLE.to_line())
    assert line == {
        "round": 3,
        "bytes": {"down": {"a": 5, "b": 7}, "up": {"a": 1}},
        "floats": {"down": 3, "up": 2},
        "integers": {"down": 1, "up": 0},
        "cohort": 2,
        "models": {"mlp": {"accuracy": 0.5, "loss": 1.25}},
        "ensembles": {"teachers": {"accuracy": 0.625, "loss": math.inf}},
        "averages": {"mlp": {"accuracy": 0.25, "loss": 2.0}},
        "personal": {"mean": 0.75, "clients": 2},
        "personal_stages": {"after_training": {"mean": 0.7}},
        "personal_accuracies": {"c00": 0.5, "c01": 1.0},
        "seconds": {"clients": 0.5, "total": 1.5},
        "cpu_s": 0.125,
        "privacy": {"epsilon": 0.5},
        "failures": [{"client": "c02", "task": "a", "reason": "no reply"}],
        "events": [{"kind": "distilled", "steps": 4}],
    }


def test_a_round_that_was_not_evaluated_has_no_scores_and_no_keys_for_them():
    line = json.loads(RoundRecord(0, 1, [], WHOLE.traffic, {"total": 1.0}, [], []).to_line())
    assert line.keys() == {"round", "bytes", "floats", "integers", "cohort", "seconds", "failures", "events"}
    assert RoundRecord.from_line(json.dumps(line)).scores == []


def test_what_readers_ask_for():
    assert WHOLE.of("model") == {"mlp": {"accuracy": 0.5, "loss": 1.25}}
    assert WHOLE.own == {"mean": 0.75, "clients": 2}
    assert WHOLE.accuracies() == {"mlp": 0.5, "ensemble teachers": 0.625, OWN: 0.75}
    assert (WHOLE.traffic.sent("down"), WHOLE.traffic.sent("up"), WHOLE.traffic.sent()) == (12, 1, 13)


def test_what_an_older_version_did_not_write_is_empty_and_what_is_not_known_is_left_alone():
    found = RoundRecord.from_line('{"round": 0, "of_later": [1], "models": {"mlp": {"accuracy": 0.5}}}')
    assert found.accuracies() == {"mlp": 0.5}
    assert math.isnan(found.of("model")["mlp"]["loss"])
    assert (found.cohort, found.seconds, found.failures, found.events, found.cpu_s) == (0, {}, [], [], None)
    assert found.traffic == Traffic({"down": {}, "up": {}}, {"down": 0, "up": 0}, {"down": 0, "up": 0})


def test_a_metric_that_is_not_known_is_a_row_like_the_others():
    found = RoundRecord.from_line('{"round": 0, "models": {"gpt": {"accuracy": 0.5, "loss": 1.0, "perplexity": 9.5}}}')
    assert Score("model", "gpt", "perplexity", 9.5) in found.scores
    assert json.loads(found.to_line())["models"]["gpt"]["perplexity"] == 9.5


@pytest.mark.parametrize(
    "text",
    ["", "7", "[]", "{}", '{"round": -1}', '{"round": 0, "models": {"m": {"accuracy": NaN}}}', b"\xff", "[" * 9999],
)
def test_anything_else_is_a_value_error(text):
    with pytest.raises(ValueError):
        RoundRecord.from_line(text)


def test_the_lines_of_a_file_and_a_file_of_its_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(write_records([WHOLE]) + b'{"round": 4, "cut\n' + write_records([WHOLE]))
    assert list(each_line(tmp_path)) == [WHOLE, None, WHOLE]
    missing: list[str] = []
    assert read_records(tmp_path, missing) == [WHOLE]
    assert missing == ["metrics.jsonl has 1 line that cannot be read"]
    missing.clear()
    assert read_records(tmp_path / "nowhere", missing) == []
    assert missing == ["metrics.jsonl does not exist: no round is finished"]
