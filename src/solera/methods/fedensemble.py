"""Fed-ensemble (Shi, Lai, Al Kontar, Mosharaf Chowdhury, 2021): K global models, used together for prediction.

There is no distillation, so no public data is needed. A client receives only one of the K models in a round. A setting
of the framework: FedAvg, aggregated, none. By default the prediction is the mean of the logits. The paper takes the
mean of the probabilities: set rule = "avg_probs".
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ..core.settings import PositiveInt, Replaceable
from ..method import About, register
from ..train.fitting import Local
from ..train.teachers import Rule
from .framework.algorithm import Framework
from .framework.ensemble_trainers import EnsembleTrainer
from .framework.global_trainers import GlobalTrainer
from .framework.grouping import Schedule
from .framework.local_trainers import LocalTrainer
from .framework.setting import Setting


@register("fedensemble")
@dataclass(frozen=True)
class FedEnsemble(Setting):
    """Several global models, trained on different clients, that predict as an ensemble."""

    local: Local = field(default_factory=Local)
    K: PositiveInt = 4  # global models
    schedule: Schedule = "random"  # new random groups each round, or the paper's strata: each model sees all in turn
    local_trainer: Annotated[LocalTrainer, Replaceable()] = field(default_factory=LocalTrainer)
    rule: Rule = "avg_logits"
    no_single_groups: bool = False  # refuse groups of one client: their mean is that client's model

    RENAMED: ClassVar = {"secure": "no_single_groups"}
    of_paper: ClassVar[About] = About(
        title="Fed-ensemble",
        paper="Shi et al., 2021",
        wire="model down, model up (with scaffold also control variates)",
        state="nothing",
    )

    @property
    def framework(self) -> Framework:
        return Framework(
            self.local,
            local_trainer=self.local_trainer,
            ensemble_trainer=EnsembleTrainer("aggregated", rule=self.rule),
            global_trainer=GlobalTrainer("none"),
            K=self.K,
            schedule=self.schedule,
            no_single_groups=self.no_single_groups,
        )
