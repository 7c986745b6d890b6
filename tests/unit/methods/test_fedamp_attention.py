"""Attentive weights of FedAMP: the numbers of a worked example, and what holds for any models."""

import pytest
import torch

from solera.methods.fedamp import attention, cosine_attention, cosines_of, median_distance, squared_distances
from solera.train.similarity import gram_matrix, mixtures


def models(*rows):
    return [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]


THREE = models((0.0, 0.0), (1.0, 0.0), (0.0, 2.0))


def near(got, wanted, atol=5e-9):
    return torch.allclose(torch.as_tensor(got).double(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=atol)


def test_amp1_attention_and_the_mixture_it_makes():
    xi, alpha = attention(squared_distances(gram_matrix(THREE, ["w"])), sigma=1.0, alpha=0.1)
    assert near(xi[0], [0.96138049, 0.03678794, 0.00183156])
    assert alpha == 0.1
    u = mixtures(xi[[0]].T, THREE)
    assert near(u[0]["w"], [0.03678794, 0.00366313])


def test_amp2_the_heuristic():
    gram = gram_matrix(models((1.0, 0.0), (1.0, 1.0), (0.0, 1.0)), ["w"])
    assert near(cosine_attention(cosines_of(gram), sigma=2.0, own=0.2)[0], [0.2, 0.64354375, 0.15645625])


def test_alpha_is_halved_until_every_row_is_a_convex_combination():
    d = squared_distances(gram_matrix(THREE, ["w"]))
    xi, alpha = attention(d, sigma=1.0, alpha=10.0)  # client 0 would give away 3.86, client 1 3.75
    assert alpha == 2.5
    assert near(xi.sum(1), [1.0, 1.0, 1.0], 1e-15)
    assert bool((xi >= 0).all())
    assert attention(d, 1.0, 5.0)[1] == 2.5  # no further than needed
    assert attention(d, 1.0, 2.5)[1] == 2.5


def test_the_nearer_a_model_the_more_it_counts():
    xi, _ = attention(squared_distances(gram_matrix(THREE, ["w"])), 1.0, 0.1)
    assert xi[0, 1] > xi[0, 2]
    assert torch.equal(xi, xi.T)


def test_distances_and_cosines():
    gram = gram_matrix(THREE, ["w"])
    assert squared_distances(gram).tolist() == [[0, 1, 4], [1, 0, 5], [4, 5, 0]]
    assert median_distance(squared_distances(gram)) == 4.0
    assert cosines_of(gram)[1].tolist() == [0, 1, 0]  # a model of zeros is like no other


def test_without_a_pair_of_different_models_the_median_is_1():
    assert median_distance(torch.zeros(1, 1).double()) == 1.0
    assert median_distance(torch.zeros(3, 3).double()) == 1.0


@pytest.mark.parametrize("one", [lambda: attention(torch.zeros(1, 1).double(), 1.0, 1.0)[0],
                                 lambda: cosine_attention(torch.ones(1, 1).double(), 5.0, 0.2)])  # fmt: skip
def test_who_is_alone_attends_to_itself(one):
    assert one().tolist() == [[1.0]]
