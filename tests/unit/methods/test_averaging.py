"""FedAvg, FedProx, FedAvgM: the oracles FA-1, FP-1, FM-1 through a whole federation, and how they coincide."""

import copy

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.federation import per_client
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.methods.fedavg import FedAvg, FedAvgM, FedProx
from solera.methods.steps.training import local_update
from solera.train.aggregate import weighted_mean
from solera.train.fitting import Local, fit
from toys import Conv, Quadratic, World, images, mlp, quadratic_data, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)


def quadratics(tmp, *clients: tuple[float, float], x: float = 0.0) -> World:
    parties = [("q", Data(*quadratic_data(a, b))) for a, b in clients]
    return World(tmp, {"q": lambda: Quadratic(x)}, parties, classes=2)


def mixed(tmp, **options) -> World:
    """Five clients of different sizes, two architectures."""
    sizes, kinds = (5, 12, 9, 20, 7), "cmcmc"
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    return World(tmp, builders, [(P, Data(*images(n, n))) for n, P in zip(sizes, kinds, strict=True)], **options)


def value(state, P: str = "q") -> float:
    return state.weights[P]["x"].item()


def test_fa_1_the_average_of_local_optima_is_not_the_optimum(tmp_path):
    world = quadratics(tmp_path, (1, 1), (2, -1))
    state = world.run(FedAvg(local=Local(steps=200, lr=0.1)))[-1]
    assert value(state) == pytest.approx(0.0, abs=1e-9)  # while x* = -1/3


def test_fdf_1_weighted_and_uniform(tmp_path):
    """Clients at their optimum stay there: x moves to the mean of the optima, 10, 30 and 60 examples."""
    for k, (first, average, expected) in enumerate(
        [(0, "weighted", 4.0), (0, "uniform", 3.0), (1, "weighted", 2.6), (1, "uniform", 3.0)]
    ):
        optima = ((1, 3, 5), (2, 6, 1))[first]
        parties = [("q", Data(*quadratic_data(1, b, n))) for b, n in zip(optima, (10, 30, 60), strict=True)]
        world = World(tmp_path / str(k), {"q": Quadratic}, parties, classes=2)
        state = world.run(FedAvg(local=Local(steps=1, lr=1.0, batch=64), average=average))[-1]
        assert value(state) == pytest.approx(expected, abs=1e-12)


def test_one_client_is_centralised_sgd(tmp_path):
    x, y = images(30)
    world = World(tmp_path, {"c": lambda: Conv(0)}, [("c", Data(x, y))])
    states = world.run(FedAvg(local=LOCAL), rounds=2)
    model = copy.deepcopy(world.server.template("c"))
    for seed in world.seeds:
        fit(model, x, y, LOCAL, seed)
    assert same_bits(states[-1].weights["c"], weights_of(model))
    assert len(set(world.seeds)) == 2


def test_each_architecture_is_averaged_over_its_own_clients(tmp_path):
    world = mixed(tmp_path)
    x = world.run(FedAvg(local=LOCAL))
    before, after = (digest(s.weights["c"]) for s in x)
    assert before != after
    only_c = World(tmp_path / "c", {"c": lambda: Conv(0)}, [("c", Data(*images(n, n))) for n in (5, 12, 9, 20, 7)])
    only_c.fed.sample = lambda: ["c0", "c2", "c4"]  # the same ids, so the same seeds
    assert same_bits(only_c.run(FedAvg(local=LOCAL))[-1].weights["c"], x[-1].weights["c"])


def test_architectures_without_clients_in_the_round_stay(tmp_path):
    world = mixed(tmp_path)
    world.fed.sample = lambda: ["c1", "c3"]
    start, end = world.run(FedAvg(local=LOCAL))
    assert same_bits(start.weights["c"], end.weights["c"])
    assert not same_bits(start.weights["m"], end.weights["m"])
    assert set(end.weights) == {"c", "m"}


def test_round_does_not_touch_its_input(tmp_path):
    for i, method in enumerate((FedAvg(LOCAL), FedProx(LOCAL, mu=0.1), FedAvgM(LOCAL))):
        world = mixed(tmp_path / str(i))
        start = method.init(world.fed, world.server)
        before = digest(start)
        world.run(method, state=start)
        assert digest(start) == before


# ---- FedProx ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b", "minimiser"), [(1, 1, 0.5), (2, -1, -2 / 3)])
def test_fp_1(tmp_path, a, b, minimiser):
    world = quadratics(tmp_path, (a, b))
    state = world.run(FedProx(local=Local(steps=300, lr=0.1), mu=1.0))[-1]
    assert value(state) == pytest.approx(minimiser, abs=1e-12)


def test_fedprox_with_mu_zero_is_fedavg_bit_for_bit(tmp_path):
    a = mixed(tmp_path / "a").run(FedAvg(LOCAL), 2)[-1]
    b = mixed(tmp_path / "b").run(FedProx(LOCAL, mu=0.0), 2)[-1]
    c = mixed(tmp_path / "c").run(FedProx(LOCAL, mu=1.0), 2)[-1]
    assert digest(a) == digest(b) != digest(c)


