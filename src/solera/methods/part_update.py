"""The client's half of HeteroFL (Diao et al., ICLR 2021): train a part of the model, give statistics of a part.

Which part it is shows in the shapes of what was received.
"""

from dataclasses import dataclass

from torch import Tensor

from ..parts.chain import resized
from ..parts.local import Local, fit, weights_of
from ..parts.norms import batchnorms, reestimate
from ..parts.objectives import cross_entropy
from ..parts.subnetwork import by_row, masked_cross_entropy, scale_in_training
from ..task import Client, task
from ..wire import Weights, like
from .label_counts import label_counts


@dataclass(frozen=True)
class PartUpdate:
    """A part of the model after local training; with masking, also which classes the client has (as 0 and 1)."""

    weights: Weights = like("weights")
    held: Tensor = like("classes")

    def __post_init__(self) -> None:
        if bool(((self.held < 0) | (self.held > 1)).any()):
            raise ValueError("which classes a client has is said by numbers from 0 to 1")


@dataclass(frozen=True)
class PartStatistics:
    """The running statistics of a part of the model on a client's data."""

    statistics: Weights = like("statistics")


@task("train_part")
def train_part(
    client: Client,
    weights: Weights,
    classes: Tensor,  # a place for each class; none: no masking
    rows: list[str],  # the tensors with a row for each class
    local: Local,
    rate: float,  # that activations are divided by
    static: bool,
) -> PartUpdate:
    """Train the received part; rows of classes that the client lacks go back as zeros, if masking is asked for."""
    data = client.train
    model = resized(client.template, weights, buffers=not static)
    for layer in batchnorms(model):
        layer.track_running_stats = not static
    scale_in_training(model, client.template, rate)
    held = label_counts(client)[: len(classes)] > 0
    objective = masked_cross_entropy(held) if len(held) else cross_entropy
    fit(model, data.inputs, data.labels, local, client.seed, objective)
    trained = {name: t for name, t in weights_of(model).items() if name in weights}
    if len(held):
        trained |= {name: trained[name] * by_row(held, trained[name]) for name in rows}
    return PartUpdate(trained, held.to(classes.dtype))


@task("part_statistics")
def part_statistics(client: Client, weights: Weights, statistics: Weights) -> PartStatistics:
    """The statistics of BatchNorm after one pass of the client's data through the received part."""
    model = resized(client.template, weights | statistics)
    reestimate(model, client.train.inputs)
    return PartStatistics({name: t for name, t in weights_of(model).items() if name in statistics})
