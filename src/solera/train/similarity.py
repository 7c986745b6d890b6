"""Knowledge coefficients: how much a client learns from each other client (MNFL, Sim-pFL, TopK-pFL).

A matrix of coefficients has a row for each giver and a column for each receiver: column n is the mixture that teaches
client n. If only some clients take part, `c` is their block of the matrix. Each of its columns keeps its sum (its
"mass"), so that the columns of the whole matrix still sum to 1. All computations are float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from ..core.settings import NonNegative, NonNegativeInt, OrInf, Positive, Problem, settings
from ..core.tensors import Weights
from .aggregate import weighted_mean

SMALLEST = 1e-12  # smallest probability in a logarithm
SEARCH_STEPS = 500  # maximum for the optimal coefficients; a hundred are usually enough
Slope = Callable[[Tensor], Tensor]  # weights of the mixtures [m, m] -> gradient of the receivers' losses by them
Reduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class Loss:
    """A collaborative loss as a function of the mixing weights [m, m]: each receiver's loss, and the gradient."""

    value: Callable[[Tensor], Tensor]  # [m]
    slope: Slope


Pull = Annotated[float, Ge(0), OrInf()]


@settings
class Coefficients:
    """Learning of the coefficients: projected gradient steps on the collaborative loss, regularised towards 1/N."""

    lr: NonNegative = 0.01  # eta_3
    auto_lr: bool = False  # instead of lr: powers of 5 that give a mean step of a column of 0.01 to 0.05
    steps: NonNegativeInt = 1  # a round
    lam: Positive = 1.0  # lambda, the weight of the collaborative loss
    rho: Pull = 0.7  # weight of the penalty towards 1/N; with 0, each client learns only from itself
    constraint: Literal["simplex", "none", "softmax5"] = "simplex"  # on a column

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if not self.auto_lr and self.rho < math.inf and self.lr * self.rho >= 1:
            yield f"rho = {self.rho}: with lr = {self.lr} the pull towards 1/N overshoots; lr * rho must be below 1"


def learn(c: Tensor, slope: Slope, share: Tensor, clients: int, cfg: Coefficients) -> Tensor:
    """The block `c` after this round's steps, eq. (7) of MNFL.

    `share` is the weight D_n/D of each receiver's loss and `clients` the number N of all clients. With lr = 0, or with
    rho = inf from the initial c = 1/N, nothing changes.
    """
    if (cfg.lr == 0 and not cfg.auto_lr) or cfg.rho == math.inf:
        return c  # no projection: it would round
    mass = c.sum(0)
    for _ in range(cfg.steps):
        gradient = _gradient(c, mass, slope, share, clients, cfg)
        c = c - (_auto_lr(gradient) if cfg.auto_lr else cfg.lr) * gradient
        if cfg.constraint == "simplex":
            c = project(c, mass)
    return mass * torch.softmax(5 * _per_mass(c, mass), 0) if cfg.constraint == "softmax5" else c


def _weights(c: Tensor, mass: Tensor, clients: int, cfg: Coefficients) -> tuple[Tensor, Tensor | float]:
    """The mixing weights of the clients present, and their derivative by the coefficients."""
    if cfg.constraint == "none":  # the mass is free; only the share of absent clients is compensated
        return c * (clients / len(c)), clients / len(c)
    return _per_mass(c, mass), torch.where(mass > 0, 1 / mass, 0.0)


def _gradient(c: Tensor, mass: Tensor, slope: Slope, share: Tensor, clients: int, cfg: Coefficients) -> Tensor:
    """The gradient of objective (4) by the coefficients."""
    weights, inner = _weights(c, mass, clients, cfg)
    return cfg.lam * share * slope(weights) * inner + 2 * cfg.rho * (c - 1 / clients)


def terms(c: Tensor, loss: Loss, share: Tensor, clients: int, cfg: Coefficients) -> tuple[Tensor, Tensor]:
    """The terms of objective (4) for each receiver: lambda D_n/D times its loss, and the penalty towards 1/N."""
    weights, _ = _weights(c, c.sum(0), clients, cfg)
    return cfg.lam * share * loss.value(weights), cfg.rho * (c - 1 / clients).square().sum(0)


