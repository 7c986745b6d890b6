"""FedDF beyond its algorithm: low-bit clients, drawn teachers, chosen samples, other public data, and Byzantine
clients."""

import dataclasses
import math
import tomllib

import pytest
import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.core.federation import Federation
from solera.core.task import Data
from solera.core.tensors import is_finite, weights_of
from solera.core.wire import Packed, digest
from solera.data import PublicConfig, from_tensors, public_from_dataset
from solera.data.public import Generator, save_generator
from solera.engines import ClientStates, InProcess
from solera.engines.faulty import Faulty
from solera.methods.fedavg import FedAvg
from solera.methods.feddf import FedDF
from solera.methods.pfeddf import FedDFPrevious
from solera.methods.steps.low_bit import LowBitUpload, coarse_names, fit_coarse
from solera.methods.steps.screen import Robust, Screen
from solera.methods.steps.teaching import Lesson, LowEntropy, Several, Swag, moments, swag
from solera.runs.config import load_config, to_toml
from solera.runs.loop import check_server
from solera.scenario.scenario import Scenario
from solera.testing import check_method, toy, wide
from solera.train.aggregate import weighted_mean
from solera.train.distill import Distill, distill
from solera.train.fitting import Local, evaluate, fit
from solera.train.norms import parameter_names, reestimate
from solera.train.robust import coordinate_median
from solera.train.teachers import Ensemble, entropy, frozen
from toys import Conv, Samples, World, images, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
FUSION = Distill(steps=6, batch=16)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
ONE_BIT = LowBitUpload(bits=1)


def mixed(tmp, kinds: str = KINDS, **options) -> World:
    """Five clients of different sizes, two architectures (one with BatchNorm), 40 public samples."""
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    parties = [(P, Data(*images(n, n))) for n, P in zip(SIZES, kinds, strict=True)]
    return World(tmp, {P: builders[P] for P in set(kinds)}, parties, **{"public": images(40, seed=9)[0], **options})


def uploads(world: World, state, bits: LowBitUpload | None = None) -> dict[str, nn.Module]:
    """Every client's model after its local training, by hand."""
    models = {}
    for k, seed in zip(world.fed.clients, world.seeds, strict=True):
        P, data = world.fed.architecture(k), world.data[k]
        models[k] = world.server.model(P, state.weights[P])
        if bits:
            fit_coarse(models[k], data.inputs, data.labels, LOCAL, seed, bits)
        else:
            fit(models[k], data.inputs, data.labels, LOCAL, seed)
    return models


def test_the_new_settings_change_nothing_while_they_are_off(tmp_path):
    """Unbounded clipping and choosing all samples are the algorithm itself."""
    plain = mixed(tmp_path / "a").run(FedDF(LOCAL, FUSION), 2)[-1]
    loose = FedDF(LOCAL, FUSION, screen=Robust(update_clip=1e6), teaching=LowEntropy(top=40))
    assert digest(mixed(tmp_path / "b").run(loose, 2)[-1]) == digest(plain)


# ---- low-bit clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [ONE_BIT, LowBitUpload(bits=1, training="error_feedback"), LowBitUpload(bits=3)])
def test_without_steps_it_is_fedavg_of_rounded_models(tmp_path, bits):
    world = mixed(tmp_path, public=None)
    start, end = world.run(FedDF(LOCAL, Distill(steps=0), upload=bits))
    models = uploads(world, start, bits)
    for P in "cm":
        own = [k for k in models if world.fed.architecture(k) == P]
        mean = weighted_mean([weights_of(models[k]) for k in own], [world.fed.num_examples(k) for k in own])
        assert same_bits(end.weights[P], mean)


