"""The framework's settings: its slots, and what they require."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...core.settings import PositiveInt, Problem
from ...method import About, Method, Traits
from ...scenario.server import Server
from ...train.distill import Distill
from ...train.fitting import Local
from ...train.teachers import Rule
from ..steps.fusion import logits_problems
from ..steps.predictions import label_problems
from ..steps.screen import Screen
from .ensemble_trainers import EnsembleTrainer
from .global_trainers import GlobalTrainer
from .grouping import Schedule
from .local_trainers import LocalTrainer, PerGroup


@dataclass(frozen=True)
class Slots(Method):
    """Local trainer, ensemble trainer and global trainer, and how clients are grouped."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    local_trainer: LocalTrainer = field(default_factory=LocalTrainer)  # how a group's clients train its model
    ensemble_trainer: EnsembleTrainer = field(default_factory=EnsembleTrainer)  # which models are in the ensemble
    global_trainer: GlobalTrainer = field(default_factory=GlobalTrainer)  # which models the ensemble teaches
    screen: Screen = field(default_factory=Screen)  # which uploads count, and how those of a group are averaged
    K: PositiveInt = 2  # global models (of each architecture), each trained by a group of clients
    R: PositiveInt = 1  # rounds whose checkpoints are in an aggregated ensemble
    rule: Rule = "avg_logits"  # F, how predictions are combined; "confidence": Fed-ET's, weighted by confidence
    group_sizes: tuple[PositiveInt, ...] | None = None  # relative sizes of the groups; default: equal
    schedule: Schedule = "random"  # new random groups each round, Fed-ensemble's strata, or the i-th client's always
    pipeline: bool = False  # designated only: clients train while the server distils (FedEED's appendix A.7)
    no_single_groups: bool = False  # refuse groups of one client, and slots that need individual client models
    save_ensemble: bool = False  # keep the round's client models, for inference; aggregates are always kept
    report_ensemble: bool = True  # evaluate the ensemble of the teachers each round (one pass per teacher)

    RENAMED: ClassVar = {"secure": "no_single_groups"}
    of_paper: ClassVar[About] = About(  # without the state of clients, which depends on the settings
        title="Generalised framework",
        paper="FedEED's Algorithm 1, ICLR submission",
        wire="model down, model up (with scaffold also control variates)",
        state="",
        privacy="no slot needs individual models",
    )

    @property
    def about(self) -> About:
        """The description; of the framework itself also which slots see single models."""
        said, slots = self.of_paper, ", ".join(self.needs_individual)
        privacy = f"for {slots}" if said.privacy and slots else said.privacy
        return replace(said, state=self.local_trainer.client_state, privacy=privacy)

    def problems(self) -> Iterator[Problem]:
        if self.R > 1 and self.ensemble_trainer.needs_client_models:
            yield f"R = {self.R}: only ensemble_trainer.kind = 'aggregated' keeps checkpoints"
        if self.group_sizes is not None and len(self.group_sizes) != self.K:
            yield f"group_sizes = {list(self.group_sizes)}: K = {self.K} sizes are needed"
        if self.group_sizes is not None and self.schedule != "random":
            yield f"group_sizes: with schedule = {self.schedule!r} groups are of equal size; leave it out"
        if isinstance(self.local_trainer, PerGroup) and len(self.local_trainer.parts) != self.K:
            yield f"local_trainer.parts: {len(self.local_trainer.parts)} trainers; K = {self.K} groups need one each"
        if self.screen.individual and not self.local_trainer.sends_models:
            yield "screen: control variates (local_trainer.kind = 'scaffold') have no robust average and no clipping"
        if self.pipeline and not self.global_trainer.designated:
            yield "pipeline = true: only designated distillation leaves groups free to train"
        if self.no_single_groups and self.needs_individual:
            yield f"no_single_groups = true: {', '.join(self.needs_individual)} needs individual client models"

    @property
    def needs_individual(self) -> list[str]:
        """The slots that need individual client models."""
        slots = {"screen": self.screen.individual, "ensemble_trainer": self.ensemble_trainer.needs_client_models}
        return [f"method.{name}" for name, needed in slots.items() if needed]

    @property
    def shares(self) -> tuple[int, ...]:
        return self.group_sizes or (1,) * self.K

    @property
    def keeps_ensemble(self) -> bool:
        """True if the ensemble stays in the state between rounds."""
        return self.save_ensemble or not self.ensemble_trainer.needs_client_models

    @property
    def distils(self) -> bool:
        return self.global_trainer.distils and self.fusion.steps > 0

    def traits(self) -> Traits:
        """The combined requirements of the slots."""
        labels = self.ensemble_trainer.tunes or (self.distils and self.global_trainer.label_weight > 0)
        return Traits(
            across="knowledge" if self.distils else "predictions",
            public="server" if self.distils or self.ensemble_trainer.tunes else "none",
            public_labels="needed" if labels else "unused",
            products=self.local_trainer.products and self.ensemble_trainer.products,
            replies="individual" if self.needs_individual else "means",
            groups="K" if self.K > 1 and self.group_sizes is None else "",
        )

    def fits(self, server: Server) -> Iterator[str]:
        """Settings that would fail during a run."""
        yield from super().fits(server)
        yield from self.local_trainer.misfits(self.local)
        if self.distils:
            early = server.validation is not None and self.global_trainer.early_stop
            if self.fusion.keep_init_if_better and not early:
                yield "method.fusion.keep_init_if_better = true: there is no validation set to compare on"
            if self.global_trainer.label_weight and server.public.fresh:
                yield "method.global_trainer.label_weight: samples that change with every draw have no stored label"
            yield from logits_problems("method.fusion", server)
        if self.traits().public_labels == "needed":
            way_out = "set method.ensemble_trainer.tune.epochs = 0 and method.global_trainer.label_weight = 0"
            yield from label_problems("framework", server, way_out)
