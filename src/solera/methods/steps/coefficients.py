"""The server's matrix of knowledge coefficients, for the methods that keep one (see train/similarity.py).

Row and column i belong to the i-th client in canonical order: giver and receiver.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.federation import Federation
from ...scenario.server import Server
from ...train.similarity import Coefficients, Loss, best, terms

MOST_CLIENTS = 5000  # 200 MB of coefficients, in every checkpoint
NOTED_CLIENTS = 100  # with more, the matrix is recorded only every tenth round
SEARCHED_CLIENTS = 50  # with more in a round, the best coefficients are computed only every tenth round
TOLERANCE = 1e-6  # of that search


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
