"""Ensemble trainers, the second slot of the framework: which models are members of the ensemble.

    clients      all client models of the round: FedDF; of several groups with K > 1       sections 4.1 1) and 4)
    bayesian     these, their average, and models sampled around them: FedBE, FedDistill   2)
    aggregated   the K global models of the last R rounds, before any distillation         3) and 5)

Numbers are those of FedEED's section 4.1. Only the last needs no individual client model. With `tune`, every member is
then trained on the server's labelled samples (section 3.2: the ensemble trainer "may also fine-tune the ensemble").
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.settings import Positive, PositiveInt, Problem, settings
from ...core.tensors import Weights, subset, weights_of
from ...scenario.server import Server
from ...train.fitting import Diverged, Fitted, Local, fit
from ...train.norms import has_batchnorm, parameter_names
from ...train.posterior import Kind, dirichlet, gaussian, normalised_gaussian, sharpened, swag
from ...train.teachers import Ensemble, Rule, frozen
from ..steps.fusion import outcome_of, side_by_side, with_statistics
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
    tune: Local = field(default_factory=lambda: Local(epochs=0, lr=0.01))  # members' training on labelled public data

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
        return self.tuned(self.untuned(w, uploads, sent, d, seeds, server), seeds, server)

    def untuned(
        self, w: Models, uploads: Sequence[Upload], sent: Models, d: Tensor, seeds: Seeds, server: Server
    ) -> list[Member]:
        """w^e_t: the members as they come from the clients."""
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

    @property
    def tunes(self) -> bool:
        """Whether members are fine-tuned: then labelled public samples are needed."""
        return bool(self.tune.epochs if self.tune.steps is None else self.tune.steps)

    def tuned(self, members: Sequence[Member], seeds: Seeds, server: Server) -> list[Member]:
        """w^e*_t: the members after training on the round's public samples and their labels, each for itself, so that
        they stay different. A member whose training diverges stays as it was."""
        if not self.tunes:
            return list(members)
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

    def teacher(self, members: Sequence[Member], temperature: float, server: Server) -> Any:
        """The members as one teacher: a function of a batch of inputs."""
        models = frozen([(m.architecture, m.weights) for m in members], server.model)
        teacher = Ensemble(models, self.rule, [m.share for m in members], temperature)
        return teacher if self.sharpen is None else sharpened(teacher, self.sharpen)
