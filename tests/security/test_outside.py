"""Nothing is written or sent outside the run directory because a file of another person says so."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner, Result

from run_directories import write_run
from solera.cli.info_commands import SELF_TEST
from solera.cli.main import app
from solera.core import __version__
from solera.core.errors import ConfigError, RunError
from solera.runs import loop
from solera.runs import tracking as export
from solera.runs.config import load_config
from solera.runs.directory import RunDirectory
from solera.runs.trust import refuse_sending

TINY = SELF_TEST | {"engine": {"name": "inprocess"}}


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="solera")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(export, "_need", lambda *_: None)


@pytest.mark.parametrize("target", ["sqlite:///{folder}/theirs.db", "http://127.0.0.1:9"])
@pytest.mark.parametrize("command", ["run", "sweep", "tune"])
def test_a_file_sends_nothing_that_the_command_line_does_not(command: str, target: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = target.format(folder=tmp_path)
    file = tmp_path / "theirs.toml"
    more = {"sweep": {"seeds": [0]}} if command == "sweep" else {}
    file.write_text(tomli_w.dumps(TINY | {"track": {"mlflow": uri}} | more))
    words = ["--over", "method.local.lr=0.1,0.2", "--set", "data.validation=0.1"] if command == "tune" else []
    result = solera(command, file, *words)
    assert result.exit_code == 2, result.output
    where = uri.removeprefix("sqlite:///")
    assert "all settings, results and the path of the run directory go to" in result.stderr
    assert where in result.stderr
    assert f"--set track.mlflow={uri}" in result.stderr
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "theirs.db").exists()


def test_the_command_line_and_a_program_of_ones_own_may_send(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(tomli_w.dumps(TINY | {"track": {"mlflow": "http://127.0.0.1:9"}}))
    with pytest.raises(ConfigError, match="outside the run directory"):
        load_config(file)
    with pytest.raises(ConfigError, match="outside the run directory"):
        load_config(file, ["run.rounds=1", "track.tensorboard=false"])
    assert load_config(file, ["track.mlflow=http://127.0.0.1:9"]).track.mlflow == "http://127.0.0.1:9"
    assert load_config(file, ["track.mlflow=none"]).track.mlflow is None
    assert load_config(file, trusted=True).track.mlflow == "http://127.0.0.1:9"
    assert load_config(TINY | {"track": {"mlflow": "http://127.0.0.1:9"}}).track.mlflow == "http://127.0.0.1:9"


def test_a_run_says_before_its_first_round_what_goes_where(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(TINY))
    words = ["--set", "track.mlflow=http://127.0.0.1:9", "--set", "run.rounds=1", "--out", tmp_path / "r", "-q"]
    result = solera("run", tmp_path / "mine.toml", *words)
    assert result.exit_code == 0, result.output
    told = [line for line in result.output.splitlines() if "go to http://127.0.0.1:9 (track.mlflow)" in line]
    assert len(told) == 1


def begun(home: Path, uri: str) -> None:
    """A run that was killed before its first round."""
    text = tomli_w.dumps(TINY | {"track": {"mlflow": uri}})
    RunDirectory(home, __version__, config=text, experiment={}).close()


def test_only_a_run_of_ones_own_goes_on_sending(tmp_path: Path, monkeypatch):
    uri = "http://127.0.0.1:9"
    begun(tmp_path / "mine", uri)
    refuse_sending(tmp_path / "mine", uri)
    with pytest.raises(RunError, match=r"http://other .track\.mlflow., and it may not be a run of yours"):
        refuse_sending(tmp_path / "mine", "http://other")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    begun(tmp_path / "theirs", uri)
    for forged in (None, "", "ab" * 32, 7, json.loads((tmp_path / "theirs/run.json").read_text())["sends"]):
        facts = json.loads((tmp_path / "theirs/run.json").read_text()) | {"sends": forged}
        (tmp_path / "theirs/run.json").write_text(json.dumps(facts))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        with pytest.raises(RunError, match="it may not be a run of yours"):
            loop.resume(tmp_path / "theirs")
        refuse_sending(tmp_path / "theirs", uri, trusted=True)
    refuse_sending(tmp_path / "theirs", None)


@pytest.mark.parametrize("uri", ["ftp://x", "gopher://x", "sftp://me@host/store"])
def test_a_tracker_that_does_not_exist_is_refused(uri: str):
    with pytest.raises(ConfigError, match=r"MLflow has no tracking over (ftp|gopher|sftp); give a database"):
        load_config(TINY, [f"track.mlflow={uri}"])
    assert load_config(TINY, ["track.mlflow=postgresql+psycopg2://db/x"]).track.mlflow


def test_a_report_overwrites_reports_only(tmp_path: Path):
    home = write_run(tmp_path / "run", rounds=2)
    out = tmp_path / "thesis.tex"
    out.write_text("mine")
    result = solera("report", home, "-o", out)
    assert result.exit_code == 2
    assert "is not a report of Solera: choose another --out, or add --force" in result.stderr
    assert out.read_text() == "mine"
    assert solera("report", home, "-o", out, "--force").exit_code == 0
    assert out.read_text().startswith("<!doctype html>")
    first = os.stat(out).st_mtime_ns
    assert solera("report", home, "-o", out).exit_code == 0  # now it is one
    assert os.stat(out).st_mtime_ns > first
    (tmp_path / "empty").touch()
    assert solera("report", home, "-o", tmp_path / "empty").exit_code == 0
