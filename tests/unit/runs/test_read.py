"""Reading run directories in any state."""

import json
import subprocess
import sys

import pytest

from made_runs import line, make_run
from solera.core.errors import RunError
from solera.runs.compare import rows_of
from solera.runs.groups import group_runs
from solera.runs.read import find_runs, read_run, read_runs


def test_a_whole_run(tmp_path):
    run = read_run(make_run(tmp_path / "a", [0.3, 0.5, 0.4]))
    assert (run.name, run.method, run.seed, run.finished, run.missing) == ("toy", "feddf", 0, True, [])
    assert (run.bytes("down"), run.bytes("up"), run.seconds, run.failures) == (300, 150, 6.0, 0)


def test_reading_needs_no_torch():
    names = ["record", "read", "compare", "results", "words", "callbacks", "groups"]
    imports = ", ".join(f"solera.runs.{name}" for name in names)
    code = f"import sys, {imports}, solera.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- what is not whole ------------------------------------------------------------------------------


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="is not a folder"):
        read_run(tmp_path / "nowhere")


def test_a_run_that_has_only_begun(tmp_path):
    home = make_run(tmp_path / "a", finished=False)
    (home / "metrics.jsonl").unlink()
    run = read_run(home)
    assert (run.finished, run.rounds) == (False, [])
    assert any("metrics.jsonl does not exist" in m for m in run.missing)
    assert any("0 of 3 rounds" in m for m in run.missing)


def test_a_stopped_run_with_a_line_cut_short(tmp_path):
    home = make_run(tmp_path / "a", [0.3, 0.5], finished=False)
    with open(home / "metrics.jsonl", "a") as f:
        f.write('{"round": 2, "byt')
    run = read_run(home)
    assert len(run.rounds) == 2
    assert any("1 line that cannot be read" in m for m in run.missing)
    assert any("2 of 3 rounds" in m for m in run.missing)


BAD_LINES = [
    "null",
    "[]",
    "7",
    '"text"',
    "{}",
    '{"round": "0"}',
    '{"round": true}',
    '{"round": -1}',
    '{"round": 0, "bytes": 7}',
    '{"round": 0, "bytes": {"down": {"a": "x"}}}',
    '{"round": 0, "models": {"m": {}}}',
    '{"round": 0, "models": {"m": {"accuracy": "high"}}}',
    '{"round": 0, "models": [1]}',
    '{"round": 0, "seconds": {"total": []}}',
    '{"round": 0, "personal": {"mean": "x"}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", BAD_LINES, ids=lambda t: t[:40])
def test_lines_that_are_something_else(tmp_path, text):
    home = make_run(tmp_path / "a", [0.3, 0.5, 0.4])
    with open(home / "metrics.jsonl", "a") as f:
        f.write(text + "\n")
    run = read_run(home)
    assert [r.round for r in run.rounds] == [0, 1, 2]
    assert any("cannot be read" in m for m in run.missing)


@pytest.mark.parametrize("name", ["config.toml", "run.json", "summary.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[[[", b"7"])
def test_damaged_files_are_named(tmp_path, name, content):
    home = make_run(tmp_path / "a")
    (home / name).write_bytes(content)
    run = read_run(home)
    if name != "config.toml" or content:  # an empty file is valid TOML
        assert any(name in m for m in run.missing), run.missing
    assert len(run.rounds) == 3
    rows_of(group_runs([run]), 0.5)


def test_a_round_that_was_run_again_counts_once(tmp_path):
    rounds = [line(0, {"mlp": 0.1}), line(1, {"mlp": 0.2}), line(1, {"mlp": 0.3}), line(2, {"mlp": 0.4})]
    run = read_run(make_run(tmp_path / "a", rounds=rounds))
    assert [r.accuracies()["mlp"] for r in run.rounds] == [0.1, 0.3, 0.4]


def test_a_gap_in_the_rounds_is_told(tmp_path):
    run = read_run(make_run(tmp_path / "a", rounds=[line(0, {"mlp": 0.1}), line(2, {"mlp": 0.3})]))
    assert any("gaps before round 2" in m for m in run.missing)


def test_a_run_started_from_python_tells_what_run_json_knows(tmp_path):
    home = make_run(tmp_path / "a")
    (home / "config.toml").unlink()
    experiment = {
        "run.seed": 5,
        "method": {"name": "fedprox", "mu": 0.1},
        "federation": {"fraction": 0.5},
        "data": {"name": "own", "classes": 3},
        "clients": {"count": 4, "architectures": ["wide", "deep"]},
        "server": None,
    }
    (home / "run.json").write_text(json.dumps({"format": 1, "experiment": experiment}))
    run = read_run(home)
    assert (run.method, run.seed, run.settings["data.name"], run.settings["method.mu"]) == ("fedprox", 5, "own", 0.1)
    assert run.settings["models.clients"] == ["wide", "deep"]
    assert not any("config.toml" in m for m in run.missing)  # it lacks nothing that it should have
    (home / "run.json").write_text(json.dumps({"format": 1, "experiment": None}))
    assert "config.toml does not exist" in read_run(home).missing


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("x/b", "x/a", "y"):
        make_run(tmp_path / name)
    assert find_runs([tmp_path / "x", tmp_path / "y"]) == [tmp_path / "x/a", tmp_path / "x/b", tmp_path / "y"]
    assert find_runs([tmp_path / "y", tmp_path]) == [tmp_path / "y", tmp_path / "x/a", tmp_path / "x/b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="holds no run"):
        find_runs([tmp_path / "empty"])


def test_cases_of_a_sweep_have_names(tmp_path):
    make_run(tmp_path / "x/s0")
    make_run(tmp_path / "y/s0")
    entries = [{"out": "x/s0", "case": "first"}, {"out": "y/s0", "case": ""}, {"out": 3}, None, "text"]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": entries}))
    assert [r.settings.get("case") for r in read_runs([tmp_path])] == ["first", None]
    (tmp_path / "sweep.json").write_text('{"runs": 7}')
    assert len(read_runs([tmp_path])) == 2
