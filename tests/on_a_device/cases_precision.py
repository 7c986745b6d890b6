"""Mixed precision (`engine.precision`): the operators that compute in half precision, and those that do not.

`contract/test_on_a_device.py` runs this file in a process of its own. The device computes with the CPU's kernels of
half precision, which are slow: models are tiny.
"""

import json
import pathlib
import re
from importlib import import_module
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import simulated_autocast as autocast
import solera.methods  # noqa: F401  (registers them)
from closeness import apart, plain_models, tensors_of
from simulated_device import SIM, simulated_device
from solera.core.errors import RunError
from solera.core.federation import FederationConfig
from solera.core.tensors import weights_of
from solera.data.transforms import drawn_anew
from solera.engines import EngineConfig
from solera.method import METHODS, find_method
from solera.methods.perfedavg import after_a_step, endless
from solera.place.placement import HALF, Placement
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import small, toy_for, wide
from solera.train.distill import Distill
from solera.train.fitting import Local, evaluate, fit, gradient_of, logits_of
from solera.train.teachers import Ensemble
from toys import same_bits

SIM.register()

# How far weights are from those of float32 after two rounds. bf16 has 8 bits of a number. Adam's first
# steps have the size of the learning rate however small a gradient is, and the sign of a small one is soon another.
STATED = {"bf16": 5e-2}
FAMILIES = ("fedavg", "feddf", "fedet", "fedeed", "mnfl")
BOTH = pytest.mark.parametrize("precision", HALF)


@pytest.fixture
def sim():
    with simulated_device("accelerator") as seen:
        yield seen


def half(precision):
    return Placement("sim", precision=precision).training()


# ---- the rules of autocast --------------------------------------------------------------------------


def listed(macro):
    """The operators of one of the lists of torch's own header."""
    header = pathlib.Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)[1]
    return {".".join(part.strip() for part in found.split(",")) for found in re.findall(r"_\(([\w, ]+)\)", body)}


