"""The profile of a run in its report: the numbers of profile.json, and a note where they cannot be had."""

import json
import re

import pytest

from run_directories import write_run
from solera.config import load_config
from solera.report import profile as shown
from solera.report.figures import report_data
from solera.report.page import render
from solera.report.read import read_all
from solera.runner.loop import execute

SMALL = {
    "run": {"rounds": 2},
    "data": {"train_size": 200, "test_size": 50, "client_test": 0.2},
    "partition": {"kind": "iid", "clients": 3},
    "public": {"size": 40},
    "models": {"clients": ["mlp", "lenet5"]},
    "engine": {"name": "inprocess"},
}
MNFL = {"name": "mnfl", "local": {"epochs": 1}, "distill": {"epochs": 1}}
SECONDS = {"clients": 0.5, "server": 0.25, "evaluate": 0.125, "commit": 0.0625, "total": 0.9375}


def function(name, own, file="solera/wire.py"):
    return {"function": name, "file": file, "line": 7, "calls": 3, "own_s": own, "total_s": 2 * own}


def made_profile(**changes):
    """A profile.json as a run would write it, made up."""
    task = {
        "task": "local_update.train",
        "client": "c000",
        "seconds": 0.2,
        "functions": [function("step", 0.1)],
        "operators": [{"operator": f"aten::op{i}", "calls": i, "own_ms": 50.0 - i} for i in range(40)],
        "trace": "profile/local_update.train.json.gz",
    }
    facts = {
        "round": 1,
        "seconds": SECONDS,
        "seconds_before": SECONDS | {"clients": 1.5, "total": 1.9375},
        "server": {"functions": [function(f"f{i}", 0.4 - i / 100) for i in range(40)]},
        "tasks": [task],
    }
    return facts | changes


def write_profile(run, facts):
    (run / "profile").mkdir(exist_ok=True)
    (run / "profile" / "profile.json").write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return run


def data_of(*paths):
    data = report_data(read_all(paths))
    json.dumps(data, allow_nan=False)  # whatever was read, a browser can parse it
    return data


# ---- what is shown ----------------------------------------------------------------------------------


def test_the_numbers_on_the_page_are_those_of_profile_json(tmp_path):
    execute(load_config(SMALL | {"method": MNFL}), tmp_path / "run", profile=True)
    facts = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    page = render(report_data(read_all([tmp_path / "run"])), "0")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    (found,) = data["profiles"]["shown"]
    assert (found["run"], found["round"]) == (0, 2)
    assert dict(found["seconds"]) == {k: v for k, v in facts["seconds"].items() if k != "total"}
    assert dict(found["before"]) == {k: v for k, v in facts["seconds_before"].items() if k != "total"}
    assert sum(s for _, s in found["seconds"]) == pytest.approx(facts["seconds"]["total"], abs=3e-4)  # each is rounded
    costliest = sorted(facts["server"]["functions"], key=lambda f: -f["own_s"])[:10]
    told = [[name, calls, own, total] for name, _, calls, own, total in found["functions"]]
    assert told == [[f["function"], f["calls"], f["own_s"], f["total_s"]] for f in costliest]
    assert len(facts["tasks"]) == len(found["tasks"]) == 3
    for task, fact in zip(found["tasks"], facts["tasks"], strict=True):
        assert (task["task"], task["client"], task["seconds"]) == (fact["task"], fact["client"], fact["seconds"])
        costliest = sorted(fact["operators"], key=lambda f: -f["own_ms"])[:10]
        assert [(name, calls) for name, _, calls, _, _ in task["operators"]] == [
            (f["operator"], f["calls"]) for f in costliest
        ]
        assert [1000 * own for *_, own, _ in task["operators"]] == pytest.approx([f["own_ms"] for f in costliest])
        assert task["trace"] == fact["trace"]
        assert task["trace_bytes"] == (tmp_path / "run" / fact["trace"]).stat().st_size


def test_without_a_profile_there_is_nothing_to_show_and_nothing_to_note(tmp_path):
    data = data_of(write_run(tmp_path / "run"))
    assert data["profiles"] == {"shown": [], "left_out": 0}
    assert data["notes"] == []


def test_each_run_has_its_own_profile(tmp_path):
    write_run(tmp_path / "a", method="fedavg")
    for name, seed in (("b", 0), ("c", 1)):
        facts = made_profile(round=seed, seconds_before=None, seconds=SECONDS | {"server": 3.0 + seed})
        write_profile(write_run(tmp_path / name, seed=seed), facts)
    data = data_of(tmp_path)
    found = [(data["runs"][p["run"]]["path"], p["round"], dict(p["seconds"])["server"], p["before"])
             for p in data["profiles"]["shown"]]  # fmt: skip
    assert found == [(str(tmp_path / "b"), 1, 3.0, None), (str(tmp_path / "c"), 2, 4.0, None)]


