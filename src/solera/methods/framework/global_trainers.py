"""Global trainers, the third slot of the framework: which global models the ensemble teaches, and when.

    none             nobody: Fed-ensemble
    basic            every model that was trained this round: FedDF
    warmup           the same after W rounds, as FedEED reads codistillation (Anil et al., ICLR 2018)
    codistillation   the same, with `exclude_self` as the original has it: a model does not teach itself
    designated       the first model of each architecture only: FedEED

Teachers are copies made before any student moves, and all students see the same mini-batches.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...errors import ConfigError
from ...parts.distill import Distill, Distilled, Memo, Validate, cached, distill, visits
from ...parts.teachers import frozen
from ...server import Server
from ...tensors import Weights, weights_of
from ..common.fusion import accuracy_on, answers_finitely, logits_problems
from .cohort import Clock
from .ensemble_trainers import EnsembleTrainer, Member
from .local_trainers import Group, Models, Seeds


@dataclass(frozen=True)
class GlobalTrainer:
    """The schemes there are by name. An object of your own with the same methods can take this one's place."""

    kind: Literal["none", "basic", "warmup", "codistillation", "designated"] = "designated"
    warmup: int = 20  # W, of warmup and codistillation: rounds before the first distillation
    exclude_self: bool = False  # codistillation: a model's own checkpoints and clients are not among its teachers
    early_stop: bool = True  # by the server's validation set, where there is one

    needs_client_models: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError(f"warmup = {self.warmup}: must not be negative")
        if self.exclude_self and self.kind != "codistillation":
            raise ConfigError(f"exclude_self = true: only with kind = 'codistillation', not {self.kind!r}")

    @property
    def designated(self) -> bool:
        """Whether only the first model of each architecture is ever a student, so that the others need not wait."""
        return self.kind == "designated"

    @property
    def distils(self) -> bool:
        """Whether there is a student at all: then public samples are needed."""
        return self.kind != "none"

    def students(self, t: int, groups: Collection[Group], trained: Collection[Group]) -> list[Group]:
        """Who is distilled in round t. A designated model also without clients this round; others then stay."""
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
        """Ask the teachers about the round's public samples, once. `seeds` are those of the round that is taught."""
        if not students or not fusion.steps:
            return Lesson({}, torch.empty(0), fusion, seeds, server, clock)
        d = public_indices(fusion, seeds, server)
        probe = server.public[d[: fusion.batch]]
        models = frozen([(m.architecture, m.weights) for m in members], server.model)
        fine = [m for m, model in zip(members, models, strict=True) if answers_finitely(model, probe)]
        if len(fine) < len(members):
            server.event("teacher_rejected", count=len(members) - len(fine), reason="non-finite logits")

        several = len(students) > 1 and not self.exclude_self  # students of one teacher

        def ask(own: list[Member]) -> Any:
            if not own:
                return None
            teacher = ensemble.teacher(own, fusion.temperature, server)
            return clock.timed("ask", _asked, teacher, several, d, fusion, seeds, server)

        if self.exclude_self:
            teachers = {g: ask([m for m in fine if (m.architecture, m.group) != g]) for g in students}
        else:
            teachers = dict.fromkeys(students, ask(fine))
        validate = accuracy_on(server.validation) if self.early_stop else None
        return Lesson(teachers, d, fusion, seeds, server, clock, validate)

    def misfits(self, fusion: Distill, server: Server) -> Iterator[str]:
        """What would fail in the middle of a run."""
        if not self.distils or not fusion.steps:
            return
        if fusion.keep_init_if_better and (server.validation is None or not self.early_stop):
            yield "method.fusion.keep_init_if_better = true: there is no validation set to compare on"
        yield from logits_problems("method.fusion", server)


class Lesson:
    """One round's distillation, ready to be given to its students together or one after another."""

    def __init__(
        self,
        teachers: dict[Group, Any],
        d: Tensor,
        fusion: Distill,
        seeds: Seeds,
        server: Server,
        clock: Clock,
        validate: Validate | None = None,
    ):
        self.teachers, self.d, self.fusion, self.seeds = teachers, d, fusion, seeds
        self.server, self.clock, self.validate = server, clock, validate

    def teach(self, students: Models) -> Models:
        """The students' weights after distillation; those without a teacher as they are."""
        taught = [g for g in students if self.teachers.get(g) is not None]
        if not taught:
            return students
        place = {g: i for i, g in enumerate(self.teachers)}  # a student's random numbers do not depend on company
        jobs = [partial(self._student, g, students[g]) for g in taught]
        seeds = [self.seeds("job", place[g]) for g in taught]
        results = self.clock.timed("distil", self.server.parallel, jobs, seeds)
        for (P, k), (_, done) in zip(taught, results, strict=True):
            kind = "distill_diverged" if done.diverged else "distilled"
            facts = {"steps": done.steps, "best_step": done.best_step, "loss": done.loss, "accuracy": done.accuracy}
            self.server.event(kind, architecture=P, group=k, of_round=self.seeds.t, **facts)
        return students | {g: weights for g, (weights, _) in zip(taught, results, strict=True)}

    def _student(self, g: Group, weights: Weights) -> tuple[Weights, Distilled]:
        model, seed = self.server.model(g[0], weights), self.seeds("fusion")
        public, teacher = self.server.public, self.teachers[g]
        done = distill(model, public, teacher, self.fusion, seed, indices=self.d, validate=self.validate)
        return weights_of(model), done


def public_indices(fusion: Distill, seeds: Seeds, server: Server) -> Tensor:
    """The public samples of a round."""
    if fusion.steps == 0 or server.public is None:
        return torch.empty(0, dtype=torch.int64)
    return server.public.round_indices(server.per_round, seeds("public"))


def _asked(teacher: Callable[..., Any], several: bool, d: Tensor, fusion: Distill, seeds: Seeds, server: Server) -> Any:
    """The teacher's answers to all samples that will be visited; the teacher itself, where samples change.

    Then `several` students share what it says to each mini-batch.
    """
    if server.public.fresh:
        return Memo(teacher, d, fusion, seeds("fusion")) if several else teacher
    seen = d[visits(len(d), fusion.steps, fusion.batch, seeds("fusion"))].unique()

    def run(jobs: list[Callable[[], Any]]) -> list[Any]:
        return server.parallel(jobs, [seeds("job", i) for i in range(len(jobs))])

    return cached(teacher, server.public, seen, fusion, run)
