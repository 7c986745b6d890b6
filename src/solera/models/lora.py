"""LoRA (Hu et al., ICLR 2022): a model learns small matrices beside its layers, while the layers stay as they are.

The frozen weights stop being parameters: they become buffers that are not part of the model's `state_dict()`. Only the
`state_dict()` is sent, averaged, saved and counted: with every method and engine, the small matrices and the head
alone. Every party makes the frozen base itself, from the same files or the run's seed; its digest is recorded and
compared. Copies of a model share it (`tensors.copy_of`).
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from typing import Any, Literal

import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.core.settings import BelowOne, Positive, PositiveInt, Problem, SettingsError, settings, show, unknown_key
from solera.core.tensors import FROZEN, frozen_of
from solera.models.split import is_split
from solera.train.aggregate import PRODUCT

ADAPTER = {"factors": "default", "product": PRODUCT}  # peft's name of the only set of matrices, which tells averages
INSTALL = "pip install 'solera[text]'"


@settings
class Lora:
    """Small matrices beside the layers of a model: W x + (alpha / rank) B A x, with A and B learned."""

    rank: PositiveInt = 8  # rows of A, columns of B
    alpha: Positive = 16.0  # their weight, times rank
    dropout: BelowOne = 0.0  # of their input, in training
    layers: list[str] = field(default_factory=list)  # the layers' names or their last parts; []: all of the body
    average: Literal["factors", "product"] = "factors"  # of clients' models: A and B separately, or B A
    freeze_a: bool = False  # A keeps its random values and is not sent; the mean of B is then that of B A

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.freeze_a and self.average == "product":
            yield "average = 'product' beside freeze_a = true: with one A for all, the mean of B is it already; set one"


def lora_from(given: Any, key: str) -> Lora | None:
    """`lora` of one architecture: a table, true for the defaults, or false for none."""
    if isinstance(given, bool):
        return Lora() if given else None
    if isinstance(given, Lora):
        return given
    if not isinstance(given, Mapping):
        raise SettingsError("ModelsConfig", [f"{key} = {show(given)}: expected a table such as {{rank = 8}}, or false"])
    known = tuple(f.name for f in fields(Lora))
    if strange := [unknown_key(Lora, name, value) for name, value in given.items() if name not in known]:
        raise SettingsError("ModelsConfig", [f"{key}.{text}" for text in strange])
    try:
        return Lora(**given)
    except SettingsError as e:
        raise SettingsError("ModelsConfig", [f"{key}.{text}" for text in e.problems]) from None


def lora_problems(given: Any, key: str) -> Iterator[Problem]:
    """The problems of `lora` of one architecture."""
    try:
        lora_from(given, key)
    except SettingsError as e:
        yield from e.problems


def adapted(model: nn.Module, lora: Lora, name: str) -> nn.Module:
    """The model with LoRA in its body; everything after the body (of a model that is not split: its last linear layer)
    is trained in full, and the rest is frozen. The model itself is changed."""
    peft = _import(name)
    root = model.body if is_split(model) else model
    last = None if is_split(model) else _last_linear(model)
    targets = _targets(root, lora, name, last)
    kept = {id(p) for p in (last.parameters() if last is not None else ())}
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, bias="none"
    )
    try:
        peft.inject_adapter_in_model(config, root, ADAPTER[lora.average])
    except (ValueError, NotImplementedError, RuntimeError) as e:
        raise ConfigError(f"model {name!r}: LoRA does not fit its layers ({' '.join(str(e).split())[:200]})") from None
    for module in root.modules():
        _freeze(module, kept)
    if lora.freeze_a:
        for path, module in root.named_modules():
            if ".lora_A." in f".{path}":
                module.requires_grad_(False)
                _freeze(module, set())
    for p in model.parameters():
        p.requires_grad_(True)  # peft has frozen layers that are trained in full here
    return model


def merged(model: nn.Module) -> nn.Module:
    """The model as an ordinary one, with the learned matrices added to its layers. The model itself is changed."""
    tuners = importlib.import_module("peft.tuners.lora")
    for module in model.modules():
        for name in vars(module).pop(FROZEN, ()):
            value = getattr(module, name).clone()
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(value))
    for path, module in list(model.named_modules()):
        if isinstance(module, tuners.LoraLayer):
            module.merge()
            model.set_submodule(path, module.get_base_layer())
    return model


def base_digest(model: nn.Module) -> str | None:
    """sha256 of the frozen weights of a model, by name; None if it has none."""
    frozen, total = frozen_of(model), hashlib.sha256()
    for name, tensor in sorted(frozen.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:16] if frozen else None


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Bytes of the weights that are sent, and of the whole model."""
    travel = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    whole = model.state_dict() | frozen_of(model)  # but the small matrices, which it would not have without LoRA
    return travel, sum(t.numel() * t.element_size() for n, t in whole.items() if ".lora_" not in n)


def _import(name: str) -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError:
        raise ConfigError(f"model {name!r}: LoRA needs the package peft; install it with: {INSTALL}") from None


def _fits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)


def _last_linear(model: nn.Module) -> nn.Linear | None:
    linear = [layer for path, layer in model.named_modules() if path and isinstance(layer, nn.Linear)]
    return linear[-1] if linear else None


def _targets(root: nn.Module, lora: Lora, name: str, last: nn.Module | None) -> list[str]:
    """The paths of the layers that get matrices."""
    able = [path for path, layer in root.named_modules() if path and _fits(layer) and layer is not last]
    if not able:
        raise ConfigError(
            f"model {name!r} has no linear or convolutional layer in its body that LoRA could adapt; train it in full: "
            f"[models.options.{name}] lora = false"
        )
    if not lora.layers:
        return able
    found = [path for path in able if any(path == wanted or path.endswith(f".{wanted}") for wanted in lora.layers)]
    for wanted in lora.layers:
        if not any(path == wanted or path.endswith(f".{wanted}") for path in able):
            ends = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in able))
            raise ConfigError(f"model {name!r}: lora.layers names {wanted!r}, but its layers are {ends}")
    return found


def _freeze(module: nn.Module, kept: set[int]) -> None:
    """Its own parameters become buffers outside of its state, except those that peft leaves trainable (its small
    matrices) and those that are `kept`."""
    frozen = [n for n, p in module._parameters.items() if p is not None and not p.requires_grad and id(p) not in kept]
    for name in frozen:
        value = module._parameters.pop(name)
        assert value is not None
        module.register_buffer(name, value.detach(), persistent=False)
    if frozen:
        setattr(module, FROZEN, tuple(frozen))
