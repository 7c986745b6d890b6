"""Codistillation (Anil et al., ICLR 2018) between global models, as FedEED uses it in its section 4.2.

K global models learn from each other on public samples. They first train alone for W rounds, to become different. A
setting of the framework: FedAvg, aggregated, codistillation. FedEED's teacher is the mean of all models; the original
teacher excludes the student itself (exclude_self = true).
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ..core.settings import NonNegativeInt, PositiveInt, Replaceable
from ..method import About, register
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.teachers import Rule
from .framework.algorithm import Framework
from .framework.ensemble_trainers import EnsembleTrainer
from .framework.global_trainers import GlobalTrainer
from .framework.local_trainers import LocalTrainer
from .framework.setting import Setting, section_6


@register("codistillation")
@dataclass(frozen=True)
class Codistillation(Setting):
    """Global models that teach each other after a warm-up."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=section_6)
    K: PositiveInt = 4  # global models
    W: NonNegativeInt = 20  # rounds of warm-up
    exclude_self: bool = False  # a model is not among its own teachers
    local_trainer: Annotated[LocalTrainer, Replaceable()] = field(default_factory=LocalTrainer)
    rule: Rule = "avg_logits"
    no_single_groups: bool = False  # refuse groups of one client: their mean is that client's model
    report_ensemble: bool = True

    RENAMED: ClassVar = {"secure": "no_single_groups"}
    of_paper: ClassVar[About] = About(
        title="Codistillation",
        paper="Anil et al., ICLR 2018; FedEED, section 4.2",
        wire="model down, model up (with scaffold also control variates)",
        state="nothing",
    )

    @property
    def framework(self) -> Framework:
        return Framework(
            self.local,
            self.fusion,
            self.local_trainer,
            EnsembleTrainer("aggregated", rule=self.rule),
            GlobalTrainer("codistillation", self.W, self.exclude_self, early_stop=False),
            self.K,
            no_single_groups=self.no_single_groups,
            report_ensemble=self.report_ensemble,
        )
