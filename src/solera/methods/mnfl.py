"""MNFL (Beikmohammadi et al.; the method is KT-pFL, Zhang et al., NeurIPS 2021), Algorithm 1.

Every client has its own model, of any architecture. Its teacher is a personal mixture of all clients' soft predictions
on public samples. The mixtures are the columns of the knowledge coefficient matrix c, which the server learns. The
equations are numbered as in the paper; docs/methods/mnfl.md describes what the paper does not specify.

`mnfl-code` has the order of the authors' code, `mnfl-twice` learns c from predictions made after distillation.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.federation import Federation, Replies
from ..core.settings import PositiveInt
from ..method import About, register
from ..scenario.server import Server
from ..train.fitting import Local
from ..train.similarity import SMALLEST, Coefficients, Loss, Reduction, learn
from .steps.coefficients import Mixing, block, note, note_objective, shares, with_block
from .steps.predictions import (
    ask,
    distil_and_predict,
    distil_and_train,
    distil_locally,
    train_and_assess,
    usable,
)


@register("mnfl")
@dataclass(frozen=True)
class MNFL(Mixing):
    """Personal models that learn from each other, with learned coefficients."""

    coefficients: Coefficients = field(default_factory=Coefficients)  # eta_3, lambda, rho
    rule: Literal["learned", "uniform"] = "learned"  # uniform: c stays 1/N, the plain mean as in FedMD
    c_loss: Literal["kl", "mse"] = "kl"  # collaborative loss of eq. (7): as in the paper, or in the authors' code
    c_reduction: Reduction = "sum"  # of that loss over samples; with mean, c hardly changes at the paper's rate
    c_batch: PositiveInt = 256  # at most this many public samples for that loss
    grow_epochs: bool = False  # local epochs 1, 2, 3, ... up to local.epochs, as in the authors' code

    BESIDE: ClassVar = {
        "order": "another method: method.name = 'mnfl-code' for the order of the authors' code",
        "c_pred": "another method: method.name = 'mnfl-twice' for predictions after distillation",
    }
    about: ClassVar[About] = About(
        title="MNFL (KT-pFL)",
        paper="Zhang et al., NeurIPS 2021; Beikmohammadi et al.",
        wire="indices down, predictions up, targets down",
        state="its model",
    )

    def exchange(self, c: Tensor, x: Tensor, A: list[str], fed: Federation, server: Server) -> Tensor:
        S, s, said = self.predicted(x, A, fed, server)  # lines 11-13, eq. (5)
        fed.map(distil_locally, S, **self.lesson(block(c, S, fed), S, s))  # lines 14-16, eq. (2) and (6)
        c = self.learned(c, S, s, fed)  # line 7, eq. (7)
        self.note(c, S, s, said, fed, server)  # eq. (4)
        return c

    def learned(self, c: Tensor, S: list[str], s: Tensor, fed: Federation) -> Tensor:
        """Eq. (7), for the coefficients between clients S with predictions s."""
        if self.rule == "uniform":
            return c
        loss, share, cfg = self.collaborative(S, s, fed)
        return with_block(c, S, learn(block(c, S, fed), loss.slope, share, len(c), cfg), fed)

    def collaborative(self, S: list[str], s: Tensor, fed: Federation) -> tuple[Loss, Tensor, Coefficients]:
        """The loss of the coefficients between clients S on a batch of their predictions, the weight of each client's
        loss, and the settings to learn with."""
        s = s[:, self.batch(s.shape[1], fed)]  # xi_r
        if self.c_loss == "mse":  # the authors' code: clients count the same, and the penalty is a mean, not a sum
            cfg = replace(self.coefficients, rho=self.coefficients.rho / len(fed.clients))
            return mse_loss(s, self.c_reduction), torch.ones(len(S), dtype=torch.float64), cfg
        return kl_loss(s, self.c_reduction), shares(S, fed), self.coefficients

    def note(self, c: Tensor, S: list[str], s: Tensor, said: Replies, fed: Federation, server: Server) -> None:
        """Write the coefficients and objective (4) into the round's metrics."""
        note(c, fed, server)
        loss, share, cfg = self.collaborative(S, s, fed)
        private = sum(float(d) * said[k].loss for d, k in zip(shares(S, fed), S, strict=True))
        note_objective(block(c, S, fed), loss, share, private, cfg, fed, server)

    def training(self, fed: Federation) -> Local:
        """The local training of this round."""
        if not self.grow_epochs:
            return self.local
        return replace(self.local, epochs=min(self.local.epochs, fed.round + 1))

    def batch(self, samples: int, fed: Federation) -> Tensor:
        """The public samples on which the coefficients are learned: the same for every call in a round."""
        g = torch.Generator().manual_seed(fed.seed("coefficients"))
        return torch.randperm(samples, generator=g)[: self.c_batch].sort().values


