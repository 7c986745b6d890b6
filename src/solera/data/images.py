"""Images from wherever they come (arrays, tensors, PIL, PNG or JPEG bytes) to one tensor [n, C, H, W]."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..wire import DataError

CHANNELS = (1, 3)  # sizes by which a channel axis is recognised
UNREADABLE = (OSError, SyntaxError, ValueError)  # what Pillow raises for damaged files


def channels_first(images: Tensor) -> Tensor:
    """[n, H, W], [n, H, W, C] or [n, C, H, W] as [n, C, H, W].

    The channel axis is the first or else the last one of size 1 or 3; where neither has such a size the images are
    taken to be [n, C, H, W].
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


def stack_pictures(items: Sequence[Any], what: str, channels: int | None = None) -> Tensor:
    """PIL images, or the bytes of image files, as uint8 [n, C, H, W].

    With `channels` all become gray (1) or colour (3); otherwise gray if all are gray, and colour if any is not.
    """
    if channels is None:
        gray = all(open_picture(item, what, i).mode in ("L", "1") for i, item in enumerate(items))
        channels = 1 if gray else 3
    mode = "L" if channels == 1 else "RGB"
    arrays = []
    for i, item in enumerate(items):
        picture = open_picture(item, what, i)
        try:
            arrays.append(np.asarray(picture if picture.mode == mode else picture.convert(mode)))
        except UNREADABLE as error:  # Pillow decodes here, not when it opens a file
            raise DataError(f"{what}: image {i} cannot be decoded: {error}") from error
    _check_equal_shapes(arrays, what)
    return channels_first(torch.from_numpy(np.stack(arrays)))


def open_picture(item: Any, what: str, position: int) -> Any:
    """A PIL image; bytes are opened, PIL images pass."""
    if _is_picture(item):
        return item
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError(f"{what}: reading images needs Pillow; install it with: pip install 'solera[data]'") from error
    try:
        return Image.open(io.BytesIO(item))
    except UnidentifiedImageError as error:  # its own words name an object in memory
        raise DataError(f"{what}: image {position} cannot be decoded: it is no image of a known format") from error
    except (*UNREADABLE, TypeError, Image.DecompressionBombError) as error:
        raise DataError(f"{what}: image {position} cannot be decoded: {error}") from error


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, on the scale [0, 1]."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float((share * levels).sum())
        means.append(mean)
        stds.append(float((share * (levels - mean) ** 2).sum().sqrt()) or 1.0)  # a constant channel is left unscaled
    return tuple(means), tuple(stds)


def _is_picture(item: Any) -> bool:
    # Known by what it can do, so that nobody needs Pillow to use tensors.
    return hasattr(item, "convert") and hasattr(item, "mode")


def _check_equal_shapes(arrays: Sequence[np.ndarray], what: str) -> None:
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{what}: sample {i} has shape {array.shape}, sample 0 has {arrays[0].shape}; "
                "all samples must have one shape (resize or pad them first)"
            )
