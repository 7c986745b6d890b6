"""The losses of a training, read at every step as on the CPU, and every third as on an accelerator."""

import dataclasses
import math

import pytest
import torch

from solera.devices import TRICKS
from solera.parts.losses import Losses, Scaler, backward, finite_loss
from solera.parts.optimizers import Adam, Sgd
from solera.tensors import CPU


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


def test_gradients_are_divided_by_the_scale_and_an_overflow_halves_it():
    """The factors are torch's GradScaler's, half after an overflow, but the first, which is 1,024."""
    scaler, p = Scaler(CPU), torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1024.0, 2048.0])
    assert scaler.unscale([p], 0.5).item() == 0
    assert p.grad.tolist() == [1.0, 2.0]
    assert scaler.scale.item() == 1024
    p.grad = torch.tensor([math.inf, 1.0])
    assert scaler.unscale([p], 0.5).item() == 1
    assert scaler.scale.item() == 512
    p.grad = torch.tensor([512.0, 0.0])
    assert scaler.unscale([p], 0.25).item() == 0  # the mark of the step before is gone
    assert p.grad.tolist() == [1.0, 0.0]
    assert scaler.skipped() == (1, 0.75, False)


GRADIENTS = [(3.0, 4.0), (math.inf, 0.0), (1.0, 1.0), (0.0, math.nan), (2.0, 0.5)]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_steps_are_those_of_torchs_scaler(kind):
    """Weights and scale after each step, against torch.amp.GradScaler with torch's own optimizer."""
    ours, theirs = (torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    reference = torch.amp.GradScaler("cpu", init_scale=Scaler.BEGIN)
    optimizers = {
        "sgd": (Sgd([ours], 0.1, momentum=0.9), torch.optim.SGD([theirs], 0.1, momentum=0.9, fused=True)),
        "adam": (Adam([ours], 0.1), torch.optim.Adam([theirs], 0.1, fused=True)),
    }
    optimizer, other = optimizers[kind]
    scaler = Scaler(CPU)
    for gradient in GRADIENTS:
        g = torch.tensor(gradient)
        backward((ours * g).sum(), optimizer, scaler)
        optimizer.step()
        other.zero_grad()
        reference.scale((theirs * g).sum()).backward()
        reference.step(other)
        reference.update()
        assert torch.equal(ours, theirs)
        assert scaler.scale.item() == reference.get_scale()
    assert scaler.skipped().steps == 2


def test_a_training_of_which_nothing_is_left_is_told_from_one_that_loses_steps():
    scaler, p = Scaler(CPU), torch.nn.Parameter(torch.zeros(1))
    assert scaler.skipped() == (0, 0.0, False)  # no step at all

    def step(gradient):
        p.grad = torch.tensor([gradient])
        scaler.unscale([p], 1.0)

    step(math.inf)
    assert scaler.skipped() == (1, 0.0, True)
    step(1.0)
    assert scaler.skipped() == (1, 1.0, False)
    for _ in range(9):
        step(math.nan)
    assert scaler.scale.item() == 1.0
    assert scaler.skipped() == (10, 1.0, False)
    step(math.nan)  # a gradient of scale 1 above the largest number of fp16
    assert scaler.skipped() == (11, 1.0, True)


def test_gradients_of_a_generator_alone():
    one, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    backward((one * other).sum(), Sgd([one], 0.1), None, [one])
    assert one.grad is not None
    assert other.grad is None


def test_only_half_precision_on_a_device_needs_a_scale():
    assert Scaler.of(CPU) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert Scaler.of(CPU) is None
