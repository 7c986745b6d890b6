"""Fed-ET (Cho, Manoel, Joshi, Sim, Dimitriadis, IJCAI 2022): ensemble knowledge transfer to a large server model.

Small models of different architectures are trained on the clients; on unlabelled public samples their consensus,
weighted by how sure each is, trains a model of the server's own that never travels. Bodies differ, the "representation
layer" at the end (here: the head) has one shape in all models and is passed both ways. Line numbers are those of
Algorithm 1, equation numbers the paper's.

Outside of this file: clients are drawn in proportion to their data (line 12) with federation.sampling = "size" and have
their designated model M(k) (line 1) by models.assign = "random". The public samples are one transformed copy with
public.augment, or transformed at each step with public.fresh. Before the first round all models get one head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..federation import Federation, Replies, per_client
from ..method import Info, Model, register
from ..parts.consensus import ConsensusTeacher, ensemble_loss, normalised
from ..parts.distill import Distill
from ..parts.local import Local
from ..parts.teachers import BATCH, Cache
from ..server import Server
from ..tensors import Weights
from .common.averaging import average_of, models_of
from .common.fusion import Asked, asked, finite_models, first_batch, fuse, visited
from .common.heads import head_of
from .common.reporting import note_teachers
from .common.training import Update, local_update


def tau_s_steps() -> Distill:
    """The paper's server steps for images: tau_s = 128, b_s = 64, eta_s = 0.005, plain SGD."""
    return Distill(steps=128, batch=64, optimizer="sgd", lr=0.005, schedule="constant", clip=None)


@register("fedet")
@dataclass(frozen=True)
class FedET:
    """A large server model from small, different client models."""

    local: Local = field(default_factory=lambda: Local(steps=30))  # tau, b = 64, eta = 0.1
    fusion: Distill = field(default_factory=tau_s_steps)
    diversity: float = 0.05  # lambda
    div_target: Literal["raw", "normalised"] = "raw"  # s_div as it is, or divided by its sum
    average: Literal["uniform", "median"] = "uniform"  # lines 9, 10; median: number by number, against liars
    report_ensemble: bool = True  # measure the teachers' consensus each round (costs a pass of each)

    info: ClassVar[Info] = Info(
        title="Fed-ET",
        paper="Cho et al., IJCAI 2022",
        models="any mix with heads of one shape, and a model of the server's own",
        wire="model down, model up",
        public="unlabelled, on the server",
        state="nothing",
        privacy="individual replies",
    )
    needs: ClassVar[tuple[str, ...]] = ("shared head", "large")

    @dataclass(frozen=True)
    class State:
        small: dict[str, Weights]  # the hashmap M: model id -> weights
        large: Model  # w, the server's own

    def __post_init__(self) -> None:
        if not 0 <= self.diversity < float("inf"):
            raise ConfigError(f"fedet: diversity = {self.diversity} must not be negative (0 switches the term off)")
        if self.local.steps is not None and self.local.epochs != Local.epochs:
            raise ConfigError(
                f"fedet: local.epochs = {self.local.epochs} has no effect beside local.steps = {self.local.steps}: "
                "leave it out, or set local.steps = 'none' to train by epochs"
            )
        if self.fusion.temperature != 1 or self.fusion.t_squared or self.fusion.keep_init_if_better:
            raise ConfigError(
                "fedet: labels have no temperature and the last of the server's steps counts: leave out "
                "fusion.temperature, fusion.t_squared and fusion.keep_init_if_better"
            )

    def init(self, fed: Federation, server: Server) -> State:
        if server.large is None:
            raise ConfigError("fedet trains a model of the server's own: set models.server, say to 'vgg19'")
        w = server.init(server.large)
        M = {i: server.init(i) | head_of(w) for i in server.architectures}  # line 1
        return self.State(M, Model(server.large, w))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M, w, large = state.small, state.large.weights, state.large.architecture
        S = fed.sample()  # lines 1 and 12
        sent = per_client(lambda k: M[fed.architecture(k)])  # line 5: M[M(k)]
        x = fed.map(local_update, S, weights=sent, local=self.local, mu=0.0)  # lines 4-6, eq. (1)
        d = server.public.round_indices(server.per_round, fed.seed("public"))
        teachers = finite_models(x, first_batch(d, self.fusion, server), fed, server)
        if self.report_ensemble:
            self.report(x, teachers, d, fed, server)

        copies = [fed.copies.get(k, 1) for k in teachers]  # with replacement, S is a multiset
        consensus = ConsensusTeacher(list(teachers.values()), copies)  # line 8, eq. (2)-(7)
        heads = Replies((k, Update(head_of(x[k].weights))) for k in teachers)
        w = w | average_of(self.average, heads, list(teachers), fed)  # line 9
        labels = asked(consensus, False, d, self.fusion, fed.seed, server)
        facts = self.dissent(labels, d, fed)
        taught = fuse({large: w}, labels, d, self.fusion, fed.seed, server, self.loss, validate=False, **facts)
        w = taught[large]  # line 10, eq. (11)
        for i in server.architectures:
            S_i = [k for k in teachers if fed.architecture(k) == i]
            if S_i:
                M = M | {i: average_of(self.average, x, S_i, fed)}  # line 10, eq. (12)
        h = head_of(w)
        return self.State({i: w_i | h for i, w_i in M.items()}, Model(large, w))  # line 11: also those without a client

    def loss(self, logits: Tensor, labels: Tensor, dissent: Tensor) -> Tensor:
        """Eq. (10), which the server's steps of eq. (11) go down: cross-entropy, and the diversity term of eq. (9)."""
        target = normalised(dissent) if self.div_target == "normalised" else dissent
        return ensemble_loss(logits, labels, target, self.diversity)

    def dissent(self, labels: Asked, d: Tensor, fed: Federation) -> dict[str, Any]:
        """How much weight the dissenters A(x) have, on average; known where labels are kept."""
        if not isinstance(labels, Cache):
            return {}
        seen = visited(d, self.fusion, fed.seed)
        weight = torch.cat([labels[i][1].sum(-1) for i in seen.split(BATCH)])
        return {"dissent": weight.nan_to_num().mean().item()}

    def report(self, x: Replies, teachers: Mapping[str, Any], d: Tensor, fed: Federation, server: Server) -> None:
        """Have the consensus measured; who was drawn twice is in it twice."""
        members = [(fed.architecture(k), x[k].weights) for k in teachers for _ in range(fed.copies.get(k, 1))]
        server.report_ensemble("teachers", members, "confidence")
        note_teachers(teachers, d, fed, server)

    def models(self, state: State) -> dict[str, Model]:
        return {state.large.architecture: state.large} | models_of(state.small)
