"""Image transformations on whole batches [n, C, H, W], without torchvision.

Random ones draw every sample's numbers separately, from the torch.Generator they are given. Colour operations work
on values in [0, 1], before normalisation.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import ConfigError, DataError
from ..core.tensors import CPU, Views, sent
from ..place.placement import full_precision
from .partition import torch_rng

GRAY = (0.299, 0.587, 0.114)  # weights of red, green, blue in the brightness (ITU-R 601-2)
DEPTH = {torch.uint8: 255, torch.uint16: 65535}  # the brightest pixel of images of whole numbers
CHUNK = 1024  # images converted at a time, to keep the float copies small


def to_unit(images: Tensor) -> Tensor:
    """Pixels as float32 in [0, 1]; float images are taken to be in that range already."""
    values = images.to(torch.float32)
    return values.div_(DEPTH[images.dtype]) if images.dtype in DEPTH else values


def to_bytes(images: Tensor) -> Tensor:
    """Values in [0, 1] as pixels 0..255, rounded to nearest; what lies outside is clipped."""
    return to_depth(images, torch.uint8)


def to_depth(images: Tensor, kind: torch.dtype) -> Tensor:
    """Values in [0, 1] as pixels of this kind, rounded to nearest and clipped; kinds that are not pixels: unchanged."""
    return (images.clamp(0, 1) * DEPTH[kind]).round().to(kind) if kind in DEPTH else images


def normalise(inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Make stored samples ready for a model: tokens stay, pixels become (x/255 - mean) / std per channel.

    Pixels of 16 bits are divided by 65535, float samples by nothing. Without constants nothing else is done.
    """
    if inputs.dtype == torch.int64:
        return inputs
    values = to_unit(inputs)
    if not mean:
        return values
    shape = (1, len(mean)) + (1,) * (inputs.ndim - 2)
    mean_, std_ = (torch.tensor(t, device=inputs.device).reshape(shape) for t in (mean, std))
    return (values - mean_ if values is inputs else values.sub_(mean_)).div_(std_)  # a copy that is ours may change


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Bilinear, with antialiasing when shrinking. Keeps the kind of number: pixels are rounded to nearest."""
    if tuple(images.shape[-2:]) == (height, width):
        return images
    scaled = F.interpolate(to_unit(images), size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    return to_depth(scaled, images.dtype)


def to_channels(images: Tensor, channels: int) -> Tensor:
    """Colour to gray by the weights of brightness, gray to colour by repetition."""
    present = images.shape[1]
    if present == channels:
        return images
    if (present, channels) == (1, 3):
        return images.expand(-1, 3, -1, -1)
    if (present, channels) == (3, 1):
        return to_depth(grayscale(to_unit(images)), images.dtype)
    raise DataError(f"images with {present} channels cannot become {channels}-channel images: only 1 and 3 convert")


def to_shape(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images as [C, H, W] = `shape`: channels converted, then resized; a chunk at a time."""
    if tuple(images.shape[1:]) == tuple(shape):
        return images
    channels, height, width = shape
    parts = [resize(to_channels(part, channels), height, width) for part in images.split(CHUNK)]
    return torch.cat(parts)


def grayscale(images: Tensor) -> Tensor:
    """The brightness [n, 1, H, W] of colour images; gray images stay."""
    if images.shape[1] == 1:
        return images
    return torch.einsum("nchw,c->nhw", images, images.new_tensor(GRAY)).unsqueeze(1)


