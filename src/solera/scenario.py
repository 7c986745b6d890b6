"""A scenario joins data, partition, public data and models into clients and a server.

It is the `Host` of the simulating engines: it knows every client's data, and makes the `Client` for one call.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge
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
from .data.augment import Name, Step, check_steps, drawn_anew
from .data.dataset import Arrays
from .devices import Placement, numerics
from .engines import default_workers
from .engines.base import Roster
from .errors import ConfigError
from .models import build, check_output, model_info
from .plugins import architectures
from .randomness import seed_from
from .server import Builder, Server
from .settings import BelowOne, Hint, PositiveInt, Problem, settings
from .task import Client, Data
from .tensors import Weights
from .wire import safe_name

Architecture = str | nn.Module | Callable[[], nn.Module]
Own = Data | Arrays  # inputs and labels as the caller has them, in the form of the training samples
Size = Annotated[int, Ge(1), Hint("or leave it out for all")]
NAMED = 5  # rows, clients or names that an error spells out


@settings
class DataConfig:
    """The task's data: what is learned, and what the server and each client keep for testing."""

    name: str = "fashion-mnist"
    path: str | None = None  # a folder to read it from; otherwise the usual places are searched
    train_size: Size | None = None  # a balanced sample of this size instead of all
    test_size: Size | None = None
    validation: BelowOne = 0.0  # share of the training set the server keeps, labelled, for early stopping
    client_test: BelowOne = 0.0  # share of each client's samples kept as its private test split
    image_size: PositiveInt | None = None  # of a folder of images: pixels of a side to which all are brought
    augment: list[Name] = dataclasses.field(default_factory=list)  # how training images are changed at each step


