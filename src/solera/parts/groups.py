"""Dividing the clients of a round among several global models."""

from collections.abc import Sequence


def group_sizes(active: int, shares: Sequence[int]) -> list[int]:
    """How many of `active` clients each group gets, in proportion to its share; nobody is left out.

    Equal shares differ by one at most, the first groups (the designated one among them) never having fewer: 8 clients
    in 3 groups are 3, 3, 2. Shares that sum to `active` are met exactly.
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
    """The stratum of clients that each model trains on in round r of an age: permutation[(k + r) mod Q].

    Over the Q rounds of an age every model sees every stratum once, and in every round all strata are taken.
    """
    Q = len(permutation)
    return [permutation[(k + r) % Q] for k in range(Q)]
