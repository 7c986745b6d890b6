"""The losses of a training, read at every step as on the CPU, and every third as on an accelerator."""

import dataclasses
import math

import pytest
import torch

from solera.core.tensors import CPU
from solera.place.placement import TRICKS
from solera.train.losses import Losses, Sgd, backward, finite_loss


def fine(loss):
    return loss <= 10


def losses(values, kept=0):
    """A training that goes on until it is told that it has diverged."""
    made = Losses(CPU, fine, kept)
    for i, value in enumerate(values):
        if not made.add(torch.tensor(float(value))):
            return made, i
    return made, None


@pytest.fixture
def rarely(monkeypatch):
    monkeypatch.setitem(TRICKS, "cpu", dataclasses.replace(TRICKS["cpu"], look_every=3))


def test_on_the_cpu_a_training_ends_at_the_very_step():
    made, ended = losses([1, 2, 11, 4])
    assert (ended, made.steps, made.worst, made.mean) == (2, 2, 11.0, 1.5)
    assert made.look()  # what was counted is fine


def test_on_an_accelerator_it_ends_at_the_next_look(rarely):
    made, ended = losses([1, 2, 3, 11, 4, 5, 6])
    assert (ended, made.steps) == (5, 6)
    assert math.isnan(made.worst)
    assert not made.look()


def test_a_bad_loss_after_the_last_look_is_seen_at_the_end(rarely):
    made, ended = losses([1, 2, 3, math.nan])
    assert ended is None
    assert not made.look()


@pytest.mark.parametrize("how", ["every step", "rarely"])
def test_means(how, request):
    if how == "rarely":
        request.getfixturevalue("rarely")
    made, _ = losses([1, 2, 3, 6], kept=2)
    assert (made.mean, made.recent) == (3.0, 4.5)
    empty, _ = losses([], kept=2)
    assert math.isnan(empty.mean)
    assert empty.recent is None
    assert empty.look()


def test_what_is_not_fine_has_no_part_in_the_recent_mean(rarely):
    made, _ = losses([1, 12], kept=2)
    assert made.recent == 1.0


@pytest.mark.parametrize(("loss", "expected"), [(0.0, True), (-3.0, True), (math.inf, False), (math.nan, False)])
def test_a_finite_loss(loss, expected):
    assert bool(finite_loss(loss)) is bool(finite_loss(torch.tensor(loss))) is expected


def test_gradients_of_a_generator_alone():
    one, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    backward((one * other).sum(), Sgd([one], 0.1), [one])
    assert one.grad is not None
    assert other.grad is None
