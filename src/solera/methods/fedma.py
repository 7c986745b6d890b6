"""FedMA (Wang et al., ICLR 2020), Algorithm 1: neurons are matched before they are averaged, layer by layer.

A round is one cycle over the layers. The clients train and send layer n. The server matches their neurons, averages
those that match and sends the layer back. The clients permute the inputs of layer n + 1 accordingly, freeze the matched
layers and train the rest. The last layer, whose rows are classes, is averaged class by class. Each architecture is
matched over its own clients; architectures share nothing.
"""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.federation import Federation, QuorumNotMet, Replies, per_client
from ..core.settings import NonNegativeInt, Positive, PositiveInt, settings
from ..core.task import Client, task
from ..core.tensors import Shapes, Weights, weights_of
from ..core.wire import sized
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.aggregate import by_row
from ..train.chain import Layer, chain, resized
from ..train.fitting import Local, fit
from .steps.training import all_of_one, label_counts, models_of, usable_counts

# ---- matching neurons --------------------------------------------------------------------------------

# The neurons of a hidden layer can be permuted, so averaging two networks position by position mixes unrelated neurons.
# FedMA (Wang et al., ICLR 2020) matches them first: it solves an assignment problem (Hungarian algorithm, from scipy)
# between the neurons of a client and those of all clients so far. A neuron is its incoming weights and its bias, in
# float64. `places[j]` is the position of a client's neuron j in the global layer.


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
    from scipy.optimize import linear_sum_assignment  # from the extra `matching`

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
        merged[name] = (sums / by_row(total, sums)).to(t.dtype)
    return merged


def merge_classes(layers: Sequence[Weights], shares: Tensor) -> Weights:
    """The last layer, whose rows are classes: row c is the mean weighted by shares[k, c]."""
    total = shares.sum(0)
    merged = {}
    for name, t in layers[0].items():
        sums = torch.zeros_like(t, dtype=torch.float64)
        for layer, share in zip(layers, shares, strict=True):
            sums += layer[name].double() * by_row(share, sums)
        merged[name] = (sums / by_row(total, sums)).to(t.dtype)
    return merged


def move_columns(weight: Tensor, places: Tensor, width: int, block: int) -> Tensor:
    """The next layer's weight with its inputs moved to their places among `width`; missing inputs are 0.

    Every input has `block` columns: the pixels of a channel if a Linear layer follows a convolution.
    """
    out, rest = len(weight), weight.shape[2:]
    moved = weight.new_zeros(out, width, block, *rest)
    moved[:, places] = weight.reshape(out, len(places), block, *rest)
    return moved.reshape(out, width * block, *rest)


# ---- the method ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """A layer of a client's model. With the last layer, the client's samples of each label if requested."""

    layer: Weights = sized("shapes")
    counts: Tensor | None = sized("classes", dtype=torch.int64, fill=all_of_one)


@task("first_layer")
def first_layer(
    client: Client,
    weights: Weights,
    layers: list[Layer],
    shapes: Shapes,
    local: Local,
    own_start: bool,
    classes: int | None,
) -> Sent:
    """Begin a cycle: train all layers of the received model (with `own_start`, re-initialised), send the first."""
    model = resized(client.template, weights)
    if own_start:
        redraw(model, client.rng("own start"))
    return _train_and_send(client, model, layers, 0, local, classes)


@task("next_layer")
def next_layer(
    client: Client,
    matched: Weights,
    places: Tensor,
    layers: list[Layer],
    at: int,
    shapes: Shapes,
    local: Local,
    classes: int | None,
) -> Sent:
    """Load the matched layer before layer `at` and freeze it; train the layers after it, send the first of them."""
    own, following = client.state["cycle"], layers[at]
    width = len(matched[layers[at - 1].weight])
    columns = move_columns(own[following.weight], places.long(), width, following.block)  # W_j,n+1 <- Pi_j W_j,n+1
    model = resized(client.template, own | matched | {following.weight: columns})
    return _train_and_send(client, model, layers, at, local, classes)


def _train_and_send(
    client: Client, model: nn.Module, layers: list[Layer], at: int, local: Local, classes: int | None
) -> Sent:
    for layer in layers[:at]:
        model.get_submodule(layer.name).requires_grad_(False)
    fit(model, client.train.inputs, client.train.labels, local, client.seed)  # train W_j,n+1 ... with W_n frozen
    weights = weights_of(model)
    if at == len(layers) - 1:
        client.state.pop("cycle", None)
    else:
        client.state["cycle"] = weights
    return Sent(
        {name: weights[name] for name in layers[at].own(weights)}, None if classes is None else label_counts(client)
    )


