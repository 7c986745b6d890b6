"""scripts/versions.py: which packages and Pythons make the oldest and the newest set, and what a failure becomes."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from solera.deploy.flower_inside import TRIED

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def versions():
    spec = importlib.util.spec_from_file_location("versions", ROOT / "scripts" / "versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calls(versions, monkeypatch, tmp_path):
    """What would be run, instead of running it: (the program's folder, its words). `fails`: sets whose tests fail."""
    made = []

    def call(python, *words, **options):
        made.append((str(python), [str(w) for w in words]))
        failed = any(f"/{name}/" in str(python) and "pytest" in words for name in call.fails)
        return subprocess.CompletedProcess(words, int(failed), stdout="")

    call.fails = set()
    monkeypatch.setattr(versions, "call", call)
    monkeypatch.setattr(versions, "pythons", lambda: {(3, 9): "/p/3.9", (3, 11): "/p/3.11", (3, 14): "/p/3.14"})
    monkeypatch.setattr(sys, "argv", ["versions.py", "--out", str(tmp_path)])
    return call, made


def test_the_oldest_set_is_every_lower_bound(versions, monkeypatch):
    monkeypatch.setitem(versions.PROJECT, "dependencies", ["torch>=2.10,<2.16", "numpy>=2.0", "tomli-w>=1.1"])
    monkeypatch.setitem(
        versions.PROJECT, "optional-dependencies", {"data": ["pillow>=11"], "matching": [], "x": ["y>=1"]}
    )
    assert versions.oldest() == ["torch==2.10", "numpy==2.0", "tomli-w==1.1", "pillow==11"]


def test_every_dependency_has_a_lower_bound(versions):
    assert all("==" in d for d in versions.oldest())
    assert {"torch", "numpy", "safetensors", "pydantic", "scipy"} <= {d.partition("==")[0] for d in versions.oldest()}


def test_the_versions_of_flwr_are_those_that_were_tried(versions):
    assert tuple(versions.flower()) == TRIED


def test_this_python_is_found(versions):
    assert sys.version_info[:2] in versions.pythons()


def test_the_tests_that_are_named_exist(versions):
    assert all((ROOT / path).exists() for path in (*versions.CORE, *versions.DEPLOYMENT))


def test_each_set_has_its_python_its_packages_and_its_tests(versions, calls):
    _, made = calls
    assert versions.main() == 0
    assert [p for p, words in made if "venv" in words] == ["/p/3.11", "/p/3.14", "/p/3.11", "/p/3.11"]
    installed = {p.split("/")[-3]: words for p, words in made if "torch==2.10" in words or "--upgrade" in words}
    assert "torch==2.10" in installed["oldest"]
    assert "torch>=2.10,<2.16" in installed["newest"]
    assert [words[-1] for _, words in made if "--no-deps" in words] == ["flwr==1.41.*", "flwr==1.42.*"]
    tests = {p.split("/")[-3]: words for p, words in made if "pytest" in words and "install" not in words}
    assert "tests/golden" in tests["oldest"]
    assert tests["oldest"] == tests["newest"]
    assert "tests/deploy" in tests["flwr-1.41"]
    assert tests["flwr-1.41"] == tests["flwr-1.42"]


def test_a_set_that_fails_is_named_and_the_others_are_run(versions, calls, capsys):
    call, _ = calls
    call.fails.add("oldest")
    assert versions.main() == 1
    assert "oldest: failed" in (out := capsys.readouterr().out)
    assert "newest: passed" in out
    assert "flwr-1.42: passed" in out


def test_without_the_oldest_python_it_says_so(versions, calls, monkeypatch, capsys):
    monkeypatch.setattr(versions, "pythons", lambda: {(3, 14): "/p/3.14"})
    with pytest.raises(SystemExit):
        versions.main()
    assert "Python 3.11 is not installed" in capsys.readouterr().err
