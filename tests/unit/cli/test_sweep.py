"""`solera sweep`: the plan, the runs, what is skipped, what fails, and how it is stopped."""

import dataclasses
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console
from typer.testing import CliRunner, Result

from solera.cli.info_commands import SELF_TEST
from solera.cli.lab_commands import SweepDisplay
from solera.cli.main import app
from solera.core.errors import ConfigError
from solera.lab.sweep import Progress, load_sweep, plan, run_all
from solera.methods import FedAvg
from solera.methods.steps.training import local_update
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.loop import check_start
from solera.scenario.scenario import Scenario

TINY = SELF_TEST | {
    "engine": {"name": "inprocess"},
    "partition": {**SELF_TEST["partition"], "kind": "dirichlet", "variant": "block"},
}


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


def write(path: Path, sweep: dict[str, Any], **tables: Any) -> Path:
    path.write_text(tomli_w.dumps({**TINY, **tables, "sweep": sweep}))
    return path


def names(given: dict[str, Any], **tables: Any) -> list[str]:
    return [run.name for run in plan({**TINY, **tables, "sweep": given}, Path(), "s")]


# ---- the plan ---------------------------------------------------------------------------------------


def test_seeds_alone():
    assert names({"seeds": [3, 1]}) == ["feddf/s3", "feddf/s1"]


def test_a_grid_is_every_combination():
    grid = {"partition": {"alpha": [0.1, 1.0]}, "method.local.lr": [0.01, 0.1]}
    assert names({"grid": grid}) == [
        "alpha=0.1,lr=0.01/s0", "alpha=0.1,lr=0.1/s0", "alpha=1,lr=0.01/s0", "alpha=1,lr=0.1/s0",
    ]  # fmt: skip


def test_cases_times_grid_times_seeds():
    given = {
        "seeds": [0, 1],
        "cases": {"avg": {"method": {"name": "fedavg"}}, "df": {"method": {"fusion": {"steps": 3}}}},
        "grid": {"partition.alpha": [1.0]},
    }
    planned = plan({**TINY, "sweep": given}, Path(), "s")
    assert [r.name for r in planned] == ["avg,alpha=1/s0", "avg,alpha=1/s1", "df,alpha=1/s0", "df,alpha=1/s1"]
    assert planned[3].config.method.fusion.steps == 3
    assert planned[3].config.run.seed == 1
    assert planned[0].config.method.local.epochs == 1  # what both methods have is kept, as with --set method.name
    assert planned[0].settings == {"method.name": "fedavg", "partition.alpha": 1.0}


def test_methods_name_their_folders():
    assert names({"grid": {"method.name": ["fedavg", "feddf"]}}) == ["fedavg/s0", "feddf/s0"]


def test_names_do_not_collide():
    found = names({"grid": {"models.clients": [["mlp", "lenet5"], ["mlp"]], "run.name": ["a b", "a-b", "A b"]}})
    folders = [n.rpartition("/")[0].lower() for n in found]
    assert len(set(folders)) == 6
    assert all(re.fullmatch(r"[\w.,=+-]+", f) for f in folders)
    long = names({"grid": {"models.clients": [["mlp"] * n for n in (60, 61)]}})
    assert len(set(long)) == 2
    assert all(len(n) < 110 for n in long)


def test_the_base_is_a_recipe_a_file_or_the_file_itself(tmp_path):
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(TINY))
    sweep = tmp_path / "sweep.toml"
    sweep.write_text('base = "mine.toml"\nrun.rounds = 4\n[sweep]\nseeds = [7]\n')
    (run,) = load_sweep(sweep)
    assert (run.config.run.rounds, run.config.run.seed, run.config.data.train_size) == (4, 7, 200)
    sweep.write_text('base = "toy"\n[sweep]\n[sweep.grid]\nmethod.name = ["fedavg"]\n')
    (run,) = load_sweep(sweep, ["run.rounds=2"])
    assert (run.config.run.rounds, run.name) == (2, "fedavg/s0")
    assert run.config.run.name == load_config("toy").run.name or run.config.run.name == "sweep"


