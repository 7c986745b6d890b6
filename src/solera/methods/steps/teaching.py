"""Teaching: which models teach besides the round's clients, how much each counts, and on which samples.

Every option is one class. The defaults of `Teaching` do nothing: the clients' models teach, each as often as it was
sampled, on all public samples of the round. `Several` joins options in the order in which they are listed.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.federation import Federation
from ...core.settings import NonNegative, PositiveInt, Problem, Slot, settings, show
from ...core.tensors import Weights
from ...method import Method, name_of
from ...scenario.server import Server
from ...train.aggregate import uniform_mean
from ...train.distill import Distill
from ...train.fitting import evaluate
from ...train.norms import parameter_names
from ...train.teachers import Build, Frozen, Rule, frozen, lowest_entropy
from .fusion import Asked, copies_of, kept, logits_problems, side_by_side, validation_problems, with_statistics

AGE = "@"  # no architecture has it in its name
NORM_SAMPLES = 2048  # public samples for the BatchNorm statistics of a sampled model


@dataclass(frozen=True)
class Lesson:
    """The facts of a round for the options of teaching."""

    fed: Federation
    server: Server
    fusion: Distill
    d: Tensor  # the round's public samples, by number
    build: Build  # makes modules that answer as the clients' models do
    rule: Rule
    reports: bool  # true: ensembles and averages are evaluated

    @property
    def first_batch(self) -> Tensor:
        """The first minibatch of d: a model's logits on it must be finite."""
        return self.server.public[self.d[: self.fusion.batch]] if len(self.d) else self.d


@settings
class Teaching(Slot):
    """The round's clients teach, on all public samples."""

    kind: str = field(default="clients", init=False)

    products: ClassVar[bool] = True  # true: LoRA's products can be averaged (no models are sampled)

    BESIDE: ClassVar = {
        "swag": "method.teaching.kind = 'swag'",
        "memory": "method.teaching.kind = 'memory'",
        "teacher_weights": "method.teaching.kind = 'accuracy'",
        "low_entropy_top": "method.teaching.top, with method.teaching.kind = 'low-entropy'",
        "student_init": "another method: method.name = 'feddf-previous'",
        "distill_absent": "a setting of method.name = 'feddf-previous'",
    }

    def join(self, teachers: dict[str, Frozen], M: dict[str, Weights], at: Lesson) -> dict[str, Frozen]:
        """The teachers and what joins or replaces them; M is the method's state, with what `keep` has added."""
        return teachers

    def votes(self, teachers: dict[str, Frozen], votes: list[float], at: Lesson) -> list[float]:
        """The weight of each teacher."""
        return votes

    def narrow(self, teacher: Asked, d: Tensor, at: Lesson) -> tuple[Asked, Tensor]:
        """The teacher, or its stored answers, and the samples on which it teaches."""
        return teacher, d

    def keep(self, M: dict[str, Weights]) -> dict[str, Weights]:
        """Entries of this round's state, beside the models, that the next round's state keeps."""
        return {}


@settings
class Several(Teaching):
    """Several options, one after the other."""

    kind: str = field(default="several", init=False)
    parts: tuple[Teaching, ...] = ()

    @property
    def products(self) -> bool:  # type: ignore[override]
        return all(part.products for part in self.parts)

    def problems(self) -> Iterator[Problem]:
        """Two parts of one kind."""
        for i, part in enumerate(self.parts):
            if type(part) in map(type, self.parts[:i]):
                yield f"parts[{i}].kind = {show(part.kind)}: an earlier part is of this kind; leave one of them out"

    def fits(self, server: Server) -> Iterator[Problem]:
        for i, part in enumerate(self.parts):
            yield from (f"parts[{i}].{problem}" for problem in part.fits(server))

    def join(self, teachers: dict[str, Frozen], M: dict[str, Weights], at: Lesson) -> dict[str, Frozen]:
        for part in self.parts:
            teachers = part.join(teachers, M, at)
        return teachers

    def votes(self, teachers: dict[str, Frozen], votes: list[float], at: Lesson) -> list[float]:
        for part in self.parts:
            votes = part.votes(teachers, votes, at)
        return votes

    def narrow(self, teacher: Asked, d: Tensor, at: Lesson) -> tuple[Asked, Tensor]:
        for part in self.parts:
            teacher, d = part.narrow(teacher, d, at)
        return teacher, d

    def keep(self, M: dict[str, Weights]) -> dict[str, Weights]:
        return {name: w for part in self.parts for name, w in part.keep(M).items()}


