"""`local_update`, the client's half of most methods: numbers worked out by hand, and plain torch."""

import pytest
import torch

import by_hand
from solera.core.task import Data
from solera.methods.steps.training import local_update
from solera.train.fitting import Diverged, Local
from toys import Conv, Quadratic, World, images, quadratic_data, same_bits


def trained(world: World, local: Local, mu: float = 0.0) -> dict[str, torch.Tensor]:
    client, (A,) = world.client("c0", 7, {}), world.server.architectures
    sent = world.server.init(A)
    kept = {n: t.clone() for n, t in sent.items()}
    update = local_update(client, weights=sent, local=local, mu=mu)
    assert same_bits(sent, kept)  # what was received stays as it is
    assert client.state == {}
    return update.weights


def quadratic(tmp, a: float, b: float) -> World:
    return World(tmp, {"q": Quadratic}, [("q", Data(*quadratic_data(a, b)))], classes=2)


@pytest.mark.parametrize(
    ("steps", "mu", "expected"),
    [
        (0, 0.0, 0.0),
        (1, 0.0, 0.2),  # x <- x - 0.1 a (x - b) with a = 2, b = 1
        (2, 0.0, 0.36),
        (1, 1.0, 0.2),  # the pull is towards where it started: none in the first step
        (2, 1.0, 0.34),  # 0.2 - 0.1 (2 (0.2 - 1) + 0.2)
    ],
)
def test_steps_on_a_parabola(tmp_path, steps, mu, expected):
    found = trained(quadratic(tmp_path, 2.0, 1.0), Local(steps=steps, lr=0.1), mu)
    assert found["x"].item() == pytest.approx(expected, abs=1e-12)


def test_it_is_sgd_on_the_clients_own_data(tmp_path):
    x, y = images(21, seed=3)
    world = World(tmp_path, {"c": lambda: Conv(0)}, [("c", Data(x, y))])
    found = trained(world, Local(epochs=2, batch=8, lr=0.05))
    model = world.server.model("c", world.server.init("c"))
    by_hand.train(model, x, y, epochs=2, batch=8, lr=0.05, seed=7)
    assert by_hand.close(found, model.state_dict())
    assert not by_hand.close(found, world.server.init("c"))


def test_nothing_is_sent_of_a_training_that_blows_up(tmp_path):
    world = quadratic(tmp_path, 2.0, 1.0)
    with pytest.raises(Diverged):
        trained(world, Local(steps=400, lr=100.0))


def test_the_federation_drops_and_names_that_client(tmp_path):
    parties = [("q", Data(*quadratic_data(a, 1.0))) for a in (2.0, 2e200)]
    world = World(tmp_path, {"q": Quadratic}, parties, classes=2)
    replies = world.fed.map(
        local_update, ["c0", "c1"], weights=world.server.init("q"), local=Local(steps=3, lr=0.1), mu=0.0
    )
    assert list(replies) == ["c0"]
    assert "training diverged" in replies.failures["c1"]
