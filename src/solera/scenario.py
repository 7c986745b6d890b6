"""A scenario joins data, partition, public data and models into clients and a server.

It is the `Site` of the simulating engines: it knows every client's data, and makes the `Client` for one call.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from .data import (
    Dataset,
    Partition,
    PartitionConfig,
    Public,
    PublicConfig,
    hold_out,
    load,
    make_public,
    partition,
    split_test,
)
from .devices import numerics
from .engines.base import Roster
from .models import build, check_output
from .randomness import seed_from
from .server import Builder, Server
from .task import Client, Data
from .wire import ConfigError, Weights, safe_name

Architecture = str | nn.Module | Callable[[], nn.Module]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The task's data: what is learned, and what the server and each client keep for testing."""

    name: str = "fashion-mnist"
    path: str | None = None  # a folder to read it from; otherwise the usual places are searched
    train_size: int | None = None  # a balanced sample of this size instead of all
    test_size: int | None = None
    validation: float = 0.0  # share of the training set the server keeps, labelled, for early stopping
    client_test: float = 0.0  # share of each client's samples kept as its private test split
    image_size: int | None = None  # of a folder of images: pixels of a side to which all are brought

    def check(self) -> None:
        """Refuse what cannot be."""
        for key in ("validation", "client_test"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"data.{key} = {getattr(self, key)}: a share, at least 0 and below 1")
        for key in ("train_size", "test_size", "image_size"):
            if (size := getattr(self, key)) is not None and size < 1:
                raise ConfigError(f"data.{key} = {size}: at least 1 is needed (or leave it out for all)")


@dataclasses.dataclass(frozen=True)
class ModelsConfig:
    """Which architectures the clients have, and which one the server trains for itself."""

    clients: list[str] = dataclasses.field(default_factory=lambda: ["lenet5"])  # repeat a name to give it more clients
    server: str | None = None
    norm: Literal["batch", "group", "none"] = "batch"
    head: Literal["plain", "shared", "projection"] = "plain"  # what follows the features; shared: of one shape
    assign: Literal["even", "random"] = "even"

    def check(self) -> None:
        """Refuse what cannot be."""
        if not self.clients:
            raise ConfigError("models.clients = []: name at least one architecture")


