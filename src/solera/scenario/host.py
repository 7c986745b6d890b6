"""The host of one site: a client made of its own data and its own model, and of nothing else.

A simulation of sites is made of these hosts, and a deployment runs one of them at each site. So both give a task the
same `Client`, to the bit, and a task cannot tell which of the two it is in.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from ..core.calls import ClientInfo, Roster
from ..core.errors import ConfigError
from ..core.task import Client, Data
from ..core.tensors import Brought, Weights
from ..data import Public
from ..data.site_data import Holding
from ..data.spec import Spec
from ..data.transforms import Name, Step, drawn_anew
from ..models.lora import base_digest
from ..place.placement import Placement


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a site says of itself before a run: enough to find out that it is set up for another one."""

    name: str
    architecture: str
    num_examples: int
    num_test: int
    run_seed: int
    form: str  # sha256 of what samples look like: shape, classes, normalisation
    layout: str  # sha256 of the names, shapes and types of its model's tensors
    public: str  # sha256 of its public data; "": it has none
    tokenizer: str = ""  # that its model brings: its name ends in a hash; "": none

    @property
    def digest(self) -> str:
        """sha256 of all of it."""
        return hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Remote:
    """Stands for the data of a site that is elsewhere: only its sizes are known here."""

    num_examples: int
    num_test: int = 0


class SiteHost:
    """The `Host` of one site. `template` gives its model as the run's seed initialises it."""

    def __init__(
        self,
        name: str,
        holding: Holding,
        spec: Spec,
        architecture: str,
        template: Callable[[], nn.Module],
        public: Public | None,
        augment: Sequence[Name | Step],
        seed: int,
    ):
        self.name, self.holding, self.spec, self.architecture = name, holding, spec, architecture
        self.template, self.public, self.augment, self.seed = template, public, tuple(augment), seed
        self.roster = Roster.of({name: ClientInfo(architecture, len(holding.train))})

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement) -> Client:
        """The site as a client, for one call."""
        if k != self.name:
            raise KeyError(k)
        train = prepared(self.holding.train, slice(None), place, self.spec.prepare, self.augment)
        test = prepared(self.holding.test, slice(None), place, self.spec.prepare)
        template = place.module(self.template())
        public = None if self.public is None else self.public.at(place)
        return Client(k, self.architecture, train, test, public, self.spec.classes, seed, state, template)

    def hello(self) -> Hello:
        """What the site says of itself."""
        return Hello(
            self.name,
            self.architecture,
            len(self.holding.train),
            len(self.holding.test),
            self.seed,
            form_digest(self.spec),
            layout_digest(self.template()),
            "" if self.public is None else self.public.digest,
            self.spec.tokenizer,
        )


def prepared(
    of: Data[Tensor],
    rows: Tensor | slice,
    place: Placement,
    prepare: Callable[[Tensor], Tensor],
    augment: Sequence[Name | Step] = (),
) -> Data:
    """Some samples, ready for a model. The whole set is put in place once, and then cut there."""
    labels, here = place.put(of.labels), place.fits(of.inputs)
    inputs = place.put(of.inputs) if here else of.inputs
    if isinstance(rows, slice):
        inputs, labels = inputs[rows], labels[rows]
    else:
        inputs, labels = inputs.index_select(0, rows.to(inputs.device)), labels[rows.to(place.device)]
    if augment:
        return Data(drawn_anew(inputs, augment, prepare, place.device), labels)
    return Data(prepare(inputs) if here else Brought(inputs, place.device, prepare), labels)


def form_digest(spec: Spec) -> str:
    """sha256 of what samples look like; the name of the data set is not part of it."""
    about = [spec.shape, spec.classes, spec.class_names, spec.mean, spec.std, spec.vocabulary]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def layout_digest(model: nn.Module) -> str:
    """sha256 of the names, shapes and types of a model's tensors, and of the values of those that never travel."""
    about: list[object] = [(name, list(t.shape), str(t.dtype)) for name, t in model.state_dict().items()]
    if (base := base_digest(model)) is not None:
        about.append(base)
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def check_hellos(expected: Mapping[str, Hello], found: Mapping[str, Hello]) -> None:
    """Refuse sites that are not set up for this run, with the culprit and both values.

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
