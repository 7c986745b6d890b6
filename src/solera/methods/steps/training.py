"""The client's half of most methods: receive weights, train on your own data, send the weights back.

Algorithm 2 of FedDF (Lin et al., NeurIPS 2020), which is FedAvg's ClientUpdate (McMahan et al., AISTATS 2017).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.federation import Federation, Replies, per_client
from ...core.settings import Slot, settings
from ...core.task import Client, task
from ...core.tensors import Weights, beside, weights_of
from ...core.wire import like
from ...scenario.server import Server
from ...train.fitting import Local, fit
from ...train.objectives import proximal
from ...train.teachers import Build

Sent = Callable[[str], Weights]  # client -> the model it receives


def by_architecture(M: Mapping[str, Weights], fed: Federation) -> Sent:
    """Each client receives the model of its architecture."""
    return lambda k: M[fed.architecture(k)]


@dataclass(frozen=True)
class Update:
    """Parameters and buffers after local training."""

    weights: Weights = like("weights")


@task("local_update")
def local_update(client: Client, weights: Weights, local: Local, mu: float) -> Update:
    """Train a copy of the received model; with mu > 0, pulled back towards it: the loss + mu/2 ||w - received||^2.

    If the training diverges, `fit` raises: nothing is sent, and the client is dropped from this exchange.
    """
    model = client.model(weights)  # line 2
    loss = proximal(mu, beside(model, weights))
    fit(model, client.train.inputs, client.train.labels, local, client.seed, loss)  # lines 3-5
    return Update(weights_of(model))  # line 6


@settings
class Upload(Slot):
    """The clients' upload, and how their models predict on the server. Default: each client sends all its weights."""

    kind: str = field(default="whole", init=False)

    BESIDE: ClassVar = {"quantise": "method.upload.kind = 'low-bit'"}
    precision: ClassVar[Literal["full", "mixed"]] = "full"  # of the clients' weights

    def ask(self, x_0: Sent, S: list[str], local: Local, mu: float, fed: Federation, server: Server) -> Replies:
        """Clients k in S train the model x_0(k); replies with `weights`."""
        return fed.map(local_update, S, weights=per_client(x_0), local=local, mu=mu)

    def build(self, server: Server) -> Build:
        """The function that makes modules which predict like the clients' models."""
        return server.model
