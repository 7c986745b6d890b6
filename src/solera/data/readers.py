"""Splits of published image sets from their binary files (IDX, CIFAR, STL-10), and of the two sets made here.

These formats cannot contain code. Python pickles can, so the pickled versions of these sets are not read.
"""

import gzip
import hashlib
import lzma
import math
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from .catalogue import GRAMMAR, SourceInfo
from .encodings import Text
from .images import PICTURES, fitted, is_deep, is_gray, open_picture

IDX_FILE = re.compile(r"(?P<prefix>.*?)(?P<split>train|t10k|test)-(?P<what>images|labels)[-.]idx[13]-ubyte(\.gz|\.xz)?")


@dataclass(frozen=True)
class Split:
    """The rows of a training or test set. Labels are read at once; inputs are decoded by `take`."""

    labels: np.ndarray  # integers, or names
    take: Callable[[np.ndarray], Tensor | list[Text]]  # gives the inputs of these rows (sorted)
    users: np.ndarray | None = None
    class_names: tuple[str, ...] = ()  # if the files name them


def files_in(folder: Path, depth: int = 2) -> list[Path]:
    """The files of a folder and of its subfolders up to a depth (archives often unpack into one), sorted."""
    levels = ("/".join("*" * (level + 1)) for level in range(depth))
    return sorted(path for level in levels for path in folder.glob(level) if path.is_file())


def read_idx(path: Path, sha256: str | None = None, rows: int | None = None) -> np.ndarray:
    """The bytes of an IDX file, plain or compressed, in the shape given by its header.

    `sha256` is that of the uncompressed file; with `rows` it is checked only if the file has so many rows.
    """
    content = _uncompressed(path)
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise DataError(f"{path}: not an IDX file of bytes (its header does not say so)")
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    begin = 4 + 4 * dimensions
    if len(content) - begin != math.prod(shape):
        raise DataError(
            f"{path}: the header announces {'x'.join(map(str, shape))} bytes but {len(content) - begin} follow; "
            "the file is damaged or incomplete, download it again"
        )
    if sha256 is not None and (rows is None or rows == shape[0]):
        _check_sum(path, content, sha256)
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def idx_splits(folder: Path, info: SourceInfo) -> dict[str, Split]:
    """MNIST-like IDX files: {train, t10k or test}-images-idx3-ubyte and -labels-idx1-ubyte, also .gz or .xz."""
    found: dict[tuple[str, str], Path] = {}
    others = set()
    for path in files_in(folder):
        if match := IDX_FILE.fullmatch(path.name):
            if match["prefix"] in ("", info.prefix):
                found.setdefault(("train" if match["split"] == "train" else "test", match["what"]), path)
            else:
                others.add(match["prefix"])
    if others and not found:
        raise DataError(
            f"{folder}: has IDX files whose names begin with {', '.join(sorted(others))}, "
            f"but the names of {info.title} begin with {info.prefix or 'train or t10k'}"
        )
    splits = {}
    for i, split in enumerate(("train", "test")):
        paths = [found.get((split, what)) for what in ("images", "labels")]
        if paths == [None, None]:
            continue
        images_path, labels_path = paths
        if images_path is None or labels_path is None:
            raise DataError(f"{folder}: of the {split} split only {images_path or labels_path} is there")
        full = info.rows[i] if info.rows else None
        arrays = [read_idx(p, info.sums.get(_plain_name(p)), full) for p in (images_path, labels_path)]
        splits[split] = image_split(arrays[0], arrays[1], images_path, "idx", info)
    return splits


def cifar_splits(folder: Path, info: SourceInfo) -> dict[str, Split]:
    """The binary version of CIFAR: records of one label byte (CIFAR-100: coarse, fine) and 3x32x32 pixel bytes."""
    label_bytes = 2 if info.classes == 100 else 1
    names = {path.name: path for path in files_in(folder)}
    groups = {
        "train": [names[n] for n in sorted(names) if re.fullmatch(r"data_batch_\d+\.bin|train\.bin", n)],
        "test": [names[n] for n in ("test_batch.bin", "test.bin") if n in names][:1],
    }
    splits = {}
    for split, paths in groups.items():
        if not paths:
            continue
        records = []
        for path in paths:
            content = np.fromfile(path, np.uint8)
            if not len(content) or len(content) % (label_bytes + 3072):
                raise DataError(
                    f"{path}: {len(content)} bytes are not a whole number of records of {label_bytes + 3072} bytes; "
                    "the file is damaged or belongs to another data set, download it again"
                )
            records.append(content.reshape(-1, label_bytes + 3072))
        table = np.concatenate(records)
        images = table[:, label_bytes:].reshape(-1, 3, 32, 32)
        splits[split] = image_split(images, table[:, label_bytes - 1], paths[0], "cifar", info)
    return splits


