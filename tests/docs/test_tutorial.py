"""The tutorial as a newcomer follows it: every block, in order, in an empty folder."""

import json
import pathlib
import re
import shlex
import tomllib
import types

import pytest
from typer.testing import CliRunner

from solera.cli.main import app

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'toml title="([\w.-]+)"')


def follow(line: str) -> str:
    """Do what a line of a console block says; what it prints."""
    program, *args = shlex.split(line.removeprefix("$ "))
    if program == "pip":  # it is installed; that the extra exists is what can be checked
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        wanted = re.search(r"\[(.+)\]", args[-1])
        assert wanted is not None
        assert set(wanted[1].split(",")) <= set(extras)
        return ""
    assert program == "solera", line
    result = CliRunner().invoke(app, args, catch_exceptions=False, prog_name="solera")
    assert result.exit_code == 0, f"{line}: {result.output}"
    return result.stdout


@pytest.mark.timeout(600)
def test_the_tutorial_does_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = types.ModuleType("tutorial")
    printed: dict[str, str] = {}
    for kind, block in FENCE.findall(PAGE.read_text("utf-8")):
        if kind == "python":
            exec(compile(block, PAGE.name, "exec"), program.__dict__)
        elif named := TITLE.fullmatch(kind):
            pathlib.Path(named[1]).write_text(block)
        else:
            assert kind == "console", f"a block that nobody runs: {kind}"
            printed |= {line: follow(line) for line in block.splitlines()}

    said = capsys.readouterr().out
    assert "2000 to learn from, 400 to test with" in said
    assert re.search(r"\.png is a \w+ \(\d+%\)", said)
    scores = {
        name: [
            s["accuracy"] for s in json.loads(pathlib.Path(f"runs/{name}/summary.json").read_text())["models"].values()
        ]
        for name in ("fedavg", "feddf")
    }
    assert len(scores["feddf"]) == 3
    assert all(after > before for before, after in zip(scores["fedavg"], scores["feddf"], strict=True)), scores
    assert "ensemble" in printed["$ solera compare runs"]
    assert "sneaker" in printed["$ solera predict runs/zoo new --model lenet5"]
    for report in ("report.html", "zoo.html"):
        assert "<html" in pathlib.Path(report).read_text("utf-8")