def test_rounded_models_teach_and_the_student_has_full_precision(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(FedDF(LOCAL, FUSION, upload=ONE_BIT, screen=Screen("uniform")))
    models = uploads(world, start, ONE_BIT)
    world.fed.begin(0)
    student = world.server.model("m", weighted_mean([weights_of(models[k]) for k in ("c1", "c3")], [1, 1]))
    distill(student, images(40, seed=9)[0], Ensemble(list(models.values())), FUSION, world.fed.seed("fusion"))
    assert same_bits(weights_of(student), end.weights["m"])
    assert len(end.weights["m"]["1.weight"][0].abs().unique()) > 2


@pytest.mark.parametrize("q", [1, 2, 5])
def test_bytes_on_the_wire(tmp_path, q):
    """n_w q + 32 (n_scale + n_rest) bits go up; padding is less than a byte a tensor, and the rest is header."""
    world = mixed(tmp_path, kinds="c" * 5)
    cfg = LowBitUpload(bits=q)
    world.run(FedDF(LOCAL, FUSION, upload=cfg))
    model = world.server.template("c")
    names, weights = coarse_names(model, cfg), weights_of(model)
    n_w, n_scale = (sum(f(weights[n]) for n in names) for f in (torch.Tensor.numel, len))
    n_rest = sum(t.numel() for n, t in weights.items() if n not in names and t.is_floating_point())
    counters = sum(8 * t.numel() for t in weights.values() if not t.is_floating_point())
    formula = (n_w * q + 32 * (n_scale + n_rest)) / 8
    (up,) = world.fed.up.values()
    assert up.messages == 5
    assert up.floats == 5 * (n_scale + n_rest)
    header = up.bytes / 5 - formula - counters
    empty = Packed({n: t[:0] if t.ndim else t for n, t in weights.items()})
    assert 0 < header < 3 * empty.size
    codes = sum(math.ceil(weights[n].numel() * q / 8) for n in names)
    assert 0 <= codes - n_w * q / 8 < len(names)
    full = mixed(tmp_path / "full", kinds="c" * 5)
    full.run(FedDF(LOCAL, FUSION))
    (exact,) = full.fed.up.values()
    saved = (32 - q) * n_w / 8 - 4 * n_scale
    assert exact.floats - up.floats == 5 * (n_w - n_scale)
    assert abs((exact.bytes - up.bytes) / 5 - saved) < empty.size


def test_low_bit_clients_keep_the_contract_of_a_method(tmp_path):
    check_method(FedDF(upload=ONE_BIT), tmp_path, engines=("processes",))


@pytest.mark.parametrize("fault", ["shape", "nan", "dtype", "extra", "garbage"])
def test_a_spoiled_packed_reply_costs_a_seat_and_nothing_else(tmp_path, fault):
    method = FedDF(LOCAL, FUSION, upload=ONE_BIT)
    ends = []
    for what in (fault, "drop"):
        world = mixed(tmp_path / what)
        world.fed.engine = Faulty(world.fed.engine, lambda c, what=what: what if c.client == "c2" else None)
        ends.append(digest(world.run(method)[-1]))
        assert [f["client"] for f in world.fed.failures] == ["c2"]
        assert "c2" not in world.fed.answered
    assert ends[0] == ends[1]


def test_low_bit_clients_learn_together(tmp_path):
    x, y = images(400, seed=1)
    parties = [("c", Data(x[i::4], y[i::4])) for i in range(4)]
    world = World(tmp_path, {"c": lambda: Conv(0, width=12)}, parties, public=images(200, seed=3)[0])
    method = FedDF(Local(epochs=5, batch=20, lr=0.05), Distill(steps=60, batch=64), upload=ONE_BIT)
    end = world.run(method, 2)[-1]
    assert evaluate(world.server.model("c", end.weights["c"]), *images(200, seed=2)).accuracy > 0.8


# ---- teachers drawn around the clients -------------------------------------------------------------


def test_fdf_5():
    """A sample is linear in its random numbers; the matrix of that map gives the covariance without sampling."""
    models = [{"w": torch.tensor([float(a)]), "v": torch.tensor([float(b)])} for a, b in ((1, 0), (2, 1), (6, 2))]
    mean, variance = moments(models, [1.0] * 3, ["w", "v"])
    assert [mean["w"].item(), mean["v"].item()] == [3, 1]
    assert [variance["w"].item(), variance["v"].item()] == pytest.approx([4.6667, 0.6667], abs=5e-5)

    for scale, total in ((1.0, (11.6667, 1.6667)), (0.5, (5.8333, 0.8333))):
        drawn = swag(models, ["w", "v"], 200, seed=0, scale=scale)
        theta = torch.tensor([[s["w"].item() - 3, s["v"].item() - 1] for s in drawn], dtype=torch.float64)
        g = torch.Generator().manual_seed(0)
        noise = torch.stack(
            [torch.cat([torch.randn(n, generator=g, dtype=torch.float64) for n in (3, 1, 1)]) for _ in drawn]
        )
        by = torch.linalg.lstsq(noise, theta).solution  # [random numbers, coordinates]
        along, apart = by[:3].T @ by[:3] / scale, by[3:].T @ by[3:] / scale
        torch.testing.assert_close(along, torch.tensor([[7, 2.5], [2.5, 1]]).double(), rtol=0, atol=5e-5)
        torch.testing.assert_close(apart, torch.tensor([[4.6667, 0], [0, 0.6667]]).double(), rtol=0, atol=5e-5)
        assert (by.T @ by).diag().tolist() == pytest.approx(total, abs=5e-5)


@pytest.mark.parametrize("include", [True, False])
def test_drawn_models_teach_beside_the_clients_or_in_their_place(tmp_path, include):
    world = mixed(tmp_path, kinds="c" * 5)
    start, end = world.run(FedDF(LOCAL, FUSION, teaching=Swag(samples=3, include_clients=include)))
    models = list(uploads(world, start).values())
    public = images(40, seed=9)[0]
    world.fed.begin(0)
    names = parameter_names(models[0])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(world.fed.seed("norm")))
    drawn = []
    for weights in swag([weights_of(m) for m in models], names, 3, world.fed.seed("swag")):
        drawn.append(world.server.model("c", weights))
        reestimate(drawn[-1], public[order])
        assert not torch.equal(drawn[-1][1].running_mean, weights["1.running_mean"])
    average = weighted_mean([weights_of(m) for m in models], SIZES)
    student = world.server.model("c", average)
    distill(student, public, Ensemble((models if include else []) + drawn), FUSION, world.fed.seed("fusion"))
    assert same_bits(weights_of(student), end.weights["c"])
    reports = {e.name: len(e.members) for e in world.server.ensembles}
    assert reports == {"teachers": 5, "swag": 8 if include else 3}


