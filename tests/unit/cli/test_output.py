"""Where the program prints to: streams that know few letters, devices that are full, readers that go away."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-m", "solera.cli.main"]
ASCII = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": "C"}


def run(*args: str, stdout: object = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *args],
        stdout=stdout,  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["ls", "recipes"], ["ls", "methods", "--json"]])
def test_a_stream_of_ascii_gets_all_it_can_print(args):
    ended = run(*args, **ASCII)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == b""
    assert ended.stdout.isascii()
    assert len(ended.stdout) > 100


def test_a_run_and_its_table_can_be_printed_in_ascii(tmp_path):
    settings = ["run.rounds=1", "data.train_size=100", "data.test_size=50", "partition.clients=2", "public.size=20"]
    changes = [word for text in settings for word in ("--set", text)]
    made = run("run", "toy", "--out", str(tmp_path / "größe"), *changes, "--set", "run.name=plain", **ASCII)
    assert made.returncode == 0, made.stderr
    for command in ("show", "compare"):
        ended = run(command, str(tmp_path / "größe"), **ASCII)
        assert ended.returncode == 0, ended.stderr
        assert b"feddf" in ended.stdout


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["ls", "methods"], ["ls", "engines", "--json"]])
def test_a_full_device_is_told_in_one_line_and_in_the_exit_code(args, unbuffered):
    with FULL.open("w") as full:
        ended = run(*args, stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 1
    assert ended.stderr.decode() == "solera: the output cannot be written: No space left on device\n"


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_run_whose_lines_cannot_be_written_says_so(tmp_path):
    with FULL.open("w") as full:
        ended = run("run", "toy", "--rounds", "1", "--out", str(tmp_path / "run"), stdout=full)
    assert ended.returncode == 1
    assert b"solera: the output cannot be written: No space left on device\n" in ended.stderr
    assert b"unexpected" not in ended.stderr


def test_another_error_keeps_its_own_words():
    ended = run("show", "/nowhere")
    assert ended.returncode == 4
    assert b"/nowhere" in ended.stderr
    found = json.loads(run("ls", "engines", "--json").stdout)
    assert found


def test_a_reader_that_goes_away_is_no_error_worth_a_word():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        ended = run("ls", "methods", stdout=gone)
    assert ended.returncode == 1
    assert ended.stderr == b""
