"""What a method needs and the settings do not give: a sensible value for each, and why.

So that another method can be tried on a working configuration by its name alone. Only what nobody has decided is
supplied; what was decided against stays, and the run is refused with the reason (`run.check_fit`).
"""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from .data import PartitionConfig, PublicConfig
from .federation import FederationConfig
from .method import info_of, needs_of, personal_task
from .models import MODELS, build
from .scenario import DataConfig, ModelsConfig

CLIENT_TEST = 0.2  # share of each client's samples
LARGE = {"image": ("fedet-cnn", "vgg9", "vgg11", "vgg19"), "text": ("lstm",)}  # for the server, the smallest first
SIZED_ON = {"image": ((1, 28, 28), None), "text": ((64,), 1000)}  # shape and vocabulary on which sizes are compared


class Supplied(NamedTuple):
    """A setting that follows from the method."""

    key: str
    value: Any
    why: str


def supplied(
    method: Any,
    data: DataConfig,
    partition: PartitionConfig,
    public: PublicConfig,
    models: ModelsConfig,
    federation: FederationConfig,
    decided: Collection[str],
) -> list[Supplied]:
    """The settings that `method` needs to run on this federation. The keys in `decided` are left alone."""
    needed = [
        *_of_data(method, data, public),
        *_of_models(needs_of(method), models),
        *_of_groups(method, partition, models, federation),
    ]
    return [s for s in needed if s.key not in decided]


def _of_data(method: Any, data: DataConfig, public: PublicConfig) -> Iterator[Supplied]:
    if personal_task(method) and data.client_test == 0:
        yield Supplied("data.client_test", CLIENT_TEST, "each client's model is scored on a test split of its own")
    distils = getattr(getattr(method, "fusion", None), "steps", None) != 0
    source = public.source
    if info_of(method).public != "none" and distils and source == "none":
        source = "held-out"
        yield Supplied("public.source", source, "it needs public samples, here some taken from the training set")
    if "labels" in needs_of(method) and not public.labels and source in ("held-out", "dataset"):
        yield Supplied("public.labels", True, "it needs the labels of the public samples")


def _of_models(needs: set[str], models: ModelsConfig) -> Iterator[Supplied]:
    server = models.server
    if "large" in needs and server is None and (server := _larger(models.clients)):
        yield Supplied("models.server", server, "it trains a model of the server's own, larger than the clients'")
    if (
        needs & {"shared head", "shared features"}
        and models.head == "plain"
        and len({*models.clients, server} - {None}) > 1
    ):
        yield Supplied("models.head", "shared", "its models have heads of one shape")
    with_norm = models.norm != "none" and any(MODELS[name].has_norm for name in models.clients)
    if "chain" in needs and with_norm:
        yield Supplied("models.norm", "none", "it takes plain chains of layers, without norm layers")
    elif "no BatchNorm" in needs and models.norm == "batch" and with_norm:
        yield Supplied("models.norm", "group", "it cannot pass on the running statistics of BatchNorm")


def _of_groups(
    method: Any, partition: PartitionConfig, models: ModelsConfig, federation: FederationConfig
) -> Iterator[Supplied]:
    """Fewer groups where there are few clients. Who has which model is known here only if it is dealt out evenly."""
    if "K clients" not in needs_of(method) or getattr(method, "group_sizes", None) is not None:
        return
    if partition.clients is None or partition.kind == "user" or models.assign != "even":
        return
    dealt = Counter(models.clients[i % len(models.clients)] for i in range(partition.clients))
    active = min(min(dealt.values()), federation.cohort(partition.clients))
    if active < method.K:
        why = f"no more clients of one architecture can be active in a round, and {method.K} groups would need them"
        yield Supplied("method.K", active, why)


def _larger(clients: list[str]) -> str | None:
    """A model of the zoo for the server: the smallest of a few that is larger than all of the clients'."""
    kind = MODELS[clients[0]].kind
    most = max((_size(name) for name in clients if not MODELS[name].own), default=0)
    return next((name for name in LARGE[kind] if name not in clients and _size(name) > most), None)


def _size(name: str) -> int:
    """How many parameters a model of the zoo has, without making them."""
    shape, vocabulary = SIZED_ON[MODELS[name].kind]
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, 10, shape, vocabulary=vocabulary).parameters())
