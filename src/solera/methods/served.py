"""Personal models that the server keeps and sends out: the clients' half, for several methods."""

from ..parts.local import Score, evaluate
from ..task import Client, task
from ..wire import Weights


@task("score_received")
def score_received(client: Client, weights: Weights | None) -> Score:
    """The received model on the client's own test samples; a client that was never asked has the initial one."""
    return evaluate(client.model(weights), client.test.inputs, client.test.labels)
