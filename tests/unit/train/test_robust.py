"""Robust parts: medians, clipped updates, and ensembles that one overconfident model cannot own."""

import pytest
import torch

from solera.core.tensors import weights_of
from solera.train.aggregate import uniform_mean
from solera.train.robust import (
    clip_logits,
    clip_update,
    clip_updates,
    coordinate_median,
    median_probs,
    standardise_logits,
    update_norm,
    weighted_median,
)
from solera.train.teachers import Cache, Ensemble, lowest_entropy
from toys import Constant, Conv, images, mlp, same_bits

ROBUST = ("clipped_logits", "standardised_logits", "median_probs")
HONEST = ((3.0, 0.0, -1.0), (2.0, 0.5, -1.0), (4.0, -1.0, 0.0), (2.5, 1.0, -2.0))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- medians ---------------------------------------------------------------------------------------


def test_the_median_of_an_even_number_lies_in_the_middle():
    values = torch.tensor([[5.0, 1.0], [1.0, 1.0], [2.0, 9.0], [100.0, -3.0]])
    assert weighted_median(values).tolist() == [3.5, 1.0]
    assert weighted_median(values[:3]).tolist() == [2.0, 1.0]
    assert weighted_median(values[:1]).tolist() == [5.0, 1.0]


def test_a_weight_is_a_number_of_copies():
    values = noise(5, 3, 4)
    for weights in ([1, 3, 2, 1, 2], [2, 1, 1, 1, 1], [1, 1, 4, 4, 2], [0, 1, 2, 0, 1]):
        repeated = values.repeat_interleave(torch.tensor(weights), 0)
        assert torch.equal(weighted_median(values, weights), weighted_median(repeated))
    assert torch.equal(weighted_median(values, [2.5] * 5), weighted_median(values))


def test_the_median_does_not_depend_on_the_order_and_a_minority_cannot_move_it_beyond_the_others():
    values = noise(7, 50)
    shuffled = values[torch.randperm(7, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(weighted_median(values), weighted_median(shuffled))
    attacked = values.clone()
    attacked[:3] = 1e30
    found = weighted_median(attacked)
    assert bool(((found >= values[3:].amin(0)) & (found <= values[3:].amax(0))).all())


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0]])
def test_impossible_weights(weights):
    with pytest.raises(ValueError, match="3 values need as many weights"):
        weighted_median(noise(3, 2), weights)


def test_coordinate_median_of_models():
    models = [weights_of(Conv(i)) for i in range(4)]
    models[0]["1.num_batches_tracked"] += 7
    found = coordinate_median(models)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in models[0].items()}
    assert int(found["1.num_batches_tracked"]) == 7
    w = torch.stack([m["0.weight"] for m in models]).sort(0).values
    assert torch.equal(found["0.weight"], (w[1] + w[2]) / 2)
    assert same_bits(coordinate_median(models[:1]), models[0])
    assert same_bits(coordinate_median(models[:2]), uniform_mean(models[:2]))
    assert same_bits(coordinate_median(models[:2], [3, 1]), models[0])


def test_models_that_differ_have_no_median():
    with pytest.raises(ValueError, match="differ in their tensors"):
        coordinate_median([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
    with pytest.raises(ValueError, match="no uploads"):
        coordinate_median([])


# ---- norms of updates ------------------------------------------------------------------------------


def test_an_update_is_cut_in_its_direction():
    start = {"w": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0]), "n": torch.tensor(3)}
    upload = {"w": torch.tensor([4.0, 1.0]), "b": torch.tensor([4.0]), "n": torch.tensor(9)}
    assert update_norm(upload, start, ["w", "b"]) == 5
    cut = clip_update(upload, start, 2.5, ["w", "b"])
    assert (cut["w"].tolist(), cut["b"].tolist(), int(cut["n"])) == ([2.5, 1.0], [2.0], 9)
    assert clip_update(upload, start, 5.0, ["w", "b"]) is upload
    assert torch.equal(clip_update(upload, start, 0.0, ["w", "b"])["w"], start["w"])


def test_uploads_are_cut_to_multiples_of_their_median_and_statistics_apart():
    start = {"w": torch.zeros(1), "running_mean": torch.zeros(1), "count": torch.tensor(0)}
    sizes = ((1.0, 50.0), (2.0, 60.0), (3.0, 70.0), (1e6, 55.0), (2.0, 1e9))
    uploads = [{"w": torch.tensor([w]), "running_mean": torch.tensor([m]), "count": torch.tensor(1)} for w, m in sizes]
    cut = clip_updates(uploads, start, 1.0, ["w"])
    assert [u["w"].item() for u in cut] == [1, 2, 2, 2, 2]
    assert [u["running_mean"].item() for u in cut] == [50, 60, 60, 55, 60]
    assert cut[0] is uploads[0]
    twice = clip_updates(uploads, start, 2.0, ["w"])
    assert [u["w"].item() for u in twice] == [1, 2, 3, 4, 2]
    assert uploads[3]["w"].item() == 1e6
    assert clip_updates([], start, 1.0, ["w"]) == []
    with pytest.raises(ValueError, match="positive multiple"):
        clip_updates(uploads, start, 0.0, ["w"])


