"""Per-FedAvg: PER-1 through a federation, FedAvg without the step, adaptation on training samples."""

import dataclasses

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Client, Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.methods.fedavg import FedAvg
from solera.methods.perfedavg import PerFedAvg
from solera.methods.steps.personal import Tuning, score_tuned
from solera.testing import check_method, run_toy
from solera.train.fitting import Local, evaluate, fit
from toys import Conv, Quadratic, World, images, kept_by, mlp, quadratic_data, same_bits

LOCAL = Local(steps=4, batch=8, lr=0.05)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"


def mixed(tmp, dropout=0.0, **options) -> World:
    builders = {"c": lambda: Conv(0, dropout=dropout), "m": lambda: mlp(1)}
    return World(tmp, builders, [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)], **options)


def quadratics(tmp, *clients: tuple[float, float, int]) -> World:
    parties = [("q", Data(*quadratic_data(a, b, n))) for a, b, n in clients]
    return World(tmp, {"q": Quadratic}, parties, classes=2)


def value(state) -> float:
    return state.weights["q"]["x"].item()


@pytest.mark.parametrize(("mode", "expected"), [("fo", 0.08), ("hf", 0.064)])
def test_per_1(tmp_path, mode, expected):
    """f = (x - 1)^2, alpha = 0.1, beta = 0.05."""
    world = quadratics(tmp_path, (2, 1, 1))
    state = world.run(PerFedAvg(Local(steps=1, lr=0.05), mode=mode, alpha=0.1))[-1]
    assert value(state) == pytest.approx(expected, abs=1e-9)
    scores = world.fed.map(score_tuned, ["c0"], **PerFedAvg(alpha=0.1).personal(state, world.fed).payload)
    adapted = expected - 0.1 * 2 * (expected - 1)
    assert scores["c0"].loss == pytest.approx((adapted - 1) ** 2 + 1, abs=1e-9)  # the toy's loss is f + 1


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_without_a_step_it_is_fedavg_to_the_bit(tmp_path, mode):
    ours = mixed(tmp_path / "a", dropout=0.3, fraction=0.6).run(PerFedAvg(LOCAL, mode=mode, alpha=0.0), 3)
    theirs = mixed(tmp_path / "b", dropout=0.3, fraction=0.6).run(FedAvg(LOCAL, average="uniform"), 3)
    assert [digest(s.weights) for s in ours] == [digest(s.weights) for s in theirs]


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_minibatches_of_a_step_are_drawn_independently(tmp_path, mode):
    """One sample a minibatch: with the same sample for both, the first step of PER-1 would be certain."""
    x = torch.tensor([[2.0, 1.0], [2.0, -1.0]], dtype=torch.float64)
    world = World(tmp_path, {"q": Quadratic}, [("q", Data(x, torch.zeros(2, dtype=torch.int64)))] * 40, classes=2)
    moved = []
    for k in world.fed.clients:
        world.fed.sample = lambda k=k: [k]
        moved.append(value(world.run(PerFedAvg(Local(steps=1, batch=1, lr=0.05), mode=mode, alpha=0.1))[-1]))
    assert len({round(m, 6) for m in moved}) == 4  # +-1 to adapt, +-1 to learn
    assert {round(abs(m), 3) for m in moved} == ({0.08, 0.12} if mode == "fo" else {0.064, 0.096})


def test_clients_count_the_same_unless_told(tmp_path):
    clients = [(2, 1, 3), (2, -1, 1)]
    how = {"local": Local(steps=1, lr=0.05), "alpha": 0.1}
    assert value(quadratics(tmp_path / "a", *clients).run(PerFedAvg(**how))[-1]) == pytest.approx(0.0, abs=1e-12)
    weighted = quadratics(tmp_path / "b", *clients).run(PerFedAvg(**how, average="weighted"))[-1]
    assert value(weighted) == pytest.approx(0.04, abs=1e-12)


def test_adaptation_is_on_training_samples():
    """Known mistake: a step on a batch of the test set before the test."""
    (x, y), (tx, ty) = images(30, 1), images(50, 2)
    weights, tuning = weights_of(mlp(0)), Tuning(Local(steps=3, batch=8, lr=0.1))
    losses = []
    for labels in (ty, 3 - ty):
        client = Client("c0", "m", Data(x, y), Data(tx, labels), None, 4, 5, {}, mlp(0))
        losses.append(score_tuned(client, weights=weights, tuning=tuning, tuned=False))
        assert client.state == {}
    model = mlp(0)
    fit(model, x, y, tuning.local, 5)
    assert losses == [evaluate(model, tx, ty), evaluate(model, tx, 3 - ty)]


