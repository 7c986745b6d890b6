"""Matching neurons: which neuron of one network corresponds to which neuron of another.

The neurons of a hidden layer can be permuted, so averaging two networks position by position mixes unrelated neurons.
FedMA (Wang et al., ICLR 2020) matches them first: it solves an assignment problem (Hungarian algorithm, from scipy)
between the neurons of a client and those of all clients so far. A neuron is its incoming weights and its bias, in
float64. `places[j]` is the position of a client's neuron j in the global layer.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.settings import NonNegativeInt, Positive, PositiveInt, settings
from ..core.tensors import Weights


@settings
class BBP:
    """The prior of BBP-MAP (beta-Bernoulli process, maximum a posteriori), and the limits of its search."""

    sigma: Positive = 1.0  # standard deviation of a client's neuron around its global neuron
    sigma0: Positive = 1.0  # standard deviation of global neurons around zero
    gamma: Positive = 7.0  # the larger, the more neurons become new global ones
    sweeps: NonNegativeInt = 5  # how often all clients are matched again
    width_cap: PositiveInt = 700  # maximum number of global neurons of a layer


def assign(cost: Tensor) -> Tensor:
    """The column assigned to each row with the lowest total cost; needs at least as many columns as rows."""
    from scipy.optimize import linear_sum_assignment  # the extra `matching`

    _, columns = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(columns).long()


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||^2 for the rows of a and b."""
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_min(0)


def match_fixed_width(neurons: Sequence[Tensor], n: Sequence[float], reference: Tensor) -> list[Tensor]:
    """Match each client's neurons one to one with the mean of the clients before it, by squared distance.

    The first client is matched with `reference`, which has weight 0 in the mean: it only fixes the order, so that the
    result does not depend on the order of a client's neurons.
    """
    places, total, mean = [], 0.0, reference
    for w, n_k in zip(neurons, n, strict=True):
        here = assign(squared_distances(w, mean))
        arranged = torch.empty_like(w).index_copy_(0, here, w)
        mean = (mean * total + arranged * n_k) / (total + n_k) if total else arranged
        places.append(here)
        total += n_k
    return places


def match_bbp(neurons: Sequence[Tensor], reference: Tensor, prior: BBP, rng: torch.Generator) -> list[Tensor]:
    """Match by BBP-MAP: each neuron with a global one, or as a new one. All clients have the same number of neurons.

    The global layer starts with the first client's neurons, in the order of `reference`. The others are matched in
    turn. Then, `sweeps` times and in random order, each client is removed and matched again.
    """
    J, p = len(neurons), 1 / prior.sigma**2
    places: list[Tensor] = [assign(squared_distances(neurons[0], reference))]
    G = torch.empty_like(neurons[0]).index_copy_(0, places[0], neurons[0] * p)  # sums of matched neurons, over sigma^2
    count = torch.ones(len(G), dtype=torch.int64)  # number of clients with each global neuron
    for w in neurons[1:]:
        here, G, count = _place(w, G, count, J, prior)
        places.append(here)
    for j in [int(j) for _ in range(prior.sweeps if J > 1 else 0) for j in torch.randperm(J, generator=rng)]:
        G = G.index_add(0, places[j], neurons[j], alpha=-p)
        count = count.index_add(0, places[j], torch.ones_like(places[j]), alpha=-1)
        kept = count > 0
        G, count, number = G[kept], count[kept], kept.cumsum(0) - 1
        places = [number[here] for here in places]  # the places of client j are replaced next
        places[j], G, count = _place(neurons[j], G, count, J, prior)
    return places


