"""Ditto (Li, Hu, Beirami and Smith, ICML 2021): FedAvg, and beside it a model of its own on every client.

Client k trains the global model w as in FedAvg, and on the same minibatches its own v_k, which is pulled towards the
w it received. Only w travels. Different architectures are separate federations that share nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.federation import Federation
from ..core.settings import NonNegative, Problem
from ..core.task import Client, task
from ..core.tensors import Weights, beside, weights_of
from ..method import About, Exchange, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local, fit
from .steps.personal import common_model, score_own_or_received
from .steps.training import Averaging, Update, local_update


@task("update_both")
def update_both(client: Client, weights: Weights, local: Local, lam: float) -> Update:
    """Train a copy of the received model and send it; train the client's own model and keep it."""
    update: Update = local_update(client, weights=weights, local=local, mu=0.0)
    v = client.model(client.state.get("model"))
    at, w = dict(v.named_parameters()), beside(v, weights)

    def pulled(name: str, gradient: Tensor) -> Tensor:  # v <- v - eta (grad f(v) + lambda (v - w))
        return gradient + lam * (at[name].detach() - w[name])

    # Same seed: same minibatches. The pull is not part of the loss: far from w it would look like a diverged training.
    fit(v, client.train.inputs, client.train.labels, local, client.seed, correct=pulled)
    client.state["model"] = weights_of(v)
    return update


@register("ditto")
@dataclass(frozen=True)
class Ditto(Averaging):
    """Averaging for a common model, which pulls on the clients' own ones."""

    lam: NonNegative = 0.1  # lambda, pull of the global model; 0: every client for itself

    about: ClassVar[About] = About("Ditto", "Li, Hu, Beirami, Smith, ICML 2021", "model down, model up", "its model")

    def traits(self) -> Traits:
        return Traits(replies="means", personal=True, products=True)

    def problems(self) -> Iterator[Problem]:
        pull, most = self.lam * self.local.lr, 2 * (1 + self.local.momentum)
        if self.local.optimizer == "sgd" and pull >= most:
            yield (
                f"lam = {self.lam}: lam * local.lr = {pull:g} overshoots; lower one of them until it is below {most:g}"
            )

    def round(self, state: Averaging.State, fed: Federation, server: Server) -> Averaging.State:
        w = state.weights
        mean = self.mean(update_both, w, fed.sample(), fed, lam=self.lam)
        return self.State(w | {A: mean[A].weights for A in mean})

    def personal(self, state: Averaging.State, fed: Federation) -> Exchange:
        return Exchange(score_own_or_received, common_model(state.weights, fed))
