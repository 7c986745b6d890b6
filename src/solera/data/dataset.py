"""A data set: training and test samples kept compactly, and how to make them ready for a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..devices import numerics
from ..task import Data
from ..wire import DataError
from .images import channel_statistics, channels_first, stack
from .transforms import normalise

Arrays = tuple[Any, Any]  # inputs and labels, as tensors, numpy arrays or lists


@dataclass(frozen=True)
class Dataset:
    """Samples as stored: uint8 or float32 images [N, C, H, W], float32 vectors [N, F] or int64 tokens [N, L]."""

    name: str
    train: Data
    test: Data
    classes: int
    mean: tuple[float, ...] = ()  # per channel, on the scale [0, 1]; empty: nothing to normalise
    std: tuple[float, ...] = ()
    users: Tensor | None = None  # int64 [N_train]: who wrote each training sample
    vocabulary: int = 0  # text only: the number of token ids
    class_names: tuple[str, ...] = ()  # where they are known

    def __post_init__(self) -> None:
        for split, data in (("train", self.train), ("test", self.test)):
            _check_split(f"{self.name}, {split}", data, self.classes, self.vocabulary)
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            raise DataError(
                f"{self.name}: training samples have shape {self.shape}, "
                f"test samples {tuple(self.test.inputs.shape[1:])}; they must be equal"
            )
        if self.train.inputs.dtype != self.test.inputs.dtype:
            raise DataError(
                f"{self.name}: training samples are {self.train.inputs.dtype}, test samples {self.test.inputs.dtype}"
            )
        _check_constants(self)
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(f"{self.name}: {len(self.class_names)} names for {self.classes} classes")
        if self.users is not None and self.users.shape != self.train.labels.shape:
            raise DataError(f"{self.name}: {len(self.users)} users for {len(self.train)} training samples")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one prepared sample."""
        return tuple(self.train.inputs.shape[1:])

    def prepare(self, inputs: Tensor) -> Tensor:
        """Stored samples as a model takes them: normalised float32, or tokens unchanged."""
        return normalise(inputs, self.mean, self.std)


@numerics()
def from_tensors(
    train: Arrays,
    test: Arrays,
    classes: int | None = None,
    name: str = "own",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    users: Any = None,
    vocabulary: int | None = None,
    class_names: Sequence[str] = (),
) -> Dataset:
    """A data set from (inputs, labels) pairs of tensors, numpy arrays or lists.

    Images may be [n, H, W], [n, H, W, C] or [n, C, H, W], as bytes 0..255 or as floats; two-dimensional integers are
    tokens, two-dimensional floats vectors. Without `mean` and `std` bytes are normalised by the training images' own
    statistics and floats are left as they are; pass `mean=(), std=()` to normalise nothing.
    """
    parts = {split: _data(f"{name}, {split}", *pair) for split, pair in (("train", train), ("test", test))}
    labels = torch.cat([part.labels for part in parts.values()])
    inputs = parts["train"].inputs
    if (mean is None) != (std is None):
        raise DataError(f"{name}: give both mean and std, or neither")
    if mean is None or std is None:
        mean, std = channel_statistics(inputs) if inputs.dtype == torch.uint8 and inputs.ndim == 4 else ((), ())
    if inputs.dtype != torch.int64:
        vocabulary = 0
    elif vocabulary is None:
        vocabulary = 1 + max(int(part.inputs.max()) for part in parts.values())
    return Dataset(
        name,
        parts["train"],
        parts["test"],
        classes if classes is not None else len(class_names) or int(labels.max()) + 1,
        tuple(float(m) for m in mean),
        tuple(float(s) for s in std),
        None if users is None else user_numbers(users),
        vocabulary,
        tuple(class_names),
    )


def from_torch(train: Iterable[Any], test: Iterable[Any], **options: Any) -> Dataset:
    """A data set from two `torch.utils.data.Dataset`s (or any iterables) of (input, label) pairs.

    Inputs may be tensors, arrays or PIL images. The options are those of `from_tensors`.
    """
    name = options.get("name", "own")
    pairs = {split: list(_items(samples)) for split, samples in (("train", train), ("test", test))}
    for split, rows in pairs.items():
        for i, row in enumerate(rows):
            if not isinstance(row, tuple | list) or len(row) != 2:
                raise DataError(f"{name}, {split}: sample {i} is not an (input, label) pair but {type(row).__name__}")
    train_pair, test_pair = (
        (stack([x for x, _ in rows], f"{name}, {split}"), stack([y for _, y in rows], f"{name}, {split}, labels"))
        for split, rows in pairs.items()
    )
    return from_tensors(train_pair, test_pair, **options)


