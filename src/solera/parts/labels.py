"""Soft labels: what clients say on average, about all samples of a label (FD) or about a public sample (DS-FL).

A table of labels has a row for each label: the mean class probabilities of its samples. A row of zeros says that
there are none: no probability vector sums to 0, so a table needs no list of its labels beside it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class LabelSums:
    """Class probabilities summed up by the label of the sample, in float64 and in the order they are added."""

    def __init__(self, classes: int):
        self.sums = torch.zeros(classes, classes, dtype=torch.float64)
        self.counts = torch.zeros(classes, dtype=torch.float64)

    def add(self, probs: Tensor, labels: Tensor) -> None:
        """Count the rows of `probs` in, each with its label."""
        self.sums.index_add_(0, labels, probs.double())
        self.counts.index_add_(0, labels, torch.ones(len(labels), dtype=torch.float64))

    def means(self) -> Tensor:
        """The table: the mean of each label, zeros for labels that were never seen."""
        return (self.sums / self.counts.clamp_min(1)[:, None]).float()


def others(total: Tensor, own: Tensor) -> Tensor:
    """The mean table of all but one, from the sum of all tables and that one's own.

    How many others hold a label need not be said: every row of theirs sums to 1, so dividing what is left by its sum
    takes the mean. Where nobody else holds the label nothing but rounding is left, and the row is 0.
    """
    left = (total.double() - own.double()).clamp_min(0)
    holders = left.sum(-1, keepdim=True)
    return torch.where(holders > 0.5, left / holders, 0.0).float()


def label_loss(logits: Tensor, labels: Tensor, table: Tensor, gamma: float) -> Tensor:
    """phi(F, y) + gamma phi(F, table_y), mean over the batch: phi is cross-entropy and F the softmax of the logits.

    A row of zeros adds nothing: a label of which others know nothing is learned from the samples alone.
    """
    own = F.cross_entropy(logits, labels)
    if gamma == 0:
        return own
    taught = table[labels].to(logits.dtype)
    return own - gamma * (taught * logits.log_softmax(-1)).sum(-1).mean()


def reduce_entropy(mean: Tensor, temperature: float) -> Tensor:
    """softmax(mean / T) of every row: DS-FL's entropy reduction aggregation, of a mean of the clients' answers.

    The first choice stays the first. Of probabilities a mean that is spread out gets sharper at T = 0.1, one that was
    certain gets a little softer: it becomes e^(1/T) : 1.
    """
    return (mean.double() / temperature).softmax(-1).to(mean.dtype)
