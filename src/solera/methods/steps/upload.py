"""Low-bit FedDF (Lin et al., NeurIPS 2020, Table 4): clients train rounded weights and send them packed.

Precision may differ between architectures (`models.options.NAME.bits`, Algorithm 3): all clients still answer in one
exchange, and those with full precision send their weights as they are.

What goes up is bits = q n_w + 32 (n_scale + n_rest): q for each of the n_w rounded weights, a float for each filter
of theirs, and all else (biases, normalisation layers, buffers) as it is. The way down is full precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ...core.federation import Federation, Replies, per_client
from ...core.task import Client, task
from ...core.tensors import Weights, beside, weights_of
from ...core.wire import like, sized
from ...scenario.server import Server
from ...train.fitting import Local
from ...train.lowbit import (
    OFF,
    LowBit,
    Packing,
    Sizes,
    coarse_names,
    fit_coarse,
    pack,
    packed_sizes,
    round_activations,
    unpack,
)
from ...train.objectives import proximal
from ...train.teachers import Build
from .training import Update


@dataclass(frozen=True)
class PackedUpdate:
    """Parameters and buffers after local training; see parts.lowbit.Packing."""

    codes: Weights = sized("sizes.codes", dtype=torch.uint8)
    scales: Weights = sized("sizes.scales")
    rest: Weights = like("weights", only="sizes.rest")


@task("lowbit_update")
def lowbit_update(
    client: Client, weights: Weights, local: Local, mu: float, quantise: LowBit, sizes: Sizes
) -> PackedUpdate:
    """As `local_update`, with weights of a few bits: Q(w) is what is trained and what is sent."""
    model = client.model(weights)
    around = partial(proximal, mu, beside(model, weights))
    fit_coarse(model, client.train.inputs, client.train.labels, local, client.seed, quantise, around)
    return PackedUpdate(*pack(weights_of(model), coarse_names(model, quantise), quantise.bits))


def precision_of(A: str, quantise: LowBit, server: Server) -> LowBit:
    """The precision of architecture A: that of all (`quantise`), or its own (`models.options`)."""
    own = server.precision.get(A, {})
    return replace(
        quantise, bits=own.get("bits", quantise.bits), activations=own.get("activations", quantise.activations)
    )


def is_full(quantise: LowBit, server: Server) -> bool:
    """Whether no architecture rounds anything."""
    own = [precision_of(A, quantise, server) for A in server.architectures]
    return all((cfg.bits, cfg.activations) == (OFF, OFF) for cfg in own)


def as_clients_answer(quantise: LowBit, server: Server) -> Build:
    """Models that answer as the clients' models do: with rounded activations, where their architecture has them."""

    def build(A: str, weights: Weights) -> nn.Module:
        model = server.model(A, weights)
        round_activations(model, precision_of(A, quantise, server))
        return model

    return build


def lowbit_problems(name: str, quantise: LowBit, server: Server) -> Iterator[str]:
    """Settings of a rounding that nobody does."""
    if is_full(quantise, server) and quantise != LowBit():
        yield (
            f"{name}: quantise.bits = {OFF}: this rounds no weight; set bits from 1 to 8, for all or in "
            "models.options.NAME, or leave out the other settings"
        )


def map_lowbit(
    S: list[str], M: dict[str, Weights], local: Local, mu: float, quantise: LowBit, fed: Federation, server: Server
) -> Replies:
    """Clients S train the model of their architecture with weights of a few bits: what they send, as numbers."""
    cfg = {A: precision_of(A, quantise, server) for A in M}
    packed = {A: packed_sizes(w, coarse_names(server.template(A), cfg[A]), cfg[A].bits) for A, w in M.items()}
    sent, sizes = per_client(lambda k: M[fed.architecture(k)]), per_client(lambda k: packed[fed.architecture(k)])
    rounding = per_client(lambda k: cfg[fed.architecture(k)])
    bits = fed.map(lowbit_update, S, weights=sent, local=local, mu=mu, quantise=rounding, sizes=sizes)
    return unpacked(bits, M, quantise, fed, server)


def unpacked(replies: Replies, M: dict[str, Weights], quantise: LowBit, fed: Federation, server: Server) -> Replies:
    """The uploads with numbers in place of bits; whoever sent levels that there are not is rejected."""
    x = {}
    for k, reply in list(replies.items()):
        A = fed.architecture(k)
        cfg = precision_of(A, quantise, server)
        names = coarse_names(server.template(A), cfg)
        try:
            packing = Packing(reply.codes, reply.scales, reply.rest)
            x[k] = Update(unpack(packing, M[A], names, cfg.bits))
        except ValueError as e:
            fed.reject(replies, k, str(e))
    return replies.read_as(x)
