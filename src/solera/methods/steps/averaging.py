"""The server's part of methods that differ from FedAvg only in the client's training."""

from typing import Any, Literal

from ...core.federation import Federation, Means, Replies, per_client
from ...core.task import Task
from ...core.tensors import Weights
from ...method import Model
from ...scenario.server import Server
from ...train.aggregate import weighted_mean
from ...train.byzantine import bearable, byzantine_mean
from ...train.norms import parameter_names
from ...train.robust import coordinate_median
from .training import local_update

Average = Literal["weighted", "uniform"]
Combined = Literal["weighted", "uniform", "median", "trimmed_mean", "krum", "multi_krum", "bulyan"]
Buffers = Literal["mean", "last"]


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


def combined_of(
    how: Combined, liars: int, buffers: Buffers, x: Replies, S: list[str], fed: Federation, server: Server
) -> Weights:
    """One model from the uploads of clients S, which have one architecture; also by rules that bear lying clients.

    These bear `liars` of them (train/byzantine.py), or as many as S bears if these are fewer, which is noted in the
    round's events. `buffers`: BatchNorm's running statistics are averaged like parameters, or are the last client's.
    """
    names = parameter_names(server.template(fed.architecture(S[0])))
    if how == "weighted" or how == "uniform" or how == "median":
        one = average_of(how, x, S, fed)
    else:
        one = byzantine_mean(how, [x[k].weights for k in S], names, borne(how, liars, S, fed, server))
    return one if buffers == "mean" else x[S[-1]].weights | {name: one[name] for name in names}


def borne(how: str, liars: int, S: list[str], fed: Federation, server: Server) -> int:
    """How many liars among S the rule bears, at most `liars`; fewer than asked for are noted."""
    most = bearable(how, len(S))
    if liars > most:
        server.event(
            "fewer_liars", architecture=fed.architecture(S[0]), rule=how, clients=len(S), asked=liars, borne=most
        )
    return min(liars, most)


def models_of(weights: dict[str, Weights]) -> dict[str, Model]:
    """One model to evaluate for each architecture."""
    return {A: Model(A, w) for A, w in weights.items()}