@pytest.mark.parametrize("samples", [1, 2])
def test_drawn_models_get_statistics_from_two_public_samples_on(tmp_path, samples):
    """Of one sample there is no variance: a drawn model then keeps the clients' mean statistics."""
    world = mixed(tmp_path, kinds="c" * 5)
    models = [Conv(seed) for seed in range(3)]
    for i, m in enumerate(models):
        m[1].running_mean.fill_(float(i))
    teachers = {f"c{i}": frozen([("c", weights_of(m))], world.server.model)[0] for i, m in enumerate(models)}
    lesson = Lesson(world.fed, world.server, FUSION, torch.arange(samples), world.server.model, "avg_logits", False)
    around = Swag(samples=2).join(teachers, {}, lesson)
    assert list(around) == ["c0", "c1", "c2", "swag-0", "swag-1"]
    means = [around[k].weights["1.running_mean"] for k in ("swag-0", "swag-1")]
    assert all(torch.equal(m, torch.ones(6)) for m in means) == (samples == 1)


def test_one_client_is_its_own_only_sample(tmp_path):
    world = World(tmp_path, {"m": lambda: mlp(1)}, [("m", Data(*images(10)))], public=images(40)[0])
    drawn = world.run(FedDF(LOCAL, FUSION, teaching=Swag(samples=2)))[-1]
    alone = World(tmp_path / "b", {"m": lambda: mlp(1)}, [("m", Data(*images(10)))], public=images(40)[0])
    assert digest(drawn) == digest(alone.run(FedDF(LOCAL, FUSION))[-1])


