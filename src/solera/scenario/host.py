"""The host of one client: its own part of the data, its own model, and nothing else.

A simulation is made of these hosts, and a deployment runs one of them at each site. So all give a task the same
`Client`, to the bit, and a task cannot tell which of them it is in.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn

from ..core.calls import ClientInfo, Roster
from ..core.errors import ConfigError
from ..core.task import Client, Data
from ..core.tensors import Brought, Weights, sent
from ..data import Public
from ..data.dataset import Spec
from ..data.encodings import Text
from ..data.transforms import Name, Step, drawn_anew
from ..models.lora import base_digest
from ..place.placement import Placement


@dataclasses.dataclass(frozen=True)
class Hello:
    """Facts about a site before a run, enough to find out that it is set up for another one."""

    name: str
    architecture: str
    num_examples: int
    num_test: int
    run_seed: int
    form: str  # sha256 of the spec of samples: shape, classes, normalisation
    layout: str  # sha256 of the names, shapes and types of its model's tensors
    public: str  # sha256 of its public data; "": it has none
    tokenizer: str = ""  # the model's own tokenizer, whose name ends in a hash; "": none

    @property
    def digest(self) -> str:
        """sha256 of all fields."""
        return hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Remote:
    """The data of a remote site, of which only the sizes are known here."""

    num_examples: int
    num_test: int = 0


@dataclasses.dataclass(frozen=True)
class View:
    """Some rows of stored samples, or all of them. Many clients share the samples, each with its own rows."""

    of: Data[Tensor]
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.of if self.rows is None else self.rows)

    @property
    def labels(self) -> Tensor:
        """The classes of the samples."""
        return self.of.labels if self.rows is None else self.of.labels[self.rows]

    def ready(self, spec: Spec, place: Placement, augment: Sequence[Name | Step] = ()) -> Data:
        """The samples as input of a model. The whole set is copied to the device once and sliced there."""
        if spec.task == "causal-lm":
            inputs = place.put(self.of.inputs) if place.fits(self.of.inputs) else self.of.inputs
            rows = slice(None) if self.rows is None else sent(self.rows, inputs.device)
            blocks = sent(inputs[rows], place.device)
            return Data(blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous())
        labels, here = place.put(self.of.labels), place.fits(self.of.inputs)
        inputs = place.put(self.of.inputs) if here else self.of.inputs
        if self.rows is not None:
            inputs, labels = inputs.index_select(0, self.rows.to(inputs.device)), labels[self.rows.to(place.device)]
        if augment:
            return Data(drawn_anew(inputs, augment, spec.prepare, place.device), labels)
        return Data(spec.prepare(inputs) if here else Brought(inputs, place.device, spec.prepare), labels)


class ClientHost:
    """The `Host` of one client. `template` gives its model as the run's seed initialises it.

    Of a site, `texts` are those of its training samples, if known.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        train: View,
        test: View,
        architecture: str,
        template: Callable[[], nn.Module],
        public: Public | None,
        augment: Sequence[Name | Step],
        seed: int,
        texts: Sequence[Text] | None = None,
    ):
        self.name, self.spec, self.train, self.test, self.texts = name, spec, train, test, texts
        self.architecture, self.template = architecture, template
        self.public, self.augment, self.seed = public, augment, seed

    @cached_property
    def roster(self) -> Roster:
        """This client alone."""
        return Roster.of({self.name: ClientInfo(self.architecture, len(self.train))})

    @cached_property
    def layout(self) -> str:
        """sha256 of the layout of its model."""
        return layout_digest(self.template())

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement) -> Client:
        """The client for one call, with its data ready for a model."""
        if k != self.name:
            raise KeyError(k)
        train = self.train.ready(self.spec, place, self.augment)
        test = self.test.ready(self.spec, place)
        template = place.module(self.template())
        public = None if self.public is None else self.public.at(place)
        return Client(k, self.architecture, train, test, public, self.spec.outputs, seed, state, template)

    def hello(self) -> Hello:
        """Its facts for the server."""
        return Hello(
            self.name,
            self.architecture,
            len(self.train),
            len(self.test),
            self.seed,
            form_digest(self.spec),
            self.layout,
            "" if self.public is None else self.public.digest,
            self.spec.tokenizer,
        )


class Hosts(Mapping[str, ClientHost]):
    """The hosts of simulated clients, each made when it is used: there may be a million."""

    def __init__(self, roster: Roster, make: Callable[[str], ClientHost]):
        self.roster, self.make = roster, make

    def __getitem__(self, k: str) -> ClientHost:
        return self.make(k)

    def __iter__(self) -> Iterator[str]:
        return iter(self.roster)

    def __len__(self) -> int:
        return len(self.roster)


def form_digest(spec: Spec) -> str:
    """sha256 of the spec of samples, without the name of the data set."""
    about = [spec.shape, spec.classes, spec.class_names, spec.mean, spec.std, spec.vocabulary]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def layout_digest(model: nn.Module) -> str:
    """sha256 of the names, shapes and types of a model's tensors, and of the values of those that are never sent."""
    about: list[object] = [(name, list(t.shape), str(t.dtype)) for name, t in model.state_dict().items()]
    if (base := base_digest(model)) is not None:
        about.append(base)
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def check_hellos(expected: Mapping[str, Hello], found: Mapping[str, Hello]) -> None:
    """Refuse sites that are configured for another run, with the culprit and both values.

    `expected` has the hello of each site as the server's own configuration describes it; its sizes do not count.
    """
    ways = {
        "architecture": "sites.{k}.model must name the same model in both files",
        "run_seed": "set run.seed in the site's file to the server's",
        "tokenizer": "the tokenizer of sites.{k}.model must be the same in both places: install the same files there",
        "form": "data.shape, data.classes, data.length, data.mean and data.std must be the same in both files",
        "layout": "the model of that name has other layers, or another frozen base (LoRA), there: use the same code, "
        "options and weights",
        "public": 'every site must have the server\'s public data: compare [public], or set public.where = "server"',
    }
    for k, ours in expected.items():
        if k not in found:
            raise ConfigError(f"site {k} has not said hello")
        theirs = found[k]
        for field, way in ways.items():
            mine, its = getattr(ours, field), getattr(theirs, field)
            if mine != its and not (field == "public" and not mine):
                raise ConfigError(
                    f"site {k}: {field} is {_short(its)} there and {_short(mine)} here: {way.format(k=k)}"
                )


def _short(value: object) -> str:
    text = str(value) or "nothing"
    return text[:16] + "..." if len(text) == 64 else text
