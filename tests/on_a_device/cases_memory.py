"""Memory of a device: what happens when it runs out, and that no result changes.

`contract/test_on_a_device.py` runs this file in a process of its own. Runs with workers are in forks of it: a process
that has computed on the device cannot fork workers for it.
"""

import multiprocessing

import pytest
import torch
from torch import nn

import solera.methods  # noqa: F401  (registers them)
from simulated_device import MIB, SIM, simulated_device
from solera.core.federation import FederationConfig
from solera.engines import EngineConfig
from solera.methods.fedavg import FedAvg
from solera.place.placement import OutOfMemory, Placement, within_memory
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import toy
from solera.train.fitting import Local, logits_of

SIM.register()


def net(width):
    return lambda: nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


THREE = {"narrow": net(60), "middle": net(300), "broad": net(600)}


def in_a_fork(work, *args):
    """Whether `work` went well in a process that has not opened the device, and what it returned or said."""

    def tell(pipe):
        torch.set_num_threads(1)
        try:
            pipe.send((True, work(*args)))
        except BaseException as e:
            pipe.send((False, f"{type(e).__name__}: {e}"))

    fork = multiprocessing.get_context("fork")
    near, far = fork.Pipe()
    process = fork.Process(target=tell, args=(far,))
    process.start()
    done = near.recv()
    process.join()
    return done


def run(out, limit=None, name="processes"):
    method = FedAvg(local=Local(epochs=1, batch=16, optimizer="adam", lr=0.001))
    engine = EngineConfig(name, device="sim", per_device=3)
    with simulated_device("accelerator", memory=limit):
        scenario = toy(THREE, clients=9, samples=200)
        found = simulate(scenario, method, out, RunConfig(rounds=2), FederationConfig(), engine)
        return found.digest, len(found.summary["failures"])


def test_clients_side_by_side_on_a_device_have_the_bits_of_one_after_another(tmp_path):
    one = in_a_fork(run, tmp_path / "one", None, "inprocess")
    three = in_a_fork(run, tmp_path / "three")
    assert one == three
    assert one[0]
    assert one[1][1] == 0


def test_a_device_that_is_too_small_for_one_client_is_one_clear_line(tmp_path):
    done, said = in_a_fork(run, tmp_path / "small", 4 * MIB)
    assert not done
    assert said.startswith("RunError: round 0: ")
    assert "(broad), local_update: sim:0 has too little memory: " in said
    assert "lower engine.per_device, the batch of the clients' training (method.local.batch) or engine.resident" in said
    assert "\n" not in said


def deep(norm=None):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.ReLU()]
    for _ in range(12):
        layers += [nn.Linear(32, 32), *([norm(32)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


def samples(n=512):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 8, generator=g), torch.arange(n) % 3


def test_models_are_asked_about_fewer_samples_at_a_time():
    with simulated_device("accelerator") as sim:
        model, x = deep().to("sim"), samples(1000)[0].to("sim")
        sim.reset()
        whole, most = logits_of(model, x).cpu(), sim.most_used()
        del model, x
    with simulated_device("accelerator", memory=int(0.6 * most)) as sim:
        asked = logits_of(deep().to("sim"), samples(1000)[0].to("sim")).cpu()
        assert sim.counts()["failed"] > 0
    torch.testing.assert_close(asked, whole)


def test_a_job_that_needs_too_much_is_told_and_not_tried_again():
    ran = []

    def work():
        ran.append(1)
        raise torch.OutOfMemoryError("no\nroom")

    with (
        simulated_device("accelerator"),
        pytest.raises(OutOfMemory, match="too little memory: no room; wait"),
    ):
        within_memory(Placement("sim:0"), work, "wait")
    assert ran == [1]
    assert within_memory(Placement(), lambda: "done", "") == "done"
