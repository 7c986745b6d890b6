"""Label counts that clients report: FedGen and FedFTG use them to weigh teachers and labels."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.federation import Federation, Replies
from ...core.task import Client, task
from ...core.tensors import Weights
from ...core.wire import like, sized
from ...scenario.server import Server
from ...train.fitting import Local
from .training import local_update


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
