"""pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020): personal models near the common one, by a Moreau envelope.

Client k minimises over w the envelope min_theta f(theta) + lambda/2 ||theta - w||^2. theta, found by a few gradient
steps, is its personal model; w moves towards it. Only w is sent. Each architecture is averaged over its own clients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from ..core.federation import Federation
from ..core.settings import NonNegative, NonNegativeInt, Positive, PositiveInt, Problem, settings
from ..core.task import Client, task
from ..core.tensors import Inputs, Weights, weights_of
from ..method import About, Exchange, Traits, register
from ..scenario.server import Server
from ..train.fitting import Fitted, Local, fit, proximal
from ..train.norms import parameter_names
from .steps.personal import batches, common_model, score_own_or_received
from .steps.training import Averaging, Update


@settings
class Envelope:
    """Steps on the Moreau envelope of a client's loss: min over theta of f(theta) + lam/2 ||theta - w||^2."""

    steps: NonNegativeInt = 20  # steps of w in a round, R
    batch: PositiveInt = 20  # samples in the minibatch of a step of w
    lr: NonNegative = 0.005  # step size of w, eta
    lam: Positive = 15.0  # lambda, weight of the distance between theta and w
    inner_steps: NonNegativeInt = 5  # K, gradient steps of theta for each step of w, on the same minibatch
    inner_lr: NonNegative = 0.09  # their step size

    def problems(self) -> Iterator[Problem]:
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


@task("envelope_update")
def envelope_update(client: Client, weights: Weights, local: Envelope) -> Update:
    """Train theta from the received model and keep it; send w, which has moved towards it."""
    model = client.model(weights)
    w, _ = follow_envelope(model, client.train.inputs, client.train.labels, local, client.seed)
    client.state["model"] = theta = weights_of(model)
    return Update(theta | w)  # parameters of w; BatchNorm statistics of theta, because w has seen no sample


@register("pfedme")
@dataclass(frozen=True)
class PFedMe(Averaging):
    """A common model, and personal models regularised towards it."""

    local: Envelope = field(default_factory=Envelope)  # type: ignore[assignment]
    beta: Positive = 1.0  # server step towards the mean of the clients' w; 1: the mean itself, more: beyond it

    about: ClassVar[About] = About("pFedMe", "Dinh et al., NeurIPS 2020", "model down, model up", "its model theta")

    def traits(self) -> Traits:
        return Traits(replies="means", personal=True, products=self.beta == 1)

    def round(self, state: Averaging.State, fed: Federation, server: Server) -> Averaging.State:
        w = dict(state.weights)
        mean = self.mean(envelope_update, w, fed.sample(), fed)
        for A, reply in mean.items():
            names = parameter_names(server.template(A))
            moved = {n: (1 - self.beta) * w[A][n] + self.beta * reply.weights[n] for n in names}
            w[A] = reply.weights | moved  # statistics: the mean
        return self.State(w)

    def personal(self, state: Averaging.State, fed: Federation) -> Exchange:
        return Exchange(score_own_or_received, common_model(state.weights, fed))