def test_the_file_in_the_documentation_is_a_sweep(tmp_path):
    page = (Path(__file__).parents[3] / "docs/compare-and-sweep.md").read_text("utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "s.toml").write_text(text)
    planned = [run.name for run in load_sweep(tmp_path / "s.toml")]
    assert len(planned) == 8
    assert "averaging,alpha=0.1/s0" in planned


MISTAKES = [
    ({}, "[sweep] is missing"),
    ({"sweep": {"seed": [1]}}, "sweep.seed"),
    ({"sweep": {"seeds": 3}}, "a list of different integers"),
    ({"sweep": {"seeds": [1, 1]}}, "a list of different integers"),
    ({"sweep": {"seeds": [True]}}, "a list of different integers"),
    ({"sweep": {"grid": {"partition.alpha": 0.1}}}, "a list of the values to try"),
    ({"sweep": {"grid": {"partition.alpha": []}}}, "a list of the values to try"),
    ({"sweep": {"grid": {"partition.alpha": [1.0, 1.0]}}}, "a value occurs twice"),
    ({"sweep": {"grid": {"run.seed": [1]}}}, "sweep.seeds"),
    ({"sweep": {"grid": {"partition.alfa": [1.0]}}}, "did you mean 'partition.alpha'?"),
    ({"sweep": {"grid": {"partition.alpha": [1.0, -1.0]}}}, "alpha=-1: partition.alpha = -1.0"),
    ({"sweep": {"cases": {"../x": {}}}}, "letters, digits"),
    ({"sweep": {"cases": {"x": 3}}}, "a table of settings"),
    ({"sweep": {"cases": {"x": {"run": {"rounds": 0}}}}}, "x: run.rounds = 0"),
    ({"sweep": {"cases": {"x": {"run": {"rounds": 2}}}, "grid": {"run.rounds": [1]}}}, "the grid also sets it"),
    ({"sweep": {}, "bass": "toy"}, "[bass]"),
    ({"sweep": {}, "base": 3}, "the name of a recipe"),
    ({"sweep": {}, "base": "toyy"}, "did you mean 'toy'?"),
    ({"sweep": {"grid": {"run.rounds": list(range(1, 200)), "run.eval_every": list(range(1, 100))}}}, "19701 runs"),
]


@pytest.mark.parametrize(("given", "words"), MISTAKES, ids=[w for _, w in MISTAKES])
def test_mistakes_are_told_before_any_work(given, words):
    tables = TINY if "base" not in given and "bass" not in given else {}
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan({**tables, **given}, Path(), "s")


@pytest.mark.parametrize("content", [None, b"\xff", b"= ="])
def test_files_that_cannot_be_read(tmp_path, content):
    file = tmp_path / "s.toml"
    if content is not None:
        file.write_bytes(content)
    result = solera("sweep", file)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


# ---- running ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Path, Result]:
    """A sweep of two cases and two seeds that is over, and what it printed."""
    folder = tmp_path_factory.mktemp("sweep")
    file = write(folder / "s.toml", {"seeds": [0, 1], "grid": {"method.name": ["fedavg", "feddf"]}})
    return folder, solera("sweep", file, "--out", folder / "out", "--workers", 2, "--target", 0.05)


def test_a_sweep_runs_everything_and_ends_in_the_table(swept):
    folder, result = swept
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len([t for t in lines if re.match(r"\[[1-4]/4\] (fedavg|feddf)/s[01] done", t)]) == 4
    assert any(t.startswith("method") and "rounds to 5%" in t for t in lines)
    index = json.loads((folder / "out/sweep.json").read_text())
    assert [(r["out"], r["status"]) for r in index["runs"]] == [
        ("fedavg/s0", "done"), ("fedavg/s1", "done"), ("feddf/s0", "done"), ("feddf/s1", "done"),
    ]  # fmt: skip
    assert not list((folder / "out").rglob("*.log"))


def test_a_run_of_a_sweep_has_the_bits_of_a_run_alone(swept, tmp_path):
    folder, _ = swept
    config = load_config({**TINY, "engine": {"name": "auto", "workers": 2}}, ["run.seed=1"])
    alone = loop.run(config, tmp_path / "alone").summary
    assert json.loads((folder / "out/feddf/s1/summary.json").read_text())["digest"] == alone["digest"]


def test_what_is_done_is_skipped(swept):
    folder, _ = swept
    stamps = {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("summary.json")}
    result = solera("sweep", folder / "s.toml", "--out", folder / "out", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert len(found["rows"]) == 3  # fedavg's model, feddf's model, feddf's ensemble
    assert {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("summary.json")} == stamps


def test_a_changed_sweep_is_not_mixed_with_the_old_one(swept):
    folder, _ = swept
    result = solera("sweep", folder / "s.toml", "--out", folder / "out", "--set", "partition.clients=3")
    assert result.exit_code == 4
    assert "was started with partition.clients = 2, not 3" in result.stderr


def test_a_dry_run_lists_and_does_nothing(swept, tmp_path):
    folder, _ = swept
    result = solera("sweep", folder / "s.toml", "--out", tmp_path / "new", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "4 runs, 4 of them to do"
    assert not (tmp_path / "new").exists()
    done = json.loads(solera("sweep", folder / "s.toml", "--out", folder / "out", "--dry-run", "--json").stdout)
    assert [r["done"] for r in done] == [True] * 4


def test_the_example_of_the_help(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "my-sweep.toml", {"seeds": [0]})
    text = re.sub(r"\s+", " ", solera("sweep", "--help").stdout)
    example = re.search(r"Example: (solera sweep .*?);", text)[1]
    result = solera(*shlex.split(example)[1:])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs/my-sweep/feddf/s0/summary.json").is_file()


def test_a_case_that_does_not_fit_is_refused_before_any_work(tmp_path):
    file = write(tmp_path / "s.toml", {"cases": {"good": {}, "bad": {"public": {"source": "none"}}}})
    result = solera("sweep", file, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "bad/s0: method 'feddf' needs public data" in result.stderr
    assert not (tmp_path / "out").exists()


def test_one_failing_run_does_not_stop_the_rest(tmp_path):
    out = tmp_path / "out"
    (out / "steps=3/s0").mkdir(parents=True)
    (out / "steps=3/s0/in-the-way").touch()
    file = write(tmp_path / "s.toml", {"grid": {"method.fusion.steps": [3, 4]}})
    result = solera("sweep", file, "--out", out)
    assert result.exit_code == 4
    assert "failed: steps=3/s0: " in result.stderr
    assert "is not empty (it has 'in-the-way')" in result.stderr
    assert "1 of 2 runs failed; the same command tries them again" in result.stderr
    assert (out / "steps=4/s0/summary.json").is_file()
    index = json.loads((out / "sweep.json").read_text())
    assert [r["status"] for r in index["runs"]] == ["failed", "done"]
    assert "in-the-way" in index["runs"][0]["error"]
    (out / "steps=3/s0/in-the-way").unlink()
    assert solera("sweep", file, "--out", out).exit_code == 0


def test_a_run_that_dies_is_told_and_the_rest_goes_on(tmp_path, monkeypatch):
    parent, begin = os.getpid(), loop.run

    def dies(config: Any, *args: Any, **options: Any) -> Any:
        if os.getpid() != parent and config.run.seed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(config, *args, **options)

    monkeypatch.setattr("solera.runs.loop.run", dies)
    base = load_config(TINY)
    runs = {str(s): dataclasses.replace(base, run=dataclasses.replace(base.run, seed=s)) for s in (0, 1)}
    seen: list[str] = []
    ended = run_all(runs, tmp_path, 2, lambda p: seen.append(p.news) if p.news else None)
    assert list(ended.failed) == ["0"]
    assert "killed" in ended.failed["0"]
    assert ended.done == 1
    assert sorted(seen) == ["0", "1"]


LONGER = {"run": {"rounds": 20}}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory) -> str:
    return loop.run(load_config({**TINY, **LONGER}), tmp_path_factory.mktemp("alone") / "run").digest


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.rest)]
)
def test_a_stopped_sweep_goes_on_to_the_same_result(tmp_path, number, code, never_stopped):
    file = write(tmp_path / "s.toml", {"seeds": [0]}, **LONGER)
    command = [sys.executable, "-m", "solera.cli.main", "sweep", str(file), "--out", str(tmp_path / "out")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "out/feddf/s0/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 1):
        assert time.monotonic() < deadline
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.02)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == code, said
    why = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert f"solera: {why}; the same command continues" in said
    assert not (tmp_path / "out/feddf/s0/summary.json").exists()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert json.loads((tmp_path / "out/feddf/s0/summary.json").read_text())["digest"] == never_stopped