def stl10_splits(folder: Path, info: SourceInfo) -> dict[str, Split]:
    """STL-10's binary files: {train, test}_X.bin with 3x96x96 bytes per image, stored by columns, and _y.bin."""
    names = {path.name: path for path in files_in(folder)}
    splits = {}
    for i, split in enumerate(("train", "test")):
        paths = [names.get(f"{split}_{part}.bin") for part in "Xy"]
        if paths == [None, None]:
            continue
        images_path, labels_path = paths
        if images_path is None or labels_path is None:
            raise DataError(f"{folder}: of the {split} split only {images_path or labels_path} is there")
        pixels, labels = (np.fromfile(path, np.uint8) for path in (images_path, labels_path))
        if len(pixels) != len(labels) * 3 * 96 * 96:
            raise DataError(f"{images_path}: {len(pixels)} bytes for {len(labels)} labels; expected 27648 bytes each")
        if info.rows and len(labels) == info.rows[i]:
            for path, content in ((images_path, pixels), (labels_path, labels)):
                _check_sum(path, content.tobytes(), info.sums[path.name])
        splits[split] = image_split(pixels.reshape(-1, 3, 96, 96), labels, images_path, "stl10", info)
    return splits


def stl10_unlabelled(file: Path) -> np.ndarray:
    """STL-10's images without labels [n, 3, columns, rows], mapped into memory and not yet read."""
    size, one = file.stat().st_size, 3 * 96 * 96
    if size == 0 or size % one:
        raise DataError(f"{file}: {size} bytes are not a whole number of images of {one} bytes; download it again")
    return np.memmap(file, np.uint8, "r").reshape(-1, 3, 96, 96)


def image_split(images: np.ndarray, labels: np.ndarray, path: Path, form: str, info: SourceInfo) -> Split:
    """A split of byte images [n, H, W] or [n, C, H, W], with rows and columns in order and labels from 0."""
    if images.ndim == 3:
        images = images[:, None]
    if len(images) != len(labels):
        raise DataError(f"{path}: {len(images)} images but {len(labels)} labels")
    if form in info.transposed:
        images = images.swapaxes(2, 3)
    numbers = labels.astype(np.int64) - info.first_label.get(form, 0)
    return Split(numbers, lambda rows: torch.from_numpy(np.ascontiguousarray(images[rows])))


def _plain_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".xz").replace(".idx", "-idx")


