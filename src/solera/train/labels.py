"""Soft labels: the clients' mean predictions, for all samples of a label (FD) or for a public sample (DS-FL).

A table of labels has a row for each label: the mean class probabilities of its samples. A row of zeros means no
samples: no probability vector sums to 0, so a table needs no separate list of its labels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..place.placement import finest, finest_type


class LabelSums:
    """Sums of class probabilities by the label of the sample, in float64 and in the order they are added."""

    def __init__(self, classes: int):
        self.sums = torch.zeros(classes, classes, dtype=torch.float64)
        self.counts = torch.zeros(classes, dtype=torch.float64)

    def add(self, probs: Tensor, labels: Tensor) -> None:
        """Add the rows of `probs`, each with its label."""
        fine = finest_type(probs.device)
        self.sums = self.sums.to(probs.device, fine)  # stays where the first predictions were
        self.counts = self.counts.to(probs.device, fine)
        self.sums.index_add_(0, labels, probs.to(fine))
        self.counts.index_add_(0, labels, probs.new_ones(len(labels), dtype=fine))

    def means(self) -> Tensor:
        """The table: the mean for each label, zeros for labels without samples."""
        return (self.sums / self.counts.clamp_min(1)[:, None]).float()


def others(total: Tensor, own: Tensor) -> Tensor:
    """The mean table of all clients but one, from the sum of all tables and that client's own table.

    The number of other clients with a label is not needed: each of their rows sums to 1, so dividing the difference by
    its sum gives the mean. If no other client holds the label, only rounding errors remain, and the row is 0.
    """
    left = (finest(total) - finest(own)).clamp_min(0)
    holders = left.sum(-1, keepdim=True)
    return torch.where(holders > 0.5, left / holders, 0.0).float()


def label_loss(logits: Tensor, labels: Tensor, table: Tensor, gamma: float) -> Tensor:
    """phi(F, y) + gamma phi(F, table_y), mean over the batch: phi is cross-entropy and F the softmax of the logits.

    A row of zeros adds nothing: a label that no other client holds is learned from the samples alone.
    """
    own = F.cross_entropy(logits, labels)
    if gamma == 0:
        return own
    taught = table[labels].to(logits.dtype)
    return own - gamma * (taught * logits.log_softmax(-1)).sum(-1).mean()


def reduce_entropy(mean: Tensor, temperature: float) -> Tensor:
    """softmax(mean / T) of every row: DS-FL's entropy reduction aggregation, of a mean of the clients' predictions.

    The most likely class stays the same. For probabilities and T = 0.1, a flat mean gets sharper, and a certain one
    gets slightly softer: its ratio becomes e^(1/T) : 1.
    """
    return (finest(mean) / temperature).softmax(-1).to(mean.dtype)
