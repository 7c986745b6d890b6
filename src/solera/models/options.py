"""The options of one architecture, `[models.options.NAME]`: the model it is a variant of, precision, LoRA, size.

Two names may stand for one model of the zoo, so that clients with the same network but different precision are two
architectures, which are averaged apart:

    [models]
    clients = ["resnet8", "resnet8-1bit"]

    [models.options.resnet8-1bit]
    model = "resnet8"
    bits = 1
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from solera.core.plugins import is_path
from solera.core.settings import Problem, show
from solera.models.lora import Lora, lora_from, lora_problems
from solera.models.registry import MODELS

Options = dict[str, dict[str, Any]]  # by the architecture's name
PRECISION = ("bits", "activations")


@dataclass(frozen=True)
class Variant:
    """The options of one architecture, read."""

    model: str  # the registered model, or the path, that is built
    precision: dict[str, int] = field(default_factory=dict)  # bits of weights and of activations, where given
    lora: Lora | None = None
    build: dict[str, Any] = field(default_factory=dict)  # options of the model itself, see `ModelInfo.options`


def variant_of(name: str, options: Mapping[str, Mapping[str, Any]], lora: Lora | None = None) -> Variant:
    """The architecture called `name` under these options; `lora`: what models have that say nothing of it."""
    given = dict(options.get(name, {}))
    model = given.pop("model", name)
    precision = {key: given.pop(key) for key in PRECISION if key in given}
    own = lora_from(given.pop("lora"), f"options.{name}.lora") if "lora" in given else lora
    return Variant(model, precision, own, given)


def options_problems(
    options: Mapping[str, Mapping[str, Any]], names: list[str], lora: Lora | None = None
) -> Iterator[Problem]:
    """Options of architectures that are not in the run, and invalid values."""
    for name, given in options.items():
        key = f"options.{name}"
        if name not in names and name not in MODELS:  # of a model that this run does not use: see runs/unread.py
            yield f"{key}: no architecture of models.clients or models.server is called {name!r}: {', '.join(names)}"
        if not isinstance(given.get("model", name), str):
            yield f"{key}.model = {show(given['model'])}: expected the name of a model"
        elif is_path(given.get("model", "")):
            yield f"{key}.model = {show(given['model'])}: a path goes into models.clients; here, a registered name"
        yield from lora_problems(given.get("lora", False), f"{key}.lora")
        for what in PRECISION:
            bits = given.get(what, 32)
            if isinstance(bits, bool) or not isinstance(bits, int) or not (1 <= bits <= 8 or bits == 32):
                yield f"{key}.{what} = {show(bits)}: expected 1 to 8, or 32 for full precision"
            elif bits != 32 and given.get("lora", lora is not None) not in (False, None):
                yield f"{key}: {what} = {bits} and lora do not go together; write lora = false, or {what} = 32"
