"""Default values for settings that a method needs and the configuration leaves open, each with the reason.

So a user can try another method on a working configuration just by its name. A setting that the configuration gives is
never changed; if it does not fit the method, the run is refused with the reason (`run.check_fit`).
"""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from ..core.federation import FederationConfig
from ..data import PartitionConfig, PublicConfig
from ..method import Method, Traits
from ..models import build, model_info
from ..models.factory import ModelsConfig
from ..scenario.task_data import DataConfig

CLIENT_TEST = 0.2  # share of each client's samples
LARGE = {
    "image": ("fedet-cnn", "vgg9", "vgg11", "vgg19"),
    "text": ("lstm", "bert-mini", "minilm-l6"),
    "causal-lm": ("gpt-micro",),
}  # for the server, the smallest first
SIZED_ON = {
    "image": ((1, 28, 28), None),
    "text": ((64,), 1000),
    "causal-lm": ((64,), 256),
}  # shape and vocabulary on which sizes are compared


class Supplied(NamedTuple):
    """A setting that is filled in for the method."""

    key: str
    value: Any
    why: str


def supplied(
    method: Method,
    data: DataConfig,
    partition: PartitionConfig,
    public: PublicConfig,
    models: ModelsConfig,
    federation: FederationConfig,
    decided: Collection[str],
) -> list[Supplied]:
    """The settings that `method` needs to run on this federation, except the keys in `decided`."""
    needed = [
        *_of_data(method.traits(), data, public),
        *_of_models(method.traits(), models, data.length),
        *_of_groups(method, partition, models, federation),
    ]
    return [s for s in needed if s.key not in decided]


def _of_data(traits: Traits, data: DataConfig, public: PublicConfig) -> Iterator[Supplied]:
    if traits.personal and data.client_test == 0:
        yield Supplied("data.client_test", CLIENT_TEST, "each client's model is scored on its own test split")
    source = public.source
    if traits.public != "none" and source == "none":
        source = "held-out"
        yield Supplied("public.source", source, "it needs public samples; these are taken from the training set")
    if traits.public_labels == "needed" and not public.labels and source in ("held-out", "dataset"):
        yield Supplied("public.labels", True, "it needs the labels of the public samples")


def _of_models(traits: Traits, models: ModelsConfig, length: int) -> Iterator[Supplied]:
    server = models.server
    if traits.server_model == "larger" and server is None and (server := _larger(models.built, length)):
        yield Supplied("models.server", server, "it trains a server model that is larger than the clients' models")
    alike = traits.split in ("shared head", "shared features")
    if alike and models.head == "plain" and len({*models.clients, server} - {None}) > 1:
        yield Supplied("models.head", "shared", "it needs heads of the same shape in all models")
    with_norm = models.norm != "none" and any(model_info(name).has_norm for name in models.built)
    if traits.split == "chain" and with_norm:
        yield Supplied("models.norm", "none", "it needs plain chains of layers, without norm layers")
    elif not traits.batchnorm and models.norm == "batch" and with_norm:
        yield Supplied("models.norm", "group", "it cannot transfer the running statistics of BatchNorm")


def _of_groups(
    method: Method, partition: PartitionConfig, models: ModelsConfig, federation: FederationConfig
) -> Iterator[Supplied]:
    """Fewer groups if there are few clients. The model of each client is known here only with models.assign = even."""
    setting = method.traits().groups
    if not setting:
        return
    if partition.clients is None or partition.kind == "user" or models.assign != "even":
        return
    dealt = Counter(models.clients[i % len(models.clients)] for i in range(partition.clients))
    active = min(min(dealt.values()), federation.cohort(partition.clients))
    groups = getattr(method, setting)
    if active < groups:
        why = f"{groups} groups need more clients of one architecture than can be active in a round"
        yield Supplied(f"method.{setting}", active, why)


def _larger(clients: list[str], length: int) -> str | None:
    """A built-in model for the server: the smallest in LARGE that is larger than all client models."""
    kind = model_info(clients[0]).kind
    most = max((_size(name, length) for name in clients if not model_info(name).own), default=0)
    return next((name for name in LARGE[kind] if name not in clients and _size(name, length) > most), None)


def _size(name: str, length: int) -> int:
    """The number of parameters of a built-in model, without allocating them; text models take up to `length` tokens."""
    info = model_info(name)
    shape, vocabulary = SIZED_ON[info.kind]
    shape = shape if info.kind == "image" else (min(shape[0], length),)
    options: dict[str, Any] = {"weights": "random"} if "weights" in info.options else {}
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, 10, shape, vocabulary=vocabulary, **options).parameters())