def user_numbers(users: Any) -> Tensor:
    """Users, known by numbers or names, as numbers from 0 in sorted order."""
    known = users.numpy() if isinstance(users, Tensor) else np.asarray(users)
    return torch.from_numpy(np.unique(known, return_inverse=True)[1].astype(np.int64))


def _items(samples: Any) -> Iterable[Any]:
    # A torch Dataset need not be iterable nor stop with IndexError: its length is what counts.
    if hasattr(samples, "__len__") and hasattr(samples, "__getitem__"):
        return (samples[i] for i in range(len(samples)))
    return samples


def _data(what: str, inputs: Any, labels: Any) -> Data:
    labels = _tensor(labels, f"{what}, labels")
    if labels.dtype.is_floating_point or labels.dtype == torch.bool or labels.ndim != 1:
        raise DataError(f"{what}: labels must be a list of whole numbers, not {labels.dtype} {tuple(labels.shape)}")
    return Data(_stored(_tensor(inputs, what), what), labels.to(torch.int64))


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, np.ndarray) and values.dtype.kind in "uif":
        native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        return torch.from_numpy(native if native.flags.writeable else native.copy())
    return stack(values, what)


def _stored(inputs: Tensor, what: str) -> Tensor:
    """Inputs in one of the four stored forms."""
    if inputs.dtype == torch.bool or inputs.dtype.is_complex or not 2 <= inputs.ndim <= 4:
        raise DataError(
            f"{what}: inputs are {inputs.dtype} of shape {tuple(inputs.shape)}; images (3 or 4 dimensions), "
            "vectors or tokens (2 dimensions) are expected"
        )
    if not inputs.dtype.is_floating_point and inputs.dtype != torch.uint8:
        if inputs.ndim == 2:
            return inputs.to(torch.int64)
        if inputs.numel() and not 0 <= int(inputs.min()) <= int(inputs.max()) <= 255:
            raise DataError(f"{what}: whole-number images must have values 0..255; give floats for another scale")
        inputs = inputs.to(torch.uint8)
    elif inputs.dtype != torch.uint8:
        inputs = inputs.to(torch.float32)
    return inputs if inputs.ndim == 2 else channels_first(inputs)


def _check_split(what: str, data: Data, classes: int, vocabulary: int) -> None:
    inputs, labels = data.inputs, data.labels
    if len(inputs) != len(labels):
        raise DataError(f"{what}: {len(inputs)} inputs but {len(labels)} labels")
    if not len(labels):
        raise DataError(f"{what}: there are no samples")
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise DataError(f"{what}: labels must be int64 numbers, not {labels.dtype} {tuple(labels.shape)}")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"{what}: labels run from {int(labels.min())} to {int(labels.max())}, but with {classes} classes "
            f"they must lie in 0..{classes - 1}"
        )
    if inputs.dtype.is_floating_point and not bool(inputs.isfinite().all()):
        bad = int((~inputs.isfinite()).flatten(1).any(1).nonzero()[0])
        raise DataError(f"{what}: sample {bad} holds values that are not finite (NaN or infinity)")
    if inputs.dtype == torch.int64 and not 0 <= int(inputs.min()) <= int(inputs.max()) < vocabulary:
        raise DataError(
            f"{what}: tokens run from {int(inputs.min())} to {int(inputs.max())}, but with a vocabulary of "
            f"{vocabulary} they must lie in 0..{vocabulary - 1}"
        )


def _check_constants(data: Dataset) -> None:
    mean, std = data.mean, data.std
    if len(mean) != len(std) or any(s <= 0 for s in std):
        raise DataError(f"{data.name}: mean {mean} and std {std} must be equally long, and std above 0")
    if mean and data.train.inputs.dtype == torch.int64:
        raise DataError(f"{data.name}: tokens cannot be normalised; leave mean and std out")
    if mean and len(mean) not in (1, data.shape[0]):
        raise DataError(f"{data.name}: mean has {len(mean)} numbers for {data.shape[0]} channels")
