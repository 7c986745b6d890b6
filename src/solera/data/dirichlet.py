"""The partitions that the literature calls "Dirichlet with parameter alpha", and their common functions.

Each function returns the owner (client number) of every sample.

- `client_owners`: Hsu, Qi, Brown 2019; the definition in FedDF's appendix C.2 (Lin et al. 2020), and FedEED's.
- `equal_owners`: what FedDF's authors' code does: it draws as `block`, joins the lists and cuts them into equal parts.
- `block_owners`: the same draw without the last step.
- `class_owners`: Yurochkin et al. 2019.
"""

from typing import NoReturn

import numpy as np

from ..core.errors import ConfigError

BLOCK = 10  # clients in a block
MAX_REDRAWS = 10_000  # of a block, or of the whole `class` variant (fewer if a single draw is large)
REDRAW_BUDGET = 50_000_000  # limit of random numbers for the redraws of the `class` variant


def block_owners(labels: np.ndarray, classes: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Blocks of ten clients, each with its part of a shuffle, divided by class inside the block.

    A client that already has its fair share (block samples / block clients) gets nothing of later classes; the
    class that fills it may bring it far above (twice the fair share is common at alpha = 0.1). A block is redrawn until
    its smallest client has at least half the fair share.
    """
    total, blocks, whole = len(labels), -(-clients // BLOCK), clients // BLOCK
    order = rng.permutation(total)
    ends = np.minimum(np.arange(blocks + 1) * BLOCK, clients) * total // clients
    cells = np.repeat(np.arange(blocks), np.diff(ends)) * classes + labels[order]
    counts = np.bincount(cells, minlength=blocks * classes).reshape(blocks, classes)
    pieces = np.zeros((blocks, classes, BLOCK), np.int64)
    if whole:
        pieces[:whole] = _divide_blocks(counts[:whole], BLOCK, alpha, rng)
    if whole < blocks:
        rest = clients - whole * BLOCK
        pieces[whole:, :, :rest] = _divide_blocks(counts[whole:], rest, alpha, rng)
    holders = np.broadcast_to(np.arange(blocks * BLOCK).reshape(blocks, 1, BLOCK), pieces.shape)
    owners = np.empty(total, np.int64)
    owners[order[np.argsort(cells, kind="stable")]] = np.repeat(holders.ravel(), pieces.ravel())
    return owners


def equal_owners(labels: np.ndarray, classes: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """The `block` division, its lists joined client after client and cut into parts whose sizes differ by one at most.

    Within a client's list samples are in the order of their classes, at random inside a class: so where a list is cut,
    its last classes go to the next client.
    """
    total, owners = len(labels), block_owners(labels, classes, clients, alpha, rng)
    joined = np.lexsort((rng.random(total), labels, owners))
    equal = np.empty(total, np.int64)
    equal[joined] = np.repeat(np.arange(clients), np.diff(np.arange(clients + 1) * total // clients))
    return equal


def class_owners(
    labels: np.ndarray, classes: int, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Every class is divided among all clients by its own draw. All are redrawn until each client has `min_size`."""
    counts = np.bincount(labels, minlength=classes)
    redraws = max(10, min(MAX_REDRAWS, REDRAW_BUDGET // (classes * clients)))
    for _ in range(redraws):
        pieces = _cut_by_shares(dirichlet(np.full((classes, clients), alpha), rng), counts)
        if pieces.sum(axis=0).min() >= min_size:
            return _owners_of(labels, pieces, rng)
    _give_up("class", alpha, clients, redraws, f"partition.min_size = {min_size} samples")


def client_owners(labels: np.ndarray, classes: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Each client in turn draws its class distribution q ~ Dir(alpha * p) and takes n/K samples according to it.

    p is the class distribution of the whole set. A class without samples left is removed from q, which is renormalised.
    """
    left = np.bincount(labels, minlength=classes)
    prior = np.where(left > 0, left / len(labels), 1.0)  # an absent class is never used below
    ends = np.arange(clients + 1) * len(labels) // clients
    pieces = np.zeros((classes, clients), np.int64)
    for k in range(clients):
        mix = _log_gamma(alpha * prior, rng)
        # Draws from an empty class are redrawn among the others: this is the renormalised q.
        while missing := ends[k + 1] - ends[k] - pieces[:, k].sum():
            got = np.minimum(rng.multinomial(missing, _shares(mix, left > 0)), left)
            pieces[:, k] += got
            left = left - got
    return _owners_of(labels, pieces, rng)


def dirichlet(alpha: np.ndarray, rng: np.random.Generator, allowed: np.ndarray | None = None) -> np.ndarray:
    """Dirichlet draws along the last axis, restricted to the `allowed` places."""
    return _shares(_log_gamma(alpha, rng), allowed)


def shuffled_by_group(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions sorted by group, in random order inside each group."""
    shuffled = rng.permutation(len(groups))
    return shuffled[np.argsort(groups[shuffled], kind="stable")]


def _log_gamma(alpha: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Logarithms of gamma variates, by log G(a) = log G(a+1) + log(U)/a.

    For small alpha the variates themselves underflow to zero, and their ratios would be 0/0.
    """
    alpha = np.maximum(alpha, 1e-12)  # for smaller values one share is 1 anyway, and the logarithms would overflow
    return np.log(rng.standard_gamma(alpha + 1)) + np.log1p(-rng.random(alpha.shape)) / alpha


def _shares(log_weights: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
    """Weights given by their logarithms, normalised over the `allowed` places of the last axis."""
    if allowed is not None:
        log_weights = np.where(allowed, log_weights, -np.inf)
    weights = np.exp(log_weights - log_weights.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _cut_by_shares(shares: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Integers [..., K] that add up to `counts`: cut at the cumulative shares, rounded down."""
    cumulated = np.cumsum(shares, axis=-1)
    # The last sum is 1 only up to rounding. Dividing by it gives exactly 0 samples to a last share of 0.
    ends = np.floor(cumulated / cumulated[..., -1:] * counts[..., None]).astype(np.int64)
    return np.diff(ends, axis=-1, prepend=0)


def _divide_blocks(counts: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """The number of samples of each class for each client of each block: [B, classes] -> [B, classes, clients].

    All blocks are drawn at once. Those with too small a client are redrawn, several tries at a time; the first valid
    try counts.
    """
    pieces = np.empty((*counts.shape, clients), np.int64)
    fair = counts.sum(axis=1) / clients
    waiting, drawn, tries = np.arange(len(counts)), 0, 1
    while len(waiting):
        if drawn >= MAX_REDRAWS:
            bound = f"half of the fair share of {fair[waiting[0]]:g} samples"
            _give_up("block", alpha, clients, drawn, bound)
        rows = np.repeat(waiting, tries)
        tried = _divide_once(counts[rows], fair[rows], clients, alpha, rng)
        good = (tried.sum(axis=1).min(axis=1) >= 0.5 * fair[rows]).reshape(len(waiting), tries)
        done = good.any(axis=1)
        first = np.arange(len(waiting)) * tries + good.argmax(axis=1)
        pieces[waiting[done]] = tried[first[done]]
        waiting, drawn = waiting[~done], drawn + tries
        tries = max(1, min(2 * tries, 1024 // max(len(waiting), 1)))
    return pieces


def _divide_once(
    counts: np.ndarray, fair: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    held = np.zeros((len(counts), clients), np.int64)
    pieces = np.empty((*counts.shape, clients), np.int64)
    for c in range(counts.shape[1]):
        allowed = held < fair[:, None]
        allowed |= ~allowed.any(axis=1, keepdims=True)  # all are full: no samples are left, so the share is irrelevant
        pieces[:, c] = _cut_by_shares(dirichlet(np.full(held.shape, alpha), rng, allowed), counts[:, c])
        held += pieces[:, c]
    return pieces


def _owners_of(labels: np.ndarray, pieces: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Assign shuffled samples: pieces[c, k] of class c to client k."""
    classes, clients = pieces.shape
    owners = np.empty(len(labels), np.int64)
    owners[shuffled_by_group(labels, rng)] = np.repeat(np.tile(np.arange(clients), classes), pieces.ravel())
    return owners


def _give_up(variant: str, alpha: float, clients: int, redraws: int, bound: str) -> NoReturn:
    raise ConfigError(
        f"partition.alpha = {alpha} (variant {variant}): {redraws} redraws never gave each of {clients} clients "
        f"{bound}; increase alpha, choose fewer clients, or choose another variant or kind"
    )
