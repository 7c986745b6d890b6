"""Runs that differ in the order of sums only: toy federations without dropout, and how far two results are apart."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from solera.method import Method
from solera.models import wrap
from solera.runs.loop import Result
from solera.testing import wide


def deeper() -> nn.Module:
    """A second plain architecture."""
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def plain_models(method: Method) -> dict[str, Any]:
    """Architectures for a method, without BatchNorm and dropout."""
    models: dict[str, Any] = {"wide": wide, "deep": deeper}
    if method.traits().split in ("split", "shared features", "shared head"):
        models = {name: _split(make, last) for (name, make), last in zip(models.items(), "24", strict=True)}
    if method.traits().architectures == "one":
        del models["wide"]
    return models


def _split(make: Any, last: str) -> Any:
    return lambda: wrap(make(), classifier=last, head="shared", representation=8, head_hidden=8)


def apart(one: Result, other: Result) -> float:
    """The largest difference between two numbers at one place: of models and of what clients keep, or of the state."""
    pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    assert one.models.keys() == other.models.keys()
    pairs += [(one.models[name].weights, other.models[name].weights) for name in one.models]
    kept = [_kept(result.out) for result in (one, other)]
    assert kept[0].keys() == kept[1].keys()
    pairs += [(kept[0][k], kept[1][k]) for k in kept[0]]
    if not any(a for a, _ in pairs):  # others may have a generator there, whose biases before BatchNorm are noise
        pairs.append((dict(tensors_of(one.state)), dict(tensors_of(other.state))))
    assert all(a.keys() == b.keys() for a, b in pairs)
    return max(float((a[n].double() - b[n].double()).abs().max()) for a, b in pairs for n in a if a[n].numel())


def tensors_of(what: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of floats in a state, each with where it is."""
    if isinstance(what, Tensor):
        if what.is_floating_point():
            yield path, what
    elif isinstance(what, dict):
        for k, v in what.items():
            yield from tensors_of(v, f"{path}/{k}")
    elif isinstance(what, list | tuple):
        yield from tensors_of(dict(enumerate(what)), path)
    elif dataclasses.is_dataclass(what):
        yield from tensors_of({f.name: getattr(what, f.name) for f in dataclasses.fields(what)}, path)


def _kept(out: pathlib.Path) -> dict[str, dict[str, Tensor]]:
    """The newest state of every client."""
    newest = {file.parent.name: file for file in sorted((out / "clients").rglob("*.safetensors"))}
    return {k: load_file(file) for k, file in newest.items()}
