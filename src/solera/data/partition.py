"""Partitions: the ways to divide a training set among clients.

A partition is the rows of the training set in client order, and the positions where each client begins: two tensors,
also for a million clients.

- `iid`: a shuffle cut into equal parts.
- `dirichlet`: skewed class distributions, in what the literature calls "Dirichlet with parameter alpha": `client`
  (Hsu, Qi, Brown 2019; FedDF's appendix C.2, and FedEED's), `equal` (the code of FedDF's authors), `block` (the same
  without its last step, which joins the lists and cuts them into equal parts), `class` (Yurochkin et al. 2019).
- `classes`: every client holds samples of exactly `classes_per_client` classes.
- `quantity`: class distribution as in the whole set, sizes drawn from a Dirichlet distribution.
- `user`: each client is a user and has the user's name.

With `fraction` every client keeps a random part of what the partition gives it: less local data, the same partition.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from ..core.errors import ConfigError, DataError
from ..core.randomness import seed_from
from ..core.settings import Hint, NonNegativeInt, PositiveInt, Problem, settings
from ..core.wire import SAFE_NAME, safe_name

# ---- Seeds and subsets: how the data package draws random numbers and chooses samples ------------


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


Kind = Literal["iid", "dirichlet", "classes", "quantity", "user"]
Variant = Literal["block", "equal", "class", "client"]
Alpha = Annotated[float, Ge(1e-9), Hint('small: skewed, large: equal; for equal shares use partition.kind = "iid"')]
CLIENTS = 20  # the default, if the number does not follow from the users


@dataclass(frozen=True)
class Partition:
    """Rows of the training set in client order, and the position where each client begins. The tensors are copied."""

    order: Tensor  # int64: rows of the whole training set, each at most once
    offsets: Tensor  # int64 [K+1]
    names: tuple[str, ...] | None = None  # of the clients, sorted; None: c00, c01, ...

    def __post_init__(self) -> None:
        for field in ("order", "offsets"):
            given = torch.as_tensor(getattr(self, field))
            if given.ndim != 1 or given.dtype.is_floating_point or given.dtype == torch.bool:
                raise ConfigError(
                    f"Partition: {field} must be a list of integers, not {given.dtype} {tuple(given.shape)}"
                )
            object.__setattr__(self, field, given.detach().to("cpu", torch.int64, copy=True))
        cuts, rows = self.offsets, len(self.order)
        if len(cuts) < 2 or int(cuts[0]) != 0 or int(cuts[-1]) != rows or bool((cuts.diff() < 0).any()):
            raise ConfigError(
                f"Partition: offsets {cuts[:5].tolist()}{'...' if len(cuts) > 5 else ''} must increase from 0 to the "
                f"number of rows, {rows}, with one more number than there are clients"
            )
        if self.names is None:
            return
        object.__setattr__(self, "names", tuple(safe_name(name, "client name") for name in self.names))
        if len(self.names) != len(self):
            raise ConfigError(f"Partition: {len(self.names)} names for {len(self)} clients")
        if list(self.names) != sorted(set(self.names)):
            raise ConfigError("Partition: names must differ and be sorted; Partition.of({name: rows}) sorts them")

    @classmethod
    def of(cls, rows: Mapping[str, Any]) -> "Partition":
        """A partition from the rows of the training set of each client, by client name."""
        named = {name: torch.as_tensor(rows[name], dtype=torch.int64).flatten() for name in sorted(rows)}
        sizes = torch.tensor([len(mine) for mine in named.values()], dtype=torch.int64)
        return cls(torch.cat([sizes[:0], *named.values()]), _offsets(sizes), tuple(named))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Partition({len(self)} clients, {len(self.order)} samples)"

    @property
    def sizes(self) -> Tensor:
        """The number of samples of each client."""
        return self.offsets.diff()

    def indices(self, k: int) -> Tensor:
        """The sorted rows of client k."""
        if not 0 <= k < len(self):
            raise IndexError(f"client {k}: there are {len(self)} clients, numbered from 0")
        return self.order[int(self.offsets[k]) : int(self.offsets[k + 1])].sort().values


@settings
class PartitionConfig:
    """The division of the training samples among clients."""

    kind: Kind = "dirichlet"
    clients: PositiveInt | None = None  # default: 20; kind "user": all users, or a random sample of so many
    alpha: Alpha = 0.1  # of the Dirichlet draws: small = skewed, large = equal
    variant: Variant = "block"
    classes_per_client: PositiveInt = 2
    fraction: Annotated[float, Gt(0), Le(1)] = 1.0  # share of its samples that a client keeps of the same partition
    min_size: PositiveInt = 1  # minimum of samples of a client; kind "user": users with fewer are left out
    min_per_class: NonNegativeInt = 0  # samples of every class that each client gets before the rest is divided

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.min_per_class and self.kind in ("classes", "user"):
            yield f"min_per_class = {self.min_per_class}: with kind = {self.kind!r} clients do not have all classes"
        if self.min_size > 1 and self.kind == "dirichlet" and self.variant != "class":
            yield (
                f"min_size = {self.min_size}: variant {self.variant!r} has sizes of its own and ignores it; "
                'use variant = "class", or leave min_size out'
            )

    def __post_init__(self) -> None:
        if self.clients is None and self.kind != "user":
            object.__setattr__(self, "clients", CLIENTS)


def partition(
    cfg: PartitionConfig,
    labels: Tensor,
    classes: int,
    seed: int,
    users: Tensor | None = None,
    user_names: Sequence[str] | None = None,
) -> Partition:
    """Divide the samples with these labels (and, for kind "user", of these users) among clients.

    `users` are numbers; `user_names[number]` is the name of a user. Without names, the number is the name.
    """
    _check(cfg, labels, classes)
    whole = _whole(cfg, labels, classes, seed, users, user_names)
    if cfg.fraction == 1:
        return whole
    kept, _ = _drawn_apart(whole, cfg.fraction, numpy_rng(seed, "fraction"), at_least=0)
    return replace(kept, names=whole.names)


def _whole(
    cfg: PartitionConfig,
    labels: Tensor,
    classes: int,
    seed: int,
    users: Tensor | None,
    user_names: Sequence[str] | None,
) -> Partition:
    """All samples, divided."""
    if cfg.min_per_class:
        return _with_every_class(cfg, labels, classes, seed)
    total, rng = len(labels), numpy_rng(seed, "partition")
    if cfg.kind == "user":
        return _by_user(cfg, users, user_names, total, rng)
    clients = cfg.clients
    assert clients is not None  # only kind "user" leaves it open
    if cfg.kind == "iid":
        cuts = torch.arange(clients + 1) * total // clients
        return Partition(torch.randperm(total, generator=torch_rng(seed, "partition")), cuts)
    if cfg.kind == "quantity":
        shares = dirichlet(np.full(clients, cfg.alpha), rng)
        sizes = torch.from_numpy(largest_remainder(shares, total - clients * cfg.min_size) + cfg.min_size)
        return Partition(torch.randperm(total, generator=torch_rng(seed, "partition")), _offsets(sizes))
    known = labels.numpy()
    if cfg.kind == "classes":
        owners = _by_classes(cfg, clients, known, rng)
    elif cfg.variant == "class":
        owners = class_owners(known, classes, clients, cfg.alpha, cfg.min_size, rng)
    else:
        draw = {"block": block_owners, "equal": equal_owners, "client": client_owners}[cfg.variant]
        owners = draw(known, classes, clients, cfg.alpha, rng)
    return _from_owners(owners, clients)


def _with_every_class(cfg: PartitionConfig, labels: Tensor, classes: int, seed: int) -> Partition:
    """Each client gets `min_per_class` samples of each class that there is; the rest is divided as without that."""
    clients, each = cfg.clients, cfg.min_per_class
    assert clients is not None
    known = labels.numpy()
    by_class = shuffled_by_group(known, numpy_rng(seed, "every class"))
    rank = rank_within(known[by_class])
    counts = np.bincount(known, minlength=classes)
    if len(short := np.flatnonzero((counts > 0) & (counts < clients * each))):
        raise ConfigError(
            f"partition.min_per_class = {each}: class {short[0]} has {counts[short[0]]} samples for {clients} clients; "
            "choose a smaller number, fewer clients, or more data"
        )
    owners = np.full(len(known), -1, np.int64)
    first = rank < clients * each
    owners[by_class[first]] = rank[first] // each
    given, rows = each * int((counts > 0).sum()), np.flatnonzero(owners < 0)
    least = max(1, cfg.min_size - given)
    if len(rows) >= clients * least:  # else the few that are left are unused
        rest = partition(replace(cfg, min_per_class=0, min_size=least), labels[torch.from_numpy(rows)], classes, seed)
        owners[rows[rest.order.numpy()]] = np.repeat(np.arange(clients), rest.sizes.numpy())
    return _from_owners(owners, clients)


def class_counts(partition: Partition, labels: Tensor, classes: int) -> Tensor:
    """The number of samples of each class of each client: int64 [K, classes]."""
    clients = torch.repeat_interleave(torch.arange(len(partition)), partition.sizes)
    cells = torch.bincount(clients * classes + labels[partition.order], minlength=len(partition) * classes)
    return cells.reshape(len(partition), classes)


def split_test(partition: Partition, fraction: float, seed: int) -> tuple[Partition, Partition]:
    """Split off a private test set for each client: returns (train, test) partitions of the same clients.

    Of n samples, floor(fraction * n + 1/2) are for testing, but at least one and never all. A client with a single
    sample keeps it for training. With `fraction` 0 the test sets are empty.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"test fraction = {fraction}: must be at least 0 and below 1")
    test, train = _drawn_apart(partition, fraction, numpy_rng(seed, "split test"), at_least=1)
    return train, test


