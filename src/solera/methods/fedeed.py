"""FedEED (anonymous ICLR submission): federated efficient ensemble distillation, section 5; and two relatives.

K global models are trained on groups of clients that change each round. The ensemble consists of the K aggregates of
the last R rounds, never of client models. It teaches one designated model. The other models stay diverse, and their
clients can train while the server distils.

Fed-ensemble (Shi, Lai, Al Kontar, Mosharaf Chowdhury, 2021): the K models are used together for prediction. There is no
distillation, so no public data is needed. By default the prediction is the mean of the logits; the paper takes the mean
of the probabilities: set rule = "avg_probs".

Codistillation (Anil et al., ICLR 2018) between global models, as FedEED uses it in its section 4.2: they learn from
each other on public samples after a warm-up, in which they become different. FedEED's teacher is the mean of all
models; the original teacher excludes the student itself (global_trainer.exclude_self = true).
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..core.settings import PositiveInt
from ..method import About, register
from ..train.distill import Distill
from .framework.algorithm import Framework
from .framework.global_trainers import Codistilling, GlobalTrainer, NoDistillation


def section_6() -> Distill:
    """The server's training in FedEED's section 6.1, except the steps (paper: 5,000). T^2 is our interpretation."""
    return Distill(
        batch=256, optimizer="sgd", lr=0.1, schedule="constant", temperature=4.0, t_squared=True, clip=None,
        patience=None,
    )  # fmt: skip


@register("fedeed")
@dataclass(frozen=True)
class FedEED(Framework):
    """An ensemble of aggregated models teaches one designated model."""

    fusion: Distill = field(default_factory=section_6)
    global_trainer: GlobalTrainer = field(default_factory=lambda: GlobalTrainer(early_stop=False))
    K: PositiveInt = 4  # global models

    of_paper: ClassVar[About] = replace(
        Framework.of_paper, title="FedEED", paper="anonymous ICLR submission", privacy=""
    )


@register("fedensemble")
@dataclass(frozen=True)
class FedEnsemble(Framework):
    """Several global models, trained on different clients, that predict as an ensemble."""

    global_trainer: GlobalTrainer = field(default_factory=NoDistillation)
    K: PositiveInt = 4  # global models

    of_paper: ClassVar[About] = replace(FedEED.of_paper, title="Fed-ensemble", paper="Shi et al., 2021")


@register("codistillation")
@dataclass(frozen=True)
class Codistillation(Framework):
    """Global models that teach each other after a warm-up."""

    fusion: Distill = field(default_factory=section_6)
    global_trainer: GlobalTrainer = field(default_factory=lambda: Codistilling(early_stop=False))
    K: PositiveInt = 4  # global models

    of_paper: ClassVar[About] = replace(
        FedEED.of_paper, title="Codistillation", paper="Anil et al., ICLR 2018; FedEED, section 4.2"
    )
