"""The models of a run: [models] of a configuration, and the one way to build and rebuild what it names.

[models.options.NAME] has the settings of one architecture: the model it is a variant of, precision, LoRA, sizes. Two
names may stand for one model of the zoo. Clients with the same network but different precision are then two
architectures, which are averaged separately:

    [models]
    clients = ["resnet8", "resnet8-1bit"]

    [models.options.resnet8-1bit]
    model = "resnet8"
    bits = 1
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from solera.core.errors import ConfigError
from solera.core.plugins import architectures, is_path
from solera.core.settings import Problem, settings, show
from solera.core.wire import safe_name
from solera.data.dataset import Spec
from solera.data.encodings import WORDS, Columns, Encoding, reading
from solera.models.hf import drop_poolers
from solera.models.lora import Lora, adapted, lora_from, lora_problems
from solera.models.registry import MODELS, build, encoding_of, model_info

Architecture = str | nn.Module | Callable[[], nn.Module]
Options = dict[str, dict[str, Any]]  # by the architecture's name
Assign = Literal["even", "random", "by-size", "tiers"] | dict[str, str]
PRECISION = ("bits", "activations")


@settings
class ModelsConfig:
    """The architectures of the clients, and the one that the server trains for itself."""

    clients: list[str] = field(default_factory=lambda: ["lenet5"])  # repeat a name to give it more clients
    server: str | None = None
    norm: Literal["batch", "group", "none"] = "batch"
    head: Literal["plain", "shared", "projection"] = "plain"  # layers after the features; shared: of one shape
    assign: Assign = "even"  # by-size: small models to clients with few samples; tiers: in blocks; a table: by client
    options: Options = field(default_factory=dict)  # by architecture: a variant of which model, bits, sizes
    weights: Literal["pretrained", "random"] = "pretrained"  # initial weights of models that have pretrained ones
    lora: Lora | None = None  # train and send only small matrices beside the layers; by model: options

    def problems(self) -> Iterator[Problem]:
        """An empty list of architectures, options of architectures that are not in the run, and invalid values."""
        if not self.clients:
            yield "clients = []: name at least one architecture"
        names = [*self.clients, *([self.server] if self.server else [])]
        for name, given in self.options.items():
            key = f"options.{name}"
            if name not in names and name not in MODELS:  # of a model that this run does not use: see runs/unread.py
                there = ", ".join(names)
                yield f"{key}: no architecture of models.clients or models.server is called {name!r}: {there}"
            if not isinstance(given.get("model", name), str):
                yield f"{key}.model = {show(given['model'])}: expected the name of a model"
            elif is_path(given.get("model", "")):
                yield f"{key}.model = {show(given['model'])}: a path goes into models.clients; here, a registered name"
            yield from lora_problems(given.get("lora", False), f"{key}.lora")
            for what in PRECISION:
                bits = given.get(what, 32)
                if isinstance(bits, bool) or not isinstance(bits, int) or not (1 <= bits <= 8 or bits == 32):
                    yield f"{key}.{what} = {show(bits)}: expected 1 to 8, or 32 for full precision"
                elif bits != 32 and given.get("lora", self.lora is not None) not in (False, None):
                    yield f"{key}: {what} = {bits} and lora do not go together; write lora = false, or {what} = 32"

    def variant(self, name: str) -> Variant:
        """The architecture called `name`, with its options."""
        given = dict(self.options.get(name, {}))
        model = given.pop("model", name)
        precision = {key: given.pop(key) for key in PRECISION if key in given}
        lora = lora_from(given.pop("lora"), f"options.{name}.lora") if "lora" in given else self.lora
        return Variant(model, precision, lora, given)

    @property
    def built(self) -> list[str]:
        """The models of the clients as they are registered, in the order of `clients`."""
        return [self.variant(name).model for name in self.clients]

    @property
    def called(self) -> dict[str, str]:
        """The names of the architectures in the run, mapped to their names here."""
        return architectures([*self.clients, *([self.server] if self.server else [])])


@dataclass(frozen=True)
class Variant:
    """The parsed options of one architecture."""

    model: str  # the registered model, or the path, that is built
    precision: dict[str, int]  # bits of weights and of activations, where given
    lora: Lora | None
    build: dict[str, Any]  # options of the model itself, see `ModelInfo.options`


def tokenizer_of(architecture: Architecture, options: ModelsConfig) -> Encoding:
    """The tokenizer with which a model reads texts: one that it brings, or words."""
    kind = options.variant(architecture).model if isinstance(architecture, str) else architecture
    return encoding_of(kind) or WORDS


class ModelFactory:
    """Builds and rebuilds the models of a run, by their names in it, for samples of one spec.

    `given`: by name, what is built: a registered name or a path, a module (copied) or a function that makes one.
    Unset: the architectures that the options name.
    """

    def __init__(self, spec: Spec, options: ModelsConfig, given: Mapping[str, Architecture] | None = None):
        self.spec, self.options = spec, options
        self.given: Mapping[str, Architecture] = options.called if given is None else given
        self.variants: dict[str, Variant] = {}
        self.infos = {}  # resolve paths here, where code may be allowed
        for A, architecture in self.given.items():
            safe_name(A, "model name")
            self.variants[A] = variant = options.variant(architecture if isinstance(architecture, str) else A)
            if isinstance(architecture, str):
                self.infos[A] = model_info(variant.model)

    def columns(self, A: str) -> Columns | None:
        """The columns of a sample that the model called `A` reads; None: all of it."""
        if not self.spec.columns:
            return None
        wanted = tokenizer_of(self.given[A], self.options)
        return next(c for c in self.spec.columns if c.encoding == wanted)

    def make(self, A: str, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """The model called `A`: initialised from torch's generator, or with these weights.

        With LoRA, `weights` are the small matrices and the head; the frozen base is made as it was for the run.
        """
        if A not in self.given:
            raise ConfigError(f"no architecture is called {A!r}; known here: {', '.join(self.given)}")
        given, variant, columns = self.given[A], self.variants[A], self.columns(A)
        if isinstance(given, nn.Module):
            model = copy.deepcopy(given)
        elif not isinstance(given, str):
            model = given()
        else:
            shape, vocabulary, own = self.spec.shape, self.spec.vocabulary, dict(variant.build)
            if columns is not None:
                shape, vocabulary = (columns.length,), columns.encoding.vocabulary
            if "weights" in self.infos[A].options:
                own.setdefault("weights", self.options.weights)
                if weights is not None and variant.lora is None:
                    own["weights"] = "random"  # they are replaced below
            if vocabulary:
                own.setdefault("vocabulary", vocabulary)
            norm, head = self.options.norm, self.options.head
            model = build(self.infos[A].name, self.spec.outputs, shape, norm, head, **own)
        if variant.lora is not None:
            model = adapted(model, variant.lora, A)
        if columns is not None:
            model = reading(model, columns)
        if weights is not None:
            if variant.lora is None:
                drop_poolers(model, weights)
            model.load_state_dict(weights)
        return model