# ---- the display ------------------------------------------------------------------------------------


def test_the_display_of_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None, _environ={"TERM": "xterm"})
    running = {f"alpha={i}/s0": (i, 20) for i in range(14)}
    progress = Progress(40, 3, 2, {"x/s0": "[red]boom[/red]"}, running, 61.0, 120.0, "x/s0")
    with SweepDisplay(console) as display:
        display.update(progress)
    text = console.file.getvalue()
    assert "[6/40] x/s0 failed: [red]boom[/red], about 2 min 0 s left" in text
    assert "6/40 runs · 3 skipped · 1 failed" in text
    assert "round 1/20" in text
    assert "... 2 more" in text


def test_json_prints_nothing_else():
    console = Console(file=io.StringIO())
    with SweepDisplay(console, silent=True) as display:
        display.update(Progress(1, 0, news="x"))
    assert console.file.getvalue() == ""


CHATTY = """
import sys, warnings
from pathlib import Path
from rich.console import Console
import solera.lab.sweep
from solera.cli.lab_commands import SweepDisplay
from solera.runs.config import load_config

def chatty(config, *args, **options):
    print("a word", flush=True)
    warnings.warn("a warning")
    raise ValueError("the last word")

solera.lab.sweep.loop.run = chatty
config = load_config({"method": {"name": "fedavg"}})
with SweepDisplay(Console(force_terminal=True)) as display:
    ended = solera.lab.sweep.run_all({"one": config, "two": config}, Path(sys.argv[1]), 1, display.update)
print(ended.failed["two"], file=sys.stderr)
"""


