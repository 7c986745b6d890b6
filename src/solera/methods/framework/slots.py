"""The framework's settings: its three slots, and what they require."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ...core.settings import PositiveInt, Problem, Replaceable
from ...method import Method, Traits
from ...scenario.server import Server
from ...train.distill import Distill
from ...train.fitting import Local
from ..steps.predictions import label_problems
from .ensemble_trainers import EnsembleTrainer
from .global_trainers import GlobalTrainer
from .grouping import Schedule
from .local_trainers import LocalTrainer


@dataclass(frozen=True)
class Slots(Method):
    """Local trainer, ensemble trainer and global trainer, and how clients are grouped."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    local_trainer: Annotated[LocalTrainer, Replaceable()] = field(default_factory=LocalTrainer)
    ensemble_trainer: Annotated[EnsembleTrainer, Replaceable()] = field(default_factory=EnsembleTrainer)
    global_trainer: Annotated[GlobalTrainer, Replaceable()] = field(default_factory=GlobalTrainer)
    K: PositiveInt = 2  # global models (of each architecture), each trained by a group of clients
    group_sizes: tuple[PositiveInt, ...] | None = None  # relative sizes of the groups; default: equal
    schedule: Schedule = "random"  # new random groups each round, Fed-ensemble's strata, or the i-th client's always
    pipeline: bool = False  # designated only: clients train while the server distils
    no_single_groups: bool = False  # refuse groups of one client, and slots that need individual client models
    save_ensemble: bool = False  # keep the round's client models, for inference; aggregates are always kept
    report_ensemble: bool = True  # evaluate the ensemble of the teachers each round (one pass per teacher)

    RENAMED: ClassVar = {"secure": "no_single_groups"}

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.group_sizes is not None and len(self.group_sizes) != self.K:
            yield f"group_sizes = {list(self.group_sizes)}: K = {self.K} sizes are needed"
        if self.group_sizes is not None and self.schedule != "random":
            yield f"group_sizes: with schedule = {self.schedule!r} groups are of equal size; leave it out"
        kinds = self.local_trainer.kinds
        if kinds is not None and len(kinds) != self.K:
            yield f"local_trainer.kinds = {list(kinds)}: K = {self.K} kinds are needed, one for each group"
        if self.pipeline and not self.global_trainer.designated:
            yield "pipeline = true: only designated distillation leaves groups free to train"
        if self.no_single_groups and self.needs_individual:
            yield f"no_single_groups = true: {', '.join(self.needs_individual)} needs individual client models"

    @property
    def needs_individual(self) -> list[str]:
        """The slots that need individual client models."""
        slots = ("local_trainer", "ensemble_trainer", "global_trainer")
        return [f"method.{s}" for s in slots if getattr(self, s).needs_client_models]

    @property
    def shares(self) -> tuple[int, ...]:
        return self.group_sizes or (1,) * self.K

    @property
    def averages_models(self) -> bool:
        """Whether averages are of whole models: not of changes, nor with momentum or draws around them."""
        own = self.local_trainer
        return (
            type(own) is LocalTrainer
            and {"fedavg", "fedprox"} >= set(own.kinds or [own.kind])
            and getattr(self.ensemble_trainer, "kind", "bayesian") != "bayesian"
        )

    @property
    def keeps_ensemble(self) -> bool:
        """Whether the ensemble stays in the state between rounds."""
        return self.save_ensemble or not self.ensemble_trainer.needs_client_models

    def traits(self) -> Traits:
        """The combined requirements of the slots."""
        distils = self.global_trainer.distils and self.fusion.steps > 0
        labels = self.ensemble_trainer.tunes or (distils and self.global_trainer.label_weight > 0)
        return Traits(
            across="knowledge" if distils else "predictions",
            public="server" if distils or self.ensemble_trainer.tunes else "none",
            public_labels="needed" if labels else "unused",
            products=self.averages_models,
            replies="individual" if self.needs_individual else "means",
            groups="K" if self.K > 1 and self.group_sizes is None else "",
        )

    def fits(self, server: Server) -> Iterator[str]:
        """Settings that would fail during a run."""
        yield from self.local_trainer.misfits(self.local)
        yield from self.global_trainer.misfits(self.fusion, server)
        if self.traits().public_labels == "needed":
            way_out = "set method.ensemble_trainer.tune.epochs = 0 and method.global_trainer.label_weight = 0"
            yield from label_problems("framework", server, way_out)
