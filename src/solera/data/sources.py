"""Data sets by name: the embedded sample, a local folder, or the Hugging Face hub.

How a folder is checked: a file is refused if it contradicts itself (header and size, images and labels), or if it has
as many rows as the published file but another checksum. A set with more rows than the published one is refused, too.
Fewer rows are accepted as a sample, with a warning that names both numbers.
"""

import functools
import importlib.resources
import inspect
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError, without_addresses
from ..core.plugins import is_path, label
from ..core.task import Data
from ..place.placement import numerics
from .catalogue import SOURCES, Loader, SourceInfo, unnamed
from .dataset import Dataset, Task, Texts, classes_in, number_users, refuse_random
from .encodings import LENGTH, VOCABULARY, refuse_empty, tokenize
from .images import channel_statistics
from .partition import balanced, hold_out, numpy_rng
from .readers import (
    LAYOUT,
    Split,
    cifar_splits,
    files_in,
    folder_splits,
    idx_splits,
    stl10_splits,
    stl10_unlabelled,
    toy_2d,
    toy_texts,
)
from .tables import SUFFIXES, Given, file_split, folder_tables, hub_table, split_word, table_split
from .transforms import DEPTH, to_shape

log = logging.getLogger("solera")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
STL10, STL10_FILE = "stl10-unlabelled", "unlabeled_X.bin"  # public data only: it has no labels
PART = 2000  # images that are read at a time
FILES = {  # the files of each format, for error messages
    "idx": "IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-...; also .gz)",
    "cifar": "CIFAR binary files (data_batch_1.bin ... test_batch.bin, or train.bin and test.bin)",
    "stl10": "STL-10 binary files (train_X.bin, train_y.bin, test_X.bin, test_y.bin)",
    "parquet": "parquet files (train-*.parquet, test-*.parquet)",
    "csv": "csv files (train.csv, test.csv)",
    "jsonl": "JSON lines (train.jsonl, test.jsonl)",
    "images": LAYOUT,
}
RENUMBER = "renumber them, or write the names of the classes instead"
MADE = {"points": toy_2d, "texts": toy_texts}
PICKLES = re.compile(r"data_batch_\d+|test_batch|batches\.meta|train|test|meta|.*\.(pkl|pickle)")


@numerics()
def load(
    name: str,
    path: str | Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    seed: int = 0,
    length: int = LENGTH,
    image_size: int | None = None,
    *,
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    user_column: str | None = None,
    user_min: int = 1,
    test_users: float = 0.0,
    task: Task = "classification",
) -> Dataset:
    """The data set called `name`: one of SOURCES, a hub id "owner/name", or a path to a function that loads it.

    It is read from the folder `path`. Without a path, "fashion-mnist" is the sample inside the package. Other sets are
    looked up in $SOLERA_DATA/<name> and ./data/<name>, then on the hub, if the package `datasets` is installed.
    `train_size` and `test_size` take a sample with equal classes (as far as the data allow), determined by the seed. If
    a set has no test split, a tenth of its training samples (or `test_size`) becomes the test split, always the same
    ones. `length` is the number of tokens of a text. The images of a "folder" are resized to `image_size` pixels on
    each side. The columns of a table are found by their usual names unless they are given. Users with fewer than
    `user_min` training samples are left out; a share `test_users` of the others, always the same ones, are the test
    split. For the task "causal-lm" texts need no labels.
    """
    info = source_info(name)
    columns = Given(text_column, pair_column, label_column, user_column, labelled=task == "classification")
    people = {k: v for k, v, usual in (("user_min", user_min, 1), ("test_users", test_users, 0.0)) if v != usual}
    if info.loader is not None:
        for key, value in (*columns.named.items(), *people.items()):
            raise ConfigError(f"data.{key} = {value!r}: {label(name)!r} is a function of your own; let it do that")
        return _load_own(name, info.loader, path, train_size, test_size, seed, length, image_size)
    if image_size is not None and info.formats != ("images",):
        raise ConfigError(f"data.image_size = {image_size}: only for data.name = 'folder', not {name!r}")
    if columns.named and not set(info.formats) & set(SUFFIXES):
        raise ConfigError(f"data.{next(iter(columns.named))}: {name!r} is not read from a table; leave it out")
    splits = _read(name, info, path, image_size, columns)
    return _assemble(name, info, splits, train_size, test_size, seed, length, people, columns.labelled)


