"""Representations and MOON's term on them: the oracle MOON-1, frozen teachers, and no surprise at its edges."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solera.core.tensors import weights_of
from solera.methods.moon import contrast, contrastive
from solera.models import wrap
from solera.train.norms import has_batchnorm, train_mode
from solera.train.teachers import by_position, representations_of
from toys import Conv, images, same_bits


def split(seed: int = 0, head: str = "projection", **options) -> nn.Module:
    torch.manual_seed(seed)
    return wrap(Conv(seed, **options), classifier="8", head=head)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_moon_1():
    value = contrast(row(1, 0), row(1, 1), [row(0, 1)], 0.5)
    assert value.item() == pytest.approx(0.2176217216, abs=5e-11)


def test_moon_1_equal_models_give_log_2():
    z = row(0.3, -2)
    assert contrast(z, row(4, 1), [row(4, 1)], 0.5).item() == pytest.approx(math.log(2), abs=1e-12)


def test_several_previous_models_share_the_denominator():
    near, far = row(1, 1), [row(0, 1), row(-1, 0)]
    e = [math.exp(cos / 0.5) for cos in (math.sqrt(0.5), 0, -1)]
    assert contrast(row(1, 0), near, far, 0.5).item() == pytest.approx(-math.log(e[0] / sum(e)), abs=1e-12)


def test_the_term_is_a_mean_over_samples_and_ignores_lengths():
    a, b = row(1, 0), row(2, 2)
    both = contrast(torch.cat([a, b]), row(1, 1).expand(2, 2), [row(0, 1).expand(2, 2)], 0.5)
    single = [contrast(z, row(1, 1), [row(0, 1)], 0.5) for z in (a, b)]
    assert both.item() == pytest.approx(sum(s.item() for s in single) / 2, abs=1e-12)
    assert contrast(7 * a, 3 * row(1, 1), [row(0, 9)], 0.5).item() == pytest.approx(0.2176217216, abs=5e-11)


def test_its_gradient_leads_to_the_global_model_and_away_from_the_previous_one():
    z = row(1, 0).requires_grad_()
    contrast(z, row(1, 1), [row(1, -1)], 0.5).backward()
    assert (z.grad @ row(1, 1).T).item() < 0 < (z.grad @ row(1, -1).T).item()


def test_a_representation_of_zeros_does_no_harm():
    """A ReLU can switch every unit off for a sample."""
    before = torch.full((1, 4), -1.0, requires_grad=True)
    loss = contrast(before.relu(), torch.ones(1, 4), [torch.ones(1, 4)], 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert torch.equal(before.grad, torch.zeros(1, 4))


def test_representations_are_the_inputs_of_the_head_and_teachers_stay_as_they_are():
    """Known mistake: a frozen model left in training mode. Its statistics drift and its answer depends on the batch."""
    model = split(dropout=0.5)
    assert has_batchnorm(model)
    train_mode(model)
    before, x = weights_of(model), images(50)[0]
    z = representations_of(model, x)
    assert same_bits(weights_of(model), before)
    assert all(m.training for m in model.modules())
    assert not z.requires_grad
    assert torch.equal(representations_of(model, x[:7]), z[:7])
    model.eval()
    assert torch.allclose(model.head(z), model(x), atol=1e-6)


@pytest.mark.parametrize("head", ["plain", "shared", "projection"])
def test_the_objective_adds_the_term_to_the_cross_entropy(head):
    model, other = split(0, head), split(1, head)
    x, y = images(12)
    frozen = [representations_of(model, x), representations_of(other, x)]
    kept = by_position(lambda _: tuple(frozen), x)
    some = torch.tensor([7, 2, 9])
    model.eval()
    plain = F.cross_entropy(model(x[some]), y[some])
    assert torch.equal(contrastive(0.0, 0.5, y, kept)(model, x[some], some), plain)
    term = contrast(model.represent(x[some]), frozen[0][some], [frozen[1][some]], 0.5)
    full = contrastive(3.0, 0.5, y, kept)(model, x[some], some)
    assert full.item() == pytest.approx((plain + 3 * term).item(), rel=1e-6)
