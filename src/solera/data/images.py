"""Converts images (arrays, tensors, PIL images, PNG or JPEG bytes) to one tensor [n, C, H, W]."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from .transforms import DEPTH, to_shape

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
CHANNELS = (1, 3)  # sizes by which a channel axis is recognised
UNREADABLE = (OSError, SyntaxError, ValueError)  # what Pillow raises for damaged files


def channels_first(images: Tensor) -> Tensor:
    """[n, H, W], [n, H, W, C] or [n, C, H, W] as [n, C, H, W].

    The channel axis is the first one if its size is 1 or 3, else the last one if its size is. If neither is, the images
    are assumed to be [n, C, H, W].
    """
    if images.ndim == 3:
        return images.unsqueeze(1)
    if images.shape[1] not in CHANNELS and images.shape[3] in CHANNELS:
        return images.permute(0, 3, 1, 2).contiguous()
    return images


def stack(samples: Iterable[Any], what: str) -> Tensor:
    """Samples of equal shape (tensors, arrays, PIL images, numbers) as one tensor, images channels first."""
    items = list(samples)
    if not items:
        raise DataError(f"{what}: there are no samples")
    if any(_is_picture(item) for item in items):
        return stack_pictures(items, what)
    arrays = [item.detach().cpu().numpy() if isinstance(item, Tensor) else np.asarray(item) for item in items]
    _check_equal_shapes(arrays, what)
    if arrays[0].dtype.kind not in "uif":
        raise DataError(
            f"{what}: sample 0 is a {type(items[0]).__name__}; samples must be numbers, arrays, tensors or images"
        )
    return torch.from_numpy(np.stack(arrays))


def stack_pictures(items: Sequence[Any], what: str, channels: int | None = None, deep: bool | None = None) -> Tensor:
    """PIL images, or the bytes of image files, as [n, C, H, W]: uint8, or uint16 if any of them has 16 bits per pixel.

    With `channels` all become gray (1) or colour (3). Otherwise they become gray if all are gray, else colour. `deep`
    says whether they become uint16, for callers that convert only a part of the images.
    """
    if channels is None:
        channels = 1 if all(is_gray(open_picture(item, what, i)) for i, item in enumerate(items)) else 3
    if deep is None:
        deep = any(is_deep(open_picture(item, what, i)) for i, item in enumerate(items))
    mode = "L" if channels == 1 else "RGB"
    arrays = []
    for i, item in enumerate(items):
        picture = open_picture(item, what, i)
        try:
            if is_deep(picture):
                pixels = _sixteen_bits(np.asarray(picture), what, i)
                arrays.append(pixels if channels == 1 else np.stack([pixels] * 3, axis=-1))
                continue
            pixels = np.asarray(picture if picture.mode == mode else picture.convert(mode))
        except UNREADABLE as error:  # Pillow decodes here, not when it opens the file
            raise DataError(f"{what}: image {i} cannot be decoded: {error}") from error
        arrays.append(pixels.astype(np.uint16) * 257 if deep else pixels)  # 257 * 255 is 65535: white stays white
    _check_equal_shapes(arrays, what)
    return channels_first(torch.from_numpy(np.stack(arrays)))


def fitted(files: Sequence[Path | tuple[str, Any]], shape: tuple[int, ...], deep: bool | None = None) -> Tensor:
    """Images of any size (files, or contents with a name for errors) as [n, *shape]. `deep` as in `stack_pictures`."""

    def named(file: Path | tuple[str, Any]) -> tuple[str, Any]:
        return (str(file), file.read_bytes()) if isinstance(file, Path) else file

    if deep is None:
        deep = any(is_deep(open_picture(content, what, 0)) for what, content in map(named, files))
    channels = shape[0] if shape[0] in CHANNELS else None
    parts = (stack_pictures([content], what, channels, deep) for what, content in map(named, files))
    return torch.cat([to_shape(part, shape) for part in parts])


def is_gray(picture: Any) -> bool:
    """True if a PIL image has one channel."""
    return picture.mode in ("L", "1") or is_deep(picture)


def is_deep(picture: Any) -> bool:
    """True if a PIL image has more than 8 bits per pixel. In Pillow only gray images do."""
    return picture.mode in ("I", "F") or picture.mode.startswith("I;16")


def _sixteen_bits(pixels: np.ndarray, what: str, position: int) -> np.ndarray:
    """Pixels as uint16. Pillow opens 16-bit files of some formats with 32 bits (mode "I")."""
    if pixels.dtype.kind not in "iu" or (pixels.size and not 0 <= pixels.min() <= pixels.max() <= 65535):
        raise DataError(
            f"{what}: image {position} has {pixels.dtype} pixels from {pixels.min()} to {pixels.max()}; only gray "
            "images of 8 or 16 bits can be read. Convert it, or pass arrays with your own scale to solera.from_tensors"
        )
    return pixels.astype(np.uint16)


def open_picture(item: Any, what: str, position: int) -> Any:
    """A PIL image: bytes are opened, a PIL image is returned unchanged."""
    if _is_picture(item):
        return item
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError(f"{what}: reading images needs Pillow; install it with: pip install 'solera[data]'") from error
    try:
        return Image.open(io.BytesIO(item))
    except UnidentifiedImageError as error:  # its own message names an object in memory
        raise DataError(f"{what}: image {position} cannot be decoded: its format is unknown") from error
    except (*UNREADABLE, TypeError, Image.DecompressionBombError) as error:
        raise DataError(f"{what}: image {position} cannot be decoded: {error}") from error


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 or uint16 images, on the scale [0, 1]."""
    brightest = DEPTH[images.dtype]
    levels = torch.arange(brightest + 1, dtype=torch.float64) / brightest
    means, stds = [], []
    for channel in images.unbind(1):
        pixels = channel.flatten() if images.dtype == torch.uint8 else channel.flatten().to(torch.int32)
        share = torch.bincount(pixels, minlength=len(levels)).double() / channel.numel()
        mean = float((share * levels).sum())
        means.append(mean)
        stds.append(float((share * (levels - mean) ** 2).sum().sqrt()) or 1.0)  # a constant channel is not scaled
    return tuple(means), tuple(stds)


def _is_picture(item: Any) -> bool:
    # Recognised by its attributes, so that users of tensors do not need Pillow.
    return hasattr(item, "convert") and hasattr(item, "mode")


def _check_equal_shapes(arrays: Sequence[np.ndarray], what: str) -> None:
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{what}: sample {i} has shape {array.shape}, sample 0 has {arrays[0].shape}; "
                "all samples must have the same shape (resize or pad them first)"
            )
