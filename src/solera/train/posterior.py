"""Additional teachers: models sampled from a distribution around the clients' models.

    gaussian    independent normal parameters, mean and variance over clients         FedBE (Chen & Chao, ICLR 2021)
    dirichlet   random convex combinations of the clients' models                     FedBE
    swag        a normal with the clients' full-rank covariance and its diagonal      FedDistill, arXiv v1 of FedBE

Moments are float64. Only parameters are sampled. The buffers of a sample (BatchNorm statistics) are those of the mean,
or of the combination, and do not fit its parameters; `norms.reestimate` computes new ones.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..core.tensors import Weights
from .aggregate import uniform_mean, weighted_mean
from .teachers import Targets, Teacher, entropy

Kind = Literal["gaussian", "dirichlet", "swag"]


def moments(models: Sequence[Weights], n: Sequence[float], names: Collection[str]) -> tuple[Weights, Weights]:
    """Mean and variance over the models, weighted by n, of the tensors `names`, in float64."""
    share = torch.tensor(n, dtype=torch.float64) / sum(n)
    mean, variance = {}, {}
    for name in names:
        mean[name] = _combine(share, [m[name].double() for m in models])
        variance[name] = _combine(share, [(m[name].double() - mean[name]).square() for m in models])
    return mean, variance


def _combine(share: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for a, t in zip(share, tensors, strict=True):
        total += a * t
    return total


def gaussian(
    models: Sequence[Weights], n: Sequence[float], names: Collection[str], samples: int, seed: int
) -> list[Weights]:
    """mu + sqrt(Sigma) eps with mu = sum_k (n_k/n) w_k and Sigma the diagonal of sum_k (n_k/n) (w_k - mu)^2."""
    g, base = torch.Generator().manual_seed(seed), weighted_mean(models, n)
    mean, variance = moments(models, n, names)
    return [
        base | {a: (mean[a] + variance[a].sqrt() * _noise(mean[a], g)).to(base[a].dtype) for a in names}
        for _ in range(samples)
    ]


def normalised_gaussian(
    models: Sequence[Weights],
    n: Sequence[float],
    names: Collection[str],
    samples: int,
    seed: int,
    sent: Weights,
    scale: float = 0.1,
) -> list[Weights]:
    """The gaussian of FedBE's public code: over the directions of the clients' updates from `sent`.

    Per tensor, the updates w_k - x are divided by their norm, a direction is sampled with `scale` times their variance,
    and multiplied by the mean norm.
    """
    g, base = torch.Generator().manual_seed(seed), weighted_mean(models, n)
    share = torch.tensor(n, dtype=torch.float64) / sum(n)
    moves = [{a: m[a].double() - sent[a].double() for a in names} for m in models]
    norms = {a: torch.stack([u[a].norm() for u in moves]) for a in names}
    directions = [{a: u[a] / norms[a][k].clamp_min(1e-30) for a in names} for k, u in enumerate(moves)]
    mean, variance = moments(directions, n, names)

    def draw(a: str) -> Tensor:
        direction = mean[a] + (scale * variance[a]).sqrt() * _noise(mean[a], g)
        return (sent[a].double() + (share * norms[a]).sum() * direction).to(base[a].dtype)

    return [base | {a: draw(a) for a in names} for _ in range(samples)]


def dirichlet(
    models: Sequence[Weights], n: Sequence[float], samples: int, seed: int, alpha: float = 1.0
) -> list[Weights]:
    """sum_k gamma_k n_k w_k / sum_k gamma_k n_k with gamma ~ Dir(alpha, ..., alpha): a convex combination."""
    gammas = np.random.default_rng(seed).dirichlet([alpha] * len(models), samples)
    return [weighted_mean(models, dirichlet_coefficients(gamma.tolist(), n)) for gamma in gammas]


def dirichlet_coefficients(gamma: Sequence[float], n: Sequence[float]) -> list[float]:
    """gamma_k n_k / sum_k gamma_k n_k."""
    products = [a * b for a, b in zip(gamma, n, strict=True)]
    total = math.fsum(products)
    return [p / total for p in products]


def swag(
    models: Sequence[Weights], names: Collection[str], samples: int, seed: int, scale: float = 0.5
) -> list[Weights]:
    """mu + sqrt(scale) (sqrt(v) eps1 + D' eps2 / sqrt(m - 1)): D has the m deviations from the mean as its rows.

    eps2 is the same for all tensors, so that a sample varies along whole client models. scale = 1/2 gives SWAG's
    factors. With one model, every sample is that model.
    """
    g, base = torch.Generator().manual_seed(seed), uniform_mean(models)
    mean, variance = moments(models, [1.0] * len(models), names)
    rank, out = math.sqrt(max(len(models) - 1, 1)), []
    for _ in range(samples):
        along = torch.randn(len(models), generator=g, dtype=torch.float64)
        sample = dict(base)
        for a in names:
            low_rank = _combine(along, [m[a].double() - mean[a] for m in models]) / rank
            noise = variance[a].sqrt() * _noise(mean[a], g)
            sample[a] = (mean[a] + math.sqrt(scale) * (noise + low_rank)).to(base[a].dtype)
        out.append(sample)
    return out


def _noise(like: Tensor, g: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=g, dtype=torch.float64)


def sharpen(probs: Tensor, temperature: float) -> Tensor:
    """p^(1/T) divided by its sum, for every row: T below 1 makes it sharper."""
    return (probs.log() / temperature).softmax(-1)


def sharpened(teacher: Teacher, temperature: float) -> Callable[[Tensor], Targets]:
    """The same teacher with sharpened probabilities."""

    def answer(inputs: Tensor) -> Targets:
        probs = sharpen(teacher(inputs)[0], temperature)
        return probs, entropy(probs)

    return answer
