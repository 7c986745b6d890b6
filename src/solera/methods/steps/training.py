"""The client's half of most methods: receive weights, train on your own data, send the weights back.

Algorithm 2 of FedDF (Lin et al., NeurIPS 2020), which is FedAvg's ClientUpdate (McMahan et al., AISTATS 2017).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...core.federation import Federation, Means, Replies, per_client
from ...core.settings import Slot, settings
from ...core.task import Client, Task, task
from ...core.tensors import Weights, beside, weights_of
from ...core.wire import like, sized
from ...method import Method, Model
from ...scenario.server import Server
from ...train.aggregate import weighted_mean
from ...train.fitting import Local, fit, proximal
from ...train.robust import coordinate_median
from ...train.teachers import Build

Sent = Callable[[str], Weights]  # client -> the model it receives


def by_architecture(M: Mapping[str, Weights], fed: Federation) -> Sent:
    """Each client receives the model of its architecture."""
    return lambda k: M[fed.architecture(k)]


@dataclass(frozen=True)
class Update:
    """Parameters and buffers after local training."""

    weights: Weights = like("weights")


@task("local_update")
def local_update(client: Client, weights: Weights, local: Local, mu: float) -> Update:
    """Train a copy of the received model; with mu > 0, pulled back towards it: the loss + mu/2 ||w - received||^2.

    If the training diverges, `fit` raises: nothing is sent, and the client is dropped from this exchange.
    """
    model = client.model(weights)  # line 2
    loss = proximal(mu, beside(model, weights))
    fit(model, client.train.inputs, client.train.labels, local, client.seed, loss)  # lines 3-5
    return Update(weights_of(model))  # line 6


@settings
class Upload(Slot):
    """The clients' upload, and how their models predict on the server. Default: each client sends all its weights."""

    kind: str = field(default="whole", init=False)

    BESIDE: ClassVar = {"quantise": "method.upload.kind = 'low-bit'"}
    precision: ClassVar[Literal["full", "mixed"]] = "full"  # of the clients' weights

    def ask(self, x_0: Sent, S: list[str], local: Local, mu: float, fed: Federation, server: Server) -> Replies:
        """Clients k in S train the model x_0(k); replies with `weights`."""
        return fed.map(local_update, S, weights=per_client(x_0), local=local, mu=mu)

    def build(self, server: Server) -> Build:
        """The function that makes modules which predict like the clients' models."""
        return server.model


# ---- The head that all models share: Fed-ET's representation layer -------------------------------


def head_of(weights: Weights) -> Weights:
    """h, the representation layer: it includes the classifier."""
    return {name: t for name, t in weights.items() if name.startswith("head.")}


# ---- Label counts that clients report: FedGen and FedFTG use them to weigh teachers and labels ---


def all_of_one(counts: Tensor, examples: int) -> Tensor:
    """Label counts of a client whose examples have one label."""
    return torch.cat([counts[:1] + examples, counts[1:]])


@dataclass(frozen=True)
class CountedUpdate:
    """Parameters and buffers after local training and, if requested, the client's samples of each label."""

    counts: Tensor | None = sized("classes", dtype=torch.int64, fill=all_of_one)
    weights: Weights = like("weights")


def label_counts(client: Client) -> Tensor:
    """n_k^y: how many training samples of each label the client holds."""
    return torch.bincount(client.train.labels, minlength=client.classes).cpu()


@task("train_and_count")
def train_and_count(client: Client, weights: Weights, local: Local, classes: int | None) -> CountedUpdate:
    """Train a copy of the received model; if `classes` is given, also report the label counts."""
    update = local_update(client, weights=weights, local=local, mu=0.0)
    return CountedUpdate(None if classes is None else label_counts(client), update.weights)


def usable_counts(x: Replies, known: Mapping[str, Tensor], fed: Federation, server: Server) -> dict[str, Tensor]:
    """The label counts of all replies, as sent or as `known` from before; invalid counts are rejected.

    A client's counts must sum to the examples it registered with, so no client can dominate a label with false counts.
    """
    fine = {}
    for k, reply in list(x.items()):
        counts, registered = known.get(k, reply.counts), fed.num_examples(k)
        if counts is None:
            reason = "no label counts"
        elif bool((counts < 0).any()) or bool((counts > registered).any()) or int(counts.sum()) != registered:
            reason = f"label counts that are not those of the {registered} examples it registered"
        else:
            fine[k] = counts
            continue
        fed.reject(x, k, reason)
    return fine


# ---- Averages of the clients' models, and what methods share whose state is one model of each architecture


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
