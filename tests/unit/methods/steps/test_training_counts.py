"""Label counts: what clients tell, and who is not believed."""

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.training import CountedUpdate, label_counts, train_and_count, usable_counts
from solera.train.fitting import Local
from toys import World, images, mlp, replies_of


@pytest.fixture
def world(tmp_path) -> World:
    labels = [[0, 0, 3], [1, 1, 1], [2]]
    parties = [("m", Data(images(len(y))[0], torch.tensor(y))) for y in labels]
    world = World(tmp_path, {"m": lambda: mlp(1)}, parties)
    world.fed.begin(0)
    return world


def test_counts_are_of_each_label_of_the_task(world):
    assert label_counts(world.client("c0", 0, {})).tolist() == [2, 0, 0, 1]
    assert label_counts(world.client("c2", 0, {})).tolist() == [0, 0, 1, 0]


def test_counts_go_up_only_where_they_are_asked_for(world):
    how = {"weights": world.server.init("m"), "local": Local(steps=0)}
    told = train_and_count(world.client("c0", 0, {}), classes=4, **how)
    silent = train_and_count(world.client("c0", 0, {}), classes=None, **how)
    assert told.counts.tolist() == [2, 0, 0, 1]
    assert silent.counts is None
    assert all(torch.equal(told.weights[n], t) for n, t in how["weights"].items())


@pytest.mark.parametrize(
    "lie",
    [[3, 0, 0, 1], [2, 0, 0, 0], [-1, 4, 0, 0], None, [2**63 - 1, 2**63 - 1, 5, 0]],
    ids=str,
)
def test_counts_that_cannot_be_are_rejected(world, lie):
    """c0 registered with three examples. The last ones sum to three as well, where integers wrap around."""
    said = {"c0": None if lie is None else torch.tensor(lie), "c1": torch.tensor([0, 3, 0, 0])}
    x = replies_of({k: CountedUpdate(counts, {}) for k, counts in said.items()})
    assert list(usable_counts(x, {}, world.fed, world.server)) == ["c1"]
    assert list(x) == ["c1"]
    assert "label counts" in x.failures["c0"]


def test_counts_known_from_before_stand(world):
    x = replies_of({"c2": CountedUpdate(None, {})})
    known = {"c2": torch.tensor([0, 0, 1, 0])}
    assert usable_counts(x, known, world.fed, world.server)["c2"].tolist() == [0, 0, 1, 0]
