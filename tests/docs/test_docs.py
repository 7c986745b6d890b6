"""The documentation says what is true: marks, defaults, commands, code blocks, links and generated parts."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import io
import json
import pathlib
import re
import shlex
import sys
import tokenize
import tomllib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

import solera.methods  # registers them
import solera.testing  # noqa: F401  (registers its tasks before a page does: what a page registers is taken back)
from solera.cli.console import EXIT_CODES
from solera.cli.main import app
from solera.core.task import TASKS
from solera.data import SOURCES, load
from solera.engines import ENGINES
from solera.lab.sweep import plan
from solera.method import METHODS, name_of, prepare_scoring
from solera.models import MODELS
from solera.runs import loop
from solera.runs.config import Config, load_config
from solera.runs.loop import check_fit
from solera.scenario.scenario import Scenario

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
METHOD_PAGES = sorted((DOCS / "methods").glob("*.md"))
OURS = sorted(name for name, cls in METHODS.items() if cls.__module__.startswith("solera.methods."))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
MARK = re.compile(
    r"\b(lines?|eqs?\.?)\s+((?:\(?\d+[a-z]?\)?(?:\s*\([ivx]+\))?(?:\s*(?:-|–|,|and|to)\s*(?=\(?\d))?)+)", re.I
)


def text_of(page: pathlib.Path) -> str:
    return page.read_text("utf-8")


def blocks(page: pathlib.Path, *kinds: str) -> list[str]:
    """The fenced blocks of a page whose first line is one of `kinds`."""
    return [code for kind, code in FENCE.findall(text_of(page)) if kind.strip() in kinds]


def rows(page: pathlib.Path) -> Iterator[tuple[list[str], list[str]]]:
    """(heads, cells) of every row of every table of a page; an escaped bar is no border."""
    heads: list[str] | None = None
    for line in FENCE.sub("", text_of(page)).splitlines():
        if not line.startswith("|"):
            heads = None
            continue
        cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if heads is None:
            heads = cells
        elif not set("".join(cells)) <= set("-: "):
            yield heads, cells


def name(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_page_on_deployments_says_what_a_lying_server_gets_from_each_task():
    prepare_scoring()
    ours = [n for n, t in TASKS.items() if t.fn.__module__.startswith("solera.methods.")]
    found = [cells[0] for heads, cells in rows(DOCS / "howto" / "deploy.md") if heads[1] == "what a lying server gets"]
    assert sorted(t for cell in found for t in re.findall(r"`([^`]+)`", cell)) == sorted(ours)


# ---- every method has a page, and every mark in its code a row --------------------------------------


def marks_in(text: str) -> set[str]:
    """Every line and equation number named in a text: "lines 7-8, eq. (3)" is line 7, line 8 and eq 3."""
    found = set()
    for kind, numbers in MARK.findall(text):
        kind = "eq" if kind.lower().startswith("eq") else "line"
        plain = re.sub(r"\((\d+[a-z]?)\)", r"\1", numbers)
        for first, last in re.findall(r"(\d+)[a-z]?(?:\s*\([ivx]+\))?(?:\s*(?:-|–|to)\s*(\d+))?", plain):
            found |= {f"{kind} {n}" for n in range(int(first), int(last or first) + 1)}
    return found


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def marks_of(method: str) -> set[str]:
    """The marks in a method's file, less those inside the classes of other methods there. Of a method that is derived
    from another one of its file: those inside its class."""
    cls = METHODS[method]
    file = pathlib.Path(inspect.getsourcefile(cls) or "")
    source = file.read_text("utf-8")
    others = {c.__name__ for c in METHODS.values() if c.__module__ == cls.__module__} - {cls.__name__}
    within = {
        line: node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    inner = cls.__base__.__name__ in others
    own = {line for line, _ in comments(source) if within.get(line) not in others and (line in within or not inner)}
    return set().union(*(marks_in(text) for line, text in comments(source) if line in own))


def test_marks_are_understood():
    assert marks_in("# lines 7-8") == {"line 7", "line 8"}
    assert marks_in("# line 12 (ii)") == {"line 12"}
    assert marks_in("# lines 4-6, eq. (1)") == {"line 4", "line 5", "line 6", "eq 1"}
    assert marks_in("# lines 1 and 12; eq. 11") == {"line 1", "line 12", "eq 11"}
    assert marks_in("# eqs. (3)-(5)") == {"eq 3", "eq 4", "eq 5"}
    assert marks_in("# one line of metrics, 3 equations") == set()
    assert {"line 2", "line 6", "line 11", "line 14", "line 15"} <= marks_of("feddf")
    assert marks_of("fedavg") == set()


@pytest.mark.parametrize("method", OURS)
def test_every_method_has_a_page(method):
    assert (DOCS / "methods" / f"{method}.md").is_file(), f"docs/methods/{method}.md is missing"


@pytest.mark.parametrize("method", [m for m in OURS if (DOCS / "methods" / f"{m}.md").is_file()])
def test_every_mark_has_a_row(method):
    page = DOCS / "methods" / f"{method}.md"
    in_table = set().union(set(), *(marks_in(cells[0]) for _, cells in rows(page)))
    missing = marks_of(method) - in_table
    assert not missing, f"{name(page)}: no row begins with {', '.join(sorted(missing))}"


def test_every_page_of_a_method_belongs_to_one():
    assert {page.stem for page in METHOD_PAGES} <= set(OURS)


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda p: p.stem)
def test_code_in_the_tables_of_marks_is_in_the_files_it_is_said_to_be_in(page):
    """In tables headed "mark", the last cell quotes code: at least one quotation must be found in a linked file."""
    linked = [page.parent / target for target in re.findall(r"\]\(([^)#]+\.py)\)", text_of(page))]
    linked.append(pathlib.Path(inspect.getsourcefile(METHODS[page.stem]) or ""))
    code = re.sub(r"\s+", " ", "\n".join(file.read_text("utf-8") for file in linked))
    for heads, cells in rows(page):
        quoted = re.findall(r"`([^`]+)`", cells[-1])
        if heads[0] == "mark" and quoted:
            found = any(re.sub(r"\s+", " ", q) in code for q in quoted)
            assert found, f"{name(page)}, {cells[0]}: {quoted[0]} is in none of {[f.name for f in linked]}"


def test_marks_of_tasks_that_methods_share_are_on_a_page():
    """A file of methods/ without a method of its own (the clients' half of several) is explained on some page."""
    own = {cls.__module__.rpartition(".")[2] for cls in METHODS.values()}
    explained = set().union(set(), *(marks_in(cells[0]) for page in METHOD_PAGES for _, cells in rows(page)))
    for file in (ROOT / "src/solera/methods").rglob("*.py"):
        if file.stem not in own:
            marks = set().union(set(), *(marks_in(text) for _, text in comments(file.read_text("utf-8"))))
            assert marks <= explained, f"{file.name}: {sorted(marks - explained)}"
            assert not marks or any(file.name in text_of(page) for page in METHOD_PAGES), file.name


# ---- settings ---------------------------------------------------------------------------------------


def setting(config: Any, key: str) -> Any:
    """The value of a dotted key: of the method, or of the table it begins with."""
    value = config if hasattr(config, key.split(".")[0]) else config.method
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda p: p.stem)
def test_defaults_on_the_pages_are_those_of_the_code(page):
    config = load_config({"method": {"name": page.stem}})
    for heads, cells in rows(page):
        if heads[:2] == ["setting", "default"]:
            key, said = cells[0].strip("`"), cells[1].strip("`")
            value = setting(config, key)
            true = "not set" if value is None else json.dumps(value)
            assert said == true, f"{name(page)}: the default of {key} is {true}, not {said}"