def _uncompressed(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            return gzip.decompress(content)
        if path.suffix == ".xz":
            return lzma.decompress(content)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be decompressed ({error}); the file is damaged, download it again") from error
    return content


def _check_sum(path: Path, content: bytes, expected: str) -> None:
    kind = "sha256" if len(expected) == 64 else "md5"
    found = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(
            f"{path}: its {kind} is {found}, that of the published file is {expected}; the file is damaged or belongs "
            "to another data set. Download it again, or load your own data with solera.data.from_tensors"
        )


# ---- the sets made here -----------------------------------------------------------------------------

AUTHORS = 24
BEGIN, END = 0.1, 1.0  # of a spiral arm, as distance from the centre
TURN = 4.0  # how far an arm turns, in radians
SPREAD = 0.07  # the width of an arm
SIZE = 2.4  # scale: almost all points are between -3 and 3


def toy_2d(rows: tuple[int, int], classes: int) -> dict[str, Split]:
    """Training and test points: spiral arms from the centre, one for each class. Always the same points."""
    return {split: _arms(n, classes, seed) for seed, (split, n) in enumerate(zip(("train", "test"), rows, strict=True))}


def _arms(n: int, classes: int, seed: int) -> Split:
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    along = torch.rand(n, generator=g)
    angle = 2 * math.pi * labels / classes + TURN * along
    centre = torch.stack([angle.cos(), angle.sin()], 1) * (BEGIN + (END - BEGIN) * along)[:, None]
    points = SIZE * (centre + SPREAD * torch.randn(n, 2, generator=g))
    return Split(labels.numpy(), lambda rows: points[torch.from_numpy(rows)])


def toy_texts(rows: tuple[int, int], classes: int) -> dict[str, Split]:
    """Made-up texts of one to three sentences on four topics, with their authors.

    Every choice is a hash of the row's number and of what is chosen, so the texts are the same on every machine and
    with every version of Python.
    """
    return {split: _toy_texts(split, n, classes) for split, n in zip(("train", "test"), rows, strict=True)}


def _toy_texts(split: str, n: int, classes: int) -> Split:
    labels = np.arange(n) % classes
    topics = tuple(GRAMMAR["topics"])
    texts = [_text(f"{split} {i}", topics[k]) for i, k in enumerate(labels)]
    authors = np.asarray([f"author-{_number(f'{split} {i} author', AUTHORS):02d}" for i in range(n)])
    return Split(labels, lambda wanted: [texts[i] for i in wanted], authors, topics[:classes])


def _text(key: str, topic: str) -> str:
    said = []
    for s in range(1 + _number(f"{key} sentences", 3)):
        words = {slot: _one_of(choices, f"{key} {s} {slot}") for slot, choices in GRAMMAR["topics"][topic].items()}
        link = _one_of(GRAMMAR["links"], f"{key} link {s - 1}") + " " if s else ""
        said.append(link + _one_of(GRAMMAR["patterns"], f"{key} {s} pattern").format(**words))
    return " ".join(said)


def _one_of(choices: Sequence[str], key: str) -> str:
    return choices[_number(key, len(choices))]


def _number(key: str, below: int) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % below


# ---- a folder of images, with a folder for each class -----------------------------------------------


SPLITS = {"train": ("train", "training"), "test": ("test", "testing", "val", "valid", "validation")}
LAYOUT = "a folder for each class with images in it, such as cat/1.png and dog/1.png (or train/cat/1.png, test/cat/...)"


def folder_splits(folder: Path, size: int | None) -> dict[str, Split]:
    """The training split and, if there is one, the test split of a folder of images. Labels are the folders' names.

    With `size` every image is resized to `size` x `size` pixels; without it all must have the same size. The result is
    gray if every image is gray, and colour otherwise; uint16 if any image has 16 bits per pixel.
    """
    if size is not None and size < 1:
        raise ConfigError(f"data.image_size = {size}: at least 1 pixel is needed")
    files = {split: _pictures_by_class(home) for split, home in homes(folder).items()}
    every = [path for rows in files.values() for path, _ in rows]
    shape, deep = _common_form(every, size)
    return {
        split: Split(
            np.array([name for _, name in rows]),
            lambda wanted, rows=rows: fitted([rows[i][0] for i in wanted], shape, deep),  # type: ignore[misc]
        )
        for split, rows in files.items()
    }


def homes(folder: Path) -> dict[str, Path]:
    """The folder that contains the class folders, for each split."""
    inside = {path.name.lower(): path for path in class_folders(folder)}
    found = {split: next((inside[n] for n in names if n in inside), None) for split, names in SPLITS.items()}
    train, test = found["train"], found["test"]
    if train is None or not class_folders(train):
        return {"train": folder}
    return {"train": train} if test is None else {"train": train, "test": test}


def class_folders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def pictures_in(folder: Path) -> list[Path]:
    """The images in a folder and its subfolders, sorted."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in PICTURES and p.is_file())


def _pictures_by_class(home: Path) -> list[tuple[Path, str]]:
    """Every image below the class folders of `home`, with the name of its class."""
    classes = class_folders(home)
    if len(classes) < 2:
        there = f"only the folder {classes[0].name}" if classes else "no folders"
        raise DataError(f"{home}: contains {there}; expected {LAYOUT}")
    rows = []
    for home_of_class in classes:
        pictures = pictures_in(home_of_class)
        if not pictures:
            raise DataError(f"{home_of_class}: a class without images ({', '.join(PICTURES)}); add some or remove it")
        rows += [(path, home_of_class.name) for path in pictures]
    return rows


def _common_form(paths: list[Path], size: int | None) -> tuple[tuple[int, int, int], bool]:
    """Channels, height and width of all images, and whether any has 16 bits per pixel, from their headers."""
    channels, deep, first = 1, False, None
    for path in paths:
        picture = open_picture(path.read_bytes(), str(path), 0)
        channels, deep = channels if is_gray(picture) else 3, deep or is_deep(picture)
        first = first or picture.size
        if size is None and picture.size != first:
            raise DataError(
                f"{path}: {picture.size[0]}x{picture.size[1]} pixels, {paths[0]} has {first[0]}x{first[1]}; "
                "give a size for all of them: image_size=64 (in a TOML file: data.image_size = 64)"
            )
    assert first is not None  # there are two classes, each with an image
    height, width = (first[1], first[0]) if size is None else (size, size)
    return (channels, height, width), deep
