"""Ditto: DIT-1 through a federation, FedAvg for everybody, local training without the pull."""

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.methods.ditto import Ditto
from solera.methods.fedavg import FedAvg
from solera.methods.local import LocalOnly
from solera.methods.steps.personal import common_model, score_own_or_received
from solera.testing import check_method, run_toy
from solera.train.fitting import Local, fit, proximal
from toys import Conv, Quadratic, World, give, images, kept_by, mlp, quadratic_data, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
CLIENTS = [f"c{i}" for i in range(5)]


def mixed(tmp, dropout=0.0, **options) -> World:
    builders = {"c": lambda: Conv(0, dropout=dropout), "m": lambda: mlp(1)}
    return World(tmp, builders, [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)], **options)


def own(world: World, k: str) -> dict:
    return kept_by(world.fed, k)["model"]


def test_dit_1(tmp_path):
    """v = 2, w = 0, gradient 1 at v, lambda = eta = 0.1."""
    world = World(tmp_path, {"q": lambda: Quadratic(0.0)}, [("q", Data(*quadratic_data(1, 1)))], classes=2)
    method = Ditto(Local(steps=1, lr=0.1), lam=0.1)
    start = method.init(world.fed, world.server)
    give(world.fed, "c0", {"model": {"x": torch.tensor([2.0], dtype=torch.float64)}})
    world.fed.begin(1)
    end = method.round(start, world.fed, world.server)
    assert own(world, "c0")["x"].item() == pytest.approx(1.88, abs=1e-12)
    assert end.weights["q"]["x"].item() == pytest.approx(0.1, abs=1e-12)  # w takes its own step


def test_the_pull_is_towards_the_model_as_received_not_as_trained(tmp_path):
    """Two steps: w moves in between, but v does not see it. The norm is squared, so the pull grows with distance."""
    world = World(tmp_path, {"q": lambda: Quadratic(0.0)}, [("q", Data(*quadratic_data(1, 1)))], classes=2)
    world.run(Ditto(Local(steps=2, lr=0.1), lam=2.0))
    v = 0 - 0.1 * (-1 + 2 * 0)
    v = v - 0.1 * ((v - 1) + 2 * v)
    assert own(world, "c0")["x"].item() == pytest.approx(v, abs=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.1, 2.0])
def test_the_common_model_is_that_of_fedavg_to_the_bit(tmp_path, lam):
    ours = mixed(tmp_path / "a", dropout=0.3, fraction=0.6).run(Ditto(LOCAL, lam=lam), 3)
    theirs = mixed(tmp_path / "b", dropout=0.3, fraction=0.6).run(FedAvg(LOCAL), 3)
    assert [digest(s.weights) for s in ours] == [digest(s.weights) for s in theirs]


def test_without_the_pull_clients_train_alone_to_the_bit(tmp_path):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    a.run(Ditto(LOCAL, lam=0.0), 3)
    b.run(LocalOnly(LOCAL), 3)
    assert all(same_bits(own(a, k), own(b, k)) for k in CLIENTS)


def test_a_strong_pull_ends_at_the_common_model(tmp_path):
    """lambda eta = 1: v = w - eta grad f(v), wherever v was."""
    world = mixed(tmp_path)
    method = Ditto(Local(steps=1, batch=64, lr=0.001), lam=1000.0)
    *_, before, _ = world.run(method, 3)
    for k in CLIENTS:
        w, v = before.weights[world.fed.architecture(k)], own(world, k)
        assert all(torch.allclose(v[n], w[n], atol=0.02) for n in v if "running" not in n and "num_" not in n)


def test_a_model_far_from_the_common_one_is_pulled_in(tmp_path):
    """lambda/2 ||v - w||^2 = 5,000 is no loss that blows up: the client would keep this v for ever."""
    world = World(tmp_path, {"q": lambda: Quadratic(0.0)}, [("q", Data(*quadratic_data(0, 1)))], classes=2)
    method = Ditto(Local(steps=1, lr=0.1), lam=1.0)
    state = method.init(world.fed, world.server)
    give(world.fed, "c0", {"model": {"x": torch.tensor([100.0], dtype=torch.float64)}})
    world.fed.begin(1)
    method.round(state, world.fed, world.server)
    assert own(world, "c0")["x"].item() == pytest.approx(90.0, abs=1e-9)


