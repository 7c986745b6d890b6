"""What moves between the CPU and an accelerator, and when a program waits for it: numbers of every family of methods.

`contract/test_on_a_device.py` runs this file in a process of its own. The device has the table of an accelerator.
"""

import dataclasses

import pytest

import solera.methods  # noqa: F401  (registers them)
from closeness import apart, plain_models
from simulated_device import SIM, simulated_device
from solera.core.federation import FederationConfig
from solera.engines import EngineConfig
from solera.method import METHODS, find_method
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import small, toy_for

SIM.register()

# For each family a method and what one round with four clients makes the program wait for: numbers that are read, and
# copies, nearly all of them weights that go down with a task and up after it, tensor by tensor.
FAMILIES = {
    "averages": ("fedavg", 4, 136),
    "control variates": ("scaffold", 4, 136),
    "fusion": ("feddf", 26, 297),
    "a model of the server's own": ("fedet", 21, 417),
    "FedEED's framework": ("fedeed", 22, 307),
    "predictions": ("fedmd", 8, 207),
    "generators": ("fedgen", 9, 306),
    "personal": ("ditto", 8, 186),
    "divided models": ("fedgkt", 8, 182),
    "two levels": ("pfedme", 8, 196),
}
SLOW = ("control variates", "a model of the server's own", "two levels")
# Two rounds: sums in another order. Adam makes more of it: its first steps have the size of the learning rate.
STATED = 1e-3


def longer(method, times):
    """The same method with so many times the steps, and without evaluations in between, which read a score each."""
    changes = {}
    for f in dataclasses.fields(method):
        value = getattr(method, f.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            known = {g.name for g in dataclasses.fields(value)}
            how = "steps" if getattr(value, "steps", None) else "epochs"
            more = {how: getattr(value, how) * times} if how in known else {}
            changes[f.name] = dataclasses.replace(
                value, **more, **{k: 10**6 for k in ("every", "patience") if k in known}
            )
    return dataclasses.replace(method, **changes)


def counted(name, out, times=1, rounds=1):
    method = longer(small(find_method(name)()), times)
    scenario = toy_for(method, samples=200, workers=1)
    run, federation = RunConfig(rounds=rounds, eval_clients=2), FederationConfig(fraction=0.5)
    with simulated_device("accelerator") as sim:
        found = simulate(scenario, method, out, run, federation, EngineConfig("inprocess", 1, device="sim"))
        assert not found.summary["failures"]
        kept = scenario.dataset.train.inputs
        return {**sim.counts(), "training set": sim.copies_of(kept), "its bytes": kept.nbytes}


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FAMILIES])
def test_no_step_waits_for_the_device_and_the_training_set_moves_once(family, tmp_path):
    name, reads, waits = FAMILIES[family]
    once, more = counted(name, tmp_path / "1"), counted(name, tmp_path / "3", times=3)
    assert (once["reads"], once["waits"]) == (reads, waits)
    assert more["operators"] > once["operators"]
    # pFedMe solves a problem of its own at each step, a training that ends with one read: 12 more steps, 4 clients.
    assert more["waits"] - waits == (48 if name == "pfedme" else 0)
    assert more["reads"] == reads
    assert once["training set"] == more["training set"] == 1


def test_it_moves_once_however_many_rounds_there_are(tmp_path):
    one, three = (counted("fedavg", tmp_path / str(n), rounds=n) for n in (1, 3))
    assert one["training set"] == three["training set"] == 1
    assert one["waits"] < three["waits"] <= 3 * one["waits"]  # templates and data once, weights in every round


def both(name, out):
    method = small(find_method(name)())
    models = plain_models(method)

    def result(device):
        scenario = toy_for(method, models=models, samples=200, workers=1)
        run, federation = RunConfig(rounds=2, eval_clients=2), FederationConfig(fraction=0.5)
        return simulate(scenario, method, out / device, run, federation, EngineConfig("inprocess", 1, device=device))

    wanted = result("cpu")
    with simulated_device("accelerator"):
        return apart(wanted, result("sim"))


FEW = ("feddf", "fedgkt")


@pytest.mark.parametrize("name", FEW)
def test_results_agree_within_the_tolerance(name, tmp_path):
    assert both(name, tmp_path) <= STATED


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - set(FEW)))
def test_those_of_every_other_method_do(name, tmp_path):
    assert both(name, tmp_path) <= STATED


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - {name for name, *_ in FAMILIES.values()}))
def test_no_step_of_any_other_method_waits(name, tmp_path):
    once, more = counted(name, tmp_path / "1"), counted(name, tmp_path / "3", times=3)
    assert (more["reads"], more["waits"]) == (once["reads"], once["waits"])
    assert once["training set"] == 1
