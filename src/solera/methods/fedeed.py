"""FedEED (anonymous ICLR submission): federated efficient ensemble distillation, section 5.

K global models are trained on groups of clients that change each round. The K aggregates of the last R rounds, never a
client's model, are the ensemble that teaches one designated model; the others stay diverse, and their clients can train
while the server distils. A setting of the framework: FedAvg, aggregated, designated.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..method import About, register
from ..parts.distill import Distill
from ..parts.local import Local
from ..parts.teachers import Rule
from .framework.ensemble_trainers import EnsembleTrainer
from .framework.global_trainers import GlobalTrainer
from .framework.local_trainers import LocalTrainer
from .framework.loop import Framework
from .framework.setting import Setting


def section_6() -> Distill:
    """The server's training of section 6.1, but for the number of steps (5,000 in the paper). T^2 is our reading."""
    return Distill(
        batch=256,
        optimiser="sgd",
        lr=0.1,
        schedule="constant",
        temperature=4.0,
        t_squared=True,
        clip=None,
        patience=None,
    )


@register("fedeed")
@dataclass(frozen=True)
class FedEED(Setting):
    """An ensemble of aggregated models teaches one designated model."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=section_6)
    K: int = 4  # global models
    R: int = 1  # rounds whose checkpoints are in the ensemble
    local_trainer: LocalTrainer = field(default_factory=LocalTrainer)
    rule: Rule = "avg_logits"  # F, how the ensemble answers
    group_sizes: tuple[int, ...] | None = None  # how the clients are shared out; left out: evenly
    pipeline: Literal["off", "strict", "eager"] = "off"  # appendix A.7
    secure: bool = False  # refuse groups of one client, which secure aggregation could not hide
    report_ensemble: bool = True

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
            pipeline=self.pipeline,
            secure=self.secure,
            report_ensemble=self.report_ensemble,
        )
