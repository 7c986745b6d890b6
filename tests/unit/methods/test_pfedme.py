"""pFedMe: PFM-1 through a federation, what travels and what stays, and personal models that suit their clients."""

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.methods.pfedme import Envelope, PFedMe, follow_envelope
from solera.methods.steps.personal import common_model, score_own_or_received
from solera.testing import check_method, run_toy
from toys import Conv, Quadratic, World, images, kept_by, mlp, quadratic_data, same_bits

LOCAL = Envelope(steps=4, batch=8)
EXACT = Envelope(steps=1, lr=0.005, lam=15.0, inner_steps=100, inner_lr=0.05)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
CLIENTS = [f"c{i}" for i in range(5)]


def mixed(tmp, **options) -> World:
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    return World(tmp, builders, [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)], **options)


def theta(world: World, k: str) -> dict:
    return kept_by(world.fed, k)["model"]


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 0.0088235294), (2.0, 0.0176470588)])
def test_pfm_1(tmp_path, beta, expected):
    """f = (x - 1)^2 from w = 0, lambda = 15."""
    world = World(tmp_path, {"q": Quadratic}, [("q", Data(*quadratic_data(2, 1)))], classes=2)
    state = world.run(PFedMe(EXACT, beta=beta))[-1]
    assert theta(world, "c0")["x"].item() == pytest.approx(0.1176470588, abs=5e-11)
    assert state.weights["q"]["x"].item() == pytest.approx(expected, abs=5e-11)


def test_a_round_of_theta_begins_at_the_received_model(tmp_path):
    """And not at the theta of the round before, which the client keeps for its own use only."""
    world = mixed(tmp_path)
    _, one, _ = world.run(PFedMe(LOCAL), 2)
    for i, k in enumerate(CLIENTS):
        P, data = world.fed.architecture(k), world.data[k]
        model = world.server.model(P, one.weights[P])
        follow_envelope(model, data.inputs, data.labels, LOCAL, world.seeds[5 + i])
        assert same_bits(theta(world, k), weights_of(model))


def test_the_server_goes_part_of_the_way_or_beyond_but_statistics_are_averaged(tmp_path):
    """Known mistake: averages of parameters only."""
    ends = {}
    for beta in (0.5, 1.0, 2.0):
        start, end = (s.weights["c"] for s in mixed(tmp_path / str(beta)).run(PFedMe(LOCAL, beta=beta)))
        ends[beta] = end
    for beta in (0.5, 2.0):
        step = start["0.weight"] + beta * (ends[1.0]["0.weight"] - start["0.weight"])
        assert torch.allclose(ends[beta]["0.weight"], step, atol=1e-7)
        assert torch.equal(ends[beta]["1.running_mean"], ends[1.0]["1.running_mean"])
    assert not torch.equal(start["1.running_mean"], ends[1.0]["1.running_mean"])


def test_clients_count_by_their_examples_unless_told(tmp_path):
    for average, expected in (("weighted", 0.5), ("uniform", 0.0)):
        parties = [("q", Data(*quadratic_data(2, b, n))) for b, n in ((1, 3), (-1, 1))]
        world = World(tmp_path / average, {"q": Quadratic}, parties, classes=2)
        state = world.run(PFedMe(EXACT, average=average))[-1]
        assert state.weights["q"]["x"].item() == pytest.approx(expected * 0.0088235294, abs=5e-11)


def test_nothing_decays_inside_the_steps_of_theta(tmp_path):
    """Known addition in the authors' code: weight decay on theta. Here a flat loss leaves everything in place."""
    world = World(tmp_path, {"q": lambda: Quadratic(3.0)}, [("q", Data(*quadratic_data(0, 1)))], classes=2)
    state = world.run(PFedMe(LOCAL))[-1]
    assert theta(world, "c0")["x"].item() == state.weights["q"]["x"].item() == 3.0


def test_a_theta_that_blows_up_is_not_kept_and_absent_clients_keep_theirs(tmp_path):
    world = mixed(tmp_path)
    method = PFedMe(LOCAL)
    state = world.run(method)[-1]
    before = {k: theta(world, k) for k in CLIENTS}
    world.data["c0"] = Data(torch.full_like(world.data["c0"].inputs, 1e38), world.data["c0"].labels)
    world.fed.sample = lambda: ["c0", "c1"]
    world.fed.begin(1)
    state = method.round(state, world.fed, world.server)
    assert [k for k in CLIENTS if not same_bits(theta(world, k), before[k])] == ["c1"]
    assert all(torch.isfinite(t).all() for w in state.weights.values() for t in w.values())


def test_clients_with_a_single_sample_or_a_single_one_left_over_take_part(tmp_path):
    parties = [("c", Data(*images(n, n))) for n in (1, 9, 17)]
    world = World(tmp_path, {"c": lambda: Conv(0)}, parties)
    world.run(PFedMe(LOCAL))
    assert world.fed.failures == []


def test_the_wire_is_that_of_fedavg(tmp_path):
    world = mixed(tmp_path)
    world.run(PFedMe(LOCAL))
    d = {P: sum(t.numel() for t in world.server.init(P).values() if t.is_floating_point()) for P in "cm"}
    (down,), (up,) = world.fed.down.values(), world.fed.up.values()
    assert down.floats == up.floats == sum(d[P] for P in KINDS)


def test_it_learns_models_that_suit_their_clients(tmp_path):
    """Two groups of clients with contrary labels: no common model can serve both."""
    x, y = images(400, seed=2)
    parts = [Data(x[i::4], y[i::4] if i < 2 else 3 - y[i::4]) for i in range(4)]
    world = World(tmp_path, {"m": lambda: mlp(1)}, [("m", d) for d in parts])
    local = Envelope(steps=12, batch=50, lr=0.1, lam=2.0, inner_steps=5, inner_lr=0.2)
    state = world.run(PFedMe(local), 4)[-1]
    scores = world.fed.map(score_own_or_received, list(world.fed.clients), **common_model(state.weights, world.fed))
    assert min(s.accuracy for s in scores.values()) > 0.85
    common = world.server.model("m", state.weights["m"])
    right = [(common(d.inputs).argmax(-1) == d.labels).float().mean().item() for d in parts]
    assert max(right) < 0.8


def test_the_summary_has_both(tmp_path):
    local = Envelope(steps=10, batch=16, lr=0.2, lam=2.0, inner_lr=0.2)
    summary = run_toy(PFedMe(local), tmp_path, rounds=3).summary
    assert set(summary["models"]) == {"wide", "deep"}
    assert summary["personal"]["mean"] > 0.6


def test_variants_keep_the_contract_of_a_method(tmp_path):
    check_method(PFedMe(Envelope(inner_steps=2), beta=2.0, average="uniform"), tmp_path, engines=())


def test_what_makes_no_sense_is_refused():
    for beta in (0.0, -1.0, float("inf")):
        with pytest.raises(ConfigError, match="beta = "):
            PFedMe(beta=beta)
