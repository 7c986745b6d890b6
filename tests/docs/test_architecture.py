"""The map of the architecture is whole: every package has its sentence, and a round is told in ten hops at most."""

import itertools
import pathlib
import re
import tomllib
from collections import Counter

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "solera"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the rows of the table below a heading, without its head."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_package_has_one_sentence():
    rows = rows_below("The packages")
    told = [name for cells in rows for name in re.findall(r"`([\w.]+)`", cells[0])]
    there = {p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__"}
    there |= {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    there |= {f"methods.{p.parent.name}" for p in PACKAGE.glob("methods/*/__init__.py")}
    assert sorted(told) == sorted(there)
    for cells in rows:
        assert re.fullmatch(r"[^.]+\.", re.sub(r"`[^`]*`", "", cells[1])), f"not one sentence: {cells[1]}"


def test_rooms_keep_their_budgets():
    """`[tool.solera.budgets]` in pyproject.toml: lines of each room; "doors" are the modules beside the rooms."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["solera"]["budgets"]
    lines: Counter[str] = Counter()
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0] if file.parent != PACKAGE else "doors"
        lines[room] += len(file.read_text("utf-8").splitlines())
    assert set(budgets) == set(lines)
    above = {room: f"{n} lines, budget {budgets[room]}" for room, n in lines.items() if n > budgets[room]}
    assert not above, (
        f"{above}: subtract, or raise it in [tool.solera.budgets] of pyproject.toml, "
        "in a commit of its own that says what the reader gets"
    )


def test_no_more_than_sixteen_names_stand_at_the_root():
    names = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert len(names - {"__init__"}) <= 16


def test_a_round_has_at_most_ten_hops():
    diagram = PAGE.partition("sequenceDiagram")[2].partition("```")[0]
    files = re.findall(r"participant \w+ as (\S+\.py)", diagram)
    assert 5 <= len(re.findall(r"--?>>", diagram)) <= 10
    assert files
    assert all((PACKAGE / file).is_file() for file in files)


def test_where_to_put_things_is_answered():
    rows = rows_below("Where do I put it?")
    asked = [cells[0].strip("*") for cells in rows]
    assert asked == [
        "a method",
        "a shared step",
        "an option",
        "a part",
        "a model",
        "a data set",
        "an engine",
        "a figure",
    ]
    paths = [path for cells in rows for path in re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", cells[1])]
    assert len(paths) >= len(rows)
    assert all((PACKAGE / path).exists() for path in paths), paths


def test_the_layers_are_those_of_the_contract():
    """An arrow of the drawing never leads to a higher layer than the contract of import-linter has it."""
    contract = (ROOT / "pyproject.toml").read_text("utf-8").partition("layers = [")[2].partition("]")[0]
    layers = [re.findall(r"solera\.(\w+)", line) for line in contract.splitlines() if "solera." in line]
    height = {name: -i for i, names in enumerate(layers) for name in names} | {"leaves": -len(layers)}
    drawing = PAGE.partition("flowchart TD")[2].partition("```")[0]
    names = dict(re.findall(r'(\w+)\["<b>([\w.]+)</b>', drawing))
    arrows = 0
    for line in (line for line in drawing.splitlines() if "-->" in line):
        steps = [[names[key.strip()].partition(".")[0] for key in side.split("&")] for side in line.split("-->")]
        for begin, end in itertools.pairwise(steps):
            for a in begin:
                for b in end:
                    arrows += 1
                    assert height[a] > height[b] or a == b == "methods", f"{a} --> {b}"
    assert arrows > 20
