"""Fed-ET (Cho, Manoel, Joshi, Sim, Dimitriadis, IJCAI 2022): ensemble knowledge transfer to a large server model.

Small models of different architectures are trained on the clients. Their consensus on unlabelled public samples,
weighted by confidence, trains a larger server model that is never sent. Bodies differ. The "representation layer" at
the end (here: the head) has the same shape in all models and is transferred in both directions. Line numbers are those
of Algorithm 1, equation numbers those of the paper.

Settings outside of this file: federation.sampling = "size" samples clients in proportion to their data (line 12), and
models.assign = "random" gives clients their designated model M(k) (line 1). public.augment transforms the public
samples once, public.fresh at each step. All models start with the same head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.federation import Federation, Replies, per_client
from ..core.settings import NonNegative, Problem, show
from ..core.tensors import Weights
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.consensus import Weighting, confidence_weights, consensus, probabilities
from ..train.distill import Distill
from ..train.fitting import Local, logits_of
from ..train.teachers import BATCH, Cache
from .steps.fusion import Asked, asked, first_batch, fuse, visited
from .steps.reporting import note_teachers
from .steps.screen import Screen
from .steps.training import Own, by_architecture, head_of, local_update, models_of


def tau_s_steps() -> Distill:
    """The paper's server steps for images: tau_s = 128, b_s = 64, eta_s = 0.005, plain SGD."""
    return Distill(steps=128, batch=64, optimizer="sgd", lr=0.005, schedule="constant", clip=None)


@register("fedet")
@dataclass(frozen=True)
class FedET(Method):
    """A large server model from small, different client models."""

    local: Local = field(default_factory=lambda: Local(steps=30))  # tau, b = 64, eta = 0.1
    fusion: Distill = field(default_factory=tau_s_steps)
    diversity: NonNegative = 0.05  # lambda; 0 switches the term off
    div_target: Literal["raw", "normalised"] = "raw"  # s_div unchanged, or divided by its sum
    screen: Screen = field(default_factory=lambda: Screen("uniform"))  # lines 9, 10; heads always count the same
    report_ensemble: bool = True  # evaluate the teachers' consensus each round (one pass per teacher)

    about: ClassVar[About] = About("Fed-ET", "Cho et al., IJCAI 2022", "model down, model up", "nothing")

    @dataclass(frozen=True)
    class State:
        small: dict[str, Weights]  # the hashmap M: model id -> weights
        large: Own  # w, the server model

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="server", split="shared head", server_model="larger", products=True)

    def problems(self) -> Iterator[Problem]:
        if self.local.steps is not None and self.local.epochs != Local.epochs:
            yield (
                f"local.epochs = {self.local.epochs} has no effect beside local.steps = {self.local.steps}: "
                "leave it out, or set local.steps = 'none' to train by epochs"
            )
        fusion = self.fusion
        for key, off in (("temperature", 1), ("t_squared", False), ("keep_init_if_better", False)):
            if (value := getattr(fusion, key)) != off:
                yield (
                    f"fusion.{key} = {show(value)}: labels have no temperature, and the last of the server's steps "
                    "counts; leave it out"
                )

    def init(self, fed: Federation, server: Server) -> State:
        assert server.large is not None  # required by the traits
        w = server.init(server.large)
        M = {i: server.init(i) | head_of(w) for i in server.architectures}  # line 1
        return self.State(M, Own(server.large, w))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M, w, large = state.small, state.large.weights, state.large.architecture
        S = fed.sample()  # lines 1 and 12
        sent = by_architecture(M, fed)  # line 5: M[M(k)]
        x = fed.map(local_update, S, weights=per_client(sent), local=self.local, mu=0.0)  # lines 4-6, eq. (1)
        d = server.public.round_indices(server.per_round, fed.seed("public"))
        x, members, teachers = self.screen.screened(x, sent, first_batch(d, self.fusion, server), fed, server)
        if self.report_ensemble:
            self.report(x, teachers, d, fed, server)

        copies = [fed.copies.get(k, 1) for k in teachers]  # with replacement, S is a multiset
        consensus = ConsensusTeacher(list(teachers.values()), copies, self.weights)  # line 8, eq. (2)-(7)
        w = w | self.screen.head(x, members, fed, server)  # line 9
        labels = asked(consensus, False, d, self.fusion, fed.seed, server)
        facts = self.dissent(labels, d, fed)
        taught = fuse({large: w}, labels, d, self.fusion, fed.seed, server, self.loss, validate=False, **facts)
        w = taught[large]  # line 10, eq. (11)
        M = M | self.screen.averages(x, members, fed, server)  # line 10, eq. (12)
        h = head_of(w)
        return self.State({i: w_i | h for i, w_i in M.items()}, Own(large, w))  # line 11: for all models

    def weights(self, probs: Tensor, copies: Tensor | None) -> Tensor:
        """alpha_k(x) of eq. (3): the weight of each teacher, from the teachers' probabilities [teachers, samples,
        classes] and how often each was sampled. [teachers, samples], with sum 1 over the teachers."""
        return confidence_weights(probs, copies)

    def loss(self, logits: Tensor, labels: Tensor, dissent: Tensor) -> Tensor:
        """Eq. (10), the loss of the server's steps in eq. (11): cross-entropy plus the diversity term of eq. (9). A
        scalar, from logits [samples, classes], consensus labels [samples] and s_div [samples, classes]."""
        target = normalised(dissent) if self.div_target == "normalised" else dissent
        return ensemble_loss(logits, labels, target, self.diversity)

    def dissent(self, labels: Asked, d: Tensor, fed: Federation) -> dict[str, Any]:
        """The mean weight of the dissenting teachers A(x); known if the labels are cached."""
        if not isinstance(labels, Cache):
            return {}
        seen = visited(d, self.fusion, fed.seed)
        weight = torch.cat([labels[i][1].sum(-1) for i in seen.split(BATCH)])
        return {"dissent": weight.nan_to_num().mean().item()}

    def report(self, x: Replies, teachers: Mapping[str, Any], d: Tensor, fed: Federation, server: Server) -> None:
        """Evaluate the consensus. A client that was sampled twice counts twice."""
        members = [(fed.architecture(k), x[k].weights) for k in teachers for _ in range(fed.copies.get(k, 1))]
        replaced = None if type(self).weights is FedET.weights else lambda m, _: WeightedEnsemble(m, self.weights)
        server.report_ensemble("teachers", members, "confidence", teacher=replaced)
        note_teachers(teachers, d, fed, server, self.weights)

    def models(self, state: State) -> dict[str, Model]:
        return models_of({state.large.architecture: state.large.weights}) | models_of(state.small)


