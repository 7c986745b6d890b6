"""update_clip: parameters and BatchNorm's statistics are on different scales, so each is measured by itself."""

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.screen import Robust
from solera.methods.steps.training import Update
from toys import Conv, World, images, replies_of

BIAS, MEAN = "8.bias", "1.running_mean"  # four parameters, six statistics


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_jump_of_the_statistics_does_not_shorten_the_parameters_change(tmp_path, factor):
    """Changes of the bias by (2, 2, 8), of the mean by (1, 60, 1): the medians are 2 and 1."""
    world = World(tmp_path, {"c": lambda: Conv(0)}, [("c", Data(*images(4, s))) for s in range(3)])
    start = world.server.init("c")
    unit = {BIAS: torch.tensor([1.0, 0, 0, 0]), MEAN: torch.tensor([0, 0, 1.0, 0, 0, 0])}
    moves = {"c0": (2.0, 1.0), "c1": (2.0, 60.0), "c2": (8.0, 1.0)}
    uploads = {
        k: Update(start | {BIAS: start[BIAS] + a * unit[BIAS], MEAN: start[MEAN] + b * unit[MEAN]})
        for k, (a, b) in moves.items()
    }
    found = Robust(update_clip=factor).uploads(replies_of(uploads), lambda k: start, world.fed, world.server)
    wanted = {"c0": (2.0, 1.0), "c1": (2.0, factor), "c2": (2 * factor, 1.0)}
    for k, (a, b) in wanted.items():
        assert (found[k].weights[BIAS] - start[BIAS]).norm().item() == pytest.approx(a, rel=1e-5)
        assert (found[k].weights[MEAN] - start[MEAN]).norm().item() == pytest.approx(b, rel=1e-5)
    assert [e["client"] for e in world.events("update_clipped")] == ["c1", "c2"]
