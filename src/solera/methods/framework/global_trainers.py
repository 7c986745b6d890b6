"""Global trainers, the third slot of the framework: which global models the ensemble teaches, and when.

    designated       the first model of each architecture only: FedEED
    none             no model: Fed-ensemble
    basic            every model that was trained this round: FedDF
    warmup           the same after W rounds, FedEED's version of codistillation (Anil et al., ICLR 2018)
    codistillation   the same; with `exclude_self` as in the original: a model does not teach itself

With `label_weight`, students also learn the labels of the server's samples (appendix A.5: "extending FedEED to labelled
dataset ... is straightforward"): KD + label_weight CE.

Teachers are copies made before distillation starts, and all students see the same mini-batches.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from ...core.settings import NonNegative, NonNegativeInt, Slot, settings
from ...scenario.server import Server
from ...train.distill import Distill, divergence
from ...train.teachers import Teacher, frozen
from ..steps.fusion import Asked, answers_finitely, asked, fuse, public_indices
from .cohort import Clock
from .ensemble_trainers import Member
from .grouping import Group, Models, Seeds


@settings
class GlobalTrainer(Slot):
    """The first model of each architecture is the only student, so that the others need not wait."""

    kind: str = field(default="designated", init=False)
    early_stop: bool = True  # by the server's validation set, if there is one
    label_weight: NonNegative = 0.0  # of cross-entropy with the public samples' labels, added to the KL

    designated: ClassVar[bool] = True  # true: only the first model of each architecture is a student
    distils: ClassVar[bool] = True
    BESIDE: ClassVar = {
        "W": "method.global_trainer.warmup",
        "exclude_self": "method.global_trainer.exclude_self, with kind = 'codistillation'",
    }

    def students(self, t: int, groups: Collection[Group], trained: Collection[Group]) -> list[Group]:
        """The models distilled in round t. A model without clients this round is distilled only if it is designated."""
        return [g for g in groups if g[1] == 0]

    def teachers(self, student: Group, members: Sequence[Member]) -> list[Member]:
        """The members that teach a student."""
        return list(members)

    def teach(
        self,
        students: Models,
        members: Sequence[Member],
        ensemble: Callable[[list[Member]], Teacher],
        fusion: Distill,
        seeds: Seeds,
        server: Server,
        clock: Clock,
    ) -> Models:
        """The students after the distillation of a round; `seeds` are those of that round. Unchanged without a teacher.

        The teachers' predictions for the round's public samples are computed once for all students of one ensemble.
        """
        if not students or not fusion.steps:
            return students
        d = public_indices(fusion, seeds, server)
        probe = server.public[d[: fusion.batch]]
        models = frozen([(m.architecture, m.weights) for m in members], server.model)
        fine = [m for m, model in zip(members, models, strict=True) if answers_finitely(model, probe)]
        if len(fine) < len(members):
            server.event("teacher_rejected", count=len(members) - len(fine), reason="non-finite logits")

        own = {g: self.teachers(g, fine) for g in students}
        several = len(students) > 1 and all(len(m) == len(fine) for m in own.values())  # students of one ensemble
        answers: dict[Group, Asked] = {}
        for g in students:
            if several and answers:
                answers[g] = next(iter(answers.values()))
            elif own[g]:
                found = clock.timed("ask", asked, ensemble(own[g]), several, d, fusion, seeds, server)
                answers[g] = found.beside(server.public.labels) if self.label_weight else found
        taught = {g: weights for g, weights in students.items() if g in answers}
        if not taught:
            return students
        numbers = [i for i, g in enumerate(students) if g in taught]  # random numbers do not depend on other students
        loss = self.loss(fusion) if self.label_weight else None
        how: dict[str, Any] = {"loss": loss, "validate": self.early_stop, "jobs": numbers, "of_round": seeds.t}
        return students | clock.timed("distil", partial(fuse, taught, answers, d, fusion, seeds, server, **how))

    def loss(self, fusion: Distill) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """KL from the teacher + label_weight times the cross-entropy with the label."""

        def kd_and_ce(logits: Tensor, probs: Tensor, entropy: Tensor, labels: Tensor) -> Tensor:
            kd = divergence(logits, probs, entropy, fusion.temperature, fusion.t_squared)
            return kd + self.label_weight * cross_entropy(logits, labels)

        return kd_and_ce


@settings
class NoDistillation(GlobalTrainer):
    """No model is taught: the ensemble itself is the result."""

    kind: str = field(default="none", init=False)

    designated = distils = False

    def students(self, t: int, groups: Collection[Group], trained: Collection[Group]) -> list[Group]:
        return []


@settings
class Basic(GlobalTrainer):
    """Every model that was trained this round is a student."""

    kind: str = field(default="basic", init=False)

    designated = False

    def students(self, t: int, groups: Collection[Group], trained: Collection[Group]) -> list[Group]:
        return [g for g in groups if g in trained]


@settings
class Warmup(Basic):
    """The same, after some rounds without distillation."""

    kind: str = field(default="warmup", init=False)
    warmup: NonNegativeInt = 20  # W, rounds before the first distillation

    def students(self, t: int, groups: Collection[Group], trained: Collection[Group]) -> list[Group]:
        return [] if t < self.warmup else super().students(t, groups, trained)


@settings
class Codistilling(Warmup):
    """The same; the models teach each other."""

    kind: str = field(default="codistillation", init=False)
    exclude_self: bool = False  # exclude a model's own checkpoints and clients from its teachers

    def teachers(self, student: Group, members: Sequence[Member]) -> list[Member]:
        return [m for m in members if not self.exclude_self or (m.architecture, m.group) != student]
