"""A second device, simulated: every method has the bits of the CPU there, and no operator gets tensors of both.

torch starts the threads of a device at the first backward pass of a process, and a process that has them cannot fork
workers. So what is in `on_a_device` runs in processes that have done nothing before.
"""

import pathlib
import sys

import pytest

import fresh
import solera.methods  # noqa: F401  (registers them)
from solera.method import METHODS, find_method
from solera.testing import run_toy, small

pytestmark = pytest.mark.rest
CASES = pathlib.Path(__file__).resolve().parents[1] / "on_a_device"


FILES = sorted(p.name for p in CASES.glob("cases_*.py"))


@pytest.mark.timeout(900)  # a whole file of tests
@pytest.mark.parametrize("file", FILES)
def test_in_a_process_of_its_own(file):
    run_cases(file, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", [f for f in FILES if "mark.slow" in (CASES / f).read_text("utf-8")])
def test_slow_ones_in_a_process_of_their_own(file):
    run_cases(file, "slow")


def run_cases(file: str, which: str) -> None:
    """The tests of one file, in a process that has done nothing before."""
    done = fresh.run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", which, CASES / file)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


WORKERS = """
import pathlib, sys
sys.path.insert(0, sys.argv.pop())
import torch
torch.set_num_threads(1)
from solera.engines import EngineConfig
from solera.method import find_method
import solera.methods
from solera.testing import run_toy, small
from simulated_device import simulated_device

name, out = sys.argv[1:]
method = small(find_method(name)())
with simulated_device() as sim:
    found = run_toy(method, pathlib.Path(out), EngineConfig("processes", 2, device="sim", per_device=2))
assert not found.summary["failures"], found.summary["failures"]
assert found.summary["workers"] == 2
print(found.digest)
"""


def two_workers(name: str, out: pathlib.Path) -> str:
    """The digest of a toy run with two workers on the device, in a process that has not opened it."""
    done = fresh.run("-c", WORKERS, name, out, CASES.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="forks worker processes")
def test_workers_open_the_device_themselves(tmp_path):
    wanted = run_toy(small(find_method("feddf")()), tmp_path / "cpu")
    assert two_workers("feddf", tmp_path / "sim") == wanted.digest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks worker processes")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_workers_have_the_bits_of_the_cpu(name, tmp_path):
    wanted = run_toy(small(find_method(name)()), tmp_path / "cpu")
    assert two_workers(name, tmp_path / "sim") == wanted.digest
