"""Krum, multi-Krum, Bulyan and the trimmed mean, against numbers worked out by hand and against Flower's strategies."""

import numpy as np
import pytest
import torch

from solera.methods.steps.screen import byzantine_mean, chosen, krum_scores, squared_distances, tolerated


def on_a_line(*values: float) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor([v], dtype=torch.float64), "steps": torch.tensor(i)} for i, v in enumerate(values)]


LINE = on_a_line(0, 1, 3, 4, 100)  # f = 1: n - f - 2 = 2 neighbours count


def test_squared_distances_by_hand():
    two = [
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])},
        {"a": torch.tensor([4.0, 6.0]), "b": torch.tensor([[1.0]])},
    ]
    assert squared_distances(two, ["a", "b"]).tolist() == [[0, 29], [29, 0]]
    assert squared_distances(two, ["b"]).tolist() == [[0, 4], [4, 0]]


def test_krum_by_hand():
    """Scores: 0: 1+9, 1: 1+4, 3: 1+4, 4: 1+9, 100: 96^2+97^2. The first of the two lowest wins: 1."""
    d = squared_distances(LINE, ["w"])
    assert krum_scores(d, 1).tolist() == [10, 5, 5, 10, 96**2 + 97**2]
    assert chosen("krum", d, 1) == [1]
    assert byzantine_mean("krum", LINE, ["w"], 1)["w"].item() == 1.0
    assert byzantine_mean("krum", LINE, ["w"], 1)["steps"].item() == 1


def test_multi_krum_by_hand():
    """The mean of the n - f - 2 = 2 best, 1 and 3. With f = 0, three neighbours: scores 26, 14, 14, 26, and 3 kept."""
    assert byzantine_mean("multi_krum", LINE, ["w"], 1)["w"].item() == 2.0
    d = squared_distances(LINE, ["w"])
    assert krum_scores(d, 0).tolist()[:4] == [1 + 9 + 16, 1 + 4 + 9, 1 + 4 + 9, 1 + 9 + 16]
    assert chosen("multi_krum", d, 0) == [0, 1, 2]


def test_bulyan_by_hand():
    """n = 7, f = 1: Krum picks n - 2f = 5 one after the other; then the mean of the n - 4f = 3 nearest to their median.

    Seven on a line, 0 1 3 4 6 9 100, four neighbours: scores 62, 39, 23, 23, 49... the first pick is 3 (index 2).
    """
    line = on_a_line(0, 1, 3, 4, 6, 9, 100)
    d = squared_distances(line, ["w"])
    assert krum_scores(d, 1).tolist()[:6] == [
        1 + 9 + 16 + 36,
        1 + 4 + 9 + 25,
        9 + 4 + 1 + 9,
        9 + 1 + 4 + 16,
        4 + 9 + 9 + 25,
        9 + 25 + 36 + 64,
    ]
    # left 0 1 4 6 9 100, three neighbours: 1+16+36, 1+9+25, 16+9+4, 4+9+25, ...: picks 4 (29)
    # left 0 1 6 9 100, two neighbours: 1+36, 1+25, 9+25, 9+64, ...: picks 1 (26)
    # left 0 6 9 100, one neighbour: 36, 9, 9, ...: picks 6, the first
    # left 0 9 100, one neighbour (at least one): 81, 81, ...: picks 0, the first
    assert chosen("bulyan", d, 1) == [0, 1, 2, 3, 4]
    # of 0 1 3 4 6 the median is 3; the three nearest are 3, 4 and 1
    assert byzantine_mean("bulyan", line, ["w"], 1)["w"].item() == pytest.approx(8 / 3)


def test_trimmed_mean_by_hand():
    assert byzantine_mean("trimmed_mean", LINE, ["w"], 1)["w"].item() == pytest.approx((1 + 3 + 4) / 3)
    assert byzantine_mean("trimmed_mean", LINE, ["w"], 0)["w"].item() == pytest.approx(108 / 5)
    two = [{"w": torch.tensor(v)} for v in ([1.0, 50.0], [2.0, 7.0], [90.0, -8.0])]
    assert byzantine_mean("trimmed_mean", two, [], 1)["w"].tolist() == [2.0, 7.0]  # number by number
    assert byzantine_mean("trimmed_mean", LINE, [], 2)["steps"].item() == 4  # counters: the maximum


def random_models(n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"a": (4, 3), "b": (5,)}
    models = [{k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()} for _ in range(n)]
    models[1] = {k: t + 50 for k, t in models[1].items()}
    return models


@pytest.mark.parametrize("seed", range(5))
def test_as_flower_computes_them(seed):
    aggregate = pytest.importorskip("flwr.server.strategy.aggregate", reason="needs the extra 'flower'")
    n, f = 11, 2
    models = random_models(n, seed)
    arrays = [([m["a"].numpy(), m["b"].numpy()], 1) for m in models]
    theirs = {
        "krum": aggregate.aggregate_krum(list(arrays), f, 0),
        "multi_krum": aggregate.aggregate_krum(list(arrays), f, n - f - 2),
        "bulyan": aggregate.aggregate_bulyan(list(arrays), f, aggregate.aggregate_krum, to_keep=0),
        "trimmed_mean": aggregate.aggregate_trimmed_avg(list(arrays), f / n + 1e-9),
    }
    for how, wanted in theirs.items():
        ours = byzantine_mean(how, models, ["a", "b"], f)
        assert np.allclose(ours["a"].numpy(), wanted[0], atol=1e-12), how
        assert np.allclose(ours["b"].numpy(), wanted[1], atol=1e-12), how


@pytest.mark.parametrize("how", ["krum", "multi_krum", "bulyan", "trimmed_mean"])
def test_byzantine_clients_within_the_bound_are_tolerated(how):
    models = random_models(11, 7)
    honest = torch.stack([m["b"] for i, m in enumerate(models) if i != 1])
    found = byzantine_mean(how, models, ["a", "b"], 2)["b"]
    assert bool((found <= honest.amax(0)).all())
    assert bool((found >= honest.amin(0)).all())


def test_how_many_byzantine_clients_a_number_of_models_tolerates():
    assert [tolerated("krum", n) for n in (1, 3, 4, 5, 7)] == [0, 0, 0, 1, 2]
    assert [tolerated("bulyan", n) for n in (1, 6, 7, 11)] == [0, 0, 1, 2]
    assert [tolerated("trimmed_mean", n) for n in (1, 2, 3, 5)] == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="krum: 4 models tolerate 0 Byzantine clients, not 1"):
        byzantine_mean("krum", LINE[:4], ["w"], 1)
    for n in (1, 2):  # too few to compare: still one model
        for how in ("krum", "multi_krum", "bulyan", "trimmed_mean"):
            assert byzantine_mean(how, LINE[:n], ["w"], 0)["w"].item() in (0.0, 0.5, 1.0)
