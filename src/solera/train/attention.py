"""Attention between clients' models: the weight of each model in a client's mixture (FedAMP, HeurFedAMP).

A matrix xi has a row for each receiver i and a column for each giver j; every row sums to 1. All computations are
float64 and start from the inner products of the models (`similarity.gram_matrix`).
"""

import torch
from torch import Tensor

SMALLEST = 1e-12  # smallest divisor


def squared_distances(gram: Tensor) -> Tensor:
    """||w_i - w_j||^2 for each pair of models."""
    squares = gram.diagonal()
    return (squares[:, None] + squares - 2 * gram).clamp_min(0).fill_diagonal_(0)


def cosines_of(gram: Tensor) -> Tensor:
    """The cosine for each pair of models."""
    lengths = gram.diagonal().clamp_min(0).sqrt().clamp_min(SMALLEST)
    return gram / (lengths[:, None] * lengths)


def median_distance(distances: Tensor) -> float:
    """The median over all pairs of different models; 1 if there is no pair or all models are equal."""
    i, j = torch.triu_indices(len(distances), len(distances), offset=1)
    pairs = distances[i, j]
    return (pairs.quantile(0.5).item() if len(pairs) else 0.0) or 1.0


def attention(distances: Tensor, sigma: float, alpha: float) -> tuple[Tensor, float]:
    """xi_ij = alpha A'(||w_i - w_j||^2) with A(x) = 1 - exp(-x / sigma), xi_ii = 1 - the rest; and the alpha used.

    alpha is halved until no xi_ii is negative: every row is then a convex combination.
    """
    slope = (torch.exp(-distances / sigma) / sigma).fill_diagonal_(0)  # A', for j != i
    while alpha * slope.sum(1).max() > 1:
        alpha /= 2
    xi = alpha * slope
    return xi + torch.diag((1 - xi.sum(1)).clamp_min(0)), alpha


def cosine_attention(cosine: Tensor, sigma: float, own: float) -> Tensor:
    """xi_ii = own; xi_ij, j != i, in proportion to exp(sigma cos(w_i, w_j)) (HeurFedAMP)."""
    if len(cosine) == 1:
        return torch.ones_like(cosine)
    others = (sigma * cosine).fill_diagonal_(-torch.inf).softmax(1)
    return (1 - own) * others + own * torch.eye(len(cosine), dtype=cosine.dtype)
