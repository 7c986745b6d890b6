"""Memory of a device: who is admitted, what happens when it runs out, and that no result changes.

`contract/test_on_a_device.py` runs this file in a process of its own. Runs with workers are in forks of it: a process
that has computed on the device cannot fork workers for it.
"""

import json
import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import solera.methods  # noqa: F401  (registers them)
from solera.compute import Compute
from solera.config import RunConfig
from solera.devices import OutOfMemory, Placement, within_memory
from solera.engines import EngineConfig
from solera.engines.admission import Admission, Memory
from solera.engines.base import ClientInfo, Roster
from solera.federation import FederationConfig
from solera.methods.fedavg import FedAvg
from solera.parts.distill import Distill, distill
from solera.parts.local import Local, fit, logits_of
from solera.parts.objectives import cross_entropy, proximal
from solera.parts.teachers import Ensemble
from solera.runner.loop import simulate
from solera.tensors import weights_of
from solera.testing import toy
from solera.testing.device import MIB, SIM, simulated_device

SIM.register()


# ---- who is admitted --------------------------------------------------------------------------------


@pytest.fixture
def admission():
    """Nine clients of three architectures on one device with 100 MiB."""
    with simulated_device("accelerator", memory=100 * MIB):
        infos = {f"c{i}": ClientInfo(("small", "medium", "large")[i % 3], 100 + i) for i in range(9)}
        yield Admission(Roster.of(infos), Compute(("sim:0",), per_device=4))


def call(k):
    return SimpleNamespace(client=f"c{k}", task="train", step=0)


def begin(admission, calls):
    """Begin as many of these calls as may begin now; they are taken out of the list."""
    begun = []
    while found := admission.choose(calls):
        i, device, alone = found
        begun.append(calls.pop(i))
        admission.begins(begun[-1], device, int(begun[-1].client[1:]), alone)
    return begun


def end(admission, calls, mib, seconds, kept=1):
    for c in calls:
        took = dict(zip(("small", "medium", "large"), zip(mib, seconds, strict=True), strict=True))
        peak, s = took[admission.roster[c.client].architecture]
        memory = Memory(int((peak + kept) * MIB), kept * MIB)
        admission.ended(c, "sim:0", int(c.client[1:]), memory, s * admission.roster[c.client].num_examples)


def names(calls):
    return [c.client for c in calls]


def test_every_architecture_is_measured_once_alone_and_then_the_longest_begin_first(admission):
    calls = [call(k) for k in range(9)]
    order = []
    for _ in range(3):
        (one,) = alone = begin(admission, calls)
        order.append(one.client)
        end(admission, alone, (5, 20, 40), (0.1, 0.2, 0.4))
    assert order == ["c8", "c7", "c6"]  # nothing is known of any: those with most examples first
    first = begin(admission, calls)
    # Of 95 MiB the workers keep 1 each: the two large ones take 80, no medium one fits beside them, small ones do.
    assert names(first) == ["c5", "c2", "c3", "c0"]
    end(admission, first, (5, 20, 40), (0.1, 0.2, 0.4))
    assert names(begin(admission, calls)) == ["c4", "c1"]
    assert [n["share"] for n in admission.notes] == [None] * 3 + [0.4, 0.4, 0.05, 0.05, 0.2, 0.2]
    assert [n["beside"] for n in admission.notes] == [0, 0, 0, 0, 1, 2, 3, 0, 1]


def test_more_samples_need_more_and_no_more_than_per_device_begin(admission):
    calls = [call(0)]
    end(admission, begin(admission, calls), (10, 0, 0), (1, 1, 1))
    assert admission.need(call(0)) == 10 * MIB
    assert admission.need(call(6)) == int(10 * MIB * 1.06)
    assert admission.need(call(1)) is None
    admission.per_device = 2
    calls = [call(0), call(3), call(6)]
    assert names(begin(admission, calls)) == ["c6", "c3"]


def test_who_is_larger_than_what_is_free_waits_until_the_device_is_empty(admission):
    calls = [call(2)]
    end(admission, begin(admission, calls), (0, 0, 99), (1, 1, 1))
    calls = [call(0)]
    end(admission, begin(admission, calls), (1, 0, 0), (1, 1, 1))
    calls = [call(0), call(2)]
    assert names(begin(admission, calls)) == ["c2"]  # alone, whatever its need says
    end(admission, [call(2)], (1, 1, 99), (1, 1, 1))
    assert names(begin(admission, calls)) == ["c0"]


# ---- runs -------------------------------------------------------------------------------------------


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


def only_alone(place, work, way_out):
    """A device on which two clients never fit, whatever was measured."""
    if not place.alone:
        raise torch.OutOfMemoryError("no room for two")
    return within_memory(place, work, way_out)


def run(out, limit=None, name="processes", too_full=False):
    if too_full:
        sys.modules["solera.engines.serve"].within_memory = only_alone  # in this fork only
    method = FedAvg(local=Local(epochs=1, batch=16, optimizer="adam", lr=0.001))
    engine = EngineConfig(name, device="sim", per_device=3)
    with simulated_device("accelerator", memory=limit) as sim:
        scenario = toy(THREE, clients=9, samples=200)
        found = simulate(scenario, method, out, RunConfig(rounds=2), FederationConfig(), engine)
        return found.digest, sim.most_used(), sim.counts()["failed"], len(found.summary["failures"])


