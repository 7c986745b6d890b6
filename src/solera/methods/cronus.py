"""Cronus (Chang, Shejwalkar, Shokri, Houmansadr, 2019): knowledge transfer that tolerates a few malicious clients.

A client first trains alone. Then, each round, all clients send soft labels of the public samples. The server combines
them sample by sample with a robust mean, which excludes outliers. Clients continue to train on one mixed set: their own
samples, and the public samples with the combined labels. Models stay on the clients and may be of any architecture.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch.nn.functional import one_hot

from ..core.federation import Federation
from ..core.settings import Hint
from ..core.task import Client, PublicRows, task
from ..core.tensors import joined, weights_of
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local, fit
from ..train.robust import filtered_mean
from .steps.fusion import logits_problems
from .steps.personal import score_own
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
class Cronus(Method):
    """Personal models that learn from a robust mean of all clients' soft labels."""

    first: Local = field(default_factory=lambda: Local(epochs=20, batch=64, lr=0.05))  # first training, alone
    local: Local = field(default_factory=lambda: Local(epochs=1, batch=64, lr=0.05))  # each round, on the mixed set
    aggregate: Literal["robust", "mean"] = "robust"  # how soft labels are combined for each sample
    epsilon: Malicious = 0.2  # share of clients that may be malicious: this share of predictions is excluded per sample

    about: ClassVar[About] = About(
        title="Cronus",
        paper="Chang et al., 2019",
        wire="indices down, predictions up, targets down",
        state="its model",
    )

    @dataclass(frozen=True)
    class State:
        rounds: int  # all other state is on the clients

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(0)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x = draw(None, fed, server)
        S, Y = ask(fed.sample(), x, 1.0, self.first, fed, server, only_new=True)  # soft labels Y_k of all x
        Y = Y.repeat_interleave(torch.tensor([fed.copies.get(k, 1) for k in S]), 0)
        y = filtered_mean(Y, self.epsilon if self.aggregate == "robust" else 0.0)
        fed.map(train_mixed, S, targets=y, local=self.local)
        return self.State(state.rounds + 1)

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("cronus", None, server)
        yield from logits_problems("cronus", server)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_own)

    def models(self, state: State) -> dict[str, Model]:
        return {}
