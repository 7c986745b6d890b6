"""The server's part of methods that differ from FedAvg only in the client's training."""

from dataclasses import dataclass
from typing import Any, Literal

from ...core.federation import Federation, Means, Replies, per_client
from ...core.task import Task
from ...core.tensors import Weights
from ...method import Model
from ...train.aggregate import weighted_mean
from ...train.robust import coordinate_median
from .training import local_update

Average = Literal["weighted", "uniform"]


def mean_of(task: Task, x: dict[str, Weights], fed: Federation, average: Average, **settings: Any) -> Means:
    """A cohort runs `task` on the models of its architectures; returns the mean reply for each architecture."""
    sent = per_client(lambda k: x[fed.architecture(k)])
    return fed.mean(task, fed.sample(), by=fed.architecture, uniform=average == "uniform", weights=sent, **settings)


def average_round(
    x: dict[str, Weights], S: list[str], fed: Federation, average: Average, local: Any, mu: float = 0.0
) -> Means:
    """Clients S train the model of their architecture; returns the mean reply for each architecture."""
    sent = per_client(lambda k: x[fed.architecture(k)])
    return fed.mean(
        local_update, S, by=fed.architecture, uniform=average == "uniform", weights=sent, local=local, mu=mu
    )


def average_of(how: Literal["weighted", "uniform", "median"], x: Replies, S: list[str], fed: Federation) -> Weights:
    """One model from the uploads of clients S: mean weighted by examples, uniform mean, or coordinate-wise median."""
    uploads = [x[k].weights for k in S]
    if how == "median":
        return coordinate_median(uploads, [fed.copies.get(k, 1) for k in S])
    return weighted_mean(uploads, [fed.copies.get(k, 1) * (fed.num_examples(k) if how == "weighted" else 1) for k in S])


@dataclass(frozen=True)
class Own:
    """The server's own model in a state."""

    architecture: str
    weights: Weights


def models_of(weights: dict[str, Weights]) -> dict[str, Model]:
    """One model to evaluate for each architecture."""
    return {A: Model(A, w) for A, w in weights.items()}