def test_a_task_without_a_trace_shows_its_functions_and_one_that_failed_its_error(tmp_path):
    long = {"task": "a", "client": "c0", "seconds": 9.0, "functions": [function("step", 8.0)]}
    failed = {"task": "b", "client": "c0", "seconds": 0.1, "error": "no memory"}
    facts = made_profile(tasks=[long | {"trace": None, "why": "it takes more than 5 s"}, failed])
    (found,) = data_of(write_profile(write_run(tmp_path / "run"), facts))["profiles"]["shown"]
    first, second = found["tasks"]
    assert (first["trace"], first["operators"], first["untraced"]) == (None, [], "it takes more than 5 s")
    assert first["functions"] == [["step", "solera/wire.py:7", 3, 8.0, 16.0]]
    assert (second["error"], second["functions"], second["operators"]) == ("no memory", [], [])


def test_a_report_stays_small_whatever_was_profiled(tmp_path):
    long = "x" * 5000
    operators = [{"operator": long, "calls": 1, "own_ms": 1.0}] * 40
    task = {"task": long, "client": long, "seconds": 1.0, "functions": [], "operators": operators, "trace": None}
    facts = made_profile(server={"functions": [function(long, 1.0, file=long)] * 5}, tasks=[task] * 15)
    for seed in range(shown.RUNS + 3):
        write_run(tmp_path / f"s{seed}", seed=seed, rounds=2, clients=3)
    bare = len(json.dumps(data_of(tmp_path)))
    for seed in range(shown.RUNS + 3):
        write_profile(tmp_path / f"s{seed}", facts)
    data = data_of(tmp_path)
    assert (len(data["profiles"]["shown"]), data["profiles"]["left_out"]) == (shown.RUNS, 3)
    assert data["profiles"]["shown"][0]["tasks_left_out"] == 15 - shown.TASKS
    assert len(json.dumps(data)) - bare < 400_000


# ---- what is no good --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ("null", "damaged"),
        ("[" * 100_000, "damaged"),
        ("{}", "'round' is missing"),
        (made_profile(round=-1), "'-1' is not a count"),
        (made_profile(seconds={"clients": 1.0}), "'server' is missing"),
        (made_profile(seconds=SECONDS | {"clients": float("nan")}), "'nan' is not a duration"),
        (made_profile(seconds=SECONDS | {"clients": 10**400}), "values of the wrong type"),
        (made_profile(seconds=SECONDS | {f"p{i}": 1.0 for i in range(50)}), "55 phases"),
        (made_profile(seconds=[1]), "values of the wrong type"),
        (made_profile(server={"functions": [{"function": "f"}]}), "is missing"),
        (made_profile(tasks="all"), "values of the wrong type"),
        (made_profile(tasks=[{"task": "a", "client": "b", "seconds": True}]), "'True' is not a duration"),
        (
            made_profile(tasks=[{"task": "a", "client": "b", "seconds": 1, "trace": "../../etc/passwd"}]),
            "not a trace of",
        ),
        (made_profile(tasks=[{"task": "a", "client": "b", "seconds": 1, "trace": "profile/../x"}]), "not a trace of"),
        (made_profile(tasks=[{"task": "a", "client": "b", "seconds": 1, "trace": "profile/" + "x" * 999}]), "a trace"),
    ],
)
def test_a_damaged_profile_costs_its_figure_only(tmp_path, content, why):
    data = data_of(write_profile(write_run(tmp_path / "run"), content))
    (note,) = data["notes"]
    assert "profile.json" in note
    assert why in note
    assert note.endswith(": its figure is left out")
    assert data["profiles"]["shown"] == []
    assert data["groups"][0]["lines"]


def test_a_profile_of_a_newer_format_is_named_with_the_version_that_reads_it(tmp_path):
    run = write_profile(write_run(tmp_path / "run"), made_profile())
    (run / "run.json").write_text(json.dumps({"format": 3, "solera": "9.1.0", "experiment": None}))
    data = data_of(run)
    assert data["notes"] == [
        "profile/profile.json was written in format 3 by solera 9.1.0; this version reads format 2 and older: "
        "its figure is left out"
    ]
    assert data["profiles"]["shown"] == []


def test_what_a_later_version_adds_is_kept_or_passed_over(tmp_path):
    facts = made_profile(seconds=SECONDS | {"encrypt": 0.5}, gpu={"functions": []})
    (found,) = data_of(write_profile(write_run(tmp_path / "run"), facts))["profiles"]["shown"]
    assert [name for name, _ in found["seconds"]] == ["clients", "server", "evaluate", "commit", "encrypt"]


def test_a_trace_that_was_taken_away_has_no_size(tmp_path):
    run = write_profile(write_run(tmp_path / "run"), made_profile())
    (task,) = data_of(run)["profiles"]["shown"][0]["tasks"]
    assert (task["trace"], task["trace_bytes"]) == ("profile/local_update.train.json.gz", None)
