"""Personal models that the server keeps and sends out: the clients' half, for several methods."""

from ..parts.local import Score
from ..task import Client, task
from ..wire import Weights
from .baselines import scored


@task("score_received")
def score_received(client: Client, weights: Weights | None) -> Score:
    """The received model on the client's own test samples; None for a client that was never asked: nothing counts."""
    return scored(client, weights)
