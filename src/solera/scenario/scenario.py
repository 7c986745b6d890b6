"""A scenario joins data, partition, public data and models into clients and a server.

It is the `Host` of the simulating engines: it knows every client's data, and makes the `Client` for one call.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from ..core.calls import ClientInfo, Roster
from ..core.errors import ConfigError
from ..core.plugins import architectures
from ..core.randomness import repeatable, seed_from
from ..core.settings import Hint, Positive, PositiveInt, Problem, Share, settings
from ..core.task import Client, Data
from ..core.tensors import Weights, sent
from ..core.wire import Packed, safe_name
from ..data import (
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
from ..data.dataset import Arrays, as_blocks
from ..data.encodings import LENGTH, WORDS, Columns, Encoding, reading, unique
from ..data.public import samples_of
from ..data.site_data import Holding, hold
from ..data.site_data import Own as SiteData
from ..data.spec import Spec, Task
from ..data.transforms import Name, Step, check_steps
from ..engines import default_workers
from ..models import build, check_output, encoding_of, model_info
from ..models.hf import origins_of
from ..models.lora import Lora, adapted
from ..models.options import Options, Variant, options_problems, variant_of
from ..place.placement import Placement, numerics
from .host import Remote, SiteHost, prepared
from .server import Builder, Server

log = logging.getLogger("solera")
Architecture = str | nn.Module | Callable[[], nn.Module]
Own = Data | Arrays  # inputs and labels as the caller has them, in the form of the training samples
Kept = Annotated[float, Ge(0), Le(0.9)]  # a share that is not trained on: the rest must be worth training on
Size = Annotated[int, Ge(1), Hint("or leave it out for all")]
Sites = Mapping[str, "tuple[SiteData | Holding | Remote, Architecture]"]  # by name: (data, model)
Assign = Literal["even", "random", "by-size", "tiers"] | dict[str, str]
NAMED = 5  # rows, clients or names that an error spells out


@settings
class DataConfig:
    """The task's data: what is learned, and what the server and each client keep for testing."""

    name: str = "fashion-mnist"
    task: Task = "classification"  # or "causal-lm": the next token of texts
    path: str | None = None  # a folder to read it from; otherwise the usual places are searched
    train_size: Size | None = None  # a balanced sample of this size instead of all
    test_size: Size | None = None
    split: list[Share] = dataclasses.field(default_factory=list)  # pool all samples, then training, public, test shares
    validation: Kept = 0.0  # share of the training set the server keeps, labelled, for early stopping
    client_test: Kept | Literal["common"] = 0.0  # a client's share for testing; common: all have the test set
    client_validation: Kept = 0.0  # share of the rest that own models are scored on instead, as `solera tune` does
    text_column: str | None = None  # of a table of texts: the column with the text ...
    pair_column: str | None = None  # ... with a second text, if samples are pairs ...
    label_column: str | None = None  # ... with the class ...
    user_column: str | None = None  # ... and with the user; default: the usual names
    user_min: PositiveInt = 1  # users with fewer samples are left out
    test_users: Kept = 0.0  # share of the users whose samples are the test set, instead of the set's own
    length: PositiveInt = LENGTH  # tokens of a text that a model reads (the rest is cut); causal-lm: of a block
    image_size: PositiveInt | None = None  # of a folder of images: pixels of a side to which all are brought
    augment: list[Name] = dataclasses.field(default_factory=list)  # how training images are changed at each step
    mean: list[float] = dataclasses.field(default_factory=list)  # per channel, on the scale [0, 1]; []: of the data set
    std: list[Positive] = dataclasses.field(default_factory=list)
    shape: list[PositiveInt] = dataclasses.field(default_factory=list)  # with sites: of one sample; []: of the data set
    classes: list[str] = dataclasses.field(default_factory=list)  # with sites: the names of the classes, in this order

    def problems(self) -> Iterator[Problem]:
        """Constants that do not go together, and shares that are no split."""
        if self.split and (len(self.split) != 3 or abs(sum(self.split) - 1) > 1e-6 or not min(self.split[::2])):
            yield (
                f"split = {self.split}: give the shares of training, public and test samples, such as [0.7, 0.1, 0.2]; "
                "they add up to 1, and only the public one may be 0"
            )
        if len(self.mean) != len(self.std):
            yield f"mean = {self.mean} and std = {self.std}: give both, with a number for each channel, or neither"
        if len(set(self.classes)) < len(self.classes):
            yield f"classes = {self.classes}: a name is there twice"

    @property
    def kept_for_tests(self) -> float:
        """The share of a client's samples that it does not train on: none, if all are scored on the test set."""
        return self.client_test if isinstance(self.client_test, int | float) else 0.0


