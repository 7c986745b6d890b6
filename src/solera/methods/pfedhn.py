"""pFedHN (Shamsian et al., ICML 2021): a hypernetwork on the server makes every client's model.

Client i has an embedding v_i on the server; its model is theta_i = h(v_i; phi). The client trains it a little and
sends it back; the change is taken for the gradient of its loss by theta_i, and carried on to phi and v_i.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..federation import Federation, Replies, per_client
from ..method import About, Exchange, Method, Model, Traits, register
from ..parts.hypernet import Hypernet, generate, new_hypernet, pull_back, sgd_step
from ..parts.local import Local
from ..parts.norms import parameter_names
from ..server import Server
from ..tensors import Weights, is_finite
from .common.personal import score_received
from .common.training import local_update

EMBEDDINGS = "embeddings"  # the key of v among phi's tensors while both take their step


@register("pfedhn")
@dataclass(frozen=True)
class PFedHN(Method):
    """Personal models made by one hypernetwork, which only the server has."""

    local: Local = field(
        default_factory=lambda: Local(steps=50, batch=64, lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0)
    )  # the inner steps
    hypernet: Hypernet = field(default_factory=Hypernet)

    about: ClassVar[About] = About(
        title="pFedHN",
        paper="Shamsian et al., ICML 2021",
        wire="own model down, model up",
        state="nothing (the server makes its model)",
        models="the hypernetwork's trunk is shared by all of them",
    )

    @dataclass(frozen=True)
    class State:
        phi: Weights  # the hypernetwork
        v: Tensor  # embeddings: row i belongs to the i-th client in canonical order
        velocity: Weights  # momentum of both, which lasts from round to round

    def traits(self) -> Traits:
        return Traits(across="knowledge", batchnorm=False, personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        generator = torch.Generator().manual_seed(fed.seed("hypernetwork"))
        size = self.hypernet.embedding or 1 + len(fed.clients) // 4
        phi = new_hypernet({A: server.init(A) for A in server.architectures}, size, self.hypernet, generator)
        v = torch.randn(len(fed.clients), size, generator=generator)
        return self.State(phi, v, {n: torch.zeros_like(t) for n, t in (phi | {EMBEDDINGS: v}).items()})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        theta = {k: self.made(state, k, fed) for k in fed.sample()}  # theta_i = h(v_i; phi)
        sent = per_client(theta.__getitem__)
        replies = fed.map(local_update, list(theta), weights=sent, local=self.local, mu=0.0)
        changes = usable_changes(theta, replies, fed)
        x = state.phi | {EMBEDDINGS: state.v}
        gradient = {n: torch.zeros_like(t) for n, t in x.items()}
        for k, delta in changes.items():
            i, share = fed.clients.index(k), fed.copies[k] / sum(fed.copies[m] for m in changes)
            by_phi, by_v = pull_back(state.phi, state.v[i], fed.architecture(k), delta)
            for n, g in by_phi.items():  # (d theta / d phi)^T Delta theta, the mean over clients
                gradient[n] += share * g
            gradient[EMBEDDINGS][i] += share * by_v  # (d theta / d v)^T Delta theta
        x, velocity = sgd_step(x, gradient, state.velocity, self.hypernet)
        return self.State({n: t for n, t in x.items() if n != EMBEDDINGS}, x[EMBEDDINGS], velocity)

    def made(self, state: State, k: str, fed: Federation) -> Weights:
        """The model of client k."""
        return generate(state.phi, state.v[fed.clients.index(k)], fed.architecture(k))

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_received, {"weights": per_client(lambda k: self.made(state, k, fed))})

    def fits(self, server: Server) -> Iterator[str]:
        """Models with tensors that are no parameters of their own: the hypernetwork could not make them."""
        for A in server.architectures:
            unique = {name for name, _ in server.template(A).named_parameters()}
            if odd := [n for n in server.template(A).state_dict() if n not in unique]:
                kind = "shared with another" if odd[0] in parameter_names(server.template(A)) else "a buffer"
                yield f"pfedhn: {A!r} has {odd[0]!r}, {kind}: only parameters can be generated"

    def models(self, state: State) -> dict[str, Model]:
        return {}


def usable_changes(theta: dict[str, Weights], replies: Replies, fed: Federation) -> dict[str, Weights]:
    """What each client changed in its model. Changes so large that their square overflows are rejected.

    The products with them would overflow as well, and one infinity in the gradient spoils the whole hypernetwork.
    """
    changes = {}
    for k, reply in list(replies.items()):
        delta = {n: t - reply.weights[n] for n, t in theta[k].items()}  # Delta theta_i = theta_i - theta~_i
        if is_finite({n: d.square().sum() for n, d in delta.items()}):
            changes[k] = delta
        else:
            fed.reject(replies, k, "a change of its model too large to be a gradient")
    return changes