@settings
class ModelsConfig:
    """Which architectures the clients have, and which one the server trains for itself."""

    clients: list[str] = dataclasses.field(default_factory=lambda: ["lenet5"])  # repeat a name to give it more clients
    server: str | None = None
    norm: Literal["batch", "group", "none"] = "batch"
    head: Literal["plain", "shared", "projection"] = "plain"  # what follows the features; shared: of one shape
    assign: Literal["even", "random"] = "even"

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the list of architectures."""
        if not self.clients:
            yield "clients = []: name at least one architecture"


class Scenario:
    """Clients and a server. `seed` fixes the partition and the initial weights, whatever the method.

    No training sample is in two places: each is one client's, for training or for testing, or the server's, for
    validation or as public data, or nobody's. `validation` and `client_test` are shares of the training samples (of
    each client's, the latter), or samples that come from elsewhere: (inputs, labels), for `client_test` by client.
    `assign` may name the model of every client. `augment` is what training samples go through at each step, by name or
    as functions of (batch, generator). `workers` is how many models the server trains at once: as many as there are
    cores, unless given.
    """

    @numerics()
    def __init__(
        self,
        dataset: Dataset,
        models: Mapping[str, Architecture] | Sequence[str],
        partition: Partition | PartitionConfig | None = None,
        public: Public | PublicConfig | None = None,
        *,
        server: str | tuple[str, Architecture] | None = None,
        validation: float | Own = 0.0,
        client_test: float | Mapping[str, Own] = 0.0,
        augment: Sequence[Name | Step] = (),
        assign: Literal["even", "random"] | Mapping[str, str] = "even",
        norm: Literal["batch", "group", "none"] = "batch",
        head: Literal["plain", "shared", "projection"] = "plain",
        seed: int = 0,
        workers: int | None = None,
    ):
        self.dataset, self.seed, self.place = dataset, seed, Placement()
        shares = {"validation": validation, "client_test": client_test}
        DataConfig(**{n: s for n, s in shares.items() if not isinstance(s, Data | tuple | Mapping)})  # type: ignore[arg-type]
        ModelsConfig(norm=norm, head=head, assign="even" if isinstance(assign, Mapping) else assign)
        self.augment = tuple(augment)
        check_steps("data.augment", self.augment, dataset.train.inputs, dataset.name)
        public = PublicConfig() if public is None else public
        asked = public if isinstance(public, PublicConfig) else PublicConfig()

        # What the server keeps is taken out before the clients get theirs, or, where these are given, out of the rest.
        given = partition if isinstance(partition, Partition) else None
        free = torch.arange(len(dataset.train)) if given is None else self._unclaimed(given)
        count = 0
        self.validation: Data | None = None
        if isinstance(validation, Data | tuple):
            self.validation = self._data(dataset.matching(validation, "validation"), slice(None), self.place)
        elif count := round(validation * len(dataset.train)):
            free, held = self._take(free, count, "validation", given)
            self.validation = self._data(dataset.train, held, self.place)
        held = free[:0]
        if isinstance(public, PublicConfig) and public.source == "held-out":
            size = (len(dataset.train) - count) // 5 if public.size is None else public.size
            free, held = self._take(free, size, "public", given)
        if isinstance(public, PublicConfig):
            self.public = make_public(public, dataset, held, seed_from(seed, "public"))
        else:
            self.public = public
        if self.public is not None and tuple(self.public.shape) != tuple(dataset.shape):
            raise ConfigError(f"public data of shape {tuple(self.public.shape)}, the task's is {tuple(dataset.shape)}")

        self.partition = partition if isinstance(partition, Partition) else self._partition(partition, free)
        share = 0.0 if isinstance(client_test, Mapping) else client_test
        self._train, self._test = split_test(self.partition, share, seed_from(seed, "client_test"))
        self.client_test = client_test

        called = _called(models, server)
        builders, order = self._builders(models, called, norm, head)
        names = list(dict.fromkeys(order))
        large = None
        if server is not None:
            large, architecture = server if isinstance(server, tuple) else (called[server], server)
            builders[large] = self._builder(large, architecture, norm, head)
        self.roster = self._roster(assign, order, names)
        self._own_tests = self._client_tests(client_test) if isinstance(client_test, Mapping) else {}
        present = [names[i] for i in self.roster.architecture_of.unique().tolist()]
        workers = default_workers() if workers is None else workers
        self.server = Server(
            builders, present, seed, dataset.classes, large, self.public, asked.per_round, self.validation,
            self._all_train, workers, dataset.shape, bool(dataset.vocabulary), self.place,
        )  # fmt: skip
        for A in builders:  # built now: before any worker is forked, and wrong models are refused before any work
            check_output(self.server.template(A), dataset.shape, dataset.classes, A, bool(dataset.vocabulary))

    # -- the Host of an engine --

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement | None = None) -> Client:
        """Client `k` for one call, with its data ready for a model; in `place`, or where the server is."""
        place, i = place or self.place, self.roster.index(k)
        A = self.roster[k].architecture
        train = self._data(self.dataset.train, self._train.indices(i), place, self.augment)
        if k in self._own_tests:
            test = self._data(self._own_tests[k], slice(None), place)
        else:
            test = self._data(self.dataset.train, self._test.indices(i), place)
        template = place.module(self.server.template(A))
        return Client(k, A, train, test, self.public, self.dataset.classes, seed, state, template)

    def held(self, i: int) -> Tensor:
        """How many training samples of each class the client with number `i` has. int64 [classes]"""
        labels = self.dataset.train.labels[self._train.indices(i)]
        return labels.bincount(minlength=self.dataset.classes)

    @property
    def test(self) -> Data:
        """The task's test set, ready for a model."""
        return self._data(self.dataset.test, slice(None), self.place)

    # -- building --

    def _data(
        self, of: Data[Tensor], indices: Tensor | slice, place: Placement, augment: Sequence[Name | Step] = ()
    ) -> Data:
        """Some samples, ready for a model. The whole set is put in place once, and then cut there."""
        inputs, labels = place.put(of.inputs), place.put(of.labels)
        if isinstance(indices, slice):
            inputs = inputs[indices]
        else:
            indices = indices.to(place.device)
            inputs = inputs.index_select(0, indices)
        prepare = self.dataset.prepare
        return Data(drawn_anew(inputs, augment, prepare) if augment else prepare(inputs), labels[indices])

    def _unclaimed(self, given: Partition) -> Tensor:
        """The rows that a partition of the user's own gives to nobody; refuses one that gives a row twice."""
        total = len(self.dataset.train)
        outside = given.order[(given.order < 0) | (given.order >= total)]
        if len(outside):
            raise ConfigError(f"partition: {_some(outside)} of the training set, which has rows 0 to {total - 1}")
        times = torch.bincount(given.order, minlength=total)
        twice = (times > 1).nonzero().flatten()
        if len(twice):
            raise ConfigError(f"partition: {_some(twice)} more than once; a sample belongs to one client at most")
        return (times == 0).nonzero().flatten()

    def _take(self, free: Tensor, count: int, purpose: str, given: Partition | None) -> tuple[Tensor, Tensor]:
        """`count` of the rows `free` for the server: (what is left, what was taken)."""
        if given is not None and count > len(free):
            elsewhere = {
                "validation": "give validation samples from elsewhere (validation=(inputs, labels)) or none (0)",
                "public": 'take public data from elsewhere (another public.source) or none (public.source = "none")',
            }
            raise ConfigError(
                f"{purpose} data of {count} samples: the partition gives {_some(given.order.sort().values)} of "
                f"{len(self.dataset.train)} to clients and leaves {len(free)}, but a sample that a client holds "
                f"cannot be the server's too; leave rows out of the partition, or {elsewhere[purpose]}"
            )
        if given is not None and count == len(free):  # nobody else needs one
            return free[:0], free
        if count >= len(free) > 0:
            raise ConfigError(f"{purpose} data of {count} samples: only {len(free)} training samples are there")
        kept, held = hold_out(self.dataset.train.labels[free], count, seed_from(self.seed, purpose))
        return free[kept], free[held]

    def _partition(self, config: PartitionConfig | None, rows: Tensor) -> Partition:
        """These rows, divided."""
        data = self.dataset
        users = None if data.users is None else data.users[rows]
        split = partition(
            config or PartitionConfig(),
            data.train.labels[rows],
            data.classes,
            seed_from(self.seed, "partition"),
            users,
            data.user_names or None,
        )
        return dataclasses.replace(split, order=rows[split.order])

    def _roster(self, assign: str | Mapping[str, str], order: list[str], names: list[str]) -> Roster:
        """Every client with its size and its model. `order` has a model as often as it counts, `names` once."""
        sizes, K = self._train.sizes, len(self._train)
        ids = None if self.partition.names is None else list(self.partition.names)
        if isinstance(assign, str):
            if assign == "even":
                which = torch.arange(K) % len(order)
            else:
                g = torch.Generator().manual_seed(seed_from(self.seed, "assign"))
                which = torch.randint(len(order), (K,), generator=g)
            of = torch.tensor([names.index(n) for n in order])[which]
            return Roster(sizes, names, of, ids)
        roster = Roster(sizes, names, torch.zeros(K, dtype=torch.int64), ids)
        _check_clients("assign", assign, roster)
        if missing := [k for k in roster if k not in assign]:
            raise ConfigError(
                f"assign: no model for {_listed(missing)}; name one of {', '.join(names)} for every client"
            )
        if strange := [f"{k}: {A!r}" for k, A in assign.items() if A not in names]:
            raise ConfigError(f"assign: {_listed(strange)}: no such model; there are {', '.join(names)}")
        return Roster(sizes, names, torch.tensor([names.index(assign[k]) for k in roster]), ids)

    def _client_tests(self, given: Mapping[str, Own]) -> dict[str, Data]:
        _check_clients("client_test", given, self.roster)
        return {k: self.dataset.matching(samples, f"client_test of {k}") for k, samples in given.items()}

    def _all_train(self) -> Data:
        return self._data(self.dataset.train, self._train.order, self.place, self.augment)

    def _builders(
        self, models: Mapping[str, Architecture] | Sequence[str], called: Mapping[str, str], norm: str, head: str
    ) -> tuple[dict[str, Builder], list[str]]:
        if not models:
            raise ConfigError("models.clients = []: name at least one architecture")
        named = dict(models) if isinstance(models, Mapping) else {called[n]: n for n in models}
        order = list(models) if isinstance(models, Mapping) else [called[n] for n in models]
        return {n: self._builder(n, a, norm, head) for n, a in named.items()}, order

    def _builder(self, name: str, architecture: Architecture, norm: str, head: str) -> Builder:
        safe_name(name, "model name")
        if isinstance(architecture, nn.Module):
            module = architecture
            return lambda: copy.deepcopy(module)
        if isinstance(architecture, str):
            options = {"vocabulary": self.dataset.vocabulary} if self.dataset.vocabulary else {}
            kind = model_info(architecture).name  # a path is resolved now, where code may be allowed
            return lambda: build(kind, self.dataset.classes, self.dataset.shape, norm, head, **options)  # type: ignore[arg-type]
        return architecture


