"""Hierarchical FedDF (Lin, Kong, Stich, Jaggi, NeurIPS 2020, section 3, discussion): fusion in groups and above them.

The paper names it in one sentence, as a protection of clients, and leaves it to future work: "performing hierarchical
and decentralized model fusion through synchronizing locally inferred logits". Clients belong to groups. A group's
server fuses its clients' models as FedDF does (Algorithm 3): one average for each architecture, distilled from the mean
logits of the group's clients. Above, the groups are fused in the same way, the groups' models being the teachers. So no
single client's model leaves its group. With `exchange = "logits"` no model leaves it at all: the groups synchronise
the logits they infer, and each distils their mean into its own models.

From the paper: fusion in groups and above them, the fusion step itself, the exchange of logits. Our choices: the
division into groups; how often groups are fused (`every`); a group's weight above, by the examples that went into it;
and group servers that run in the server's process, with the bytes between them and the one above counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.federation import Federation
from ..core.randomness import seed_from
from ..core.settings import NonNegative, PositiveInt
from ..core.tensors import Weights
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.aggregate import weighted_mean
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.teachers import Ensemble, Frozen, frozen
from .steps.fusion import (
    Asked,
    asked,
    copies_of,
    finite_models,
    first_batch,
    fuse,
    logits_problems,
    public_indices,
    validation_problems,
    visited,
)
from .steps.screen import Screen
from .steps.training import Sent, Upload, models_of

Student = tuple[str, int]  # an architecture in a group


@register("hierarchical")
@dataclass(frozen=True)
class Hierarchical(Method):
    """Fusion by distillation in groups of clients, and of the groups above them."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)  # of clients, in each group
    above: Distill = field(default_factory=Distill)  # of the groups
    groups: PositiveInt = 2  # each with a server of its own
    grouping: Literal["random", "blocks"] = "random"  # blocks: consecutive clients of the roster
    every: PositiveInt = 1  # rounds between two fusions above
    exchange: Literal["models", "logits"] = "models"  # what groups exchange
    mu: NonNegative = 0.0  # proximal term in the clients' objective, as in FedProx
    upload: Upload = field(default_factory=Upload)  # what clients send
    screen: Screen = field(default_factory=Screen)  # by each group's server: which uploads count

    about: ClassVar[About] = About(
        title="Hierarchical FedDF",
        paper="Lin et al., NeurIPS 2020, section 3",
        wire="model down, model up; between a group and the server above: its models, or logits",
        state="nothing",
        privacy="of its own clients, by a group's server; above it: groups' models, or their logits",
    )

    @dataclass(frozen=True)
    class State:
        weights: list[dict[str, Weights]]  # of each group: architecture -> weights
        votes: list[dict[str, float]]  # examples (or clients) that went into them since the last fusion above
        fused: dict[str, Weights]  # after the last fusion above; empty with exchange = "logits"

    def traits(self) -> Traits:
        public: Literal["server", "none"] = "server" if self.fusion.steps or self.above.steps else "none"
        return Traits(across="knowledge", public=public, precision=self.upload.precision, products=True)

    def problems(self) -> Iterator[str]:
        if self.exchange == "logits" and self.above.steps == 0:
            yield "above.steps = 0: with exchange = 'logits' groups learn from each other by distillation alone"

    def fits(self, server: Server) -> Iterator[str]:
        yield from super().fits(server)
        yield from validation_problems("fusion", self.fusion, server)
        yield from validation_problems("above", self.above, server)
        if self.traits().public == "none":
            return
        if self.exchange == "logits" and server.public.fresh:
            yield 'method.exchange = "logits": groups must see the same public samples; leave out public.fresh'
        yield from logits_problems("hierarchical", server)

    def init(self, fed: Federation, server: Server) -> State:
        if self.groups > len(fed.clients):
            raise ConfigError(f"method.groups = {self.groups}: there are only {len(fed.clients)} clients")
        M = {A: server.init(A) for A in server.architectures}
        return self.State([M] * self.groups, self._none(), {} if self.exchange == "logits" else M)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M, S, group = state.weights, fed.sample(), self.group_of(fed)
        sent: Sent = lambda k: M[group[k]][fed.architecture(k)]  # noqa: E731
        x = self.upload.ask(sent, S, self.local, self.mu, fed, server)
        for g in range(self.groups):
            x |= self.screen.uploads(x.read_as({k: x[k] for k in x if group[k] == g}), sent, fed, server)
        d = public_indices(self.fusion, fed.seed, server)
        models = finite_models(x, first_batch(d, self.fusion, server), fed, server, build=self.upload.build(server))
        x_0: dict[Student, Weights] = {}
        avg_logits: dict[Student, Asked] = {}
        votes = [dict(own) for own in state.votes]
        for g in sorted({group[k] for k in models}):  # the work of group g's server
            members = self.screen.members({k: m for k, m in models.items() if group[k] == g}, x, fed, server)
            heard = self._asked(self.screen.teachers(members, fed, server), d, fed, server)
            for A, w in self.screen.averages(x, members, fed, server).items():
                x_0[A, g], avg_logits[A, g] = w, heard
                votes[g][A] = votes[g].get(A, 0.0) + self._votes([k for k in members if fed.architecture(k) == A], fed)
        fused = fuse(x_0, avg_logits, d, self.fusion, fed.seed, server)
        M = [own | {A: w for (A, h), w in fused.items() if h == g} for g, own in enumerate(M)]

        state = self.State(M, votes, state.fused)
        return state if (fed.round + 1) % self.every else self.fuse_above(state, fed, server)

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        """Fuse groups that have trained since the last fusion above."""
        return self.fuse_above(state, fed, server) if any(state.votes) else state

    def fuse_above(self, state: State, fed: Federation, server: Server) -> State:
        """Fuse the groups' models, or have every group distil the mean logits of all groups into its own models."""
        seeds = partial(fed.seed, "above")
        members = [(A, g) for g, own in enumerate(state.votes) for A in own]
        if len({g for _, g in members}) < 2:  # a single group: its models are the result
            return self._as_one(state, fed)
        uploads = [(A, state.weights[g][A]) for A, g in members]
        per_group = [1 / len(state.votes[g]) if self.exchange == "logits" else 1.0 for _, g in members]
        names = [f"{A}.{g}" for A, g in members]
        server.report_ensemble("groups", uploads, "avg_logits", per_group, names=names)
        avg_logits = Ensemble(frozen(uploads, server.model), "avg_logits", per_group, self.above.temperature)
        d = public_indices(self.above, seeds, server)

        if self.exchange == "logits":
            self._count_logits(len(visited(d, self.above, seeds)), state, fed, server)
            students = {(A, g): w for g, own in enumerate(state.weights) for A, w in own.items()}
            taught = fuse(students, avg_logits, d, self.above, seeds, server, level="above")
            M = [{A: taught[A, g] for A in own} for g, own in enumerate(state.weights)]
            return self.State(M, self._none(), {})

        x_0 = {}
        for A in sorted({A for A, _ in members}):
            own = [g for B, g in members if B == A]
            x_0[A] = weighted_mean([state.weights[g][A] for g in own], [state.votes[g][A] for g in own])
            if self.above.steps:
                server.report_average(A, x_0[A])
        fused = fuse(x_0, avg_logits, d, self.above, seeds, server, level="above")
        return self._as_one(state, fed, fused)

    # ---- groups ----

    def group_of(self, fed: Federation) -> dict[str, int]:
        """The group of each client, the same in every round: the clients of every architecture are assigned to
        groups in turn, or consecutive clients form a group."""
        clients = list(fed.clients)
        if self.grouping == "blocks":
            return {k: i * self.groups // len(clients) for i, k in enumerate(clients)}
        generator = torch.Generator().manual_seed(seed_from(fed.run_seed, "hierarchy"))
        order = torch.randperm(len(clients), generator=generator).tolist()
        order.sort(key=lambda i: fed.architecture(clients[i]))  # a stable sort: still shuffled in each architecture
        return {clients[i]: g % self.groups for g, i in enumerate(order)}

    def _votes(self, S: list[str], fed: Federation) -> float:
        """The weight above of the average of clients S: such that the average of averages is that of all clients."""
        by_examples = self.screen.average == "weighted"
        return sum(n * (fed.num_examples(k) if by_examples else 1) for k, n in zip(S, copies_of(S, fed), strict=True))

    def _none(self) -> list[dict[str, float]]:
        return [{} for _ in range(self.groups)]

    def _asked(self, models: dict[str, Frozen], d: Tensor, fed: Federation, server: Server) -> Asked:
        teacher = Ensemble(list(models.values()), "avg_logits", copies_of(models, fed), self.fusion.temperature)
        return asked(teacher, len({m.architecture for m in models.values()}) > 1, d, self.fusion, fed.seed, server)

    # ---- what travels between the groups and the server above ----

    def _as_one(self, state: State, fed: Federation, fused: dict[str, Weights] | None = None) -> State:
        """All groups continue from the models `fused` above; if None, from those of the only group with models."""
        up = [{A: M[A] for A in own} for M, own in zip(state.weights, state.votes, strict=True) if own]
        new = up[0] if fused is None else fused
        if self.groups > 1 and self.exchange == "models":
            fed.carried("fuse_above", down=[new] * self.groups, up=up)
        if self.exchange == "logits":
            return self.State(state.weights, self._none(), {})
        M = state.fused | new
        return self.State([M] * self.groups, self._none(), M)

    def _count_logits(self, samples: int, state: State, fed: Federation, server: Server) -> None:
        logits = torch.empty(samples, *server.answer)
        fed.carried("synchronise_logits", down=[logits] * self.groups, up=[logits] * sum(map(bool, state.votes)))

    def models(self, state: State) -> dict[str, Model]:
        """One model for each architecture; with exchange = "logits", one for each architecture and group."""
        if self.exchange == "models":
            return models_of(state.fused)
        return {f"{A}.{g}": Model(A, w) for g, own in enumerate(state.weights) for A, w in own.items()}
