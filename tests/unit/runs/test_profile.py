"""Reading what `--profile` wrote."""

import json

from made_runs import make_run
from solera.runs.profile import MAX_PROFILE_BYTES, Cost, read_profile
from solera.runs.record import FORMAT

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
        "profile/profile.json is damaged ('seconds' is missing)",
        "profile/profile.json cannot be read (larger than 10 MB)",
        "profile/profile.json was written in format 3 by solera 9.9; this version reads format 2 and older",
    ]
