"""Ensemble trainers, the second slot of the framework: which models are members of the ensemble.

    aggregated   the K global models of the last R rounds, before any distillation         3) and 5)
    clients      all client models of the round: FedDF; of several groups with K > 1       1) and 4)
    bayesian     these, their average, and models sampled around them: FedBE, FedDistill   2)

Numbers are those of FedEED's section 4.1. Only the first needs no individual client model. With `tune`, every member is
then trained on the server's labelled samples (section 3.2: the ensemble trainer "may also fine-tune the ensemble").

The models of `bayesian` are sampled from a distribution around the clients' models:

    gaussian    independent normal parameters, mean and variance over clients         FedBE (Chen & Chao, ICLR 2021)
    dirichlet   random convex combinations of the clients' models                     FedBE
    swag        a normal with the clients' full-rank covariance and its diagonal      FedDistill, arXiv v1 of FedBE
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.settings import NonNegative, Positive, PositiveInt, Slot, settings
from ...core.tensors import Weights, subset, weights_of
from ...scenario.server import Server
from ...train.aggregate import weighted_mean
from ...train.fitting import Diverged, Fitted, Local, fit
from ...train.norms import has_batchnorm, parameter_names
from ...train.teachers import Ensemble, Rule, Targets, Teacher, entropy, frozen
from ..steps.fusion import outcome_of, side_by_side
from ..steps.teaching import moments, noise, swag, with_public_statistics
from .grouping import Group, Models, Seeds

NORM_SAMPLES = 1024  # public samples for the BatchNorm statistics of sampled models


@dataclass(frozen=True)
class Member:
    """A frozen model of the ensemble, and its weight."""

    architecture: str
    group: int
    weights: Weights
    share: float


class Upload(NamedTuple):
    """A client's individual model, for ensembles that need it."""

    group: Group
    weights: Weights
    examples: float  # times how often the client was sampled
    copies: int


@settings
class EnsembleTrainer(Slot):
    """The K global models of the last R rounds are the ensemble."""

    kind: str = field(default="aggregated", init=False)
    sharpen: Positive | None = None  # temperature of the teacher's probabilities, below 1
    tune: Local = field(default_factory=lambda: Local(epochs=0, lr=0.01))  # members' training on labelled public data

    needs_client_models: ClassVar[bool] = False
    products: ClassVar[bool] = True  # no models are drawn around averages

    RENAMED: ClassVar = {"R": "method.R", "rule": "method.rule"}
    BESIDE: ClassVar = {
        key: f"method.ensemble_trainer.{key}, with kind = 'bayesian'"
        for key in ("posterior", "samples", "alpha", "scale", "update_normalised", "include_clients", "sharpen")
    }

    def members(
        self, w: Models, uploads: Sequence[Upload], sent: Models, d: Tensor, seeds: Seeds, server: Server
    ) -> list[Member]:
        """w^e_t: the new members of this round; `w` are the aggregates, `d` the round's public samples, if any."""
        return [Member(A, k, weights, 1.0) for (A, k), weights in w.items()]

    @property
    def tunes(self) -> bool:
        """True if members are fine-tuned, which needs labelled public samples."""
        return bool(self.tune.epochs if self.tune.steps is None else self.tune.steps)

    def tuned(self, members: list[Member], seeds: Seeds, server: Server) -> list[Member]:
        """w^e*_t: the members after training on the round's public samples and their labels, separately, so that they
        stay different. A member whose training diverges stays as it was."""
        if not self.tunes:
            return members
        d = server.public.round_indices(server.per_round, seeds("public"))
        inputs, labels = subset(server.public, d), server.public.labels[d]

        def train(m: Member, seed: int) -> tuple[Fitted | Diverged, Weights]:
            model = server.model(m.architecture, m.weights)  # built in the job, which may run twice
            done = outcome_of(partial(fit, model, inputs, labels, self.tune, seed))
            return done, weights_of(model)

        jobs = [partial(train, m, seeds("tune", i)) for i, m in enumerate(members)]
        results = side_by_side(seeds, server, jobs)
        server.worked(self.tune.visits(len(d)) * len(members))
        for m, (done, _) in zip(members, results, strict=True):
            if isinstance(done, Diverged):
                server.event("tuning_diverged", architecture=m.architecture, group=m.group, steps=done.steps)
        pairs = zip(members, results, strict=True)
        return [m if isinstance(done, Diverged) else replace(m, weights=w) for m, (done, w) in pairs]

    def teacher(self, members: Sequence[Member], rule: Rule, temperature: float, server: Server) -> Teacher:
        """The members as one teacher: a function of a batch of inputs."""
        models = frozen([(m.architecture, m.weights) for m in members], server.model)
        teacher = Ensemble(models, rule, [m.share for m in members], temperature)
        return teacher if self.sharpen is None else sharpened(teacher, self.sharpen)