def test_drawn_teachers_keep_the_contract_of_a_method(tmp_path):
    world = mixed(tmp_path / "a", kinds="c" * 5, workers=2)
    method = FedDF(LOCAL, FUSION, teaching=Swag(samples=2))
    ends = [digest(w.run(method, 2)[-1]) for w in (world, mixed(tmp_path / "b", kinds="c" * 5))]
    assert ends[0] == ends[1]


# ---- which public samples --------------------------------------------------------------------------


def test_only_the_samples_the_teachers_are_surest_of(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(FedDF(LOCAL, FUSION, teaching=LowEntropy(top=12), screen=Screen("uniform")))
    models = uploads(world, start)
    world.fed.begin(0)
    public, teacher = images(40, seed=9)[0], Ensemble(list(models.values()))
    kept = entropy(teacher(public)[0]).argsort()[:12].sort().values
    student = world.server.model("m", weighted_mean([weights_of(models[k]) for k in ("c1", "c3")], [1, 1]))
    distill(student, public, teacher, FUSION, world.fed.seed("fusion"), indices=kept)
    assert same_bits(weights_of(student), end.weights["m"])
    assert digest(end) != digest(mixed(tmp_path / "b").run(FedDF(LOCAL, FUSION, screen=Screen("uniform")))[-1])


def image_scenario(public, seed: int = 0) -> Scenario:
    x, y = images(120, seed=1)
    pixels = (x.clamp(-2, 4) + 2).mul(255 / 6).round().to(torch.uint8)
    task = from_tensors((pixels, y), (pixels[:40], y[:40]), classes=4, name="quadrants", mean=(0.33,), std=(0.2,))
    models = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    return Scenario(task, models, public=public if isinstance(public, PublicConfig) else public(task), seed=seed)


def test_noise_another_domain_and_a_generator_can_be_distilled_on(tmp_path):
    save_generator(Generator((1, 8, 8), latent=5, features=2), tmp_path / "g.safetensors")
    colour = torch.randint(0, 256, (50, 3, 12, 12), dtype=torch.uint8)
    other = from_tensors((colour, torch.zeros(50, dtype=torch.int64)), (colour, torch.zeros(50, dtype=torch.int64)))
    sources = {
        "noise": PublicConfig(source="noise", size=30),
        "gauss": PublicConfig(source="noise", size=30, noise="gauss"),
        "generator": PublicConfig(source="generator", path=str(tmp_path / "g.safetensors"), size=30),
        "domain": lambda task: public_from_dataset(task, other, PublicConfig(source="dataset", name="x", size=30)),
    }
    ends = set()
    for name, public in sources.items():
        scenario = image_scenario(public)
        assert len(scenario.server.public) == 30
        fed = Federation(InProcess(scenario, ClientStates(tmp_path / name)), 0)
        method = FedDF(Local(epochs=1, batch=16), Distill(steps=4, batch=8))
        state = method.round(method.init(fed, scenario.server), fed, scenario.server)
        assert all(is_finite(w) for w in state.weights.values())
        ends.add(digest(state))
    assert len(ends) == 4


# ---- one overconfident Byzantine client ------------------------------------------------------------


MEDIAN = Robust("median")


def lying(scenario: Scenario, byzantine: tuple[str, ...], bias: float) -> Scenario:
    """These clients answer with finite weights of the right shape: the last layer 0, and `bias` for class 0."""
    honest = scenario.client

    def client(k, seed, state, place=None):
        c = honest(k, seed, state)
        if k in byzantine:
            truth = c.model
            c.train = Data(c.train.inputs[:0], c.train.labels[:0])
            c.model = lambda weights=None: claim(truth(weights), bias)
        return c

    scenario.client = client
    return scenario


def claim(model: nn.Module, bias: float) -> nn.Module:
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.eye(len(last.bias))[0] * bias)
    return model


