"""The simulated device: what it computes, what it refuses, what it counts; and settings that name a device.

`contract/test_on_a_device.py` runs this file in a process of its own.
"""

import copy
import os
import pathlib
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from simulated_device import MIB, simulated_device
from solera.cli.info_commands import devices
from solera.core.errors import ConfigError
from solera.core.tensors import Brought, weights_of
from solera.engines import EngineConfig
from solera.place.devices import Compute, compute_of
from solera.place.placement import TRICKS, Placement, finest
from solera.train.distill import Distill, distill
from solera.train.fitting import Diverged, Local, evaluate, fit, logits_of
from toys import images, mlp, same_bits


@pytest.fixture
def sim():
    with simulated_device() as seen:
        yield seen


def there(t):
    return t.to("sim")


# ---- tensors ----------------------------------------------------------------------------------------


def test_views_share_memory_and_are_written_through(sim):
    x = there(torch.zeros(3, 4))
    x[1].fill_(2)
    x.t()[0, 2] = 7
    x.view(-1)[3:5] += 1
    expected = torch.zeros(3, 4)
    expected[1].fill_(2)
    expected.t()[0, 2] = 7
    expected.view(-1)[3:5] += 1
    assert torch.equal(x.cpu(), expected)
    before = sim.in_use()
    kept = [x[i] for i in range(3)]
    assert sim.in_use() == before
    del kept


def test_results_of_out_and_in_place_are_the_tensors_given(sim):
    a, b, out = there(torch.ones(2)), there(torch.full((2,), 3.0)), there(torch.zeros(2))
    assert torch.add(a, b, out=out) is out
    assert a.add_(b) is a
    torch._foreach_mul_([a, b], 2)
    assert (out.tolist(), a.tolist(), b.tolist()) == ([4.0, 4.0], [8.0, 8.0], [6.0, 6.0])


def test_devices_do_not_mix(sim):
    x = there(torch.ones(3))
    for wrong in (lambda: x + torch.ones(3), lambda: torch.cat([x, torch.ones(1)]), lambda: x[torch.tensor([0])]):
        with pytest.raises(RuntimeError, match="expected all tensors on one device, found sim:0 and cpu"):
            wrong()
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(3, device="sim", generator=torch.Generator())
    assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number may come from anywhere


def test_two_of_them_do_not_mix_either():
    with simulated_device(count=2), pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        _ = torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")


def test_a_device_may_have_no_float64():
    with simulated_device(float64=False):
        x = there(torch.ones(3, dtype=torch.float32))
        for wrong in (
            lambda: x.double(),
            lambda: there(torch.ones(1, dtype=torch.float64)),
            lambda: x.sum(dtype=torch.float64),
        ):
            with pytest.raises(TypeError, match="doesn't support float64"):
                wrong()
        assert (x * 0.5 + torch.tensor(1.0, dtype=torch.float64)).tolist() == [
            1.5
        ] * 3  # a number may come from anywhere
        assert finest(x).dtype == torch.float32
    with simulated_device():
        assert finest(there(torch.ones(3))).dtype == torch.float64
    assert finest(torch.ones(3)).dtype == torch.float64


def test_copies_and_reads_are_counted(sim):
    x = there(torch.ones(8))
    x.copy_(torch.zeros(8))
    assert {k: sim.counts()[k] for k in ("to", "to_bytes", "back", "reads")} == {
        "to": 2, "to_bytes": 64, "back": 0, "reads": 0,
    }  # fmt: skip
    assert x.sum().item() == 0
    assert bool((x == 0).all())
    assert x[x == 0].shape == (8,)  # its length depends on numbers of the device
    assert x.cpu().shape == (8,)
    assert {k: sim.counts()[k] for k in ("to", "back", "back_bytes", "reads")} == {
        "to": 2, "back": 1, "back_bytes": 32, "reads": 3,
    }  # fmt: skip


