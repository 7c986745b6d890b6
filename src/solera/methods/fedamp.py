"""FedAMP and HeurFedAMP (Huang et al., AAAI 2021): clients with similar models learn more from each other.

The server keeps the model w_i of every client and passes messages between them: u_i is a mixture of all clients'
models in which similar ones count more. Client i trains on its own data and is pulled towards u_i.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..core.federation import Federation, per_client
from ..core.settings import BelowOne, NonNegative, Positive, Problem
from ..core.tensors import Weights
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local
from ..train.norms import parameter_names
from ..train.similarity import gram_matrix, mixtures
from .steps.coefficients import NOTED_CLIENTS
from .steps.personal import score_received
from .steps.training import local_update


@register("fedamp")
@dataclass(frozen=True)
class FedAMP(Method):
    """Personal models that learn more from similar models."""

    local: Local = field(default_factory=Local)
    lam: NonNegative = 0.01  # lambda: client i minimises its loss + lambda/(2 alpha) ||w - u_i||^2
    alpha: Positive = 1.0  # alpha_k, step size of message passing; halved as long as some xi_ii is negative
    sigma: Positive | None = None  # how fast attention falls with distance; none: the median squared distance
    heuristic: bool = False  # HeurFedAMP: attention by sigma times the cosine of the models
    self_weight: BelowOne = 0.2  # heuristic only: xi_ii, a client's attention to itself

    about: ClassVar[About] = About(
        title="FedAMP",
        paper="Huang et al., AAAI 2021",
        wire="own mixture of models down, model up",
        state="nothing (the server keeps its model)",
    )

    @dataclass(frozen=True)
    class State:
        models: dict[str, Weights]  # w: client -> its model; none for clients that were never sampled

    def traits(self) -> Traits:
        return Traits(personal=True)

    def problems(self) -> Iterator[Problem]:
        step = self.local.lr * self.lam / self.alpha
        if self.local.optimizer == "sgd" and step >= 2:
            yield f"lam = {self.lam}: overshoots; lower it until local.lr * lam / alpha is below 2, not {step:.3g}"
        if self.heuristic and self.sigma is None:
            yield "heuristic = true: needs sigma, the factor of the cosine: a number, say 10"

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        w, S = state.models, fed.sample()
        u: dict[str, Weights] = {}
        alpha: dict[str, float] = {}
        for A in server.architectures:
            start = server.init(A)
            u |= {k: start for k in S if fed.architecture(k) == A}  # clients that were not sampled before
            mixed, alpha[A] = self.pass_messages(A, S, w, fed, server)
            u |= mixed
        replies = fed.map(
            local_update,  # w_i <- argmin F_i(w) + lambda/(2 alpha) ||w - u_i||^2
            S,
            weights=per_client(u.__getitem__),
            local=self.local,
            mu=per_client(lambda k: self.pull(alpha[fed.architecture(k)])),
        )
        return self.State(w | {k: reply.weights for k, reply in replies.items()})

    def pass_messages(
        self, A: str, S: list[str], w: dict[str, Weights], fed: Federation, server: Server
    ) -> tuple[dict[str, Weights], float]:
        """u_i = sum_j xi_ij w_j for those of S that have a model of architecture A, and the alpha used.

        Clients that are absent in this round count with the last model they sent.
        """
        known = [k for k in fed.clients if k in w and fed.architecture(k) == A]
        asked = [known.index(k) for k in S if k in known]
        if not asked:
            return {}, self.alpha
        gram = gram_matrix([w[k] for k in known], parameter_names(server.template(A)))
        xi, sigma, alpha = self.weights(gram)
        if len(known) <= NOTED_CLIENTS:
            matrix = [[round(x, 6) for x in row] for row in xi.tolist()]
            used = {"sigma": sigma, "alpha": alpha, "pull": self.pull(alpha)}
            server.event("attention", architecture=A, clients=known, **used, matrix=matrix)
        mixed = mixtures(xi[asked].T, [w[k] for k in known])
        return {known[i]: u_i for i, u_i in zip(asked, mixed, strict=True)}, alpha

    def weights(self, gram: Tensor) -> tuple[Tensor, float, float]:
        """xi for models with these inner products, and the sigma and alpha used."""
        if self.heuristic and self.sigma is not None:
            return cosine_attention(cosines_of(gram), self.sigma, self.self_weight), self.sigma, self.alpha
        distances = squared_distances(gram)
        sigma = median_distance(distances) if self.sigma is None else self.sigma
        xi, alpha = attention(distances, sigma, self.alpha)
        return xi, sigma, alpha

    def pull(self, alpha: float) -> float:
        """lambda/alpha, at most 1/lr when alpha was halved: with 1/lr one SGD step ends exactly at u_i."""
        if self.local.optimizer != "sgd" or self.local.lr == 0:
            return self.lam / alpha
        return min(self.lam / alpha, max(self.lam / self.alpha, 1 / self.local.lr))

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_received, {"weights": per_client(state.models.get)})

    def models(self, state: State) -> dict[str, Model]:
        return {}


# ---- attention between clients' models ---------------------------------------------------------------

# A matrix xi has a row for each receiver i and a column for each giver j; every row sums to 1. All computations are
# float64 and start from the inner products of the models (`similarity.gram_matrix`).


SMALLEST = 1e-12  # smallest divisor


def squared_distances(gram: Tensor) -> Tensor:
    """||w_i - w_j||^2 for each pair of models."""
    squares = gram.diagonal()
    return (squares[:, None] + squares - 2 * gram).clamp_min(0).fill_diagonal_(0)


def cosines_of(gram: Tensor) -> Tensor:
    """The cosine for each pair of models."""
    lengths = gram.diagonal().clamp_min(0).sqrt().clamp_min(SMALLEST)
    return gram / (lengths[:, None] * lengths)


def median_distance(distances: Tensor) -> float:
    """The median over all pairs of different models; 1 if there is no pair or all models are equal."""
    i, j = torch.triu_indices(len(distances), len(distances), offset=1)
    pairs = distances[i, j]
    return (pairs.quantile(0.5).item() if len(pairs) else 0.0) or 1.0


def attention(distances: Tensor, sigma: float, alpha: float) -> tuple[Tensor, float]:
    """xi_ij = alpha A'(||w_i - w_j||^2) with A(x) = 1 - exp(-x / sigma), xi_ii = 1 - the rest; and the alpha used.

    alpha is halved until no xi_ii is negative: every row is then a convex combination.
    """
    slope = (torch.exp(-distances / sigma) / sigma).fill_diagonal_(0)  # A', for j != i
    while alpha * slope.sum(1).max() > 1:
        alpha /= 2
    xi = alpha * slope
    return xi + torch.diag((1 - xi.sum(1)).clamp_min(0)), alpha


def cosine_attention(cosine: Tensor, sigma: float, own: float) -> Tensor:
    """xi_ii = own; xi_ij, j != i, in proportion to exp(sigma cos(w_i, w_j)) (HeurFedAMP)."""
    if len(cosine) == 1:
        return torch.ones_like(cosine)
    others = (sigma * cosine).fill_diagonal_(-torch.inf).softmax(1)
    return (1 - own) * others + own * torch.eye(len(cosine), dtype=cosine.dtype)