def _drawn_apart(
    partition: Partition, fraction: float, rng: np.random.Generator, at_least: int
) -> tuple[Partition, Partition]:
    """A random share of each client's samples, and the rest, of which at least `at_least` stay.

    Of n samples floor(fraction n + 1/2) are drawn, but at least one if the fraction is above 0 and so many are there.
    """
    sizes = partition.sizes.numpy()
    clients = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = rng.permutation(len(clients))
    rank = np.empty(len(clients), np.int64)
    rank[shuffled] = rank_within(clients[shuffled])
    wanted = np.floor(fraction * sizes + 0.5).astype(np.int64)
    if fraction > 0:
        wanted = np.minimum(np.maximum(wanted, 1), np.maximum(sizes - at_least, 0))
    drawn = torch.from_numpy(rank < wanted[clients])
    counts = torch.from_numpy(wanted)
    return (
        Partition(partition.order[drawn], _offsets(counts)),
        Partition(partition.order[~drawn], _offsets(partition.sizes - counts)),
    )


def _check(cfg: PartitionConfig, labels: Tensor, classes: int) -> None:
    total = len(labels)
    if cfg.kind != "user" and cfg.clients is not None and cfg.clients * cfg.min_size > total:
        raise ConfigError(
            f"partition.clients = {cfg.clients} with partition.min_size = {cfg.min_size}: there are only {total} "
            f"training samples; choose at most {total // cfg.min_size} clients, or use more data"
        )
    if total and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"labels run from {int(labels.min())} to {int(labels.max())}: they must lie in 0..{classes - 1}"
        )


