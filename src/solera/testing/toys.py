"""The small federation for tests of methods and engines: eight clients, two architectures, one of them with BatchNorm
and dropout. A round takes milliseconds."""

import dataclasses
import pathlib
from typing import Any

import torch
from torch import nn

from ..core.federation import FederationConfig
from ..data import PartitionConfig, PublicConfig, from_tensors
from ..engines import EngineSettings, engine_named
from ..method import Method
from ..models import wrap
from ..models.factory import ModelsConfig
from ..runs.config import RunConfig
from ..runs.loop import Result, simulate
from ..scenario.scenario import Scenario


def wide() -> nn.Module:
    """A plain architecture of the toy federation."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def deep() -> nn.Module:
    """The other architecture, with what makes reproducible bits hard: BatchNorm statistics and dropout."""
    return nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def deep_group() -> nn.Module:
    """`deep` with GroupNorm, for methods that refuse running statistics."""
    return nn.Sequential(
        nn.Linear(8, 12), nn.GroupNorm(3, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def stacked() -> nn.Module:
    """A plain chain like `wide`, with one more layer: for methods that match or cut neurons."""
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def split_wide() -> nn.Module:
    """`wide` as a split model, for methods that need it; all split models here have heads of the same shape."""
    return wrap(wide(), classifier="2", head="shared", representation=8, head_hidden=8)


def split_deep() -> nn.Module:
    """`deep` as a split model."""
    return wrap(deep(), classifier="6", head="shared", representation=8, head_hidden=8)


def large() -> nn.Module:
    """The server's own model: a split model, larger than any client's."""
    whole = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    return wrap(whole, classifier="6", head="shared", representation=8, head_hidden=8)


def toy(
    models: dict[str, Any] | None = None, clients: int = 8, seed: int = 0, samples: int = 400, **options: Any
) -> Scenario:
    """A federation that trains in a fraction of a second: three classes of points in eight dimensions.

    `options` are settings of [models] and arguments of `Scenario`; `server` is a name and what builds the model.
    """
    g = torch.Generator().manual_seed(7)
    centres = torch.randn(3, 8, generator=g) * 2

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(n) % 3
        return centres[y] + torch.randn(n, 8, generator=g), y

    data = from_tensors(draw(samples), draw(150), classes=3, name="toy")
    options = {"client_test": 0.25, "validation": 0.1, "public": PublicConfig(size=60), **options}
    split = options.pop("partition", PartitionConfig(clients=clients, alpha=1.0, variant="class", min_size=4))
    modules = dict(models or {"wide": wide, "deep": deep})
    told = {f.name: options.pop(f.name) for f in dataclasses.fields(ModelsConfig) if f.name in options}
    names = list(modules)
    if (own := told.get("server")) is not None:
        told["server"], modules[own[0]] = own
    return Scenario(data, ModelsConfig(clients=names, **told), split, modules=modules, seed=seed, **options)


def small(method: Method) -> Method:
    """The same method with so little local training and distillation that a round takes milliseconds."""
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(method):
        value = getattr(method, f.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            less = {"epochs": 1, "steps": 6, "batch": 16, "every": 2, "patience": 4}
            known = {g.name for g in dataclasses.fields(value)}
            less.pop("steps" if getattr(value, "steps", None) is None else "epochs")  # training uses only one of them
            changes[f.name] = dataclasses.replace(value, **{k: v for k, v in less.items() if k in known})
    return dataclasses.replace(method, **changes)


def toy_for(method: Method, **options: Any) -> Scenario:
    """A toy federation that fits the method's traits, with one architecture if the method needs that."""
    traits = method.traits()
    models: dict[str, Any] = {"wide": wide, "deep": deep}
    if traits.split in ("split", "shared features", "shared head"):
        models = {"wide": split_wide, "deep": split_deep}
    if not traits.batchnorm:
        models["deep"] = deep_group
    if traits.split == "chain":
        models = {"wide": wide, "deep": stacked}
    if traits.architectures == "one":
        del models["wide"]
    if traits.public_labels == "needed":
        options.setdefault("public", PublicConfig(size=60, labels=True))
    if traits.server_model == "larger":
        options.setdefault("server", ("large", large))
    return toy(**{"models": models, **options})


def run_toy(
    method: Method, out: pathlib.Path, engine: str | EngineSettings = "inprocess", rounds: int = 3, **options: Any
) -> Result:
    """A toy run of a method."""
    return simulate(
        toy_for(method, **options),
        method,
        out,
        RunConfig(rounds=rounds),
        FederationConfig(fraction=0.75),
        engine_named(engine, workers=2) if isinstance(engine, str) else engine,
        resume=True,
    )
