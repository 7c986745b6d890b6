"""Cronus (Chang, Shejwalkar, Shokri, Houmansadr, 2019): knowledge transfer that tolerates a few malicious clients.

A client first trains alone. Then, each round, all clients send soft labels of the public samples. The server combines
them sample by sample with a robust mean, which excludes outliers. Clients continue to train on one mixed set: their own
samples, and the public samples with the combined labels. Models stay on the clients and may be of any architecture.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.nn.functional import one_hot

from ..core.federation import Federation
from ..core.settings import Hint
from ..core.task import Client, PublicRows, task
from ..core.tensors import CPU, joined, sent, weights_of
from ..method import About, Traits, register
from ..place.placement import finest_type
from ..scenario.server import Server
from ..train.fitting import Local, fit
from .steps.fusion import logits_problems
from .steps.personal import OnClients
from .steps.predictions import Done, ask, asked_inputs, draw, public_problems, towards_targets


@task("train_mixed")
def train_mixed(client: Client, targets: PublicRows, local: Local) -> Done:
    """Train on one set: private samples with their labels, and the public samples just predicted with `targets`."""
    own = one_hot(client.train.labels, client.classes).to(targets.dtype)
    inputs, labels = joined(client.train.inputs, asked_inputs(client)), torch.cat([own, client.bring(targets)])
    model = client.model(client.state["model"])
    fit(model, inputs, labels, local, client.seed, towards_targets())
    client.state["model"] = weights_of(model)
    return Done()


Malicious = Annotated[float, Ge(0), Lt(0.5), Hint("no mean is robust against a majority")]


@register("cronus")
@dataclass(frozen=True)
class Cronus(OnClients):
    """Personal models that learn from a robust mean of all clients' soft labels."""

    first: Local = field(default_factory=lambda: Local(epochs=20, batch=64, lr=0.05))  # first training, alone
    local: Local = field(default_factory=lambda: Local(epochs=1, batch=64, lr=0.05))  # each round, on the mixed set
    aggregate: Literal["robust", "mean"] = "robust"  # how soft labels are combined for each sample
    epsilon: Malicious = 0.2  # share of clients that may be malicious: this share of predictions is excluded per sample

    about: ClassVar[About] = About(
        "Cronus", "Chang et al., 2019", "indices down, predictions up, targets down", "its model"
    )

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", personal=True)

    def round(self, state: OnClients.State, fed: Federation, server: Server) -> OnClients.State:
        x = draw(None, fed, server)
        S, Y, _ = ask(fed.sample(), x, 1.0, self.first, fed, server, only_new=True)  # soft labels Y_k of all x
        Y = Y.repeat_interleave(torch.tensor([fed.copies.get(k, 1) for k in S]), 0)
        y = filtered_mean(Y, self.epsilon if self.aggregate == "robust" else 0.0)
        fed.map(train_mixed, S, targets=y, local=self.local)
        return self.State(state.rounds + 1)

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("cronus", None, server)
        yield from logits_problems("cronus", server)


FILTERED = 1024  # samples filtered at a time


def filtered_mean(answers: Tensor, epsilon: float, passes: int = 2) -> Tensor:
    """The mean over teachers of `answers` [teachers, samples, classes] without outliers, sample by sample.

    In each pass the predictions for a sample are centred, and those furthest from the mean along the direction of
    largest variance (the top right-singular vector) are dropped: the share `epsilon` of all teachers, spread over the
    passes. Ties keep the first. A deterministic version of the filter of Diakonikolas et al., as used for Cronus.
    """
    if not 0 <= epsilon < 0.5:
        raise ValueError(f"epsilon (the share of malicious teachers) must be in [0, 0.5), not {epsilon}")
    dropped = math.floor(epsilon * len(answers) / passes + 0.5)
    there = answers.device
    if finest_type(there) != torch.float64:  # float64, to tell ties from rounding errors
        answers = sent(answers, CPU)
    parts = [_filtered(part.double().transpose(0, 1), dropped, passes) for part in answers.split(FILTERED, 1)]
    return sent(torch.cat(parts).to(answers.dtype), there)


def _filtered(kept: Tensor, dropped: int, passes: int) -> Tensor:
    """The mean of `kept` [samples, teachers, classes] after dropping `dropped` teachers in each pass."""
    for _ in range(passes):
        left = kept.shape[1] - dropped
        if dropped == 0 or left < 1:
            break
        centred = kept - kept.mean(1, keepdim=True)
        direction = torch.linalg.svd(centred, full_matrices=False).Vh[:, :1]
        distance = (centred * direction).sum(-1).abs().round(decimals=9)  # two are equally far from their mean: a tie
        inner = distance.sort(dim=1, stable=True).indices[:, :left].sort(1).values
        kept = kept.gather(1, inner[..., None].expand(-1, -1, kept.shape[-1]))
    return kept.mean(1)