def from_folder(
    path: str | Path,
    image_size: int | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set from a folder of images with a folder for each class; `class_names` are the names of those folders.

    The folder may contain `train` and `test`, each with the class folders. Without them, a tenth of each class (or
    `test_size` images) is used for testing. With `image_size` every image is resized to so many pixels on each side
    (stretched if it is not square); without it all must have the same size. Needs Pillow: pip install 'solera[data]'.
    """
    return load("folder", path, train_size, test_size, seed, image_size=image_size)


def from_hf(
    train: Any,
    test: Any,
    name: str = "own",
    image: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    user: str | None = None,
    classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    length: int = LENGTH,
) -> Dataset:
    """A data set from two Hugging Face `datasets.Dataset`s.

    The columns are found by their usual names (image or img, text or sentence, label, user) unless they are given;
    `pair` is the column of a second text. Every model reads texts with its own tokenizer. Bytes are normalised with the
    statistics of the training images unless `mean` and `std` are given.
    """
    if (mean is None) != (std is None):
        raise DataError(f"{name}: give both mean and std, or neither")
    if image is not None and text is not None:
        raise DataError(f"{name}: give an image column or a text column, not both")
    info = replace(unnamed(name), classes=classes or 0, mean=mean, std=std)
    given = Given(text, pair, label, user, image)
    splits = {}
    for split, rows in (("train", train), ("test", test)):
        where = f"{name}, {split}"
        refuse_random(rows.__getitem__, len(rows), where)
        splits[split] = table_split(hub_table(rows, where), info, given)
    return _assemble(name, info, splits, length=length)


def _assemble(
    name: str,
    info: SourceInfo,
    splits: Mapping[str, Split],
    train_size: int | None = None,
    test_size: int | None = None,
    seed: int = 0,
    length: int = LENGTH,
    people: Mapping[str, Any] | None = None,
    labelled: bool = True,
) -> Dataset:
    """Choose the rows, decode them, and build the data set. `labelled`: the labels are to be learned."""
    known, class_names = _labels(name, info, splits)
    whole = {split: len(labels) for split, labels in known.items()}
    classes = info.classes or len(class_names) or len(splits["train"].class_names)
    if not classes:  # looked for in all rows: a sample of them, or the test split, may lack one
        every = np.concatenate(list(known.values()))
        classes = classes_in(name, every, RENUMBER) if labelled else int(every.max()) + 1
    rows = {split: np.flatnonzero(known[split] >= 0) for split in splits}
    source = dict(splits)
    held = None
    if people:
        rows["train"], held = _divide_users(name, splits["train"].users, rows["train"], **people)
    if held is not None:
        rows["test"], source["test"], known["test"] = held, splits["train"], known["train"]
    elif "test" not in splits:
        rows["train"], rows["test"] = _divide(name, known["train"], rows["train"], test_size)
        source["test"], known["test"] = splits["train"], known["train"]
    data, texts = {}, {}
    for split, size in (("train", train_size), ("test", test_size)):
        if size is not None:
            rows[split] = _subsample(f"{split}_size", known[split], rows[split], size, seed)
        inputs = source[split].take(rows[split])
        if not isinstance(inputs, Tensor):
            refuse_empty(f"{name}, {split}", inputs, rows[split].tolist())
            texts[split], inputs = inputs, tokenize(inputs, length)
        data[split] = Data(inputs, torch.from_numpy(known[split][rows[split]]))
    inputs = data["train"].inputs
    mean, std = info.mean, info.std
    if mean is None or std is None:
        mean, std = channel_statistics(inputs) if inputs.dtype in DEPTH and inputs.ndim == 4 else ((), ())
    if len(info.shape) == 3 and tuple(inputs.shape[1:]) != info.shape:
        log.warning("%s: images are %s, those of the full set %s", name, tuple(inputs.shape[1:]), info.shape)
    users = splits["train"].users
    numbers, names = (None, ()) if users is None else number_users(users[rows["train"]])
    called = (class_names, info.class_names, splits["train"].class_names)
    return Dataset(
        name,
        classes,
        mean,
        std,
        VOCABULARY if inputs.dtype == torch.int64 else 0,
        next((c for c in called if len(c) == classes), ()),  # a sample may lack a class: then the names do not fit
        train=data["train"],
        test=data["test"],
        users=numbers,
        user_names=names,
        texts=Texts(tuple(texts["train"]), tuple(texts["test"])) if texts else None,
        found=(whole["train"], whole.get("test", 0)),
    )


def _divide_users(
    name: str, users: np.ndarray | None, rows: np.ndarray, user_min: int = 1, test_users: float = 0.0
) -> tuple[np.ndarray, np.ndarray | None]:
    """The training rows of users with enough samples, and the rows of the users for testing (None: the set's own)."""
    if users is None:
        given = f"data.user_min = {user_min}" if user_min > 1 else f"data.test_users = {test_users}"
        raise ConfigError(f"{given}: {name} has no users; name their column with data.user_column")
    people, person, counts = np.unique(users[rows], return_inverse=True, return_counts=True)
    enough = np.flatnonzero(counts >= user_min)
    tested = round(test_users * len(enough))
    if len(enough) - tested < 1 or (test_users and not tested):
        raise ConfigError(
            f"data.user_min = {user_min}: {len(enough)} of {len(people)} users of {name} have so many samples"
            + (f", and data.test_users = {test_users} of them are {tested}" if test_users else "")
            + "; choose other numbers"
        )
    held = numpy_rng(0, "test users").permutation(enough)[:tested]
    kept = rows[np.isin(person, np.setdiff1d(enough, held))]
    return kept, rows[np.isin(person, held)] if tested else None


def _read(
    name: str, info: SourceInfo, path: str | Path | None, image_size: int | None, columns: Given
) -> dict[str, Split]:
    """The training split and, if there is one, the test split, from a folder, the package or the hub."""
    if info.made is not None:
        if path is not None:
            raise ConfigError(f"{name} is generated, not read: leave out path = {str(path)!r}")
        return MADE[info.made](info.rows or (0, 0), info.classes)
    if path is not None:
        folder = Path(path)
        if folder.is_file() and (split := file_split(folder, info, columns)) is not None:
            return _train_and_test(name, info, {"train": split}, str(folder))
        if not folder.is_dir():
            raise DataError(f"{name}: path = {str(path)!r} is not a folder. {_wanted(name, info)}")
        return _read_folder(name, info, folder, image_size, columns)
    if info.embedded:
        return _embedded(name, tuple(info.embedded.items()))
    if not info.hub:
        raise ConfigError(f"data.path is missing: data.name = {name!r} needs {FILES[info.formats[0]]}")
    places = _places(name)
    for place in places:
        if place.is_dir():
            return _read_folder(name, info, place, image_size, columns)
    return _read_hub(name, info, places, columns)


def _places(name: str) -> list[Path]:
    """The folders in which a data set is looked for."""
    root = os.environ.get("SOLERA_DATA")
    roots = ([Path(root)] if root else []) + [Path("data")]
    return [place / spelling for place in roots for spelling in dict.fromkeys((name, name.replace("-", "_")))]


def read_stl10_unlabelled(path: str | Path | None, shape: tuple[int, ...]) -> Tensor:
    """The 100,000 images of STL-10 without labels, as public data: unlabeled_X.bin, in the folder `path` or where
    "stl10" is looked for. Read and brought to `shape` a part at a time: they are 2.8 GB."""
    folders = _places("stl10") if path is None else [Path(path)]
    file = next((found for folder in folders if (found := folder / STL10_FILE).is_file()), None)
    if file is None:
        raise DataError(
            f"{STL10}: no {STL10_FILE} in {', '.join(map(str, folders))}. Unpack STL-10's binary files "
            "(stl10_binary.tar.gz) there, or set public.path to their folder"
        )
    mapped = stl10_unlabelled(file)
    parts = (np.ascontiguousarray(mapped[i : i + PART].swapaxes(2, 3)) for i in range(0, len(mapped), PART))
    return torch.cat([to_shape(torch.from_numpy(part), shape) for part in parts])


@functools.cache
def _embedded(name: str, sums: tuple[tuple[str, str], ...]) -> dict[str, Split]:
    """The sample inside the package, unpacked once because a sweep asks for it often. `sums`: its files' sha256."""
    with importlib.resources.as_file(importlib.resources.files(__package__) / "embedded") as folder:
        return idx_splits(folder, replace(SOURCES[name], sums=dict(sums), rows=None))


def _read_folder(name: str, info: SourceInfo, folder: Path, image_size: int | None, columns: Given) -> dict[str, Split]:
    for form in info.formats:
        match form:
            case "idx":
                found = idx_splits(folder, info)
            case "cifar":
                found = cifar_splits(folder, info)
            case "stl10":
                found = stl10_splits(folder, info)
            case "images":
                found = folder_splits(folder, image_size)
            case _:
                found = folder_tables(form, folder, info, columns)
        if found:
            return _train_and_test(name, info, found, str(folder))
    pickles = [path.name for path in files_in(folder) if PICKLES.fullmatch(path.name)]
    if pickles:
        raise DataError(
            f"{name}: {folder} holds pickle files ({', '.join(pickles[:3])}), which are not read because they can run "
            f"code; get the binary version (for CIFAR: cifar-10-binary or cifar-100-binary). {_wanted(name, info)}"
        )
    raise DataError(f"{name}: nothing to read in {folder}. {_wanted(name, info)}")


def _read_hub(name: str, info: SourceInfo, places: list[Path], given: Given) -> dict[str, Split]:
    looked = f"looked for the folders {', '.join(map(str, places))}"
    if "SOLERA_DATA" not in os.environ:
        looked += " ($SOLERA_DATA is not set)"
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: not found; {looked}, and the package `datasets` is not installed. {_wanted(name, info)} "
            f"Or install it with: pip install 'solera[hub]', to fetch {info.hub} from the Hugging Face hub"
        ) from error
    try:
        loaded = datasets.load_dataset(info.hub, info.config)
    except Exception as error:  # the library has many back ends, which may raise anything
        raise DataError(
            f"{name}: not found; {looked}, and fetching {info.hub} from the Hugging Face hub failed: "
            f"{without_addresses(str(error))}. {_wanted(name, info)}"
        ) from error
    found = {}
    for name_on_hub, rows in loaded.items():
        if (split := split_word(name_on_hub)) in ("train", *info.test_splits):
            found[split] = table_split(hub_table(rows, f"{info.hub}, {name_on_hub}"), info, given)
    return _train_and_test(name, info, found, f"the hub's {info.hub}")


def _train_and_test(name: str, info: SourceInfo, found: Mapping[str, Split], where: str) -> dict[str, Split]:
    """Select the training and test splits, and check their numbers of rows."""
    if "train" not in found:
        raise DataError(
            f"{name}: {where} has no training split, only {', '.join(found) or 'nothing'}; a file or folder whose name "
            "has the word train in it is one"
        )
    splits = {"train": found["train"]}
    test = next((found[split] for split in info.test_splits if split in found), None)
    if test is not None:
        splits["test"] = test
    for split, rows in splits.items():
        if not len(rows.labels):
            raise DataError(f"{name}: {where} has no rows in its {split} split")
    for (split, rows), full in zip(splits.items(), info.rows or (), strict=False):
        count = len(rows.labels)
        if count > full:
            raise DataError(
                f"{name}: {where} has {count} {split} rows, the published set {full}; this is another data set "
                "(load your own data with solera.data.from_tensors, from_torch or from_hf)"
            )
        if count < full:
            log.warning("%s: %s has %d of the %d %s rows of the full set: a sample", name, where, count, full, split)
    return splits


def _labels(name: str, info: SourceInfo, splits: Mapping[str, Split]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Labels as numbers from 0 (-1: the row is left out), and the class names if labels were names."""
    raw = {split: rows.labels for split, rows in splits.items()}
    if any(values.dtype.kind == "f" for values in raw.values()):
        raise DataError(f"{name}: labels are floats; classes must be integers or names")
    if any(values.dtype.kind not in "iu" for values in raw.values()):
        names = np.unique(raw["train"].astype(str))
        for split, values in raw.items():
            if strange := sorted(set(values.astype(str).tolist()) - set(names.tolist())):
                raise DataError(f"{name}, {split}: labels {strange[:3]} do not occur in the training split")
        known = {split: np.searchsorted(names, values.astype(str)) for split, values in raw.items()}
        return known, tuple(names.tolist())
    known = {split: values.astype(np.int64) for split, values in raw.items()}
    highest = max(int(values.max(initial=0)) for values in known.values())
    if info.stored_labels and highest >= info.classes:  # otherwise the files already have mapped labels
        known = {split: _mapped(name, split, values, info) for split, values in known.items()}
    elif any((values < 0).any() for values in known.values()):
        bad = next(split for split, values in known.items() if (values < 0).any())
        raise DataError(f"{name}, {bad}: has rows without a label (negative numbers); use a labelled split")
    return known, ()


def _mapped(name: str, split: str, values: np.ndarray, info: SourceInfo) -> np.ndarray:
    result = np.full(len(values), -1, np.int64)
    for number, stored in enumerate(info.stored_labels):
        result[values == stored] = number
    known = {*info.stored_labels, *info.without_label}
    if strange := set(np.unique(values).tolist()) - known:
        raise DataError(f"{name}, {split}: labels {sorted(strange)} are not among {sorted(known)}")
    return result


def _divide(name: str, labels: np.ndarray, rows: np.ndarray, size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Split the training rows into training and test rows. The seed is fixed: every run has the same test samples."""
    count = max(1, len(rows) // 10) if size is None else size
    if size is None:  # otherwise the user has chosen the size
        log.warning("%s: has no test split; %d of its %d training rows are used as one", name, count, len(rows))
    kept, held = hold_out(torch.from_numpy(labels[rows]), count, seed=0)
    return rows[kept.numpy()], rows[held.numpy()]


def _subsample(key: str, labels: np.ndarray, rows: np.ndarray, size: int, seed: int) -> np.ndarray:
    if not 1 <= size <= len(rows):
        raise ConfigError(f"{key} = {size}: there are {len(rows)} such samples; choose 1 to {len(rows)}")
    return rows[balanced(torch.from_numpy(labels[rows]), size, seed).numpy()]


def source_info(name: str, key: str | None = None) -> SourceInfo:
    """The entry of a data set, by its name, its path or its hub id. `key`: the setting that names it."""
    if name not in SOURCES and HUB_ID.fullmatch(name) and ".." not in name:
        return unnamed(name)
    try:
        return SOURCES.find(name, key)
    except ConfigError as e:
        raise ConfigError(f'{e} (or give a hub id like "owner/name")' if not is_path(name) else str(e)) from e


def _load_own(
    name: str,
    loader: Loader,
    path: str | Path | None,
    train_size: int | None,
    test_size: int | None,
    seed: int,
    length: int,
    image_size: int | None,
) -> Dataset:
    """A data set that a user has registered."""
    given = {"path": path, "train_size": train_size, "test_size": test_size, "image_size": image_size}
    parameters = inspect.signature(loader).parameters
    takes = {k: v for k, v in {**given, "seed": seed, "length": length}.items() if k in parameters}
    for key in given.keys() & takes.keys():  # unset keys are left to the loader's own default
        if given[key] is None and parameters[key].default is not inspect.Parameter.empty:
            del takes[key]
    for key in ("path", "image_size"):
        if given[key] is not None and key not in parameters:
            raise ConfigError(f"data.{key} = {str(given[key])!r}: the loader of {label(name)!r} takes no {key}")
    data = loader(**takes)
    if not isinstance(data, Dataset):
        raise DataError(
            f"data set {label(name)!r}: its loader returns a {type(data).__name__}; expected a Dataset, as "
            "solera.from_tensors returns it"
        )
    data = replace(data, name=label(name))
    for split, size in (("train", train_size), ("test", test_size)):
        if size is not None and f"{split}_size" not in parameters:
            labels = getattr(data, split).labels.numpy()
            rows = _subsample(f"{split}_size", labels, np.arange(len(labels)), size, seed)
            data = data.sampled(split, torch.from_numpy(rows))  # type: ignore[arg-type]
    return data


def _wanted(name: str, info: SourceInfo) -> str:
    """The ways to provide a data set, for error messages."""
    files = ", or ".join(FILES[form] for form in info.formats)
    if not info.hub:
        return f"Expected: {files}."
    return (
        f"Put {files} of {info.title} into $SOLERA_DATA/{name} or ./data/{name}, or name their folder with --set "
        f"data.path=FOLDER (public.path for public data); the parquet files are those of the hub's {info.hub}."
    )
