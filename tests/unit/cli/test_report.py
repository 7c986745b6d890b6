"""`solera report`, `solera watch` and `solera run --watch`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from run_directories import write_run
from solera.cli.info_commands import SELF_TEST
from solera.cli.main import app


def solera(*args):
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


def program(*args, **options):
    command = [sys.executable, "-m", "solera.cli.main", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["report", "watch"])
def test_help_has_an_example(command):
    text = solera(command, "--help").stdout
    assert f"Example: solera {command}" in text
    assert "Exit codes" in text


# ---- report -----------------------------------------------------------------------------------------


def test_a_report_of_one_run(here):
    write_run(here / "run")
    result = solera("report", "run")
    assert result.exit_code == 0
    assert result.stdout.startswith("report.html: 1 run, 0.1 MB")
    assert "<title>made up: feddf · Solera</title>" in (here / "report.html").read_text()


def test_a_report_of_many_with_a_target(here):
    for method in ("fedavg", "feddf"):
        write_run(here / "runs" / method, method=method)
    result = solera("report", "runs", "-o", "out/x.html", "--target", 0.63)
    assert result.stdout.startswith("out/x.html: 2 runs")
    data = json.loads(re.search(r'id="data">(.*?)</script>', (here / "out/x.html").read_text())[1])
    assert data["targets"]["values"][data["targets"]["shown"]] == 0.63


def test_what_is_missing_is_said_on_stderr_too(here):
    write_run(here / "run")
    (here / "run" / "partition.json").unlink()
    result = solera("report", "run")
    assert result.exit_code == 0
    assert result.stderr.startswith("note: partition.json does not exist")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["report", "nowhere"], 4, "nowhere is not a folder"),
        (["report", "empty"], 4, "empty holds no run"),
        (["report", "run", "-o", "run/run.json/x.html"], 4, "cannot be written"),
        (["watch", "nowhere"], 4, "nowhere is not a folder"),
    ],
)
def test_errors_are_one_line(here, args, code, text):
    write_run(here / "run")
    (here / "empty").mkdir()
    result = solera(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("solera: ")
    assert text in line


@pytest.mark.parametrize("args", [["report"], ["report", "run", "--target", "7"], ["watch", "run", "--port", "99999"]])
def test_wrong_usage(args):
    assert solera(*args).exit_code == 2


def test_watch_cannot_be_bound_elsewhere():
    assert "--host" not in solera("watch", "--help").stdout


def test_a_report_does_not_wait_for_torch(here):
    write_run(here / "run")
    code = "import sys; from solera.cli.read_commands import report; report([__import__('pathlib').Path('run')], "
    code += "__import__('pathlib').Path('x.html')); sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


# ---- watch ------------------------------------------------------------------------------------------


def fetch(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read()


def test_watch_serves_until_interrupted(here):
    write_run(here / "run")
    process = program("watch", "run")
    line = process.stdout.readline()
    url = re.match(r"http://127\.0\.0\.1:\d+/", line)[0]
    assert json.loads(fetch(f"{url}data.json"))["runs"][0]["status"] == "finished"
    assert b"<!doctype html>" in fetch(url)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert process.stderr.read() == ""


def test_a_port_in_use_is_told_in_one_line(here):
    write_run(here / "run")
    first = program("watch", "run")
    port = re.search(r":(\d+)/", first.stdout.readline())[1]
    try:
        result = solera("watch", "run", "--port", port)
        assert result.exit_code == 2
        assert f"--port {port} cannot be used" in result.stderr
    finally:
        first.terminate()
        first.wait()


def test_a_run_can_be_watched_while_it_goes_on(here):
    (here / "tiny.toml").write_text(tomli_w.dumps(SELF_TEST | {"engine": {"name": "inprocess"}}))
    process = program("run", "tiny.toml", "--rounds", 2, "--out", "run", "--watch", "-q", start_new_session=True)
    try:
        url = process.stderr.readline().split()[-1]
        assert json.loads(fetch(f"{url}data.json"))["targets"]  # whether or not the run has begun
        assert "the run has ended" in process.stderr.readline()
        data = json.loads(fetch(f"{url}data.json"))
        assert (data["runs"][0]["status"], data["runs"][0]["done"]) == ("finished", 2)
        assert data["runs"][0]["command"] == "solera run tiny.toml --rounds 2 --out run"
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(60) == 0


def test_no_view_is_left_behind_when_its_run_is_killed(here):
    (here / "tiny.toml").write_text(tomli_w.dumps(SELF_TEST | {"engine": {"name": "inprocess"}}))
    process = program("run", "tiny.toml", "--rounds", 500, "--out", "run", "--watch", "-q")
    url = process.stderr.readline().split()[-1]
    assert fetch(url)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            fetch(url)
        except OSError:
            return
        time.sleep(0.2)
    raise AssertionError("the view still answers")
