"""MOON (Li, He and Song, CVPR 2021): FedAvg with a contrastive loss on representations.

A client's loss has a second term: the representation of a sample should be closer to that of the received model than to
those of the models the client sent before. These models are frozen, so their representations are computed once a round
(at each step if samples are augmented). Each architecture is averaged over its own clients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.federation import Federation
from ..core.settings import NonNegative, Positive, PositiveInt
from ..core.task import Client, task
from ..core.tensors import Weights, weights_of
from ..method import About, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local, Objective, fit
from ..train.teachers import Split, Targets, by_position, representations_of
from .steps.training import Averaging, Update


@task("contrastive_update")
def contrastive_update(client: Client, weights: Weights, local: Local, mu: float, tau: float, buffer: int) -> Update:
    """Train the received model; keep representations close to those it has now, far from the client's last models."""
    inputs, labels = client.train.inputs, client.train.labels
    own = [client.state[name] for name in map(slot, range(buffer)) if name in client.state]  # the newest first
    before = [client.model(w) for w in own] or [client.model()]  # at first, the initial model
    frozen = [client.model(weights), *before]
    z = by_position(lambda x: tuple(representations_of(m, x) for m in frozen), inputs)  # z_glob, z_prev
    objective = contrastive(mu, tau, labels, z)  # l_sup + mu l_con
    model = client.model(weights)
    fit(model, inputs, torch.arange(len(labels)), local, client.seed, objective)
    trained = weights_of(model)
    client.state.update({slot(i): w for i, w in enumerate([trained, *own][:buffer])})
    return Update(trained)


def slot(age: int) -> str:
    """The name under which a client keeps the model of this many of its own rounds ago."""
    return f"previous-{age}"


@register("moon")
@dataclass(frozen=True)
class MOON(Averaging):
    """Averaging; clients correct their drift with a contrastive loss on representations."""

    local: Local = field(
        default_factory=lambda: Local(epochs=10, batch=64, lr=0.01, momentum=0.9, weight_decay=1e-5)
    )  # E, B, eta
    mu: NonNegative = 5.0  # weight of the contrastive term; 0: FedAvg
    tau: Positive = 0.5  # temperature of the contrastive term
    buffer: PositiveInt = 1  # how many of its last models a client keeps for the contrastive term

    about: ClassVar[About] = About(
        "MOON", "Li, He, Song, CVPR 2021", "model down, model up", "its last model (or `buffer` of them)"
    )

    def traits(self) -> Traits:
        return Traits(split="split", replies="means", products=True)

    def round(self, state: Averaging.State, fed: Federation, server: Server) -> Averaging.State:
        x = state.weights
        how = {"mu": self.mu, "tau": self.tau, "buffer": self.buffer}
        mean = self.mean(contrastive_update, x, fed.sample(), fed, **how)
        return self.State(x | {A: mean[A].weights for A in mean})


def contrast(z: Tensor, near: Tensor, far: Sequence[Tensor], temperature: float) -> Tensor:
    """-log(e^(cos(z, near)/T) / (e^(cos(z, near)/T) + sum of e^(cos(z, z')/T) over z' in far)), mean over the batch."""
    alike = torch.stack([F.cosine_similarity(z, other, dim=-1) for other in (near, *far)], 1)
    return F.cross_entropy(alike / temperature, torch.zeros(len(z), dtype=torch.int64, device=z.device))


def contrastive(
    mu: float, temperature: float, labels: Tensor, frozen: Callable[[Tensor, Tensor], Targets]
) -> Objective:
    """Cross-entropy plus mu times `contrast`, as a function of (model, inputs, their positions in the data).

    `frozen(inputs, positions)` are the frozen models' representations of these samples (see `teachers.by_position`),
    that of the near model first. With mu = 0 this is exactly the cross-entropy.
    """

    def objective(model: nn.Module, inputs: Tensor, positions: Tensor) -> Tensor:
        split = cast(Split, model)
        z = split.represent(inputs)
        loss = F.cross_entropy(split.head(z), labels[positions])
        if mu == 0:
            return loss
        near, *far = frozen(inputs, positions)
        return loss + mu * contrast(z, near, far, temperature)

    return objective
