"""FedBE (Chen & Chao, ICLR 2021) and FedDistill, its first version (arXiv): Bayesian model ensembles.

A distribution is fitted to the round's client models. The teachers are models sampled from it, the client models and
their average. The student starts from the average and ends with stochastic weight averaging (SWA), so that it does not
overfit noisy teachers.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..core.settings import PositiveInt
from ..method import About, register
from ..train.distill import Distill
from ..train.teachers import Rule
from .framework.algorithm import Framework
from .framework.ensemble_trainers import Bayesian, EnsembleTrainer
from .framework.global_trainers import Basic, GlobalTrainer


def with_swa() -> Distill:
    """Momentum SGD, averaged every 25 steps after step 500. In the paper: 20 epochs of the public samples."""
    return Distill(
        steps=1500, optimizer="sgd", lr=1e-3, momentum=0.9, weight_decay=1e-5, schedule="constant", clip=None,
        swa_every=25, swa_start=500,
    )  # fmt: skip


@register("fedbe")
@dataclass(frozen=True)
class FedBE(Framework):
    """Clients, their average and models sampled around them teach the average."""

    fusion: Distill = field(default_factory=with_swa)
    ensemble_trainer: EnsembleTrainer = field(default_factory=Bayesian)
    global_trainer: GlobalTrainer = field(default_factory=lambda: Basic(early_stop=False))
    K: PositiveInt = 1
    rule: Rule = "avg_probs"  # pseudo-labels are means of probabilities

    of_paper: ClassVar[About] = About(
        title="FedBE",
        paper="Chen & Chao, ICLR 2021",
        wire="model down, model up",
        state="",
        models="models are drawn inside each architecture",
    )


@register("feddistill")
@dataclass(frozen=True)
class FedDistill(Framework):
    """Clients and models drawn by SWAG (Maddox et al., NeurIPS 2019) around them teach the average."""

    fusion: Distill = field(default_factory=lambda: Distill(steps=250, schedule="constant", swa_every=25))
    ensemble_trainer: EnsembleTrainer = field(default_factory=lambda: Bayesian(posterior="swag", include_average=False))
    global_trainer: GlobalTrainer = field(default_factory=lambda: Basic(early_stop=False))
    K: PositiveInt = 1

    of_paper: ClassVar[About] = replace(
        FedBE.of_paper, title="FedDistill (SWAG)", paper="Chen & Chao, arXiv v1 of FedBE"
    )