def _called(models: Mapping[str, Architecture] | Sequence[str], server: object) -> dict[str, str]:
    """What the models that are given by name or path are called in the run."""
    given = [*models, *([server] if isinstance(server, str) else [])]
    return {name: called for called, name in architectures(given).items()}


def _check_clients(what: str, given: Mapping[str, object], roster: Roster) -> None:
    if strange := [k for k in given if k not in roster]:
        raise ConfigError(f"{what}: no client is called {_listed(strange)}; there are {_listed(list(roster))}")


def _listed(names: list[str], total: int | None = None) -> str:
    """The first of these names, and how many there are."""
    total = len(names) if total is None else total
    return ", ".join(names[:NAMED]) + (f", ... ({total} in all)" if total > NAMED else "")


def _some(rows: Tensor) -> str:
    """The first of these rows, and how many there are."""
    return f"row{'s' * (len(rows) > 1)} {_listed([str(row) for row in rows[:NAMED].tolist()], len(rows))}"


def build_scenario(
    data: DataConfig, partition: PartitionConfig, public: PublicConfig, models: ModelsConfig, seed: int, workers: int
) -> Scenario:
    """The scenario that a configuration describes."""
    return Scenario(
        load(data.name, data.path, data.train_size, data.test_size, seed, image_size=data.image_size),
        models.clients,
        partition,
        public,
        server=models.server,
        validation=data.validation,
        client_test=data.client_test,
        augment=data.augment,
        assign=models.assign,
        norm=models.norm,
        head=models.head,
        seed=seed,
        workers=workers,
    )
