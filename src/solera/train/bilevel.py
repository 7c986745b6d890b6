"""Bilevel training: a model that is good after one step (Per-FedAvg), a model close to personal ones (pFedMe)."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..core.settings import NonNegative, NonNegativeInt, Positive, PositiveInt, Problem, settings
from ..core.tensors import Inputs, Weights, device_of
from ..place.placement import full_precision
from .fitting import Fitted, Local, fit, minibatches
from .norms import BATCHNORM, has_batchnorm
from .objectives import Objective, cross_entropy, proximal

Batches = Iterator[tuple[Tensor, Tensor]]


def batches(model: nn.Module, inputs: Inputs, labels: Tensor, cfg: Local, seed: int) -> Batches:
    """The minibatches `fit` trains on: with BatchNorm, those of one sample are skipped unless there is no other."""
    smallest = 2 if has_batchnorm(model) and min(cfg.batch, len(labels)) > 1 else 1
    return (b for b in minibatches(inputs, labels, cfg, seed) if len(b[1]) >= smallest)


def endless(model: nn.Module, inputs: Inputs, labels: Tensor, batch: int, seed: int) -> Batches:
    """An endless stream of minibatches, epoch after epoch."""
    for epoch in count():
        yield from batches(model, inputs, labels, Local(epochs=1, batch=batch), seed + epoch)


# ---- Per-FedAvg: the loss after one step of adaptation ----------------------------------------------


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
        with full_precision(device):  # nobody scales this gradient
            g = _gradient(_loss_at(model, w, next(inner)), w)
        adapted = {n: p - alpha * g[n] for n, p in w.items()}
        if curvature is None:
            return F.cross_entropy(functional_call(model, adapted, (inputs,)), labels)
        with full_precision(device):  # of half precision, delta would change few of the weights
            loss = F.cross_entropy(functional_call(model, adapted, (inputs,)), labels)
            return loss - _second_order(model, w, loss, next(curvature), alpha, delta)

    return objective


def _second_order(
    model: nn.Module, w: Weights, loss: Tensor, batch: tuple[Tensor, Tensor], alpha: float, delta: float
) -> Tensor:
    """A zero whose gradient is HF-MAML's term: the value stays the loss, which `fit` checks."""
    h = _gradient(loss, w, keep_graph=True)
    with _without_dropout(model):  # the effect of two masks would exceed that of delta
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


# ---- pFedMe: steps on the Moreau envelope -----------------------------------------------------------


@settings
class Envelope:
    """How a client minimises the Moreau envelope of its loss: min over theta of f(theta) + lam/2 ||theta - w||^2."""

    steps: NonNegativeInt = 20  # steps of w in a round, R
    batch: PositiveInt = 20  # samples in the minibatch of a step of w
    lr: NonNegative = 0.005  # step size of w, eta
    lam: Positive = 15.0  # lambda, weight of the distance between theta and w
    inner_steps: NonNegativeInt = 5  # K, gradient steps of theta for each step of w, on the same minibatch
    inner_lr: NonNegative = 0.09  # their step size

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        for name, lr in (("lr", self.lr), ("inner_lr", self.inner_lr)):
            if not lr * self.lam < 2:
                yield f"{name} = {lr}: with lam = {self.lam} a step overshoots; {name} * lam must be below 2"


def follow_envelope(
    theta: nn.Module, inputs: Inputs, labels: Tensor, cfg: Envelope, seed: int
) -> tuple[Weights, Fitted]:
    """Train `theta` in place, and w from the same start. Returns the parameters w and the outcome.

    For each minibatch, theta takes gradient steps on f(theta) + lam/2 ||theta - w||^2 from its current value. Then
    w <- w - lr lam (w - theta), which is the gradient step on the envelope if theta is its minimum.
    """
    parameters = dict(theta.named_parameters(remove_duplicate=False))
    w = {n: p.detach().clone() for n, p in parameters.items()}
    outer = Local(steps=cfg.steps, batch=cfg.batch)
    inner = Local(steps=cfg.inner_steps, batch=cfg.batch, lr=cfg.inner_lr)
    done = Fitted(0, 0.0, float("nan"))
    for x, y in batches(theta, inputs, labels, outer, seed):
        done = fit(theta, x, y, inner, seed, proximal(cfg.lam, w))
        w = {n: w[n] - cfg.lr * cfg.lam * (w[n] - p.detach()) for n, p in parameters.items()}
    theta.eval()
    return w, done
