"""IFCA (Ghosh et al., NeurIPS 2020), with model averaging: clients find the cluster they belong to.

There are k models. Every client receives all of them, chooses the one with the lowest loss on its own data, and trains
it. Each model becomes the mean of the uploads of the clients that chose it. Different architectures share nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.federation import Federation, per_client
from ..core.settings import PositiveInt
from ..core.task import Client, task
from ..core.tensors import Weights, weights_of
from ..core.wire import like, sized
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local, Score, evaluate, fit
from .steps.training import Average, average_of


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The model a client has trained, and the cluster it belongs to."""

    weights: Weights = like("weights")
    cluster: Tensor = sized(dtype=torch.int64)


@task("choose_and_train")
def choose_and_train(client: Client, weights: Weights, others: list[Weights], local: Local) -> Trained:
    """Choose the model with the lowest loss on the client's training samples, and train it on them."""
    models = [weights, *others]
    j = choice(client, models)
    model = client.model(models[j])
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    return Trained(weights=weights_of(model), cluster=torch.tensor(j))


@task("score_chosen")
def score_chosen(client: Client, weights: Weights, others: list[Weights]) -> Score:
    """The score of the model a client chooses by its training samples, on its test samples."""
    models = [weights, *others]
    return evaluate(client.model(models[choice(client, models)]), client.test.inputs, client.test.labels)


def choice(client: Client, models: list[Weights]) -> int:
    """argmin_j F_i(theta_j); with ties the first."""
    return lowest([evaluate(client.model(w), client.train.inputs, client.train.labels).loss for w in models])


@register("ifca")
@dataclass(frozen=True)
class IFCA(Method):
    """One model for each cluster of clients; each client chooses its cluster."""

    local: Local = field(default_factory=lambda: Local(steps=10, batch=64, lr=0.1))  # tau, gamma
    k: PositiveInt = 2  # clusters of each architecture
    average: Average = "uniform"  # within a cluster

    about: ClassVar[About] = About(
        title="IFCA",
        paper="Ghosh et al., NeurIPS 2020",
        wire="k models down, one model and which it is up",
        state="nothing",
        privacy="a client's model is averaged within the cluster it chooses",
    )

    @dataclass(frozen=True)
    class State:
        clusters: dict[str, list[Weights]]  # architecture -> theta_1 ... theta_k

    def traits(self) -> Traits:
        return Traits(personal=True, products=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({A: [server.init(A, j) for j in range(self.k)] for A in server.architectures})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        S = fed.sample()
        replies = fed.map(choose_and_train, S, local=self.local, **self.clusters(state, fed))
        for k in [k for k, r in replies.items() if not 0 <= r.cluster < self.k]:
            fed.reject(replies, k, f"cluster {int(replies[k].cluster)} of {self.k}")
        chosen = {k: int(r.cluster) for k, r in replies.items()}
        server.event("clusters", chosen=chosen)
        theta = {A: list(models) for A, models in state.clusters.items()}
        for A, j in sorted({(fed.architecture(k), j) for k, j in chosen.items()}):  # the others do not change
            members = [k for k in chosen if (fed.architecture(k), chosen[k]) == (A, j)]
            theta[A][j] = average_of(self.average, replies, members, fed)
        return self.State(theta)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_chosen, self.clusters(state, fed))

    def clusters(self, state: State, fed: Federation) -> dict[str, Any]:
        """The payload from which a client chooses: all models of its architecture."""
        first = {A: own[0] for A, own in state.clusters.items()}
        others = {A: own[1:] for A, own in state.clusters.items()}
        return {
            "weights": per_client(lambda k: first[fed.architecture(k)]),
            "others": per_client(lambda k: others[fed.architecture(k)]),
        }

    def models(self, state: State) -> dict[str, Model]:
        """The first cluster's model under the name of its architecture, the others as name.1, name.2, ..."""
        return {
            A if j == 0 else f"{A}.{j}": Model(A, w, "part" if len(own) > 1 else "model")
            for A, own in state.clusters.items()
            for j, w in enumerate(own)
        }


# ---- how a client chooses its cluster ----------------------------------------------------------------


def lowest(losses: Sequence[float]) -> int:
    """The position of the lowest loss; with ties the first. NaN counts as infinite."""
    comparable = [math.inf if math.isnan(loss) else loss for loss in losses]
    return comparable.index(min(comparable))
