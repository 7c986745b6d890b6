"""The diversity of an ensemble's members: FedEED's argument for distilling into one designated model.

For members with class probabilities p_i(x), over all pairs and samples:

    disagreement   the share of samples on which the first choices of two members differ
    kl             KL(p_i || p_j), in nats, in both directions
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..place.placement import finest


class Diversity(NamedTuple):
    """The means over pairs."""

    disagreement: float
    kl: float
    pairs: int


def diversity(logits: Tensor, sets: Sequence[Sequence[int]]) -> Diversity | None:
    """Over the pairs within each set of members; None without a pair. logits [members, samples, classes]"""
    pairs = sorted({(i, j) for own in sets for i in own for j in own if i < j})
    if not pairs or logits.shape[1] == 0:
        return None
    log_p = finest(logits).log_softmax(-1)
    choice, N = log_p.argmax(-1), logits.shape[1]
    crossed = torch.einsum("inc,jnc->ij", log_p.exp(), log_p) / N  # mean over x of sum_c p_i log p_j
    one, two = torch.tensor(pairs).T
    differ = finest(choice[one] != choice[two]).mean().item()
    own = crossed.diagonal()
    kl = (own[one] - crossed[one, two] + own[two] - crossed[two, one]).mean().item() / 2
    return Diversity(differ, kl, len(pairs))