class WeightedEnsemble:
    """Several frozen models as one teacher, by a user's own weights: inputs -> (probabilities, their argmax)."""

    def __init__(self, models: Sequence[nn.Module], weights: Weighting):
        self.models, self.weights = list(models), weights

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.stack([logits_of(model, inputs) for model in self.models])
        found = consensus(probabilities(logits), None, self.weights)
        return found.probs.to(logits.dtype), found.labels


class ConsensusTeacher:
    """Several frozen models as a teacher for `distill`: inputs -> (labels, dissent).

    The models may differ in architecture. They stay in evaluation mode, so their BatchNorm statistics never change and
    a prediction never depends on the rest of the batch. Only one batch's predictions are in memory at a time.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        copies: Sequence[int] | None = None,
        weights: Weighting = confidence_weights,
    ):
        if not models:
            raise ValueError("a consensus needs at least one model")
        if copies is not None and (len(copies) != len(models) or min(copies) < 1):
            raise ValueError(f"{len(models)} models need as many copies, each at least 1: {list(copies)}")
        self.models = list(models)
        for model in self.models:
            model.eval()
            model.requires_grad_(False)
        self.copies = None if copies is None else torch.tensor(copies)
        self.weights = weights

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.stack([logits_of(model, inputs) for model in self.models])
        found = consensus(probabilities(logits), self.copies, self.weights)
        return found.labels, found.dissent.to(logits.dtype)


def diversity(logits: Tensor, dissent: Tensor) -> Tensor:
    """KL(s_div, softmax(logits)) of every sample (eq. 9), with 0 log 0 = 0.

    s_div sums to A <= 1, so this is A KL(s_div / A || q) + A log A: the KL from the mean prediction of the dissenting
    teachers, weighted by their total weight A. The value can be negative; without dissent it is exactly 0.
    """
    return torch.xlogy(dissent, dissent).sum(-1) - (dissent * logits.log_softmax(-1)).sum(-1)


def normalised(dissent: Tensor) -> Tensor:
    """s_div / A: the mean prediction of the dissenting teachers; 0 without dissent."""
    mass = dissent.sum(-1, keepdim=True)
    return torch.where(mass > 0, dissent / mass, dissent)


def ensemble_loss(logits: Tensor, labels: Tensor, dissent: Tensor, lam: float = 0.05) -> Tensor:
    """Mean over the batch of cross-entropy with the consensus label + lambda times the diversity term (eq. 10)."""
    loss = F.cross_entropy(logits, labels)
    return loss + lam * diversity(logits, dissent).mean() if lam else loss