class Scenario:
    """Clients and a server. `seed` fixes the partition and the initial weights, whatever the method."""

    @numerics()
    def __init__(
        self,
        dataset: Dataset,
        models: Mapping[str, Architecture] | Sequence[str],
        partition: Partition | PartitionConfig | None = None,
        public: Public | PublicConfig | None = None,
        *,
        server: str | tuple[str, Architecture] | None = None,
        validation: float = 0.0,
        client_test: float = 0.0,
        assign: Literal["even", "random"] = "even",
        norm: Literal["batch", "group", "none"] = "batch",
        head: Literal["plain", "shared", "projection"] = "plain",
        seed: int = 0,
        workers: int = 1,
    ):
        DataConfig(validation=validation, client_test=client_test).check()
        self.dataset, self.seed = dataset, seed
        public = PublicConfig() if public is None else public
        settings = public if isinstance(public, PublicConfig) else PublicConfig()

        # What the server keeps is taken out before the clients get theirs.
        mine = torch.arange(len(dataset.train))
        mine, held = self._take(mine, round(validation * len(mine)), "validation")
        self.validation = self._data(dataset.train, held) if len(held) else None
        held = mine[:0]
        if isinstance(public, PublicConfig) and public.source == "held-out":
            mine, held = self._take(mine, len(mine) // 5 if public.size is None else public.size, "public")
        if isinstance(public, PublicConfig):
            self.public = make_public(public, dataset, held, seed_from(seed, "public"))
        else:
            self.public = public
        if self.public is not None and tuple(self.public.shape) != tuple(dataset.shape):
            raise ConfigError(f"public data of shape {tuple(self.public.shape)}, the task's is {tuple(dataset.shape)}")

        split = partition if isinstance(partition, Partition) else self._partition(partition, mine)
        if isinstance(partition, Partition):
            mine = torch.arange(len(dataset.train))  # a user's own partition speaks of the whole training set
        self._mine, self.partition = mine, split
        self._train, self._test = split_test(split, client_test, seed_from(seed, "client_test"))
        self.client_test = client_test

        builders, order = self._builders(models, norm, head)
        names = list(dict.fromkeys(order))
        large = None
        if server is not None:
            large, architecture = server if isinstance(server, tuple) else (server, server)
            builders[large] = self._builder(large, architecture, norm, head)
        K = len(split)
        if assign == "even":
            which = torch.arange(K) % len(order)
        else:
            g = torch.Generator().manual_seed(seed_from(seed, "assign"))
            which = torch.randint(len(order), (K,), generator=g)
        architecture_of = torch.tensor([names.index(n) for n in order])[which]
        self.roster = Roster(self._train.sizes, names, architecture_of)
        present = [names[i] for i in architecture_of.unique().tolist()]
        self.server = Server(
            builders, present, seed, dataset.classes, large, self.public, settings.per_round, self.validation,
            self._all_train, workers, dataset.shape, bool(dataset.vocabulary),
        )  # fmt: skip
        for P in builders:  # built now: before any worker is forked, and wrong models are refused before any work
            check_output(self.server.template(P), dataset.shape, dataset.classes, P, bool(dataset.vocabulary))

    # -- the Site of an engine --

    def client(self, k: str, seed: int, state: dict[str, Weights]) -> Client:
        """Client `k` for one call, with its data ready for a model."""
        i = self.roster.index(k)
        P = self.roster[k].architecture
        train = self._data(self.dataset.train, self._mine[self._train.indices(i)])
        test = self._data(self.dataset.train, self._mine[self._test.indices(i)])
        classes = self.dataset.classes
        return Client(k, P, train, test, self.public, classes, seed, state, self.server.template(P))

    def held(self, i: int) -> Tensor:
        """How many training samples of each class the client with number `i` has. int64 [classes]"""
        labels = self.dataset.train.labels[self._mine[self._train.indices(i)]]
        return labels.bincount(minlength=self.dataset.classes)

    @property
    def test(self) -> Data:
        """The task's test set, ready for a model."""
        return self._data(self.dataset.test, slice(None))

    # -- building --

    def _data(self, of: Data, indices: Tensor | slice) -> Data:
        some = of.inputs[indices] if isinstance(indices, slice) else of.inputs.index_select(0, indices)
        return Data(self.dataset.prepare(some), of.labels[indices])

    def _take(self, indices: Tensor, count: int, purpose: str) -> tuple[Tensor, Tensor]:
        if count >= len(indices) > 0:
            raise ConfigError(f"{purpose} data of {count} samples: only {len(indices)} training samples are there")
        kept, held = hold_out(self.dataset.train.labels[indices], count, seed_from(self.seed, purpose))
        return indices[kept], indices[held]

    def _partition(self, config: PartitionConfig | None, mine: Tensor) -> Partition:
        users = None if self.dataset.users is None else self.dataset.users[mine]
        labels, classes = self.dataset.train.labels[mine], self.dataset.classes
        return partition(config or PartitionConfig(), labels, classes, seed_from(self.seed, "partition"), users)

    def _all_train(self) -> Data:
        return self._data(self.dataset.train, self._mine[self._train.order])

    def _builders(
        self, models: Mapping[str, Architecture] | Sequence[str], norm: str, head: str
    ) -> tuple[dict[str, Builder], list[str]]:
        if not models:
            raise ConfigError("models.clients = []: name at least one architecture")
        named = dict(models) if isinstance(models, Mapping) else {n: n for n in models}
        order = list(models)
        return {n: self._builder(n, a, norm, head) for n, a in named.items()}, order

    def _builder(self, name: str, architecture: Architecture, norm: str, head: str) -> Builder:
        safe_name(name, "model name")
        if isinstance(architecture, nn.Module):
            module = architecture
            return lambda: copy.deepcopy(module)
        if isinstance(architecture, str):
            options = {"vocabulary": self.dataset.vocabulary} if self.dataset.vocabulary else {}
            kind = architecture
            return lambda: build(kind, self.dataset.classes, self.dataset.shape, norm, head, **options)  # type: ignore[arg-type]
        return architecture


def build_scenario(
    data: DataConfig, partition: PartitionConfig, public: PublicConfig, models: ModelsConfig, seed: int, workers: int
) -> Scenario:
    """The scenario that a configuration describes."""
    data.check()
    models.check()
    return Scenario(
        load(data.name, data.path, data.train_size, data.test_size, seed, image_size=data.image_size),
        models.clients,
        partition,
        public,
        server=models.server,
        validation=data.validation,
        client_test=data.client_test,
        assign=models.assign,
        norm=models.norm,
        head=models.head,
        seed=seed,
        workers=workers,
    )
