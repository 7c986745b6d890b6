"""Reading run directories in any state, and grouping them over seeds."""

import json
import math
import subprocess
import sys

import pytest

from made_runs import line, make_run
from solera.errors import RunError
from solera.runs.compare import Spread, latex_text, plain_cell, rows_of
from solera.runs.directory import FORMAT as WRITTEN
from solera.runs.read import (
    FORMAT,
    MAX_PROFILE_BYTES,
    Cost,
    Point,
    Target,
    between_methods,
    cautions,
    distinguishing,
    find_runs,
    group_runs,
    read_profile,
    read_run,
    read_runs,
    series,
    to_target,
)


def test_a_whole_run(tmp_path):
    run = read_run(make_run(tmp_path / "a", [0.3, 0.5, 0.4]))
    assert (run.name, run.method, run.seed, run.finished, run.missing) == ("toy", "feddf", 0, True, [])
    assert (run.bytes("down"), run.bytes("up"), run.seconds, run.failures) == (300, 150, 6.0, 0)
    assert series(run) == {"mlp": [Point(0, 150, 0.3), Point(1, 300, 0.5), Point(2, 450, 0.4)]}


def test_reading_needs_no_torch():
    code = "import sys, solera.runs.read, solera.runs.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_target_is_when_it_was_first_reached(tmp_path):
    run = read_run(make_run(tmp_path / "a", [0.3, 0.5, 0.4]))
    assert to_target(run, 0.3, "mlp") == Target(1, 150)
    assert to_target(run, 0.4, "mlp") == Target(2, 300)
    assert to_target(run, 0.5, "mlp") == Target(2, 300)
    assert to_target(run, 0.51, "mlp") is None
    assert to_target(run, 0.1, "no such model") is None


def test_ensembles_and_own_models_are_series_too(tmp_path):
    rounds = [
        line(0, {"mlp": 0.2}, ensembles={"teachers": {"accuracy": 0.6, "loss": 1.0}}),
        line(1, {"mlp": 0.3}, personal={"mean": 0.7, "std": 0.1, "worst_decile": 0.2, "clients": 4}),
    ]
    found = series(read_run(make_run(tmp_path / "a", rounds=rounds)))
    assert [p.accuracy for p in found["ensemble teachers"]] == [0.6]
    assert [p.accuracy for p in found["own models"]] == [0.7]


# ---- profiles ---------------------------------------------------------------------------------------

PROFILE = {
    "round": 1,
    "seconds": {"clients": 1.0, "server": 2.0, "evaluate": 0.5, "commit": 0.25, "total": 3.75},
    "seconds_before": None,
    "server": {
        "functions": [
            {"function": "f", "file": "a/b.py", "line": 3, "calls": 4, "own_s": 0.1, "total_s": 0.7},
            {"function": "<built-in g>", "file": "~", "line": 0, "calls": 9, "own_s": 0.2, "total_s": 0.2},
        ]
    },
    "tasks": [
        {
            "task": "train",
            "client": "c0",
            "seconds": 0.5,
            "functions": [],
            "operators": [{"operator": "aten::mm", "calls": 2, "own_ms": 250.0}],
            "trace": "profile/train.json.gz",
        }
    ],
}


def profiled(home, content):
    make_run(home)
    (home / "profile").mkdir()
    (home / "profile" / "profile.json").write_text(content)
    return home


def test_a_profile_is_read_the_costliest_first(tmp_path):
    home = profiled(tmp_path / "a", json.dumps(PROFILE))
    (home / "profile" / "train.json.gz").write_bytes(b"123")
    missing = []
    found = read_profile(home, missing)
    assert missing == []
    assert (found.round, found.seconds, found.seconds_before) == (1, PROFILE["seconds"], None)
    assert found.functions == [Cost("<built-in g>", "", 9, 0.2, 0.2), Cost("f", "a/b.py:3", 4, 0.1, 0.7)]
    (task,) = found.tasks
    assert task.operators == [Cost("aten::mm", "", 2, 0.25, None)]
    assert (task.trace, task.trace_bytes, task.untraced, task.error) == ("profile/train.json.gz", 3, "", "")


def test_most_runs_have_no_profile(tmp_path):
    missing = []
    assert read_profile(make_run(tmp_path / "a"), missing) is None
    (tmp_path / "a" / "profile").write_text("no folder")
    assert read_profile(tmp_path / "a", missing) is None
    assert missing == []


