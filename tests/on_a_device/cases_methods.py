"""Every method on a second device: the bits of the CPU, and no operator on tensors of both.

`contract/test_on_a_device.py` runs this file in a process of its own: each method one round in that process.
"""

import functools
import pathlib
import tempfile

import pytest

import solera.methods  # noqa: F401  (registers them)
from closeness import apart
from simulated_device import SIM, simulated_device
from solera.core.federation import FederationConfig
from solera.engines import EngineConfig
from solera.method import METHODS, find_method
from solera.methods import EnsembleTrainer, Framework, GlobalTrainer
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import small, toy_for
from solera.train.distill import Distill
from solera.train.fitting import Local

SIM.register()  # before the first backward pass

# One round with sums of float32: how far numbers may be from those with sums of float64. Adam makes more of small
# differences: the largest seen is 2e-4.
STATED = 1e-3
# One of each family; the others are slow tests.
FAMILIES = ("ditto", "fedavg", "feddf", "fedeed", "fedet", "fedgen", "fedgkt", "fedmd", "mnfl", "pfedme", "scaffold")
FEW = ("cronus", "dsfl", "feddf", "fedet", "fedgems")  # of those with sums over teachers


def slow_but(few):
    return [pytest.param(n, marks=[pytest.mark.slow] * (n not in few)) for n in sorted(METHODS)]


def result(name, out, method=None, **engine):
    method = small(find_method(name)()) if method is None else method
    scenario = toy_for(method, samples=200, workers=1)
    run, federation = RunConfig(rounds=1, eval_clients=2), FederationConfig(fraction=0.5)
    found = simulate(scenario, method, out, run, federation, EngineConfig("inprocess", 1, **engine))
    assert not found.summary["failures"], (out / "metrics.jsonl").read_text()
    return found


@functools.cache
def on_the_cpu(name):
    return result(name, pathlib.Path(tempfile.mkdtemp()) / "cpu", device="cpu")


@pytest.mark.parametrize("name", slow_but(FAMILIES))
def test_a_method_has_the_bits_of_the_cpu(name, tmp_path):
    wanted = on_the_cpu(name)
    with simulated_device() as sim:
        found = result(name, tmp_path / "sim", device="sim")
    assert sim.counts()["operators"] > 100
    assert found.digest == wanted.digest
    assert found.models.keys() == wanted.models.keys()
    assert {m.weights[n].device.type for m in found.models.values() for n in m.weights} <= {"cpu"}


@pytest.mark.parametrize("name", slow_but(FEW))
def test_a_method_needs_no_float64_there(name, tmp_path):
    """As on Apple's "mps": a tensor of float64 raises there. Sums over teachers are float32, those over clients not."""
    with simulated_device(float64=False):
        found = result(name, tmp_path / "sim", device="sim")
    assert apart(on_the_cpu(name), found) <= STATED


def test_labels_of_public_samples_are_where_models_are(tmp_path):
    """FedEED's framework with members that are fine-tuned and students that learn labels as well."""
    tune, less = EnsembleTrainer(tune=Local(steps=2, batch=16)), Distill(steps=3, batch=16)
    method = Framework(Local(epochs=1), less, ensemble_trainer=tune, global_trainer=GlobalTrainer(label_weight=0.5))
    wanted = result("framework", tmp_path / "cpu", method, device="cpu")
    with simulated_device():
        found = result("framework", tmp_path / "sim", method, device="sim")
    assert found.digest == wanted.digest
