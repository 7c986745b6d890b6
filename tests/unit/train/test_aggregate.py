"""Averages: the oracles FDF-1 and FM-1, and what an average must not do."""

import random

import pytest
import torch

from solera.train.aggregate import RunningMean, momentum_step, uniform_mean, weighted_mean


def uploads(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "a.weight": torch.randn(3, 5, generator=g),
            "a.running_var": torch.rand(5, generator=g),
            "a.num_batches_tracked": torch.randint(100, (), generator=g),
        }
        for _ in range(count)
    ]


def test_fdf_1():
    w = [{"w": torch.tensor(v)} for v in ([1.0, 2.0], [3.0, 6.0], [5.0, 1.0])]
    assert torch.equal(weighted_mean(w, [10, 30, 60])["w"], torch.tensor([4.0, 2.6]))
    assert torch.equal(uniform_mean(w)["w"], torch.tensor([3.0, 3.0]))


def test_running_mean_equals_the_mean_of_a_list_bit_for_bit():
    w, n = uploads(20), [float(i % 7 + 1) for i in range(20)]
    mean = RunningMean()
    for u, k in zip(w, n, strict=True):
        mean.add(u, k)
    a, b = mean.result(), weighted_mean(w, n)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_mean_is_float64_inside_and_keeps_types():
    w = uploads(50)
    mean = uniform_mean(w)
    for name in ("a.weight", "a.running_var"):
        exact = torch.stack([u[name].double() for u in w]).mean(0)
        assert mean[name].dtype == torch.float32
        torch.testing.assert_close(mean[name].double(), exact, rtol=1e-7, atol=1e-8)


def test_integer_tensors_keep_their_maximum():
    w = uploads(9)
    most = max(int(u["a.num_batches_tracked"]) for u in w)
    result = weighted_mean(w, range(1, 10))["a.num_batches_tracked"]
    assert result.dtype == torch.int64
    assert int(result) == most


@pytest.mark.parametrize("n", [1, 3, 7, 61, 59_999])
def test_mean_of_equal_uploads_is_that_upload_bit_for_bit(n):
    (u,) = uploads(1)
    mean = weighted_mean([u] * 3, [n, 2 * n, n + 1])
    assert all(torch.equal(mean[name], u[name]) for name in u)


def test_order_matters_at_most_in_the_last_bit():
    w = uploads(30)
    shuffled = random.Random(0).sample(w, len(w))
    torch.testing.assert_close(uniform_mean(w), uniform_mean(shuffled), rtol=1e-6, atol=1e-7)


def test_weight_zero_changes_nothing():
    w = uploads(3)
    kept, all_three = weighted_mean(w[:2], [1, 2]), weighted_mean(w, [1, 2, 0])
    assert all(torch.equal(kept[name], all_three[name]) for name in kept)


def test_uploads_are_not_written_to():
    w = uploads(3)
    before = [{name: t.clone() for name, t in u.items()} for u in w]
    result = weighted_mean(w[:1], [1])
    for t in result.values():
        t.add_(1)
    weighted_mean(w, [1, 2, 3])
    assert all(torch.equal(u[n], b[n]) for u, b in zip(w, before, strict=True) for n in u)


def test_what_cannot_be_averaged_is_refused():
    (u,) = uploads(1)
    with pytest.raises(ValueError, match="no uploads"):
        weighted_mean([], [])
    with pytest.raises(ValueError, match="no uploads"):
        weighted_mean([u], [0])
    with pytest.raises(ValueError, match=r"a\.weight.*\(1,\) and \(3, 5\)"):
        uniform_mean([u, u | {"a.weight": torch.zeros(1)}])
    with pytest.raises(ValueError, match="differ in their tensors: b"):
        uniform_mean([u, u | {"b": torch.zeros(1)}])
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight in a mean"):
            weighted_mean([u], [bad])
    with pytest.raises(ValueError):
        weighted_mean([u], [1, 2])


def test_fm_1():
    x, v = {"w": torch.tensor([1.0], dtype=torch.float64)}, {"w": torch.zeros(1, dtype=torch.float64)}
    trace = []
    for average in (0.8, 0.7):
        x, v = momentum_step(x, {"w": torch.tensor([average], dtype=torch.float64)}, v, 0.3)
        trace += [v["w"].item(), x["w"].item()]
    assert trace == pytest.approx([0.2, 0.8, 0.16, 0.64], abs=1e-15)


def test_no_momentum_is_the_average_bit_for_bit_and_buffers_have_none():
    sent, average = uploads(2)
    v = {"a.weight": torch.randn(3, 5)}
    x, _ = momentum_step(sent, average, v, 0.0)
    assert all(torch.equal(x[name], average[name]) for name in average)
    x, new = momentum_step(sent, average, v, 0.9)
    assert not torch.equal(x["a.weight"], average["a.weight"])
    assert torch.equal(x["a.running_var"], average["a.running_var"])
    assert torch.equal(x["a.num_batches_tracked"], average["a.num_batches_tracked"])
    assert list(new) == ["a.weight"]


def test_uploads_in_double_precision_are_left_as_they_were():
    upload = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    RunningMean().add(upload, 3)
    assert upload["w"].tolist() == [1.0, 2.0]