@settings
class Clients(EnsembleTrainer):
    """The round's client models are the ensemble."""

    kind: str = field(default="clients", init=False)
    weighted: bool = False  # weigh clients by their number of examples

    needs_client_models = True

    def members(
        self, w: Models, uploads: Sequence[Upload], sent: Models, d: Tensor, seeds: Seeds, server: Server
    ) -> list[Member]:
        return [Member(*u.group, u.weights, float(u.examples if self.weighted else u.copies)) for u in uploads]


@settings
class Bayesian(Clients):
    """The round's client models, their average and models sampled around them are the ensemble."""

    kind: str = field(default="bayesian", init=False)
    posterior: Literal["gaussian", "dirichlet", "swag"] = "gaussian"
    samples: PositiveInt = 10  # M, of each global model
    alpha: Positive = 1.0  # dirichlet: all of its parameters
    scale: NonNegative = 0.5  # swag: of its covariance
    update_normalised: bool = False  # gaussian: over the directions of the updates, as in FedBE's code
    include_clients: bool = True
    include_average: bool = True

    products = False

    def members(
        self, w: Models, uploads: Sequence[Upload], sent: Models, d: Tensor, seeds: Seeds, server: Server
    ) -> list[Member]:
        clients, drawn = super().members(w, uploads, sent, d, seeds, server), []
        for g in sorted({u.group for u in uploads}):
            A, own = g[0], [u for u in uploads if u.group == g]
            samples = self.draw(own, sent[g], parameter_names(server.template(A)), seeds("posterior", *g))
            if self.posterior != "dirichlet" and len(d) > 1 and has_batchnorm(server.template(A)):
                samples = with_public_statistics(A, samples, d, NORM_SAMPLES, seeds("norm"), server)
            average = [w[g]] if self.include_average and g in w else []
            drawn += [Member(*g, s, 1.0) for s in [*average, *samples]]
        if self.weighted:  # on average, one client has the weight of one sampled model
            mean = sum(m.share for m in clients) / len(clients)
            clients = [replace(m, share=m.share / mean) for m in clients]
        return (clients if self.include_clients else []) + drawn

    def draw(self, own: Sequence[Upload], sent: Weights, names: Sequence[str], seed: int) -> list[Weights]:
        """M models sampled around the uploads of one group."""
        models, n, M = [u.weights for u in own], [float(u.examples) for u in own], self.samples
        if self.posterior == "dirichlet":
            return dirichlet(models, n, M, seed, self.alpha)
        if self.posterior == "swag":
            return swag([u.weights for u in own for _ in range(u.copies)], names, M, seed, self.scale)
        if self.update_normalised:
            return normalised_gaussian(models, n, names, M, seed, sent)
        return gaussian(models, n, names, M, seed)


# ---- distributions around the clients' models ------------------------------------------------------------------


def gaussian(
    models: Sequence[Weights], n: Sequence[float], names: Collection[str], samples: int, seed: int
) -> list[Weights]:
    """mu + sqrt(Sigma) eps with mu = sum_k (n_k/n) w_k and Sigma the diagonal of sum_k (n_k/n) (w_k - mu)^2."""
    g, base = torch.Generator().manual_seed(seed), weighted_mean(models, n)
    mean, variance = moments(models, n, names)
    return [
        base | {a: (mean[a] + variance[a].sqrt() * noise(mean[a], g)).to(base[a].dtype) for a in names}
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
        direction = mean[a] + (scale * variance[a]).sqrt() * noise(mean[a], g)
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


def sharpen(probs: Tensor, temperature: float) -> Tensor:
    """p^(1/T) divided by its sum, for every row: T below 1 makes it sharper."""
    return (probs.log() / temperature).softmax(-1)


def sharpened(teacher: Teacher, temperature: float) -> Callable[[Tensor], Targets]:
    """The same teacher with sharpened probabilities."""

    def answer(inputs: Tensor) -> Targets:
        probs = sharpen(teacher(inputs)[0], temperature)
        return probs, entropy(probs)

    return answer
