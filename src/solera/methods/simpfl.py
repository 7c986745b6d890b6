"""Sim-pFL and TopK-pFL: MNFL's round with coefficients that are computed, not learned (its section 5.1).

Both compare the clients' soft predictions by their cosine. Sim-pFL mixes all clients in proportion to the cosine,
TopK-pFL takes the plain mean of the K nearest.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from ..core.federation import Federation
from ..core.settings import PositiveInt
from ..method import About, register
from ..scenario.server import Server
from ..train.similarity import SMALLEST, by_cosine, by_rank
from .steps.coefficients import Mixing, note, with_columns
from .steps.predictions import distil_locally


@dataclass(frozen=True)
class Similar(Mixing):
    """The round of both: train, predict, distil from mixtures by the cosines of predictions."""

    def exchange(self, c: Tensor, x: Tensor, A: list[str], fed: Federation, server: Server) -> Tensor:
        S, s, _ = self.predicted(x, A, fed, server)
        weights = self.mixture(cosines(s))
        fed.map(distil_locally, S, **self.lesson(weights, S, s))
        c = with_columns(c, S, weights, fed)
        note(c, fed, server)
        return c

    @abstractmethod
    def mixture(self, cosine: Tensor) -> Tensor:
        """The columns of the matrix, from the cosine between every two clients."""


@register("simpfl")
@dataclass(frozen=True)
class SimPFL(Similar):
    """Each client learns from the others in proportion to the similarity of their predictions."""

    scale: Literal["minmax", "l1"] = "minmax"  # cosine minus the column's minimum (the authors' code), or unchanged

    about: ClassVar[About] = About(
        "Sim-pFL", "comparison method of MNFL", "indices down, predictions up, targets down", "its model"
    )

    def mixture(self, cosine: Tensor) -> Tensor:
        return by_cosine(cosine, self.scale)


@register("topkpfl")
@dataclass(frozen=True)
class TopKPFL(Similar):
    """Each client learns from the K clients with the most similar predictions, itself included."""

    k: PositiveInt = 5  # number of teachers of a client, itself included

    about: ClassVar[About] = replace(SimPFL.about, title="TopK-pFL")

    def mixture(self, cosine: Tensor) -> Tensor:
        return by_rank(cosine, self.k)


def cosines(s: Tensor) -> Tensor:
    """Cosine between the flattened predictions of every two clients.

    Rounded to 12 digits, so that equal predictions have a cosine of exactly 1.
    """
    flat = s.double().flatten(1)
    unit = flat / flat.norm(dim=1, keepdim=True).clamp_min(SMALLEST)
    return (unit @ unit.T).round(decimals=12)