def _by_classes(cfg: PartitionConfig, clients: int, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    present, groups = np.unique(labels, return_inverse=True)
    per_client, classes = cfg.classes_per_client, len(present)
    if not 1 <= per_client <= classes:
        raise ConfigError(
            f"partition.classes_per_client = {per_client}: the training samples have {classes} classes; "
            f"choose a number between 1 and {classes}"
        )
    if clients * per_client < classes:
        raise ConfigError(
            f"partition.clients = {clients} with classes_per_client = {per_client}: that is "
            f"{clients * per_client} places for {classes} classes, so some classes would have no client; "
            f"choose at least {-(-classes // per_client)} clients"
        )
    # A group of clients shares one shuffled cycle of classes, and each client takes the next places on it. So the
    # classes of a client are distinct, and each complete group uses all classes equally often.
    group = classes // np.gcd(classes, per_client)
    circles = np.argsort(rng.random((-(-clients // group), classes)), axis=1)
    places = circles[:, np.arange(group * per_client) % classes].reshape(-1, per_client)[:clients]
    places_by_class = shuffled_by_group(places.ravel(), rng) // per_client
    samples_by_class = shuffled_by_group(groups, rng)
    holders_of = np.split(places_by_class, np.cumsum(np.bincount(places.ravel(), minlength=classes))[:-1])
    samples_of = np.split(samples_by_class, np.cumsum(np.bincount(groups))[:-1])
    owners = np.empty(len(labels), np.int64)
    for c, (holders, samples) in enumerate(zip(holders_of, samples_of, strict=True)):
        if len(samples) < len(holders):
            raise ConfigError(
                f"partition.clients = {clients} with classes_per_client = {per_client}: class {present[c]} has "
                f"{len(samples)} samples for {len(holders)} clients; choose fewer clients or use more data"
            )
        owners[samples] = holders[np.arange(len(samples)) * len(holders) // len(samples)]
    smallest = int(np.bincount(owners, minlength=clients).min())
    if smallest < cfg.min_size:
        raise ConfigError(
            f"partition.min_size = {cfg.min_size}: a client with {per_client} classes gets only {smallest} samples; "
            "choose fewer clients or use more data"
        )
    return owners


def _by_user(
    cfg: PartitionConfig, users: Tensor | None, names: Sequence[str] | None, total: int, rng: np.random.Generator
) -> Partition:
    if users is None:
        raise ConfigError(
            'partition.kind = "user": this data set has no users; '
            "use one that has (sentiment140), pass `users`, or choose another kind"
        )
    if len(users) != total:
        raise DataError(f"{len(users)} users for {total} samples: each sample needs one user")
    people, person = np.unique(users.numpy(), return_inverse=True)
    enough = np.flatnonzero(np.bincount(person, minlength=len(people)) >= cfg.min_size)
    if not len(enough):
        raise ConfigError(f"partition.min_size = {cfg.min_size}: no user has that many samples; choose a smaller one")
    if cfg.clients is not None and len(enough) < cfg.clients:
        raise ConfigError(
            f"partition.clients = {cfg.clients}: only {len(enough)} users have at least partition.min_size = "
            f"{cfg.min_size} samples; choose at most {len(enough)} clients"
        )
    chosen = enough if cfg.clients is None else rng.permutation(enough)[: cfg.clients]
    if names is None:
        called = client_names([str(number) for number in people])
    else:  # from all users of the data set: a name must not depend on which users take part
        every = client_names(names)
        called = [every[number] for number in people]
    by_name = sorted((called[i], i) for i in chosen)
    client_of = np.full(len(people), -1, np.int64)
    client_of[[i for _, i in by_name]] = np.arange(len(by_name))
    return replace(_from_owners(client_of[person], len(by_name)), names=tuple(name for name, _ in by_name))


def client_names(users: Sequence[str]) -> list[str]:
    """The client names for these users: the user's name, if it can be the name of a folder.

    Otherwise letters become lower case without accents, and other characters become "-". If the result is empty, too
    long, or not unique, 8 digits of the sha256 of the user's name are added.
    """
    plain = [user if SAFE_NAME.fullmatch(user) else _plain(user) for user in users]
    alike = Counter(plain)
    return [
        name if SAFE_NAME.fullmatch(name) and (name == user or alike[name] == 1) else _marked(name, user)
        for name, user in zip(plain, users, strict=True)
    ]


def _plain(user: str) -> str:
    letters = unicodedata.normalize("NFKD", user).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9._]+", "-", letters).strip("-._")


def _marked(name: str, user: str) -> str:
    mark = hashlib.sha256(user.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{name[:55] or 'user'}-{mark}"  # at most 64 characters


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _from_owners(owners: np.ndarray, clients: int) -> Partition:
    """The partition in which sample i belongs to client owners[i]; -1: to no client."""
    unused = int((owners < 0).sum())
    order = torch.from_numpy(np.argsort(owners, kind="stable")[unused:])
    return Partition(order, _offsets(torch.from_numpy(np.bincount(owners[owners >= 0], minlength=clients))))


# ---- Dirichlet variants -----------------------------------------------------------------------------


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