@register("mnfl-code")
@dataclass(frozen=True)
class MNFLCode(MNFL):
    """MNFL in the order of the authors' code: predict, learn c, distil, train."""

    about: ClassVar[About] = replace(MNFL.about, title="MNFL in the order of the authors' code")

    def exchange(self, c: Tensor, x: Tensor, A: list[str], fed: Federation, server: Server) -> Tensor:
        local = self.training(fed)
        first = replace(local, epochs=1, steps=None)  # of clients that were not sampled before
        S, s, said = ask(A, x, self.temperature, first, fed, server, only_new=True, task=train_and_assess)
        c = self.learned(c, S, s, fed)
        taught = fed.map(distil_and_train, S, local=local, **self.lesson(block(c, S, fed), S, s))
        server.report_stages(after_distilling=taught, after_training=None)
        self.note(c, S, s, said, fed, server)
        return c


@register("mnfl-twice")
@dataclass(frozen=True)
class MNFLTwice(MNFL):
    """MNFL that learns c from predictions made after distillation, which clients send as well."""

    about: ClassVar[About] = replace(
        MNFL.about, title="MNFL with predictions after distillation", wire=f"{MNFL.about.wire}, predictions up again"
    )

    def exchange(self, c: Tensor, x: Tensor, A: list[str], fed: Federation, server: Server) -> Tensor:
        S, s, _ = self.predicted(x, A, fed, server)
        said = fed.map(distil_and_predict, S, **self.lesson(block(c, S, fed), S, s))
        S, s = usable(said, fed)
        c = self.learned(c, S, s, fed)
        self.note(c, S, s, said, fed, server)
        return c


def kl_loss(s: Tensor, reduction: Reduction) -> Loss:
    """KL(sum_m w_mn s_m || s_n), the sum (or mean) over samples, of predictions s [clients, samples, classes].

    The receiver's own s_n on the right is a constant.
    """
    scale = 1.0 if reduction == "sum" else 1 / s.shape[1]
    s = s.double().clamp_min(SMALLEST)
    s = (s / s.sum(-1, keepdim=True)).flatten(1)
    log = s.log()

    def value(weights: Tensor) -> Tensor:
        mixed = (weights.T @ s).clamp_min(SMALLEST)
        return scale * (mixed * (mixed.log() - log)).sum(1)

    def slope(weights: Tensor) -> Tensor:
        mixed = (weights.T @ s).clamp_min(SMALLEST)
        return scale * (s @ (mixed.log() - log + 1).T)

    return Loss(value, slope)


def mse_loss(s: Tensor, reduction: Reduction) -> Loss:
    """(sum_m w_mn s_m - s_n)^2, the mean over classes and the sum (or mean) over samples."""
    scale = 1 / s.shape[2] if reduction == "sum" else 1 / (s.shape[1] * s.shape[2])
    s = s.double().flatten(1)
    return Loss(
        lambda weights: scale * (weights.T @ s - s).square().sum(1),
        lambda weights: scale * 2 * s @ (weights.T @ s - s).T,
    )