def test_memory_has_a_limit():
    with simulated_device(memory=MIB) as sim:
        held = torch.zeros(MIB // 8, device="sim")  # half of it
        with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 is out of memory: 0\.6 MiB wanted"):
            torch.zeros(MIB // 8 + MIB // 32, device="sim")
        assert sim.in_use() == sim.most_used() == MIB // 2
        del held
        assert sim.in_use() == 0
        assert sim.counts()["failed"] == 1


def test_what_is_left_of_an_earlier_context_takes_no_memory():
    with simulated_device(memory=MIB) as before:
        held = torch.zeros(MIB // 8, device="sim")
    with simulated_device(memory=MIB) as sim:
        assert (sim.in_use(), sim.most_used()) == (0, 0)
        torch.zeros(MIB // 4, device="sim")  # all of it
        assert (sim.most_used(), sim.counts()["failed"]) == (MIB, 0)
        assert before.in_use() == MIB // 2
        del held
        assert (before.in_use(), sim.in_use()) == (0, 0)


def in_a_child(work):
    """Begin `work` in a process of its own, which ends with all that `work` returned still in use; its number."""
    pid = os.fork()
    if pid == 0:
        try:
            held = work()
            os._exit(0 if held is not None else 1)
        finally:
            os._exit(2)
    return pid


def state_of(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_memory_of_a_process_that_has_ended_is_free_before_its_parent_knows():
    with simulated_device(memory=MIB) as sim:
        pid = in_a_child(lambda: torch.zeros(MIB // 8, device="sim"))
        try:
            while state_of(pid) != "Z":  # ended, and nobody has asked how
                time.sleep(0.001)
            assert sim.in_use() == MIB // 2
            torch.zeros(MIB // 4, device="sim")  # all of it
            assert (sim.most_used(), sim.counts()["failed"]) == (MIB, 0)
        finally:
            os.waitpid(pid, 0)


def test_two_processes_that_ask_at_once_get_what_there_is():
    """Each asks for half of the memory, again and again: there is always enough."""

    def ask():
        for _ in range(300):
            torch.zeros(MIB // 8, device="sim")
        return True

    with simulated_device(memory=MIB) as sim:
        pids = [in_a_child(ask) for _ in range(2)]
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
        assert sim.counts()["failed"] == 0
        assert sim.in_use() == 0


def test_threads_of_torch_count_what_they_free():
    """Backward passes take and free in a thread of torch's, beside this one: nothing is lost, nothing is late."""
    with simulated_device() as sim:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).to("sim")
        x, seen = there(torch.ones(64, 16)), set()
        for _ in range(30):
            model(x).sum().backward()
            seen.add(sim.in_use())
        assert seen == {4 * (64 * 16 + 2 * 6 * (16 * 16 + 16))}  # the samples, the model and its gradients
        del model, x
        assert sim.in_use() == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_model_trains_there_with_the_bits_of_the_cpu(sim, optimizer):
    torch.manual_seed(0)
    here = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(4)
    )
    x, y = images(40)
    x = x.unsqueeze(1).float() / 255 if x.ndim == 3 else x.float()
    here(x[:2])
    model = copy.deepcopy(here).to("sim")
    cfg = Local(epochs=2, batch=16, lr=0.05, optimizer=optimizer)
    done = [fit(m, x, y, cfg, 3) for m in (here, model)]
    assert done[0] == done[1]
    assert same_bits(weights_of(here), weights_of(model))
    assert evaluate(here, x, y) == evaluate(model, x, y)
    assert logits_of(model, x).device.type == "sim"
    assert same_bits(weights_of(copy.deepcopy(model)), weights_of(model))


# ---- what an accelerator does otherwise -------------------------------------------------------------


def trained(table, cfg, **options):
    with simulated_device(table) as sim:
        model = mlp(0).to("sim")
        x, y = (t.to("sim") for t in images(80))
        x = x.float()
        sim.reset()
        done = fit(model, x, y, cfg, 1, **options)
        return weights_of(model), done, sim.counts()


def test_no_step_reads_from_an_accelerator():
    short, long = (Local(epochs=e, batch=8, lr=0.01) for e in (1, 4))
    on_cpu = [trained("cpu", cfg)[2]["reads"] for cfg in (short, long)]
    counts = [trained("accelerator", cfg)[2] for cfg in (short, long)]
    assert on_cpu == [11, 41]  # one a step, and the weights at the end
    # At the end one copy of three numbers (whether all losses were fine, whether the weights are, the mean loss) and
    # the four tensors of weights.
    assert [(c["reads"], c["back"], c["back_bytes"] - 12, c["waits"]) for c in counts] == [(0, 5, 4432, 5)] * 2
    a, b = trained("cpu", long), trained("accelerator", long)
    for name, t in a[0].items():
        torch.testing.assert_close(b[0][name], t)
    assert b[1].loss == pytest.approx(a[1].loss, rel=1e-5)
    assert b[1].steps == a[1].steps == 40


def test_a_training_that_diverges_is_found_on_an_accelerator_too():
    def objective(model, x, y):
        return F.cross_entropy(model(x), y) * 1e6

    cfg = Local(epochs=20, batch=8, lr=1.0)
    with pytest.raises(Diverged, match=r"a loss of [\d.e+]+ at step 1;"):
        trained("cpu", cfg, objective=objective)
    with pytest.raises(Diverged, match="a loss above 1000 within the first 50 steps; lower lr") as e:
        trained("accelerator", cfg, objective=objective)
    assert e.value.steps == TRICKS["cuda"].look_every == 50


@pytest.mark.parametrize("table", ["cpu", "accelerator"])
def test_a_student_that_diverges_gets_its_last_good_weights_back(table):
    with simulated_device(table):
        student = mlp(0).to("sim")
        before = weights_of(student)
        x = images(40)[0].float().to("sim")
        steps = iter(range(1000))

        def loss(z, p):
            return z.square().mean() * (float("nan") if next(steps) >= 10 else 1.0)

        done = distill(student, x, lambda x: (x.flatten(1)[:, :1],), Distill(steps=60, batch=8), 0, loss=loss)
        assert done.diverged
        assert done.steps == {"cpu": 11, "accelerator": 50}[table]
        assert done.best_step == 0
        assert same_bits(weights_of(student), before)


# ---- places and settings ----------------------------------------------------------------------------


def test_data_that_does_not_fit_comes_in_blocks():
    with simulated_device(memory=MIB):
        place = Placement("sim:0", resident=0.25)
        small, large = torch.ones(1000), torch.ones(MIB // 8)
        assert (place.fits(small), place.fits(large)) == (True, False)
        place.put(small)
        rows = Brought(large.view(-1, 8), place.device, lambda x: x * 2)[torch.tensor([5, 7])]
        assert (rows.device.type, rows.tolist()) == ("sim", [[2.0] * 8] * 2)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"device": "cuda"}, 'engine.device = "cuda": this torch .* is built without cuda; set engine.device'),
        ({"device": "gpu"}, "no such kind of device; there is auto, cpu, cuda, mps"),
        ({"device": "cuda 0"}, 'expected "auto", "cpu", "cuda", "cuda:0,1" or "mps"'),
        ({"device": "cpu:1"}, "the CPU has no number"),
        ({"device": "sim:0,1,2"}, "there is no sim:2; this machine has 2 devices of that kind, sim:0 to sim:1"),
        ({"device": "sim:1,1"}, "a device is named twice; raise engine.per_device instead"),
        ({"device": "sim", "precision": "tf32"}, r"tf32\": sim:0 \(simulated device\) has float32, bf16"),
        ({"device": "cpu", "precision": "bf16"}, 'on the CPU everything is "float32"'),
        ({"device": "sim", "workers": 5}, "takes 2 at once; set engine.per_device = 3, or leave engine.workers out"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings, wrong):
    with simulated_device(count=2), pytest.raises(ConfigError, match=wrong) as e:
        compute_of(EngineConfig(**settings))
    assert "\n" not in str(e.value)


def test_the_doctor_names_every_device_with_its_memory():
    with simulated_device(count=2, memory=3 << 30, auto=True):
        found = dict(devices())
    assert found["sim:1"] == "simulated device, 3.0 GiB; engine.precision: float32, bf16"
    assert found["device 'auto'"] == "sim:0, sim:1"


def test_settings_are_resolved_and_workers_take_turns():
    assert compute_of(EngineConfig()) == Compute()
    assert compute_of(object()) == Compute()  # an engine without these settings
    with simulated_device(count=2, auto=True):
        compute = compute_of(EngineConfig(per_device=2, resident=0.6))
        assert compute.devices == ("sim:0", "sim:1")
        assert [compute.device_of(w) for w in range(4)] == ["sim:0", "sim:1", "sim:0", "sim:1"]
        assert compute.at_once == 4
        assert compute.place(1).resident == pytest.approx(0.3)
        assert compute.place(0).resident == pytest.approx(0.2)  # the server is there, too
        assert compute.facts() == {"device": "sim", "precision": "float32", "deterministic": True}
        assert compute_of(EngineConfig(device="sim:1")).devices == ("sim:1",)
    with simulated_device():
        assert compute_of(EngineConfig()).on_cpu  # not taken unless it is asked for
