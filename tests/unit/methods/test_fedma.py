"""FedMA: the cycle over the layers, matching inside a federation, the wire, growth, and what it refuses."""

import importlib.util
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig, QuorumNotMet
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import WireError, decode, digest, encode
from solera.engines.faulty import Faulty
from solera.methods import fedma
from solera.methods.fedavg import FedAvg
from solera.methods.fedma import BBP, FedMA, move_columns
from solera.runs.config import RunConfig
from solera.runs.loop import check_fit, simulate
from solera.testing import check_method, deep, run_toy, small, stacked, toy, wide
from solera.train.chain import chain, resized
from solera.train.fitting import Local, evaluate
from toys import Conv, World, images, kept_by, mlp, same_bits

ONE = Local(epochs=1, batch=8, lr=0.05)


def cnn(seed: int = 0) -> nn.Module:
    """A chain of three layers: convolution, convolution, and a Linear layer that reads four pixels a channel."""
    return Conv(seed, norm=False, width=4)


def world(tmp, builder=cnn, n=(20, 30, 10), **options) -> World:
    return World(tmp, {"net": builder}, [("net", Data(*images(size, k))) for k, size in enumerate(n)], **options)


def test_one_layer_has_nothing_to_match_and_is_fedavg_to_the_bit(tmp_path):
    def linear():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    ma = FedMA(ONE, class_weighted=False, average="weighted")
    ours = world(tmp_path / "a", linear).run(ma, rounds=3)[-1]
    theirs = world(tmp_path / "b", linear).run(FedAvg(ONE), rounds=3)[-1]
    assert same_bits(ours.weights["net"], theirs.weights["net"])


def test_without_training_the_model_comes_back(tmp_path):
    for matching in ("fixed_width", "none"):
        start, end = world(tmp_path / matching).run(FedMA(Local(steps=0), matching))
        for name, t in start.weights["net"].items():
            torch.testing.assert_close(end.weights["net"][name], t, atol=1e-6, rtol=1e-6)


def test_a_client_is_trained_on_what_was_matched_and_the_rest_is_frozen(tmp_path, monkeypatch):
    """Layer n is sent after the layers before it were replaced by the matched ones, which training does not move."""
    trained = []
    monkeypatch.setattr(fedma, "fit", lambda model, *_: trained.append([p.requires_grad for p in model.parameters()]))
    w = world(tmp_path, n=(12,))
    w.run(FedMA(ONE))
    weights = 6  # three layers of weight and bias
    assert trained == [[i >= 2 * at for i in range(weights)] for at in range(3)]


@pytest.mark.parametrize("matching", ["fixed_width", "bbp"])
def test_a_client_that_holds_its_neurons_in_another_order_changes_nothing(tmp_path, monkeypatch, matching):
    """Every layer but the last, convolution to Linear (blocks of pixels) among them; without training, to be exact."""
    real = fedma._train_and_send
    shuffling = []

    def shuffled(client, model, layers, at, local, count):
        if client.id in shuffling and at < len(layers) - 1:
            weights, here, after = weights_of(model), layers[at], layers[at + 1]
            order = torch.randperm(len(weights[here.weight]), generator=torch.Generator().manual_seed(at))
            for name in here.own(weights):
                weights[name] = torch.empty_like(weights[name]).index_copy_(0, order, weights[name])
            weights[after.weight] = move_columns(weights[after.weight], order, len(order), after.block)
            model = resized(model, weights)
        return real(client, model, layers, at, local, count)

    monkeypatch.setattr(fedma, "_train_and_send", shuffled)

    def end(name, *who):
        shuffling[:] = who
        w = world(tmp_path / name)
        return w.run(FedMA(Local(steps=0), matching, own_start=True, bbp=BBP(sigma0=3)), rounds=1)[-1].weights["net"]

    plain = end("plain")
    for k in ("c0", "c1", "c2"):
        assert same_bits(end(k, k), plain), f"{k} changes the result by the order of its neurons"


