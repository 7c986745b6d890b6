"""Who holds which samples: the ways to divide a training set among clients.

A partition is one permutation of the samples and the places to cut it, so a million clients cost two tensors.

- `iid`: a shuffle cut into equal parts.
- `dirichlet`: skewed class mixes, in the three variants of `dirichlet.py`.
- `classes`: every client holds samples of exactly `classes_per_client` classes.
- `quantity`: class mix as in the whole set, sizes drawn from a Dirichlet distribution.
- `user`: whole users go to clients; a client is one user, or several when there are more users than clients.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..wire import ConfigError, DataError
from .dirichlet import block_owners, class_owners, client_owners, dirichlet, shuffled_by_group
from .sampling import largest_remainder, numpy_rng, rank_within, torch_rng

Kind = Literal["iid", "dirichlet", "classes", "quantity", "user"]
Variant = Literal["block", "class", "client"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class Partition:
    """The samples in client order, and where each client's begin."""

    order: Tensor  # int64, every sample that belongs to somebody once
    offsets: Tensor  # int64 [K+1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """How many samples each client holds."""
        return self.offsets.diff()

    def indices(self, k: int) -> Tensor:
        """The sorted sample indices of client k."""
        if not 0 <= k < len(self):
            raise IndexError(f"client {k}: there are {len(self)} clients, numbered from 0")
        return self.order[int(self.offsets[k]) : int(self.offsets[k + 1])].sort().values


@dataclass(frozen=True)
class PartitionConfig:
    """How the training samples are divided."""

    kind: Kind = "dirichlet"
    clients: int = 20
    alpha: float = 0.1  # of the Dirichlet draws: small = skewed, large = equal
    variant: Variant = "block"
    classes_per_client: int = 2
    min_size: int = 1  # least samples of a client; kind "user": users with fewer are left out


def partition(cfg: PartitionConfig, labels: Tensor, classes: int, seed: int, users: Tensor | None = None) -> Partition:
    """Divide the samples with these labels (and, for kind "user", written by these users)."""
    _check(cfg, labels, classes)
    total, rng = len(labels), numpy_rng(seed, "partition")
    if cfg.kind == "iid":
        return Partition(torch.randperm(total, generator=torch_rng(seed, "partition")), _cuts(total, cfg.clients))
    if cfg.kind == "quantity":
        spare = total - cfg.clients * cfg.min_size
        shares = dirichlet(np.full(cfg.clients, cfg.alpha), rng)
        sizes = torch.from_numpy(largest_remainder(shares, spare) + cfg.min_size)
        order = torch.randperm(total, generator=torch_rng(seed, "partition"))
        return Partition(order, _offsets(sizes))
    if cfg.kind == "user":
        return _from_owners(_by_user(cfg, users, total, rng), cfg.clients)
    known = labels.numpy()
    if cfg.kind == "classes":
        owners = _by_classes(cfg, known, rng)
    elif cfg.variant == "block":
        owners = block_owners(known, classes, cfg.clients, cfg.alpha, rng)
    elif cfg.variant == "class":
        owners = class_owners(known, classes, cfg.clients, cfg.alpha, cfg.min_size, rng)
    else:
        owners = client_owners(known, classes, cfg.clients, cfg.alpha, rng)
    return _from_owners(owners, cfg.clients)


def class_counts(partition: Partition, labels: Tensor, classes: int) -> Tensor:
    """How many samples of each class each client holds: int64 [K, classes]."""
    clients = torch.repeat_interleave(torch.arange(len(partition)), partition.sizes)
    cells = torch.bincount(clients * classes + labels[partition.order], minlength=len(partition) * classes)
    return cells.reshape(len(partition), classes)


