"""First-order model mixing (FedFomo): which models lower a client's own loss, and which to request next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.tensors import Weights
from .aggregate import weighted_mean

LIMIT = 1e6  # upper bound of a gain: an infinite loss would make sums infinite


def gains_of(loss: float, losses: Sequence[float], distances: Sequence[float]) -> Tensor:
    """(L(theta) - L(theta_m)) / ||theta_m - theta|| of every candidate m: how much a step towards it lowers the loss.

    A candidate at distance 0 has gain 0; one with a NaN loss has the lowest gain.
    """
    saved = (loss - torch.tensor(losses, dtype=torch.float64)).nan_to_num(-LIMIT)
    distance = torch.tensor(distances, dtype=torch.float64).nan_to_num(torch.inf)
    return torch.where(distance > 0, saved / distance, 0.0).clamp(-LIMIT, LIMIT)


def step_towards(theta: Weights, candidates: Sequence[Weights], gains: Tensor) -> Weights:
    """theta + sum_m w_m (theta_m - theta), where w_m are the positive gains divided by their sum; if none, theta.

    As the w_m sum to 1 this is sum_m w_m theta_m: buffers and counters are those of a weighted mean.
    """
    positive = gains.clamp_min(0)
    if not bool((positive > 0).any()):
        return theta
    return weighted_mean(candidates, (positive / positive.max()).tolist())


def distance(a: Weights, b: Weights, names: Sequence[str]) -> float:
    """||a - b|| over the tensors `names`."""
    return sum((a[n].double() - b[n].double()).square().sum().item() for n in names) ** 0.5


def epsilon_greedy(scores: Sequence[float], m: int, epsilon: float, generator: torch.Generator) -> list[int]:
    """m different positions (or all): each time the best remaining one, or with probability epsilon a random one.

    Ties are broken at random.
    """
    n = len(scores)
    random_order = torch.randperm(n, generator=generator).tolist()
    best_order = sorted(torch.randperm(n, generator=generator).tolist(), key=lambda i: -scores[i])
    chosen: list[int] = []
    for explore in (torch.rand(min(m, n), generator=generator) < epsilon).tolist():
        order = random_order if explore else best_order
        chosen.append(next(i for i in order if i not in chosen))
    return chosen
