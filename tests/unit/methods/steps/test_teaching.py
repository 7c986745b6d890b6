"""Students of earlier rounds as teachers: who is kept, for how long, and under which name."""

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.teaching import Lesson, Memory, Several, Teaching, current
from solera.train.distill import Distill
from toys import Conv, World, images


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path, {"c": lambda: Conv(0)}, [("c", Data(*images(6)))] * 2, public=images(8, seed=9)[0])


def lesson(world: World) -> Lesson:
    return Lesson(world.fed, world.server, Distill(), torch.arange(8), world.server.model, "avg_logits", False)


def kept_through(rounds: int, teaching: Teaching) -> dict[str, int]:
    """Which round's student each name of the state holds, after so many rounds that replace the weights of "c"."""
    state = {"c": {"made": torch.tensor(-1)}}  # what the first round starts with
    for t in range(rounds):
        state = {"c": {"made": torch.tensor(t)}} | teaching.keep(state)
    return {name: int(w["made"]) for name, w in state.items()}


def test_each_round_makes_what_is_kept_a_round_older_and_forgets_the_oldest():
    one, two, three = (Memory(rounds=n) for n in (1, 2, 3))
    assert kept_through(3, Teaching()) == kept_through(3, one) == {"c": 2}  # the last students are the global models
    assert kept_through(3, two) == kept_through(3, Several(parts=(Teaching(), two))) == {"c": 2, "c@1": 1}
    assert kept_through(4, three) == {"c": 3, "c@1": 2, "c@2": 1}


def test_the_global_models_are_those_without_an_age():
    M = {"c": {"w": torch.zeros(1)}, "d": {"w": torch.ones(1)}, "c@1": {"w": torch.ones(1)}}
    assert list(current(M)) == ["c", "d"]


@pytest.mark.parametrize(("round_", "taught"), [(0, []), (1, ["student-c"]), (2, ["student-c", "student-c@1"])])
def test_students_teach_from_the_second_round_on_as_many_as_there_were_rounds(world, round_, taught):
    world.fed.begin(round_)
    M = {"c": world.server.init("c", 1), "c@1": world.server.init("c", 2)}
    found = Memory(rounds=2).join({}, M, lesson(world))
    assert list(found) == taught
    for name in taught:
        made = M[name.removeprefix("student-")]
        assert all(torch.equal(w, made[of]) for of, w in found[name].weights.items())


def test_without_memory_the_teachers_are_the_clients_alone(world):
    world.fed.begin(3)
    own: dict = {}
    assert Teaching().join(own, {"c": world.server.init("c", 1)}, lesson(world)) is own
