"""LoRA: what a model with it computes, what its state holds, and that the frozen base is the same everywhere."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from encoders import write_encoder
from solera.core.errors import ConfigError
from solera.core.tensors import copy_of, frozen_of, is_finite, weights_of
from solera.methods.steps.screen import byzantine_mean
from solera.models import as_split, build, encoding_of
from solera.models.factory import ModelsConfig
from solera.models.lora import Lora, adapted, base_digest, merged, sizes_of
from solera.scenario.host import layout_digest
from solera.train.aggregate import uniform_mean, weighted_mean
from solera.train.chain import resized
from solera.train.fitting import Local, fit
from solera.train.robust import coordinate_median

peft = pytest.importorskip("peft", reason="needs the extra text")


def two_layers(seed=0):
    """A body of two linear layers under a linear head."""
    torch.manual_seed(seed)
    return as_split(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)), 6, 3, "plain")


def test_it_computes_what_the_paper_says():
    plain = two_layers()
    model = adapted(copy.deepcopy(plain), Lora(rank=2, alpha=6.0), "mine").eval()
    x = torch.randn(4, 5)
    assert torch.equal(model(x), plain(x)), "B is zero in the beginning"
    own = {n: torch.randn_like(t) for n, t in model.state_dict().items()}
    model.load_state_dict(own)

    def layer(number, x):
        W, b = plain.body[number].weight, plain.body[number].bias
        A, B = (own[f"body.{number}.lora_{m}.default.weight"] for m in "AB")
        return x @ (W + 6.0 / 2 * B @ A).T + b  # Hu et al., eq. (3), scaled by alpha / rank

    with torch.no_grad():
        features = layer(2, torch.tanh(layer(0, x)))
        assert torch.allclose(model(x), features @ own["head.weight"].T + own["head.bias"], atol=1e-5)


def test_its_state_is_the_small_matrices_and_the_head():
    model = adapted(two_layers(), Lora(rank=2), "mine")
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    assert shapes == {
        "body.0.lora_A.default.weight": (2, 5),
        "body.0.lora_B.default.weight": (7, 2),
        "body.2.lora_A.default.weight": (2, 7),
        "body.2.lora_B.default.weight": (6, 2),
        "head.weight": (3, 6),
        "head.bias": (3,),
    }
    assert {n for n, _ in model.named_parameters()} == set(shapes)
    assert all(p.requires_grad for p in model.parameters())
    sent = 4 * (2 * 5 + 7 * 2 + 2 * 7 + 6 * 2 + 3 * 6 + 3)
    assert sizes_of(model) == (sent, 4 * (5 * 7 + 7 + 7 * 6 + 6 + 3 * 6 + 3))


def test_training_has_the_bits_of_plain_peft():
    model = adapted(two_layers(), Lora(rank=2), "mine")
    plain = two_layers()
    config = peft.LoraConfig(r=2, lora_alpha=16.0, target_modules=["0", "2"])
    peft.inject_adapter_in_model(config, plain.body, "default")
    x, y = torch.randn(32, 5), torch.arange(32) % 3
    local = Local(steps=6, batch=8, lr=0.1, momentum=0.9)
    fit(model, x, y, local, 1)
    fit(plain, x, y, local, 1)
    theirs = plain.state_dict()
    assert all(torch.equal(t, theirs[n]) for n, t in model.state_dict().items())
    assert any(t.abs().sum() > 0 for n, t in theirs.items() if "lora_B" in n)


def test_copies_share_the_frozen_base_and_nothing_else():
    model = adapted(two_layers(), Lora(rank=2), "mine")
    for twin in (copy_of(model), resized(model, weights_of(model))):
        assert frozen_of(twin).keys() == frozen_of(model).keys() == {
            f"body.{n}.base_layer.{p}" for n in (0, 2) for p in ("weight", "bias")
        }  # fmt: skip
        assert all(t is frozen_of(model)[n] for n, t in frozen_of(twin).items())
        assert not any(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    plain = two_layers()
    assert not frozen_of(plain)
    assert base_digest(plain) is None


def test_the_digest_of_the_base_tells_other_weights():
    base = base_digest(adapted(two_layers(), Lora(rank=2), "mine"))
    trained = adapted(two_layers(), Lora(rank=2), "mine")
    fit(trained, torch.randn(8, 5), torch.zeros(8, dtype=torch.int64), Local(steps=2, lr=1.0), 0)
    assert base_digest(trained) == base
    other = adapted(two_layers(seed=1), Lora(rank=2), "mine")
    assert base_digest(other) != base
    assert layout_digest(other) != layout_digest(trained), "a site with another base does not fit the run"


def test_merged_it_is_an_ordinary_model_with_the_same_answers():
    plain = two_layers()
    model = adapted(copy.deepcopy(plain), Lora(rank=2), "mine")
    model.load_state_dict({n: torch.randn_like(t) for n, t in model.state_dict().items()})
    x = torch.randn(4, 5)
    wanted = model.eval()(x)
    found = merged(model)
    assert torch.allclose(found(x), wanted, atol=1e-5)
    assert {n: t.shape for n, t in found.state_dict().items()} == {n: t.shape for n, t in plain.state_dict().items()}
    assert len(list(found.parameters())) == 6


def test_a_model_that_is_not_split_keeps_its_last_layer():
    model = adapted(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), Lora(rank=1), "mine")
    assert set(model.state_dict()) == {
        "0.lora_A.default.weight", "0.lora_B.default.weight", "2.weight", "2.bias",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), [("lenet5", (1, 28, 28)), ("resnet8", (3, 32, 32)), ("mlp", (1, 28, 28))])
def test_models_of_images(name, shape):
    model = adapted(build(name, 10, shape, "group"), Lora(rank=2), name).eval()
    sent, whole = sizes_of(model)
    assert sent < whole / 3
    x = torch.randn(2, *shape)
    with torch.no_grad():
        wanted = model(x)
        assert torch.allclose(merged(model)(x), wanted, atol=1e-5)


def test_an_encoder(tmp_path):
    name = f"hf:{write_encoder(tmp_path / 'tiny')}"
    ids = encoding_of(name).encode(["good film", "a bad day"], 16)[0]
    plain = build(name, 2, (16,), vocabulary=60, head="shared").eval()
    model = adapted(copy.deepcopy(plain), Lora(rank=2, layers=["query", "value"]), name).eval()
    with torch.no_grad():
        assert torch.equal(model(ids), plain(ids))
    small = {n for n in model.state_dict() if ".lora_" in n}
    attention = "body.model.encoder.layer.0.attention.self"
    assert small == {f"{attention}.{part}.lora_{m}.default.weight" for part in ("query", "value") for m in "AB"}
    assert set(model.state_dict()) - small == {n for n in plain.state_dict() if not n.startswith("body.")}


# ---- what is refused ----------------------------------------------------------------------------------------


def test_models_without_layers_that_fit():
    with pytest.raises(ConfigError, match=r"'lstm' has no linear or convolutional layer.*\[models.options.lstm\]"):
        adapted(build("lstm", 2, (8,), vocabulary=20), Lora(), "lstm")


def test_layers_that_are_not_there():
    with pytest.raises(ConfigError, match=r"lora.layers names 'quary', but its layers are 0, 2"):
        adapted(two_layers(), Lora(layers=["0", "quary"]), "mine")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (8, r"options.mlp.lora = 8: expected a table such as \{rank = 8\}, or false"),
        ({"rnak": 8}, "options.mlp.lora.rnak = 8: there is no such setting; did you mean 'rank'"),
        ({"rank": 0}, "options.mlp.lora.rank = 0: expected an integer of at least 1"),
        ({"dropout": 1.0}, "options.mlp.lora.dropout = 1.0: expected a number"),
    ],
)
def test_options_that_are_none(given, told):
    with pytest.raises(ConfigError, match=told) as e:
        ModelsConfig(clients=["mlp"], options={"mlp": {"lora": given}})
    assert "\n" not in str(e.value)


def test_low_precision_and_lora_are_refused_together():
    with pytest.raises(ConfigError, match=r"options.mlp: bits = 1 and lora"):
        ModelsConfig(clients=["mlp"], options={"mlp": {"bits": 1, "lora": True}})
    with pytest.raises(ConfigError, match=r"options.mlp: bits = 1 and lora"):
        ModelsConfig(clients=["mlp"], options={"mlp": {"bits": 1}}, lora=Lora())
    ModelsConfig(clients=["mlp"], options={"mlp": {"bits": 1, "lora": False}}, lora=Lora())


def test_options_of_one_model_come_before_those_of_all():
    options = {"a": {"lora": {"rank": 4}}, "b": {"lora": False}, "c": {"lora": True}}
    models = ModelsConfig(clients=list("abcd"), options=options, lora=Lora(rank=2))
    found = {name: models.variant(name).lora for name in "abcd"}
    assert found == {"a": Lora(rank=4), "b": None, "c": Lora(), "d": Lora(rank=2)}


def test_peft_that_is_not_installed(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"'mine': LoRA needs the package peft; .*solera\[text\]"):
        adapted(two_layers(), Lora(), "mine")


# ---- averages of the product, and a frozen A ----------------------------------------------------------------


def pair(r, inner, outer, seed, conv=False):
    """A and B, as peft names and shapes them."""
    g = np.random.default_rng(seed)
    A, B = g.normal(size=(r, inner)), g.normal(size=(outer, r))
    shape = {"A": (r, inner // 9, 3, 3), "B": (outer, r, 1, 1)} if conv else {"A": A.shape, "B": B.shape}
    made = {"A": A, "B": B}
    return {f"f.lora_{m}.product.weight": torch.tensor(made[m], dtype=torch.float32).reshape(shape[m]) for m in "AB"}


def product(weights):
    A, B = (weights[f"f.lora_{m}.product.weight"].double().flatten(1).numpy() for m in "AB")
    return B @ A


def nearest(P, r):
    """The nearest matrix of rank r, by the eigenvectors of P^T P."""
    vectors = np.linalg.eigh(P.T @ P)[1][:, -r:]
    return P @ vectors @ vectors.T


@pytest.mark.parametrize("conv", [False, True])
def test_the_mean_of_a_product_is_the_nearest_of_its_rank(conv):
    uploads, n = [pair(3, 18, 7, seed, conv) for seed in range(4)], [3.0, 1.0, 2.0, 0.0]
    P = sum(k * product(u) for k, u in zip(n, uploads, strict=True)) / 6
    found = weighted_mean(uploads, n)
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in uploads[0].items()}
    assert all(t.dtype == torch.float32 for t in found.values())
    assert np.allclose(product(found), nearest(P, 3), atol=1e-5)
    plain = {name.replace("product", "default"): None for name in uploads[0]}
    factors = weighted_mean([dict(zip(plain, u.values(), strict=True)) for u in uploads], n)
    A, B = (t.double().flatten(1).numpy() for t in factors.values())
    assert np.linalg.norm(B @ A - P) > 1.1 * np.linalg.norm(nearest(P, 3) - P), (
        "A and B each for itself are further off"
    )


def test_where_all_have_one_a_nothing_is_lost():
    A = pair(3, 8, 7, 0)["f.lora_A.product.weight"]
    uploads = [pair(3, 8, 7, seed) | {"f.lora_A.product.weight": A} for seed in range(3)]
    P = np.mean([product(u) for u in uploads], axis=0)
    assert np.allclose(product(uniform_mean(uploads)), P, atol=1e-5)


@pytest.mark.parametrize("how", ["median", "trimmed_mean", "bulyan"])
def test_robust_averages_are_of_the_product_too(how):
    uploads = [pair(3, 8, 7, seed) for seed in range(7)]
    P = np.stack([product(u) for u in uploads])
    if how == "median":
        found, wanted = coordinate_median(uploads), np.median(P, axis=0)
    elif how == "trimmed_mean":
        found, wanted = byzantine_mean(how, uploads, list(uploads[0]), 2), np.sort(P, axis=0)[2:-2].mean(0)
    else:
        found = byzantine_mean(how, uploads, list(uploads[0]), 1)  # of five of them, the three nearest to the median
        fives = [np.delete(P, (i, j), axis=0) for i in range(7) for j in range(i)]
        order = [np.abs(five - np.median(five, axis=0)).argsort(axis=0, kind="stable")[:3] for five in fives]
        means = [np.take_along_axis(five, o, axis=0).mean(0) for five, o in zip(fives, order, strict=True)]
        wanted = min((nearest(m, 3) for m in means), key=lambda m: np.abs(m - product(found)).max())
        assert np.allclose(product(found), wanted, atol=1e-5)
        return
    assert np.allclose(product(found), nearest(wanted, 3), atol=1e-5)


def test_a_product_of_a_lower_rank_can_go_on_learning():
    """Clients that have not trained: B is zero, and with a zero A no gradient would ever come."""
    first = adapted(two_layers(), Lora(rank=2, average="product"), "mine")
    model = copy.deepcopy(first)
    model.load_state_dict(uniform_mean([weights_of(model)] * 2))
    assert torch.equal(model(torch.ones(1, 5)), first(torch.ones(1, 5)))
    fit(model, torch.randn(32, 5), torch.arange(32) % 3, Local(steps=3, lr=0.5), 0)
    assert model.state_dict()["body.0.lora_B.product.weight"].abs().sum() > 0


def test_infinite_uploads_end_in_numbers_that_are_seen_as_wrong():
    bad = pair(2, 4, 3, 0) | {"f.lora_A.product.weight": torch.full((2, 4), float("inf"))}
    assert not is_finite(uniform_mean([bad, pair(2, 4, 3, 1)]))


def test_a_frozen_a_does_not_travel_and_belongs_to_the_base():
    model = adapted(two_layers(), Lora(rank=2, freeze_a=True), "mine")
    assert set(model.state_dict()) == {
        "body.0.lora_B.default.weight", "body.2.lora_B.default.weight", "head.weight", "head.bias",
    }  # fmt: skip
    assert {n for n, _ in model.named_parameters()} == set(model.state_dict())
    assert "body.0.lora_A.default.weight" in frozen_of(model)
    sent = 4 * (7 * 2 + 6 * 2 + 3 * 6 + 3)
    assert sizes_of(model) == (sent, 4 * (5 * 7 + 7 + 7 * 6 + 6 + 3 * 6 + 3))
    before = frozen_of(model)["body.0.lora_A.default.weight"].clone()
    x = torch.randn(8, 5)
    fit(model, x, torch.arange(8) % 3, Local(steps=4, lr=0.5), 0)
    assert torch.equal(frozen_of(model)["body.0.lora_A.default.weight"], before)
    assert model.state_dict()["body.0.lora_B.default.weight"].abs().sum() > 0
    wanted = model.eval()(x)
    assert torch.allclose(merged(model)(x), wanted, atol=1e-5)
    with pytest.raises(ConfigError, match=r"lora.average = 'product' beside freeze_a = true"):
        ModelsConfig(clients=["mlp"], options={"mlp": {"lora": {"freeze_a": True, "average": "product"}}})
