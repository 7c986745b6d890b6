"""FedBE (Chen & Chao, ICLR 2021) and FedDistill, its first version (arXiv): Bayesian model ensembles.

A distribution is fitted to the round's client models. The teachers are models sampled from it, the client models and
their average. The student starts from the average and ends with stochastic weight averaging (SWA), so that it does not
overfit noisy teachers. Settings of the framework: K = 1, FedAvg, bayesian, basic.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..core.settings import Positive, PositiveInt
from ..method import About, register
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.posterior import Kind
from ..train.teachers import Rule
from .framework.algorithm import Framework
from .framework.ensemble_trainers import EnsembleTrainer
from .framework.global_trainers import GlobalTrainer
from .framework.local_trainers import LocalTrainer
from .framework.setting import Setting


def about(title: str, paper: str) -> About:
    """The two differ in the distribution only."""
    return About(
        title=title,
        paper=paper,
        wire="model down, model up",
        state="nothing",
        models="models are drawn inside each architecture",
    )


def with_swa() -> Distill:
    """Momentum SGD, averaged every 25 steps after step 500. In the paper: 20 epochs of the public samples."""
    return Distill(
        steps=1500, optimizer="sgd", lr=1e-3, momentum=0.9, weight_decay=1e-5, schedule="constant", clip=None,
        swa_every=25, swa_start=500,
    )  # fmt: skip


def short_swa() -> Distill:
    """250 steps, averaged every 25 from the first on."""
    return Distill(steps=250, schedule="constant", swa_every=25)


@register("fedbe")
@dataclass(frozen=True)
class FedBE(Setting):
    """Clients, their average and models drawn around them teach the average."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=with_swa)
    posterior: Kind = "gaussian"
    samples: PositiveInt = 10  # M
    alpha: Positive = 1.0  # of the Dirichlet distribution
    update_normalised: bool = False  # gaussian: over directions of updates, as in the authors' code
    rule: Rule = "avg_probs"  # pseudo-labels are means of probabilities
    sharpen: Positive | None = None  # temperature of the pseudo-labels; 0.5 in the authors' code
    average: Literal["weighted", "uniform"] = "weighted"
    save_ensemble: bool = False
    report_ensemble: bool = True

    of_paper: ClassVar[About] = about("FedBE", "Chen & Chao, ICLR 2021")

    @property
    def framework(self) -> Framework:
        return Framework(
            self.local,
            self.fusion,
            LocalTrainer("fedavg", self.average),
            EnsembleTrainer(
                "bayesian",
                rule=self.rule,
                posterior=self.posterior,
                samples=self.samples,
                alpha=self.alpha,
                update_normalised=self.update_normalised,
                sharpen=self.sharpen,
            ),
            GlobalTrainer("basic", early_stop=False),
            K=1,
            save_ensemble=self.save_ensemble,
            report_ensemble=self.report_ensemble,
        )


@register("feddistill")
@dataclass(frozen=True)
class FedDistill(Setting):
    """Clients and models drawn by SWAG (Maddox et al., NeurIPS 2019) around them teach the average."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=short_swa)
    samples: PositiveInt = 10
    scale: Positive = 0.5  # of the covariance
    include_clients: bool = True
    rule: Rule = "avg_logits"
    average: Literal["weighted", "uniform"] = "weighted"
    save_ensemble: bool = False
    report_ensemble: bool = True

    of_paper: ClassVar[About] = about("FedDistill (SWAG)", "Chen & Chao, arXiv v1 of FedBE")

    @property
    def framework(self) -> Framework:
        return Framework(
            self.local,
            self.fusion,
            LocalTrainer("fedavg", self.average),
            EnsembleTrainer(
                "bayesian",
                rule=self.rule,
                posterior="swag",
                samples=self.samples,
                scale=self.scale,
                include_clients=self.include_clients,
                include_average=False,
            ),
            GlobalTrainer("basic", early_stop=False),
            K=1,
            save_ensemble=self.save_ensemble,
            report_ensemble=self.report_ensemble,
        )
