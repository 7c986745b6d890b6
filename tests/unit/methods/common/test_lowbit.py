"""Clients whose weights have a few bits: what they send is read as numbers, and what is none is rejected."""

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.upload import PackedUpdate, lowbit_update, map_lowbit, unpacked
from solera.train.fitting import Local
from solera.train.lowbit import LowBit, coarse_names, packed_sizes
from toys import Conv, World, images, mlp, replies_of

BIT = LowBit(bits=1)


@pytest.fixture
def world(tmp_path) -> World:
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    world = World(tmp_path, builders, [(A, Data(*images(6, seed=i))) for i, A in enumerate("cm")])
    world.fed.begin(0)
    return world


def test_what_arrives_has_one_size_a_filter_and_the_signs_of_its_weights(world):
    M = {A: world.server.init(A) for A in "cm"}
    x = map_lowbit(["c0", "c1"], M, Local(steps=0), 0.0, BIT, world.fed, world.server)
    for k, A in (("c0", "c"), ("c1", "m")):
        for name, sent in M[A].items():
            got = x[k].weights[name]
            assert got.shape == sent.shape
            if name not in coarse_names(world.server.template(A), BIT):
                assert torch.equal(got, sent)
                continue
            sizes = got.flatten(1).abs()
            assert torch.allclose(sizes, sent.flatten(1).abs().mean(1, keepdim=True).expand_as(sizes), rtol=1e-4)
            assert torch.equal(got > 0, sent > 0)


def test_bits_that_do_not_fit_the_model_are_rejected(world):
    M = {A: world.server.init(A) for A in "cm"}
    sizes = packed_sizes(M["m"], coarse_names(world.server.template("m"), BIT), BIT.bits)
    how = {"weights": M["m"], "local": Local(steps=0), "mu": 0.0, "quantise": BIT, "sizes": sizes}
    fine = lowbit_update(world.client("c1", 0, {}), **how)
    assert {name: list(t.shape) for name, t in fine.codes.items()} == sizes.codes
    assert {name: list(t.shape) for name, t in fine.scales.items()} == sizes.scales
    assert list(fine.rest) == sizes.rest
    wrong = PackedUpdate({}, fine.scales, fine.rest)
    found = unpacked(replies_of({"c0": wrong, "c1": fine}), M, BIT, world.fed, world.server)
    assert list(found) == ["c1"]
    assert list(found.failures) == ["c0"]
