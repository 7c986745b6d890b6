"""First-order model mixing (FedFomo): which models would lower a client's own loss, and which to ask for next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tensors import Weights
from .aggregate import weighted_mean

LIMIT = 1e6  # no gain is larger, or a loss that is infinite would spoil every sum it enters


def gains_of(loss: float, losses: Sequence[float], distances: Sequence[float]) -> Tensor:
    """(L(theta) - L(theta_m)) / ||theta_m - theta|| of every candidate m: how much loss a step towards it saves.

    A candidate at distance 0 gains nothing; one whose loss is not a number is as bad as can be.
    """
    saved = (loss - torch.tensor(losses, dtype=torch.float64)).nan_to_num(-LIMIT)
    distance = torch.tensor(distances, dtype=torch.float64).nan_to_num(torch.inf)
    return torch.where(distance > 0, saved / distance, 0.0).clamp(-LIMIT, LIMIT)


def step_towards(theta: Weights, candidates: Sequence[Weights], gains: Tensor) -> Weights:
    """theta + sum_m w_m (theta_m - theta), w_m being the positive gains divided by their sum; none: theta itself.

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
    """m different positions (all, if there are fewer): each the best one left, or with probability epsilon any left.

    Equal scores are taken in random order.
    """
    n = len(scores)
    random_order = torch.randperm(n, generator=generator).tolist()
    best_order = sorted(torch.randperm(n, generator=generator).tolist(), key=lambda i: -scores[i])
    chosen: list[int] = []
    for explore in (torch.rand(min(m, n), generator=generator) < epsilon).tolist():
        order = random_order if explore else best_order
        chosen.append(next(i for i in order if i not in chosen))
    return chosen
