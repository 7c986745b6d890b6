"""Changing samples at random as they are drawn: what `data.augment` and `public.augment` name.

A step takes a batch and a generator and gives the batch changed, each sample by random numbers of its own. Images come
to it as values in [0, 1], before they are normalised; other samples as they are stored.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..tensors import Views
from . import transforms
from .sampling import torch_rng

Name = Literal["crop", "flip", "jitter", "gray"]
Step = Callable[[Tensor, torch.Generator], Tensor]
PADDING = 4  # black pixels on each side of an image that is cropped


def crop(images: Tensor, rng: torch.Generator) -> Tensor:
    """A window of the image's size at a random place of the image with a border of 4 black pixels."""
    corner = torch.randint(0, 2 * PADDING + 1, (2, len(images)), generator=rng)
    return transforms.crop(images, corner[0], corner[1], PADDING)


def flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Left and right exchanged, with probability 1/2."""
    return torch.where(_chosen(0.5, images, rng), images.flip(-1), images)


def jitter(images: Tensor, rng: torch.Generator) -> Tensor:
    """Colour jitter of strength 0.8/0.8/0.8/0.2, with probability 0.8; of gray images brightness and contrast only."""
    chosen = _chosen(0.8, images, rng)
    return torch.where(chosen, transforms.color_jitter(images, rng), images)


def gray(images: Tensor, rng: torch.Generator) -> Tensor:
    """The colours taken away, with probability 0.2."""
    return torch.where(_chosen(0.2, images, rng), transforms.grayscale(images).expand_as(images), images)


def _chosen(p: float, images: Tensor, rng: torch.Generator) -> Tensor:
    return (torch.rand(len(images), generator=rng) < p)[:, None, None, None]


STEPS: dict[Name, Step] = {"crop": crop, "flip": flip, "jitter": jitter, "gray": gray}


def augmented(raw: Tensor, steps: Sequence[Name | Step], rng: torch.Generator) -> Tensor:
    """Stored samples after these steps, in their order; without steps as they are stored."""
    values = transforms.to_unit(raw) if steps and raw.ndim == 4 else raw
    for step in steps:
        before, values = values, (STEPS[step] if isinstance(step, str) else step)(values, rng)
        if not isinstance(values, Tensor) or (values.shape, values.dtype) != (before.shape, before.dtype):
            raise DataError(
                f"augment: {step_name(step)} made {getattr(values, 'dtype', type(values).__name__)} "
                f"{tuple(getattr(values, 'shape', ()))} of {before.dtype} {tuple(before.shape)}; it must keep both"
            )
    return values


def drawn_anew(raw: Tensor, steps: Sequence[Name | Step], prepare: Callable[[Tensor], Tensor]) -> Views:
    """Stored samples that go through these steps at each draw; `prepare` makes them ready for a model."""

    def drawn(rows: Tensor, seed: int) -> Tensor:
        return prepare(augmented(raw.index_select(0, rows), steps, torch_rng(seed, "augment")))

    return Views(len(raw), lambda rows: prepare(raw.index_select(0, rows)), drawn)


def check_steps(key: str, steps: Sequence[Name | Step], raw: Tensor, dataset: str) -> None:
    """Refuse steps that these stored samples cannot go through."""
    named = [step for step in steps if isinstance(step, str)]
    for step in steps:
        if not isinstance(step, str):
            _check_callable(key, step)
        elif step not in STEPS:
            raise ConfigError(f"{key}: there is no {step!r}; there are {', '.join(STEPS)}, and functions of your own")
    if named and raw.ndim != 4:
        kind = "tokens" if raw.dtype == torch.int64 else "vectors"
        raise ConfigError(
            f"{key} = {named}: only images can be transformed so, and the samples of {dataset} are {kind} of shape "
            f"{tuple(raw.shape[1:])}; leave {key} out"
        )
    if named and raw.dtype.is_floating_point and not bool(((raw >= 0) & (raw <= 1)).all()):
        raise ConfigError(
            f"{key} = {named}: float images must lie in [0, 1] to be transformed, and those of {dataset} do not; give "
            f"pixels, or floats from 0 to 1 with their mean and std, or leave {key} out"
        )
    if {"jitter", "gray"} & set(named) and raw.shape[1] not in (1, 3):
        raise ConfigError(
            f"{key} = {named}: jitter and gray need images with 1 or 3 channels, and those of {dataset} have "
            f"{raw.shape[1]}; leave them out"
        )


def step_name(step: Name | Step) -> str:
    """A step's name; a function's own, with where it is defined."""
    if isinstance(step, str):
        return step
    return f"{getattr(step, '__module__', '?')}:{getattr(step, '__qualname__', type(step).__qualname__)}"


def _check_callable(key: str, step: Step) -> None:
    try:
        inspect.signature(step).bind(torch.empty(0), torch.Generator())
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key}: {step!r} cannot be called with (samples, generator); give a function of a batch and of the "
            "torch.Generator that it draws its random numbers from"
        ) from None