@register("fedma")
@dataclass(frozen=True)
class FedMA(Method):
    """Matched averaging, one layer after the other."""

    local: Local = field(default_factory=Local)  # once before each layer is sent
    matching: Literal["fixed_width", "bbp", "none"] = "fixed_width"  # bbp: the paper's; layers may become wider
    average: Literal["uniform", "weighted"] = "uniform"  # of matched neurons: equal weights, or by number of examples
    class_weighted: bool = True  # weigh the last layer by label counts, which the clients report
    own_start: bool = False  # in the first round every client starts from its own random weights
    bbp: BBP = field(default_factory=BBP)

    about: ClassVar[About] = About(
        title="FedMA",
        paper="Wang et al., ICLR 2020",
        wire="model down; then for each layer: the layer up, the matched layer and a permutation down",
        state="nothing",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]
        chains: dict[str, list[Layer]]  # the layers of each architecture, as read at the start

    def traits(self) -> Traits:
        wider = "neurons that match no other make layers wider (matching = 'bbp')"
        return Traits(split="chain", bytes_vary=wider if self.matching == "bbp" else "")

    def fits(self, server: Server) -> Iterator[str]:
        if self.matching != "none" and importlib.util.find_spec("scipy") is None:
            yield f"method.matching = {self.matching!r} needs scipy: pip install 'solera[matching]'"

    def init(self, fed: Federation, server: Server) -> State:
        x = {A: server.init(A) for A in server.architectures}
        return self.State(x, {A: chain(server.template(A)) for A in x})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x, S, finished = dict(state.weights), fed.sample(), 0
        for A in sorted({fed.architecture(k) for k in S}):
            members = [k for k in S if fed.architecture(k) == A]
            x[A], there = self.cycle(x[A], state.chains[A], members, fed, server)
            finished += len(there)
        if finished < fed.config.min_replies:
            raise QuorumNotMet(f"round {fed.round}: {finished} of {len(S)} clients finished the cycle")
        return self.State(x, state.chains)

    def cycle(
        self, x: Weights, layers: list[Layer], S: list[str], fed: Federation, server: Server
    ) -> tuple[Weights, list[str]]:
        """Algorithm 1 with clients S: the new model, and the clients that finished. If none, the model is unchanged."""
        how: dict[str, Any] = {"layers": layers, "local": self.local}
        how["min_replies"] = 0  # the quorum is checked at the end of the cycle
        start: dict[str, Any] = {"weights": x, "own_start": self.own_start and fed.round == 0}
        replies = fed.map(first_layer, S, **start, **self.asked(0, layers, x, server), **how)
        new = dict(x)
        for n, layer in enumerate(layers):
            before = {name: new[name] for name in layer.own(new)}
            W = {k: reply.layer for k, reply in replies.items()}
            if layer is layers[-1]:
                shares = self.shares(W, replies, fed, server)
                if not shares:
                    break
                mean = merge_classes([W[k] for k in shares], torch.stack(list(shares.values())))
                return new | mean, list(shares)  # W_N = sum_k sum_j p_jk W_jk,N
            if not W:
                break
            a = [self.share(k, fed) for k in W]
            Pi = self.match(list(W.values()), a, before, fed.seed("match", layer.name))  # {Pi_j} = BBP-MAP({W_j,n})
            matched = merge_neurons(list(W.values()), Pi, a)  # W_n = 1/J sum_j W_j,n Pi_j^T
            new |= matched | self.widened(x, layers[n + 1], len(matched[layer.weight]))
            places = dict(zip(W, (here.int() for here in Pi), strict=True))
            sent: dict[str, Any] = {"matched": matched, "places": per_client(places.__getitem__), "at": n + 1}
            replies = fed.map(next_layer, list(W), **sent, **self.asked(n + 1, layers, new, server), **how)
        return x, []

    def asked(self, n: int, layers: list[Layer], x: Weights, server: Server) -> dict[str, Any]:
        """The shapes of the tensors of layer n, and the number of classes if clients report label counts."""
        last = self.class_weighted and n == len(layers) - 1
        shapes = {name: list(x[name].shape) for name in layers[n].own(x)}
        return {"shapes": shapes, "classes": server.num_classes if last else None}

    def share(self, k: str, fed: Federation) -> float:
        """The weight of client k in a mean of neurons."""
        return fed.copies.get(k, 1) * (fed.num_examples(k) if self.average == "weighted" else 1.0)

    def match(self, W: list[Weights], a: list[float], before: Weights, seed: int) -> list[Tensor]:
        """The global position of each client's neurons. `before`, the layer that was sent, fixes the order."""
        neurons, reference = [neurons_of(layer) for layer in W], neurons_of(before)
        if self.matching == "none":
            return [torch.arange(len(w)) for w in neurons]
        if self.matching == "bbp":
            return match_bbp(neurons, reference, self.bbp, torch.Generator().manual_seed(seed))
        return match_fixed_width(neurons, a, reference)

    @staticmethod
    def widened(x: Weights, layer: Layer, inputs: int) -> Weights:
        """The initial weight of a layer after the layer before it has grown to this many neurons."""
        old = x[layer.weight]
        return {layer.weight: move_columns(old, torch.arange(old.shape[1] // layer.block), inputs, layer.block)}

    def shares(self, W: dict[str, Weights], replies: Replies, fed: Federation, server: Server) -> dict[str, Tensor]:
        """The weight of each client for each class. A class that no client has is averaged like neurons."""
        plain = {k: torch.full((server.num_classes,), self.share(k, fed), dtype=torch.float64) for k in W}
        if not self.class_weighted:
            return plain
        counts = usable_counts(replies, {}, fed, server)
        held = {k: c.double() * fed.copies.get(k, 1) for k, c in counts.items()}
        missing = sum(held.values(), torch.zeros(server.num_classes)) == 0
        return {k: torch.where(missing, plain[k], held[k]) for k in held}

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)


def redraw(model: nn.Module, rng: torch.Generator) -> None:
    """New random weights for every convolution and Linear layer: He's normal initialisation, biases zero."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=rng)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
