"""Drawn teachers and averaged students: the oracles FDF-5 and BE-1 to BE-6, and what cannot be otherwise."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from solera.core.tensors import weights_of
from solera.methods.framework.ensemble_trainers import (
    dirichlet,
    dirichlet_coefficients,
    gaussian,
    normalised_gaussian,
    sharpen,
    sharpened,
)
from solera.methods.steps.teaching import moments, swag
from solera.train.distill import Distill, distill
from solera.train.teachers import Ensemble
from toys import Constant, Conv, images, same_bits

MANY = 8000


def models(*rows) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor(row)} for row in rows]


FDF_1 = models((1.0, 2.0), (3.0, 6.0), (5.0, 1.0))  # of 10, 30 and 60 examples
FDF_5 = models((1.0, 0.0), (2.0, 1.0), (6.0, 2.0))


def stacked(samples) -> torch.Tensor:
    return torch.stack([s["w"] for s in samples])


# ---- FedBE's distributions -------------------------------------------------------------------------


def test_be_1_dirichlet_coefficients_have_the_known_moments():
    unit = models(*np.eye(4).tolist())  # a sample of these is its coefficients
    gamma = stacked(dirichlet(unit, [1.0] * 4, MANY, seed=0))
    assert gamma.mean(0).tolist() == pytest.approx([0.25] * 4, abs=0.005)
    covariance = torch.cov(gamma.T)
    assert covariance.diagonal().tolist() == pytest.approx([0.0375] * 4, abs=0.001)
    assert covariance[0, 1].item() == pytest.approx(-0.0125, abs=0.001)


def test_be_2_sizes_multiply_the_dirichlet_weights():
    found = dirichlet_coefficients([0.5, 0.3, 0.2], [10, 30, 60])
    assert found == pytest.approx([0.19230769, 0.34615385, 0.46153846], abs=5e-9)
    assert dirichlet_coefficients([0.5, 0.3, 0.2], [7, 7, 7]) == pytest.approx([0.5, 0.3, 0.2], abs=1e-15)


def test_be_3_gaussian_moments():
    mean, variance = moments(FDF_1, [10, 30, 60], ["w"])
    assert mean["w"].tolist() == pytest.approx([4, 2.6], abs=1e-12)
    assert variance["w"].tolist() == pytest.approx([1.8, 5.04], abs=1e-12)
    drawn = stacked(gaussian(FDF_1, [10, 30, 60], ["w"], MANY, seed=0))
    assert drawn.mean(0).tolist() == pytest.approx([4, 2.6], abs=0.06)
    assert drawn.var(0).tolist() == pytest.approx([1.8, 5.04], rel=0.04)
    assert abs(torch.corrcoef(drawn.T)[0, 1].item()) < 0.03  # independent, whatever the clients' covariance


def test_be_4_sharpening():
    mean = torch.tensor([[0.6, 0.4], [0.8, 0.2]], dtype=torch.float64).mean(0, keepdim=True)
    assert sharpen(mean, 0.5)[0].tolist() == pytest.approx([0.84482759, 0.15517241], abs=5e-9)
    assert sharpen(mean, 1.0)[0].tolist() == pytest.approx([0.7, 0.3], abs=1e-12)
    assert sharpen(torch.tensor([[1.0, 0.0]]), 0.5).tolist() == [[1.0, 0.0]]
    teacher = Ensemble([Constant(math.log(0.6), math.log(0.4)), Constant(math.log(0.8), math.log(0.2))], "avg_probs")
    p, h = sharpened(teacher, 0.5)(torch.zeros(3, 1))
    assert p[2].tolist() == pytest.approx([0.84482759, 0.15517241], abs=5e-9)
    assert h[2].item() == pytest.approx(-sum(q * math.log(q) for q in (0.84482759, 0.15517241)), abs=1e-7)


def test_dirichlet_samples_lie_between_the_clients_and_gaussian_ones_need_not():
    line = models((0.0,), (1.0,), (3.0,))
    inside = stacked(dirichlet(line, [1.0, 2.0, 3.0], 500, seed=1))
    assert inside.min().item() >= 0
    assert inside.max().item() <= 3
    outside = stacked(gaussian(line, [1.0, 2.0, 3.0], ["w"], 500, seed=1))
    assert outside.max().item() > 3


def test_dirichlet_combines_buffers_like_parameters():
    a, b = (
        {"w": torch.tensor([v]), "running_var": torch.tensor([v]), "count": torch.tensor(int(v))} for v in (1.0, 5.0)
    )
    for sample in dirichlet([a, b], [1.0, 1.0], 5, seed=0):
        assert torch.equal(sample["w"], sample["running_var"])
        assert sample["count"] == 5


def test_gaussian_and_swag_leave_buffers_at_their_mean():
    a, b = ({"w": torch.tensor([v]), "running_var": torch.tensor([v])} for v in (1.0, 5.0))
    for sample in [*gaussian([a, b], [1.0, 3.0], ["w"], 3, seed=0)]:
        assert sample["running_var"].tolist() == [4.0]
    for sample in swag([a, b], ["w"], 3, seed=0):
        assert sample["running_var"].tolist() == [3.0]


def test_normalised_updates_are_drawn_around_their_mean_direction():
    sent = {"w": torch.zeros(2)}
    moved = models((3.0, 0.0), (0.0, 1.0))  # directions (1, 0) and (0, 1), mean norm 2
    drawn = stacked(normalised_gaussian(moved, [1.0, 1.0], ["w"], MANY, 0, sent, scale=0.1))
    assert drawn.mean(0).tolist() == pytest.approx([1.0, 1.0], abs=0.02)
    assert drawn.var(0).tolist() == pytest.approx([4 * 0.1 * 0.25] * 2, rel=0.05)
    still = normalised_gaussian([sent, sent], [1.0, 1.0], ["w"], 2, 0, sent)
    assert all(torch.equal(s["w"], sent["w"]) for s in still)


# ---- SWAG ------------------------------------------------------------------------------------------


def test_fdf_5_swag_moments():
    mean, variance = moments(FDF_5, [1.0] * 3, ["w"])
    assert mean["w"].tolist() == pytest.approx([3, 1], abs=1e-12)
    assert variance["w"].tolist() == pytest.approx([4.6667, 0.6667], abs=5e-5)


@pytest.mark.parametrize(("scale", "expected"), [(1.0, (11.6667, 1.6667)), (0.5, (5.8333, 0.8333))])
def test_fdf_5_swag_samples(scale, expected):
    drawn = stacked(swag(FDF_5, ["w"], MANY, seed=3, scale=scale))
    assert drawn.mean(0).tolist() == pytest.approx([3, 1], abs=0.08)
    assert drawn.var(0).tolist() == pytest.approx(expected, rel=0.04)
    # The low-rank part gives the covariance between parameters: D'D/(m - 1) = [[7, 2.5], [2.5, 1]].
    assert torch.cov(drawn.T)[0, 1].item() == pytest.approx(2.5 * scale, rel=0.06)


def test_swag_moves_all_tensors_along_the_same_clients():
    two = [{"a": torch.tensor([x]), "b": torch.tensor([-x])} for x in (0.0, 4.0)]
    drawn = swag(two, ["a", "b"], 4000, seed=0, scale=1.0)
    a, b = (torch.cat([s[n] for s in drawn]) for n in "ab")
    assert torch.corrcoef(torch.stack([a, b]))[0, 1].item() == pytest.approx(-2 / 3, abs=0.03)  # 8 of 12 is common


@pytest.mark.parametrize("m", [1, 3])
def test_equal_clients_have_only_themselves_to_draw(m):
    model = weights_of(Conv(0))
    names = [n for n, t in model.items() if t.is_floating_point() and "running" not in n]
    for drawn in (
        gaussian([model] * m, [2.0] * m, names, 2, 0),
        dirichlet([model] * m, [2.0] * m, 2, 0),
        swag([model] * m, names, 2, 0),
    ):
        assert len(drawn) == 2
        assert all(torch.allclose(s[n], model[n], rtol=1e-6, atol=0) for s in drawn for n in model)
        assert m > 1 or all(same_bits(s, model) for s in drawn)


def test_the_seed_decides():
    for draw in (
        lambda seed: gaussian(FDF_1, [1.0] * 3, ["w"], 2, seed),
        lambda seed: dirichlet(FDF_1, [1.0] * 3, 2, seed),
        lambda seed: swag(FDF_1, ["w"], 2, seed),
    ):
        assert same_bits(draw(5)[1], draw(5)[1])
        assert not same_bits(draw(5)[1], draw(6)[1])
        assert not same_bits(*draw(5))


# ---- SWA -------------------------------------------------------------------------------------------


class Walker(nn.Module):
    """With a loss of -x and plain SGD of rate 2, x is 1, 3, 5, ... after the steps."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(-1.0))

    def forward(self, inputs):
        return self.x.expand(len(inputs), 1)


