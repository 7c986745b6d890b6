"""A minibatch in several pieces is the minibatch: also where pieces are of unequal size."""

import pytest
import torch
from torch.nn.functional import cross_entropy as reference

from solera.parts.objectives import cross_entropy, in_pieces, proximal
from toys import images, mlp


@pytest.mark.parametrize(("n", "pieces"), [(7, 3), (10, 4), (5, 2), (3, 3), (8, 1)])
def test_value_and_gradient_are_those_of_the_whole_minibatch(n, pieces):
    x, y = images(n)
    model = mlp(0)
    expected = reference(model(x), y)
    wanted = torch.autograd.grad(2 * expected, list(model.parameters()))
    found = in_pieces(cross_entropy, pieces)(model, x, y)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-6)
    (2 * found).backward()
    for p, g in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)


def test_a_pull_towards_received_weights_counts_once():
    x, y = images(7)
    model, received = mlp(0), {n: torch.zeros_like(p) for n, p in mlp(0).named_parameters()}
    whole = reference(model(x), y) + 0.3 / 2 * sum(p.square().sum() for p in model.parameters())
    found = in_pieces(proximal(0.3, received), 3)(model, x, y)
    assert found.item() == pytest.approx(whole.item(), rel=1e-5)
