"""MNFL (Beikmohammadi et al.; the method is KT-pFL, Zhang et al., NeurIPS 2021), Algorithm 1.

Every client has a model of its own, of any architecture, and is taught by its own mixture of all clients' soft
predictions on public samples. The mixtures are the columns of the knowledge coefficient matrix c, which the server
learns along with the models. The equations are numbered as in the paper; docs/methods/mnfl.md has what it leaves open.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..federation import Federation, per_client
from ..method import About, Exchange, Method, Model, Traits, register
from ..parts.local import Local, check_number
from ..parts.similarity import Coefficients, Loss, Reduction, kl_loss, learn, mixtures, mse_loss
from ..server import Server
from .common.coefficients import block, note, note_objective, shares, uniform_matrix, with_block
from .common.personal import score_own, train_alone
from .common.predictions import (
    StudentNorm,
    ask_and_assess,
    check_temperature,
    distil_and_predict,
    distil_and_train,
    distil_locally,
    draw,
    participants,
    public_problems,
    usable,
)


@register("mnfl")
@dataclass(frozen=True)
class MNFL(Method):
    """Personal models that learn from each other, and learn from whom."""

    local: Local = field(default_factory=lambda: Local(epochs=20, batch=128, lr=0.01))  # E, eta_1
    distil: Local = field(default_factory=lambda: Local(epochs=1, batch=256, lr=0.01))  # R, eta_2, on public samples
    coefficients: Coefficients = field(default_factory=Coefficients)  # eta_3, lambda, rho
    temperature: float = 10.0  # T, of predictions and of distillation
    public_size: int | None = None  # public samples a round; 0: local training only; none: public.per_round
    rule: Literal["learned", "uniform"] = "learned"  # uniform: c stays 1/N, the plain average of FedMD
    c_loss: Literal["kl", "mse"] = "kl"  # collaborative loss of eq. (7): the paper's, or the authors' code's
    c_reduction: Reduction = "sum"  # of that loss over samples; with the mean, c hardly moves at the paper's rate
    c_batch: int = 256  # public samples it is taken over, at most
    c_pred: Literal["reuse", "post_distill"] = "reuse"  # what eq. (7) sees: this round's predictions, or new ones
    order: Literal["paper", "code"] = "paper"  # code: predict, learn c, distil, train; paper: train, predict, ...
    grow_epochs: bool = False  # local epochs 1, 2, 3, ... up to local.epochs, as in the authors' code
    student_norm: StudentNorm = "train"  # BatchNorm statistics during distillation

    about: ClassVar[About] = About(
        title="MNFL (KT-pFL)",
        paper="Zhang et al., NeurIPS 2021; Beikmohammadi et al.",
        wire="indices down, predictions up, targets down",
        state="its model",
    )

    @dataclass(frozen=True)
    class State:
        c: Tensor  # row m: giver, column n: receiver; the models are on the clients

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", personal=True)

    def __post_init__(self) -> None:
        check_temperature("mnfl", self.temperature)
        check_number("c_batch", self.c_batch, 1)
        if self.order == "code" and self.c_pred == "post_distill":
            raise ConfigError("mnfl: c_pred = 'post_distill' is too late for order = 'code', which learns c first")

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(uniform_matrix(fed))  # line 1

    def round(self, state: State, fed: Federation, server: Server) -> State:
        c, x, A = state.c, draw(self.public_size, fed, server), participants(fed)
        local = replace(self.local, epochs=min(self.local.epochs, fed.round + 1)) if self.grow_epochs else self.local
        if len(x) == 0:
            fed.map(train_alone, A, local=local)
            return state
        code = self.order == "code"
        first = replace(local, epochs=1, steps=None) if code else local  # in the code, of newcomers only
        S, s, said = ask_and_assess(A, x, self.temperature, first, fed, server, only_new=code)  # lines 11-13, eq. (5)
        before = {k: said[k].test for k in S}
        if code:
            c = self.learned(c, S, s, fed)

        teachers = mixtures(block(c, S, fed), [{"probs": s_m} for s_m in s])  # sum_m c_mn s_m of eq. (2)
        targets = dict(zip(S, teachers, strict=True))
        how: dict[str, Any] = {
            "targets": per_client(lambda k: targets[k]["probs"]),
            "distil": self.distil,
            "temperature": self.temperature,
            "student_norm": self.student_norm,
        }
        if code:
            taught = fed.map(distil_and_train, S, local=local, **how)
            server.report_stages(after_distilling=taught, after_training=None)
        else:
            server.report_stages(after_training=before, after_distilling=None)
        if self.c_pred == "post_distill":
            said = fed.map(distil_and_predict, S, **how)
            S, s = usable(said, len(x), fed, server)
        elif not code:
            fed.map(distil_locally, S, **how)  # lines 14-16, eq. (6)
        if not code:
            c = self.learned(c, S, s, fed)  # line 7
        note(c, fed, server)
        loss, share, cfg = self.collaborative(S, s, fed)
        private = sum(float(d) * said[k].loss for d, k in zip(shares(S, fed), S, strict=True))
        note_objective(block(c, S, fed), loss, share, private, cfg, fed, server)  # eq. (4)
        return self.State(c)

    def learned(self, c: Tensor, S: list[str], s: Tensor, fed: Federation) -> Tensor:
        """Eq. (7), for the coefficients between clients S, which have predicted s."""
        if self.rule == "uniform":
            return c
        loss, share, cfg = self.collaborative(S, s, fed)
        return with_block(c, S, learn(block(c, S, fed), loss.slope, share, len(c), cfg), fed)

    def collaborative(self, S: list[str], s: Tensor, fed: Federation) -> tuple[Loss, Tensor, Coefficients]:
        """The loss of the coefficients between clients S over a batch of what they predicted, how much each client's
        counts, and the settings it is meant for."""
        s = s[:, self.batch(s.shape[1], fed)]  # xi_r
        if self.c_loss == "kl":
            return kl_loss(s, self.c_reduction), shares(S, fed), self.coefficients
        # In the code all clients weigh the same, and the penalty is a mean, not a sum.
        cfg = replace(self.coefficients, rho=self.coefficients.rho / len(fed.clients))
        return mse_loss(s, self.c_reduction), torch.ones(len(S), dtype=torch.float64), cfg

    def batch(self, samples: int, fed: Federation) -> Tensor:
        """Which of the round's public samples the coefficients are learned on: the same whenever it is asked."""
        g = torch.Generator().manual_seed(fed.seed("coefficients"))
        return torch.randperm(samples, generator=g)[: self.c_batch].sort().values

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("mnfl", self.public_size, server)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_own)

    def models(self, state: State) -> dict[str, Model]:
        return {}
