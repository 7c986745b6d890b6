"""The matrix of knowledge coefficients: which entries belong to whom, as small matrices written out."""

from types import SimpleNamespace

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.methods.steps.coefficients import block, note, shares, uniform_matrix, with_block, with_columns
from toys import World, images, mlp

C = torch.arange(9, dtype=torch.float64).view(3, 3)  # row: giver, column: receiver


@pytest.fixture
def world(tmp_path) -> World:
    parties = [("m", Data(*images(n))) for n in (10, 30, 60)]
    return World(tmp_path, {"m": lambda: mlp(1)}, parties)


def test_it_starts_uniform(world):
    assert uniform_matrix(world.fed).tolist() == [[1 / 3] * 3] * 3


def test_a_matrix_that_no_checkpoint_could_hold_is_refused():
    with pytest.raises(ConfigError, match="at most 5000 clients"):
        uniform_matrix(SimpleNamespace(clients=range(5001)))


def test_a_block_is_the_rows_and_columns_of_its_clients(world):
    assert block(C, ["c0", "c2"], world.fed).tolist() == [[0, 2], [6, 8]]
    assert block(C, ["c2", "c0"], world.fed).tolist() == [[8, 6], [2, 0]]  # in the order given


def test_a_new_block_leaves_the_rest_and_the_old_matrix(world):
    before = C.clone()
    new = with_block(C, ["c0", "c2"], torch.tensor([[10.0, 11.0], [12.0, 13.0]]).double(), world.fed)
    assert new.tolist() == [[10, 1, 11], [3, 4, 5], [12, 7, 13]]
    assert torch.equal(C, before)


def test_new_columns_forget_those_who_did_not_give(world):
    new = with_columns(C, ["c0", "c2"], torch.tensor([[10.0, 11.0], [12.0, 13.0]]).double(), world.fed)
    assert new.tolist() == [[10, 1, 11], [0, 4, 0], [12, 7, 13]]


def test_shares_are_of_the_examples_of_those_present(world):
    assert shares(["c0", "c1"], world.fed).tolist() == [0.25, 0.75]
    assert shares([], world.fed).tolist() == []


def test_the_matrix_is_noted_with_its_clients(world):
    note(C / 7, world.fed, world.server)
    (event,) = world.events("coefficients")
    assert event["clients"] == ["c0", "c1", "c2"]
    assert event["matrix"][1] == [0.428571, 0.571429, 0.714286]
