"""Dividing the clients of a round among several global models."""

from collections.abc import Sequence


def group_sizes(active: int, shares: Sequence[int]) -> list[int]:
    """The sizes of the groups of `active` clients, in proportion to their shares; every client gets a group.

    With equal shares, sizes differ by at most one, and the first groups (with the designated one) are the larger ones:
    8 clients in 3 groups are 3, 3, 2. Shares that sum to `active` are the sizes.
    """
    if not shares or min(shares) < 1:
        raise ValueError(f"every group needs a share of at least 1: {list(shares)}")
    total = sum(shares)
    sizes = [active * s // total for s in shares]
    rest = [active * s % total for s in shares]
    for k in sorted(range(len(shares)), key=lambda k: (-rest[k], k))[: active - sum(sizes)]:
        sizes[k] += 1
    return sizes


def latin(permutation: Sequence[int], r: int) -> list[int]:
    """The stratum of clients on which each model trains in round r of an age: permutation[(k + r) mod Q].

    In the Q rounds of an age every model trains on every stratum once, and every round uses all strata.
    """
    Q = len(permutation)
    return [permutation[(k + r) % Q] for k in range(Q)]
