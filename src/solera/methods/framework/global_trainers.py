"""Global trainers, the third slot of the framework: which global models the ensemble teaches, and when.

    none             no model: Fed-ensemble
    basic            every model that was trained this round: FedDF
    warmup           the same after W rounds, FedEED's version of codistillation (Anil et al., ICLR 2018)
    codistillation   the same; with `exclude_self` as in the original: a model does not teach itself
    designated       the first model of each architecture only: FedEED

With `label_weight`, students also learn the labels of the server's samples (appendix A.5: "extending FedEED to labelled
dataset ... is straightforward"): KD + label_weight CE.

Teachers are copies made before distillation starts, and all students see the same mini-batches.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...core.settings import NonNegative, NonNegativeInt, Problem, settings
from ...scenario.server import Server
from ...train.distill import Distill, Loss, divergence
from ...train.teachers import frozen
from ..steps.fusion import Asked, answers_finitely, asked, fuse, logits_problems, public_indices
from .cohort import Clock
from .ensemble_trainers import EnsembleTrainer, Member
from .local_trainers import Group, Models, Seeds


@settings
class GlobalTrainer:
    """The built-in schemes, by name. An object of your own with the same methods can replace this one."""

    kind: Literal["none", "basic", "warmup", "codistillation", "designated"] = "designated"
    warmup: NonNegativeInt = 20  # W, of warmup and codistillation: rounds before the first distillation
    exclude_self: bool = False  # codistillation: exclude a model's own checkpoints and clients from its teachers
    early_stop: bool = True  # by the server's validation set, if there is one
    label_weight: NonNegative = 0.0  # of cross-entropy with the public samples' labels, added to the KL

    needs_client_models: ClassVar[bool] = False

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.exclude_self and self.kind != "codistillation":
            yield f"exclude_self = true: only with kind = 'codistillation', not {self.kind!r}"

    @property
    def designated(self) -> bool:
        """Whether only the first model of each architecture is a student, so that the others need not wait."""
        return self.kind == "designated"

    @property
    def distils(self) -> bool:
        """Whether any model is distilled: then public samples are needed."""
        return self.kind != "none"

    def students(self, t: int, groups: Collection[Group], trained: Collection[Group]) -> list[Group]:
        """The models distilled in round t. A model without clients this round is distilled only if it is designated."""
        if self.kind == "designated":
            return [g for g in groups if g[1] == 0]
        if self.kind == "none" or (self.kind in ("warmup", "codistillation") and t < self.warmup):
            return []
        return [g for g in groups if g in trained]

    def lesson(
        self,
        students: Sequence[Group],
        members: Sequence[Member],
        ensemble: EnsembleTrainer,
        fusion: Distill,
        seeds: Seeds,
        server: Server,
        clock: Clock,
    ) -> "Lesson":
        """Compute the teachers' predictions for a round's public samples, once. `seeds` are those of that round."""
        if not students or not fusion.steps:
            return Lesson({}, torch.empty(0), fusion, seeds, server, clock)
        d = public_indices(fusion, seeds, server)
        probe = server.public[d[: fusion.batch]]
        models = frozen([(m.architecture, m.weights) for m in members], server.model)
        fine = [m for m, model in zip(members, models, strict=True) if answers_finitely(model, probe)]
        if len(fine) < len(members):
            server.event("teacher_rejected", count=len(members) - len(fine), reason="non-finite logits")

        several = len(students) > 1 and not self.exclude_self  # students of one teacher

        def ask(own: list[Member]) -> Asked | None:
            if not own:
                return None
            teacher = ensemble.teacher(own, fusion.temperature, server)
            answers = clock.timed("ask", asked, teacher, several, d, fusion, seeds, server)
            return answers.beside(server.public.labels) if self.label_weight else answers

        if self.exclude_self:
            teachers = {g: ask([m for m in fine if (m.architecture, m.group) != g]) for g in students}
        else:
            teachers = dict.fromkeys(students, ask(fine))
        return Lesson(teachers, d, fusion, seeds, server, clock, self.early_stop, self.loss(fusion))

    def loss(self, fusion: Distill) -> Loss | None:
        """KL from the teacher + label_weight times the cross-entropy with the label; None: the KL alone."""
        if not self.label_weight:
            return None

        def kd_and_ce(logits: Tensor, probs: Tensor, entropy: Tensor, labels: Tensor) -> Tensor:
            kd = divergence(logits, probs, entropy, fusion.temperature, fusion.t_squared)
            return kd + self.label_weight * cross_entropy(logits, labels)

        return kd_and_ce

    def misfits(self, fusion: Distill, server: Server) -> Iterator[str]:
        """Settings that would fail during a run."""
        if not self.distils or not fusion.steps:
            return
        if fusion.keep_init_if_better and (server.validation is None or not self.early_stop):
            yield "method.fusion.keep_init_if_better = true: there is no validation set to compare on"
        if self.label_weight and server.public.fresh:
            yield "method.global_trainer.label_weight: samples that change with every draw have no stored label here"
        yield from logits_problems("method.fusion", server)


class Lesson:
    """One round's distillation, ready to run for its students together or one after another."""

    def __init__(
        self,
        teachers: dict[Group, Asked | None],
        d: Tensor,
        fusion: Distill,
        seeds: Seeds,
        server: Server,
        clock: Clock,
        validate: bool = True,
        loss: Loss | None = None,
    ):
        self.teachers = {g: teacher for g, teacher in teachers.items() if teacher is not None}
        self.place = {g: i for i, g in enumerate(teachers)}  # random numbers do not depend on other students
        self.d, self.fusion, self.seeds, self.server = d, fusion, seeds, server
        self.clock, self.validate, self.loss = clock, validate, loss

    def teach(self, students: Models) -> Models:
        """The students' weights after distillation; unchanged without a teacher."""
        taught = {g: weights for g, weights in students.items() if g in self.teachers}
        if not taught:
            return students
        work = partial(
            fuse,
            taught,
            self.teachers,
            self.d,
            self.fusion,
            self.seeds,
            self.server,
            loss=self.loss,
            validate=self.validate,
            jobs=[self.place[g] for g in taught],
            of_round=self.seeds.t,
        )
        return students | self.clock.timed("distil", work)