def test_matching_is_what_makes_models_of_different_beginnings_averageable(tmp_path):
    """Clients that begin differently: place by place their average is worse than with matching, seed after seed."""
    x, y = images(300, 99)

    def accuracy(matching, seed):
        w = world(tmp_path / f"{matching}{seed}", lambda: mlp(seed, width=12), n=(60, 60, 60, 60), seed=seed)
        local = Local(epochs=10, batch=8, lr=0.05)
        state = w.run(FedMA(local, matching, own_start=True))[-1]
        return evaluate(w.server.model("net", state.weights["net"]), x, y).loss

    losses = {m: [accuracy(m, seed) for seed in range(4)] for m in ("none", "fixed_width")}
    assert sum(losses["fixed_width"]) < sum(losses["none"])


@pytest.mark.parametrize("matching", ["fixed_width", "bbp"])
def test_it_learns(tmp_path, matching):
    method = FedMA(Local(epochs=2, batch=16, lr=0.1), matching)
    result = run_toy(method, tmp_path / "run", rounds=4)
    assert min(m["accuracy"] for m in result.summary["models"].values()) > 0.8  # three classes


# ---- the last layer ---------------------------------------------------------------------------------


def test_the_last_layer_is_weighted_by_class(tmp_path):
    """Class 0 is held by c0 alone, class 1 by both (1 to 3), classes 2 and 3 by nobody."""
    g = torch.Generator().manual_seed(0)
    first = Data(torch.randn(4, 1, 8, 8, generator=g), torch.tensor([0, 0, 0, 1]))
    second = Data(torch.randn(3, 1, 8, 8, generator=g), torch.tensor([1, 1, 1]))
    w = World(tmp_path, {"net": lambda: mlp(0)}, [("net", first), ("net", second)])
    sent = {}
    real = w.fed.map

    def listening(task, clients, **payload):
        replies = real(task, clients, **payload)
        sent.update(replies)
        return replies

    w.fed.map = listening
    new = w.run(FedMA(ONE))[-1].weights["net"]
    a, b = (sent[k].layer["3.weight"].double() for k in ("c0", "c1"))
    assert [sent[k].counts.tolist() for k in ("c0", "c1")] == [[3, 1, 0, 0], [0, 3, 0, 0]]
    expected = torch.stack([a[0], (a[1] + 3 * b[1]) / 4, (a[2] + b[2]) / 2, (a[3] + b[3]) / 2])
    torch.testing.assert_close(new["3.weight"].double(), expected, atol=1e-7, rtol=1e-6)


def test_a_client_that_lies_about_its_classes_is_left_out(tmp_path, monkeypatch):
    honest = fedma.label_counts
    monkeypatch.setattr(fedma, "label_counts", lambda c: honest(c) * (1000 if c.id == "c1" else 1))
    w = world(tmp_path)
    state = w.run(FedMA(ONE))[-1]
    assert [e["client"] for e in w.fed.failures] == ["c1"]
    assert all(bool(torch.isfinite(t).all()) for t in state.weights["net"].values())


# ---- growth -----------------------------------------------------------------------------------------


def test_layers_grow_and_the_grown_model_is_evaluated_saved_and_trained_on(tmp_path):
    method = FedMA(Local(epochs=2, batch=16, lr=0.1), "bbp", own_start=True, bbp=BBP(sigma0=5, width_cap=20))
    result = run_toy(method, tmp_path / "run", rounds=3)
    grown = {P: w["0.weight"].shape[0] for P, w in result.state.weights.items()}
    assert grown == {"wide": 20, "deep": 20}  # from 16 and 12
    assert {m["accuracy"] > 0.5 for m in result.summary["models"].values()} == {True}
    saved = load_file(tmp_path / "run" / "models" / "wide.safetensors")
    model = resized(wide(), saved)
    assert model[0].out_features == model[2].in_features == 20


def test_bbp_keeps_the_contract(tmp_path):
    check_method(FedMA(matching="bbp", own_start=True, average="weighted", bbp=BBP(sigma0=5)), tmp_path, ("threads",))


# ---- wire -------------------------------------------------------------------------------------------


