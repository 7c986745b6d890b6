"""Knowledge coefficients: the specification's numbers (MN-1 to MN-9), and what must hold for any numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solera.methods.mnfl import kl_loss, mse_loss
from solera.methods.mnflparam import gram_loss
from solera.methods.simpfl import cosines
from solera.train.similarity import Coefficients, best, by_cosine, by_rank, gram_matrix, learn, mixtures, project, terms


def t(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(a, b, digits: int = 8) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0.51 * 10.0**-digits)


S = t([[0.8, 0.2]], [[0.4, 0.6]])  # two clients, one public sample, two classes
HALF = torch.full((2, 2), 0.5, dtype=torch.float64)
SHARE = t(0.25, 0.75)  # D = (100, 300)
ONE_STEP = Coefficients(lr=0.1, rho=0.7)
MN1 = t([0.50490415, 0.48783605], [0.49509585, 0.51216395])
MN1_RAW = t([0.47728791, 0.40675407], [0.46747961, 0.43108198])


# ---- the specification's numbers --------------------------------------------------------------------


def test_mn1_mixtures_divergence_and_gradient():
    mixed = [m["s"] for m in mixtures(HALF, [{"s": s} for s in S])]
    assert all(close(m, t([0.6, 0.4])) for m in mixed)
    kl = t([(m * (m / s).log()).sum() for m, s in zip(mixed, S, strict=True)])
    assert close(kl, t([0.1046496288, 0.0810930216]), 10)
    gradient = SHARE * kl_loss(S, "sum").slope(HALF)
    assert close(gradient, t([0.22712094, 0.9324593], [0.32520387, 0.68918023]))


def test_mn1_one_step_with_and_without_the_simplex():
    assert close(learn(HALF, kl_loss(S, "sum").slope, SHARE, 2, ONE_STEP), MN1)
    free = Coefficients(lr=0.1, rho=0.7, constraint="none")
    assert close(learn(HALF, kl_loss(S, "sum").slope, SHARE, 2, free), MN1_RAW)


def test_mn1_the_plus_one_of_the_gradient_is_removed_by_the_projection():
    without = learn(HALF, lambda w: kl_loss(S, "sum").slope(w) - 1, SHARE, 2, ONE_STEP)
    assert close(without, MN1)


def test_mn1_gradient_is_the_derivative_of_the_loss():
    c = t([0.3, 0.6], [0.7, 0.4]).requires_grad_()
    mixed = (c.T @ S.flatten(1)).view_as(S)
    kl = (mixed * (mixed / S).log()).sum((1, 2))
    mse = (mixed - S).square().mean((1, 2))
    for value, loss in ((kl, kl_loss(S, "sum")), (mse, mse_loss(S, "sum"))):
        (derivative,) = torch.autograd.grad(value.sum(), c, retain_graph=True)
        assert close(loss.value(c.detach()), value.detach(), 12)
        assert close(loss.slope(c.detach()), derivative, 12)


def test_mn2_without_a_constraint_the_mass_of_a_column_shrinks_to_1_over_e():
    alone = Coefficients(lr=0.1, rho=0.0, steps=500, constraint="none")
    q = t([[0.3, 0.7]])
    (a,) = learn(t([1.0]), kl_loss(q, "sum").slope, t(1.0), 1, alone).flatten().tolist()
    assert a == pytest.approx(math.exp(-1), abs=1e-8)
    assert a * math.log(a) == pytest.approx(-0.3679, abs=5e-5)  # the "divergence" is then negative


def test_mn3_the_fixed_point():
    many = Coefficients(lr=0.1, rho=0.7, steps=400)
    end = learn(HALF, kl_loss(S, "sum").slope, SHARE, 2, many)
    assert close(end, t([0.5330509, 0.42615669], [0.4669491, 0.57384331]))


def test_mn4_without_a_pull_everybody_ends_alone():
    many = Coefficients(lr=0.1, rho=0.0, steps=2000)
    assert close(learn(HALF, kl_loss(S, "sum").slope, SHARE, 2, many), torch.eye(2).double())


@pytest.mark.parametrize("still", [Coefficients(rho=math.inf), Coefficients(lr=0.0), Coefficients(steps=0)])
def test_mn5_an_endless_pull_or_no_step_keeps_the_matrix_to_the_bit(still):
    c = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    s = t([[0.7, 0.2, 0.1]], [[0.2, 0.7, 0.1]], [[0.1, 0.2, 0.7]])
    assert torch.equal(learn(c, kl_loss(s, "sum").slope, t(0.2, 0.3, 0.5), 3, still), c)


def test_mn6_partial_participation():
    s = t([[0.7, 0.2, 0.1]], [[0.1, 0.2, 0.7]])  # clients 0 and 2 of three
    third = torch.full((2, 2), 1 / 3, dtype=torch.float64)
    new = learn(third, kl_loss(s, "sum").slope, t(0.5, 0.5), 3, ONE_STEP)
    # Finite differences of 1/2 KL(sum_m c_mn s_m / (2/3) || s_n) + 0.7 ||c - 1/3||^2 in numpy, and a bisection for the
    # projection. (Without the derivative 3/2 of c_mn / (2/3): 0.36252199 and 0.30414468.)
    assert close(new, t([0.377116, 0.289550], [0.289550, 0.377116]), 6)
    assert close(new.sum(0), t(2 / 3, 2 / 3), 12)


def test_mn7_parameters():
    w = [{"w": t(1.0, 0.0), "running_mean": t(5.0)}, {"w": t(0.0, 1.0), "running_mean": t(7.0)}]
    gram = gram_matrix(w, ["w"])
    assert torch.equal(gram, torch.eye(2).double())
    assert [m["w"].tolist() for m in mixtures(HALF, w)] == [[0.5, 0.5], [0.5, 0.5]]
    gradient = SHARE * gram_loss(gram, 2).slope(HALF)
    assert close(gradient, t([-0.0625, 0.1875], [0.0625, -0.1875]), 12)
    end = learn(HALF, gram_loss(gram, 2).slope, SHARE, 2, ONE_STEP)
    assert close(end, t([0.50625, 0.48125], [0.49375, 0.51875]), 12)


MN8 = t([[0.8, 0.2], [0.6, 0.4]], [[0.7, 0.3], [0.5, 0.5]], [[0.1, 0.9], [0.3, 0.7]])


def test_mn8_similarity():
    cosine = cosines(MN8)
    assert close(cosine[[0, 0, 1], [1, 2, 2]], t(0.98381972, 0.55549206, 0.68313005))
    assert cosine.diagonal().tolist() == [1, 1, 1]
    want = t([0.5092688, 0.48689982, 0.0], [0.4907312, 0.51310018, 0.22308643], [0.0, 0.0, 0.77691357])
    assert close(by_cosine(cosine), want)
    assert close(by_cosine(cosine, "l1"), cosine / cosine.sum(0), 12)


def test_cosines_have_twelve_digits():
    value = 0.123456789012345
    assert cosines(t([1.0, 0.0], [value, math.sqrt(1 - value**2)])[:, None])[0, 1].item() == 0.123456789012


def test_mn8_nearest():
    c = by_rank(cosines(MN8), 2)
    assert c[:, 0].tolist() == [0.5, 0.5, 0.0]
    target = mixtures(c, [{"s": s} for s in MN8])[0]["s"]
    assert close(target, t([0.75, 0.25], [0.55, 0.45]), 12)


def test_mn9_the_softmax_of_the_authors_code():
    cfg = Coefficients(lr=0.1, rho=0.7, constraint="softmax5")
    want = t([0.51225791, 0.46962756], [0.48774209, 0.53037244])
    assert close(learn(HALF, kl_loss(S, "sum").slope, SHARE, 2, cfg), want)


# ---- the best coefficients --------------------------------------------------------------------------


def test_mn3_the_best_coefficients_are_where_learning_ends():
    end = best(HALF, kl_loss(S, "sum"), SHARE, 2, ONE_STEP, 1e-12)
    assert close(end, t([0.5330509, 0.42615669], [0.4669491, 0.57384331]), 6)


@pytest.mark.parametrize("rho", [0.01, 0.1, 0.7])
def test_no_mixture_is_better_than_the_best(rho):
    """Against a fine grid of the simplex of three clients, two of them alike, with values worked out apart."""
    s = t([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1]], [[0.7, 0.2, 0.1], [0.5, 0.4, 0.1]], [[0.1, 0.1, 0.8], [0.2, 0.1, 0.7]])
    share, cfg, third = t(0.2, 0.3, 0.5), Coefficients(rho=rho), torch.full((3, 3), 1 / 3, dtype=torch.float64)
    loss = kl_loss(s, "sum")
    found = best(third, loss, share, 3, cfg, 1e-9)
    assert close(found.sum(0), torch.ones(3, dtype=torch.float64), 12)
    grid = [t(a / 100, b / 100, (100 - a - b) / 100) for a in range(101) for b in range(101 - a)]
    for n in range(3):

        def value(c, n=n):
            mixed = torch.einsum("m,mxj->xj", c, s)
            return share[n] * (mixed * (mixed / s[n]).log()).sum() + rho * (c - 1 / 3).square().sum()

        collaborative, pull = terms(found, loss, share, 3, cfg)
        assert close(collaborative[n] + pull[n], value(found[:, n]), 9)
        assert value(found[:, n]) <= min(value(c) for c in grid) + 1e-9
        assert value(found[:, n]) > min(value(c) for c in grid) - 1e-3


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_sum_is_the_mean_times_the_samples_and_parameters(reduction):
    g = torch.Generator().manual_seed(0)
    s = torch.rand(3, 7, 4, generator=g).double().softmax(-1)
    w = torch.rand(3, 3, generator=g).double()
    mixed = torch.einsum("mn,mxj->nxj", w, s)
    of = torch.sum if reduction == "sum" else torch.mean
    assert close(kl_loss(s, reduction).value(w), of((mixed * (mixed / s).log()).sum(-1), 1), 12)
    assert close(mse_loss(s, reduction).value(w), of((mixed - s).square().mean(-1), 1), 12)
    x, size = s.flatten(1), 1 if reduction == "sum" else 28
    assert close(gram_loss(x @ x.T, size).value(w), (w.T @ x - x).square().sum(1) / 2 / size, 12)


# ---- projection -------------------------------------------------------------------------------------

columns = st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), min_size=1, max_size=4)


@given(columns, st.floats(0.0, 2.0), st.floats(-5, 5))
@settings(max_examples=60, deadline=None)
def test_projection(rows, mass, shift):
    v = t(*rows)
    p = project(v, mass)
    assert bool((p >= 0).all())
    assert close(p.sum(0), torch.full((4,), mass, dtype=torch.float64), 9)
    assert close(project(v + shift, mass), p, 9)  # the same for every column moved as a whole
    assert close(project(p, mass), p, 9)
    # Nearest: no other point of the simplex, and that is none of its corners, lies on the far side.
    for corner in torch.eye(len(v), dtype=torch.float64) * mass:
        assert bool((((v - p) * (corner[:, None] - p)).sum(0) <= 1e-9).all())


def test_projection_takes_a_mass_for_each_column():
    p = project(t([1.0, 0.2, 0.3], [2.0, 0.2, -5.0]), t(1.0, 0.4, 0.0))
    assert close(p, t([0.0, 0.2, 0.0], [1.0, 0.2, 0.0]), 12)


# ---- learning ---------------------------------------------------------------------------------------


def test_columns_keep_their_mass_and_entries_stay_positive():
    g = torch.Generator().manual_seed(0)
    s = torch.rand(5, 7, 3, generator=g).double()
    s = s / s.sum(-1, keepdim=True)
    c = torch.rand(5, 5, generator=g).double()
    for constraint in ("simplex", "softmax5"):
        cfg = Coefficients(lr=0.5, rho=0.1, steps=7, constraint=constraint)
        new = learn(c, kl_loss(s, "sum").slope, torch.full((5,), 0.2, dtype=torch.float64), 9, cfg)
        assert close(new.sum(0), c.sum(0), 12)
        assert bool((new >= 0).all())
        assert not close(new, c, 2)


def test_a_column_without_mass_is_taught_uniformly_and_stays_empty():
    c = t([0.0, 0.5], [0.0, 0.5])
    assert close(mixtures(c, [{"s": s} for s in S])[0]["s"], t([0.6, 0.4]), 12)
    for constraint in ("simplex", "softmax5"):
        new = learn(c, kl_loss(S, "sum").slope, SHARE, 2, Coefficients(constraint=constraint))
        assert new[:, 0].tolist() == [0, 0]
        assert bool(torch.isfinite(new).all())


def test_certain_predictions_have_a_finite_gradient():
    s = t([[1.0, 0.0]], [[0.0, 1.0]])
    assert bool(torch.isfinite(kl_loss(s, "sum").slope(HALF)).all())
    end = learn(HALF, kl_loss(s, "sum").slope, SHARE, 2, Coefficients(lr=0.1, rho=0.0, steps=50))
    assert close(end, torch.eye(2).double())


def test_equal_coefficients_give_the_plain_mean_to_the_bit():
    g = torch.Generator().manual_seed(1)
    s = torch.rand(7, 50, 10, generator=g).softmax(-1)
    plain = s.double().sum(0)
    for value in (1 / 7, 0.1, 1.0):
        for m in mixtures(torch.full((7, 7), value, dtype=torch.float64), [{"s": x} for x in s]):
            assert torch.equal(m["s"], (plain / 7).float())


def test_mixtures_of_unconstrained_coefficients_leave_out_negative_ones():
    c = t([0.5, -0.1], [0.25, 0.3])
    s = S.float()
    a, b = (m["s"] for m in mixtures(c, [{"s": x} for x in s]))
    assert close(a, (2 * s[0] + s[1]) / 3, 6)
    assert torch.equal(b, s[1])


def test_the_step_size_of_the_authors_code():
    """Powers of 5, at most 5 of them, that bring the mean of a column's gradient to 0.01 ... 0.05."""
    sizes = (1.0, 0.2, 0.03, 0.004, 1e-9)
    gradient = torch.diag(torch.tensor(sizes, dtype=torch.float64)) * len(sizes)
    cfg = Coefficients(auto_lr=True, rho=0.0, constraint="none")
    c = torch.zeros(5, 5, dtype=torch.float64)
    moved = -learn(c, lambda w: gradient, torch.ones(5).double(), 5, cfg).diagonal() / 5
    assert close(moved, torch.tensor([1 / 25, 0.2 / 5, 0.03, 0.004 * 5, 1e-9 * 5**5], dtype=torch.float64), 12)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"lr": -0.1}, "lr"),
        ({"steps": -1}, "steps"),
        ({"lam": 0.0}, r"lam = 0\.0: expected a number above 0"),
        ({"rho": -0.1}, "rho"),
        ({"rho": math.nan}, "rho"),
        ({"rho": 10.0, "lr": 0.1}, "overshoots"),
    ],
)
def test_settings_that_make_no_sense(bad, says):
    with pytest.raises(ValueError, match=says):
        Coefficients(**bad)


# ---- coefficients that are not learned --------------------------------------------------------------


def test_equal_predictions_and_a_single_client_are_uniform():
    same = S[:1].expand(3, -1, -1)
    for c in (by_cosine(cosines(same)), by_cosine(cosines(same), "l1"), by_rank(cosines(same), 5)):
        assert close(c, torch.full((3, 3), 1 / 3, dtype=torch.float64), 9)
    assert by_cosine(cosines(S[:1])).tolist() == by_rank(cosines(S[:1]), 5).tolist() == [[1.0]]


def test_oneself_is_always_among_the_nearest_and_ties_go_to_the_lower_position():
    c = by_rank(cosines(S[:1].expand(4, -1, -1)), 2)
    assert [column.nonzero().flatten().tolist() for column in c.T] == [[0, 1], [0, 1], [0, 2], [0, 3]]
