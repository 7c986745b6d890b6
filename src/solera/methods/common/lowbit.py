"""Low-bit FedDF (Lin et al., NeurIPS 2020, Table 4): clients train rounded weights and send them packed.

What goes up is bits = q n_w + 32 (n_scale + n_rest): q for each of the n_w rounded weights, a float for each filter
of theirs, and all else (biases, normalisation layers, buffers) as it is. The way down is full precision.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ...federation import Federation, Replies, per_client
from ...parts.local import Local
from ...parts.lowbit import LowBit, Packing, Sizes, coarse_names, fit_coarse, pack, packed_sizes, unpack
from ...parts.objectives import proximal
from ...server import Server
from ...task import Client, task
from ...tensors import Weights, beside, weights_of
from ...wire import like, sized
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


def map_lowbit(
    S: list[str], M: dict[str, Weights], local: Local, mu: float, quantise: LowBit, fed: Federation, server: Server
) -> Replies:
    """Clients S train the model of their architecture with weights of a few bits: what they send, as numbers."""
    packed = {A: packed_sizes(w, coarse_names(server.template(A), quantise), quantise.bits) for A, w in M.items()}
    sent, sizes = per_client(lambda k: M[fed.architecture(k)]), per_client(lambda k: packed[fed.architecture(k)])
    bits = fed.map(lowbit_update, S, weights=sent, local=local, mu=mu, quantise=quantise, sizes=sizes)
    return unpacked(bits, M, quantise, fed, server)


def unpacked(replies: Replies, M: dict[str, Weights], quantise: LowBit, fed: Federation, server: Server) -> Replies:
    """The uploads with numbers in place of bits; whoever sent levels that there are not is rejected."""
    x = {}
    for k, reply in list(replies.items()):
        A = fed.architecture(k)
        names = coarse_names(server.template(A), quantise)
        try:
            packing = Packing(reply.codes, reply.scales, reply.rest)
            x[k] = Update(unpack(packing, M[A], names, quantise.bits))
        except ValueError as e:
            fed.reject(replies, k, str(e))
    return replies.read_as(x)
