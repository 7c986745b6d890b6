"""Clients whose weights have a few bits: what they send is read as numbers, and what is none is rejected."""

import pytest
import torch

from solera.core.task import Data
from solera.methods.steps.low_bit import LowBitUpload, PackedUpdate, coarse_names, lowbit_update, packed_sizes
from solera.train.fitting import Local
from toys import Conv, World, images, mlp, replies_of

BIT = LowBitUpload(bits=1)


@pytest.fixture
def world(tmp_path) -> World:
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    world = World(tmp_path, builders, [(A, Data(*images(6, seed=i))) for i, A in enumerate("cm")])
    world.fed.begin(0)
    return world


def test_what_arrives_has_one_size_a_filter_and_the_signs_of_its_weights(world):
    M = {A: world.server.init(A) for A in "cm"}
    x = BIT.ask(lambda k: M[world.fed.architecture(k)], ["c0", "c1"], Local(steps=0), 0.0, world.fed, world.server)
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
    how = {"weights": M["m"], "local": Local(steps=0), "mu": 0.0, "quantise": BIT.plain, "sizes": sizes}
    fine = lowbit_update(world.client("c1", 0, {}), **how)
    assert {name: list(t.shape) for name, t in fine.codes.items()} == sizes.codes
    assert {name: list(t.shape) for name, t in fine.scales.items()} == sizes.scales
    assert list(fine.rest) == sizes.rest
    wrong = PackedUpdate({}, fine.scales, fine.rest)
    world.fed.map = lambda *args, **payload: replies_of({"c0": wrong, "c1": fine})
    sent = lambda k: M[world.fed.architecture(k)]  # noqa: E731
    found = BIT.ask(sent, ["c0", "c1"], Local(steps=0), 0.0, world.fed, world.server)
    assert list(found) == ["c1"]
    assert list(found.failures) == ["c0"]
