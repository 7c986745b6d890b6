"""Run directories from anywhere: a named pipe or a device in place of a file neither hangs nor fills the memory, and
numbers that are none stop no reader. All that reads them goes through `solera.files`."""

import contextlib
import copy
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from run_directories import write_run
from solera.cli.doctor import SELF_TEST
from solera.cli.main import app
from solera.config import load_config
from solera.files import check_file, read_file
from solera.report.serve import Source
from solera.runner.loop import execute

FILES = (
    "config.toml",
    "run.json",
    "metrics.jsonl",
    "summary.json",
    "partition.json",
    "confusion.json",
    "regions.json",
    "sweep.json",
    "models/mlp.safetensors",
    ".lock",
)
COMMANDS = (
    "show DIR",
    "show DIR --json",
    "compare DIR",
    "report DIR -o OUT/report.html",
    "predict DIR",
    "export DIR -o OUT/exported",
    "export DIR --format tensorboard -o OUT/board",
)
# One process reads all directories; it may neither take long nor grow. It says what it is about to do and how it ended.
READER = """
import sys
from pathlib import Path
from typer.testing import CliRunner
from solera.cli.main import app
from solera.report.serve import Source
commands, *homes = (line.split("|") for line in sys.argv[1:])
for (home,) in homes:
    for words in commands:
        command = words.replace("DIR", home).replace("OUT", home + "-out").split()
        print("begin", *command, flush=True)
        result = CliRunner().invoke(app, command)
        if result.exit_code not in (0, 2, 4) or "unexpected" in result.output:
            print("BAD", result.exit_code, result.output[-300:], repr(result.exception))
    print("begin watch", home, flush=True)
    try:
        Source([Path(home)]).data()
    except Exception as e:
        if type(e).__name__ != "RunError":
            print("BAD", repr(e))
"""
MEMORY = 6 << 30  # of addresses; torch alone takes more than one


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run") / "finished"
    execute(load_config(SELF_TEST | {"engine": {"name": "inprocess"}}), home)
    return home


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [pipe, device])
def test_what_is_no_file_hangs_and_fills_nothing(put: Callable[[Path], None], finished: Path, tmp_path: Path):
    homes = []
    for name in FILES:
        home = tmp_path / name.replace("/", "-")
        shutil.copytree(finished, home)
        (home / name).unlink(missing_ok=True)
        put(home / name)
        homes.append(str(home))
    said = tmp_path / "said"
    with said.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-c", READER, "|".join(COMMANDS), *homes],
            stdout=out,
            timeout=240,
            check=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        )
    lines = said.read_text().splitlines()
    assert not [line for line in lines if line.startswith("BAD")]
    assert lines[-1] == f"begin watch {homes[-1]}"  # where it hangs, it got no further than this


def test_the_reader_of_all_of_them(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file") == b"12345"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_file(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="larger than") as caught:
        read_file(tmp_path / "file", 4)
    assert caught.value.filename == str(tmp_path / "file")
    pipe(tmp_path / "pipe")
    device(tmp_path / "zero")
    for name in ("pipe", "zero"):
        for look in (read_file, check_file):
            with pytest.raises(OSError, match="not a regular file"):
                look(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "nothing")


# ---- numbers that are none --------------------------------------------------------------------------


def numbers(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers are in nested lists and tables; of a list, the first."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from numbers(value, (*path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree[:1] if not any(isinstance(v, dict) for v in tree) else tree):
            yield from numbers(value, (*path, i))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    out = copy.deepcopy(tree)
    inner = out
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return out


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="solera")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308, -1, 10**30])
def test_no_number_in_the_measurements_stops_a_reader(value: float, tmp_path: Path):
    home = write_run(tmp_path / "run", rounds=2, clients=4)
    metrics = home / "metrics.jsonl"
    first, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    places = list(numbers(last))
    assert len(places) > 40
    for place in places:
        metrics.write_text(f"{json.dumps(first)}\n{json.dumps(changed(last, place, value))}\n")
        for command in (["show", home], ["show", home, "--json"], ["compare", home], ["compare", home, "--json"]):
            result = solera(*command)
            assert result.exit_code == 0, (command, place, result.output)
            if "--json" in command:
                json.loads(result.stdout, parse_constant=pytest.fail)
        json.dumps(Source([home]).data(), allow_nan=False)


def test_a_loss_that_is_none_is_shown_and_its_round_counts(tmp_path: Path):
    home = write_run(tmp_path / "run", rounds=2)
    metrics = home / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 1.0', '"loss": NaN'))
    result = solera("show", home)
    assert "2 of 2" in result.stdout
    assert "nan" in result.stdout
    found = json.loads(solera("show", home, "--json").stdout)
    assert found["models"]["mlp"]["loss"] is None
    assert found["missing"] == []


def test_a_line_that_no_run_writes_is_named(tmp_path: Path):
    home = write_run(tmp_path / "run", rounds=3)
    metrics = home / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[1] = lines[1].replace('"total": 2.95', '"total": NaN')
    metrics.write_text("\n".join(lines) + "\n")
    for command in (["show", home], ["compare", home]):
        result = solera(*command)
        assert result.exit_code == 0
    assert "metrics.jsonl has 1 line that cannot be read" in solera("show", home).stdout