@settings
class ModelsConfig:
    """Which architectures the clients have, and which one the server trains for itself."""

    clients: list[str] = dataclasses.field(default_factory=lambda: ["lenet5"])  # repeat a name to give it more clients
    server: str | None = None
    norm: Literal["batch", "group", "none"] = "batch"
    head: Literal["plain", "shared", "projection"] = "plain"  # what follows the features; shared: of one shape
    assign: Assign = "even"  # by-size: small models to clients with few samples; tiers: in blocks; a table: by client
    options: Options = dataclasses.field(default_factory=dict)  # by architecture: a variant of which model, bits, sizes
    weights: Literal["pretrained", "random"] = "pretrained"  # how models that have pretrained weights begin
    lora: Lora | None = None  # only small matrices beside the layers are trained and travel; by model: options

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the list of architectures."""
        if not self.clients:
            yield "clients = []: name at least one architecture"
        yield from options_problems(self.options, [*self.clients, *([self.server] if self.server else [])], self.lora)

    @property
    def built(self) -> list[str]:
        """The models of the clients as they are registered, in the order of `clients`."""
        return [variant_of(name, self.options).model for name in self.clients]


class Scenario:
    """Clients and a server. `seed` fixes the partition and the initial weights, whatever the method.

    No training sample is in two places: each is one client's, for training or for testing, or the server's, for
    validation or as public data, or are unused. `validation` and `client_test` are shares of the training samples (of
    each client's, the latter), or samples that come from elsewhere: (inputs, labels), for `client_test` by client. With
    `client_test="common"` clients' models are scored on the whole test set, and no training sample is kept back.
    With `client_validation`, own models are scored on that share of what `client_test` leaves: for choosing settings.
    `assign` may name the model of every client. `options` are those of single architectures (`models.options`),
    `lora` is what all models have unless their options say otherwise.
    `augment` is what training samples go through at each step, by name or as functions of (batch, generator).
    `workers` is how many models the server trains at once: as many as there are cores, unless given.

    With `sites`, clients bring their own data and models, `{"hospital-a": (data, model), ...}`: data as (inputs,
    labels) or a Dataset (its test split is the site's own), a model by name, as a module or as a function that makes
    one. Then `dataset` is the server's: models are judged on its test samples, and no client sees any of it.

    With the task "causal-lm" models learn to predict the next token of the data set's texts. The labels of the texts
    then only say how they may be divided among clients.
    """

    @numerics()
    def __init__(
        self,
        dataset: Dataset,
        models: Mapping[str, Architecture] | Sequence[str] = (),
        partition: Partition | PartitionConfig | None = None,
        public: Public | PublicConfig | None = None,
        *,
        sites: Sites | None = None,
        server: str | tuple[str, Architecture] | None = None,
        validation: float | Own = 0.0,
        client_test: float | Literal["common"] | Mapping[str, Own] = 0.0,
        client_validation: float = 0.0,
        augment: Sequence[Name | Step] = (),
        assign: Literal["even", "random", "by-size", "tiers"] | Mapping[str, str] = "even",
        norm: Literal["batch", "group", "none"] = "batch",
        head: Literal["plain", "shared", "projection"] = "plain",
        options: Options | None = None,
        weights: Literal["pretrained", "random"] = "pretrained",
        lora: Lora | None = None,
        task: Task = "classification",
        seed: int = 0,
        workers: int | None = None,
    ):
        self.options = dict(options or {})
        model_of = {}
        if sites is not None:
            _check_sites(sites, models, partition, public, assign)
            model_of = _site_models(sites)
            models = {model_of[k]: model for k, (_, model) in sites.items()}
        self._encodings = _encodings_of(models, server, self.options)
        if task == "causal-lm":
            dataset = as_blocks(dataset, self._encodings)
        else:
            dataset = dataset.encoded(unique(self._encodings.values()))
        self.dataset, self.seed, self.place = dataset, seed, Placement()
        self.spec = dataset.spec
        self._publics: dict[Columns, Public] = {}  # of sites, by what their models read
        self.hosts: dict[str, SiteHost] = {}  # of the sites whose data is here
        self.elsewhere = False  # whether any site's data is elsewhere
        shares = {"validation": validation, "client_test": client_test}
        DataConfig(**{n: s for n, s in shares.items() if not isinstance(s, Data | tuple | Mapping)})  # type: ignore[arg-type]
        dealt = dict(assign) if isinstance(assign, Mapping) else assign
        ModelsConfig(norm=norm, head=head, assign=dealt, weights=weights, lora=lora)
        self._weights, self.lora = weights, lora
        self.augment = tuple(augment)
        check_steps("data.augment", self.augment, dataset.train.inputs, dataset.name)
        if public is None:
            public = PublicConfig() if sites is None else PublicConfig(source="none")
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
        if asked.users is not None:
            free, held = self._take_users(free, asked.users)
        elif isinstance(public, PublicConfig) and public.source == "held-out":
            size = (len(dataset.train) - count) // 5 if public.size is None else public.size
            free, held = self._take(free, size, "public", given)
        if isinstance(public, PublicConfig):
            like = dataset if sites is None else self.spec  # a site that is elsewhere has no more to go by
            self.public = make_public(public, like, held, seed_from(seed, "public"))
        else:
            self.public = public
        if self.public is not None and tuple(self.public.shape) != tuple(dataset.shape):
            raise ConfigError(f"public data of shape {tuple(self.public.shape)}, the task's is {tuple(dataset.shape)}")

        self.client_test = client_test
        self.tested = bool(client_test)  # whether clients have test samples of their own
        called = _called(models, server)
        builders, order = self._builders(models, called, norm, head)
        names = list(dict.fromkeys(order))
        large = None
        if server is not None:
            large, architecture = server if isinstance(server, tuple) else (called[server], server)
            builders[large] = self._builder(large, architecture, norm, head)
        self._own_tests: dict[str, Data] = {}
        if sites is None:
            self.partition = partition if isinstance(partition, Partition) else self._partition(partition, free)
            share = client_test if isinstance(client_test, int | float) else 0.0
            self._train, self._test = split_test(self.partition, share, seed_from(seed, "client_test"))
            if client_validation:  # the test samples are set aside and never looked at
                seed_ = seed_from(seed, "client_validation")
                self._train, self._test = split_test(self._train, client_validation, seed_)
            self.roster = self._roster(assign, order, names, builders)
            self._own_tests = {} if client_validation else self._client_tests(client_test)
        else:
            self.roster = self._add_sites(sites, model_of)
        present = [names[i] for i in self.roster.architecture_of.unique().tolist()]
        workers = default_workers() if workers is None else workers
        positions = dataset.length if task == "causal-lm" else None
        self.server = Server(
            builders, present, seed, dataset.outputs, large, self.public, asked.per_round, self.validation,
            self._all_train, workers, dataset.shape, bool(dataset.vocabulary), self.place,
            {called.get(n, n): variant_of(n, self.options).precision for n in self.options}, positions,
        )  # fmt: skip
        if asked.where == "server" and self.public is not None:
            self.server.lent = Packed(samples_of(self.public))
        for A in builders:  # built now: before any worker is forked, and wrong models are refused before any work
            model, text = self.server.template(A), bool(dataset.vocabulary)
            check_output(model, dataset.shape, dataset.outputs, A, text, positions)
        self._tell_weights_and_cuts()

    # -- the Host of an engine --

    def __repr__(self) -> str:
        public = "no public samples" if self.public is None else f"{len(self.public)} public samples"
        models = ", ".join(self.roster.architectures)
        return f"Scenario({self.dataset.name}: {len(self.roster)} clients with {models}; {public}, seed {self.seed})"

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement | None = None) -> Client:
        """Client `k` for one call, with its data ready for a model; in `place`, or where the server is."""
        place, i = place or self.place, self.roster.index(k)
        if k in self.hosts:
            return self.hosts[k].client(k, seed, state, place)
        A = self.roster[k].architecture
        train = self._data(self.dataset.train, self._train.indices(i), place, self.augment)
        if k in self._own_tests:
            test = self._data(self._own_tests[k], slice(None), place)
        else:
            test = self._data(self.dataset.train, self._test.indices(i), place)
        template = place.module(self.server.template(A))
        public = None if self.public is None else self.public.at(place)
        return Client(k, A, train, test, public, self.dataset.outputs, seed, state, template)

    def held(self, i: int) -> Tensor:
        """How many training samples of each class the client with number `i` has. int64 [classes]"""
        if self.hosts:
            labels = self.hosts[self.roster.id(i)].holding.train.labels
        else:
            labels = self.dataset.train.labels[self._train.indices(i)]
        return labels.bincount(minlength=self.dataset.classes)

    def spec_for(self, A: str) -> Spec:
        """What the samples of a site with this model look like: it reads texts with its own tokenizer alone."""
        return self.spec.read_by(self._encodings[A])

    def public_for(self, A: str) -> Public:
        """The public samples as a site with this model has them."""
        assert self.public is not None
        if len(self.dataset.columns) < 2:  # no other model's tokens are in it
            return self.public
        own = self._columns_of(A)
        if own not in self._publics:
            self._publics[own] = self.public.read_by(own)
        return self._publics[own]

    @property
    def test(self) -> Data:
        """The task's test set, ready for a model."""
        return self._data(self.dataset.test, slice(None), self.place)

    # -- building --

    def _data(
        self, of: Data[Tensor], indices: Tensor | slice, place: Placement, augment: Sequence[Name | Step] = ()
    ) -> Data:
        """Some samples, ready for a model. The whole set is put in place once, and then cut there."""
        if self.dataset.task == "causal-lm":
            kept = place.put(of.inputs) if place.fits(of.inputs) else of.inputs
            rows = indices if isinstance(indices, slice) else sent(indices, kept.device)
            blocks = sent(kept[rows], place.device)
            return Data(blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous())
        return prepared(of, indices, place, self.dataset.prepare, augment)

    def _tell_weights_and_cuts(self) -> None:
        """What changes results and is easily overlooked: encoders that know nothing yet, or that have a tokenizer that
        may be another model's, and texts that are cut."""
        for A in self.server.builders:
            for origin in origins_of(self.server.template(A)):
                if origin["weights"] == "random":
                    log.warning("%s begins with RANDOM weights, not with pretrained ones", A)
                if "tokenizer" in origin:
                    log.warning("%s: its tokenizer %s: do they belong together?", A, origin["tokenizer"])
        for c in self.dataset.columns:
            if c.cut * 10 > len(self.dataset.train):
                log.warning(
                    "%d of %d training texts have more than %d tokens of %s and are cut there (data.length)",
                    c.cut, len(self.dataset.train), c.length, c.encoding.name,
                )  # fmt: skip

    def _unclaimed(self, given: Partition) -> Tensor:
        """The rows that a partition of the user's own leaves out; refuses one that gives a row twice."""
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
        if given is not None and count == len(free):  # no other server needs one
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

    def _roster(
        self, assign: str | Mapping[str, str], order: list[str], names: list[str], builders: Mapping[str, Builder]
    ) -> Roster:
        """Every client with its size and its model. `order` has a model as often as it counts, `names` once."""
        sizes, K = self._train.sizes, len(self._train)
        ids = None if self.partition.names is None else list(self.partition.names)
        if isinstance(assign, str):
            if assign == "by-size":
                order = sorted(order, key={n: _parameters(builders[n]) for n in names}.__getitem__)
            which = dealt(assign, sizes, len(order), seed_from(self.seed, "assign"))
            of = torch.tensor([names.index(n) for n in order])[which]
            return Roster(sizes, names, of, ids)
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

    def _add_sites(self, sites: Sites, model_of: Mapping[str, str]) -> Roster:
        """A host for each site whose data is here, and the roster of all."""
        infos = {}
        for k, (given, _) in sorted(sites.items()):
            A = model_of[k]
            if isinstance(given, Remote):
                infos[k] = ClientInfo(A, given.num_examples)
                continue
            own = self.client_test.get(k) if isinstance(self.client_test, Mapping) else None
            share = 0.0 if isinstance(self.client_test, Mapping) else share_for_sites(self.client_test)
            spec = self.spec_for(A)
            holding = given if isinstance(given, Holding) else hold(k, given, spec, share, self.seed)
            if own is not None:
                holding = dataclasses.replace(holding, test=hold(k, own, spec, 0.0, self.seed).train)
            public = None if self.public is None else self.public_for(A)
            template = partial(self._template, A)
            self.hosts[k] = SiteHost(k, holding, spec, A, template, public, self.augment, self.seed)
            infos[k] = ClientInfo(A, len(holding.train))
        if isinstance(self.client_test, Mapping):
            _check_clients("client_test", self.client_test, Roster.of(infos))
        self.elsewhere = len(self.hosts) < len(infos)
        tests = [len(host.holding.test) for host in self.hosts.values()]
        tests += [given.num_test for given, _ in sites.values() if isinstance(given, Remote)]
        self.tested = all(tests)
        return Roster.of(infos)

    def _template(self, A: str) -> nn.Module:
        return self.server.template(A)

    def _all_train(self) -> Data:
        if self.hosts:
            parts = [self._for_all_models(host.holding) for host in self.hosts.values()]
            whole = Data(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))
            return self._data(whole, slice(None), self.server.place, self.augment)
        return self._data(self.dataset.train, self._train.order, self.server.place, self.augment)

    def _for_all_models(self, holding: Holding) -> Data[Tensor]:
        """A site's training samples, with the tokens of all tokenizers."""
        if not self.dataset.columns:
            return holding.train
        if holding.texts is None:
            raise ConfigError("sites gave token ids, not texts: models with other tokenizers cannot read them")
        return Data(self.dataset.tokens(holding.texts), holding.train.labels)

    def _columns_of(self, A: str) -> Columns:
        return next(c for c in self.dataset.columns if c.encoding == self._encodings[A])

    def _builders(
        self, models: Mapping[str, Architecture] | Sequence[str], called: Mapping[str, str], norm: str, head: str
    ) -> tuple[dict[str, Builder], list[str]]:
        if not models:
            raise ConfigError("models.clients = []: name at least one architecture")
        named = dict(models) if isinstance(models, Mapping) else {called[n]: n for n in models}
        order = list(models) if isinstance(models, Mapping) else [called[n] for n in models]
        return {n: self._builder(n, a, norm, head) for n, a in named.items()}, order

    def _builder(self, name: str, architecture: Architecture, norm: str, head: str) -> Builder:
        data = self.dataset
        read: Callable[[nn.Module], nn.Module] = lambda model: model  # noqa: E731
        shape, vocabulary = data.shape, data.vocabulary
        if data.columns:  # models have different tokenizers: each takes the columns of its own
            own = self._columns_of(name)
            read, shape, vocabulary = partial(reading, columns=own), (own.length,), own.encoding.vocabulary
        spec = dataclasses.replace(self.spec, shape=shape, vocabulary=vocabulary)
        made = builder_of(name, architecture, norm, head, spec, self.options, self._weights, self.lora)
        return lambda: read(made())


def builder_of(
    name: str,
    architecture: Architecture,
    norm: str,
    head: str,
    spec: Spec,
    options: Options,
    weights: str = "pretrained",
    lora: Lora | None = None,
) -> Builder:
    """A function that makes the model called `name`, for samples of this spec."""
    safe_name(name, "model name")
    variant = variant_of(architecture if isinstance(architecture, str) else name, options, lora)
    made = _plain_builder(variant, architecture, norm, head, spec, weights)
    own = variant.lora
    return made if own is None else lambda: adapted(made(), own, name)


def _plain_builder(
    variant: Variant, architecture: Architecture, norm: str, head: str, spec: Spec, weights: str
) -> Builder:
    """The same without LoRA."""
    if isinstance(architecture, nn.Module):
        module = architecture
        return lambda: copy.deepcopy(module)
    if isinstance(architecture, str):
        info = model_info(variant.model)
        kind = info.name  # a path is resolved now, where code may be allowed
        wanted: dict[str, Any] = {"vocabulary": spec.vocabulary} if spec.vocabulary else {}
        wanted |= ({"weights": weights} if "weights" in info.options else {}) | variant.build
        return lambda: build(kind, spec.outputs, spec.shape, norm, head, **wanted)  # type: ignore[arg-type]
    return architecture


def share_for_sites(client_test: float | str) -> float:
    """The share that a site keeps for testing; sites have no test set in common."""
    if isinstance(client_test, str):
        raise ConfigError(
            f"data.client_test = {client_test!r}: sites have test samples of their own; give a share, say 0.2"
        )
    return client_test


def dealt(assign: str, sizes: Tensor, models: int, seed: int) -> Tensor:
    """Which of so many models each client has, in turn, at random, or in blocks of clients: by number or by size."""
    K = len(sizes)
    if assign == "even":
        return torch.arange(K) % models
    if assign == "random":
        return torch.randint(models, (K,), generator=torch.Generator().manual_seed(seed))
    order = sizes.argsort(stable=True) if assign == "by-size" else torch.arange(K)
    which = torch.empty(K, dtype=torch.int64)
    which[order] = torch.arange(K) * models // K
    return which


def _parameters(build: Builder) -> int:
    return sum(p.numel() for p in repeatable(0, build).parameters())


def _called(models: Mapping[str, Architecture] | Sequence[str], server: object) -> dict[str, str]:
    """What the models that are given by name or path are called in the run."""
    given = [*models, *([server] if isinstance(server, str) else [])]
    return {name: called for called, name in architectures(given).items()}


def _check_sites(sites: Sites, models: object, partition: object, public: object, assign: object) -> None:
    """Refuse what cannot be said beside sites."""
    if not sites:
        raise ConfigError("sites: there are none; name at least one, [sites.NAME]")
    for k in sites:
        safe_name(k, "site")
    if models or partition is not None or assign != "even":
        raise ConfigError("sites bring their own data and models: leave out models, partition and assign")
    if isinstance(public, PublicConfig) and public.source == "held-out":
        raise ConfigError(
            'public.source = "held-out": nobody takes samples out of what a site holds; use "dataset", "generator" or '
            '"noise", or "none"'
        )


def _site_models(sites: Sites) -> dict[str, str]:
    """The name of each site's architecture. It depends on that site alone, so that a site knows it as well."""
    named: dict[str, Architecture] = {}
    called: dict[str, str] = {}
    for k, (_, model) in sorted(sites.items()):
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


def _encodings_of(
    models: Mapping[str, Architecture] | Sequence[str], server: object, options: Options
) -> dict[str, Encoding]:
    """How every model reads texts, by its name in the run."""
    called = _called(models, server)
    given = dict(models) if isinstance(models, Mapping) else {called[n]: n for n in models}
    if server is not None:
        name, architecture = server if isinstance(server, tuple) else (called[server], server)  # type: ignore[index]
        given[name] = architecture
    return {name: tokenizer_of(architecture, options) for name, architecture in given.items()}


def tokenizer_of(architecture: Architecture, options: Options) -> Encoding:
    """How a model reads texts: with a tokenizer that it brings, or by words."""
    kind = variant_of(architecture, options).model if isinstance(architecture, str) else architecture
    return encoding_of(kind) or WORDS


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
    dataset = load_data(data, seed)
    if data.split:
        public = _public_of_split(len(dataset.train) + len(dataset.test), data.split, public)
    return Scenario(
        dataset.normalised(data.mean, data.std) if data.mean else dataset,
        models.clients,
        partition,
        public,
        server=models.server,
        validation=data.validation,
        client_test=data.client_test,
        client_validation=data.client_validation,
        augment=data.augment,
        assign=models.assign,
        norm=models.norm,
        head=models.head,
        options=models.options,
        weights=models.weights,
        lora=models.lora,
        task=data.task,
        seed=seed,
        workers=workers,
    )


def load_data(data: DataConfig, seed: int) -> Dataset:
    """The data set that a configuration names, with the training and test samples of its runs. With `data.split` all
    samples are pooled and divided anew."""
    dataset = load(
        data.name, data.path, data.train_size, data.test_size, seed, data.length, data.image_size,
        text_column=data.text_column, pair_column=data.pair_column, label_column=data.label_column,
        user_column=data.user_column, user_min=data.user_min, test_users=data.test_users, task=data.task,
    )  # fmt: skip
    return dataset.pooled(data.split[2], seed_from(seed, "split")) if data.split else dataset


def _public_of_split(total: int, shares: Sequence[float], public: PublicConfig) -> PublicConfig:
    """How many of all samples are public: they are held out of the training samples by `Scenario`."""
    held = round(shares[1] * total)
    if public.source == "held-out" and public.size is not None:
        raise ConfigError(
            f"public.size = {public.size}: data.split already says how many samples are public; leave it out"
        )
    if held and public.source != "held-out":
        raise ConfigError(
            f"data.split = {list(shares)}: its public samples need public.source = 'held-out'; with public.source = "
            f"{public.source!r} write 0 for them"
        )
    return dataclasses.replace(public, size=held) if held else public
