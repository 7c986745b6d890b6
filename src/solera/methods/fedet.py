"""Fed-ET (Cho, Manoel, Joshi, Sim, Dimitriadis, IJCAI 2022): ensemble knowledge transfer to a large server model.

Small models of different architectures are trained on the clients; on unlabelled public samples their consensus,
weighted by how sure each is, trains a model of the server's own that never travels. Bodies differ, the "representation
layer" at the end (here: the head) has one shape in all models and is passed both ways. Line numbers are those of
Algorithm 1, equation numbers the paper's.

Outside of this file: clients are drawn in proportion to their data (line 12) with federation.sampling = "size" and have
their designated model M(k) (line 1) by models.assign = "random". The public samples are one transformed copy with
public.augment = "once", or transformed at each draw with "draw". Before the first round all models get one head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..federation import Federation, Replies, per_client
from ..method import About, Method, Model, Traits, register
from ..parts.consensus import ConsensusTeacher, confidence_weights, ensemble_loss, normalised
from ..parts.distill import Distill, Distilled, cached, distill, visits
from ..parts.local import Local
from ..parts.teachers import BATCH, Frozen
from ..server import Server
from ..tensors import Weights, weights_of
from .common.averaging import average_of, models_of
from .common.fusion import finite_models, note_teachers, side_by_side
from .common.heads import head_of
from .common.training import Update, local_update


def tau_s_steps() -> Distill:
    """The paper's server steps for images: tau_s = 128, b_s = 64, eta_s = 0.005, plain SGD."""
    return Distill(steps=128, batch=64, optimiser="sgd", lr=0.005, schedule="constant", clip=None)


@register("fedet")
@dataclass(frozen=True)
class FedET(Method):
    """A large server model from small, different client models."""

    local: Local = field(default_factory=lambda: Local(steps=30))  # tau, b = 64, eta = 0.1
    fusion: Distill = field(default_factory=tau_s_steps)
    diversity: float = 0.05  # lambda
    div_target: Literal["raw", "normalised"] = "raw"  # s_div as it is, or divided by its sum
    average: Literal["uniform", "median"] = "uniform"  # lines 9, 10; median: number by number, against liars
    report_ensemble: bool = True  # measure the teachers' consensus each round (costs a pass of each)

    about: ClassVar[About] = About(
        title="Fed-ET",
        paper="Cho et al., IJCAI 2022",
        wire="model down, model up",
        state="nothing",
    )

    @dataclass(frozen=True)
    class State:
        small: dict[str, Weights]  # the hashmap M: model id -> weights
        large: Model  # w, the server's own

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="server", split="shared head", server_model="larger")

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
        M = state.small
        S = fed.sample()  # lines 1 and 12
        sent = per_client(lambda k: M[fed.architecture(k)])  # line 5: M[M(k)]
        x = fed.map(local_update, S, weights=sent, local=self.local, mu=0.0)  # lines 4-6, eq. 1
        d = server.public.round_indices(server.per_round, fed.seed("public"))
        teachers = self.teachers(x, d, fed, server)  # line 8
        heads = Replies((k, Update(head_of(x[k].weights))) for k in teachers)
        h = average_of(self.average, heads, list(teachers), fed)  # line 9
        large = Model(state.large.architecture, state.large.weights | h)
        large = self.transfer(large, teachers, d, fed, server)  # line 10, eq. 11
        for i in server.architectures:
            S_i = [k for k in teachers if fed.architecture(k) == i]
            if S_i:
                M = M | {i: average_of(self.average, x, S_i, fed)}  # line 10, eq. 12
        h = head_of(large.weights)
        return self.State({i: w_i | h for i, w_i in M.items()}, large)  # line 11: also those without a client

    def transfer(
        self, large: Model, models: Mapping[str, nn.Module], d: Tensor, fed: Federation, server: Server
    ) -> Model:
        """The server's steps (eq. 11) on the ensemble loss (eq. 10). Labels of a static view are asked for once."""
        seed = fed.seed("fusion")
        copies = [fed.copies.get(k, 1) for k in models]  # with replacement, S is a multiset
        teacher: Any = ConsensusTeacher(list(models.values()), copies, self.weights)
        facts: dict[str, Any] = {}
        if self.fusion.steps > 0 and not server.public.fresh:
            seen = d[visits(len(d), self.fusion.steps, self.fusion.batch, seed)].unique()
            teacher = cached(teacher, server.public, seen, self.fusion, partial(side_by_side, fed, server))
            dissenters = torch.cat([teacher[i][1].sum(-1) for i in seen.split(BATCH)])  # A(x): who dissents
            facts["dissent"] = dissenters.nan_to_num().mean().item()

        def student() -> tuple[Distilled, Weights]:
            model = server.model(large.architecture, large.weights)
            done = distill(model, server.public, teacher, self.fusion, seed, indices=d, loss=self.loss)
            return done, weights_of(model)

        ((done, weights),) = side_by_side(fed, server, [student])  # one job, for its own random numbers (dropout)
        kind = "distill_diverged" if done.diverged else "distilled"
        facts |= {"steps": done.steps, "best_step": done.best_step, "loss": done.loss}
        server.event(kind, architecture=large.architecture, **facts)
        return Model(large.architecture, weights)

    def weights(self, probs: Tensor, copies: Tensor | None) -> Tensor:
        """alpha_k(x) of eq. 3: how much each teacher counts, from the teachers' probabilities [teachers, samples,
        classes] and how often each was drawn. [teachers, samples], with sum 1 over the teachers."""
        return confidence_weights(probs, copies)

    def loss(self, logits: Tensor, labels: Tensor, dissent: Tensor) -> Tensor:
        """Eq. 10, of a batch: the server's logits [samples, classes], the consensus labels [samples] and s_div
        [samples, classes], to a number."""
        target = normalised(dissent) if self.div_target == "normalised" else dissent
        return ensemble_loss(logits, labels, target, self.diversity)

    def teachers(self, x: Replies, d: Tensor, fed: Federation, server: Server) -> dict[str, Frozen]:
        """The clients' models that are averaged and teach: those that answer with finite numbers."""
        models = finite_models(x, server.public[d[: self.fusion.batch]], fed, server)
        if self.report_ensemble:
            members = [(fed.architecture(k), x[k].weights) for k in models for _ in range(fed.copies.get(k, 1))]
            server.report_ensemble("teachers", members, "confidence")
            note_teachers(models, d, fed, server)
        return models

    def models(self, state: State) -> dict[str, Model]:
        return {state.large.architecture: state.large} | models_of(state.small)