@settings
class Swag(Teaching):
    """Teachers sampled from a normal distribution around the clients' models (FedDF's Table 7, FedDistill).

    The sampled models are untrained, so their BatchNorm statistics are estimated from public samples.
    """

    kind: str = field(default="swag", init=False)
    products = False
    samples: PositiveInt = 10  # sampled teachers in each round
    scale: NonNegative = 0.5  # of the covariance; 0.5 is SWAG's factor
    include_clients: bool = True  # the clients' models teach as well

    def fits(self, server: Server) -> Iterator[Problem]:
        if len(server.architectures) > 1:
            yield (
                f'kind = "swag": it samples around models of one architecture, but the clients have '
                f"{', '.join(server.architectures)}; leave it out, or name one architecture in models.clients"
            )

    def join(self, teachers: dict[str, Frozen], M: dict[str, Weights], at: Lesson) -> dict[str, Frozen]:
        fed, server, d = at.fed, at.server, at.d
        (A,) = server.architectures
        uploads = [m.weights for k, m in teachers.items() for _ in range(fed.copies.get(k, 1))]
        names = parameter_names(server.template(A))
        drawn = swag(uploads, names, self.samples, fed.seed("swag"), self.scale)
        drawn = with_public_statistics(A, drawn, d, NORM_SAMPLES, fed.seed("norm"), server)
        joined = {k: m.weights for k, m in teachers.items()} if self.include_clients else {}
        joined |= {f"swag-{i}": weights for i, weights in enumerate(drawn)}
        members = [(A, weights) for weights in joined.values()]
        if at.reports:
            server.report_ensemble("swag", members, at.rule, copies_of(joined, fed), build=at.build)
        return dict(zip(joined, frozen(members, at.build), strict=True))


@settings
class Memory(Teaching):
    """Students of earlier rounds teach too, each like a client (an option of FedDF's authors' code).

    The global models that a round starts with are the students of the round before: they can teach without being
    kept. Older ones are kept beside them in the method's state, under "NAME@1" (one round older), "NAME@2", ...
    """

    kind: str = field(default="memory", init=False)
    rounds: PositiveInt = 1  # earlier rounds whose students teach

    def join(self, teachers: dict[str, Frozen], M: dict[str, Weights], at: Lesson) -> dict[str, Frozen]:
        # The initial models of the first round are no students.
        past = {name: w for name, w in M.items() if _age(name) < min(self.rounds, at.fed.round)}
        if not past:
            return teachers
        models = frozen([(name.partition(AGE)[0], w) for name, w in past.items()], at.server.model)
        return teachers | {f"student-{name}": model for name, model in zip(past, models, strict=True)}

    def keep(self, M: dict[str, Weights]) -> dict[str, Weights]:
        older = {name: _age(name) + 1 for name in M}  # the oldest is dropped
        return {f"{name.partition(AGE)[0]}{AGE}{age}": M[name] for name, age in older.items() if age < self.rounds}


def _age(name: str) -> int:
    """The age of a student in rounds; 0 for those of the last round."""
    return int(name.partition(AGE)[2] or 0)


def current(M: dict[str, Weights]) -> dict[str, Weights]:
    """The global models of a state, without those of earlier rounds."""
    return {A: w for A, w in M.items() if AGE not in A}


@settings
class ByAccuracy(Teaching):
    """Teachers are weighted by their accuracy on the server's validation set; equally if all have 0."""

    kind: str = field(default="accuracy", init=False)

    def fits(self, server: Server) -> Iterator[Problem]:
        if server.validation is None:
            yield 'kind = "accuracy" needs a validation set on the server: set data.validation'

    def votes(self, teachers: dict[str, Frozen], votes: list[float], at: Lesson) -> list[float]:
        held_out = at.server.validation
        assert held_out is not None  # checked by `fits`
        jobs = [partial(evaluate, model, held_out.inputs, held_out.labels) for model in teachers.values()]
        scores = side_by_side(at.fed.seed, at.server, jobs)
        found = [s.accuracy * n for s, n in zip(scores, votes, strict=True)]
        return found if sum(found) else votes


