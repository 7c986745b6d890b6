"""Averages that bear f lying clients out of n: Krum, multi-Krum and Bulyan, which compare models; the trimmed mean.

Krum and multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017. With d(i, j) the squared distance of two
models, the score of model i is the sum of d(i, j) over the n - f - 2 models nearest to it (Krum needs n >= 2f + 3).

    krum          the model with the lowest score
    multi_krum    the mean of the n - f - 2 models with the lowest scores
    bulyan        El Mhamdi, Guerraoui, Rouault, ICML 2018 (n >= 4f + 3): Krum picks n - 2f models one after the other,
                  each out of those that are left; then, number by number, the mean of the n - 4f picked values nearest
                  to their median
    trimmed_mean  Yin, Chen, Ramchandran, Bartlett, ICML 2018 (n >= 2f + 1): number by number, the mean without the f
                  smallest and the f largest values

All models count the same, whatever their numbers of examples: a liar could claim any.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..core.tensors import Weights
from .aggregate import uniform_mean
from .robust import by_number, weighted_median

Selection = Literal["krum", "multi_krum", "bulyan"]
NEEDED = {"krum": (2, 3), "multi_krum": (2, 3), "bulyan": (4, 3), "trimmed_mean": (2, 1)}  # n >= a f + b


def bearable(how: str, n: int) -> int:
    """The largest f that n models bear."""
    a, b = NEEDED[how]
    return max(0, (n - b) // a)


def squared_distances(uploads: Sequence[Weights], names: Iterable[str]) -> Tensor:
    """||w_i - w_j||^2 over the tensors `names`, for each pair. float64 [n, n]"""
    n, names = len(uploads), list(names)
    found = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i):
            terms = [(uploads[i][name].double() - uploads[j][name].double()).square().sum() for name in names]
            found[i, j] = found[j, i] = torch.stack(terms).sum()
    return found


def krum_scores(distances: Tensor, f: int) -> Tensor:
    """The sum of the squared distances to the n - f - 2 nearest others, but at least to one, where there is one. [n]"""
    n = len(distances)
    nearest = distances.sort(1).values[:, 1:]  # without the distance to itself, which is 0
    return nearest[:, : max(1, n - f - 2)].sum(1)


def chosen(how: Selection, distances: Tensor, f: int) -> list[int]:
    """The models that the rule chooses, in ascending order; ties go to the first."""
    n = len(distances)
    if how == "bulyan":
        left, picked = list(range(n)), []
        for _ in range(max(1, n - 2 * f)):
            scores = krum_scores(distances[left][:, left], f)
            picked.append(left.pop(int(scores.argmin())))
        return sorted(picked)
    count = 1 if how == "krum" else max(1, n - f - 2)
    return sorted(krum_scores(distances, f).sort(stable=True).indices[:count].tolist())


def byzantine_mean(
    how: Selection | Literal["trimmed_mean"], uploads: Sequence[Weights], names: Iterable[str], f: int
) -> Weights:
    """One model from the uploads. `names` are the tensors (the parameters) by which models are compared.

    Integer tensors (counters) have no mean: their maximum is kept.
    """
    if f > bearable(how, len(uploads)):
        raise ValueError(f"{how}: {len(uploads)} models bear {bearable(how, len(uploads))} liars, not {f}")
    if how == "trimmed_mean":
        return by_number(uploads, lambda values: values.double().sort(0).values[f : len(values) - f].mean(0))
    kept = [uploads[i] for i in chosen(how, squared_distances(uploads, names), f)]
    if how == "bulyan":
        return by_number(kept, lambda values: _nearest_to_median(values.double(), len(values) - 2 * f))
    return uniform_mean(kept)


def _nearest_to_median(values: Tensor, count: int) -> Tensor:
    order = (values - weighted_median(values)).abs().sort(dim=0, stable=True).indices[:count]
    return values.gather(0, order).mean(0)