def test_runs_do_not_draw_the_display_of_the_sweep_into_their_logs(tmp_path):
    environment = os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-c", CHATTY, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert ended.stderr.strip().endswith(f"ValueError: the last word (log: {tmp_path / 'two.log'})")
    for log in (tmp_path / "one.log", tmp_path / "two.log"):
        text = log.read_text("utf-8")
        assert "a word\n" in text
        assert "a warning" in text
        assert "\x1b" not in text
        assert "runs" not in text


# ---- the check before --------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--dry-run", "--json"])
def test_the_check_goes_as_far_as_the_first_exchange(tmp_path, option):
    """Three of fifteen runs once failed after minutes, on a K that is looked at only when a run begins."""
    cases = {"good": {}, "many": {"method": {"name": "fedeed", "K": 9}}, "few": {"federation": {"min_replies": 99}}}
    file = write(tmp_path / "s.toml", {"cases": cases})
    result = solera("sweep", file, "--out", tmp_path / "out", option)
    assert result.exit_code == 2
    assert "many/s0: method.K = 9: only" in result.stderr
    assert "(and 1 more cases are refused)" in result.stderr
    assert not (tmp_path / "out").exists()


class AsksFirst(FedAvg):
    """A method whose start is an exchange."""

    def init(self, fed: Any, server: Any) -> Any:
        state = super().init(fed, server)
        fed.map(local_update, fed.sample(), weights=next(iter(state.weights.values())), local=self.local, mu=0.0)
        return state


def test_a_start_that_asks_clients_is_left_to_the_run():
    config = load_config(TINY)
    scenario = Scenario(config.data, config.models, config.partition, config.public, seed=0, workers=1)
    check_start(AsksFirst(), scenario, config.federation)
