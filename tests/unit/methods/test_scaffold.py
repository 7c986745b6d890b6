"""SCAFFOLD: the oracles SCA-1 to SCA-3 through a whole federation, both options, and what it refuses."""

from collections import Counter

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.methods.scaffold import Scaffold, ScaffoldUp
from solera.runs.config import load_config
from solera.train.fitting import Local, gradient_of
from toys import Conv, Quadratic, World, give, images, kept_by, mlp, quadratic_data, same_bits

TWO_STEPS = Local(steps=2, lr=0.1)


def quadratics(tmp, x: float = 0.0) -> World:
    """f_1 = 1/2 (x - 1)^2 and f_2 = (x + 1)^2; x* = -1/3."""
    parties = [("q", Data(*quadratic_data(1, 1))), ("q", Data(*quadratic_data(2, -1)))]
    return World(tmp, {"q": lambda: Quadratic(x)}, parties, classes=2)


def numbers(state) -> tuple[float, float]:
    return state.weights["q"]["x"].item(), state.control["q"]["x"].item()


def controls(world: World) -> list[float]:
    return [kept_by(world.fed, k)["control"]["x"].item() for k in world.fed.clients]


@pytest.mark.parametrize("kind", [Scaffold, ScaffoldUp])
def test_sca_1(tmp_path, kind):
    world = quadratics(tmp_path)
    method = kind(TWO_STEPS)
    _, one, two = world.run(method, rounds=2)
    assert numbers(one) == pytest.approx((-0.085, 0.425), abs=1e-12)
    assert numbers(two) == pytest.approx((-0.1535, 0.3425), abs=1e-12)
    assert controls(world) == pytest.approx([-1.0995, 1.7845], abs=1e-12)


def test_sca_1_first_round_of_the_clients(tmp_path):
    world = quadratics(tmp_path)
    world.run(Scaffold(TWO_STEPS))
    assert controls(world) == pytest.approx([-0.95, 1.8], abs=1e-12)


def test_sca_2_the_optimum_is_a_fixed_point(tmp_path):
    world = quadratics(tmp_path, x=-1 / 3)
    method = Scaffold(TWO_STEPS)
    start = method.init(world.fed, world.server)
    for k, c in (("c0", -4 / 3), ("c1", 4 / 3)):
        give(world.fed, k, {"control": {"x": torch.tensor([c], dtype=torch.float64)}})
    world.fed.begin(1)
    end = method.round(start, world.fed, world.server)
    assert numbers(end) == pytest.approx((-1 / 3, 0.0), abs=1e-12)


def test_scaffold_reaches_the_optimum_that_fedavg_misses(tmp_path):
    world = quadratics(tmp_path)
    state = world.run(Scaffold(Local(steps=10, lr=0.1)), rounds=60)[-1]
    assert numbers(state) == pytest.approx((-1 / 3, 0.0), abs=1e-6)


@pytest.mark.parametrize("kind", [Scaffold, ScaffoldUp])
def test_sca_3_one_of_two_clients_counts_half(tmp_path, kind):
    world = quadratics(tmp_path)
    world.fed.sample = lambda: ["c0"]
    state = world.run(kind(TWO_STEPS))[-1]
    assert numbers(state) == pytest.approx((0.19, -0.475), abs=1e-12)


def test_a_client_that_fails_counts_as_absent(tmp_path):
    world = quadratics(tmp_path)
    world.data["c1"] = None
    state = world.run(Scaffold(TWO_STEPS))[-1]
    assert numbers(state) == pytest.approx((0.19, -0.475), abs=1e-12)


def test_option_i_is_the_gradient_at_the_received_model(tmp_path):
    world = quadratics(tmp_path)
    state = world.run(Scaffold(TWO_STEPS, option="I"))[-1]
    assert controls(world) == pytest.approx([-1.0, 2.0], abs=1e-12)  # gradients at 0
    assert numbers(state) == pytest.approx((-0.085, 0.5), abs=1e-12)


def test_option_i_and_full_gradients_agree_on_a_network(tmp_path):
    x, y = images(12)
    world = World(tmp_path, {"m": lambda: mlp(0)}, [("m", Data(x, y))])
    world.run(Scaffold(Local(epochs=1, batch=5), option="I"))
    stored = kept_by(world.fed, "c0")["control"]
    assert same_bits(stored, gradient_of(world.server.model("m", world.server.init("m")), x, y, 5))


def test_server_step_size_scales_parameters_but_not_statistics(tmp_path):
    def end(server_lr):
        world = World(tmp_path / str(server_lr), {"c": lambda: Conv(0)}, [("c", Data(*images(20, s))) for s in (0, 1)])
        return world.run(Scaffold(Local(epochs=1, batch=10, lr=0.05), server_lr=server_lr))

    (start, full), (_, half) = end(1.0), end(0.5)
    x, y, z = (s.weights["c"] for s in (start, full, half))
    torch.testing.assert_close(z["0.weight"] - x["0.weight"], (y["0.weight"] - x["0.weight"]) / 2, atol=1e-7, rtol=1e-4)
    assert torch.equal(y["1.running_mean"], z["1.running_mean"])
    assert int(y["1.num_batches_tracked"]) == int(z["1.num_batches_tracked"]) == 2
    assert set(start.control["c"]) == {n for n in x if "running" not in n and "num_batches" not in n}