def test_both_models_see_the_same_minibatches(tmp_path):
    world = mixed(tmp_path)
    _, one, _ = world.run(Ditto(LOCAL, lam=0.5), 2)
    for i, k in enumerate(CLIENTS):
        P, data = world.fed.architecture(k), world.data[k]
        v = world.server.model(P, world.server.init(P))
        for w, seed in zip((world.server.init(P), one.weights[P]), world.seeds[i::5], strict=True):
            fit(v, data.inputs, data.labels, LOCAL, seed, proximal(0.5, w))
        assert same_bits(own(world, k), weights_of(v))


def test_statistics_are_averaged_but_not_pulled(tmp_path):
    """Known mistake: averages of parameters only. Every client's BatchNorm statistics count here."""
    world = mixed(tmp_path)
    start, end = world.run(Ditto(LOCAL, lam=1.0))
    assert not torch.equal(start.weights["c"]["1.running_mean"], end.weights["c"]["1.running_mean"])
    alone = mixed(tmp_path / "alone")
    alone.run(Ditto(LOCAL, lam=0.0))
    assert not torch.equal(own(world, "c0")["0.weight"], own(alone, "c0")["0.weight"])
    assert int(own(world, "c0")["1.num_batches_tracked"]) == 2


def test_a_model_of_its_own_that_blows_up_is_not_kept_and_absent_clients_keep_theirs(tmp_path):
    world = mixed(tmp_path)
    method = Ditto(LOCAL)
    state = world.run(method)[-1]
    before = {k: own(world, k) for k in CLIENTS}
    world.data["c0"] = Data(torch.full_like(world.data["c0"].inputs, 1e38), world.data["c0"].labels)
    world.fed.sample = lambda: ["c0", "c1"]
    world.fed.begin(1)
    state = method.round(state, world.fed, world.server)
    assert [k for k in CLIENTS if not same_bits(own(world, k), before[k])] == ["c1"]
    assert all(torch.isfinite(t).all() for w in state.weights.values() for t in w.values())


def test_the_wire_is_that_of_fedavg(tmp_path):
    world = mixed(tmp_path)
    world.run(Ditto(LOCAL))
    d = {P: sum(t.numel() for t in world.server.init(P).values() if t.is_floating_point()) for P in "cm"}
    (down,), (up,) = world.fed.down.values(), world.fed.up.values()
    assert down.floats == up.floats == sum(d[P] for P in KINDS)


def test_it_learns_models_that_suit_their_clients(tmp_path):
    """Two groups of clients with contrary labels: no common model can serve both."""
    x, y = images(400, seed=2)
    parts = [Data(x[i::4], y[i::4] if i < 2 else 3 - y[i::4]) for i in range(4)]
    world = World(tmp_path, {"m": lambda: mlp(1)}, [("m", d) for d in parts])
    method = Ditto(Local(epochs=3, batch=20, lr=0.1), lam=0.1)
    state = world.run(method, 5)[-1]
    scores = world.fed.map(score_own_or_received, list(world.fed.clients), **common_model(state.weights, world.fed))
    assert min(s.accuracy for s in scores.values()) > 0.9
    common = world.server.model("m", state.weights["m"])
    right = [(common(d.inputs).argmax(-1) == d.labels).float().mean().item() for d in parts]
    assert max(right) < 0.8


def test_the_summary_has_both(tmp_path):
    summary = run_toy(Ditto(Local(epochs=3, batch=16, lr=0.1)), tmp_path, rounds=4).summary
    assert set(summary["models"]) == {"wide", "deep"}
    assert summary["personal"]["mean"] > 0.7


def test_variants_keep_the_contract_of_a_method(tmp_path):
    check_method(Ditto(average="uniform", lam=0.0), tmp_path, engines=())


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="lam = -1"):
        Ditto(lam=-1.0)
    with pytest.raises(ConfigError, match=r"lam \* local.lr = 2 overshoots"):
        Ditto(Local(lr=0.1), lam=20.0)
    Ditto(Local(lr=0.1, optimizer="adam"), lam=20.0)
