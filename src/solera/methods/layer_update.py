"""The client's half of FedMA (Wang et al., ICLR 2020, Algorithm 1): train, send one layer, take over the matched one.

A client's model stays with it, under "cycle" in its state, from the first layer of a cycle to the last.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from ..parts.chain import Layer, redraw, resized
from ..parts.local import Local, fit, weights_of
from ..parts.matching import move_columns
from ..task import Client, task
from ..wire import Weights
from .label_counts import label_counts


@dataclass(frozen=True)
class Sent:
    """A layer of a client's model; with the last one, where asked for, the client's samples of each label."""

    layer: Weights
    counts: Tensor | None

    def __post_init__(self) -> None:
        if {t.ndim for t in self.layer.values()} - {1, 2, 4} or len({len(t) for t in self.layer.values()}) != 1:
            raise ValueError("a layer is a weight and perhaps a bias, with a row for each neuron")


@task("first_layer")
def first_layer(
    client: Client, weights: Weights, layers: list[Layer], local: Local, own_start: bool, count: bool
) -> Sent:
    """Begin a cycle: train all layers of the received model (with `own_start`, redrawn), send the first."""
    model = resized(client.template, weights)
    if own_start:
        redraw(model, client.rng("own start"))
    return _train_and_send(client, model, layers, 0, local, count)


@task("next_layer")
def next_layer(
    client: Client, matched: Weights, places: Tensor, layers: list[Layer], at: int, local: Local, count: bool
) -> Sent:
    """Take over the matched layer before number `at` and freeze it; train the layers after it, send the first."""
    own, following = client.state["cycle"], layers[at]
    width = len(matched[layers[at - 1].weight])
    columns = move_columns(own[following.weight], places.long(), width, following.block)  # W_j,n+1 <- Pi_j W_j,n+1
    model = resized(client.template, own | matched | {following.weight: columns})
    return _train_and_send(client, model, layers, at, local, count)


def _train_and_send(
    client: Client, model: nn.Module, layers: list[Layer], at: int, local: Local, count: bool
) -> Sent:  # fmt: skip
    for layer in layers[:at]:
        model.get_submodule(layer.name).requires_grad_(False)
    fit(model, client.train.inputs, client.train.labels, local, client.seed)  # train W_j,n+1 ... with W_n frozen
    weights, last = weights_of(model), at == len(layers) - 1
    if last:
        client.state.pop("cycle", None)
    else:
        client.state["cycle"] = weights
    return Sent(
        {name: weights[name] for name in layers[at].own(weights)}, label_counts(client) if last and count else None
    )
