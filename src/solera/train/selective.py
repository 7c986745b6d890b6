"""Selective knowledge fusion (FedGEMS): the weights of clients for a public sample, and the loss that uses them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..place.placement import finest
from .teachers import entropy

SUREST = 1e-6  # smallest entropy: the weight of a certain client stays finite


def reliable_weights(probs: Tensor, labels: Tensor) -> Tensor:
    """The weight of each client for each sample, [clients, samples], from predictions [clients, samples, classes].

    softmax(1 / entropy) over the clients whose most likely class is the label; 0 for all others. A sample that no
    client gets right has only zeros.
    """
    probs = finest(probs)
    right = probs.argmax(-1) == labels
    score = (1 / entropy(probs).clamp_min(SUREST)).masked_fill(~right, -torch.inf)
    return score.softmax(0).masked_fill(~right, 0.0)  # a softmax over no client is NaN, and masked


def fused_logits(probs: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights_j l_j over clients, [samples, classes], with l_j = log probs_j.

    These are logits minus one constant per client and sample, which does not change the softmax of the sum if the
    weights of the sample sum to 1. Probabilities of 0 count as the smallest positive float.
    """
    logs = finest(probs.clamp_min(torch.finfo(probs.dtype).tiny)).log()
    return (finest(weights)[..., None] * logs).sum(0).to(probs.dtype)


def selective_loss(logits: Tensor, labels: Tensor, targets: Tensor, surprise: Tensor, share: Tensor) -> Tensor:
    """share CE(logits, labels) + (1 - share) KL(targets || softmax(logits)), mean over the batch.

    `surprise` is the entropy of `targets` and `share` the weight of cross-entropy, one number per sample each.
    """
    cross = F.cross_entropy(logits, labels, reduction="none")
    kl = logits.logsumexp(-1) - (targets * logits).sum(-1) - surprise
    return (share * cross + (1 - share) * kl).mean()
