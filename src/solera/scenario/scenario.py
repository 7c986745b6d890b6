"""A scenario joins data, partition, public data and models into clients and a server.

It is the `Host` of the simulating engines: a host for each client (`scenario.host`), and the server beside them.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.calls import ClientInfo, Roster
from ..core.errors import ConfigError
from ..core.plugins import architectures
from ..core.randomness import repeatable, seed_from
from ..core.task import Client, Data
from ..core.tensors import Weights
from ..core.wire import Packed, safe_name
from ..data import (
    Dataset,
    Partition,
    PartitionConfig,
    Public,
    PublicConfig,
    hold_out,
    make_public,
    partition,
    split_test,
)
from ..data.dataset import Arrays, Task, as_blocks
from ..data.encodings import Encoding, unique
from ..data.public import samples_of
from ..data.site_data import Holding, hold
from ..data.site_data import Own as SiteData
from ..data.transforms import Name, Step, check_steps
from ..engines import default_workers
from ..models import check_output
from ..models.factory import Architecture, ModelFactory, ModelsConfig, tokenizer_of
from ..models.hf import origins_of
from ..place.placement import Placement, numerics
from .host import ClientHost, Hosts, Remote, View
from .server import Server
from .task_data import DataConfig, load_data, public_of_split, server_data, share_for_sites

log = logging.getLogger("solera")
Own = Data | Arrays  # inputs and labels as the caller has them, in the form of the training samples
Sites = Mapping[str, "tuple[SiteData | Holding | Remote, Architecture]"]  # by name: (data, model)
NAMED = 5  # rows, clients or names listed in an error


class Scenario:
    """Clients and a server. `seed` fixes the partition and the initial weights, whatever the method.

    `data` are settings as in [data] of a configuration, or a data set of your own. `models` are settings as in
    [models], or only the clients' architectures: a list of names, or by name a module, a function that makes one or a
    registered name. `modules` are your own beside settings, by the names that `models` has for them.

    `validation`, `client_test`, `augment` and `task` replace the settings of that name. They may also be values
    that no configuration can have: samples from elsewhere, (inputs, labels), for `client_test` by client; functions of
    (batch, generator) to augment with. No training sample is in two places: each is one client's, for training or for
    testing, or the server's, for validation or as public data, or unused. `workers` is the number of models that the
    server trains at once; default: one per core.

    With `sites`, clients bring their own data and models, `{"hospital-a": (data, model), ...}`: data as (inputs,
    labels) or a Dataset (its test split is the site's own), a model by name, as a module or as a function that makes
    one. Then `data` is the server's: models are judged on its test samples, and no client sees any of it.
    """

    @numerics()
    def __init__(
        self,
        data: DataConfig | Dataset,
        models: ModelsConfig | Mapping[str, Architecture] | Sequence[str] | None = None,
        partition: Partition | PartitionConfig | None = None,
        public: Public | PublicConfig | None = None,
        *,
        modules: Mapping[str, Architecture] | None = None,
        sites: Sites | None = None,
        validation: float | Own | None = None,
        client_test: float | Literal["common"] | Mapping[str, Own] | None = None,
        augment: Sequence[Name | Step] | None = None,
        task: Task | None = None,
        seed: int = 0,
        workers: int | None = None,
    ):
        told = data if isinstance(data, DataConfig) else DataConfig()
        shares: dict[str, Any] = {"validation": validation, "client_test": client_test}
        shares = {n: s if isinstance(s, int | float | str) else 0.0 for n, s in shares.items() if s is not None}
        told = dataclasses.replace(told, **shares) if shares else told
        task = task or told.task
        if models is None or isinstance(models, ModelsConfig):
            self.models = models or ModelsConfig()
        else:
            self.models = ModelsConfig(clients=list(models))
        modules = {**(models if isinstance(models, Mapping) else {}), **(modules or {})}
        self.seed, self.place, self.sites = seed, Placement(), sites is not None

        # Architectures, and how each of them reads texts: the data set holds the tokens of all.
        clients, server = self.models.clients, self.models.server
        if sites is not None:
            if modules or partition is not None or not isinstance(models, ModelsConfig | None):
                raise ConfigError("sites bring their own data and models: leave out models, modules and partition")
            model_of = _site_models(sites)
            clients, modules = list(model_of.values()), {model_of[k]: model for k, (_, model) in sites.items()}
        every = [*clients, *([] if server is None else [server])]
        called = {name: A for A, name in architectures(every).items()}
        given = {called[name]: modules.get(name, name) for name in every}
        if isinstance(data, DataConfig):
            found = load_data(data, seed) if sites is None else server_data(data, seed)
            if data.split and isinstance(public, PublicConfig):
                public = public_of_split(len(found.train) + len(found.test), data.split, public)
        else:
            found = data
        readers = {A: tokenizer_of(architecture, self.models) for A, architecture in given.items()}
        blocks = task == "causal-lm"
        self.dataset = as_blocks(found, readers) if blocks else found.encoded(unique(readers.values()))
        self.spec = spec = self.dataset.spec
        factory = ModelFactory(spec, self.models, given)
        self.augment = tuple(told.augment if augment is None else augment)
        check_steps("data.augment", self.augment, self.dataset.train.inputs, self.dataset.name)

        # The server's samples are taken out before the clients get theirs, or, of a given partition, out of the rest.
        if public is None:
            public = PublicConfig() if sites is None else PublicConfig(source="none")
        asked = public if isinstance(public, PublicConfig) else PublicConfig()
        split = partition if isinstance(partition, Partition) else None
        free, count = self._unclaimed(split), 0
        self.validation: Data | None = None
        if isinstance(validation, Data | tuple):
            self.validation = View(self.dataset.matching(validation, "validation")).ready(spec, self.place)
        elif count := round(told.validation * len(self.dataset.train)):
            free, held = self._take(free, count, "validation", split)
            self.validation = View(self.dataset.train, held).ready(spec, self.place)
        held = free[:0]
        if asked.users is not None:
            free, held = self._take_users(free, asked.users)
        elif not isinstance(public, Public) and asked.source == "held-out":
            if sites is not None:
                raise ConfigError(
                    'public.source = "held-out": no samples are taken out of what a site holds; use "dataset", '
                    '"generator" or "noise", or "none"'
                )
            size = (len(self.dataset.train) - count) // 5 if asked.size is None else asked.size
            free, held = self._take(free, size, "public", split)
        if isinstance(public, Public):
            self.public: Public | None = public
        else:
            like = self.dataset if sites is None else spec  # of remote sites only the spec is known
            self.public = make_public(asked, like, held, seed_from(seed, "public"))
        if self.public is not None and tuple(self.public.shape) != tuple(spec.shape):
            raise ConfigError(f"public data of shape {tuple(self.public.shape)}, the task's is {tuple(spec.shape)}")

        self.hosts: Mapping[str, ClientHost]  # of the clients whose data is here
        if sites is None:
            order = [called[name] for name in clients]
            config = partition if isinstance(partition, PartitionConfig) else PartitionConfig()
            self.partition = self._partition(config, free) if split is None else split
            self._train, self._test = split_test(self.partition, told.kept_for_tests, seed_from(seed, "client_test"))
            if told.client_validation:  # the test samples are set aside and not used
                again = seed_from(seed, "client_validation")
                self._train, self._test = split_test(self._train, told.client_validation, again)
            self.roster = self._roster(order, factory)
            tests = client_test if isinstance(client_test, Mapping) else told.client_test
            self._own_tests = {} if told.client_validation else self._client_tests(tests)
            self.tested = bool(tests)  # whether clients have test samples of their own
            self.hosts = Hosts(self.roster, self._view)
        else:
            tests = client_test if isinstance(client_test, Mapping) else share_for_sites(told.client_test)
            self._add_sites(sites, model_of, readers, tests)

        present = [self.roster.architectures[i] for i in self.roster.architecture_of.unique().tolist()]
        positions = spec.length if blocks else None
        precision = {A: variant.precision for A, variant in factory.variants.items() if variant.precision}
        self.server = Server(
            {A: partial(factory.make, A) for A in given}, present, seed, spec.outputs,
            None if server is None else called[server], self.public, asked.per_round, self.validation, self._all_train,
            default_workers() if workers is None else workers, spec.shape, bool(spec.vocabulary), self.place, precision,
            positions,
        )  # fmt: skip
        if asked.where == "server" and self.public is not None:
            self.server.lent = Packed(samples_of(self.public))
        for A in given:  # built here, before any worker is forked: wrong models are refused before any work
            check_output(self.server.template(A), spec.shape, spec.outputs, A, bool(spec.vocabulary), positions)
        self._tell_weights_and_cuts()

    # -- the Host of an engine --

    def __repr__(self) -> str:
        public = "no public samples" if self.public is None else f"{len(self.public)} public samples"
        models = ", ".join(self.roster.architectures)
        return f"Scenario({self.dataset.name}: {len(self.roster)} clients with {models}; {public}, seed {self.seed})"

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement | None = None) -> Client:
        """Client `k` for one call, with its data ready for a model; in `place`, or where the server is."""
        return self.hosts[k].client(k, seed, state, place or self.place)

    def held(self, i: int) -> Tensor:
        """The number of training samples of each class that client number `i` has. int64 [classes]"""
        return self.hosts[self.roster.id(i)].train.labels.bincount(minlength=self.spec.classes)

    @property
    def elsewhere(self) -> bool:
        """True if any client's data is elsewhere."""
        return len(self.hosts) < len(self.roster)

    @property
    def test(self) -> Data:
        """The task's test set, ready for a model."""
        return View(self.dataset.test).ready(self.dataset, self.place)

    # -- clients --

    def _view(self, k: str) -> ClientHost:
        """The host of a simulated client: its rows of the data set."""
        i, A = self.roster.index(k), self.roster[k].architecture
        test = View(self._own_tests[k]) if k in self._own_tests else View(self.dataset.train, self._test.indices(i))
        train, template = View(self.dataset.train, self._train.indices(i)), partial(self._template, A)
        return ClientHost(k, self.spec, train, test, A, template, self.public, self.augment, self.seed)

    def _template(self, A: str) -> nn.Module:
        return self.server.template(A)

    def _add_sites(
        self,
        sites: Sites,
        model_of: Mapping[str, str],
        readers: Mapping[str, Encoding],
        tests: float | Mapping[str, Own],
    ) -> None:
        """A host for each site whose data is here, and the roster of all."""
        infos, hosts, sizes = {}, {}, []
        own_tests, share = (tests, 0.0) if isinstance(tests, Mapping) else ({}, tests)
        self.specs = {A: self.spec.read_by(readers[A]) for A in model_of.values()}  # own tokens only
        publics = {reader: self._public_for(reader) for reader in {readers[A] for A in model_of.values()}}
        for k, A in model_of.items():
            given = sites[k][0]
            if isinstance(given, Remote):
                infos[k] = ClientInfo(A, given.num_examples)
                sizes.append(given.num_test)
                continue
            spec = self.specs[A]
            held = given if isinstance(given, Holding) else hold(k, given, spec, share, self.seed)
            if k in own_tests:
                held = dataclasses.replace(held, test=hold(k, own_tests[k], spec, 0.0, self.seed).train)
            train, test, template = View(held.train), View(held.test), partial(self._template, A)
            public = publics[readers[A]]
            hosts[k] = ClientHost(k, spec, train, test, A, template, public, self.augment, self.seed, held.texts)
            infos[k] = ClientInfo(A, len(train))
            sizes.append(len(test))
        self.roster, self.hosts, self.tested = Roster.of(infos), hosts, all(sizes)
        _check_clients("client_test", own_tests, self.roster)

    def _public_for(self, reader: Encoding) -> Public | None:
        """The public samples of a site, with the tokens of its own model's tokenizer only."""
        if self.public is None or len(self.spec.columns) < 2:
            return self.public
        return self.public.read_by(next(c for c in self.spec.columns if c.encoding == reader))

    def _all_train(self) -> Data:
        """All clients' training samples; of sites with texts, with the tokens of all tokenizers."""
        hosts = list(self.hosts.values())
        if hosts[0].train.rows is not None:  # they share the data set
            rows = torch.cat([host.train.rows for host in hosts if host.train.rows is not None])
            whole = View(hosts[0].train.of, rows)
        else:
            inputs = torch.cat([self._for_all_models(host) for host in hosts])
            whole = View(Data(inputs, torch.cat([host.train.labels for host in hosts])))
        return whole.ready(self.spec, self.server.place, self.augment)

    def _for_all_models(self, host: ClientHost) -> Tensor:
        if not self.spec.columns:
            return host.train.of.inputs
        if host.texts is None:
            raise ConfigError("sites gave token ids, not texts: models with other tokenizers cannot read them")
        return self.spec.tokens(host.texts)

    def _roster(self, order: list[str], factory: ModelFactory) -> Roster:
        """Every client with its size and its model. `order` has a model as often as it counts."""
        names, assign = list(dict.fromkeys(order)), self.models.assign
        sizes, K = self._train.sizes, len(self._train)
        ids = None if self.partition.names is None else list(self.partition.names)
        if isinstance(assign, str):
            if assign == "by-size":
                order = sorted(order, key={A: _parameters(factory, A) for A in names}.__getitem__)
            which = dealt(assign, sizes, len(order), seed_from(self.seed, "assign"))
            return Roster(sizes, names, torch.tensor([names.index(A) for A in order])[which], ids)
        roster = Roster(sizes, names, torch.zeros(K, dtype=torch.int64), ids)
        _check_clients("models.assign", assign, roster)
        if missing := [k for k in roster if k not in assign]:
            raise ConfigError(
                f"models.assign: no model for {_listed(missing)}; name one of {', '.join(names)} for every client"
            )
        if strange := [f"{k}: {A!r}" for k, A in assign.items() if A not in names]:
            raise ConfigError(f"models.assign: {_listed(strange)}: no such model; there are {', '.join(names)}")
        return Roster(sizes, names, torch.tensor([names.index(assign[k]) for k in roster]), ids)

    def _client_tests(self, given: float | str | Mapping[str, Own]) -> dict[str, Data]:
        if not isinstance(given, Mapping):
            return dict.fromkeys(self.roster, self.dataset.test) if given == "common" else {}
        _check_clients("client_test", given, self.roster)
        return {k: self.dataset.matching(samples, f"client_test of {k}") for k, samples in given.items()}

    # -- rows of the training set --

    def _unclaimed(self, given: Partition | None) -> Tensor:
        """The rows that a user's partition leaves out; refuses one that gives a row twice."""
        total = len(self.dataset.train)
        if given is None:
            return torch.arange(total)
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
        if given is not None and count == len(free):  # the server needs no other sample
            return free[:0], free
        if count >= len(free) > 0:
            raise ConfigError(f"{purpose} data of {count} samples: only {len(free)} training samples are there")
        kept, held = hold_out(self.dataset.train.labels[free], count, seed_from(self.seed, purpose))
        return free[kept], free[held]

    def _take_users(self, free: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The rows `free` without those of a share of the users, and these users' rows, for the server."""
        if self.dataset.users is None:
            raise ConfigError(f"public.users = {share}: {self.dataset.name} has no users; set public.size instead")
        users = self.dataset.users[free]
        people = users.unique()
        count = round(share * len(people))
        if not 1 <= count < len(people):
            raise ConfigError(f"public.users = {share}: of {len(people)} users these are {count}; choose another share")
        g = torch.Generator().manual_seed(seed_from(self.seed, "public users"))
        theirs = torch.isin(users, people[torch.randperm(len(people), generator=g)[:count]])
        return free[~theirs], free[theirs]

    def _partition(self, config: PartitionConfig, rows: Tensor) -> Partition:
        """These rows, divided."""
        data, seed = self.dataset, seed_from(self.seed, "partition")
        users = None if data.users is None else data.users[rows]
        split = partition(config, data.train.labels[rows], data.classes, seed, users, data.user_names or None)
        return dataclasses.replace(split, order=rows[split.order])

    def _tell_weights_and_cuts(self) -> None:
        """Warn about what changes results and is easily overlooked: encoders with random weights or with a tokenizer
        that may be another model's, and texts that are cut."""
        for A in self.server.builders:
            for origin in origins_of(self.server.template(A)):
                if origin["weights"] == "random":
                    log.warning("%s begins with RANDOM weights, not with pretrained ones", A)
                if "tokenizer" in origin:
                    log.warning("%s: its tokenizer %s: do they belong together?", A, origin["tokenizer"])
        for c in self.spec.columns:
            if c.cut * 10 > len(self.dataset.train):
                log.warning(
                    "%d of %d training texts have more than %d tokens of %s and are cut there (data.length)",
                    c.cut, len(self.dataset.train), c.length, c.encoding.name,
                )  # fmt: skip


def _site_models(sites: Sites) -> dict[str, str]:
    """The name of each site's architecture. It depends only on that site, so the site knows it too."""
    if not sites:
        raise ConfigError("sites: there are none; name at least one, [sites.NAME]")
    named: dict[str, Architecture] = {}
    called: dict[str, str] = {}
    for k, (_, model) in sorted(sites.items()):
        safe_name(k, "site")
        if isinstance(model, str):
            A = next(iter(architectures([model])))
        else:
            A = getattr(model, "__name__", type(model).__name__).lower().strip("<>_")
        known = named.setdefault(A, model)
        if known is not model and known != model:
            raise ConfigError(
                f"sites: {k} has another model called {A!r} than {next(n for n in called if called[n] == A)}; "
                "rename one of them"
            )
        called[k] = A
    return called


def dealt(assign: str, sizes: Tensor, models: int, seed: int) -> Tensor:
    """The number of each client's model: in turn, at random, or in blocks of clients, by number or by size."""
    K = len(sizes)
    if assign == "even":
        return torch.arange(K) % models
    if assign == "random":
        return torch.randint(models, (K,), generator=torch.Generator().manual_seed(seed))
    order = sizes.argsort(stable=True) if assign == "by-size" else torch.arange(K)
    which = torch.empty(K, dtype=torch.int64)
    which[order] = torch.arange(K) * models // K
    return which


def _parameters(factory: ModelFactory, A: str) -> int:
    return sum(p.numel() for p in repeatable(0, partial(factory.make, A)).parameters())


def _check_clients(what: str, given: Mapping[str, object], roster: Roster) -> None:
    if strange := [k for k in given if k not in roster]:
        raise ConfigError(f"{what}: no client is called {_listed(strange)}; there are {_listed(list(roster))}")


def _listed(names: list[str], total: int | None = None) -> str:
    """The first of these names and their number, as text."""
    total = len(names) if total is None else total
    return ", ".join(names[:NAMED]) + (f", ... ({total} in all)" if total > NAMED else "")


def _some(rows: Tensor) -> str:
    """The first of these rows and their number, as text."""
    return f"row{'s' * (len(rows) > 1)} {_listed([str(row) for row in rows[:NAMED].tolist()], len(rows))}"
