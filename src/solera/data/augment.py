"""Augmentation: the steps of `data.augment` and `public.augment`.

A step takes a batch and a random generator and returns the changed batch; each sample has its own random numbers. A
step gets images as values in [0, 1], before normalisation, and other samples in stored form.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from ..core.tensors import CPU, Views, sent
from ..place.placement import full_precision
from . import transforms
from .sampling import torch_rng

Name = Literal["crop", "flip", "jitter", "gray"]
Step = Callable[[Tensor, torch.Generator], Tensor]
PADDING = 4  # black pixels added on each side before a crop


def crop(images: Tensor, rng: torch.Generator) -> Tensor:
    """Pad the image with 4 black pixels and crop it at a random position to its size."""
    corner = sent(torch.randint(0, 2 * PADDING + 1, (2, len(images)), generator=rng), images.device)
    return transforms.crop(images, corner[0], corner[1], PADDING)


def flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Flip the image horizontally, with probability 1/2."""
    return torch.where(_chosen(0.5, images, rng), images.flip(-1), images)


def jitter(images: Tensor, rng: torch.Generator) -> Tensor:
    """Colour jitter of strength 0.8/0.8/0.8/0.2, with probability 0.8; for gray images only brightness and contrast."""
    chosen = _chosen(0.8, images, rng)
    return torch.where(chosen, transforms.color_jitter(images, rng), images)


def gray(images: Tensor, rng: torch.Generator) -> Tensor:
    """Convert the image to gray, with probability 0.2."""
    return torch.where(_chosen(0.2, images, rng), transforms.grayscale(images).expand_as(images), images)


def _chosen(p: float, images: Tensor, rng: torch.Generator) -> Tensor:
    return sent((torch.rand(len(images), generator=rng) < p)[:, None, None, None], images.device)


STEPS: dict[Name, Step] = {"crop": crop, "flip": flip, "jitter": jitter, "gray": gray}


def augmented(raw: Tensor, steps: Sequence[Name | Step], rng: torch.Generator) -> Tensor:
    """Stored samples after these steps, in this order; unchanged without steps."""
    values = transforms.to_unit(raw) if steps and raw.ndim == 4 else raw
    for step in steps:
        before, values = values, (STEPS[step] if isinstance(step, str) else step)(values, rng)
        if not isinstance(values, Tensor) or (values.shape, values.dtype) != (before.shape, before.dtype):
            raise DataError(
                f"augment: {step_name(step)} returned {getattr(values, 'dtype', type(values).__name__)} "
                f"{tuple(getattr(values, 'shape', ()))} for {before.dtype} {tuple(before.shape)}; it must keep both"
            )
    return values


def drawn_anew(
    raw: Tensor, steps: Sequence[Name | Step], prepare: Callable[[Tensor], Tensor], device: torch.device = CPU
) -> Views:
    """Stored samples with these steps applied at each draw on `device`; `prepare` makes them ready for a model."""

    def stored(rows: Tensor) -> Tensor:
        return sent(raw.index_select(0, sent(rows, raw.device)), device)

    def drawn(rows: Tensor, seed: int) -> Tensor:
        with full_precision(device):  # samples are no weights
            return prepare(augmented(stored(rows), steps, torch_rng(seed, "augment")))

    return Views(len(raw), lambda rows: prepare(stored(rows)), drawn)


def check_steps(key: str, steps: Sequence[Name | Step], raw: Tensor, dataset: str) -> None:
    """Refuse steps that cannot be applied to these stored samples."""
    named = [step for step in steps if isinstance(step, str)]
    for step in steps:
        if not isinstance(step, str):
            _check_callable(key, step)
        elif step not in STEPS:
            raise ConfigError(f"{key}: there is no {step!r}; use {', '.join(STEPS)}, or your own function")
    if named and raw.ndim != 4:
        kind = "tokens" if raw.dtype == torch.int64 else "vectors"
        raise ConfigError(
            f"{key} = {named}: these steps need images, and the samples of {dataset} are {kind} of shape "
            f"{tuple(raw.shape[1:])}; leave {key} out"
        )
    if named and raw.dtype.is_floating_point and not bool(((raw >= 0) & (raw <= 1)).all()):
        raise ConfigError(
            f"{key} = {named}: these steps need float images in [0, 1], and those of {dataset} are not; give pixels, "
            f"or floats from 0 to 1 with their mean and std, or leave {key} out"
        )
    if {"jitter", "gray"} & set(named) and raw.shape[1] not in (1, 3):
        raise ConfigError(
            f"{key} = {named}: jitter and gray need images with 1 or 3 channels, and those of {dataset} have "
            f"{raw.shape[1]}; leave them out"
        )


def step_name(step: Name | Step) -> str:
    """The name of a step; for a function, module and name."""
    if isinstance(step, str):
        return step
    return f"{getattr(step, '__module__', '?')}:{getattr(step, '__qualname__', type(step).__qualname__)}"


def _check_callable(key: str, step: Step) -> None:
    try:
        inspect.signature(step).bind(torch.empty(0), torch.Generator())
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key}: {step!r} cannot be called with (samples, generator); give a function of a batch and of a "
            "torch.Generator for its random numbers"
        ) from None
