"""Averages of uploads, as numbers worked out by hand: a wrong one fails here first."""

from collections import Counter

import pytest
import torch

from solera.core.federation import Federation
from solera.core.task import Data
from solera.methods.fedavg import FedAvg
from solera.methods.steps.training import Update, average_of, local_update, models_of
from solera.train.fitting import Local
from toys import Quadratic, World, quadratic_data, replies_of

UPLOADS, SIZES = (1.0, 2.0, 4.0), (1, 2, 5)


def number(x: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([x], dtype=torch.float64)}


@pytest.fixture
def world(tmp_path) -> World:
    """Clients of "q" with 1, 2 and 5 examples, and one of "r" with 4; the examples of a client are at its optimum b."""
    optima = [("q", 1.0, 1), ("q", 2.0, 2), ("q", 4.0, 5), ("r", -3.0, 4)]
    parties = [(A, Data(*quadratic_data(1.0, b, n))) for A, b, n in optima]
    world = World(tmp_path, {"q": Quadratic, "r": Quadratic}, parties, classes=2)
    world.fed.begin(0)
    return world


def average(how: str, fed: Federation, clients: int = 3) -> float:
    x = replies_of({f"c{i}": Update(number(u)) for i, u in enumerate(UPLOADS)})
    return average_of(how, x, list(x)[:clients], fed)["x"].item()


@pytest.mark.parametrize(
    ("how", "expected"),
    [("weighted", (1 * 1 + 2 * 2 + 5 * 4) / 8), ("uniform", 7 / 3), ("median", 2.0)],
)
def test_average_of_uploads(world, how, expected):
    assert average(how, world.fed) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("weighted", (3 * 1 + 2 * 2 + 5 * 4) / 10), ("uniform", (3 + 2 + 4) / 5), ("median", 1.0)],
)
def test_a_client_drawn_three_times_counts_three_times(world, how, expected):
    world.fed.copies = Counter({"c0": 3, "c1": 1, "c2": 1})
    assert average(how, world.fed) == pytest.approx(expected, abs=1e-15)


def test_only_the_clients_that_are_named_are_averaged(world):
    assert average("weighted", world.fed, clients=2) == pytest.approx((1 + 2 * 2) / 3, abs=1e-15)
    assert average("uniform", world.fed, clients=2) == pytest.approx(1.5, abs=1e-15)


@pytest.mark.parametrize(("how", "expected"), [("weighted", 25 / 8), ("uniform", 7 / 3)])
def test_a_round_of_averaging_moves_each_architecture_to_the_mean_of_its_clients(world, how, expected):
    """One step of length 1 takes every client to its own optimum."""
    x = {"q": number(0.0), "r": number(0.0)}
    method = FedAvg(Local(steps=1, lr=1.0), how)
    found = method.mean(local_update, x, world.fed.sample(), world.fed, mu=0.0)
    assert found["q"].weights["x"].item() == pytest.approx(expected, abs=1e-12)
    assert found["r"].weights["x"].item() == pytest.approx(-3.0, abs=1e-12)
    assert found.counts == {"q": 3, "r": 1}


def test_the_proximal_term_reaches_the_clients(world):
    """Two steps of 0.1 towards b, pulled back to 0 by mu = 1 in the second: 0.1 b, then 0.18 b."""
    x = {"q": number(0.0), "r": number(0.0)}
    found = FedAvg(Local(steps=2, lr=0.1), "uniform").mean(local_update, x, ["c1", "c3"], world.fed, mu=1.0)
    assert found["q"].weights["x"].item() == pytest.approx(0.18 * 2, abs=1e-12)
    assert found["r"].weights["x"].item() == pytest.approx(0.18 * -3, abs=1e-12)


def test_models_to_evaluate_have_their_architecture_and_weights():
    weights = {"q": number(1.0), "r": number(2.0)}
    assert {A: (m.architecture, m.weights["x"].item()) for A, m in models_of(weights).items()} == {
        "q": ("q", 1.0),
        "r": ("r", 2.0),
    }
