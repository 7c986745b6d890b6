"""FedDF (Lin, Kong, Stich, Jaggi, NeurIPS 2020): ensemble distillation for robust model fusion, Algorithm 3.

Clients run different architectures (`prototypes` in the paper). Each round every architecture is averaged over its own
clients and then distilled, on unlabelled public samples, from the mean logits of *all* clients. With one architecture
this is Algorithm 1, and with no distillation steps it is FedAvg.

BatchNorm: teachers predict with their own running statistics and never update them. Running statistics are averaged
like parameters (line 11). The student updates its own on public samples, unless fusion.student_norm = "frozen".

Optional extensions: low-bit client weights (`quantise`, Table 4; with fusion.steps = 0, low-bit FedAvg), teachers
sampled around the clients' models (`swag`, Table 7), distillation on the public samples with the lowest entropy only
(`low_entropy_top`), and defences against malicious clients (`ensemble`, `average`, `update_clip`, `drop_worst`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

from ..federation import Federation, per_client
from ..method import About, Method, Model, Traits, register
from ..parts.distill import Distill
from ..parts.local import Local
from ..parts.lowbit import OFF, LowBit
from ..parts.teachers import Ensemble, Rule, Teacher
from ..server import Server
from ..settings import NonNegative, Positive, PositiveInt, Problem
from ..tensors import Weights
from .common.averaging import average_of, models_of
from .common.defences import clipped, defences_problems, without_worst
from .common.fusion import (
    copies_of,
    finite_models,
    first_batch,
    fuse,
    logits_problems,
    public_indices,
    surest,
    top_problems,
)
from .common.lowbit import map_lowbit
from .common.reporting import report_teachers
from .common.swag import Swag, drawn_around, swag_problems
from .common.training import local_update


@register("feddf")
@dataclass(frozen=True)
class FedDF(Method):
    """Server-side fusion of client models by distilling their averaged logits."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    mu: NonNegative = 0.0  # proximal term in the clients' objective, as in FedProx
    average: Literal["weighted", "uniform", "median"] = "weighted"  # line 11; teachers always have equal weights
    student_init: Literal["from_average", "from_previous"] = "from_average"
    ensemble: Rule = "avg_logits"
    drop_worst: bool = False  # clients near chance on the validation set are neither averaged nor teachers
    drop_threshold: NonNegative = 1.2  # in multiples of chance
    drop_outliers: bool = False  # if no client is near chance, drop those far below the others
    distill_absent: bool = False  # also distil architectures that had no client this round
    report_ensemble: bool = True  # evaluate the ensemble of the teachers each round (one pass per teacher)
    quantise: LowBit = field(default_factory=LowBit)
    swag: Swag = field(default_factory=Swag)
    low_entropy_top: PositiveInt | None = None  # distil only on this many public samples: those with the lowest entropy
    update_clip: Positive | None = None  # largest norm of a client's update, in multiples of its architecture's median

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

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.drop_outliers and not self.drop_worst:
            yield "drop_outliers = true has no effect without drop_worst = true"
        if self.fusion.steps == 0 and (self.swag.samples or self.low_entropy_top is not None):
            yield "fusion.steps = 0: swag and low_entropy_top concern distillation and need steps"

    def fits(self, server: Server) -> Iterator[str]:
        yield from defences_problems("feddf", self, server)
        yield from swag_problems("feddf", self.swag, server)
        if self.fusion.keep_init_if_better and server.validation is None:
            yield "feddf: fusion.keep_init_if_better needs a validation set on the server: set data.validation"
        if self.fusion.steps:
            yield from top_problems("feddf", self.low_entropy_top, server)
            yield from logits_problems("feddf", server)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({A: server.init(A) for A in server.architectures})  # line 2

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M, S = state.weights, fed.sample()  # line 6
        sent = per_client(lambda k: M[fed.architecture(k)])
        if self.quantise.bits == OFF:
            x = fed.map(local_update, S, weights=sent, local=self.local, mu=self.mu)  # lines 7-8
        else:
            x = map_lowbit(S, M, self.local, self.mu, self.quantise, fed, server)  # lines 7-8, Table 4
        x = clipped(x, M, self.update_clip, fed, server)

        d = public_indices(self.fusion, fed.seed, server)  # the source of the minibatches of line 13
        teachers = finite_models(x, first_batch(d, self.fusion, server), fed, server)
        teachers = without_worst(teachers, x, self, fed, server)
        if self.report_ensemble:
            report_teachers(teachers, x, self.ensemble, d, fed, server)

        x_0 = {}
        for A in server.architectures:  # line 9; P in the paper
            S_A = [k for k in teachers if fed.architecture(k) == A]  # line 10
            if S_A and self.student_init == "from_average":
                x_0[A] = average_of(self.average, x, S_A, fed)  # line 11
                if self.report_ensemble and self.fusion.steps:
                    server.report_average(A, x_0[A])
            elif S_A or self.distill_absent:
                x_0[A] = M[A]

        teachers = drawn_around(teachers, self.swag, d, fed, server, self.ensemble if self.report_ensemble else None)
        avg_logits = self.teacher(list(teachers.values()), copies_of(teachers, fed))
        asked, d = surest(self.low_entropy_top, avg_logits, d, self.fusion, fed.seed, server)
        return self.State(M | fuse(x_0, asked, d, self.fusion, fed.seed, server))  # lines 12-15

    def teacher(self, models: list[nn.Module], copies: list[float]) -> Teacher:
        """The ensemble of the clients' models, each with its weight: a function from a batch of inputs to targets
        [samples, classes] at the fusion's temperature and their entropy [samples]."""
        return Ensemble(models, self.ensemble, copies, self.fusion.temperature)

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)
