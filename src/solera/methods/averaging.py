"""The server's half of methods that differ from FedAvg in what a client does with the model it receives."""

from typing import Any

from ..federation import Federation, Means, per_client
from ..task import Task
from ..wire import Weights
from .fedavg import Average


def mean_of(task: Task, x: dict[str, Weights], fed: Federation, average: Average, **settings: Any) -> Means:
    """A cohort runs `task` on the models of its architectures; the mean of what it sends, for each architecture."""
    sent = per_client(lambda k: x[fed.architecture(k)])
    return fed.mean(task, fed.sample(), by=fed.architecture, uniform=average == "uniform", weights=sent, **settings)
