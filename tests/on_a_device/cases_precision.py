"""Mixed precision (`engine.precision`): what is computed in half precision and what is not; fp16's scaled gradients.

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

import solera.methods  # noqa: F401  (registers them)
from closeness import apart, plain_models, tensors_of
from solera.config import RunConfig
from solera.data.augment import drawn_anew
from solera.devices import HALF, OutOfMemory, Placement, numerics, within_memory
from solera.engines import EngineConfig
from solera.errors import RunError
from solera.federation import FederationConfig
from solera.method import METHODS, find_method
from solera.methods.fedavg import FedAvg
from solera.parts.bilevel import after_a_step, endless
from solera.parts.data_free import FineTune, LatentGenerator, fine_tune, teach_latents
from solera.parts.distill import Distill, distill
from solera.parts.generators import input_generator, latent_generator
from solera.parts.local import Diverged, Local, evaluate, fit, gradient_of, logits_of
from solera.parts.losses import Scaler
from solera.parts.objectives import proximal
from solera.parts.teachers import Ensemble
from solera.runner.loop import simulate
from solera.tensors import weights_of
from solera.testing import autocast, small, toy, toy_for, wide
from solera.testing.device import SIM, simulated_device
from toys import same_bits

SIM.register()

# How far weights are from those of float32 after two rounds. bf16 has 8 bits of a number, fp16 has 11. Adam's first
# steps have the size of the learning rate however small a gradient is, and the sign of a small one is soon another.
STATED = {"bf16": 5e-2, "fp16": 2e-2}
FAMILIES = ("fedavg", "feddf", "fedet", "fedeed", "mnfl")
BOTH = pytest.mark.parametrize("precision", HALF)


@pytest.fixture
def sim():
    with simulated_device("accelerator") as seen:
        yield seen


def half(precision):
    return Placement("sim", precision=precision).autocast()


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


@pytest.mark.parametrize(("name", "precision"), [("fedavg", "bf16"), ("feddf", "fp16")])
def test_the_same_seed_has_the_same_bits_also_after_a_resume(sim, name, precision, tmp_path):
    once, again = (run(name, tmp_path / str(i), precision) for i in range(2))
    run(name, tmp_path / "resumed", precision, rounds=1)
    assert once.digest == again.digest == run(name, tmp_path / "resumed", precision).digest


def test_a_run_is_continued_with_its_precision(sim, tmp_path):
    run("fedavg", tmp_path, "bf16", rounds=1)
    with pytest.raises(RunError, match=r"engine.*precision.*bf16"):
        run("fedavg", tmp_path, "fp16", rounds=2)


def test_clients_in_one_batch_have_the_result_of_one_after_another(sim, tmp_path):
    one = run("fedavg", tmp_path / "one", "bf16")
    many = run("fedavg", tmp_path / "many", "bf16", vectorize=True, per_device=4)
    assert '"together": 4' in (tmp_path / "many" / "metrics.jsonl").read_text()
    assert 0 < apart(one, many) <= STATED["bf16"]
    assert apart(run("fedavg", tmp_path / "full"), many) <= STATED["bf16"]


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
        with numerics(kind="sim", precision="fp16") as held:
            assert not torch.is_autocast_enabled("sim")
            assert held.found == {"autocast on sim": "torch.bfloat16", "deterministic algorithms": 0}
            assert held.needed["autocast"] == "torch.float16 on sim"
            assert held.needed["deterministic algorithms"] == 2  # the device's, not that of the last kind looked at
        assert torch.is_autocast_enabled("sim")


# ---- fp16: scaled gradients, by hand ----------------------------------------------------------------


def line(*weights):
    model = nn.Linear(len(weights), 1, bias=False)
    model.weight.data = torch.tensor([weights])
    return model.to("sim")


def total(model, x, y):
    """Its gradient is the sum of the inputs."""
    return model(x).float().sum()


def fitted(model, x, objective=total, steps=1, precision="fp16", **options):
    cfg = Local(steps=steps, batch=len(x), lr=1.0, **options.pop("cfg", {}))
    with half(precision):
        return fit(model, torch.tensor(x).to("sim"), torch.zeros(len(x), dtype=torch.long).to("sim"), cfg, 0, objective,
                   **options)  # fmt: skip


def test_gradients_too_small_for_fp16_survive(sim):
    """1e-8 is below the smallest number of fp16, 6e-8; times 1,024 it is not."""
    tiny = lambda model, x, y: total(model, x, y) * 1e-8  # noqa: E731
    model = line(0.0)
    with half("fp16"):
        tiny(model, torch.ones(1, 1).to("sim"), None).backward()
    assert model.weight.grad.item() == 0
    model.weight.grad = None
    fitted(model, [[1.0]], tiny)
    assert model.weight.item() == pytest.approx(-1e-8, rel=0.01)


def test_gradients_are_what_they_are_before_anything_is_done_to_them(sim):
    """The gradient is (3, 4), of norm 5."""
    x, start = [[3.0, 4.0]], (0.0, 0.0)
    model = line(*start)
    fitted(model, x, cfg={"clip": 1.0}, correct=lambda name, g: g + 10)
    torch.testing.assert_close(model.weight.cpu(), torch.tensor([[-10.6, -10.8]]))  # clipped to (0.6, 0.8), corrected
    model = line(*start)
    received = {"weight": torch.tensor([[1.0, -1.0]]).to("sim")}
    fitted(model, x, proximal(0.5, received, total))
    assert model.weight.tolist() == [[-2.5, -4.5]]  # (3, 4) + 0.5 ((0, 0) - (1, -1))


def test_an_overflow_skips_the_step_and_halves_the_scale(sim):
    """100 times 1,024 is above the largest number of fp16, 65,504; times 512 it is not: two of three steps count."""
    model = line(0.0)
    done = fitted(model, [[100.0]], steps=3)
    assert model.weight.item() == -200
    assert (done.steps, done.skipped, done.lr_sum) == (3, 1, 2.0)
    assert fitted(line(0.0), [[100.0]], steps=3, precision="bf16").skipped == 0


def test_a_training_that_overflows_in_every_step_is_told(sim):
    """60,000 would need a scale of 1, ten steps later."""
    model = line(0.0)
    with pytest.raises(Diverged, match=r"gradients too large for fp16, 5 steps skipped; set engine.precision to bf16"):
        fitted(model, [[60000.0]], steps=5)
    student = line(0.0)
    x = torch.full((4, 1), 60000.0).to("sim")
    with half("fp16"):
        done = distill(student, x, lambda x: (x,), Distill(steps=5, batch=4, clip=None), 0,
                       loss=lambda z, t: z.float().sum())  # fmt: skip
    assert (done.diverged, done.best_step, student.weight.item()) == (True, 5, 0.0)


def test_what_a_client_of_such_a_training_did_is_not_used(sim, tmp_path):
    def flat():
        model = wide()
        model[0].weight.data.mul_(1e-5)
        return model

    scenario = toy({"flat": flat}, samples=200)
    rows = scenario._train.indices(1)
    inputs = scenario.dataset.train.inputs
    inputs[rows] = (inputs[rows] * 1e4).clamp(-3e4, 3e4)  # its losses are fine, its gradients are not
    engine = EngineConfig("inprocess", 1, device="sim", precision="fp16")
    simulate(scenario, FedAvg(Local(steps=2, batch=16)), tmp_path, RunConfig(rounds=1), None, engine)
    (record,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(f["client"], "too large for fp16" in f["reason"]) for f in record["failures"]] == [("c01", True)]


class Steep(nn.Module):
    """Three numbers of its input; the gradient is infinite."""

    def forward(self, x):
        out = x[:, :3] * 1.0
        if out.requires_grad:
            out.register_hook(lambda g: g * torch.inf)
        return out


def test_generators_that_overflow_are_told(sim):
    rng, prior = torch.Generator().manual_seed(0), torch.full((3,), 1 / 3)
    G = latent_generator(4, 5, 3, 8).to("sim")
    with half("fp16"), pytest.raises(Diverged, match="2 steps skipped"):
        teach_latents(G, [Steep()], torch.ones(1, 3), prior, LatentGenerator(steps=2, batch=8), rng)
    G = input_generator((8,), 5, 3, 8).to("sim")
    with half("fp16"), pytest.raises(Diverged, match="3 steps skipped"):
        fine_tune(G, [wide().to("sim")], [Steep()], torch.ones(1, 3), prior, FineTune(steps=3, batch=8), 0.1, rng)


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


# ---- memory -----------------------------------------------------------------------------------------


def in_pieces(precision):
    """A training whose first attempt runs out of memory."""
    attempts = []

    def work():
        attempts.append(1)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("no more")
        model = fresh_wide()
        with place.autocast():
            fit(model, *some(), Local(steps=4, batch=16, lr=0.1), 0)
        return weights_of(model)

    place = Placement("sim", precision=precision)
    return within_memory(place, work, "lower the batch")


def test_minibatches_in_pieces(sim):
    found, pieces = in_pieces("bf16")
    wanted, _ = in_pieces("float32")
    assert pieces == 2
    assert 0 < max(float((found[n] - wanted[n]).abs().max()) for n in wanted) < 1e-2
    with pytest.raises(OutOfMemory, match=r"gradients of fp16 cannot be summed in pieces; set engine.precision"):
        in_pieces("fp16")


def test_only_fp16_is_scaled(sim):
    device = torch.device("sim", 0)
    assert Scaler.of(device) is None
    with half("bf16"):
        assert Scaler.of(device) is None
    with half("fp16"):
        assert Scaler.of(device).scale.tolist() == [1024.0]