def split_test(partition: Partition, fraction: float, seed: int) -> tuple[Partition, Partition]:
    """Give each client a private test set: (train, test) partitions of the same clients.

    A client with n samples tests on floor(fraction * n + 1/2) of them, but on at least one and never on all; one
    with a single sample keeps it for training. `fraction` 0 gives empty test sets.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"test fraction = {fraction}: must be at least 0 and below 1")
    sizes = partition.sizes.numpy()
    clients = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = numpy_rng(seed, "split test").permutation(len(clients))
    rank = np.empty(len(clients), np.int64)
    rank[shuffled] = rank_within(clients[shuffled])
    wanted = np.floor(fraction * sizes + 0.5).astype(np.int64)
    if fraction > 0:
        wanted = np.minimum(np.maximum(wanted, 1), np.maximum(sizes - 1, 0))
    is_test = torch.from_numpy(rank < wanted[clients])
    test_sizes = torch.from_numpy(wanted)
    return (
        Partition(partition.order[~is_test], _offsets(partition.sizes - test_sizes)),
        Partition(partition.order[is_test], _offsets(test_sizes)),
    )


def _check(cfg: PartitionConfig, labels: Tensor, classes: int) -> None:
    total = len(labels)
    for key, allowed in (("kind", KINDS), ("variant", VARIANTS)):
        if (value := getattr(cfg, key)) not in allowed:
            raise ConfigError(f"partition.{key} = {value!r}: choose one of {', '.join(allowed)}")
    if cfg.clients < 1:
        raise ConfigError(f"partition.clients = {cfg.clients}: at least one client is needed")
    if cfg.min_size < 1:
        raise ConfigError(f"partition.min_size = {cfg.min_size}: every client needs at least one sample")
    if cfg.kind != "user" and cfg.clients * cfg.min_size > total:
        raise ConfigError(
            f"partition.clients = {cfg.clients} with partition.min_size = {cfg.min_size}: there are only {total} "
            f"training samples; ask for at most {total // cfg.min_size} clients, or take more data"
        )
    if cfg.kind in ("dirichlet", "quantity") and not 0 < cfg.alpha < np.inf:
        raise ConfigError(
            f"partition.alpha = {cfg.alpha}: must be a finite number above 0 "
            '(small = skewed, large = equal; for equal shares use partition.kind = "iid")'
        )
    if total and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"labels run from {int(labels.min())} to {int(labels.max())}: they must lie in 0..{classes - 1}"
        )


def _by_classes(cfg: PartitionConfig, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    present, groups = np.unique(labels, return_inverse=True)
    per_client, classes = cfg.classes_per_client, len(present)
    if not 1 <= per_client <= classes:
        raise ConfigError(
            f"partition.classes_per_client = {per_client}: the training samples have {classes} classes; "
            f"ask for a number between 1 and {classes}"
        )
    if cfg.clients * per_client < classes:
        raise ConfigError(
            f"partition.clients = {cfg.clients} with classes_per_client = {per_client}: that is "
            f"{cfg.clients * per_client} places for {classes} classes, so some classes would belong to nobody; "
            f"ask for at least {-(-classes // per_client)} clients"
        )
    # A group of clients shares one shuffled circle of classes and takes consecutive places on it: the classes of
    # a client are distinct, and after each whole group all classes have been dealt equally often.
    group = classes // np.gcd(classes, per_client)
    circles = np.argsort(rng.random((-(-cfg.clients // group), classes)), axis=1)
    places = circles[:, np.arange(group * per_client) % classes].reshape(-1, per_client)[: cfg.clients]
    places_by_class = shuffled_by_group(places.ravel(), rng) // per_client
    samples_by_class = shuffled_by_group(groups, rng)
    holders_of = np.split(places_by_class, np.cumsum(np.bincount(places.ravel(), minlength=classes))[:-1])
    samples_of = np.split(samples_by_class, np.cumsum(np.bincount(groups))[:-1])
    owners = np.empty(len(labels), np.int64)
    for c, (holders, samples) in enumerate(zip(holders_of, samples_of, strict=True)):
        if len(samples) < len(holders):
            raise ConfigError(
                f"partition.clients = {cfg.clients} with classes_per_client = {per_client}: class {present[c]} has "
                f"{len(samples)} samples for {len(holders)} clients; ask for fewer clients or take more data"
            )
        owners[samples] = holders[np.arange(len(samples)) * len(holders) // len(samples)]
    smallest = int(np.bincount(owners, minlength=cfg.clients).min())
    if smallest < cfg.min_size:
        raise ConfigError(
            f"partition.min_size = {cfg.min_size}: a client with {per_client} classes gets only {smallest} samples; "
            "ask for fewer clients or take more data"
        )
    return owners


def _by_user(cfg: PartitionConfig, users: Tensor | None, total: int, rng: np.random.Generator) -> np.ndarray:
    if users is None:
        raise ConfigError(
            'partition.kind = "user": this data set does not say who wrote a sample; '
            "take one that does (sentiment140), pass `users`, or choose another kind"
        )
    if len(users) != total:
        raise DataError(f"{len(users)} users for {total} samples: one user per sample is needed")
    people, person = np.unique(users.numpy(), return_inverse=True)
    taking_part = np.bincount(person, minlength=len(people)) >= cfg.min_size
    count = int(taking_part.sum())
    if count < cfg.clients:
        raise ConfigError(
            f"partition.clients = {cfg.clients}: only {count} users have at least partition.min_size = "
            f"{cfg.min_size} samples; ask for at most {count} clients"
        )
    client_of = np.full(len(people), -1, np.int64)
    client_of[taking_part] = rng.permutation(count) * cfg.clients // count
    return client_of[person]


def _cuts(total: int, parts: int) -> Tensor:
    """Where to cut `total` samples into `parts` whose sizes differ by at most one."""
    return torch.arange(parts + 1) * total // parts


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _from_owners(owners: np.ndarray, clients: int) -> Partition:
    """The partition in which sample i belongs to client owners[i]; -1 belongs to nobody."""
    nobodies = int((owners < 0).sum())
    order = torch.from_numpy(np.argsort(owners, kind="stable")[nobodies:])
    return Partition(order, _offsets(torch.from_numpy(np.bincount(owners[owners >= 0], minlength=clients))))
