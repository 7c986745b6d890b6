"""Personal models that the server keeps and sends out: the clients' half, for several methods."""

from ..parts.local import Local, Score, evaluate, fit, is_finite, weights_of
from ..parts.objectives import proximal
from ..task import Client, task
from ..wire import SoleraError, Weights
from .local_update import Update


@task("train_received")
def train_received(client: Client, weights: Weights, local: Local, mu: float) -> Update:
    """Train a copy of the received model, with mu > 0 pulled back towards it: the loss + mu/2 ||w - received||^2.

    A training that blows up is not sent: the server goes on with the client's last good model.
    """
    model = client.model(weights)
    done = fit(model, client.train.inputs, client.train.labels, local, client.seed, proximal(mu, weights))
    return Update(unless_blown_up(weights_of(model), done.stopped))


@task("score_received")
def score_received(client: Client, weights: Weights | None) -> Score:
    """The received model on the client's own test samples; a client that was never asked has the initial one."""
    return evaluate(client.model(weights), client.test.inputs, client.test.labels)


def unless_blown_up(weights: Weights, stopped: bool) -> Weights:
    """The weights after training, if they are of use; otherwise the client gives up its seat in this round."""
    if stopped or not is_finite(weights):
        raise SoleraError("local training blew up (a loss above 1,000 or not a number); the model before it is kept")
    return weights
