"""One large server model from small, different client models: the goal of Fed-ET, with the distillation of FedDF.

Each round the ensemble of the clients' models is the teacher, as in FedDF (Lin et al., NeurIPS 2020, Algorithm 3). The
students are the average of each client architecture and a larger server model. The server model is never sent and
continues from its last weights. The traffic is that of FedAvg: each client receives and sends its own small model.

benchmarks/fedet_ablation.py compares the defaults with Fed-ET (Cho et al., IJCAI 2022), one setting at a time:
targets = "hard" with ensemble = "confidence" (Fed-ET's consensus labels), head = "shared" (one head, transferred in
both directions), client_models = "averaged" (not distilled), fusion by few steps of SGD.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..core.federation import Federation, per_client
from ..core.tensors import Weights
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.teachers import Ensemble, Rule, Targets, Teacher
from .steps.fusion import asked, copies_of, first_batch, fuse, validation_problems
from .steps.reporting import report_teachers
from .steps.screen import Screen
from .steps.training import Own, by_architecture, head_of, local_update, models_of


def hard(teacher: Teacher, inputs: Tensor) -> Targets:
    """The most likely class of each sample with probability 1: the student's KL loss is then cross-entropy."""
    probs, entropy = teacher(inputs)
    return one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype), torch.zeros_like(entropy)


@register("fusionlarge")
@dataclass(frozen=True)
class FusionLarge(Method):
    """A large server model and better small models, distilled from the ensemble of all clients."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)  # of every student
    ensemble: Rule = "avg_logits"
    targets: Literal["soft", "hard"] = "soft"  # probabilities of all classes, or the most likely class
    client_models: Literal["distilled", "averaged"] = "distilled"  # where the next clients start from
    head: Literal["own", "shared"] = "own"  # shared: the server gets the clients' mean head, all models the server's
    screen: Screen = field(default_factory=Screen)  # which uploads count, and how they are averaged; heads: equally
    report_ensemble: bool = True  # evaluate the ensemble of the teachers each round (one pass per teacher)

    about: ClassVar[About] = About(
        "Fusion into a large server model", "this library, after FedDF and Fed-ET", "model down, model up", "nothing"
    )

    @dataclass(frozen=True)
    class State:
        small: dict[str, Weights]  # client architecture -> weights
        large: Own  # the server model

    def traits(self) -> Traits:
        split: Literal["shared head", "none"] = "shared head" if self.head == "shared" else "none"
        return Traits(
            across="knowledge", public="server", split=split, server_model="larger", next_token=True, products=True
        )

    def init(self, fed: Federation, server: Server) -> State:
        assert server.large is not None  # required by the traits
        w = server.init(server.large)
        shared = head_of(w) if self.head == "shared" else {}
        return self.State({A: server.init(A) | shared for A in server.architectures}, Own(server.large, w))

    def fits(self, server: Server) -> Iterator[str]:
        yield from super().fits(server)
        yield from validation_problems("fusion", self.fusion, server)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M, large = state.small, state.large.architecture
        sent = by_architecture(M, fed)
        x = fed.map(local_update, fed.sample(), weights=per_client(sent), local=self.local, mu=0.0)
        d = server.public.round_indices(server.per_round, fed.seed("public"))
        x, members, models = self.screen.screened(x, sent, first_batch(d, self.fusion, server), fed, server)
        if self.report_ensemble:
            report_teachers(models, x, self.ensemble, d, fed, server)
        x_0 = self.screen.averages(x, members, fed, server)
        for A in x_0 if self.report_ensemble and self.fusion.steps and self.client_models == "distilled" else ():
            server.report_average(A, x_0[A])
        students = x_0 if self.client_models == "distilled" else {}
        copies = copies_of(models, fed)
        teacher: Teacher = Ensemble(list(models.values()), self.ensemble, copies, self.fusion.temperature)
        teacher = partial(hard, teacher) if self.targets == "hard" else teacher
        answers = asked(teacher, self.client_models == "distilled", d, self.fusion, fed.seed, server)
        distilled = partial(fuse, teacher=answers, d=d, cfg=self.fusion, seeds=fed.seed, server=server)
        if self.head == "own":
            M = M | x_0 | distilled({large: state.large.weights} | students)
        else:  # the small models get the head before distillation, so that their bodies learn to use it
            w = distilled({large: state.large.weights | self.screen.head(x, members, fed, server)})
            M = {A: m | head_of(w[large]) for A, m in (M | x_0).items()} | w
            M = M | distilled({A: M[A] for A in students})
        return self.State({A: M[A] for A in server.architectures}, Own(large, M[large]))

    def models(self, state: State) -> dict[str, Model]:
        return models_of({state.large.architecture: state.large.weights}) | models_of(state.small)
