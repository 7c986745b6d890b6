"""Samples without labels, for a trained model to classify: arrays, folders of images, parquet, lines of text."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from .catalogue import SOURCES
from .encodings import Text
from .images import PICTURES, channels_first, fitted
from .readers import files_in
from .tables import IMAGE_COLUMNS, TABLES, USUAL, Given, file_split, joined, read_table

Tokens = Callable[[Sequence[Text]], Tensor]  # how texts become samples
INPUT_NAMES = ("x", "inputs", "images", "samples", "data")
TEXTS = (".txt", *TABLES)  # parquet files may hold images, too
FORMS = ".npy, .npz, .parquet, .txt (one text per line), .csv, .tsv or .jsonl (texts), an image, or a folder of images"


def read_samples(path: Path, shape: tuple[int, ...], tokens: Tokens | None) -> tuple[list[str], Tensor]:
    """The names (file names or row numbers) and the samples in `path`, converted to `shape`: images (uint8, uint16 or
    floats), float vectors, or tokens. Models of text read it by `tokens`; for others it is None."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder; give {FORMS}")
    folder, names = path.is_dir(), None
    suffix = "" if folder else path.suffix.lower() or "a file without an extension"
    parquet = [f for f in (files_in(path) if folder else [path]) if f.suffix.lower() == ".parquet"]
    if parquet or suffix in TEXTS:
        if not (parquet or tokens):
            raise DataError(f"{path}: holds text; the models take samples of shape {shape}")
        if tokens:
            texts = [text for file in parquet or [path] for text in texts_in(file)]
            samples = tokens(texts) if texts else torch.zeros((0, *shape), dtype=torch.int64)
        else:
            samples = _images_in_tables(parquet, path, shape)
    elif suffix == ".npy":
        with open(path, "rb") as file:
            samples = _array(file, path)
    elif suffix == ".npz":
        samples = _npz(path)
    elif folder or suffix in PICTURES:
        found = [path] if not folder else [f for f in files_in(path, depth=3) if f.suffix.lower() in PICTURES]
        if not found:
            raise DataError(f"{path}: there are no images in it ({', '.join(PICTURES)})")
        if len(shape) != 3:
            raise DataError(f"{path}: holds images; the models take samples of shape {shape}")
        names = [str(f.relative_to(path)) if folder else f.name for f in found]
        samples = fitted(found, shape)
    else:
        raise DataError(f"{path}: {suffix} cannot be read; give {FORMS}")
    if not len(samples):
        raise DataError(f"{path}: there are no samples in it")
    if samples.dtype.is_complex or samples.dtype == torch.bool:
        raise DataError(f"{path}: samples are {samples.dtype}; expected numbers")
    names = names or [str(i) for i in range(len(samples))]
    if samples.ndim == len(shape) and tuple(samples.shape) == shape:  # a single sample, without a batch dimension
        names, samples = names[:1], samples[None]
    if len(shape) == 3 and samples.ndim in (3, 4):
        samples = channels_first(samples)
    if tuple(samples.shape[1:]) != shape:
        raise DataError(f"{path}: samples have shape {tuple(samples.shape[1:])}; the models take {shape}")
    return names, samples


def _npz(path: Path) -> Tensor:
    try:
        with zipfile.ZipFile(path) as archive:
            inside = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
            usual = [name for name in INPUT_NAMES if name in inside]
            if len(inside) != 1 and not usual:
                raise DataError(
                    f"{path}: holds {', '.join(inside) or 'no array'}; name the array one of {', '.join(INPUT_NAMES)}"
                )
            with archive.open(inside[usual[0] if usual else next(iter(inside))]) as file:
                return _array(file, path)
    except zipfile.BadZipFile:
        raise DataError(f"{path}: is not a .npz file, or is damaged") from None


def _array(file: Any, path: Path) -> Tensor:
    try:
        array = np.lib.format.read_array(file)  # refuses arrays of objects, which could run code
    except ValueError as e:
        raise DataError(f"{path}: cannot be read as an array of numbers ({e})") from None
    if array.dtype.kind not in "uif" or array.ndim == 0:
        raise DataError(f"{path}: holds {array.dtype} of shape {array.shape}; expected an array of numbers")
    return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))


def _images_in_tables(files: Sequence[Path], path: Path, shape: tuple[int, ...]) -> Tensor:
    table = joined([read_table(file) for file in files])
    values = table.cells(next((name for name in IMAGE_COLUMNS if name in table.names), IMAGE_COLUMNS[0]))
    if not values or isinstance(values[0], list):
        return torch.tensor(np.asarray(values))
    pictures = [v["bytes"] if isinstance(v, dict) else v for v in values]
    return fitted([(f"{path}, row {i}", picture) for i, picture in enumerate(pictures)], shape)


def holds_texts(path: Path) -> bool:
    """True if `path` is a file of texts by its name: lines, or a table."""
    return path.is_file() and path.suffix.lower() in TEXTS


def texts_in(path: Path, given: Given = USUAL) -> list[Text]:
    """The texts in a file: one per line of a .txt file, or a column of a table."""
    if path.suffix.lower() == ".txt":
        try:
            texts: list[Text] = list(path.read_text("utf-8").splitlines())
        except (OSError, ValueError):
            raise DataError(f"{path}: cannot be read as UTF-8 text") from None
    else:
        split = file_split(path, SOURCES["texts"], replace(given, label=None, user=None, labelled=False))
        assert split is not None  # the caller has looked at its name
        texts = split.take(np.arange(len(split.labels)))  # type: ignore[assignment]
    if empty := [i for i, t in enumerate(texts) if not (t if isinstance(t, str) else "".join(t)).strip()]:
        raise DataError(f"{path}: {len(empty)} of {len(texts)} texts are empty, the first in row {empty[0]} (from 0)")
    return texts