@settings
class LowEntropy(Teaching):
    """Distillation on the public samples for which the teachers are most certain."""

    kind: str = field(default="low-entropy", init=False)
    top: PositiveInt = 1000  # public samples that are kept: those with the lowest entropy

    def fits(self, server: Server) -> Iterator[Problem]:
        most = len(server.public) if server.per_round is None else server.per_round
        if self.top > most:
            yield f"top = {self.top}: a round has {most} public samples; keep 1 to {most}"
        if server.positions is not None:
            yield 'kind = "low-entropy": it selects samples by one prediction each; leave it out for causal-lm'
        if server.public.fresh:
            yield (
                'kind = "low-entropy": it selects samples by the teachers\' predictions, but samples change with every '
                "draw; leave out public.fresh"
            )

    def narrow(self, teacher: Asked, d: Tensor, at: Lesson) -> tuple[Asked, Tensor]:
        assert callable(teacher)  # no option before this one has stored its answers
        answers = kept(teacher, d, at.fusion, at.fed.seed, at.server)
        return answers, lowest_entropy(answers, d, self.top)


def teaching_problems(method: Any, server: Server) -> Iterator[str]:
    """Report every reason why FedDF and its variants cannot run here, each with a way out."""
    yield from Method.fits(method, server)
    yield from validation_problems("fusion", method.fusion, server)
    if method.fusion.steps:
        yield from logits_problems(name_of(method), server)
    elif method.teaching != Teaching():
        yield "method.fusion.steps = 0: method.teaching concerns distillation and needs steps"


# ---- SWAG (Maddox et al., NeurIPS 2019) around models ---------------------------------------------------------

# Moments are float64. Only parameters are sampled. The buffers of a sample (BatchNorm statistics) are those of the mean
# and do not fit its parameters; `with_public_statistics` computes new ones.


def with_public_statistics(
    A: str, models: list[Weights], d: Tensor, most: int, seed: int, server: Server
) -> list[Weights]:
    """Models of architecture A with BatchNorm statistics from at most `most` of the public samples d."""
    order = torch.randperm(len(d), generator=torch.Generator().manual_seed(seed))
    inputs = server.public[d[order[:most]]]
    return [with_statistics(A, weights, inputs, server) for weights in models] if len(d) > 1 else models


def swag(
    models: Sequence[Weights], names: Collection[str], samples: int, seed: int, scale: float = 0.5
) -> list[Weights]:
    """mu + sqrt(scale) (sqrt(v) eps1 + D' eps2 / sqrt(m - 1)): D has the m deviations from the mean as its rows.

    eps2 is the same for all tensors, so that a sample varies along whole client models. scale = 1/2 gives SWAG's
    factors. With one model, every sample is that model.
    """
    g, base = torch.Generator().manual_seed(seed), uniform_mean(models)
    mean, variance = moments(models, [1.0] * len(models), names)
    rank, out = math.sqrt(max(len(models) - 1, 1)), []
    for _ in range(samples):
        along = torch.randn(len(models), generator=g, dtype=torch.float64)
        sample = dict(base)
        for a in names:
            low_rank = _combine(along, [m[a].double() - mean[a] for m in models]) / rank
            around = variance[a].sqrt() * noise(mean[a], g) + low_rank
            sample[a] = (mean[a] + math.sqrt(scale) * around).to(base[a].dtype)
        out.append(sample)
    return out


def moments(models: Sequence[Weights], n: Sequence[float], names: Collection[str]) -> tuple[Weights, Weights]:
    """Mean and variance over the models, weighted by n, of the tensors `names`, in float64."""
    share = torch.tensor(n, dtype=torch.float64) / sum(n)
    mean, variance = {}, {}
    for name in names:
        mean[name] = _combine(share, [m[name].double() for m in models])
        variance[name] = _combine(share, [(m[name].double() - mean[name]).square() for m in models])
    return mean, variance


def noise(like: Tensor, g: torch.Generator) -> Tensor:
    """Standard normal numbers in the shape of `like`, in float64."""
    return torch.randn(like.shape, generator=g, dtype=torch.float64)


def _combine(share: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for a, t in zip(share, tensors, strict=True):
        total += a * t
    return total
