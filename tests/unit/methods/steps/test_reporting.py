"""What is told about teachers: how sure each is, and how often it dissents, as numbers worked out by hand."""

import math

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.reporting import NOTED_SAMPLES, note_teachers, report_teachers
from solera.methods.steps.training import Update
from toys import Constant, World, quadratic_data, replies_of


@pytest.fixture
def world(tmp_path) -> World:
    parties = [("a", Data(*quadratic_data(1, 1)))] * 3
    public = torch.zeros(300, 1, dtype=torch.float64)
    world = World(tmp_path, {"a": lambda: Constant(0.0, 0.0)}, parties, classes=2, public=public)
    world.fed.begin(0)
    return world


def says(p: float) -> Constant:
    """A model that gives class 0 the probability p."""
    return Constant(math.log(p), math.log(1 - p))


def test_confidence_is_the_share_in_the_variances_and_dissent_is_counted(world):
    """Variances of (p, 1 - p): (p - 1/2)^2, here 0.16, 0.04 and 0.01. The last teacher says the other class."""
    note_teachers({"c0": says(0.9), "c1": says(0.7), "c2": says(0.4)}, torch.arange(4), world.fed, world.server)
    (event,) = world.events("teachers")
    assert event["clients"] == ["c0", "c1", "c2"]
    assert event["confidence"] == [round(v / 0.21, 4) for v in (0.16, 0.04, 0.01)]
    assert event["agrees"] == [1.0, 1.0, 0.0]
    assert (event["dissenting"], event["unanimous"], event["samples"]) == (0.3333, 0.0, 4)


def test_a_client_drawn_twice_counts_twice(world):
    world.fed.copies.update({"c0": 1, "c2": 3})
    note_teachers({"c0": says(0.9), "c2": says(0.4)}, torch.arange(4), world.fed, world.server)
    (event,) = world.events("teachers")
    assert event["confidence"] == [round(0.16 / 0.19, 4), round(0.03 / 0.19, 4)]
    assert event["dissenting"] == 0.75


def test_some_samples_are_enough_and_none_tell_nothing(world):
    note_teachers({"c0": says(0.9)}, torch.arange(300), world.fed, world.server)
    assert world.events("teachers")[0]["samples"] == NOTED_SAMPLES
    world.server.begin()
    note_teachers({"c0": says(0.9)}, torch.arange(0), world.fed, world.server)
    assert world.server.events == []


def test_the_teachers_are_measured_together_as_they_teach(world):
    world.fed.copies.update({"c0": 2, "c1": 1})
    models = {"c0": says(0.9), "c1": says(0.7)}
    x = replies_of({k: Update(m.state_dict()) for k, m in models.items()})
    report_teachers(models, x, "avg_probs", torch.arange(4), world.fed, world.server)
    (reported,) = world.server.ensembles
    assert (reported.name, reported.rule, reported.weights) == ("teachers", "avg_probs", [2.0, 1.0])
    assert reported.names == ["c0", "c1"]
    assert reported.members[1][1]["logits"][0].item() == pytest.approx(math.log(0.7))
    assert world.events("teachers")
