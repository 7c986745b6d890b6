"""Seeds and subsets: how the data package draws random numbers and chooses samples.

Every draw uses a generator that is seeded by an integer and the purpose of the draw. So two purposes never share a
stream, and no global generator is used.
"""

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.randomness import seed_from


def torch_rng(seed: int, *purpose: str) -> torch.Generator:
    """A separate torch generator for this seed and purpose."""
    return torch.Generator().manual_seed(seed_from(int(seed), *purpose))


def numpy_rng(seed: int, *purpose: str) -> np.random.Generator:
    """A separate numpy generator for this seed and purpose."""
    return np.random.default_rng(seed_from(int(seed), *purpose))


def largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    """Integers that add up to `total`, as close to proportional to `shares` as possible."""
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)
    rest = total - int(counts.sum())
    # Ties go to the lowest position, so the result does not depend on the sort.
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts


def rank_within(groups: np.ndarray) -> np.ndarray:
    """For each position, the number of earlier positions in the same group."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - starts[groups[order]]
    return ranks


def _pick(groups: np.ndarray, quotas: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A mask with `quotas[g]` samples of each group g, drawn at random."""
    order = rng.permutation(len(groups))
    chosen = np.zeros(len(groups), bool)
    shuffled = groups[order]
    chosen[order] = rank_within(shuffled) < quotas[shuffled]
    return chosen


def hold_out(labels: Tensor, count: int, seed: int, stratified: bool = True) -> tuple[Tensor, Tensor]:
    """Split sample indices into (kept, held out), both sorted, with exactly `count` held out.

    With `stratified`, each class gives samples in proportion to its size (rounded by largest remainder). Used for the
    server's validation set and for public data taken from the training data.
    """
    total = len(labels)
    if not 0 <= count < max(total, 1):
        raise ConfigError(
            f"cannot hold out {count} of {total} samples: at least one must be left; "
            f"choose a number between 0 and {max(total - 1, 0)}"
        )
    rng = numpy_rng(seed, "hold out")
    if stratified:
        groups = np.unique(labels.numpy(), return_inverse=True)[1]
        quotas = largest_remainder(np.bincount(groups).astype(float), count)
    else:
        groups, quotas = np.zeros(total, np.int64), np.array([count])
    held = torch.from_numpy(_pick(groups, quotas, rng))
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def balanced(labels: Tensor, count: int, seed: int) -> Tensor:
    """Sorted indices of `count` samples, with classes as equal in size as the data allow."""
    total = len(labels)
    if not 1 <= count <= total:
        raise ConfigError(f"cannot take {count} of {total} samples; choose a number between 1 and {total}")
    groups = np.unique(labels.numpy(), return_inverse=True)[1]
    sizes = np.bincount(groups)
    quotas = np.zeros_like(sizes)
    while (rest := count - int(quotas.sum())) > 0:
        unfilled = np.flatnonzero(quotas < sizes)
        if rest < len(unfilled):
            quotas[unfilled[:rest]] += 1
        else:
            quotas[unfilled] = np.minimum(sizes[unfilled], quotas[unfilled] + rest // len(unfilled))
    return torch.nonzero(torch.from_numpy(_pick(groups, quotas, numpy_rng(seed, "balanced")))).flatten()
