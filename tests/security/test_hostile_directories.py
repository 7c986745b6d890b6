"""Run directories from anywhere: a named pipe or a device in place of a file neither hangs nor fills the memory, and
numbers that are none stop no reader. All that reads them goes through `solera.core.files`."""

import contextlib
import copy
import hashlib
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
from solera.cli.info_commands import SELF_TEST
from solera.cli.main import app
from solera.core.files import check_file, read_file
from solera.report.page import Source
from solera.runs import loop
from solera.runs.config import load_config

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
from solera.report.page import Source
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
    loop.run(load_config(SELF_TEST | {"engine": {"name": "inprocess"}}), home)
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


# ---- files that are too large, or not what the run wrote --------------------------------------------


def hurt(finished: Path, tmp_path: Path, name: str) -> tuple[Path, Path]:
    """A copy of a run, and a file in it."""
    home = tmp_path / "hurt"
    shutil.copytree(finished, home)
    return home, home / name


def one_line(result: Result, code: int) -> str:
    """What a command said, in the one line that it may say."""
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stderr.count("solera: ") == result.stderr.strip().count("\n") + 1 == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("place", [100, -1])
def test_a_flipped_bit_in_a_model_is_noticed_wherever_it_is_read(place: int, finished: Path, tmp_path: Path):
    """Of its weights or of its description; the sha256 is the one that any other program finds, too."""
    home, file = hurt(finished, tmp_path, "models/mlp.safetensors")
    told = json.loads((home / "summary.json").read_text())["sha256"]
    assert told == {"mlp": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert solera("predict", home).exit_code == 0
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    for command in (["predict", home], *(["export", home, "-o", tmp_path / "out", "--format", f] for f in FORMATS)):
        assert "damaged" in one_line(solera(*command), 4)
    assert not (tmp_path / "out").exists()


FORMATS = ("safetensors", "torchscript")


def test_a_run_whose_models_are_gone_says_so(finished: Path, tmp_path: Path):
    home, file = hurt(finished, tmp_path, "models/mlp.safetensors")
    file.unlink()
    for command in ("predict", "export"):
        assert "models lacks mlp.safetensors, which the run wrote" in one_line(solera(command, home), 4)


def test_without_a_sha256_a_model_is_read_with_a_warning(finished: Path, tmp_path: Path, caplog):
    home, summary = hurt(finished, tmp_path, "summary.json")
    told = json.loads(summary.read_text())
    del told["sha256"]
    summary.write_text(json.dumps(told))
    assert solera("predict", home).exit_code == 0
    assert "summary.json has no sha256 of it" in caplog.text


@pytest.mark.parametrize(
    ("name", "command", "says"),
    [
        ("config.toml", "resume", "larger than 4 MB"),
        ("metrics.jsonl", "resume", "a line of more than 67 MB"),
        ("models/mlp.safetensors", "predict", "damaged"),
        ("models/mlp.safetensors", "export", "damaged"),
    ],
)
def test_a_file_of_200_gigabytes_costs_no_memory(name: str, command: str, says: str, finished: Path, tmp_path: Path):
    """It has holes: the disk holds nothing of them."""
    home, file = hurt(finished, tmp_path, name)
    os.truncate(file, 200 * 10**9)
    child = subprocess.run(
        [sys.executable, "-m", "solera.cli.main", command, str(home)],
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    assert child.returncode == (2 if name == "config.toml" else 4), child.stderr
    assert says in child.stderr
    assert child.stderr.count("\n") == 1
    assert "unexpected" not in child.stderr


def test_a_line_of_metrics_with_more_models_than_any_run_has_is_not_shown(finished: Path, tmp_path: Path):
    home, metrics = hurt(finished, tmp_path, "metrics.jsonl")
    line = json.loads(metrics.read_text())
    line["models"] = {f"m{i}": line["models"]["mlp"] for i in range(100_000)}
    metrics.write_text(json.dumps(line) + "\n")
    result = solera("show", home)
    assert result.exit_code == 0
    assert "metrics.jsonl has 1 line that cannot be read" in result.stdout
    assert "m99999" not in result.stdout


@pytest.mark.parametrize("name", ["config.toml", "summary.json"])
def test_show_tolerates_what_report_and_compare_tolerate(name: str, finished: Path, tmp_path: Path):
    home, file = hurt(finished, tmp_path, name)
    file.write_text("[[")
    result = solera("show", home)
    assert result.exit_code == 0, result.output
    assert f"{name} cannot be read (damaged)" in result.stdout
    assert "mlp" in result.stdout
    assert json.loads(solera("show", home, "--json").stdout)["rounds_done"] == 1


def test_a_pipe_in_place_of_run_json_is_not_taken_for_a_new_run(finished: Path, tmp_path: Path):
    home, file = hurt(finished, tmp_path, "run.json")
    file.unlink()
    pipe(file)
    assert "run.json is damaged (not a regular file)" in one_line(solera("resume", home), 4)


def test_without_memory_a_command_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("solera.cli.read_commands.look", full)
    assert "out of memory: " in one_line(solera("show", tmp_path), 1)
