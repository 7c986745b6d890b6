"""The shared head: which tensors of a model belong to it."""

import torch

from solera.methods.steps.training import head_of


def test_the_head_is_all_that_is_named_so():
    names = ["body.0.weight", "head.2.weight", "head.2.bias", "header.weight", "body.head.weight"]
    weights = {name: torch.tensor(float(i)) for i, name in enumerate(names)}
    assert {n: t.item() for n, t in head_of(weights).items()} == {"head.2.weight": 1.0, "head.2.bias": 2.0}