def test_a_profile_that_is_no_good_is_named(tmp_path):
    missing = []
    assert read_profile(profiled(tmp_path / "cut", json.dumps(PROFILE)[:-30]), missing) is None
    assert read_profile(profiled(tmp_path / "bare", json.dumps({"round": 1})), missing) is None
    assert read_profile(profiled(tmp_path / "huge", " " * (MAX_PROFILE_BYTES + 1)), missing) is None
    newer = profiled(tmp_path / "newer", json.dumps(PROFILE))
    (newer / "run.json").write_text(json.dumps({"format": FORMAT + 1, "solera": "9.9"}))
    assert read_profile(newer, missing) is None
    assert missing == [
        "profile.json cannot be read (damaged)",
        "profile/profile.json is damaged (it has no 'seconds' where there should be one)",
        "profile/profile.json cannot be read (larger than 10 MB)",
        "profile/profile.json was written in format 3 by solera 9.9; this version reads format 2 and older",
    ]


def test_the_format_that_is_read_is_the_one_that_is_written():
    assert FORMAT == WRITTEN


# ---- what is not whole ------------------------------------------------------------------------------


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="is no folder"):
        read_run(tmp_path / "nowhere")


def test_a_run_that_has_only_begun(tmp_path):
    home = make_run(tmp_path / "a", finished=False)
    (home / "metrics.jsonl").unlink()
    run = read_run(home)
    assert (run.finished, run.rounds) == (False, [])
    assert any("metrics.jsonl is not there" in m for m in run.missing)
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
    assert [m["round"] for m in run.rounds] == [0, 1, 2]
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
    assert [m["models"]["mlp"]["accuracy"] for m in run.rounds] == [0.1, 0.3, 0.4]


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
    assert "config.toml is not there" in read_run(home).missing


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("x/b", "x/a", "y"):
        make_run(tmp_path / name)
    assert find_runs([tmp_path / "x", tmp_path / "y"]) == [tmp_path / "x/a", tmp_path / "x/b", tmp_path / "y"]
    assert find_runs([tmp_path / "y", tmp_path]) == [tmp_path / "y", tmp_path / "x/a", tmp_path / "x/b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="holds no run"):
        find_runs([tmp_path / "empty"])


# ---- grouping ---------------------------------------------------------------------------------------


def test_seeds_are_grouped_and_methods_apart(tmp_path):
    homes = [
        make_run(tmp_path / f"{m}{s}", run__seed=s, method__name=m, run__name=f"n{s}", engine__workers=s)
        for m in ("feddf", "fedavg")
        for s in (0, 1, 2)
    ]
    groups = group_runs([read_run(h) for h in homes])
    assert [(g.method, len(g.runs), g.settings) for g in groups] == [("feddf", 3, {}), ("fedavg", 3, {})]
    assert cautions(groups) == []


def test_only_what_differs_is_a_setting_of_a_group(tmp_path):
    homes = [make_run(tmp_path / f"a{a}", partition__alpha=a) for a in (0.1, 1.0)]
    groups = group_runs([read_run(h) for h in homes])
    assert [g.settings for g in groups] == [{"partition.alpha": 0.1}, {"partition.alpha": 1.0}]
    assert [g.label for g in groups] == ["feddf alpha=0.1", "feddf alpha=1"]
    assert any("different partition.alpha: 0.1 (1 run), 1 (1 run)" in c for c in cautions(groups))


def test_what_differs_between_methods_only_is_no_column(tmp_path):
    runs = [
        read_run(make_run(tmp_path / "a", method__name="fedavg", method__local={"lr": 0.05})),
        read_run(make_run(tmp_path / "b", method__name="fedprox", method__local={"lr": 0.1}, method__mu=0.1)),
        read_run(make_run(tmp_path / "c", method__name="fedprox", method__local={"lr": 0.1}, method__mu=1.0)),
    ]
    assert distinguishing(runs) == ["method.mu"]
    assert between_methods(runs) == {"method.local.lr": {"fedavg": 0.05, "fedprox": 0.1}}
    assert [g.settings for g in group_runs(runs)] == [{"method.mu": None}, {"method.mu": 0.1}, {"method.mu": 1.0}]


def test_grouping_by_chosen_keys_pools_the_rest_and_says_so(tmp_path):
    runs = [read_run(make_run(tmp_path / f"a{a}{s}", partition__alpha=a, run__seed=s)) for a in (1, 2) for s in (0, 1)]
    (group,) = group_runs(runs, ["method.name"])
    assert len(group.runs) == 4
    said = cautions([group])
    assert any("pooled over runs that differ in partition.alpha" in c for c in said)
    assert any("several runs of seed 0" in c for c in said)


def test_what_cannot_be_compared_is_told(tmp_path):
    runs = [
        read_run(make_run(tmp_path / "a")),
        read_run(make_run(tmp_path / "b", data__name="cifar10")),
        read_run(make_run(tmp_path / "c", run__rounds=9, finished=False)),
    ]
    said = "\n".join(cautions(group_runs(runs)))
    assert "different data sets: fashion-mnist (2 runs), cifar10 (1 run); their accuracies are not comparable" in said
    assert "different run.rounds: 3 (2 runs), 9 (1 run)" in said
    assert "not finished" in said
    assert "(3 of 9)" in said


def test_cases_of_a_sweep_have_names(tmp_path):
    make_run(tmp_path / "x/s0")
    make_run(tmp_path / "y/s0")
    entries = [{"out": "x/s0", "case": "first"}, {"out": "y/s0", "case": ""}, {"out": 3}, None, "text"]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": entries}))
    assert [r.settings.get("case") for r in read_runs([tmp_path])] == ["first", None]
    (tmp_path / "sweep.json").write_text('{"runs": 7}')
    assert len(read_runs([tmp_path])) == 2


# ---- numbers ----------------------------------------------------------------------------------------


def test_mean_and_standard_deviation():
    assert Spread.of([0.5]) == Spread(0.5, None, 1)
    assert Spread.of([]) is None
    found = Spread.of([1.0, None, 2.0, 3.0])
    assert (found.mean, found.runs) == (2.0, 3)
    assert math.isclose(found.std, 1.0)  # of a sample: n - 1


def test_rows(tmp_path):
    runs = [
        read_run(make_run(tmp_path / "a", [0.2, 0.6, 0.4], run__seed=0)),
        read_run(make_run(tmp_path / "b", [0.2, 0.4, 0.6], run__seed=1)),
        read_run(make_run(tmp_path / "c", [0.1, 0.1, 0.2], run__seed=2)),
    ]
    (row,) = rows_of(group_runs(runs), 0.6)
    assert row.measured == "mlp"
    assert math.isclose(row.last.mean, 0.4)
    assert math.isclose(row.last.std, 0.2)
    assert math.isclose(row.best.mean, (0.6 + 0.6 + 0.2) / 3)
    assert (row.rounds_to_target.mean, row.bytes_to_target.mean, row.reached) == (2.5, 375.0, 2)
    assert (row.down.mean, row.up.mean, row.seconds.mean, row.failures.mean) == (300, 150, 6.0, 0)


def test_the_worst_decile_belongs_to_the_own_models(tmp_path):
    rounds = [line(0, {"mlp": 0.3}, personal={"mean": 0.7, "std": 0.1, "worst_decile": 0.2, "clients": 4})]
    rows = rows_of(group_runs([read_run(make_run(tmp_path / "a", rounds=rounds))]))
    assert [(r.measured, r.worst_decile and r.worst_decile.mean) for r in rows] == [("mlp", None), ("own models", 0.2)]


def test_text_for_latex_and_spreadsheets():
    assert latex_text("a_b & 50% {x} ± 1\\") == r"a\_b \& 50\% \{x\} $\pm$ 1\textbackslash{}"
    cells = ("=1+1", "@x", "-0.5", "+z", "ok", None)
    assert [plain_cell(t) for t in cells] == ["'=1+1", "'@x", "-0.5", "'+z", "ok", ""]


def test_the_spellings_of_version_0_1_are_read_as_the_settings_they_are_now(tmp_path):
    old = make_run(tmp_path / "old", method__local__optimiser="adam", method__distil__lr=0.1)
    new = make_run(tmp_path / "new", method__local__optimizer="adam", method__distill__lr=0.1, run__seed=1)
    runs = [read_run(path) for path in (old, new)]
    assert runs[0].settings | {"run.seed": 1} == runs[1].settings
    assert runs[0].settings["method.local.optimizer"] == "adam"
