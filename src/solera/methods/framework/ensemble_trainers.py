"""Ensemble trainers, the second slot of the framework: which models are members of the ensemble.

    clients      all client models of the round: FedDF; of several groups with K > 1       sections 4.1 1) and 4)
    bayesian     these, their average, and models sampled around them: FedBE, FedDistill   2)
    aggregated   the K global models of the last R rounds, before any distillation         3) and 5)

Numbers are those of FedEED's section 4.1. Only the last needs no individual client model.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...parts.norms import has_batchnorm, parameter_names
from ...parts.posterior import Kind, dirichlet, gaussian, normalised_gaussian, sharpened, swag
from ...parts.teachers import Ensemble, Rule, frozen
from ...server import Server
from ...settings import Positive, PositiveInt, Problem, settings
from ...tensors import Weights
from ..common.fusion import with_statistics
from .local_trainers import Group, Models, Seeds

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
class EnsembleTrainer:
    """The built-in ensembles, by name. An object of your own with the same methods can replace this one."""

    kind: Literal["clients", "bayesian", "aggregated"] = "aggregated"
    R: PositiveInt = 1  # aggregated: checkpoints of the last R rounds
    weighted: bool = False  # weigh clients by their number of examples
    rule: Rule = "avg_logits"  # how predictions are combined; "confidence": Fed-ET's, weighted by confidence
    posterior: Kind = "gaussian"
    samples: PositiveInt = 10  # M, of each global model
    alpha: Positive = 1.0  # dirichlet: all of its parameters
    scale: Positive = 0.5  # swag: of its covariance
    update_normalised: bool = False  # gaussian: over the directions of the updates, as in FedBE's code
    include_clients: bool = True
    include_average: bool = True
    sharpen: Positive | None = None  # temperature of the teacher's probabilities, below 1

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.R > 1 and self.kind != "aggregated":
            yield f"R = {self.R}: only kind = 'aggregated' keeps checkpoints, not {self.kind!r}"

    @property
    def needs_client_models(self) -> bool:
        return self.kind != "aggregated"

    def members(
        self, w: Models, uploads: Sequence[Upload], sent: Models, d: Tensor, seeds: Seeds, server: Server
    ) -> list[Member]:
        """The new members of this round; `w` are the aggregates, `d` the round's public samples, if any."""
        if self.kind == "aggregated":
            return [Member(A, k, weights, 1.0) for (A, k), weights in w.items()]
        clients = [Member(*u.group, u.weights, float(u.examples if self.weighted else u.copies)) for u in uploads]
        if self.kind == "clients":
            return clients
        by_group: dict[Group, list[Upload]] = defaultdict(list)
        for u in uploads:
            by_group[u.group].append(u)
        drawn: list[Member] = []
        for (A, k), own in sorted(by_group.items()):
            average = [w[A, k]] if self.include_average and (A, k) in w else []
            samples = self.draw(own, sent[A, k], parameter_names(server.template(A)), seeds("posterior", A, k))
            if self.posterior != "dirichlet" and len(d) > 1 and has_batchnorm(server.template(A)):
                some = torch.Generator().manual_seed(seeds("norm"))
                inputs = server.public[d[torch.randperm(len(d), generator=some)[:NORM_SAMPLES]]]
                samples = [with_statistics(A, s, inputs, server) for s in samples]
            drawn += [Member(A, k, s, 1.0) for s in [*average, *samples]]
        if self.weighted:  # on average, one client has the weight of one sampled model
            mean = sum(m.share for m in clients) / len(clients)
            clients = [Member(m.architecture, m.group, m.weights, m.share / mean) for m in clients]
        return (clients if self.include_clients else []) + drawn

    def draw(self, own: Sequence[Upload], sent: Weights, names: Sequence[str], seed: int) -> list[Weights]:
        """M models sampled around the uploads of one group."""
        models, n, M = [u.weights for u in own], [float(u.examples) for u in own], self.samples
        if self.posterior == "dirichlet":
            return dirichlet(models, n, M, seed, self.alpha)
        if self.posterior == "swag":
            return swag(models, names, M, seed, self.scale)
        if self.update_normalised:
            return normalised_gaussian(models, n, names, M, seed, sent)
        return gaussian(models, n, names, M, seed)

    def teacher(self, members: Sequence[Member], temperature: float, server: Server) -> Any:
        """The members as one teacher: a function of a batch of inputs."""
        models = frozen([(m.architecture, m.weights) for m in members], server.model)
        teacher = Ensemble(models, self.rule, [m.share for m in members], temperature)
        return teacher if self.sharpen is None else sharpened(teacher, self.sharpen)
