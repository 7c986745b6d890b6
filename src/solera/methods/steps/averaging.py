"""Averages of the clients' models, and what methods share whose state is one model of each architecture.

Each architecture is averaged over its own clients; with one architecture this is the usual average. BatchNorm
statistics are averaged with the same weights as parameters.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from ...core.federation import Federation, Means, Replies, per_client
from ...core.task import Task
from ...core.tensors import Weights
from ...method import Method, Model
from ...scenario.server import Server
from ...train.aggregate import weighted_mean
from ...train.fitting import Local
from ...train.robust import coordinate_median
from .training import by_architecture

Average = Literal["weighted", "uniform"]


@dataclass(frozen=True)
class Averaging(Method):
    """A method whose clients train the model of their architecture, and whose server needs means only."""

    local: Local = field(default_factory=Local)
    average: Average = "weighted"  # by number of examples, or equal weights

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # architecture -> weights

    def init(self, fed: Federation, server: Server) -> Any:
        return self.State({A: server.init(A) for A in server.architectures})

    def mean(self, task: Task, x: dict[str, Weights], S: list[str], fed: Federation, **settings: Any) -> Means:
        """Clients S run `task` on the models of their architectures; returns the mean reply for each architecture."""
        sent, uniform = per_client(by_architecture(x, fed)), self.average == "uniform"
        how = {"local": self.local, **settings}
        return fed.mean(task, S, by=fed.architecture, uniform=uniform, weights=sent, **how)

    def models(self, state: Any) -> dict[str, Model]:
        return models_of(state.weights)


def average_of(how: Literal["weighted", "uniform", "median"], x: Replies, S: list[str], fed: Federation) -> Weights:
    """One model from the uploads of clients S: mean weighted by examples, uniform mean, or coordinate-wise median."""
    uploads = [x[k].weights for k in S]
    if how == "median":
        return coordinate_median(uploads, [fed.copies.get(k, 1) for k in S])
    return weighted_mean(uploads, [fed.copies.get(k, 1) * (fed.num_examples(k) if how == "weighted" else 1) for k in S])


def averages_of(average: Average, x: Replies, S: list[str], fed: Federation) -> dict[str, Weights]:
    """The average of each architecture with an upload of clients S."""
    groups = {A: [k for k in S if fed.architecture(k) == A] for A in sorted({fed.architecture(k) for k in S})}
    return {A: average_of(average, x, S_A, fed) for A, S_A in groups.items()}


@dataclass(frozen=True)
class Own:
    """The server's own model in a state."""

    architecture: str
    weights: Weights


def models_of(weights: dict[str, Weights]) -> dict[str, Model]:
    """One model to evaluate for each architecture."""
    return {A: Model(A, w) for A, w in weights.items()}