@pytest.mark.parametrize("kind", [Scaffold, ScaffoldUp])
def test_weighted_by_examples(tmp_path, kind):
    parties = [("q", Data(*quadratic_data(1, 1, 3))), ("q", Data(*quadratic_data(2, -1, 1)))]
    world = World(tmp_path, {"q": Quadratic}, parties, classes=2)
    state = world.run(kind(TWO_STEPS, weighted=True))[-1]
    assert numbers(state) == pytest.approx(((3 * 0.19 - 0.36) / 4, (-0.95 + 1.8) / 2), abs=1e-12)


@pytest.mark.parametrize("kind", [Scaffold, ScaffoldUp])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("drawn", [["c0", "c1", "c2"], ["c0", "c2", "c2"], ["c1", "c1", "c1"]])
def test_c_stays_the_mean_of_all_variates(tmp_path, drawn, weighted, kind):
    """Whoever takes part, weighted or not, drawn twice or not; who was never asked has 0."""
    parties = [("q", Data(*quadratic_data(a, b, n))) for a, b, n in ((1, 1, 3), (2, -1, 1), (1, 2, 5))]
    world = World(tmp_path, {"q": Quadratic}, parties, classes=2)

    def sample():
        world.fed.copies = Counter(drawn)
        return sorted(set(drawn))

    world.fed.sample = sample
    state = world.run(kind(TWO_STEPS, weighted=weighted), rounds=3)[-1]
    mine = [kept_by(world.fed, k).get("control", {"x": torch.zeros(1)}) for k in world.fed.clients]
    kept = [c["x"].item() for c in mine]
    assert numbers(state)[1] == pytest.approx(sum(kept) / 3, abs=1e-12)


def test_the_length_of_c_is_noted(tmp_path):
    world = quadratics(tmp_path)
    state = world.run(Scaffold(TWO_STEPS))[-1]
    (event,) = world.events("variates")
    assert event == {"kind": "variates", "architecture": "q", "norm": pytest.approx(abs(numbers(state)[1]))}


@pytest.mark.parametrize("kind", [Scaffold, ScaffoldUp])
def test_no_step_leaves_the_control_variate(tmp_path, kind):
    world = quadratics(tmp_path)
    method = kind(TWO_STEPS)
    one = world.run(method)[-1]
    before = controls(world)
    world.fed.begin(1)
    idle = kind(Local(steps=0))
    two = idle.round(one, world.fed, world.server)
    assert numbers(two) == numbers(one)
    assert controls(world) == before


def test_a_client_that_blows_up_does_not_spoil_its_control_variate(tmp_path):
    world = quadratics(tmp_path)
    method = Scaffold(TWO_STEPS)
    state = world.run(method)[-1]
    before = controls(world)
    world.data["c0"] = Data(*quadratic_data(float("nan"), 1))
    world.fed.begin(1)
    state = method.round(state, world.fed, world.server)
    assert controls(world)[0] == before[0]
    assert all(torch.isfinite(torch.tensor(numbers(state))))


def test_derived_and_explicit_control_variates_agree_on_networks(tmp_path):
    def end(kind):
        builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
        parties = [(P, Data(*images(n, n))) for n, P in ((9, "c"), (14, "m"), (20, "c"), (6, "m"))]
        world = World(tmp_path / kind.__name__, builders, parties, fraction=0.75)
        return world.run(kind(Local(epochs=2, batch=8, lr=0.05)), rounds=3)[-1]

    a, b = end(Scaffold), end(ScaffoldUp)
    torch.testing.assert_close(a.weights, b.weights, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(a.control, b.control, atol=1e-4, rtol=1e-3)
    assert a.clients == {"c": 2, "m": 2}


def test_wire_sizes_are_those_of_the_paper(tmp_path):
    """Two models down and two up (2.0 times FedAvg), or two down and one up (1.5 times)."""
    model = mlp(0)
    d = sum(p.numel() for p in model.parameters())
    for kind, up in ((Scaffold, 2 * d), (ScaffoldUp, d)):
        world = World(tmp_path / kind.__name__, {"m": lambda: mlp(0)}, [("m", Data(*images(8)))])
        world.run(kind())
        (down,), (back,) = world.fed.down.values(), world.fed.up.values()
        assert down.floats == 2 * d
        assert back.floats == up


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"local": Local(momentum=0.9)}, "momentum"),
        ({"local": Local(optimizer="adam")}, "SGD"),
        ({"server_lr": 0.0}, "server_lr"),
    ],
)
def test_scaffold_refuses(settings, word):
    with pytest.raises(ConfigError, match=word):
        Scaffold(**settings)


def test_the_server_derives_changes_with_option_two_only():
    with pytest.raises(ConfigError, match="option = 'I': the server can derive"):
        ScaffoldUp(option="I")
    with pytest.raises(ConfigError, match=r"derive_dc = true: this setting is now another method.*'scaffold-up'"):
        load_config({"method": {"name": "scaffold", "derive_dc": True}})


def test_momentum_is_possible_when_asked_for(tmp_path):
    world = quadratics(tmp_path)
    state = world.run(Scaffold(Local(steps=2, lr=0.1, momentum=0.9), allow_momentum=True))[-1]
    assert numbers(state)[0] != pytest.approx(-0.085)