def best(start: Tensor, loss: Loss, share: Tensor, clients: int, cfg: Coefficients, tolerance: float) -> Tensor:
    """The columns, with the masses of `start`, that minimise objective (4): the limit of `learn`.

    Each column's problem is convex. The accelerated projected gradient steps (FISTA, with a separate step size and
    restarts for each column) never make a column worse. They end when ten steps have improved no column by more than
    `tolerance` of its value.
    """
    mass, cfg = start.sum(0), replace(cfg, constraint="simplex")

    def total(c: Tensor) -> Tensor:
        collaborative, pull = terms(c, loss, share, clients, cfg)
        return collaborative + pull

    here, lead, value = start, start, total(start)
    momentum, length = torch.ones_like(mass), torch.ones_like(mass)
    before = torch.full_like(value, math.inf)
    for step in range(SEARCH_STEPS):
        if step % 10 == 0:
            if bool((before - value <= tolerance * (1 + value.abs())).all()):
                break
            before = value
        gradient, at_lead = _gradient(lead, mass, loss.slope, share, clients, cfg), total(lead)
        while True:
            new = project(lead - length * gradient, mass)
            moved, found = new - lead, total(new)
            bound = at_lead + (gradient * moved).sum(0) + moved.square().sum(0) / (2 * length)
            too_long = found > bound + 1e-12 * (1 + at_lead.abs())  # the last term allows for rounding
            if not bool(too_long.any()):
                break
            length = torch.where(too_long, length / 2, length)
        worse = found > value
        new, value = torch.where(worse, here, new), torch.where(worse, value, found)
        grown = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        lead = project(new + torch.where(worse, 0.0, (momentum - 1) / grown) * (new - here), mass)
        here, momentum, length = new, torch.where(worse, 1.0, grown), 1.2 * length
    return here


def project(v: Tensor, mass: Tensor | float = 1.0) -> Tensor:
    """The point of {c >= 0, sum c = mass} closest to each column of `v`."""
    falling = v.sort(0, descending=True).values
    excess = falling.cumsum(0) - mass
    count = torch.arange(1, len(v) + 1, dtype=v.dtype)[:, None]
    positive = (falling - excess / count > 0).sum(0, keepdim=True).clamp_min(1)  # entries that stay above 0
    return (v - excess.gather(0, positive - 1) / positive).clamp_min(0)


def mixtures(c: Tensor, uploads: Sequence[Weights]) -> list[Weights]:
    """For every receiver the mean of the givers' uploads, weighted by its column of `c`.

    Weights are relative to the largest of the column, so equal coefficients of any size give exactly the bits of the
    plain mean of the uploads. A column of zeros counts as uniform.
    """
    largest = c.amax(0)
    relative = torch.where(largest > 0, c.clamp_min(0) / largest, 1.0)
    return [weighted_mean(uploads, column) for column in relative.T.tolist()]


# ---- collaborative losses ---------------------------------------------------------------------------


def gram_matrix(uploads: Sequence[Weights], names: Sequence[str]) -> Tensor:
    """Inner products of the uploads, over the tensors `names`."""
    total = torch.zeros(len(uploads), len(uploads), dtype=torch.float64)
    for name in names:
        x = torch.stack([u[name].double().flatten() for u in uploads])
        total += x @ x.T
    return total


# ---- coefficients that are not learned --------------------------------------------------------------


def by_cosine(cosine: Tensor, scale: Literal["minmax", "l1"] = "minmax") -> Tensor:
    """Columns in proportion to the cosine, minus its minimum (minmax) or unchanged (l1). All equal: uniform."""
    above = cosine - cosine.amin(0) if scale == "minmax" else cosine.clamp_min(0)
    return _per_mass(above, above.sum(0))


def by_rank(cosine: Tensor, k: int) -> Tensor:
    """Columns of 1/k for the k nearest clients, the receiver itself first; ties go to the lower position."""
    k = min(k, len(cosine))
    nearest = cosine.clone().fill_diagonal_(math.inf).sort(stable=True, dim=0, descending=True).indices[:k]
    return torch.zeros_like(cosine).scatter_(0, nearest, 1 / k)


def _per_mass(c: Tensor, mass: Tensor) -> Tensor:
    """Columns that sum to 1; uniform for columns of zeros."""
    return torch.where(mass > 0, c / mass, 1 / len(c))


def _auto_lr(gradient: Tensor) -> Tensor:
    """The step sizes of the authors' code, per column: divided or multiplied by five, at most five times."""
    mean, lr = gradient.abs().mean(0), torch.ones(gradient.shape[1], dtype=gradient.dtype)
    for _ in range(5):
        lr = torch.where(mean * lr >= 0.05, lr / 5, torch.where(mean * lr < 0.01, lr * 5, lr))
    return lr