def _place(w: Tensor, G: Tensor, count: Tensor, J: int, prior: BBP) -> tuple[Tensor, Tensor, Tensor]:
    """Match one client; returns its places and the updated sums and counts."""
    p, L = 1 / prior.sigma**2, len(G)
    gain = matching_gain(w, G, count, J, prior)
    here = assign(-gain)
    # The gains do not determine the order of new neurons: sort by norm, which depends on nothing else.
    new = (here >= L).nonzero().flatten()
    new = new[w[new].square().sum(1).argsort(descending=True, stable=True)]
    here[new] = torch.arange(L, L + len(new))
    G = torch.cat([G, G.new_zeros(len(new), G.shape[1])]).index_add(0, here, w, alpha=p)
    count = torch.cat([count, count.new_zeros(len(new))]).index_add(0, here, torch.ones_like(here))
    return here, G, count


def matching_gain(w: Tensor, G: Tensor, count: Tensor, J: int, prior: BBP) -> Tensor:
    """The gain of matching each neuron (row) with each global neuron (column); the last columns are new neurons.

    With p = 1/sigma^2, S_i = 1/sigma0^2 + p count_i and G_i the sum of p w over the neurons matched with i:
    ||p w + G_i||^2 / (p + S_i) - ||G_i||^2 / S_i + log(count_i / (J - count_i)) for the i-th existing one, and
    ||p w||^2 / (p + 1/sigma0^2) - 2 log i + 2 log(gamma / J) for the i-th new one.
    """
    p, p0 = 1 / prior.sigma**2, 1 / prior.sigma0**2
    S, held = p0 + p * count, count.double()
    own, sums = (p * w).square().sum(1), G.square().sum(1)
    there = (own[:, None] + 2 * p * w @ G.T + sums) / (p + S) - sums / S + (held / (J - held)).log()
    room = min(len(w), max(prior.width_cap - len(G), 0))
    number = torch.arange(1, room + 1, dtype=torch.float64)
    new = own[:, None] / (p + p0) - 2 * number.log() + 2 * math.log(prior.gamma / J)
    return torch.cat([there, new], 1)


# ---- layers -----------------------------------------------------------------------------------------


def neurons_of(layer: Weights) -> Tensor:
    """The neurons of a layer as rows: incoming weights, then the bias if there is one; float64."""
    ordered = sorted(layer.values(), key=lambda t: -t.ndim)
    return torch.cat([t.double().reshape(len(t), -1) for t in ordered], 1)


def merge_neurons(layers: Sequence[Weights], places: Sequence[Tensor], n: Sequence[float]) -> Weights:
    """The global layer: each neuron is the mean, weighted by n, of the clients' neurons matched with it."""
    width = 1 + max(int(here.max()) for here in places)
    total = torch.zeros(width, dtype=torch.float64)
    for here, n_k in zip(places, n, strict=True):
        total[here] += n_k
    merged = {}
    for name, t in layers[0].items():
        sums = torch.zeros(width, *t.shape[1:], dtype=torch.float64)
        for layer, here, n_k in zip(layers, places, n, strict=True):
            sums[here] += layer[name].double() * n_k
        merged[name] = (sums / _by_row(total, sums)).to(t.dtype)
    return merged


def merge_classes(layers: Sequence[Weights], shares: Tensor) -> Weights:
    """The last layer, whose rows are classes: row c is the mean weighted by shares[k, c]."""
    total = shares.sum(0)
    merged = {}
    for name, t in layers[0].items():
        sums = torch.zeros_like(t, dtype=torch.float64)
        for layer, share in zip(layers, shares, strict=True):
            sums += layer[name].double() * _by_row(share, sums)
        merged[name] = (sums / _by_row(total, sums)).to(t.dtype)
    return merged


def move_columns(weight: Tensor, places: Tensor, width: int, block: int) -> Tensor:
    """The next layer's weight with its inputs moved to their places among `width`; missing inputs are 0.

    Every input has `block` columns: the pixels of a channel if a Linear layer follows a convolution.
    """
    out, rest = len(weight), weight.shape[2:]
    moved = weight.new_zeros(out, width, block, *rest)
    moved[:, places] = weight.reshape(out, len(places), block, *rest)
    return moved.reshape(out, width * block, *rest)


def _by_row(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))
