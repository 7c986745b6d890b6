"""Groups: which clients train which global model in a round. Depends only on the run's seed, not on the training."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from ...core.errors import ConfigError
from ...core.federation import Federation
from ...core.randomness import seed_from
from ...core.tensors import Weights
from ...scenario.server import Server

MIN_GROUP = 2  # the sum over a group of one client is that client's model
Schedule = Literal["random", "strata", "fixed"]
Group = tuple[str, int]  # (architecture, k): a global model and the clients that train it
Models = dict[Group, Weights]


def flat(nested: dict[str, list[Weights]]) -> Models:
    """Models by group, from a state's lists by architecture."""
    return {(A, k): x for A, own in nested.items() for k, x in enumerate(own)}


def nest(models: Models) -> dict[str, list[Weights]]:
    """The inverse of `flat`."""
    nested: dict[str, list[Weights]] = {}
    for g in sorted(models):
        nested.setdefault(g[0], []).append(models[g])
    return nested


class Seeds:
    """The seeds of round t, also when its work is done later: those of `Federation.seed` in that round."""

    def __init__(self, run_seed: int, t: int):
        self.run_seed, self.t = run_seed, t

    def __call__(self, *key: Any) -> int:
        return seed_from(self.run_seed, self.t, *key)


def group_sizes(active: int, shares: Sequence[int]) -> list[int]:
    """The sizes of the groups of `active` clients, in proportion to their shares; every client gets a group.

    With equal shares, sizes differ by at most one, and the first groups (with the designated one) are the larger ones:
    8 clients in 3 groups are 3, 3, 2. Shares that sum to `active` are the sizes.
    """
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


def members_of(fed: Federation, A: str) -> torch.Tensor:
    """Positions in the roster of the clients of architecture A that have examples."""
    roster = fed.clients
    if A not in roster.architectures:
        return torch.empty(0, dtype=torch.int64)
    return ((roster.architecture_of == roster.architectures.index(A)) & (roster.sizes > 0)).nonzero().flatten()


def split(shares: Sequence[int], schedule: Schedule, fed: Federation, server: Server) -> dict[str, Group]:
    """The cohort of this round, in K groups for each architecture: client -> (architecture, k)."""
    S, K = fed.sample(), len(shares)
    group: dict[str, Group] = {}
    for A in server.architectures:
        S_A = [k for k in S if fed.architecture(k) == A]
        if schedule == "strata":
            found = _strata(S_A, K, A, fed)
        elif schedule == "fixed":  # appendix A.7: the i-th model always goes to the i-th client
            place = {int(i): n for n, i in enumerate(members_of(fed, A))}
            found = {k: place[fed.clients.index(k)] % K for k in S_A}
        else:
            order = torch.randperm(len(S_A), generator=torch.Generator().manual_seed(fed.seed("groups", A))).tolist()
            sizes = group_sizes(len(S_A), shares)
            numbers = [g for g, size in enumerate(sizes) for _ in range(size)]
            found = {S_A[i]: g for i, g in zip(order, numbers, strict=True)}
        empty = sorted(set(range(K)) - set(found.values()))
        if empty:
            why = f"{len(S_A)} active clients of {A!r} for {K} groups"
            server.event("groups_empty", architecture=A, groups=empty, reason=why)
        group |= {k: (A, g) for k, g in found.items()}
    return {k: group[k] for k in S if k in group}


def _strata(S: Sequence[str], K: int, A: str, fed: Federation) -> dict[str, int]:
    """Fed-ensemble's schedule: fixed strata of clients. In each age of K rounds a model trains on each stratum once."""

    def draw(n: int, *key: object) -> torch.Tensor:
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed_from(fed.run_seed, *key)))

    everyone = members_of(fed, A)
    stratum = torch.full((len(fed.clients),), -1)
    stratum[everyone[draw(len(everyone), "strata", A)]] = torch.arange(len(everyone)) % K
    age, r = divmod(fed.round, K)
    model_of = {s: k for k, s in enumerate(latin(draw(K, "age", A, age).tolist(), r))}
    return {k: model_of[int(stratum[fed.clients.index(k)])] for k in S}


def check_groups(
    shares: Sequence[int], no_single_groups: bool, designated: bool, fed: Federation, server: Server
) -> None:
    """Refuse more groups than clients, and groups that are too small for the settings."""
    K, fraction = len(shares), fed.config.fraction
    m = max(1, int(fraction * len(fed.clients) + 0.5))
    for A in server.architectures:
        active = min(m, len(members_of(fed, A)))
        where = f"{active} clients of {A!r} can be active in a round (federation.fraction = {fraction})"
        if active < K:
            raise ConfigError(f"method.K = {K}: only {where}; set method.K to at most {active}")
        if no_single_groups and min(group_sizes(active, shares)) < MIN_GROUP:
            raise ConfigError(
                f"method.no_single_groups = true: {where}, too few for {MIN_GROUP} in each of {K} groups; "
                "lower method.K"
            )
        if designated and K > 1 and (size := group_sizes(active, shares)[0]) < fed.config.min_replies:
            raise ConfigError(
                f"federation.min_replies = {fed.config.min_replies}: the designated group is a separate exchange with "
                f"{size} clients of {A!r} at most"
            )


def drop_small(group: dict[str, Group], server: Server) -> dict[str, Group]:
    """The groups of at least two clients."""
    members: dict[Group, list[str]] = {}
    for k, g in group.items():
        members.setdefault(g, []).append(k)
    for g, who in members.items():
        if len(who) < MIN_GROUP:
            server.event(
                "group_too_small",
                architecture=g[0],
                group=g[1],
                reason="method.no_single_groups: the mean of one client is its model",
            )
    return {k: g for k, g in group.items() if len(members[g]) >= MIN_GROUP}
