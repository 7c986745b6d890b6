"""Attentive weights: how much of whose model goes into a client's own (FedAMP and its heuristic version).

A matrix xi has a row for each receiver i and a column for each giver j; every row sums to 1. All of this is float64
and starts from the inner products of the models (`similarity.gram_matrix`).
"""

import torch
from torch import Tensor

SMALLEST = 1e-12  # no length below this is divided by


def squared_distances(gram: Tensor) -> Tensor:
    """||w_i - w_j||^2 of every two models."""
    squares = gram.diagonal()
    return (squares[:, None] + squares - 2 * gram).clamp_min(0).fill_diagonal_(0)


def cosines_of(gram: Tensor) -> Tensor:
    """The cosine between every two models."""
    lengths = gram.diagonal().clamp_min(0).sqrt().clamp_min(SMALLEST)
    return gram / (lengths[:, None] * lengths)


def median_distance(distances: Tensor) -> float:
    """The median over all pairs of different models; 1 where there is no pair or the models are the same."""
    i, j = torch.triu_indices(len(distances), len(distances), offset=1)
    pairs = distances[i, j]
    return (pairs.quantile(0.5).item() if len(pairs) else 0.0) or 1.0


def attention(distances: Tensor, sigma: float, alpha: float) -> tuple[Tensor, float]:
    """xi_ij = alpha A'(||w_i - w_j||^2) with A(x) = 1 - exp(-x / sigma), xi_ii the rest; and the alpha used.

    alpha is halved until no xi_ii is negative: every row is then a convex combination.
    """
    slope = (torch.exp(-distances / sigma) / sigma).fill_diagonal_(0)  # A', of others
    while alpha * slope.sum(1).max() > 1:
        alpha /= 2
    xi = alpha * slope
    return xi + torch.diag((1 - xi.sum(1)).clamp_min(0)), alpha


def cosine_attention(cosine: Tensor, sigma: float, own: float) -> Tensor:
    """xi_ii = own, and the rest in proportion to exp(sigma cos(w_i, w_j)) over the others (HeurFedAMP)."""
    if len(cosine) == 1:
        return torch.ones_like(cosine)
    others = (sigma * cosine).fill_diagonal_(-torch.inf).softmax(1)
    return (1 - own) * others + own * torch.eye(len(cosine), dtype=cosine.dtype)