@pytest.fixture(scope="module")
def reference() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(reference):
    old = [name(page) for page, text in reference.pages().items() if not page.is_file() or text_of(page) != text]
    assert not old, f"run `python scripts/make_reference.py`: {', '.join(old)}"


def test_every_setting_has_a_meaning(reference):
    assert reference.missing_meanings() == [], "write a comment beside the field in the code"
    assert reference.unused_meanings() == set(), "remove them from scripts/make_reference.py"


# ---- commands ---------------------------------------------------------------------------------------


def commands(page: pathlib.Path) -> list[str]:
    """Every `solera ...` line of the console and bash blocks of a page."""
    lines = "\n".join(blocks(page, "console", "bash", "sh", "shell")).replace("\\\n", " ").splitlines()
    plain = [line.strip().removeprefix("$ ") for line in lines]
    return [line for line in plain if line.startswith("solera ")]


load_once = functools.cache(load)  # reading the embedded images takes most of the time of these tests
COMMANDS = [(page, line) for page in PAGES if page.is_file() for line in commands(page)]


def understood(line: str) -> Config | None:
    """The configuration that a command would run; None if it runs none. Raises if the program would refuse it."""
    _, verb, *args = shlex.split(line, comments=True)
    group: Any = typer.main.get_command(app)
    assert verb in group.commands, f"there is no command {verb!r}"
    given = group.commands[verb].make_context(verb, list(args)).params
    if verb != "run" or given["recipe"].endswith(".toml"):
        return None
    options = {"engine.name": "engine", "engine.workers": "workers", "run.rounds": "rounds", "run.seed": "seed"}
    changes = [f"{key}={json.dumps(given[o])}" for key, o in options.items() if given[o] is not None]
    return load_config(given["recipe"], [*(given["set_"] or []), *changes])


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p.stem}: {c}" for p, c in COMMANDS])
def test_every_command_can_be_understood(page, line, monkeypatch):
    """Its arguments are accepted, its configuration loads, and on embedded data the method accepts the scenario."""
    config = understood(line)
    if config is None or config.data.name != "fashion-mnist" or config.public.source == "dataset":
        return
    monkeypatch.setattr("solera.scenario.task_data.load", load_once)
    # Enough for 100 clients with two samples of each class.
    small = dataclasses.replace(config.data, train_size=2500, test_size=100)
    public = dataclasses.replace(config.public, size=100)
    check_fit(config.method, Scenario(small, config.models, config.partition, public, seed=0, workers=1))


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda p: p.stem)
def test_the_page_of_a_method_shows_how_to_run_it(page):
    run = [name_of(config.method) for config in map(understood, commands(page)) if config]
    assert page.stem in run, f"{name(page)}: no command runs {page.stem}"


