"""The server's matrix of knowledge coefficients, for the methods that keep one (see parts/similarity.py).

Row and column i belong to the i-th client in canonical order: giver and receiver.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..federation import Federation
from ..server import Server
from ..wire import ConfigError

MOST_CLIENTS = 5000  # 200 MB of coefficients, in every checkpoint
NOTED_CLIENTS = 100  # with more, the matrix is noted every tenth round only


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
    """A copy of `c` with other coefficients between clients S."""
    rows = _positions(S, fed)
    changed = c.clone()
    changed[rows[:, None], rows] = new
    return changed


def with_columns(c: Tensor, S: Sequence[str], new: Tensor, fed: Federation) -> Tensor:
    """A copy of `c` in which the receivers S have these coefficients with the givers S, and none with others."""
    cleared = c.clone()
    cleared[:, _positions(S, fed)] = 0
    return with_block(cleared, S, new, fed)


def shares(S: Sequence[str], fed: Federation) -> Tensor:
    """D_n / D of clients S; all 0 if none of them has an example."""
    D = torch.tensor([fed.num_examples(k) for k in S], dtype=torch.float64)
    return D / D.sum().clamp_min(1)


def note(c: Tensor, fed: Federation, server: Server) -> None:
    """Write the matrix into the round's metrics."""
    if len(c) <= NOTED_CLIENTS or fed.round % 10 == 0:
        matrix = [[round(x, 6) for x in row] for row in c.tolist()]
        server.event("coefficients", clients=list(fed.clients), matrix=matrix)


def _positions(S: Sequence[str], fed: Federation) -> Tensor:
    return torch.tensor([fed.clients.index(k) for k in S])
