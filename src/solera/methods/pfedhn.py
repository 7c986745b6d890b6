"""pFedHN (Shamsian et al., ICML 2021): a hypernetwork on the server generates every client's model.

Client i has an embedding v_i on the server; its model is theta_i = h(v_i; phi). The client trains it for a few steps
and sends it back. The change serves as the gradient of its loss by theta_i, and is back-propagated to phi and v_i.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..core.federation import Federation, Replies, per_client
from ..core.settings import BelowOne, NonNegative, NonNegativeInt, Positive, PositiveInt, settings
from ..core.tensors import Weights, is_finite
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local
from ..train.norms import parameter_names
from .steps.personal import score_received
from .steps.training import local_update

# ---- the hypernetwork --------------------------------------------------------------------------------

# The hypernetwork `phi` is a trunk that all architectures share, "trunk/0/weight", "trunk/0/bias", ..., and a linear
# head for each tensor of each architecture, "head/<architecture>/<tensor>/weight" and ".../bias". A head's bias has the
# shape of the tensor it generates. Its weight has one more axis: the trunk's features.


@settings
class Hypernet:
    """The size of the hypernetwork, and how it is trained: SGD with momentum, one step a round."""

    embedding: PositiveInt | None = None  # size of a client's embedding; none: 1 + K/4, rounded down, of K clients
    layers: NonNegativeInt = 3  # hidden layers; 0: the heads use the embedding itself
    width: PositiveInt = 100  # of a hidden layer; the hypernetwork has about `width` times the parameters of the models
    lr: NonNegative = 0.01  # of the hypernetwork and of the embeddings
    momentum: BelowOne = 0.9  # kept between rounds
    weight_decay: NonNegative = 0.001  # of both
    clip: Positive | None = 50.0  # largest norm of the gradient


def new_hypernet(models: Mapping[str, Weights], embedding: int, cfg: Hypernet, generator: torch.Generator) -> Weights:
    """The initial phi for these architectures: the biases of heads are the initial weights `models[A]`.

    Weights and trunk biases are uniform in +-1/sqrt(inputs), as in torch's linear layers.
    """

    def uniform(*shape: int, inputs: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(inputs)

    phi, inputs = {}, embedding
    for i in range(cfg.layers):
        phi[f"trunk/{i}/weight"] = uniform(cfg.width, inputs, inputs=inputs)
        phi[f"trunk/{i}/bias"] = uniform(cfg.width, inputs=inputs)
        inputs = cfg.width
    for A, weights in models.items():
        for name, t in weights.items():
            phi[f"head/{A}/{name}/weight"] = uniform(*t.shape, inputs, inputs=inputs).to(t.dtype)
            phi[f"head/{A}/{name}/bias"] = t.clone()
    return phi


def generate(phi: Weights, v: Tensor, A: str) -> Weights:
    """theta = h(v; phi): the weights of architecture A for the client with embedding v."""
    features, i = v, 0
    while f"trunk/{i}/weight" in phi:
        features = torch.relu(phi[f"trunk/{i}/weight"] @ features + phi[f"trunk/{i}/bias"])
        i += 1
    head, theta = f"head/{A}/", {}
    for key, bias in phi.items():
        if key.startswith(head) and key.endswith("/bias"):
            name = key.removeprefix(head).removesuffix("/bias")
            theta[name] = phi[f"{head}{name}/weight"] @ features.to(bias.dtype) + bias
    return theta


def pull_back(phi: Weights, v: Tensor, A: str, delta: Weights) -> tuple[Weights, Tensor]:
    """(dh/dphi)^T delta and (dh/dv)^T delta: a change of theta, back-propagated to phi and to the embedding.

    Tensors of phi that do not affect theta (heads of other architectures) are omitted.
    """
    used = {n: t.detach().clone().requires_grad_() for n, t in phi.items() if n.startswith(("trunk/", f"head/{A}/"))}
    v = v.detach().clone().requires_grad_()
    theta = generate(used, v, A)
    made = list(theta.values())
    *by_phi, by_v = torch.autograd.grad(made, [*used.values(), v], grad_outputs=[delta[n] for n in theta])
    return dict(zip(used, by_phi, strict=True)), by_v


def sgd_step(x: Weights, gradient: Weights, velocity: Weights, cfg: Hypernet) -> tuple[Weights, Weights]:
    """One step of SGD as in torch: clip, g + decay x, v <- momentum v + g, x <- x - lr v. Returns x and v."""
    scale = 1.0
    if cfg.clip is not None:
        norm = torch.stack([g.double().square().sum() for g in gradient.values()]).sum().sqrt().item()
        scale = min(1.0, cfg.clip / (norm + 1e-6))
    moved = {n: cfg.momentum * velocity[n] + (scale * gradient[n] + cfg.weight_decay * t) for n, t in x.items()}
    return {n: t - cfg.lr * moved[n] for n, t in x.items()}, moved


# ---- the method ---------------------------------------------------------------------------------------


EMBEDDINGS = "embeddings"  # the key of v in the joint optimiser step with phi


@register("pfedhn")
@dataclass(frozen=True)
class PFedHN(Method):
    """Personal models generated by one hypernetwork on the server."""

    local: Local = field(
        default_factory=lambda: Local(steps=50, batch=64, lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0)
    )  # the inner steps
    hypernet: Hypernet = field(default_factory=Hypernet)

    about: ClassVar[About] = About(
        title="pFedHN",
        paper="Shamsian et al., ICML 2021",
        wire="own model down, model up",
        state="nothing (the server generates its model)",
        models="all share the hypernetwork's trunk",
    )

    @dataclass(frozen=True)
    class State:
        phi: Weights  # the hypernetwork
        v: Tensor  # embeddings: row i belongs to the i-th client in canonical order
        velocity: Weights  # momentum of both, kept between rounds

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
        """Models with buffers or shared parameters, which the hypernetwork cannot generate."""
        for A in server.architectures:
            unique = {name for name, _ in server.template(A).named_parameters()}
            if odd := [n for n in server.template(A).state_dict() if n not in unique]:
                kind = "shared with another" if odd[0] in parameter_names(server.template(A)) else "a buffer"
                yield f"pfedhn: {A!r} has {odd[0]!r}, {kind}: only parameters can be generated"

    def models(self, state: State) -> dict[str, Model]:
        return {}


def usable_changes(theta: dict[str, Weights], replies: Replies, fed: Federation) -> dict[str, Weights]:
    """The change of each client's model. Changes so large that their square overflows are rejected.

    Products with them would overflow too, and one infinity in the gradient makes the whole hypernetwork infinite.
    """
    changes = {}
    for k, reply in list(replies.items()):
        delta = {n: t - reply.weights[n] for n, t in theta[k].items()}  # Delta theta_i = theta_i - theta~_i
        if is_finite({n: d.square().sum() for n, d in delta.items()}):
            changes[k] = delta
        else:
            fed.reject(replies, k, "a change of its model too large to use as a gradient")
    return changes
