"""MNFL (Beikmohammadi et al.; the method is KT-pFL, Zhang et al., NeurIPS 2021), Algorithm 1.

Every client has a model of its own, of any architecture, and is taught by its own mixture of all clients' soft
predictions on public samples. The mixtures are the columns of the knowledge coefficient matrix c, which the server
learns along with the models. The equations are numbered as in the paper; docs/methods/mnfl.md has what it leaves open.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..federation import Federation, per_client
from ..method import Info, Model, register
from ..parts.local import Local
from ..parts.similarity import Coefficients, kl_slope, learn, mixtures, mse_slope
from ..server import Server
from ..wire import ConfigError
from .baselines import score_own, train_alone
from .coefficients import block, note, shares, uniform_matrix, with_block
from .predictions import (
    StudentNorm,
    ask,
    check_public,
    check_temperature,
    distil_and_predict,
    distil_and_train,
    distil_locally,
    draw,
    participants,
    usable,
)


@register("mnfl")
@dataclass(frozen=True)
class MNFL:
    """Personal models that learn from each other, and learn from whom."""

    local: Local = field(default_factory=lambda: Local(epochs=20, batch=128, lr=0.01))  # E, eta_1
    distil: Local = field(default_factory=lambda: Local(epochs=1, batch=256, lr=0.01))  # R, eta_2, on public samples
    coefficients: Coefficients = field(default_factory=Coefficients)  # eta_3, lambda, rho
    temperature: float = 10.0  # T, of predictions and of distillation
    public_size: int | None = None  # public samples a round; 0: local training only; none: public.per_round
    rule: Literal["learned", "uniform"] = "learned"  # uniform: c stays 1/N, the plain average of FedMD
    c_loss: Literal["kl", "mse"] = "kl"  # collaborative loss of eq. (7): the paper's, or the authors' code's
    c_pred: Literal["reuse", "post_distill"] = "reuse"  # what eq. (7) sees: this round's predictions, or new ones
    order: Literal["paper", "code"] = "paper"  # code: predict, learn c, distil, train; paper: train, predict, ...
    grow_epochs: bool = False  # local epochs 1, 2, 3, ... up to local.epochs, as in the authors' code
    student_norm: StudentNorm = "train"  # BatchNorm statistics during distillation

    info: ClassVar[Info] = Info(
        title="MNFL (KT-pFL)",
        paper="Zhang et al., NeurIPS 2021; Beikmohammadi et al.",
        models="any mix",
        wire="indices down, predictions up, targets down",
        public="unlabelled, the same on the server and on every client",
        state="its model",
        privacy="individual replies",
    )
    personal: ClassVar = score_own

    @dataclass(frozen=True)
    class State:
        c: Tensor  # row m: giver, column n: receiver; the models are on the clients

    def __post_init__(self) -> None:
        check_temperature("mnfl", self.temperature)
        if self.order == "code" and self.c_pred == "post_distill":
            raise ConfigError("mnfl: c_pred = 'post_distill' is too late for order = 'code', which learns c first")

    def init(self, fed: Federation, server: Server) -> State:
        self.check(server)
        return self.State(uniform_matrix(fed))  # line 1

    def round(self, state: State, fed: Federation, server: Server) -> State:
        c, x, A = state.c, draw(self.public_size, fed, server), participants(fed)
        local = replace(self.local, epochs=min(self.local.epochs, fed.round + 1)) if self.grow_epochs else self.local
        if len(x) == 0:
            fed.map(train_alone, A, local=local)
            return state
        code = self.order == "code"
        first = replace(local, epochs=1, steps=None) if code else local  # in the code, of newcomers only
        S, s = ask(A, x, self.temperature, first, fed, server, only_new=code)  # lines 11-13, eq. (5)
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
            fed.map(distil_and_train, S, local=local, **how)
        elif self.c_pred == "post_distill":
            S, s = usable(fed.map(distil_and_predict, S, **how), len(x), fed, server)
        else:
            fed.map(distil_locally, S, **how)  # lines 14-16, eq. (6)
        if not code:
            c = self.learned(c, S, s, fed)  # line 7
        note(c, fed, server)
        return self.State(c)

    def learned(self, c: Tensor, S: list[str], s: Tensor, fed: Federation) -> Tensor:
        """Eq. (7), for the coefficients between clients S, which have predicted s."""
        if self.rule == "uniform":
            return c
        share, N, cfg = shares(S, fed), len(c), self.coefficients
        slope = partial(kl_slope, s)
        if self.c_loss == "mse":  # in the code all clients weigh the same, and the penalty is a mean, not a sum
            share, cfg, slope = share.new_ones(len(S)), replace(cfg, rho=cfg.rho / N), partial(mse_slope, s)
        return with_block(c, S, learn(block(c, S, fed), slope, share, N, cfg), fed)

    def check(self, server: Server) -> None:
        """Refuse at the start what would fail in the middle."""
        check_public("mnfl", self.public_size, server)

    def models(self, state: State) -> dict[str, Model]:
        return {}