def accuracy(
    tmp, byzantine: tuple[str, ...] = (), bias: float = 1e4, method: type = FedDF, validation: float = 0.0, **settings
) -> float:
    scenario = lying(toy({"wide": wide}, validation=validation), byzantine, bias)
    fed = Federation(InProcess(scenario, ClientStates(tmp)), 0)
    method = method(Local(batch=16), Distill(steps=60, batch=32, lr=0.02), report_ensemble=False, **settings)
    state = method.init(fed, scenario.server)
    for t in range(3):
        fed.begin(t)
        state = method.round(state, fed, scenario.server)
    model = scenario.server.model("wide", state.weights["wide"])
    return evaluate(model, scenario.test.inputs, scenario.test.labels).accuracy


def test_a_byzantine_client_owns_the_plain_ensemble_and_the_plain_average(tmp_path):
    assert accuracy(tmp_path / "clean") > 0.95
    assert accuracy(tmp_path / "a", ("c02",)) < 0.6
    assert accuracy(tmp_path / "b", ("c02",), screen=MEDIAN) < 0.6  # it teaches all the same ...
    assert accuracy(tmp_path / "c", ("c02",), ensemble="median_probs") < 0.92  # ... or sits in the students' start


@pytest.mark.parametrize(
    "settings",
    [
        {"ensemble": "avg_probs", "screen": MEDIAN},
        {"ensemble": "median_probs", "screen": MEDIAN},
        {"ensemble": "clipped_logits", "screen": MEDIAN},
        {"ensemble": "standardised_logits", "screen": MEDIAN},
        {"ensemble": "median_probs", "method": FedDFPrevious},
        {"screen": Robust(update_clip=1.0)},
        {"screen": Robust(drop_worst=True), "validation": 0.1},
    ],
    ids=str,
)
def test_each_defence_keeps_the_accuracy_of_honest_clients(tmp_path, settings):
    assert accuracy(tmp_path, ("c02",), **settings) > 0.95


def test_the_median_is_the_start_of_the_students(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(FedDF(LOCAL, Distill(steps=0), screen=MEDIAN))
    models = uploads(world, start)
    own = [weights_of(models[k]) for k in models if world.fed.architecture(k) == "c"]
    assert same_bits(end.weights["c"], coordinate_median(own))


def test_a_clipped_update_is_noted_and_short_ones_are_not(tmp_path):
    world = mixed(tmp_path, kinds="m" * 5)
    start, end = world.run(FedDF(LOCAL, Distill(steps=0), screen=Robust("uniform", update_clip=1.0)))
    clipped = {e["client"] for e in world.events("update_clipped")}
    assert len(clipped) == 2  # those above the median of five
    models = uploads(world, start)

    def length(w):
        return math.sqrt(sum((t - start.weights["m"][n]).double().square().sum().item() for n, t in w.items()))

    lengths = sorted(length(weights_of(m)) for m in models.values())
    assert {k for k, m in models.items() if length(weights_of(m)) > lengths[2]} == clipped
    assert length(end.weights["m"]) <= lengths[2] * (1 + 1e-6)


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teaching": Swag()}, r'method\.teaching\.kind = "swag": it samples around models of one architecture.*c, m'),
        ({"teaching": LowEntropy(top=41)}, r"method\.teaching\.top = 41: a round has 40 public samples; keep 1 to 40"),
        (
            {"teaching": Several(parts=(LowEntropy(top=40), Swag()))},
            r'method\.teaching\.parts\[1\]\.kind = "swag": it samples around models of one architecture',
        ),
        *(
            ({"teaching": one, "fusion": Distill(steps=0)}, r"method\.fusion\.steps = 0: method\.teaching concerns")
            for one in (LowEntropy(top=5), Several(parts=(LowEntropy(top=5),)))
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_the_first_round(tmp_path, settings, message):
    world = mixed(tmp_path)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_server(FedDF(**settings), world.server)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (LowEntropy, {"top": 0}, "top = 0: expected an integer of at least 1"),
        (Robust, {"update_clip": 0.0}, "update_clip = 0.0: expected a number above 0"),
        (Robust, {"update_clip": float("inf")}, "update_clip = inf"),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def test_samples_that_change_with_every_draw_cannot_be_chosen(tmp_path):
    world = mixed(tmp_path, per_round=10)
    with pytest.raises(ConfigError, match="a round has 10 public samples"):
        check_server(FedDF(teaching=LowEntropy(top=11)), world.server)
    world.server.public = type("Fresh", (Samples,), {"fresh": True})(images(40)[0])
    with pytest.raises(ConfigError, match="change with every draw"):
        check_server(FedDF(teaching=LowEntropy(top=5)), world.server)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"samples": -1}, "samples = -1"), ({"samples": 0}, "samples = 0"), ({"scale": -1.0}, "scale = -1")],
)
def test_impossible_settings_of_swag(options, message):
    with pytest.raises(ValueError, match=message):
        Swag(**options)


