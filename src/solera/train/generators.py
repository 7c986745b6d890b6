"""Generators that a server trains instead of using data: they turn noise and a label into a latent or an input.

FedGen (Zhu, Hong, Zhou, ICML 2021) generates inputs of the last layers of a model, FedFTG (Zhang et al., CVPR 2022)
whole inputs. This module has the networks, the clients' weights by label counts, and the terms of the generators'
losses. The networks have BatchNorm, as in the authors' code. They are in training mode while they are trained, and in
evaluation mode otherwise, so that a generated sample does not depend on the rest of the batch.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from ..core.settings import Hint
from ..core.tensors import CPU, Weights, sent

# ---- networks ---------------------------------------------------------------------------------------


AtLeastTwo = Annotated[int, Ge(2), Hint("the diversity term compares two samples")]


class ImageDecoder(nn.Module):
    """DCGAN's generator (Radford, Metz, Chintala, ICLR 2016) that doubles the resolution twice: [n, C, H, W] in
    [-1, 1] from vectors of `inputs` numbers. For images of about 28 to 64 pixels."""

    def __init__(self, shape: tuple[int, int, int], inputs: int, features: int):
        super().__init__()
        channels, height, width = shape
        self.shape = shape
        self.start = (4 * features, -(-height // 4), -(-width // 4))
        self.dense = nn.Sequential(
            nn.Linear(inputs, self.start[0] * self.start[1] * self.start[2], bias=False),
            nn.Unflatten(1, self.start),
            nn.BatchNorm2d(4 * features),
            nn.ReLU(),
        )
        self.grow = nn.Sequential(
            nn.ConvTranspose2d(4 * features, 2 * features, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * features),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * features, channels, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images from vectors [n, inputs]; cropped if a side is not a multiple of 4."""
        return self.grow(self.dense(z))[:, :, : self.shape[1], : self.shape[2]]


class Conditional(nn.Module):
    """G(noise, label): `net` on the noise followed by the label as a one-hot vector."""

    def __init__(self, net: nn.Module, noise: int, classes: int):
        super().__init__()
        self.net, self.noise, self.classes = net, noise, classes

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """One output for each row of noise [n, noise] with its label [n]."""
        return self.net(torch.cat([noise, F.one_hot(labels, self.classes).to(noise.dtype)], 1))


def restored(build: Callable[[], Conditional], weights: Weights) -> Conditional:
    """The generator from `build`, in evaluation mode, with a copy of these weights. Uses no random numbers."""
    with torch.device("meta"):
        generator = build()
    generator.load_state_dict({name: t.clone() for name, t in weights.items()}, assign=True)
    generator.eval()
    return generator


def hidden_layer(inputs: int, outputs: int) -> list[nn.Module]:
    """A layer of a generator, with BatchNorm."""
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


# ---- weights from label counts ----------------------------------------------------------------------


def label_weights(counts: Tensor) -> Tensor:
    """alpha_k^y = n_k^y / sum_j n_j^y of counts [clients, classes], in float64; 0 for a label that no client holds."""
    counts = counts.double()
    return counts / counts.sum(0).clamp(min=1)


def label_prior(counts: Tensor, kind: Literal["counts", "uniform"] = "counts") -> Tensor:
    """p(y) ~ sum_k n_k^y, or uniform over the labels that some client holds, in float64; 0 for the others."""
    held = counts.sum(0).double()
    if kind == "uniform":
        held = (held > 0).double()
    return held / held.sum().clamp(min=1)


def draw(prior: Tensor, n: int, noise: int, rng: torch.Generator, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """A generator's inputs: standard normal noise [n, noise], and labels [n] sampled from `prior`.

    They are drawn on the CPU, and so are the same on every `device`.
    """
    labels = torch.multinomial(prior, n, replacement=True, generator=rng)
    return sent(torch.randn(n, noise, generator=rng), device), sent(labels, device)


# ---- losses -----------------------------------------------------------------------------------------


def diversity(noise: Tensor, outputs: Tensor) -> Tensor:
    """exp(-mean of |noise_i - noise_j|^2 |G_i - G_j|_1) over all pairs, distances divided by their dimension.

    Small if different noise gives different outputs, 1 if the generator ignores the noise.
    """
    flat = outputs.flatten(1)
    apart = torch.cdist(flat, flat, p=1) / flat.shape[1]
    noise_apart = (noise[:, None] - noise).square().mean(-1)
    return (-noise_apart * apart).mean().exp()


def weighted_cross_entropy(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    """Mean over the samples of `share` times cross-entropy."""
    return (shares * F.cross_entropy(logits, labels, reduction="none")).mean()