def windows(images: Tensor, top: Tensor, left: Tensor, padding: int) -> Tensor:
    """Windows of the original size out of images padded with zeros; top, left in 0..2*padding per sample."""
    n, _, height, width = images.shape
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # [n, C, top, left, H, W], a view
    return windows[torch.arange(n, device=images.device), :, top, left].contiguous()


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Scale towards black; `factor` is one number per sample, 1 = unchanged."""
    return _blend(images, torch.zeros_like(images), factor)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Scale towards each image's mean brightness."""
    return _blend(images, grayscale(images).mean(dim=(1, 2, 3), keepdim=True), factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Scale towards the gray image; a gray image stays as it is."""
    return _blend(images, grayscale(images), factor)


def adjust_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by `turn` of a full circle; a gray image has no hue and stays."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    value, low = images.amax(1), images.amin(1)
    chroma = value - low
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sector = hue + 6 * turn[:, None, None]  # hue in sixths of the circle
    # Each channel is the value lowered by the chroma times its distance from the channel's own hue.
    offsets = images.new_tensor([5.0, 3.0, 1.0])[None, :, None, None]
    position = (sector.unsqueeze(1) + offsets).remainder(6)
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(position, 4 - position).clamp(0, 1)


def color_jitter(
    images: Tensor,
    rng: torch.Generator,
    brightness: float = 0.8,
    contrast: float = 0.8,
    saturation: float = 0.8,
    hue: float = 0.2,
) -> Tensor:
    """Change brightness, contrast, saturation and hue of each sample, in a random order of its own.

    Factors are uniform in [max(0, 1 - s), 1 + s], the turn of the hue in [-hue, hue]. On one-channel images the
    parts that concern colour (saturation, hue) do nothing, but they use up the same random numbers.
    """
    n, device = len(images), images.device
    steps = (
        (adjust_brightness, _uniform(n, max(0.0, 1 - brightness), 1 + brightness, rng)),
        (adjust_contrast, _uniform(n, max(0.0, 1 - contrast), 1 + contrast, rng)),
        (adjust_saturation, _uniform(n, max(0.0, 1 - saturation), 1 + saturation, rng)),
        (adjust_hue, _uniform(n, -hue, hue, rng)),
    )
    order = torch.rand(n, len(steps), generator=rng).argsort(1)
    images = images.clone()
    for place in range(len(steps)):
        for which, (adjust, amount) in enumerate(steps):
            rows = torch.nonzero(order[:, place] == which).flatten()
            if len(rows):
                here = sent(rows, device)
                images[here] = adjust(images[here], sent(amount[rows], device))
    return images


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other.expand_as(images), images, factor[:, None, None, None]).clamp(0, 1)


def _uniform(n: int, low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=rng)


# ---- the steps of `data.augment` and `public.augment` -----------------------------------------------

Name = Literal["crop", "flip", "jitter", "gray"]
# A step changes a batch, with random numbers of its own for each sample. It gets images as values in [0, 1], before
# normalisation, and other samples in stored form.
Step = Callable[[Tensor, torch.Generator], Tensor]
PADDING = 4  # black pixels added on each side before a crop


def crop(images: Tensor, rng: torch.Generator) -> Tensor:
    """Pad the image with 4 black pixels and crop it at a random position to its size."""
    corner = sent(torch.randint(0, 2 * PADDING + 1, (2, len(images)), generator=rng), images.device)
    return windows(images, corner[0], corner[1], PADDING)


def flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Flip the image horizontally, with probability 1/2."""
    return torch.where(_chosen(0.5, images, rng), images.flip(-1), images)


def jitter(images: Tensor, rng: torch.Generator) -> Tensor:
    """Colour jitter of strength 0.8/0.8/0.8/0.2, with probability 0.8; for gray images only brightness and contrast."""
    chosen = _chosen(0.8, images, rng)
    return torch.where(chosen, color_jitter(images, rng), images)


def gray(images: Tensor, rng: torch.Generator) -> Tensor:
    """Convert the image to gray, with probability 0.2."""
    return torch.where(_chosen(0.2, images, rng), grayscale(images).expand_as(images), images)


def _chosen(p: float, images: Tensor, rng: torch.Generator) -> Tensor:
    return sent((torch.rand(len(images), generator=rng) < p)[:, None, None, None], images.device)


STEPS: dict[Name, Step] = {"crop": crop, "flip": flip, "jitter": jitter, "gray": gray}


def augmented(raw: Tensor, steps: Sequence[Name | Step], rng: torch.Generator) -> Tensor:
    """Stored samples after these steps, in this order; unchanged without steps."""
    values = to_unit(raw) if steps and raw.ndim == 4 else raw
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
