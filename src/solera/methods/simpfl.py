"""Sim-pFL and TopK-pFL: MNFL's round with coefficients that are computed, not learned (its section 5.1).

Both compare the clients' soft predictions by their cosine. Sim-pFL mixes all clients in proportion to the cosine,
TopK-pFL takes the plain mean of the K nearest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from ..core.federation import Federation, per_client
from ..core.settings import NonNegativeInt, Positive, PositiveInt
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local
from ..train.similarity import by_cosine, by_rank, cosines, mixtures
from .steps.coefficients import note, uniform_matrix, with_columns
from .steps.personal import score_own, train_alone
from .steps.predictions import StudentNorm, ask_and_assess, distil_locally, draw, participants, public_problems


def about(title: str) -> About:
    """What the two methods have in common."""
    return About(
        title=title,
        paper="comparison method of MNFL",
        wire="indices down, predictions up, targets down",
        state="its model",
    )


def similar_round(method: "SimPFL | TopKPFL", c: Tensor, fed: Federation, server: Server) -> Tensor:
    """Train, predict, distil from the mixture `method.mixture(cosines)`; returns the matrix with the columns used."""
    x, A = draw(method.public_size, fed, server), participants(fed)
    if len(x) == 0:
        fed.map(train_alone, A, local=method.local)
        return c
    S, s, said = ask_and_assess(A, x, method.temperature, method.local, fed, server)
    server.report_stages(after_training={k: said[k].test for k in S}, after_distilling=None)
    weights = method.mixture(cosines(s))
    targets = dict(zip(S, mixtures(weights, [{"probs": s_m} for s_m in s]), strict=True))
    fed.map(
        distil_locally,
        S,
        targets=per_client(lambda k: targets[k]["probs"]),
        distil=method.distill,
        temperature=method.temperature,
        student_norm=method.student_norm,
    )
    c = with_columns(c, S, weights, fed)
    note(c, fed, server)
    return c


@register("simpfl")
@dataclass(frozen=True)
class SimPFL(Method):
    """Each client learns from the others in proportion to the similarity of their predictions."""

    local: Local = field(default_factory=lambda: Local(epochs=20, batch=128, lr=0.01))  # E, eta_1
    distill: Local = field(default_factory=lambda: Local(epochs=1, batch=256, lr=0.01))  # R, eta_2, on public samples
    temperature: Positive = 10.0  # T, of predictions and of distillation
    public_size: NonNegativeInt | None = None  # public samples a round; 0: local training only; none: public.per_round
    scale: Literal["minmax", "l1"] = "minmax"  # cosine minus the column's minimum (the authors' code), or unchanged
    student_norm: StudentNorm = "train"  # BatchNorm statistics during distillation

    about: ClassVar[About] = about("Sim-pFL")

    @dataclass(frozen=True)
    class State:
        c: Tensor  # the last columns used for each receiver

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(uniform_matrix(fed))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        return self.State(similar_round(self, state.c, fed, server))

    def mixture(self, cosine: Tensor) -> Tensor:
        return by_cosine(cosine, self.scale)

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("simpfl", self.public_size, server)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_own)

    def models(self, state: State) -> dict[str, Model]:
        return {}


@register("topkpfl")
@dataclass(frozen=True)
class TopKPFL(Method):
    """Each client learns from the K clients with the most similar predictions, itself included."""

    local: Local = field(default_factory=lambda: Local(epochs=20, batch=128, lr=0.01))  # E, eta_1
    distill: Local = field(default_factory=lambda: Local(epochs=1, batch=256, lr=0.01))  # R, eta_2, on public samples
    temperature: Positive = 10.0  # T, of predictions and of distillation
    public_size: NonNegativeInt | None = None  # public samples a round; 0: local training only; none: public.per_round
    k: PositiveInt = 5  # number of teachers of a client, itself included
    student_norm: StudentNorm = "train"  # BatchNorm statistics during distillation

    about: ClassVar[About] = about("TopK-pFL")

    @dataclass(frozen=True)
    class State:
        c: Tensor  # the last columns used for each receiver

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(uniform_matrix(fed))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        return self.State(similar_round(self, state.c, fed, server))

    def mixture(self, cosine: Tensor) -> Tensor:
        return by_rank(cosine, self.k)

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("topkpfl", self.public_size, server)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_own)

    def models(self, state: State) -> dict[str, Model]:
        return {}
