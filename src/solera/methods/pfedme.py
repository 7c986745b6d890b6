"""pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020): personal models near the common one, by a Moreau envelope.

Client k minimises over w the envelope min_theta f(theta) + lambda/2 ||theta - w||^2. theta, found by a few gradient
steps, is its personal model; w moves towards it. Only w is sent. Each architecture is averaged over its own clients.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.federation import Federation
from ..core.settings import Positive
from ..core.task import Client, task
from ..core.tensors import Weights, weights_of
from ..method import About, Exchange, Traits, register
from ..scenario.server import Server
from ..train.bilevel import Envelope, follow_envelope
from ..train.norms import parameter_names
from .steps.averaging import Averaging
from .steps.personal import common_model, score_own_or_received
from .steps.training import Update


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

    about: ClassVar[About] = About(
        title="pFedMe",
        paper="Dinh et al., NeurIPS 2020",
        wire="model down, model up",
        state="its model theta",
    )

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