# ---- teachers' answers -----------------------------------------------------------------------------


def test_clipped_logits_by_hand():
    z = torch.tensor([[[3.0, 0.0, -3.0]], [[1.0, 0.0, -1.0]], [[2e4, -1e4, -1e4]]], dtype=torch.float64)
    expected = torch.tensor([[[3.0, 0, -3]], [[1, 0, -1]], [[3, -1.5, -1.5]]], dtype=torch.float64)
    torch.testing.assert_close(clip_logits(z), expected)
    torch.testing.assert_close(clip_logits(z + 100), expected)
    assert clip_logits(torch.zeros(3, 2, 4)).abs().max() == 0


def test_standardised_logits_by_hand():
    z = torch.tensor([[[3.0, 0.0, -3.0]], [[1.0, 0.0, -1.0]], [[2e4, -1e4, -1e4]]], dtype=torch.float64)
    found = standardise_logits(z)
    torch.testing.assert_close(found[:2], torch.tensor([[[3.0, 0, -3]], [[3, 0, -3]]], dtype=torch.float64))
    torch.testing.assert_close(found[2], torch.tensor([[12**0.5, -(3**0.5), -(3**0.5)]], dtype=torch.float64))
    assert standardise_logits(torch.ones(3, 2, 4)).abs().max() == 0


def test_median_of_probabilities_by_hand():
    p = torch.tensor([[[0.7, 0.2, 0.1]], [[0.5, 0.3, 0.2]], [[0.0, 0.0, 1.0]]], dtype=torch.float64)
    torch.testing.assert_close(median_probs(p), torch.tensor([[0.5, 0.2, 0.2]], dtype=torch.float64) / 0.9)
    certain = torch.eye(3, dtype=torch.float64)[:, None]  # each rules out what the others say: nothing is left
    torch.testing.assert_close(median_probs(certain), torch.full((1, 3), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(median_probs(certain, [2.0, 1.0, 1.0]), torch.tensor([[1.0, 0, 0]]).double())


def test_where_nothing_is_left_of_the_medians_the_mean_is_weighted():
    certain = torch.eye(3, dtype=torch.float64)[:, None]
    expected = torch.tensor([[0.4, 0.35, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(median_probs(certain, [8.0, 7.0, 5.0]), expected)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("size", [10.0, 1e4, 1e30])
def test_one_liar_does_not_own_the_ensemble(rule, size):
    models = [Constant(*z) for z in HONEST]
    without = Ensemble(models, rule)(torch.zeros(1, 1))[0]
    p, h = Ensemble([*models, Constant(0.0, 0.0, size)], rule)(torch.zeros(1, 1))
    assert p.argmax() == 0
    assert p[0, 0] > 0.5 * without[0, 0]
    assert p.sum().item() == pytest.approx(1)
    assert h.item() == pytest.approx(-(p * p.log()).sum().item())
    if size >= 1e4:
        assert Ensemble([*models, Constant(0.0, 0.0, size)])(torch.zeros(1, 1))[0].argmax() == 2  # avg_logits is owned


@pytest.mark.parametrize("rule", ROBUST)
def test_equal_models_give_their_own_answer_and_one_model_its_own(rule):
    model, x = Conv(0), images(20)[0]
    p, h = Ensemble([model])(x)
    for models in ([model], [model] * 4):
        robust = Ensemble(models, rule)(x)
        torch.testing.assert_close(robust[0], p)
        torch.testing.assert_close(robust[1], h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ROBUST)
def test_weights_are_copies(rule):
    models, x = [Conv(i) for i in range(3)], images(20)[0]
    p, h = Ensemble(models, rule, [1.0, 3.0, 1.0])(x)
    expected = Ensemble([models[0], models[1], models[1], models[1], models[2]], rule)(x)
    torch.testing.assert_close(p, expected[0])
    torch.testing.assert_close(h, expected[1])


@pytest.mark.parametrize("rule", ROBUST)
def test_a_cache_holds_the_bits_of_the_rule(rule):
    teacher = Ensemble([Conv(0), mlp(1, width=16), Conv(2)], rule, temperature=2.0)
    x = images(100)[0]
    cache = Cache.of(teacher, x, torch.arange(100), batch=64)
    for i in torch.randperm(100).split(9):
        for cached, fresh in zip(cache[i], teacher(x[i]), strict=True):
            assert torch.equal(cached, fresh)


def test_the_samples_of_lowest_entropy():
    probs = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.9, 0.1], [1.0, 0.0], [0.6, 0.4]])
    h = torch.zeros(5)  # what a rule subtracts is not asked
    cache, indices = Cache([probs, h], torch.tensor([10, 3, 7, 5, 8]), 20), torch.tensor([10, 3, 7, 5, 8])
    assert lowest_entropy(cache, indices, 3).tolist() == [3, 7, 5]
    assert lowest_entropy(cache, indices, 1).tolist() == [3]  # the first of equals
    assert lowest_entropy(cache, indices, 5).tolist() == indices.tolist()
