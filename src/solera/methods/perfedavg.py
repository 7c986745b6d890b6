"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020): a common model that is good after one step of adaptation.

Clients minimise f(w - alpha grad f(w)) instead of f(w). Each step uses independent minibatches: one for the adaptation,
one for the gradient after it, one for the second-order term. "fo" omits that term, "hf" estimates it by a difference of
gradients. Each architecture is averaged over its own clients.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..core.federation import Federation
from ..core.randomness import seed_from
from ..core.settings import NonNegative, NonNegativeInt, Positive
from ..core.task import Client, task
from ..core.tensors import Weights, weights_of
from ..method import About, Exchange, Traits, register
from ..scenario.server import Server
from ..train.bilevel import after_a_step, endless
from ..train.fitting import Local, fit
from .steps.averaging import Average, Averaging
from .steps.personal import Tuning, score_tuned, tuning_payload
from .steps.training import Update

Mode = Literal["fo", "hf"]


@task("meta_update")
def meta_update(client: Client, weights: Weights, local: Local, mode: Mode, alpha: float, delta: float) -> Update:
    """Train the received model to minimise the loss after a step of adaptation."""
    model, data = client.model(weights), (client.train.inputs, client.train.labels)
    inner, curvature = (
        endless(model, *data, local.batch, seed_from(client.seed, purpose)) for purpose in ("inner", "curvature")
    )
    objective = after_a_step(alpha, inner, curvature if mode == "hf" else None, delta)
    fit(model, *data, local, client.seed, objective)  # local.lr is beta
    return Update(weights_of(model))


@register("perfedavg")
@dataclass(frozen=True)
class PerFedAvg(Averaging):
    """Averaging of models that are trained to adapt."""

    local: Local = field(default_factory=lambda: Local(steps=10, batch=40, lr=0.001))  # tau, D, beta
    average: Average = "uniform"
    mode: Mode = "fo"  # second-order term: omitted, or estimated by a difference of gradients
    alpha: NonNegative = 0.01  # step size of the adaptation; 0: FedAvg
    delta: Positive = 0.001  # mode hf: step of the difference, in multiples of the gradient
    adapt_steps: NonNegativeInt = 1  # adaptation steps of a client, on its training samples, before evaluation

    about: ClassVar[About] = About(
        title="Per-FedAvg",
        paper="Fallah et al., NeurIPS 2020",
        wire="model down, model up",
        state="nothing",
    )

    def traits(self) -> Traits:
        return Traits(replies="means", personal=True, products=True)

    def round(self, state: Averaging.State, fed: Federation, server: Server) -> Averaging.State:
        w = state.weights
        how = {"mode": self.mode, "alpha": self.alpha, "delta": self.delta}
        mean = self.mean(meta_update, w, fed.sample(), fed, **how)
        return self.State(w | {A: mean[A].weights for A in mean})

    def personal(self, state: Averaging.State, fed: Federation) -> Exchange:
        """Each evaluation adapts a copy and discards it: clients keep no state."""
        adapt = Local(steps=self.adapt_steps, batch=self.local.batch, lr=self.alpha)
        return Exchange(score_tuned, {**tuning_payload(state.weights, Tuning(adapt), fed), "tuned": False})
