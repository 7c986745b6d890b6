"""The client's half of most methods: receive weights, train on your own data, send the weights back.

Algorithm 2 of FedDF (Lin et al., NeurIPS 2020), which is FedAvg's ClientUpdate (McMahan et al., AISTATS 2017).
"""

from dataclasses import dataclass

from ...core.task import Client, task
from ...core.tensors import Weights, beside, weights_of
from ...core.wire import like
from ...train.fitting import Local, fit
from ...train.objectives import proximal


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
