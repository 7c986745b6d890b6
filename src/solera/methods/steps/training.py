"""The client's half of most methods: receive weights, train on your own data, send the weights back.

Algorithm 2 of FedDF (Lin et al., NeurIPS 2020), which is FedAvg's ClientUpdate (McMahan et al., AISTATS 2017).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...core.federation import Federation, Replies, per_client
from ...core.settings import Slot, settings
from ...core.task import Client, task
from ...core.tensors import Weights, beside, weights_of
from ...core.wire import like, sized
from ...scenario.server import Server
from ...train.fitting import Local, fit
from ...train.objectives import proximal
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
