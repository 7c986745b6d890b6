"""BatchNorm: which statistics are used, and when they are updated.

The same policy everywhere: a model that predicts (a teacher, an evaluation) uses its running statistics and never
updates them. A model that trains (a client, a student) uses the statistics of the batch and updates its running
statistics, unless they are frozen. Averages of models include the running statistics.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..core.tensors import Inputs, batches

BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batchnorms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Every BatchNorm layer of `model`."""
    return [m for m in model.modules() if isinstance(m, BATCHNORM)]


def has_batchnorm(model: nn.Module) -> bool:
    """True if the output of `model` in training depends on the whole batch."""
    return bool(batchnorms(model))


def parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters in the weights of `model`; every other name there is a buffer."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def train_mode(model: nn.Module, frozen: bool = False) -> None:
    """Put `model` in training mode; with `frozen`, its BatchNorm layers use their running statistics."""
    model.train()
    if frozen:
        for layer in batchnorms(model):
            layer.eval()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every layer returns to its previous mode.

    Layer by layer, because `model.train()` would also put frozen BatchNorm layers in training mode.
    """
    before = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, training in before:
            m.training = training


def reestimate(model: nn.Module, inputs: Inputs, batch: int = 512) -> None:
    """Replace the running statistics of `model` by their plain average over one pass of `inputs`.

    For weights that were not trained (sampled from a distribution, averaged), which have no valid statistics. Every
    batch has equal weight; a last batch of one sample is skipped (it has no variance).
    """
    layers = batchnorms(model)
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    modes = [(m, m.training) for m in model.modules()]
    model.eval()  # dropout stays off: only the BatchNorm layers are in training mode
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # None: torch computes a cumulative average
        layer.train()
    try:
        with torch.no_grad():
            for x in batches(inputs, batch):
                if len(x) > 1:
                    model(x)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for m, training in modes:
            m.training = training