def test_the_lists_are_those_of_cuda():
    assert set(autocast.LOWER.split()) == listed("AT_FORALL_LOWER_PRECISION_FP")
    assert set(autocast.FULL.split()) == listed("AT_FORALL_FP32")
    assert set(autocast.FULL_BY_DTYPE.split()) == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert set(autocast.WIDEST.split()) == listed("AT_FORALL_PROMOTE")
    ours = [autocast.LOWER, autocast.FULL, autocast.FULL_BY_DTYPE, autocast.WIDEST, autocast.REFUSED]
    known = {f"aten::{name}" for names in (*ours, " ".join(autocast.FULL_BY_NAME)) for name in names.split()}
    on_cuda = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    assert on_cuda - known == {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose"}
    assert known <= set(torch._C._dispatch_get_registrations_for_dispatch_key(autocast.KEY))


@BOTH
def test_operators_have_the_types_that_they_have_on_cuda(sim, precision):
    x, wanted = torch.ones(4, 4, device="sim"), HALF[precision]
    with half(precision):
        z = x @ x
        products = [z, F.linear(x, x), torch.einsum("ij,kj->ik", x, x), x.relu() @ x, z * z, z.mean()]
        assert {t.dtype for t in products} == {wanted}
        full = [z.softmax(-1), z.sum(), z.sum(0), z.exp(), z.pow(2), z.norm(), z.norm(dim=1), F.layer_norm(z, (4,))]
        full += [F.cross_entropy(z, torch.zeros(4, dtype=torch.long, device="sim")), F.mse_loss(z, z), z.logsumexp(-1)]
        full += [torch.addcmul(x, z, z), x + z, torch.cat([x, z])]
        assert {t.dtype for t in full} == {torch.float32}
        assert torch.addcmul(z, z, z).dtype == wanted
        assert z.sum(dtype=torch.float64).dtype == (x.double() @ x.double()).dtype == torch.float64
        assert x.long().sum().dtype == torch.int64
        with pytest.raises(RuntimeError, match="unsafe under autocast"):
            F.binary_cross_entropy(x, x)
    assert (x @ x).dtype == torch.float32


# ---- runs -------------------------------------------------------------------------------------------


def run(name, out, precision="float32", rounds=2, method=None, models=None, **engine):
    method = method or small(find_method(name)())
    scenario = toy_for(method, models=models or plain_models(method), samples=200, workers=1)
    found = simulate(
        scenario, method, out, RunConfig(rounds=rounds, eval_clients=2), FederationConfig(fraction=0.5),
        EngineConfig("inprocess", 1, device="sim", precision=precision, **engine), resume=True,
    )  # fmt: skip
    assert not found.summary["failures"], (out / "metrics.jsonl").read_text()
    return found


@pytest.fixture
def sent(monkeypatch):
    """The types of all numbers that clients send."""
    types = set()

    def packed(outbox, **options):
        types.update(t.dtype for _, t in tensors_of(outbox))
        return real(outbox, **options)

    serve = import_module("solera.engines.serve")
    real = serve.Packed
    monkeypatch.setattr(serve, "Packed", packed)
    return types


def check(name, out, sent, rounds):
    wanted = run(name, out / "float32", rounds=rounds)
    for precision, stated in STATED.items():
        sent.clear()
        found = run(name, out / precision, precision, rounds)
        assert 0 < apart(wanted, found) <= stated, precision
        kept = [t.dtype for _, t in tensors_of([found.state, [m.weights for m in found.models.values()]])]
        assert {*kept, *sent}.isdisjoint(HALF.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_method_ends_close_to_full_precision(sim, sent, name, tmp_path):
    check(name, tmp_path, sent, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_does(sim, sent, name, tmp_path):
    check(name, tmp_path, sent, rounds=2)


class Spy(nn.Sequential):
    """`wide`, which notes the types of what goes through it."""

    seen: ClassVar[set] = set()

    def __init__(self):
        super().__init__(*wide())

    def forward(self, x):
        hidden = self[0](x)
        out = self[2](self[1](hidden))
        if x.device.type == "sim":
            Spy.seen |= {("products", hidden.dtype), ("products", out.dtype), ("weights", self[0].weight.dtype)}
            Spy.seen.add(("training" if self.training else "asked", out.dtype))
        return out


@BOTH
def test_products_are_half_and_weights_are_not_and_it_is_recorded(sim, sent, precision, tmp_path):
    Spy.seen = set()
    found = run("feddf", tmp_path, precision, rounds=1, models={"spy": Spy})
    wanted = HALF[precision]
    assert Spy.seen == {("products", wanted), ("training", wanted), ("asked", wanted), ("weights", torch.float32)}
    assert sent == {torch.float32}
    assert {t.dtype for m in found.models.values() for t in m.weights.values()} == {torch.float32}
    told = json.loads((tmp_path / "summary.json").read_text())["environment"]["numerics"]
    assert told["autocast"] == f"{wanted} on sim"
    engine = json.loads((tmp_path / "run.json").read_text())["experiment"]["engine"]
    assert engine == {"device": "sim", "precision": precision, "deterministic": True}


@BOTH
@pytest.mark.parametrize("name", ["fedavg", "feddf"])
def test_the_same_seed_has_the_same_bits_also_after_a_resume(sim, name, precision, tmp_path):
    once, again = (run(name, tmp_path / str(i), precision) for i in range(2))
    run(name, tmp_path / "resumed", precision, rounds=1)
    assert once.digest == again.digest == run(name, tmp_path / "resumed", precision).digest


def test_a_run_is_continued_with_its_precision(sim, tmp_path):
    run("fedavg", tmp_path, "bf16", rounds=1)
    with pytest.raises(RunError, match=r"engine.*precision.*bf16"):
        run("fedavg", tmp_path, "float32", rounds=2)


@BOTH
@pytest.mark.parametrize("name", ["fedavg", "feddf"])
def test_no_step_waits_for_the_device(sim, name, precision, tmp_path):
    counts = []
    for times in (1, 3):
        method = find_method(name)(local=Local(epochs=times, batch=16))
        if name == "feddf":
            method = find_method(name)(method.local, Distill(steps=4 * times, batch=16, every=10**6, patience=None))
        sim.reset()
        run(name, tmp_path / str(times), precision, rounds=1, method=method)
        counts.append(sim.counts())
    assert counts[0]["operators"] < counts[1]["operators"]
    assert counts[0]["reads"] == counts[1]["reads"]
    assert counts[0]["waits"] == counts[1]["waits"]


# ---- what is asked, and the program's own autocast --------------------------------------------------


@BOTH
def test_answers_scores_and_targets_are_float32(sim, precision):
    torch.manual_seed(0)
    models, x, y = [wide().to("sim") for _ in range(3)], torch.randn(40, 8).to("sim"), (torch.arange(40) % 3).to("sim")
    plain = logits_of(models[0], x), Ensemble(models)(x), evaluate(models[0], x, y)
    with half(precision):
        assert models[0](x).dtype == HALF[precision]
        asked, targets, score = logits_of(models[0], x), Ensemble(models)(x), evaluate(models[0], x, y)
        for rule in ("avg_losses", "confidence", "clipped_logits", "median_probs"):
            assert {t.dtype for t in Ensemble(models, rule)(x)} == {torch.float32}
    assert {asked.dtype, *(t.dtype for t in targets)} == {torch.float32}
    assert not torch.equal(asked.cpu(), plain[0].cpu())  # products were half
    for found, wanted in zip((asked, *targets), (plain[0], *plain[1]), strict=True):
        torch.testing.assert_close(found.cpu(), wanted.cpu(), atol=2e-2, rtol=0)
    assert score.loss == pytest.approx(plain[2].loss, abs=1e-2)


@BOTH
def test_samples_are_changed_and_prepared_in_full_precision(sim, precision):
    raw = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = drawn_anew(raw, ["crop", "flip", "jitter", "gray"], lambda x: x / 0.3, torch.device("sim", 0))
    wanted = views.draw(torch.arange(6), 5).cpu()
    with half(precision):
        found = views.draw(torch.arange(6), 5)
    assert found.dtype == torch.float32
    assert torch.equal(found.cpu(), wanted)


def test_the_programs_own_autocast_on_the_device_is_set_aside(sim):
    with torch.autocast("sim", torch.bfloat16):
        with Placement("sim", precision="bf16").training() as held:
            assert torch.is_autocast_enabled("sim")  # again, as the run has it: without its cache
            assert not torch.is_autocast_cache_enabled()
            assert held.found == {"autocast on sim": "torch.bfloat16", "deterministic algorithms": 0}
            assert held.needed["autocast"] == "torch.bfloat16 on sim"
            assert held.needed["deterministic algorithms"] == 2  # the device's, not that of the last kind looked at
        assert torch.is_autocast_enabled("sim")


# ---- gradients as results ---------------------------------------------------------------------------


def some():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(3))
    return x.to("sim"), (torch.arange(48) % 3).to("sim")


def fresh_wide():
    torch.manual_seed(0)
    return wide().to("sim")


@BOTH
def test_gradients_that_are_numbers_have_full_precision(sim, precision):
    """SCAFFOLD's option I, and what HF-MAML compares: nobody scales them, and differences would be rounding errors."""
    x, y = some()

    def both():
        model = fresh_wide()
        objective = after_a_step(0.1, endless(model, x, y, 16, 1), endless(model, x, y, 16, 2))
        fit(model, x, y, Local(steps=4, batch=16, lr=0.1), 0, objective)
        return weights_of(model), {n: g.cpu() for n, g in gradient_of(fresh_wide(), x, y, 16).items()}

    wanted = both()
    with half(precision):
        found = both()
        model = fresh_wide()
        fit(model, x, y, Local(steps=4, batch=16, lr=0.1), 0, after_a_step(0.1, endless(model, x, y, 16, 1)))
    assert same_bits(found[0], wanted[0])
    assert same_bits(found[1], wanted[1])
    assert not same_bits(weights_of(model), wanted[0])