def test_stragglers_do_between_one_and_all_but_one_epochs(tmp_path):
    world = mixed(tmp_path)
    method = FedProx(Local(epochs=4), straggler_fraction=0.4)
    seen = set()
    for t in range(40):
        world.fed.begin(t)
        S = world.fed.sample()
        work = method.work(S, world.fed)
        less = [w.epochs for w in work.values() if w.epochs != 4]
        assert len(less) == 2
        seen.update(less)
        world.fed.begin(t)
        assert work == method.work(world.fed.sample(), world.fed)
    assert seen == {1, 2, 3}


def test_stragglers_with_steps_and_with_a_single_epoch(tmp_path):
    world = mixed(tmp_path)
    S = world.fed.sample()
    work = FedProx(Local(steps=10), straggler_fraction=1.0).work(S, world.fed)
    assert all(1 <= w.steps < 10 for w in work.values())
    assert all(
        w == Local(epochs=1) for w in FedProx(Local(epochs=1), straggler_fraction=1.0).work(S, world.fed).values()
    )
    state = world.run(FedProx(LOCAL, straggler_fraction=1.0))[-1]
    full = mixed(tmp_path / "full").run(FedProx(LOCAL))[-1]
    assert digest(state) != digest(full)


@pytest.mark.parametrize("bad", [{"mu": -0.1}, {"straggler_fraction": 1.1}])
def test_fedprox_refuses(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        FedProx(**bad)


# ---- FedAvgM ---------------------------------------------------------------------------------------


def test_fm_1(tmp_path):
    """Local steps that jump to the optimum: the averages are .8, then .7."""
    world = quadratics(tmp_path, (1, 0.8), x=1.0)
    method = FedAvgM(local=Local(steps=1, lr=1.0), momentum=0.3)
    state = world.run(method)[-1]
    assert state.velocity["q"]["x"].item() == pytest.approx(0.2, abs=1e-15)
    assert value(state) == pytest.approx(0.8, abs=1e-15)
    world.data["c0"] = Data(*quadratic_data(1, 0.7))
    state = world.run(method, state=state)[-1]
    assert state.velocity["q"]["x"].item() == pytest.approx(0.16, abs=1e-15)
    assert value(state) == pytest.approx(0.64, abs=1e-15)


def test_fedavgm_without_momentum_is_fedavg_bit_for_bit(tmp_path):
    a = mixed(tmp_path / "a").run(FedAvg(LOCAL), 3)[-1]
    b = mixed(tmp_path / "b").run(FedAvgM(LOCAL, momentum=0.0), 3)[-1]
    c = mixed(tmp_path / "c").run(FedAvgM(LOCAL, momentum=0.5), 3)[-1]
    assert digest(a.weights) == digest(b.weights) != digest(c.weights)


def test_fedavgm_takes_batchnorm_statistics_from_the_average(tmp_path):
    world = mixed(tmp_path)
    method = FedAvgM(LOCAL, momentum=0.9)
    state = world.run(method, 2)[-1]
    assert not any("running" in n or "num_batches" in n for n in state.velocity["c"])
    after = world.run(method, state=state)[-1].weights["c"]
    world.fed.begin(0)
    average = FedAvg(LOCAL).round(FedAvg.State(state.weights), world.fed, world.server).weights["c"]
    assert torch.equal(after["1.running_mean"], average["1.running_mean"])
    assert torch.equal(after["1.num_batches_tracked"], average["1.num_batches_tracked"])
    assert not torch.equal(after["0.weight"], average["0.weight"])


def test_fedavgm_refuses():
    with pytest.raises(ConfigError, match="momentum"):
        FedAvgM(momentum=1.0)


def test_models_are_one_for_each_architecture(tmp_path):
    world = mixed(tmp_path)
    state = FedAvg().init(world.fed, world.server)
    models = FedAvg().models(state)
    assert {name: m.architecture for name, m in models.items()} == {"c": "c", "m": "m"}
    assert same_bits(models["c"].weights, world.server.init("c"))


def test_the_mean_inside_the_exchange_equals_the_mean_of_replies(tmp_path):
    """What lets FedDF without steps equal FedAvg: one arithmetic, one order."""
    world = mixed(tmp_path)
    x = {P: world.server.init(P) for P in ("c", "m")}
    mean = FedAvg(LOCAL).round(FedAvg.State(x), world.fed, world.server)
    world.fed.begin(0)
    sent = per_client(lambda k: x[world.fed.architecture(k)])
    replies = world.fed.map(local_update, world.fed.sample(), weights=sent, local=LOCAL, mu=0.0)
    for P in x:
        S = [k for k in replies if world.fed.architecture(k) == P]
        by_hand = weighted_mean([replies[k].weights for k in S], [world.fed.num_examples(k) for k in S])
        assert same_bits(mean.weights[P], by_hand)
