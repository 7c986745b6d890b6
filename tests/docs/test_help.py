"""Every command has help with an example, and every example works as it is written."""

import dataclasses
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import solera.runs.loop
from solera.cli.main import app
from solera.runs.callbacks import Callback
from solera.runs.config import load_config
from solera.runs.loop import Result
from solera.runs.loop import run as run_config
from solera.testing import small

GROUP: Any = typer.main.get_command(app)
EXAMPLE = re.compile(r"\[bold\](solera .+?)\[/bold\]", re.DOTALL)
SWEEP = """
base = "toy"
run.rounds = 1
data = { train_size = 300, test_size = 50 }
public.size = 40
[sweep]
seeds = [0, 1]
[sweep.grid]
method.name = ["fedavg"]
"""


def examples(command: str | None) -> list[str]:
    """The commands that the help of a command shows (of the program itself, without one)."""
    text = (GROUP if command is None else GROUP.commands[command]).help or ""
    return [" ".join(line.split()) for line in EXAMPLE.findall(text.partition("Example:")[2])]


ALL = [(command, line) for command in [None, *GROUP.commands] for line in examples(command)]


@pytest.mark.parametrize("command", list(GROUP.commands))
def test_every_command_shows_how_it_is_used(command):
    found = examples(command)
    assert found, f"solera {command} --help: no line `Example: [bold]solera {command} ...[/bold]`"
    assert found[0].split()[1] == command
    shown = CliRunner().invoke(app, [command, "--help"], prog_name="solera").stdout
    assert f"Example: solera {command}" in shown
    assert "Exit codes" in shown


def in_seconds(config: Any, *args: Any, **options: Any) -> Result:
    """`run`, with less of everything; what is run stays what it is."""
    run = dataclasses.replace(config.run, rounds=min(2, config.run.rounds))
    data = dataclasses.replace(config.data, train_size=400, test_size=50)
    public = dataclasses.replace(config.public, size=40)
    config = dataclasses.replace(config, run=run, data=data, public=public, method=small(config.method))
    return run_config(config, *args, **options)


class Stop(Callback):
    """Interrupts a run after its first round."""

    def saved(self, record: Any) -> None:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The runs and the file that the examples speak of: runs/toy-feddf-s0, runs/toy-fedavg-s0, my-sweep.toml."""
    home = tmp_path_factory.mktemp("examples")
    (home / "my-sweep.toml").write_text(SWEEP)
    (home / "hospitals.toml").write_text('[method]\nname = "fedavg"\n[sites.hospital-a]\nmodel = "mlp"\n')
    for method in ("feddf", "fedavg"):
        in_seconds(
            load_config("toy", [f"method.name={method}", "engine.name=inprocess"]), home / f"runs/toy-{method}-s0"
        )
    with pytest.raises(KeyboardInterrupt):
        in_seconds(load_config("toy", ["engine.name=inprocess"]), home / "stopped", callbacks=[Stop()])
    return home


@pytest.fixture
def here(runs, tmp_path, monkeypatch) -> Path:
    """A working directory with a copy of them."""
    home = shutil.copytree(runs, tmp_path / "here")
    monkeypatch.chdir(home)
    monkeypatch.setattr(solera.runs.loop, "run", in_seconds)
    return home


@pytest.mark.parametrize(
    ("command", "line"), [a for a in ALL if a[0] != "watch"], ids=[b for a, b in ALL if a != "watch"]
)
def test_the_example_works(command, line, here):
    if command == "resume":  # there must be something to continue
        shutil.rmtree("runs/toy-feddf-s0")
        Path("stopped").rename("runs/toy-feddf-s0")
    result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False, prog_name="solera")
    assert result.exit_code == 0, result.output
    files = re.findall(r"(?:-o|--out) (\S+)", line)
    assert all(Path(file).exists() for file in files), f"{files}: not written"


@pytest.mark.parametrize("line", [b for a, b in ALL if a == "watch"])
def test_the_example_of_watch_works(line, here):
    args = shlex.split(re.sub(r"--port \d+", "--port 0", line))[1:]  # the port of the example may be taken here
    child = subprocess.Popen([sys.executable, "-m", "solera.cli.main", *args], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = child.stdout.readline().split()[0]
        with urllib.request.urlopen(url, timeout=20) as page:
            assert b"<html" in page.read()
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
