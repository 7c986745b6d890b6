"""The mutation tester of `make mutants`: what it changes, what it leaves alone, and that it judges."""

import ast
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "mutants.py"
SOURCE = '''
"""Words."""
import math

def double(x: int = 2, *, sure: bool = True) -> int:
    """More words, 1 + 1."""
    if x < 0:
        raise ValueError(f"{x + 1} is negative")
    log.info("%d", x - 1)
    y = [i for i in range(x) if i]
    return 2 * sum(y) if sure else min(x, 1)
'''


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for a class's module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def made(mutants, source: str) -> set[str]:
    """The last statement of every mutant, or its first line where that is what changed."""
    plain, changed = ast.unparse(ast.parse(source)).splitlines(), set()
    for i in range(len(mutants.sites(ast.parse(source)))):
        tree = ast.parse(source)
        mutants.sites(tree)[i].change()
        lines = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
        (line,) = (now for was, now in zip(plain, lines, strict=True) if was != now)
        changed.add(line.strip())
    return changed


def test_what_is_changed(mutants):
    last = {
        "return 3 * sum(y) if sure else min(x, 1)",
        "return 1 * sum(y) if sure else min(x, 1)",
        "return 2 / sum(y) if sure else min(x, 1)",
        "return 2 * max(y) if sure else min(x, 1)",
        "return 2 * sum(y) if not sure else min(x, 1)",
        "return 2 * sum(y) if sure else max(x, 1)",
        "return 2 * sum(y) if sure else min(x, 0)",
        "return 2 * sum(y) if sure else min(x, 2)",
    }
    head = {
        "def double(x: int=3, *, sure: bool=True) -> int:",
        "def double(x: int=1, *, sure: bool=True) -> int:",
        "def double(x: int=2, *, sure: bool=False) -> int:",
    }
    assert made(mutants, SOURCE) == last | head | {"y = [i for i in range(x)]"}  # no message, log line or check


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a <= b", {"a < b", "a > b"}),
        ("not a", {"a"}),
        ("a and b", {"a or b"}),
        ("y = x.mean(-1)", {"y = x.sum(-1)", "y = x.mean(1)", "y = x.mean(-0)", "y = x.mean(-2)"}),
        ("f(a, b, k=c)", {"f(b, a, k=c)", "f(a, b)", "pass"}),
        ("x.detach()", {"x", "pass"}),
        ("x += y", {"x -= y", "pass"}),
        ("self.x = y", {"pass"}),
        ("clip_grad_norm_(p, c)", {"clip_grad_value_(p, c)", "clip_grad_norm_(c, p)", "pass"}),
        ("zip(a, b, strict=True)", {"zip(b, a, strict=True)", "pass"}),
        ("0.5", set()),  # a constant alone is documentation
        ("x(0.5)", {"x(1.0)", "pass"}),
    ],
)
def test_each_kind(mutants, source, expected):
    assert made(mutants, source) == expected


def test_a_loop_ends_after_its_first_turn(mutants):
    source = "for x in y:\n    f(x)"
    (once, _) = mutants.sites(tree := ast.parse(source))
    once.change()
    assert ast.unparse(tree) == source + "\n    break"


def test_samples_follow_from_the_seed_and_only_grow(mutants):
    few, many = (mutants.sample("train/distill.py", n, 0) for n in (4, 9))
    assert few == many[:4]
    assert len({m.id for m in many}) == 9
    assert len({m.kind for m in few}) == 4
    assert few != mutants.sample("train/distill.py", 4, 1)


def test_every_file_has_tests_of_its_own(mutants):
    for file in mutants.targets([]):
        assert mutants.tests_of(file)


def test_each_shared_step_of_the_methods_has_a_test_file_named_after_it(mutants):
    """So that a mistake in it fails there, and not only in the tests of every method that uses it."""
    shared = [pathlib.Path(file).stem for file in mutants.targets(["methods/steps/"])]
    assert {"fusion", "personal", "predictions", "training"} <= set(shared)
    for name in shared:
        assert f"tests/unit/methods/steps/test_{name}.py" in mutants.tests_of(f"methods/steps/{name}.py")


def test_survivors_that_stay_have_a_reason(mutants):
    reasons = json.loads(mutants.REASONS.read_text(encoding="utf-8"))
    assert all(set(entry) == {"file", "was", "now", "reason"} and entry["reason"] for entry in reasons.values())


def test_reasons_are_counted_and_old_ones_named(mutants):
    drawn = mutants.sample("methods/ifca.py", 2, 0)
    results = {m.id: {"verdict": "survived"} for m in drawn}
    text, still = mutants.summary(drawn, results, {drawn[0].id: {"reason": "the same"}})
    assert still == 1
    assert drawn[1].in_words() in text
    assert drawn[0].in_words() not in text
    assert mutants.outdated({drawn[0].id: {"file": "methods/ifca.py"}, "x": {"file": "gone.py"}}) == ["x"]


def test_it_judges_and_goes_on_where_it_ended(tmp_path):
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(SCRIPT), "train/norms", "--results", str(results), "--workers", "1"]
    before = SCRIPT.parents[1].joinpath("src/solera/train/norms.py").read_bytes()
    done = subprocess.run([*command, "--per-file", "1"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = map(json.loads, results.read_text().splitlines())
    assert (entry["verdict"], entry["file"]) == ("killed", "train/norms.py")
    assert entry["by"].startswith("test_norms.py::")
    again = subprocess.run([*command, "--per-file", "1"], capture_output=True, text=True, timeout=200)
    assert "noticed: 100.0 % of 1" in again.stdout
    assert len(results.read_text().splitlines()) == 1
    assert before == SCRIPT.parents[1].joinpath("src/solera/train/norms.py").read_bytes()