def test_what_travels(tmp_path):
    """Up n in L messages and C counts; down the model, the matched layers and a permutation for each hidden layer."""
    w = world(tmp_path, n=(20, 30))
    state = w.run(FedMA(ONE))[-1]
    layers, weights = chain(cnn()), state.weights["net"]
    sizes = [sum(weights[n].numel() for n in a.own(weights)) for a in layers]
    up, down = ({f: sum(getattr(t, f) for t in way.values()) for f in ("floats", "integers", "messages")}
                for way in (w.fed.up, w.fed.down))  # fmt: skip
    assert up == {"floats": 2 * sum(sizes), "integers": 2 * 4, "messages": 2 * len(layers)}
    assert down == {"floats": 2 * (sum(sizes) + sum(sizes[:-1])), "integers": 2 * (4 + 4), "messages": 2 * len(layers)}


def test_clients_keep_nothing_between_rounds(tmp_path):
    w = world(tmp_path)
    w.run(FedMA(ONE), rounds=2)
    assert {k: kept_by(w.fed, k) for k in w.fed.clients} == {k: {} for k in w.fed.clients}


# ---- who fails --------------------------------------------------------------------------------------


def test_a_client_that_fails_half_way_leaves_the_cycle_to_the_others(tmp_path):
    w = world(tmp_path)
    w.fed.engine = Faulty(w.fed.engine, lambda c: "drop" if c.client == "c1" and c.step % 1000 == 1 else None)
    start, end = w.run(FedMA(ONE))
    assert [(f["client"], f["task"]) for f in w.fed.failures] == [("c1", "next_layer")]
    assert digest(start) != digest(end)


def test_if_everybody_fails_the_round_is_void(tmp_path):
    w = world(tmp_path)
    w.fed.engine = Faulty(w.fed.engine, lambda c: "raise" if c.step % 1000 == 2 else None)
    with pytest.raises(QuorumNotMet, match="0 of 3 clients finished the cycle"):
        w.run(FedMA(ONE))


def test_an_architecture_whose_clients_all_fail_keeps_its_weights(tmp_path):
    parties = [("a", Data(*images(9, 0))), ("b", Data(*images(9, 1)))]
    w = World(tmp_path, {"a": lambda: mlp(0), "b": cnn}, parties)
    w.fed.engine = Faulty(w.fed.engine, lambda c: "raise" if c.client == "c1" else None)
    start, end = w.run(FedMA(ONE))
    assert same_bits(start.weights["b"], end.weights["b"])
    assert not same_bits(start.weights["a"], end.weights["a"])


def test_a_layer_of_another_shape_is_refused(tmp_path, monkeypatch):
    real = fedma._train_and_send

    def wrong(client, *args):
        sent = real(client, *args)
        return fedma.Sent({n: t[:2] for n, t in sent.layer.items()}, None) if client.id == "c2" else sent

    monkeypatch.setattr(fedma, "_train_and_send", wrong)
    w = world(tmp_path)
    w.run(FedMA(ONE))
    (event,) = w.fed.failures
    assert event["client"] == "c2"
    assert "0.weight: (2, 1, 3, 3) torch.float32, expected (4, 1, 3, 3)" in event["reason"]


@pytest.mark.parametrize("layer", [{"w": torch.zeros(3, 2), "b": torch.zeros(2)}, {"w": torch.zeros(())}, {}])
def test_a_reply_that_is_no_layer_is_refused_when_it_arrives(layer):
    asked = {"shapes": {"w": [3, 2], "b": [3]}, "classes": None}
    with pytest.raises(WireError):
        decode(encode({"layer": layer, "counts": None}), fedma.Sent, asked)


# ---- refusals ---------------------------------------------------------------------------------------


def test_models_that_are_no_chains_are_refused_by_name():
    with pytest.raises(ConfigError, match="'deep' is none: its layer '1' is a BatchNorm1d"):
        check_fit(FedMA(), toy({"wide": wide, "deep": deep}))


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'solera\[matching\]'"):
        check_fit(FedMA(), toy({"wide": wide}))
    check_fit(FedMA(matching="none"), toy({"wide": wide}))


def test_a_round_of_a_quorum_counts_the_clients_of_all_architectures(tmp_path):
    """Each architecture has four clients; six answers are asked for."""
    scenario = toy({"wide": wide, "deep": stacked})
    result = simulate(scenario, small(FedMA()), tmp_path, RunConfig(rounds=1), FederationConfig(min_replies=6))
    assert math.isfinite(result.summary["models"]["wide"]["accuracy"])