# ---- code -------------------------------------------------------------------------------------------

# The tutorial has a test of its own, which also follows its commands.
WITH_CODE = [page for page in PAGES if page.is_file() and page.name != "tutorial.md" and blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page, in order, as one program; "python no-run" marks fragments."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tables: list[dict[str, Any]] = [METHODS, TASKS, MODELS, SOURCES, ENGINES]
    before = [dict(t) for t in tables]
    try:
        for code in blocks(page, "python"):
            exec(compile(code, name(page), "exec"), module.__dict__)
    finally:  # what a page registers is not there for other tests
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)


SWEEPS = [(page, code) for page in PAGES for code in blocks(page, "toml") if "[sweep]" in code]


@pytest.mark.parametrize(("page", "code"), SWEEPS, ids=[p.stem for p, _ in SWEEPS])
def test_every_sweep_can_be_planned(page, code):
    """Each of its runs has a configuration that loads."""
    assert len(plan(tomllib.loads(code), page.parent, page.stem)) > 1


def test_fragments_are_few():
    fragments = [name(page) for page in PAGES if page.is_file() for _ in blocks(page, "python no-run")]
    assert len(fragments) <= 5, fragments


# ---- links, names, words ----------------------------------------------------------------------------


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that the headings of a page get, as code hosts make them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_file()], ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)}: {target} leads nowhere"
        assert file.is_relative_to(ROOT), f"{name(page)}: {target} leads out of the repository"
        if anchor:
            assert anchor in anchors(file), f"{name(page)}: {target}: there is no such heading"


def test_tests_that_hold_a_promise_exist():
    cited = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text_of(DOCS / "reliability.md"))
    assert len(cited) > 20
    for file, function in cited:
        assert (ROOT / file).is_file(), file
        assert not function or f"def {function}(" in (ROOT / file).read_text("utf-8"), f"{file}::{function}"


def test_the_fields_of_a_run_directory_are_documented(tmp_path):
    settings = ["method.name=local", "data.client_test=0.2", "run.rounds=1", "engine.name=inprocess"]
    settings += ["data.train_size=300", "data.test_size=50", "public.size=40", "method.local.epochs=1"]
    summary = loop.run(load_config("toy", settings), tmp_path / "run").summary
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    page = text_of(DOCS / "run-directory.md")
    fields = [*metrics, *summary, *metrics["seconds"], *metrics["personal"], *summary["environment"]]
    assert [f for f in fields if f"`{f}`" not in page] == []
    files = {path.relative_to(tmp_path / "run").parts[0] for path in (tmp_path / "run").rglob("*")}
    assert [f for f in files if f"`{f}" not in page] == []


def test_the_exit_codes_are_documented():
    page = DOCS / "run-directory.md"
    said = {cells[0] for heads, cells in rows(page) if heads == ["code", "meaning"]}
    assert said == set(re.findall(r"\b\d+\b", EXIT_CODES))


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_file()], ids=lambda p: p.stem)
def test_pages_speak_of_the_repository_only(page):
    text = text_of(page)
    for word in ("shared/", "/work", "/root", "../../..", "spec section", "seed text"):
        assert word not in text, f"{name(page)}: mentions {word!r}"


def test_the_readme_lists_every_method_once():
    last = " ".join(cells[-1] for _, cells in rows(ROOT / "README.md"))
    assert sorted(re.findall(r"\(docs/methods/([\w-]+)\.md\)", last)) == OURS


def test_the_families_of_the_readme_are_those_of_the_site():
    """The navigation of mkdocs.yml and the table in the README put the methods together in the same way."""
    site = text_of(ROOT / "mkdocs.yml")
    sections = re.findall(r"^ {6}- ([\w ]+):\n((?: {10}- methods/[\w-]+\.md\n)+)", site, re.MULTILINE)
    in_site = {title.lower(): re.findall(r"methods/([\w-]+)\.md", pages) for title, pages in sections}
    in_readme = {
        cells[0]: re.findall(r"\(docs/methods/([\w-]+)\.md\)", cells[-1])
        for heads, cells in rows(ROOT / "README.md")
        if heads == ["family", "methods"]
    }
    assert in_readme == in_site