def events(out, kind):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[e for e in line["events"] if e["kind"] == kind] for line in lines]


def test_three_architectures_fill_a_device_and_never_take_more_than_there_is(tmp_path):
    limit = 18 * MIB  # one client of "broad" takes about 6, and every process keeps about 2
    _, (digest, *_) = in_a_fork(run, tmp_path / "free", None, "inprocess")
    done, (again, peak, failed, lost) = in_a_fork(run, tmp_path / "tight", limit)
    assert (done, again, failed, lost) == (True, digest, 0, 0)
    assert limit / 2 < peak <= limit
    first, second = events(tmp_path / "tight", "admitted")
    assert len(first) == len(second) == 9
    assert sorted(e["architecture"] for e in first if e["share"] is None) == ["broad", "middle", "narrow"]  # measured
    assert {e["beside"] for e in first if e["share"] is None} == {0}
    shares = {e["architecture"]: e["share"] for e in second}
    assert 0 < shares["narrow"] < shares["middle"] < shares["broad"] < 1
    assert max(e["beside"] for e in second) >= 1  # side by side


def test_who_runs_out_of_memory_beside_others_runs_again_alone(tmp_path):
    _, (digest, *_) = in_a_fork(run, tmp_path / "free", None, "inprocess")
    done, (again, _, _, lost) = in_a_fork(run, tmp_path / "full", 18 * MIB, "processes", True)
    assert (done, again, lost) == (True, digest, 0)
    assert sum(map(len, events(tmp_path / "full", "out_of_memory"))) > 0


def test_a_device_that_is_too_small_for_one_client_is_one_clear_line(tmp_path):
    done, said = in_a_fork(run, tmp_path / "small", 4 * MIB)
    assert not done
    assert said.startswith("RunError: round 0: ")
    assert "(broad), local_update: sim:0 has too little memory: " in said
    assert "lower the batch of the clients' training (method.local.batch) or engine.resident" in said
    assert "\n" not in said


# ---- minibatches in pieces --------------------------------------------------------------------------


def deep(norm=None):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.ReLU()]
    for _ in range(12):
        layers += [nn.Linear(32, 32), *([norm(32)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


def samples(n=512):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 8, generator=g), torch.arange(n) % 3


def trained(limit, objective=cross_entropy, norm=None, batch=256):
    """A training of a deep model on a device with so much memory: its weights, and in how many pieces it was."""
    with simulated_device("accelerator", memory=limit) as sim:
        place = Placement("sim:0")
        x, y = (t.to("sim") for t in samples())

        def work():
            model = deep(norm).to("sim")
            fit(model, x, y, Local(epochs=2, batch=batch, lr=0.05), 3, objective)
            return weights_of(model)

        weights, pieces = within_memory(place, work, "the way out")
        return weights, pieces, sim.most_used()


@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_a_minibatch_that_does_not_fit_is_computed_in_pieces(mu):
    def objective():
        return proximal(mu, {n: t.to("sim") for n, t in deep().state_dict().items()})

    with simulated_device("accelerator"):
        loss = objective()
    whole, pieces, most = trained(None, loss)
    assert pieces == 1
    divided, pieces, less = trained(int(0.7 * most), loss)
    assert pieces > 1
    assert less <= 0.7 * most
    for name, t in whole.items():
        torch.testing.assert_close(divided[name], t, atol=1e-6, rtol=1e-4)


def test_what_cannot_be_divided_is_told():
    most = trained(None)[2]
    limit = int(0.7 * most)
    with pytest.raises(OutOfMemory, match=r"sim:0 has too little memory: .*; a model with BatchNorm .*; the way out"):
        trained(limit, norm=nn.BatchNorm1d)
    with pytest.raises(OutOfMemory, match="loss is not a mean over samples"):
        trained(limit, lambda model, x, y: F.cross_entropy(model(x), y))
    with pytest.raises(OutOfMemory, match="a batch of 2 cannot be divided into 4"):
        trained(most // 8, batch=2)


def test_a_student_is_distilled_in_pieces():
    def student(limit):
        with simulated_device("accelerator", memory=limit) as sim:
            x = samples()[0].to("sim")

            def work():
                model, teacher = deep().to("sim"), nn.Linear(8, 3).to("sim")
                with torch.no_grad():
                    teacher.weight.fill_(0.1)
                done = distill(model, x, Ensemble([teacher]), Distill(steps=3, batch=256), 0)
                assert done.steps == 3
                return weights_of(model)

            return *within_memory(Placement("sim:0"), work, ""), sim.most_used()

    whole, pieces, most = student(None)
    assert pieces == 1
    divided, pieces, _ = student(int(0.7 * most))
    assert pieces > 1
    for name, t in whole.items():
        torch.testing.assert_close(divided[name], t, atol=1e-5, rtol=1e-3)


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


def test_on_the_cpu_nothing_is_tried_twice():
    ran = []

    def work():
        ran.append(1)
        raise torch.OutOfMemoryError("no")

    with pytest.raises(torch.OutOfMemoryError):
        within_memory(Placement(), work, "")
    assert ran == [1]
    assert within_memory(Placement(), lambda: "done", "") == ("done", 1)
