"""Teachers drawn around the clients' models."""

import re

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.teaching import Lesson, Memory, Several, Swag, Teaching
from solera.train.distill import Distill
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


def lesson(world: World, d: torch.Tensor = D, reports: bool = False) -> Lesson:
    return Lesson(world.fed, world.server, Distill(), d, world.server.model, "avg_logits", reports)


def test_by_default_the_clients_teach_alone(world):
    own = teachers(world)
    assert Teaching().join(own, {}, lesson(world, reports=True)) is own
    assert world.server.ensembles == []


@pytest.mark.parametrize("include", [True, False])
def test_drawn_models_stand_beside_the_clients_or_in_their_place(world, include):
    own, names = teachers(world), [*(["c0", "c1", "c2"] if include else []), "swag-0", "swag-1"]
    found = Swag(samples=2, include_clients=include).join(own, {}, lesson(world, reports=True))
    assert list(found) == names
    (reported,) = world.server.ensembles
    assert (reported.name, reported.rule, len(reported.members)) == ("swag", "avg_logits", len(names))


def test_at_scale_zero_the_mean_of_the_clients_is_drawn(world):
    own = teachers(world)
    found = Swag(samples=1, scale=0.0).join(own, {}, lesson(world))["swag-0"].weights
    mean = sum(m.weights["8.weight"].double() for m in own.values()) / 3
    assert torch.allclose(found["8.weight"].double(), mean, atol=1e-6)
    assert world.server.ensembles == []


def test_drawn_models_have_statistics_of_public_samples(world):
    found = Swag(samples=1, scale=0.0).join(teachers(world), {}, lesson(world))["swag-0"].weights
    with torch.no_grad():
        seen = torch.nn.functional.conv2d(images(40, seed=9)[0], found["0.weight"], found["0.bias"], padding=1)
    assert torch.allclose(found["1.running_mean"], seen.mean((0, 2, 3)), atol=1e-5)


def test_a_single_sample_gives_no_statistics(world):
    """It has no variance: the drawn model keeps the mean of the clients' statistics."""
    found = Swag(samples=1, scale=0.0).join(teachers(world), {}, lesson(world, D[:1]))["swag-0"].weights
    assert torch.equal(found["1.running_var"], torch.ones(6))


def test_several_architectures_are_refused(world):
    assert list(Swag().fits(world.server)) == []
    world.server.architectures = ["c", "m"]
    assert list(Memory().fits(world.server)) == []
    (found,) = Several(parts=(Memory(), Swag())).fits(world.server)
    assert re.match(r'parts\[1\].kind = "swag": .* the clients have c, m; leave it out', found)
