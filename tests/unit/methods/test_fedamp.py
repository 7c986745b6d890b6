"""FedAMP: equal to its equations by hand, and clients find those like them."""

import math
import statistics

import pytest
import torch

from camps import CAMPS, accuracy, camps, numbers
from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.methods.fedamp import FedAMP
from solera.methods.fedavg import FedAvg
from solera.testing import check_method
from solera.train.aggregate import weighted_mean
from solera.train.fitting import Local, fit, proximal
from toys import Conv, Quadratic, World, images, mlp, quadratic_data, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"


def mixed(tmp, sizes=SIZES, **options) -> World:
    """Five clients of different sizes, two architectures, one of them with BatchNorm."""
    parties = [(P, Data(*images(n, n))) for n, P in zip(sizes, KINDS, strict=True)]
    return World(tmp, {"c": lambda: Conv(0), "m": lambda: mlp(1)}, parties, **options)


def trained(world, k, seed, u, mu):
    model = world.server.model(world.fed.architecture(k), u)
    fit(model, world.data[k].inputs, world.data[k].labels, LOCAL, seed, proximal(mu, u))
    return weights_of(model)


def test_a_client_that_was_never_asked_starts_from_the_initial_weights(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(FedAMP(LOCAL, lam=0.3, alpha=0.5))
    assert start.models == {}
    for k, seed in zip(world.fed.clients, world.seeds, strict=True):
        u = world.server.init(world.fed.architecture(k))
        assert same_bits(end.models[k], trained(world, k, seed, u, 0.3 / 0.5))


@pytest.mark.parametrize("sigma", [None, 2.0])
def test_the_second_round_is_message_passing_and_a_proximal_training(tmp_path, sigma):
    world = mixed(tmp_path)
    _, first, second = world.run(FedAMP(LOCAL, lam=0.03, alpha=50.0, sigma=sigma), 2)
    for P in "cm":
        clients = [k for k in world.fed.clients if world.fed.architecture(k) == P]
        names = [n for n, _ in world.server.template(P).named_parameters()]  # statistics are no distance
        flat = [torch.cat([first.models[k][n].flatten() for n in names]).double() for k in clients]
        d = [[float((a - b).square().sum()) for b in flat] for a in flat]
        pairs = [d[i][j] for i in range(len(flat)) for j in range(i)]
        s = statistics.median(pairs) if sigma is None else sigma
        alpha, m = 50.0, range(len(flat))
        others = [sum(math.exp(-d[i][j] / s) / s for j in m if j != i) for i in m]
        while max(others) * alpha > 1:
            alpha /= 2
        assert alpha < 50
        for i, k in enumerate(clients):
            xi = [alpha * math.exp(-d[i][j] / s) / s for j in m]
            xi[i] = 1 - alpha * others[i]
            u = weighted_mean([first.models[j] for j in clients], xi)  # BatchNorm statistics too
            seed = world.seeds[5 + list(world.fed.clients).index(k)]
            wanted = trained(world, k, seed, u, 0.03 / alpha)
            for n, t in second.models[k].items():
                assert torch.allclose(t.double(), wanted[n].double(), atol=1e-5), (P, k, n)
    said = {e["architecture"]: e for e in world.events("attention")}
    assert said["m"]["clients"] == ["c1", "c3"]
    assert [sum(row) for row in said["c"]["matrix"]] == pytest.approx([1, 1, 1], abs=1e-5)
    assert said["m"]["alpha"] < 50


def test_the_pull_is_the_square_of_the_distance_not_the_distance(tmp_path):
    """A known mistake: with the norm itself, its gradient has no zero at u and the same size everywhere."""
    world = World(tmp_path, {"q": Quadratic}, [("q", Data(*quadratic_data(2.0, 1.0, 4)))], classes=2)
    end = world.run(FedAMP(Local(steps=300, batch=4, lr=0.1), lam=1.5, alpha=0.5))[-1]
    # argmin (x - 1)^2 + 1.5/(2 0.5) x^2 = 0.4; with |x| instead of x^2 it would be 0.25
    assert end.models["c0"]["x"].item() == pytest.approx(0.4, abs=1e-9)


def test_halving_alpha_does_not_make_the_pull_overshoot(tmp_path):
    """Models close together: alpha = 2^-14, and local.lr lambda / alpha = 1638 would throw every client out."""
    world = World(tmp_path, {"q": Quadratic}, [("q", Data(*quadratic_data(1.0, 1.0, 4)))] * 2, classes=2)
    local = Local(steps=30, batch=4, lr=0.1)
    _, first, second = world.run(FedAMP(local, lam=1.0, sigma=1e-4), 2)
    assert world.fed.failures == []
    (said,) = world.events("attention")
    assert (said["alpha"], said["pull"]) == (2**-14, 10.0)  # 1/lr
    u = first.models["c0"]["x"].item()  # of both
    assert second.models["c0"]["x"].item() == pytest.approx((1 + 10 * u) / 11, abs=1e-9)  # argmin (x-1)^2/2 + 5 (x-u)^2
    assert FedAMP(local, lam=15.0).pull(1.0) == 15.0  # what was asked for is not touched
    assert FedAMP(Local(optimizer="adam"), lam=1.0).pull(1e-4) == 1e4


def test_absent_clients_stay_in_the_sums_with_their_last_model(tmp_path):
    world = camps(tmp_path, fraction=0.5)
    method = FedAMP(LOCAL, lam=0.1)
    states = world.run(method, 8)
    world.fed.begin(8)
    S = world.fed.sample()
    assert len(S) == 3
    w = states[-1].models
    assert len(w) == 6
    u, _ = method.pass_messages("m", S, w, world.fed, world.server)
    assert set(u) == set(S)
    absent = next(k for k in w if k not in S)
    moved = w | {absent: {n: t + 0.01 for n, t in w[absent].items()}}
    v, _ = method.pass_messages("m", S, moved, world.fed, world.server)
    assert not any(same_bits(u[k], v[k]) for k in S)
    end = method.round(states[-1], world.fed, world.server)
    assert all(same_bits(end.models[k], w[k]) for k in w if k not in S)


def test_architectures_share_nothing(tmp_path):
    ends = []
    for extra in (0, 1):
        world = mixed(tmp_path / str(extra))
        x, y = images(12, seed=12)
        world.data["c1"] = Data(x, (y + extra) % 4)  # of the other architecture
        ends.append(world.run(FedAMP(LOCAL), 2)[-1].models)
    assert all(same_bits(ends[0][k], ends[1][k]) for k in ("c0", "c2", "c4"))
    assert not same_bits(ends[0]["c3"], ends[1]["c3"])


def test_wire(tmp_path):
    world = mixed(tmp_path)
    world.run(FedAMP(LOCAL), 2)
    d = sum(numbers(world.server.init(P))[0] for P in KINDS)
    assert world.fed.down["local_update"].floats == world.fed.up["local_update"].floats == d


def test_clients_find_their_camp_and_do_what_one_model_cannot(tmp_path):
    local = Local(epochs=4, batch=10, lr=0.1)
    world = camps(tmp_path / "amp")
    method = FedAMP(local)
    w = world.run(method, 6)[-1].models
    theirs = statistics.fmean(accuracy(world, k, w[k]) for k in w)
    one = camps(tmp_path / "avg").run(FedAvg(local), 6)[-1].weights["m"]
    shared = statistics.fmean(accuracy(world, k, one) for k in w)
    assert theirs > 0.85
    assert shared < 0.7
    xi = torch.tensor(world.events("attention")[0]["matrix"])
    for camp in CAMPS:
        rows = [int(k[1]) for k in camp]
        friends = xi[rows][:, rows][~torch.eye(3, dtype=torch.bool)]
        strangers = xi[rows][:, [i for i in range(6) if i not in rows]]
        assert friends.min() > strangers.max()


def test_the_heuristic_keeps_its_contract_and_learns(tmp_path):
    method = FedAMP(Local(epochs=4, batch=10, lr=0.1), heuristic=True, sigma=10.0)
    check_method(method, tmp_path / "contract", engines=())
    world = camps(tmp_path / "world")
    w = world.run(method, 6)[-1].models
    assert statistics.fmean(accuracy(world, k, w[k]) for k in w) > 0.8
    assert {row[i] for e in world.events("attention") for i, row in enumerate(e["matrix"])} == {0.2}


def test_clients_are_judged_by_the_model_the_server_keeps(tmp_path):
    world = camps(tmp_path, fraction=0.5)
    method = FedAMP(LOCAL)
    state = world.run(method)[-1]
    asked = method.personal(state, world.fed)
    scores = world.fed.map(asked.task, list(world.fed.clients), **asked.payload)
    for k, score in scores.items():
        if k not in state.models:
            assert score.total == 0  # never asked: there is no model to judge
            continue
        model = world.server.model("m", state.models[k])
        right = (model(world.data[k].inputs).argmax(-1) == world.data[k].labels).sum()
        assert score.correct == int(right)
    assert method.models(state) == {}


def test_a_client_whose_training_blows_up_keeps_its_last_good_model(tmp_path):
    world = camps(tmp_path)
    method = FedAMP(LOCAL)
    first = world.run(method)[-1]
    x, y = world.data["c1"].inputs, world.data["c1"].labels
    world.data["c1"] = Data(x * 1e6, y)
    world.fed.begin(1)
    second = method.round(first, world.fed, world.server)
    assert same_bits(second.models["c1"], first.models["c1"])
    assert not same_bits(second.models["c0"], first.models["c0"])
    assert [f["client"] for f in world.fed.failures] == ["c1"]
    assert "training diverged" in world.fed.failures[0]["reason"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"sigma": -1.0}, "sigma = -1.0"),
        ({"lam": -0.1}, "lam = -0.1"),
        ({"self_weight": 1.0}, "self_weight = 1.0"),
        ({"heuristic": True}, "needs sigma"),
        ({"lam": 20.0, "local": Local(lr=0.1)}, "overshoots"),
    ],
)
def test_refusals(bad, said):
    with pytest.raises(ConfigError, match=said):
        FedAMP(**bad)
