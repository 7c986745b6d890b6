"""Inspecting a model without changing it: its output for a dummy batch, and its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from solera.core.errors import ConfigError

PROBE_BATCH = 2


@dataclass(frozen=True)
class Size:
    """The size of a model when it is sent."""

    parameters: int
    buffers: int  # floats that are not trained, such as BatchNorm's running statistics

    @property
    def floats(self) -> int:
        return self.parameters + self.buffers


def size_of(model: nn.Module) -> Size:
    """The number of trained and untrained floats of the model (integer counters are not counted)."""
    return Size(
        parameters=sum(p.numel() for p in model.parameters()),
        buffers=sum(b.numel() for b in model.buffers() if b.is_floating_point()),
    )


def check_output(
    model: nn.Module | Callable[[], nn.Module],
    shape: tuple[int, ...],
    classes: int,
    name: str | None = None,
    tokens: bool | None = None,
    positions: int | None = None,
) -> None:
    """Raise ConfigError unless the model turns a batch of inputs into logits of shape [n, classes], or [n, positions,
    classes] where it predicts the next token at every position.

    `model` is a model or a function that builds one. `shape` is that of one sample; one dimension means a sequence
    of tokens if the model has an embedding, unless `tokens` says otherwise. The model's weights, buffers, modes and
    torch's random state do not change.
    """
    with torch.random.fork_rng(devices=[]):
        made = model if isinstance(model, nn.Module) else model()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model {name or model!r} is a {type(made).__name__}, not a torch.nn.Module")
    name = name or type(made).__name__
    output = run_once(made, shape, name, tokens)
    answer = (classes,) if positions is None else (positions, classes)
    wanted = f"[n, {', '.join(map(str, answer))}]"
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"model {name!r} returns a {type(output).__name__}; its forward must return one tensor of logits, "
            f"of shape {wanted}"
        )
    if output.shape != (PROBE_BATCH, *answer):
        found = ", ".join(["n" if i == 0 and s == PROBE_BATCH else str(s) for i, s in enumerate(output.shape)])
        if positions is not None:
            raise ConfigError(
                f"model {name!r} returns logits of shape [{found}], but data.task = 'causal-lm' needs {wanted}, the "
                "next token at every position; use a language model, such as gpt-nano"
            )
        raise ConfigError(
            f"model {name!r} returns logits of shape [{found}] for inputs of shape {tuple(shape)}, but the task has "
            f"{classes} classes and needs {wanted}; give its last layer {classes} outputs"
        )
    if not output.is_floating_point():
        raise ConfigError(f"model {name!r} returns {output.dtype} values; its forward must return logits (floats)")


def run_once(model: nn.Module, shape: tuple[int, ...], name: str, tokens: bool | None = None) -> object:
    """The model's output for a dummy batch, in eval mode. Neither the model nor torch's random state changes."""
    lazy = [key for key, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        raise ConfigError(
            f"model {name!r} has lazy layers ({lazy[0]} has no size yet); run one batch through it where it is built"
        )
    like = next(iter(model.parameters()), torch.empty(0))
    if tokens is None:
        tokens = len(shape) == 1 and any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    with torch.random.fork_rng(devices=[]), _untouched(model), torch.no_grad():
        if tokens:
            batch = torch.zeros(PROBE_BATCH, *shape, dtype=torch.int64, device=like.device)
        else:
            batch = torch.randn(PROBE_BATCH, *shape, device=like.device)
        try:
            return model(batch)
        except Exception as error:  # a user's forward may raise anything; the usual cause is the input shape
            raise ConfigError(
                f"model {name!r} fails on a batch of inputs of shape {tuple(shape)}: {type(error).__name__}: {error}; "
                f"make it fit this input shape, or choose another model"
            ) from error


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; modes and buffers are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for buffer, before in buffers:
            buffer.copy_(before)
