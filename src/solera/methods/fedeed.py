"""FedEED (anonymous ICLR submission): federated efficient ensemble distillation, section 5.

K global models are trained on groups of clients that change each round. The ensemble consists of the K aggregates of
the last R rounds, never of client models. It teaches one designated model. The other models stay diverse, and their
clients can train while the server distils. A setting of the framework: FedAvg, aggregated, designated.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ..core.settings import PositiveInt, Replaceable
from ..method import About, register
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.teachers import Rule
from .framework.algorithm import Framework
from .framework.ensemble_trainers import EnsembleTrainer
from .framework.global_trainers import GlobalTrainer
from .framework.grouping import Schedule
from .framework.local_trainers import LocalTrainer
from .framework.setting import Setting, section_6


@register("fedeed")
@dataclass(frozen=True)
class FedEED(Setting):
    """An ensemble of aggregated models teaches one designated model."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=section_6)
    K: PositiveInt = 4  # global models
    R: PositiveInt = 1  # rounds whose checkpoints are in the ensemble
    local_trainer: Annotated[LocalTrainer, Replaceable()] = field(default_factory=LocalTrainer)
    rule: Rule = "avg_logits"  # F, how predictions are combined
    group_sizes: tuple[PositiveInt, ...] | None = None  # relative sizes of the groups; default: equal
    schedule: Schedule = "random"  # new random groups each round; fixed: model i always goes to client i (appendix A.7)
    pipeline: bool = False  # appendix A.7: clients train while the server distils
    no_single_groups: bool = False  # refuse groups of one client: their mean is that client's model
    report_ensemble: bool = True

    RENAMED: ClassVar = {"secure": "no_single_groups"}
    of_paper: ClassVar[About] = About(
        title="FedEED",
        paper="anonymous ICLR submission",
        wire="model down, model up (with scaffold also control variates)",
        state="nothing",
    )

    @property
    def framework(self) -> Framework:
        return Framework(
            self.local,
            self.fusion,
            self.local_trainer,
            EnsembleTrainer("aggregated", R=self.R, rule=self.rule),  # section 4.1, 5)
            GlobalTrainer("designated", early_stop=False),  # section 4.2
            self.K,
            self.group_sizes,
            self.schedule,
            pipeline=self.pipeline,
            no_single_groups=self.no_single_groups,
            report_ensemble=self.report_ensemble,
        )
