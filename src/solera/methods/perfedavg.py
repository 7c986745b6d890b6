"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020): a common model that is good after one step of adaptation.

Clients minimise f(w - alpha grad f(w)) instead of f(w). Each step uses independent minibatches: one for the adaptation,
one for the gradient after it, one for the second-order term. "fo" omits that term, "hf" estimates it by a difference of
gradients. Each architecture is averaged over its own clients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..core.federation import Federation
from ..core.randomness import seed_from
from ..core.settings import NonNegative, NonNegativeInt, Positive
from ..core.task import Client, task
from ..core.tensors import Inputs, Weights, device_of, weights_of
from ..method import About, Exchange, Traits, register
from ..place.placement import full_precision
from ..scenario.server import Server
from ..train.fitting import Local, Objective, cross_entropy, fit
from ..train.norms import BATCHNORM
from .steps.personal import Batches, Tuning, batches, score_tuned, tuning_payload
from .steps.training import Average, Averaging, Update

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

    about: ClassVar[About] = About("Per-FedAvg", "Fallah et al., NeurIPS 2020", "model down, model up", "nothing")

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


def endless(model: nn.Module, inputs: Inputs, labels: Tensor, batch: int, seed: int) -> Batches:
    """An endless stream of minibatches, epoch after epoch."""
    for epoch in count():
        yield from batches(model, inputs, labels, Local(epochs=1, batch=batch), seed + epoch)


def after_a_step(alpha: float, inner: Batches, curvature: Batches | None = None, delta: float = 1e-3) -> Objective:
    """f(w - alpha g; batch), with g the gradient of f at w on a batch of `inner`, treated as a constant: FO-MAML.

    With batches for `curvature`, the gradient also has HF-MAML's estimate of the second-order term,
    -alpha (grad f(w + delta h) - grad f(w - delta h)) / (2 delta), where h is the gradient so far. With alpha = 0 this
    is exactly the cross-entropy. Only the pass at w - alpha g updates BatchNorm statistics.
    """
    if alpha == 0:
        return cross_entropy

    def objective(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        w: Weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        device = device_of(model)
        with full_precision(device):  # this gradient is not scaled
            g = _gradient(_loss_at(model, w, next(inner)), w)
        adapted = {n: p - alpha * g[n] for n, p in w.items()}
        if curvature is None:
            return F.cross_entropy(functional_call(model, adapted, (inputs,)), labels)
        with full_precision(device):  # in half precision, delta would change few of the weights
            loss = F.cross_entropy(functional_call(model, adapted, (inputs,)), labels)
            return loss - _second_order(model, w, loss, next(curvature), alpha, delta)

    return objective


def _second_order(
    model: nn.Module, w: Weights, loss: Tensor, batch: tuple[Tensor, Tensor], alpha: float, delta: float
) -> Tensor:
    """A zero whose gradient is HF-MAML's term: the value stays the loss, which `fit` checks."""
    h = _gradient(loss, w, keep_graph=True)
    with _without_dropout(model):  # two different dropout masks would hide the effect of delta
        ahead = _loss_at(model, {n: p + delta * h[n] for n, p in w.items()}, batch)
        behind = _loss_at(model, {n: p - delta * h[n] for n, p in w.items()}, batch)
    term = alpha / (2 * delta) * (ahead - behind)
    return term - term.detach()


def _loss_at(model: nn.Module, weights: Weights, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss with these parameters; the model's statistics do not change."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    return F.cross_entropy(functional_call(model, weights | buffers, (batch[0],)), batch[1])


def _gradient(loss: Tensor, w: Weights, keep_graph: bool = False) -> Weights:
    found = torch.autograd.grad(loss, list(w.values()), retain_graph=keep_graph, materialize_grads=True)
    return dict(zip(w, found, strict=True))


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules() if not isinstance(m, BATCHNORM)]
    for m, _ in modes:
        m.training = False
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
