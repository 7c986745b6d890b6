"""The engine on Ray. Ray listens on all interfaces of a machine, so it runs in a network namespace of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

import namespaces

TESTS = pathlib.Path(__file__).resolve().parents[1]
needs_a_namespace = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")


def run(file: str) -> None:
    command = namespaces.inside(
        sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", TESTS / "on_ray" / file
    )
    paths = [str(TESTS), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_a_namespace
@pytest.mark.rest
@pytest.mark.timeout(900)  # a minute of work; Ray starts slowly, or not at all, beside other tests
def test_the_engine_on_a_ray_of_its_own():
    run("cases_ray.py")


@needs_a_namespace
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_machines_and_signals():
    run("cases_cluster.py")
