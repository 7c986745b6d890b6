"""Run the core tests with the oldest and the newest packages that pyproject.toml allows, and those of deployments with
each flwr that it allows. `make versions` does it; an environment for each set is made in build/versions.

    oldest          Python 3.11 (`requires-python`) and the lower bound of every dependency
    newest          the newest Python that is found, and the newest releases within the bounds
    flwr-1.41, ...  Python 3.11 and the packages of requirements.lock, with that flwr in the place of the locked one

    python scripts/versions.py                      all of them
    python scripts/versions.py newest --python /opt/python3.14/bin/python3

On Linux the package index has torch for CUDA, some gigabytes a set. To save them, name the index for CPUs that the
selector on pytorch.org tells: PIP_EXTRA_INDEX_URL=... make versions.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
CORE = [  # the numbers of all methods, and what they are made of
    "tests/golden", "tests/unit/train", "tests/unit/models", "tests/unit/data", "tests/unit/runner",
    "tests/unit/test_engines.py", "tests/unit/test_federation.py", "tests/unit/test_wire.py",
    "tests/unit/test_randomness.py", "tests/unit/test_settings.py", "tests/contract/test_contracts.py",
]  # fmt: skip
EXTRAS = ("data", "matching")  # that a good part of these needs: pyarrow, pillow, scipy
FEW = "(not test_contracts or engine or feddf or fedet or fedeed or mnfl or scaffold) and not test_encoders"
DEPLOYMENT = ["tests/unit/deploy", "tests/deploy"]


def call(python: object, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python."""
    return subprocess.run([str(python), *map(str, words)], text=True, **options)  # noqa: S603


def pythons() -> dict[tuple[int, int], str]:
    """The interpreters here, by version: on the path, and those of pyenv."""
    found: dict[tuple[int, int], str] = {}
    pyenv = sorted(pathlib.Path.home().glob(".pyenv/versions/*/bin/python3"))
    names = [shutil.which(f"python3.{n}") for n in range(11, 30)]
    for path in [sys.executable, *map(str, pyenv), *(n for n in names if n)]:
        told = call(path, "-c", "import sys; print(*sys.version_info[:2])", capture_output=True)
        if told.returncode == 0:
            major, minor = map(int, told.stdout.split())
            found[major, minor] = path
    return found


def needed() -> list[str]:
    """What the core tests need of the project's dependencies."""
    return [*PROJECT["dependencies"], *(d for extra in EXTRAS for d in PROJECT["optional-dependencies"][extra])]


def oldest() -> list[str]:
    """The same at their lower bounds."""
    return [re.sub(r"^([\w-]+)>=([\d.]+).*", r"\1==\2", d) for d in needed()]


def flower() -> list[str]:
    """The minor versions of flwr within the extra's bounds."""
    bounds = " ".join(PROJECT["optional-dependencies"]["flower"])
    first, end = map(int, re.search(r"flwr>=1\.(\d+),<1\.(\d+)", bounds).groups())  # type: ignore[union-attr]
    return [f"1.{n}" for n in range(first, end)]


def environment(name: str, base: str, where: pathlib.Path) -> str:
    """An environment with the packages of the set; its Python."""
    python = where / name / "bin" / "python"
    call(base, "-m", "venv", where / name, check=True)

    def install(*words: object) -> None:
        call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words, check=True)

    if name == "oldest":
        install(*oldest(), *TOOLS)
    elif name == "newest":
        install("--upgrade", *needed(), *TOOLS)
    else:  # what needs the others' bounds (certifi, uv) is not what we rest on: only flwr itself is changed
        install("--constraint", ROOT / "requirements.lock", f"{ROOT}[dev]")
        install("--no-deps", f"flwr=={name.removeprefix('flwr-')}.*")
        call(python, "-m", "pip", "uninstall", "--quiet", "--yes", PROJECT["name"], check=True)
    return str(python)


def test(name: str, python: str) -> int:
    """The tests of the set; their exit code."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    said = "import sys, torch; print(f'Python {sys.version.split()[0]}, torch {torch.__version__}')"
    print(f"{name}: {call(python, '-c', said, capture_output=True).stdout.strip()}", flush=True)
    few = [*CORE, "-k", FEW, "-m", "not slow and not rest", "-n", "auto", "--dist", "worksteal"]
    words = few if name in ("oldest", "newest") else [*DEPLOYMENT, "-m", "not slow"]
    return call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, cwd=ROOT, env=env).returncode


def main() -> int:
    """Make the environments, run the tests; 1 if a test failed."""
    sets = ["oldest", "newest", *(f"flwr-{v}" for v in flower())]
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("sets", nargs="*", choices=[*sets, []], help="which; all of them by default")
    options.add_argument("--python", help="the Python of `newest`")
    options.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "versions", help="for the environments")
    given = options.parse_args()
    here = pythons()
    first = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    if first not in here:
        options.error(f"Python {first[0]}.{first[1]} is not installed: `requires-python` names it")
    failed = []
    for name in given.sets or sets:
        base = (given.python or here[max(here)]) if name == "newest" else here[first]  # type: ignore[index]
        began = time.monotonic()
        if test(name, environment(name, base, given.out)):
            failed.append(name)
        print(f"{name}: {'failed' if name in failed else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
