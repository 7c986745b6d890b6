"""A hypernetwork: a network whose output is the weights of another (pFedHN), as functions of plain tensors.

The hypernetwork `phi` is a trunk that all architectures share, "trunk/0/weight", "trunk/0/bias", ..., and a linear
head for each tensor of each architecture, "head/<architecture>/<tensor>/weight" and ".../bias". A head's bias has the
shape of the tensor it generates. Its weight has one more axis: the trunk's features.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.settings import BelowOne, NonNegative, NonNegativeInt, Positive, PositiveInt, settings
from ..core.tensors import Weights


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
