"""Teachers drawn around the clients' models."""

import re

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.swag import Swag, drawn_around, swag_problems
from solera.train.teachers import frozen
from toys import Conv, World, images

D = torch.arange(40)


@pytest.fixture
def world(tmp_path) -> World:
    world = World(tmp_path, {"c": lambda: Conv(0)}, [("c", Data(*images(6)))] * 3, public=images(40, seed=9)[0])
    world.fed.begin(0)
    return world


def teachers(world: World):
    members = [("c", world.server.init("c", i)) for i in range(3)]
    return dict(zip(world.fed.clients, frozen(members, world.server.model), strict=True))


def test_without_samples_the_clients_teach_alone(world):
    own = teachers(world)
    assert drawn_around(own, Swag(), D, world.fed, world.server, "avg_logits") is own
    assert world.server.ensembles == []


@pytest.mark.parametrize("include", [True, False])
def test_drawn_models_stand_beside_the_clients_or_in_their_place(world, include):
    own, names = teachers(world), [*(["c0", "c1", "c2"] if include else []), "swag-0", "swag-1"]
    found = drawn_around(own, Swag(samples=2, include_clients=include), D, world.fed, world.server, "avg_logits")
    assert list(found) == names
    (reported,) = world.server.ensembles
    assert (reported.name, reported.rule, len(reported.members)) == ("swag", "avg_logits", len(names))


def test_at_scale_zero_the_mean_of_the_clients_is_drawn(world):
    own = teachers(world)
    found = drawn_around(own, Swag(samples=1, scale=0.0), D, world.fed, world.server, None)["swag-0"].weights
    mean = sum(m.weights["8.weight"].double() for m in own.values()) / 3
    assert torch.allclose(found["8.weight"].double(), mean, atol=1e-6)
    assert world.server.ensembles == []


def test_drawn_models_have_statistics_of_public_samples(world):
    found = drawn_around(teachers(world), Swag(samples=1, scale=0.0), D, world.fed, world.server, None)[
        "swag-0"
    ].weights
    with torch.no_grad():
        seen = torch.nn.functional.conv2d(images(40, seed=9)[0], found["0.weight"], found["0.bias"], padding=1)
    assert torch.allclose(found["1.running_mean"], seen.mean((0, 2, 3)), atol=1e-5)


def test_a_single_sample_gives_no_statistics(world):
    """It has no variance: the drawn model keeps the mean of the clients' statistics."""
    cfg = Swag(samples=1, scale=0.0)
    found = drawn_around(teachers(world), cfg, D[:1], world.fed, world.server, None)["swag-0"].weights
    assert torch.equal(found["1.running_var"], torch.ones(6))


def test_several_architectures_are_refused(world):
    assert list(swag_problems("it", Swag(samples=2), world.server)) == []
    world.server.architectures = ["c", "m"]
    assert list(swag_problems("it", Swag(), world.server)) == []
    (found,) = swag_problems("it", Swag(samples=2), world.server)
    assert re.search("it: swag.samples = 2 .* the clients have c, m", found)