# ---- configuration ---------------------------------------------------------------------------------


def test_a_configuration_says_it_all_and_comes_back_equal():
    tables = {
        "method": {
            "name": "feddf",
            "ensemble": "standardised_logits",
            "screen": {"kind": "robust", "average": "median", "update_clip": 2.0},
            "upload": {"kind": "low-bit", "bits": 1, "training": "error_feedback"},
            "teaching": {"kind": "several", "parts": [{"kind": "low-entropy", "top": 100}, {"kind": "swag"}]},
        }
    }
    config = load_config(tables)
    assert config.method == FedDF(
        ensemble="standardised_logits",
        screen=Robust("median", update_clip=2.0),
        upload=LowBitUpload(bits=1, training="error_feedback"),
        teaching=Several(parts=(LowEntropy(top=100), Swag(samples=10))),
    )
    assert load_config(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.upload.bits=9", r"method.upload.bits = 9: 1 to 8"),
        ("method.upload.bit=1", r"did you mean 'method.upload.bits'"),
        ("method.upload.activations=9", r"method.upload.activations = 9: 1 to 8"),
        ("method.ensemble=median_prob", r"did you mean 'median_probs'"),
        ("method.teaching.samples=-3", r"method.teaching.samples = -3"),
    ],
)
def test_mistakes_are_named(override, message):
    given = {"name": "feddf", "upload": {"kind": "low-bit"}, "teaching": {"kind": "swag"}}
    with pytest.raises(ConfigError, match=message):
        load_config({"method": given}, [override])


def test_another_method_keeps_local_training_and_nothing_else():
    given = {"method": {"name": "feddf", "screen": {"average": "uniform"}, "local": {"epochs": 3}}}
    assert load_config(given, ["method.name=fedavg"]).method == FedAvg(local=Local(epochs=3))
    assert dataclasses.asdict(load_config({"method": {"name": "feddf"}}).method)["upload"] == {"kind": "whole"}


@pytest.mark.parametrize("recipe", ["feddf/table4", "feddf/fig5-noise", "feddf/fig5-generator"])
def test_recipes_of_the_paper(recipe):
    config = load_config(recipe)
    assert (config.run.rounds, config.partition.clients, config.federation.fraction) == (100, 20, 0.4)
    assert (config.partition.alpha, config.models.clients, config.method.screen.average) == (
        1.0,
        ["resnet8"],
        "uniform",
    )
    assert getattr(config.method.upload, "bits", 32) == (1 if recipe == "feddf/table4" else 32)
