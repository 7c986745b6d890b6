"""One large server model from small, different clients: Fed-ET's aim, reached by FedDF's means.

Each round the clients' models teach together, as in FedDF (Lin et al., NeurIPS 2020, Algorithm 3); their students are
the average of each client architecture and, beside them, a model of the server's own that never travels and goes on
from where it was. On the wire this is FedAvg: each client receives and sends its own small model.

The defaults are what the ablation in benchmarks/fedet_ablation.py is about. The other settings lead back, one by one,
to Fed-ET (Cho et al., IJCAI 2022): targets = "hard" with ensemble = "confidence" (its consensus labels),
head = "shared" (one head, passed both ways), client_models = "averaged" (not distilled), fusion by few steps of SGD.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ..federation import Federation, Replies, per_client
from ..method import About, Method, Model, Traits, register
from ..parts.distill import Distill, Distilled, Memo, cached, distill, visits
from ..parts.local import Local
from ..parts.teachers import Cache, Ensemble, Frozen, Rule, Targets, Teacher
from ..server import Server
from ..tensors import Weights, weights_of
from .common.averaging import average_of, models_of
from .common.fusion import accuracy_on, finite_models, note_teachers, side_by_side
from .common.heads import head_of
from .common.training import Update, local_update


def hard(teacher: Teacher, inputs: Tensor) -> Targets:
    """The most likely class of each sample as if it were certain: the student's KL loss is then cross-entropy."""
    probs, entropy = teacher(inputs)
    return one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype), torch.zeros_like(entropy)


@register("fusionlarge")
@dataclass(frozen=True)
class FusionLarge(Method):
    """A large server model and better small ones, from what all clients know together."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)  # of every student
    ensemble: Rule = "avg_logits"
    targets: Literal["soft", "hard"] = "soft"  # what the ensemble thinks of every class, or only its first choice
    client_models: Literal["distilled", "averaged"] = "distilled"  # what the next clients start from
    head: Literal["own", "shared"] = "own"  # shared: the clients' mean head to the server, the server's to all models
    average: Literal["weighted", "uniform", "median"] = "weighted"  # of the small models; heads: each client the same
    report_ensemble: bool = True  # measure the teachers' joint prediction each round (costs a pass of each)

    about: ClassVar[About] = About(
        title="Fusion into a large server model",
        paper="this library, after FedDF and Fed-ET",
        wire="model down, model up",
        state="nothing",
    )

    @dataclass(frozen=True)
    class State:
        small: dict[str, Weights]  # client architecture -> weights
        large: Model  # the server's own

    def traits(self) -> Traits:
        split: Literal["shared head", "none"] = "shared head" if self.head == "shared" else "none"
        return Traits(across="knowledge", public="server", split=split, server_model="larger")

    def init(self, fed: Federation, server: Server) -> State:
        assert server.large is not None  # see traits
        w = server.init(server.large)
        shared = head_of(w) if self.head == "shared" else {}
        return self.State({P: server.init(P) | shared for P in server.architectures}, Model(server.large, w))

    def fits(self, server: Server) -> Iterator[str]:
        if self.fusion.keep_init_if_better and server.validation is None:
            yield "fusionlarge: fusion.keep_init_if_better needs a validation set: set data.validation"

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M, large = state.small, state.large.architecture
        sent = per_client(lambda k: M[fed.architecture(k)])
        x = fed.map(local_update, fed.sample(), weights=sent, local=self.local, mu=0.0)
        d = server.public.round_indices(server.per_round, fed.seed("public"))
        models = self.teachers(x, d, fed, server)
        S = {P: [k for k in models if fed.architecture(k) == P] for P in server.architectures}
        x_0 = {P: average_of(self.average, x, S[P], fed) for P in S if S[P]}
        for P in x_0 if self.report_ensemble and self.fusion.steps and self.client_models == "distilled" else ():
            server.report_average(P, x_0[P])
        teacher = self.teacher(models, d, fed, server)
        fuse = partial(self.fuse, teacher=teacher, d=d, fed=fed, server=server)
        students = x_0 if self.client_models == "distilled" else {}
        if self.head == "own":
            M = M | x_0 | fuse({large: state.large.weights} | students)
        else:  # the small models get the head before they are distilled, so that their bodies learn to use it
            heads = Replies((k, Update(head_of(x[k].weights))) for k in models)
            h = average_of("median" if self.average == "median" else "uniform", heads, list(models), fed)
            w = fuse({large: state.large.weights | h})
            M = {P: m | head_of(w[large]) for P, m in (M | x_0).items()} | w
            M = M | fuse({P: M[P] for P in students})
        return self.State({P: M[P] for P in server.architectures}, Model(large, M[large]))

    def teacher(
        self, models: Mapping[str, nn.Module], d: Tensor, fed: Federation, server: Server
    ) -> Teacher | Cache | Memo:
        """What all clients say together. All students see the same samples, so it is asked once about each."""
        copies = [float(fed.copies.get(k, 1)) for k in models]
        teacher: Teacher = Ensemble(list(models.values()), self.ensemble, copies, self.fusion.temperature)
        if self.targets == "hard":
            teacher = partial(hard, teacher)
        seed, alone = fed.seed("fusion"), self.client_models == "averaged"  # the large model is the only student
        if self.fusion.steps == 0 or (server.public.fresh and alone):
            return teacher
        if server.public.fresh:
            return Memo(teacher, d, self.fusion, seed)
        seen = d[visits(len(d), self.fusion.steps, self.fusion.batch, seed)].unique()
        return cached(teacher, server.public, seen, self.fusion, partial(side_by_side, fed, server))

    def fuse(
        self, students: dict[str, Weights], teacher: Teacher | Cache | Memo, d: Tensor, fed: Federation, server: Server
    ) -> dict[str, Weights]:
        """Distil every student, side by side."""
        seed, validate = fed.seed("fusion"), accuracy_on(server.validation)

        def student(P: str) -> tuple[Weights, Distilled]:
            model = server.model(P, students[P])
            done = distill(model, server.public, teacher, self.fusion, seed, indices=d, validate=validate)
            return weights_of(model), done

        results = side_by_side(fed, server, [partial(student, P) for P in students])
        for P, (_, done) in zip(students, results, strict=True):
            facts: dict[str, Any] = {"steps": done.steps, "best_step": done.best_step, "loss": done.loss}
            kind = "distill_diverged" if done.diverged else "distilled"
            server.event(kind, architecture=P, accuracy=done.accuracy, **facts)
        return {P: weights for P, (weights, _) in zip(students, results, strict=True)}

    def teachers(self, x: Replies, d: Tensor, fed: Federation, server: Server) -> dict[str, Frozen]:
        """The clients' models that are averaged and teach: those that answer with finite numbers."""
        models = finite_models(x, server.public[d[: self.fusion.batch]], fed, server)
        if self.report_ensemble:
            members = [(fed.architecture(k), x[k].weights) for k in models]
            copies = [float(fed.copies.get(k, 1)) for k in models]
            server.report_ensemble("teachers", members, self.ensemble, copies, names=list(models))
            note_teachers(models, d, fed, server)
        return models

    def models(self, state: State) -> dict[str, Model]:
        return {state.large.architecture: state.large} | models_of(state.small)
