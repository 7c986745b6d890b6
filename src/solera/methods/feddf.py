"""FedDF (Lin, Kong, Stich, Jaggi, NeurIPS 2020): ensemble distillation for robust model fusion, Algorithm 3.

Clients run different architectures (`prototypes` in the paper). Each round every architecture is averaged over its own
clients and then distilled, on unlabelled public samples, from the mean logits of *all* clients. With one architecture
this is Algorithm 1, and with no distillation steps it is FedAvg.

BatchNorm: teachers predict with their own running statistics and never update them. Running statistics are averaged
like parameters (line 11). The student updates its own on public samples, unless fusion.student_norm = "frozen".

Optional extensions: low-bit client weights (`quantise`, Table 4; with fusion.steps = 0, low-bit FedAvg), teachers
sampled around the clients' models (`swag`, Table 7), distillation on the public samples with the lowest entropy only
(`low_entropy_top`), students of earlier rounds as teachers (`memory`), teachers weighted by their accuracy
(`teacher_weights`), and defences against malicious clients (`ensemble`, `average`, `teachers`, `update_clip`,
`drop_worst`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

from ..core.federation import Federation, per_client
from ..core.settings import Liars, NonNegative, Positive, PositiveInt, Problem
from ..core.tensors import Weights
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.lowbit import LowBit
from ..train.teachers import Ensemble, Rule, Teacher
from .steps.averaging import Buffers, Combined, combined_of, models_of
from .steps.fusion import (
    copies_of,
    finite_models,
    first_batch,
    fuse,
    logits_problems,
    public_indices,
    surest,
    top_problems,
)
from .steps.memory import Memory, current, remembered, with_past
from .steps.reporting import report_teachers
from .steps.screen import accuracy_votes, clipped, defences_problems, teachers_of, without_worst
from .steps.swag import Swag, drawn_around, swag_problems
from .steps.training import local_update
from .steps.upload import as_clients_answer, is_full, lowbit_problems, map_lowbit


@register("feddf")
@dataclass(frozen=True)
class FedDF(Method):
    """Server-side fusion of client models by distilling their averaged logits."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    mu: NonNegative = 0.0  # proximal term in the clients' objective, as in FedProx
    average: Combined = "weighted"  # line 11; the last four bear lying clients
    average_buffers: Buffers = "mean"  # BatchNorm's running statistics: averaged too, or those of the last client
    student_init: Literal["from_average", "from_previous"] = "from_average"
    ensemble: Rule = "avg_logits"
    teachers: Literal["all", "krum", "multi_krum", "bulyan"] = "all"  # whose models teach, in each architecture
    teacher_weights: Literal["equal", "accuracy"] = "equal"  # accuracy: on the validation set
    memory: Memory = field(default_factory=Memory)
    byzantine: Liars = 1  # f: how many lying clients of an architecture krum and the like bear
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
        public: Literal["server", "none"] = "server" if self.fusion.steps else "none"
        return Traits(
            across="knowledge", public=public, precision="mixed", next_token=True, products=not self.swag.samples
        )

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.drop_outliers and not self.drop_worst:
            yield "drop_outliers = true has no effect without drop_worst = true"
        if self.fusion.steps == 0 and (self.swag.samples or self.low_entropy_top is not None or self.memory.rounds):
            yield "fusion.steps = 0: swag, low_entropy_top and memory concern distillation and need steps"

    def fits(self, server: Server) -> Iterator[str]:
        yield from defences_problems("feddf", self, server)
        yield from swag_problems("feddf", self.swag, server)
        yield from lowbit_problems("feddf", self.quantise, server)
        if self.fusion.keep_init_if_better and server.validation is None:
            yield "feddf: fusion.keep_init_if_better needs a validation set on the server: set data.validation"
        if self.teacher_weights == "accuracy" and server.validation is None:
            yield "feddf: teacher_weights = 'accuracy' needs a validation set on the server: set data.validation"
        if self.fusion.steps:
            yield from top_problems("feddf", self.low_entropy_top, server)
            yield from logits_problems("feddf", server)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({A: server.init(A) for A in server.architectures})  # line 2

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M, S = current(state.weights), fed.sample()  # line 6
        sent = per_client(lambda k: M[fed.architecture(k)])
        if is_full(self.quantise, server):
            x = fed.map(local_update, S, weights=sent, local=self.local, mu=self.mu)  # lines 7-8
        else:
            x = map_lowbit(S, M, self.local, self.mu, self.quantise, fed, server)  # lines 7-8, Table 4
        x = clipped(x, lambda k: M[fed.architecture(k)], self.update_clip, fed, server)

        d = public_indices(self.fusion, fed.seed, server)  # the source of the minibatches of line 13
        built = as_clients_answer(self.quantise, server)
        teachers = finite_models(x, first_batch(d, self.fusion, server), fed, server, build=built)
        teachers = without_worst(teachers, x, self, fed, server)
        chosen = teachers_of(self.teachers, teachers, self.byzantine, fed, server)
        if self.report_ensemble:
            replaced = None if type(self).teacher is FedDF.teacher else self.teacher
            report_teachers(chosen, x, self.ensemble, d, fed, server, replaced, built)

        x_0 = {}
        for A in server.architectures:  # line 9; P in the paper
            S_A = [k for k in teachers if fed.architecture(k) == A]  # line 10
            if S_A and self.student_init == "from_average":
                x_0[A] = combined_of(self.average, self.byzantine, self.average_buffers, x, S_A, fed, server)  # line 11
                if self.report_ensemble and self.fusion.steps:
                    server.report_average(A, x_0[A])
            elif S_A or self.distill_absent:
                x_0[A] = M[A]

        report = self.ensemble if self.report_ensemble else None
        chosen = drawn_around(chosen, self.swag, d, fed, server, report, built)
        chosen = with_past(chosen, state.weights, self.memory, fed, server)
        votes = copies_of(chosen, fed)
        if self.teacher_weights == "accuracy":
            votes = accuracy_votes(chosen, votes, fed, server)
        avg_logits = self.teacher(list(chosen.values()), votes)
        asked, d = surest(self.low_entropy_top, avg_logits, d, self.fusion, fed.seed, server)
        fused = fuse(x_0, asked, d, self.fusion, fed.seed, server)  # lines 12-15
        return self.State(M | fused | remembered(state.weights, self.memory))

    def teacher(self, models: list[nn.Module], copies: list[float]) -> Teacher:
        """The ensemble of the clients' models, each with its weight: a function from a batch of inputs to targets
        [samples, classes] at the fusion's temperature and their entropy [samples]."""
        return Ensemble(models, self.ensemble, copies, self.fusion.temperature)

    def models(self, state: State) -> dict[str, Model]:
        return models_of(current(state.weights))
