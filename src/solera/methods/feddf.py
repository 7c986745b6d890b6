"""FedDF (Lin, Kong, Stich, Jaggi, NeurIPS 2020): ensemble distillation for robust model fusion, Algorithm 3.

Clients run different architectures ("prototypes" in the paper). Each round every architecture is averaged over its own
clients and then distilled, on unlabelled public samples, from the mean logits of *all* clients. With one architecture
this is Algorithm 1, and with no distillation steps it is FedAvg.

BatchNorm: teachers answer with their own running statistics and keep them. Running statistics are averaged like
parameters (line 11); the student's then follow the public samples, unless fusion.student_norm = "frozen".

Beside the algorithm: clients whose weights have a few bits (`quantise`, Table 4; with fusion.steps = 0, FedAvg with
such clients), teachers drawn around the clients' models (`swag`, Table 7), only the public samples the teachers are
sure of (`low_entropy_top`), and defences against single clients (`ensemble`, `average`, `update_clip`, `drop_worst`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..federation import Federation, Replies, per_client
from ..method import About, Method, Model, Traits, register
from ..parts.distill import Distill, Distilled, Memo, cached, distill, visits
from ..parts.local import Local
from ..parts.lowbit import OFF, LowBit
from ..parts.teachers import Ensemble, Frozen, Rule, Teacher, drop_worst, lowest_entropy
from ..server import Server
from ..tensors import Weights, weights_of
from .common.averaging import average_of, models_of
from .common.fusion import accuracy_on, finite_models, note_teachers, side_by_side
from .common.training import local_update
from .feddf_options import Swag, clipped, drawn_around, feddf_problems
from .lowbit_update import lowbit_update, unpacked


@register("feddf")
@dataclass(frozen=True)
class FedDF(Method):
    """Server-side fusion of client models by distilling their averaged logits."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    mu: float = 0.0  # proximal term in the clients' objective, as in FedProx
    average: Literal["weighted", "uniform", "median"] = "weighted"  # line 11; teachers always count the same
    student_init: Literal["from_average", "from_previous"] = "from_average"
    ensemble: Rule = "avg_logits"
    drop_worst: bool = False  # clients that guess on the validation set are neither averaged nor teachers
    drop_threshold: float = 1.2  # in multiples of chance
    drop_outliers: bool = False  # and if there are none, those far below the others
    distill_absent: bool = False  # also distil architectures that had no client this round
    report_ensemble: bool = True  # measure the teachers' joint prediction each round (costs a pass of each)
    quantise: LowBit = field(default_factory=LowBit)
    swag: Swag = field(default_factory=Swag)
    low_entropy_top: int | None = None  # distil on so many public samples of a round: those the teachers are surest of
    update_clip: float | None = None  # longest update of a client, in multiples of its architecture's median

    about: ClassVar[About] = About(
        title="FedDF",
        paper="Lin et al., NeurIPS 2020",
        wire="model down, model up",
        state="nothing",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # M: architecture -> weights

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="server" if self.fusion.steps else "none")

    def fits(self, server: Server) -> Iterable[str]:
        return feddf_problems(self, server)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({P: server.init(P) for P in server.architectures})  # line 2

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M = state.weights
        S = fed.sample()  # line 6
        x = self.train(S, M, fed, server)  # lines 7-8
        d = self.public_indices(fed, server)
        teachers = self.teachers(x, d, fed, server)
        x_0 = {}
        for P in server.architectures:  # line 9
            S_P = [k for k in teachers if fed.architecture(k) == P]  # line 10
            if S_P and self.student_init == "from_average":
                x_0[P] = average_of(self.average, x, S_P, fed)  # line 11
            elif S_P or self.distill_absent:
                x_0[P] = M[P]
        if self.report_ensemble and self.fusion.steps and self.student_init == "from_average":
            for P in x_0:
                server.report_average(P, x_0[P])
        if self.swag.samples:
            measured = self.ensemble if self.report_ensemble else None
            teachers = drawn_around(teachers, self.swag, d, fed, server, measured)
        return self.State(M | self.fuse(x_0, teachers, d, fed, server))  # line 15

    def train(self, S: list[str], M: dict[str, Weights], fed: Federation, server: Server) -> Replies:
        """Lines 7-8: every client trains the model of its architecture."""
        sent = per_client(lambda k: M[fed.architecture(k)])
        payload: dict[str, Any] = {"weights": sent, "local": self.local, "mu": self.mu}
        if self.quantise.bits == OFF:
            x = fed.map(local_update, S, **payload)
        else:
            bits = fed.map(lowbit_update, S, **payload, quantise=self.quantise)
            x = unpacked(bits, M, self.quantise, fed, server)
        return x if self.update_clip is None else clipped(x, M, self.update_clip, fed, server)

    def fuse(
        self, x_0: dict[str, Weights], teachers: Mapping[str, nn.Module], d: Tensor, fed: Federation, server: Server
    ) -> dict[str, Weights]:
        """Lines 12-14 for every architecture, side by side: given the teachers they are independent.

        All students see the same mini-batches, so the teachers are asked once about each public sample in them, or
        once about each mini-batch where samples change with every draw.
        """
        if self.fusion.steps == 0:
            return x_0
        seed, top = fed.seed("fusion"), self.low_entropy_top
        copies = [float(fed.copies.get(k, 1)) for k in teachers]
        teacher: Any = self.teacher(list(teachers.values()), copies)
        if server.public.fresh:
            teacher = Memo(teacher, d, self.fusion, seed) if len(x_0) > 1 else teacher
        else:
            seen = d if top else d[visits(len(d), self.fusion.steps, self.fusion.batch, seed)].unique()
            teacher = cached(teacher, server.public, seen, self.fusion, partial(side_by_side, fed, server))
            d = lowest_entropy(teacher, d, top) if top else d
        validate = accuracy_on(server.validation)

        def student(P: str) -> tuple[Weights, Distilled]:
            model = server.model(P, x_0[P])
            done = distill(model, server.public, teacher, self.fusion, seed, indices=d, validate=validate)  # line 14
            return weights_of(model), done

        results = side_by_side(fed, server, [partial(student, P) for P in x_0])
        for P, (_, done) in zip(x_0, results, strict=True):
            kind = "distill_diverged" if done.diverged else "distilled"
            facts = {"steps": done.steps, "best_step": done.best_step, "loss": done.loss, "accuracy": done.accuracy}
            server.event(kind, architecture=P, **facts)
        return {P: weights for P, (weights, _) in zip(x_0, results, strict=True)}

    def teacher(self, models: list[nn.Module], copies: list[float]) -> Teacher:
        """What the clients' models say together, and how often each counts: a function of a batch of inputs that gives
        targets [samples, classes] at the fusion's temperature and their entropy [samples]."""
        return Ensemble(models, self.ensemble, copies, self.fusion.temperature)

    def teachers(self, x: Replies, d: Tensor, fed: Federation, server: Server) -> dict[str, Frozen]:
        """The clients' models that are averaged and teach: finite on public samples, and not the worst."""
        models = finite_models(x, server.public[d[: self.fusion.batch]] if len(d) else d, fed, server)
        accuracy = accuracy_on(server.validation)
        if self.drop_worst and accuracy is not None:
            scores = side_by_side(fed, server, [partial(accuracy, m) for m in models.values()])
            kept = drop_worst(scores, server.num_classes, self.drop_threshold, self.drop_outliers)
            for i, k in enumerate(list(models)):
                if i not in kept:
                    fed.reject(x, k, f"drop_worst: an accuracy of {scores[i]:.4f} on the validation samples")
                    del models[k]
        if self.report_ensemble:
            members = [(fed.architecture(k), x[k].weights) for k in models]
            copies = [float(fed.copies.get(k, 1)) for k in models]
            server.report_ensemble("teachers", members, self.ensemble, copies, names=list(models))
            note_teachers(models, d, fed, server)
        return models

    def public_indices(self, fed: Federation, server: Server) -> Tensor:
        """The public samples of this round, the source of line 13."""
        if self.fusion.steps == 0:
            return torch.empty(0, dtype=torch.int64)
        return server.public.round_indices(server.per_round, fed.seed("public"))

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)