def test_no_adaptation_scores_the_common_model(tmp_path):
    world = mixed(tmp_path)
    method = PerFedAvg(LOCAL, adapt_steps=0)
    state = world.run(method)[-1]
    scores = world.fed.map(score_tuned, list(world.fed.clients), **method.personal(state, world.fed).payload)
    for k, score in scores.items():
        P, data = world.fed.architecture(k), world.data[k]
        assert score == evaluate(world.server.model(P, state.weights[P]), data.inputs, data.labels)


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_clients_with_a_single_sample_or_a_single_one_left_over_take_part(tmp_path, mode):
    parties = [("c", Data(*images(n, n))) for n in (1, 9, 17)]
    world = World(tmp_path, {"c": lambda: Conv(0)}, parties)
    world.run(PerFedAvg(LOCAL, mode=mode))
    assert world.fed.failures == []


def test_a_client_that_blows_up_is_left_out(tmp_path):
    world = mixed(tmp_path)
    x = world.data["c0"].inputs
    world.data["c0"] = Data(torch.full_like(x, float("nan")), world.data["c0"].labels)
    state = world.run(PerFedAvg(LOCAL, mode="hf"))[-1]
    assert all(torch.isfinite(t).all() for w in state.weights.values() for t in w.values())


def test_the_wire_is_that_of_fedavg_and_clients_keep_nothing(tmp_path):
    world = mixed(tmp_path)
    world.run(PerFedAvg(LOCAL))
    d = {P: sum(t.numel() for t in world.server.init(P).values() if t.is_floating_point()) for P in "cm"}
    (down,), (up,) = world.fed.down.values(), world.fed.up.values()
    assert down.floats == up.floats == sum(d[P] for P in KINDS)
    assert all(kept_by(world.fed, k) == {} for k in world.fed.clients)


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_it_learns_a_model_that_adapts(tmp_path, mode):
    """Two groups of clients with contrary labels: the common model cannot serve both, one step from it does."""
    x, y = images(400, seed=2)
    parts = [Data(x[i::4], y[i::4] if i < 2 else 3 - y[i::4]) for i in range(4)]
    ours = PerFedAvg(Local(steps=15, batch=50, lr=0.1), mode=mode, alpha=0.1)

    def scores(method, *adapt_steps):
        world = World(tmp_path / type(method).__name__, {"m": lambda: mlp(1)}, [("m", d) for d in parts])
        state, k = world.run(method, 6)[-1], list(world.fed.clients)
        how = [dataclasses.replace(ours, adapt_steps=n).personal(state, world.fed).payload for n in adapt_steps]
        return [world.fed.map(score_tuned, k, **payload).values() for payload in how]

    before, adapted = scores(ours, 0, 1)
    (plain,) = scores(FedAvg(ours.local, average="uniform"), 1)
    assert max(s.accuracy for s in before) < 0.8 < min(s.accuracy for s in adapted)
    assert sum(s.loss for s in adapted) < sum(s.loss for s in plain)  # what it minimises, and FedAvg does not


def test_the_summary_has_both(tmp_path):
    summary = run_toy(PerFedAvg(Local(steps=20, batch=16, lr=0.1), alpha=0.05), tmp_path, rounds=4).summary
    assert min(m["accuracy"] for m in summary["models"].values()) > 0.6
    assert summary["personal"]["mean"] > 0.7


def test_variants_keep_the_contract_of_a_method(tmp_path):
    check_method(PerFedAvg(mode="hf", average="weighted"), tmp_path, engines=())


def test_same_seeds_same_bits(tmp_path):
    ends = [mixed(tmp_path / str(i)).run(PerFedAvg(LOCAL, mode="hf"))[-1].weights["c"] for i in (0, 1)]
    assert same_bits(*ends)


def test_what_makes_no_sense_is_refused():
    for wrong, said in (({"alpha": -1.0}, "alpha = -1"), ({"delta": 0.0}, "delta = 0"), ({"adapt_steps": -1}, "= -1")):
        with pytest.raises(ConfigError, match=said):
            PerFedAvg(**wrong)