def walk(**settings) -> tuple[float, object]:
    cfg = Distill(batch=2, optimizer="sgd", lr=2.0, schedule="constant", clip=None, **settings)
    model = Walker()
    done = distill(model, torch.zeros(4, 1), lambda x: (x,), cfg, 0, loss=lambda z, _: -z.mean())
    return model.x.item(), done


def test_be_6_swa_is_a_running_mean():
    assert [walk(steps=n, swa_every=1)[0] for n in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_swa_collects_every_so_many_steps_from_its_start():
    assert walk(steps=10)[0] == 19
    assert walk(steps=10, swa_every=2, swa_start=4)[0] == (11 + 15 + 19) / 3  # after steps 6, 8 and 10
    assert walk(steps=10, swa_every=3)[0] == (5 + 11 + 17) / 3
    value, done = walk(steps=10, swa_every=4, swa_start=8)
    assert value == 19  # no step was met: the last weights
    assert done.best_step == 10


def test_swa_has_no_early_stop_but_the_start_may_win():
    cfg = Distill(
        steps=6, batch=2, optimizer="sgd", lr=2.0, schedule="constant", clip=None, every=1, patience=1, swa_every=3
    )
    looks = []

    def validate(model):
        looks.append(model.x.item())
        return -model.x.item()

    def run(**more):
        looks.clear()
        model = Walker()
        settings = Distill(**{**cfg.__dict__, **more})
        distill(model, torch.zeros(4, 1), lambda x: (x,), settings, 0, loss=lambda z, _: -z.mean(), validate=validate)
        return model.x.item()

    assert run() == 8
    assert looks == [8]  # the mean of 5 and 11, not the weights on the way
    assert run(keep_init_if_better=True) == -1
    assert looks == [-1, 8]


def test_swa_takes_batchnorm_statistics_anew_from_public_samples():
    x, _ = images(40)
    teacher = Ensemble([Conv(1)])
    student, frozen = Conv(0), Conv(0)
    cfg = Distill(steps=6, batch=8, swa_every=2)
    distill(student, x, teacher, cfg, 0)
    with torch.no_grad():
        seen = student[0](x)
    torch.testing.assert_close(student[1].running_mean, seen.mean((0, 2, 3)), atol=1e-6, rtol=1e-5)
    distill(frozen, x, teacher, Distill(steps=6, batch=8, swa_every=2, student_norm="frozen"), 0)
    assert torch.equal(frozen[1].running_mean, Conv(0)[1].running_mean)
    assert not torch.equal(frozen[0].weight, Conv(0)[0].weight)


def test_a_diverging_student_keeps_the_mean_so_far_or_its_start():
    def run(**settings):
        model = Walker()
        cfg = Distill(batch=2, optimizer="sgd", lr=2.0, schedule="constant", clip=None, steps=9, **settings)
        bad = lambda z, _: -z.mean() if z.mean() < 6 else z.mean() * math.nan  # noqa: E731
        return distill(model, torch.zeros(4, 1), lambda x: (x,), cfg, 0, loss=bad), model.x.item()

    done, x = run(swa_every=1)
    assert done.diverged
    assert x == (1 + 3 + 5 + 7) / 4
    done, x = run(swa_every=1, swa_start=5)
    assert done.diverged
    assert x == -1


def test_swa_settings_that_make_no_sense_are_refused():
    for wrong in ({"swa_every": 0}, {"swa_start": -1}):
        with pytest.raises(ValueError, match="swa_"):
            Distill(**wrong)
