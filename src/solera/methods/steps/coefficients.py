"""Methods whose clients learn from mixtures of each other's predictions, by a matrix of knowledge coefficients.

Row and column i belong to the i-th client in canonical order: giver and receiver (see train/similarity.py).
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.federation import Federation, Replies, per_client
from ...core.settings import NonNegativeInt, Positive
from ...method import Traits, name_of
from ...scenario.server import Server
from ...train.fitting import Local
from ...train.similarity import Coefficients, Loss, best, mixtures, terms
from .personal import OnClients, train_alone
from .predictions import StudentNorm, ask, draw, participants, public_problems, train_and_assess

MOST_CLIENTS = 5000  # 200 MB of coefficients, in every checkpoint
NOTED_CLIENTS = 100  # with more, the matrix is recorded only every tenth round
SEARCHED_CLIENTS = 50  # with more in a round, the best coefficients are computed only every tenth round
TOLERANCE = 1e-6  # of that search


@dataclass(frozen=True)
class Mixing(OnClients):
    """A method in which a client is taught by a mixture of all clients' soft predictions on public samples."""

    local: Local = field(default_factory=lambda: Local(epochs=20, batch=128, lr=0.01))  # E, eta_1
    distill: Local = field(default_factory=lambda: Local(epochs=1, batch=256, lr=0.01))  # R, eta_2, on public samples
    temperature: Positive = 10.0  # T, of predictions and of distillation
    public_size: NonNegativeInt | None = None  # public samples a round; 0: local training only; none: public.per_round
    student_norm: StudentNorm = "train"  # BatchNorm statistics during distillation

    @dataclass(frozen=True)
    class State:
        c: Tensor  # row m: giver, column n: receiver; the models are on the clients

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", personal=True)

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems(name_of(self), self.public_size, server)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(uniform_matrix(fed))  # line 1

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x, A = draw(self.public_size, fed, server), participants(fed)
        if len(x) == 0:
            fed.map(train_alone, A, local=self.training(fed))
            return state
        return self.State(self.exchange(state.c, x, A, fed, server))

    @abstractmethod
    def exchange(self, c: Tensor, x: Tensor, A: list[str], fed: Federation, server: Server) -> Tensor:
        """Clients A train, predict the public samples x and learn from each other; returns the new c."""

    def training(self, fed: Federation) -> Local:
        """The local training of this round."""
        return self.local

    def predicted(self, x: Tensor, A: list[str], fed: Federation, server: Server) -> tuple[list[str], Tensor, Replies]:
        """The clients that have trained and predicted x, their predictions, and the whole replies."""
        S, s, said = ask(A, x, self.temperature, self.training(fed), fed, server, task=train_and_assess)
        server.report_stages(after_training={k: said[k].test for k in S}, after_distilling=None)
        return S, s, said

    def lesson(self, c: Tensor, S: list[str], s: Tensor) -> dict[str, Any]:
        """Eq. (2): the teacher of client n is sum_m c_mn s_m, with c between clients S; and the settings of
        distillation."""
        teachers = mixtures(c, [{"probs": s_m} for s_m in s])
        targets = {k: teacher["probs"] for k, teacher in zip(S, teachers, strict=True)}
        how = {"distil": self.distill, "temperature": self.temperature, "student_norm": self.student_norm}
        return {"targets": per_client(targets.__getitem__), **how}


def uniform_matrix(fed: Federation) -> Tensor:
    """c_0 = 1/N."""
    N = len(fed.clients)
    if N > MOST_CLIENTS:
        raise ConfigError(f"{N} clients have {N * N:,} coefficients; at most {MOST_CLIENTS} clients are possible here")
    return torch.full((N, N), 1 / N, dtype=torch.float64)


def block(c: Tensor, S: Sequence[str], fed: Federation) -> Tensor:
    """The coefficients between clients S."""
    rows = _positions(S, fed)
    return c[rows[:, None], rows]


def with_block(c: Tensor, S: Sequence[str], new: Tensor, fed: Federation) -> Tensor:
    """A copy of `c` with the coefficients `new` between clients S."""
    rows = _positions(S, fed)
    changed = c.clone()
    changed[rows[:, None], rows] = new
    return changed


def with_columns(c: Tensor, S: Sequence[str], new: Tensor, fed: Federation) -> Tensor:
    """A copy of `c` with the coefficients `new` from givers S to receivers S, and 0 from other givers."""
    cleared = c.clone()
    cleared[:, _positions(S, fed)] = 0
    return with_block(cleared, S, new, fed)


def shares(S: Sequence[str], fed: Federation) -> Tensor:
    """D_n / D of clients S; all 0 if none of them has an example."""
    D = torch.tensor([fed.num_examples(k) for k in S], dtype=torch.float64)
    return D / D.sum().clamp_min(1)


def note_objective(
    c: Tensor, loss: Loss, share: Tensor, private: float, cfg: Coefficients, fed: Federation, server: Server
) -> None:
    """Write objective (4) into the round's metrics: its three terms, and the losses of the clients' ensembles.

    `c` are the coefficients between the clients of this round, `share` the weights of their collaborative losses and
    `private` the mean of their losses on their own samples. Four matrices are compared: the learned one, each client
    alone (c = e_n), the uniform one, and the optimal one, which by theorem 4.1 and remark 4.1 is no worse than these.
    Nothing is written if rho is infinite.
    """
    N, m, mass = len(fed.clients), len(c), c.sum(0)
    if cfg.rho == math.inf or (m > SEARCHED_CLIENTS and fed.round % 10):
        return
    known = {"learned": c, "own": torch.diag(mass), "uniform": (mass / m).expand(m, m)}
    start, least = c, torch.full_like(mass, math.inf)
    ensemble, objective = {}, {}

    def add(name: str, matrix: Tensor) -> Tensor:
        collaborative, pull = terms(matrix, loss, share, N, cfg)
        ensemble[name], objective[name] = float(collaborative.sum()), float((collaborative + pull).sum())
        return collaborative + pull

    for name, matrix in known.items():
        value = add(name, matrix)
        start, least = torch.where(value < least, matrix, start), torch.minimum(value, least)
    add("optimal", best(start, loss, share, N, cfg, TOLERANCE))
    server.event(
        "objective",
        private=private,
        collaborative=ensemble["learned"],
        pull=objective["learned"] - ensemble["learned"],
        total=private + objective["learned"],
        ensemble_loss=ensemble,
        ensemble_objective=objective,
        clients=m,
    )


def note(c: Tensor, fed: Federation, server: Server) -> None:
    """Write the matrix into the round's metrics."""
    if len(c) <= NOTED_CLIENTS or fed.round % 10 == 0:
        matrix = [[round(x, 6) for x in row] for row in c.tolist()]
        server.event("coefficients", clients=list(fed.clients), matrix=matrix)


def _positions(S: Sequence[str], fed: Federation) -> Tensor:
    return torch.tensor([fed.clients.index(k) for k in S])
