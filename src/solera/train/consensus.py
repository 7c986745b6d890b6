"""Fed-ET's consensus: the label an ensemble agrees on, each member's confidence, and the dissenting members.

Equation numbers are those of Cho, Manoel, Joshi, Sim and Dimitriadis, "Heterogeneous Ensemble Knowledge Transfer for
Training Large Models in Federated Learning", IJCAI 2022. What the paper calls logits are probability vectors: the
softmax of a model's outputs.

All functions work on tensors [teachers, samples, classes]. `copies` is how often each teacher counts, if clients were
sampled with replacement.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..place.placement import finest

SUMS_TO_ONE = 1e-3  # tolerated distance of the sum of all teachers' weights from 1


class Consensus(NamedTuple):
    """The consensus of an ensemble on some samples."""

    probs: Tensor  # s(x), [samples, classes]
    labels: Tensor  # y_s(x), [samples]
    dissent: Tensor  # s_div(x), [samples, classes]: sums to the weight A(x) of the dissenting teachers, not to 1


def probabilities(logits: Tensor) -> Tensor:
    """The softmax of the teachers' outputs, in the type for sums."""
    return finest(logits).softmax(-1)


def confidence(probs: Tensor) -> Tensor:
    """A model's confidence: the variance of its probabilities over the classes. [..., classes] -> [...]

    Computed relative to the first class, so that a uniform prediction has a variance of exactly 0. Otherwise rounding
    errors would be compared with rounding errors.
    """
    if probs.numel() == 0:  # no sample: torch would warn about an empty variance
        return probs.sum(-1)
    return (probs - probs[..., :1]).var(-1, correction=0)


def confidence_weights(probs: Tensor, copies: Tensor | None = None) -> Tensor:
    """alpha_k(x) of eq. 3 and 8, [teachers, samples], which sum to 1 for every sample.

    A teacher sampled several times counts as often. If all predictions are uniform, the weights are equal.
    """
    n = probs.new_ones(len(probs)) if copies is None else copies.to(probs)
    variance = n[:, None] * confidence(probs)
    total = variance.sum(0)
    return torch.where(total > 0, variance / total, (n / n.sum())[:, None])


# The weights of teachers: probabilities [teachers, samples, classes] and copies -> [teachers, samples], sum 1.
Weighting = Callable[[Tensor, Tensor | None], Tensor]


def consensus(probs: Tensor, copies: Tensor | None = None, weights: Weighting = confidence_weights) -> Consensus:
    """The consensus of the teachers' probabilities [teachers, samples, classes]."""
    alpha = weights(probs, copies)
    check_weights(alpha, probs)
    weighted = alpha[..., None] * probs
    s = weighted.sum(0)  # eq. 2
    y = s.argmax(-1)  # eq. 4
    dissents = probs.argmax(-1) != y  # eq. 6, [teachers, samples]
    return Consensus(s, y, (weighted * dissents[..., None]).sum(0))  # eq. 7, with the weights of all (eq. 8)


def check_weights(alpha: Tensor, probs: Tensor) -> None:
    """Refuse what cannot be teacher weights: a user may have replaced the equation."""
    wanted = tuple(probs.shape[:2])
    if not isinstance(alpha, Tensor) or tuple(alpha.shape) != wanted:
        got = tuple(alpha.shape) if isinstance(alpha, Tensor) else type(alpha).__name__
        raise ConfigError(f"weights(probs, copies) returned {got}: a tensor [teachers, samples] = {wanted} is wanted")
    sums = finest(alpha).sum(0)
    if bool(probs.isfinite().all()) and not bool(((sums - 1).abs() < SUMS_TO_ONE).all()):
        raise ConfigError(
            f"weights(probs, copies): the weights of all teachers must sum to 1 for each sample, and they sum to "
            f"{sums[(sums - 1).abs().nan_to_num(torch.inf).argmax()].item():g} for one"
        )


class Agreement(NamedTuple):
    """The agreement of a round's teachers on some samples."""

    confidence: Tensor  # mean of alpha_k(x), [teachers]: sums to 1
    agrees: Tensor  # share of the samples for which a teacher predicts the consensus label, [teachers]
    dissenting: float  # mean share of dissenting teachers
    unanimous: float  # share of the samples on which all teachers agree


def agreement(probs: Tensor, copies: Tensor | None = None, weights: Weighting = confidence_weights) -> Agreement:
    """The agreement of teachers with these probabilities [teachers, samples, classes]."""
    n = probs.new_ones(len(probs)) if copies is None else copies.to(probs)
    same = probs.argmax(-1) == consensus(probs, copies, weights).labels
    dissenting = (n[:, None] * ~same).sum(0) / n.sum()
    return Agreement(
        weights(probs, copies).mean(1),
        finest(same).mean(1),
        dissenting.mean().item(),
        finest(same.all(0)).mean().item(),
    )
