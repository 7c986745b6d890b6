"""Sites: clients that have a name and bring their own data, in a simulation and in a deployment alike.

What a site holds follows from its own table and its own files alone, so that a site that reads only its own data gets
the samples that a simulation of all sites gave it:

- What a sample looks like (`Spec`) is stated, not found: shape, classes and normalisation constants come from the
  configuration, and are the same for all.
- The split into training and test samples is drawn from (seed, the site's name), from its own rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from ..core.plugins import is_path
from ..core.plugins import load as load_code
from ..core.settings import BelowOne, settings
from ..core.task import Data
from .dataset import Arrays, Dataset, Spec, are_texts, check_samples, data_of
from .encodings import Text, refuse_empty
from .images import fitted
from .partition import torch_rng
from .readers import LAYOUT, class_folders, homes, pictures_in
from .tables import IMAGE_COLUMNS, TABLES, TEXT_COLUMNS, images_of, read_table, texts_of
from .transforms import to_shape

Own = Data | Arrays | Dataset  # what a site's own Python gives, or returns when it is called
SOURCES_OF_A_SITE = (
    "a folder of images with a folder for each class, a table (.parquet, .csv, .tsv, .jsonl), or your own Python "
    "(package.module:attribute or file.py:attribute)"
)


@settings
class SiteConfig:
    """One site, [sites.NAME]: a client that brings its own data and its own model."""

    data: str | None = None  # a folder of images, a .parquet, .csv or .jsonl file, own Python; only the site needs it
    model: str | None = None  # its architecture
    test: BelowOne | None = None  # share of its samples kept as its private test split; default: data.client_test
    key: str | None = None  # deployment: the file of its public key
    columns: list[str] = field(default_factory=list)  # of a table: inputs in order (texts: one or two); []: usual names
    label_column: str = "label"  # of a table: the class
    tasks: list[str] | None = None  # deployment: those that the site answers; `solera deploy init` writes them
    bounds: dict[str, Any] | None = None  # deployment: of their arguments; `solera deploy init` writes them


class Rows(NamedTuple):
    """Samples from a source, and their texts if they were texts."""

    data: Data[Tensor]
    texts: tuple[Text, ...] | None = None

    def take(self, rows: Tensor) -> "Rows":
        """The samples with these positions."""
        texts = None if self.texts is None else tuple(self.texts[i] for i in rows.tolist())
        return Rows(Data(self.data.inputs[rows], self.data.labels[rows]), texts)


@dataclass(frozen=True)
class Holding:
    """The samples of one site, as stored."""

    train: Data[Tensor]
    test: Data[Tensor]
    texts: tuple[Text, ...] | None = None  # text only, if known: those of the training samples


def hold(name: str, given: Own, spec: Spec, share: float, seed: int) -> Holding:
    """The samples of the site `name`, divided into training and test samples."""
    train, test = _given(given, spec, f"site {name}")
    return _divided(name, train, test, spec, share, seed)


def read_site(name: str, site: SiteConfig, spec: Spec, share: float, seed: int) -> Holding:
    """The samples of the site `name`, from the source that its table names. `share` is used if it has none itself."""
    if site.data is None:
        raise ConfigError(f"sites.{name}.data is missing: it is {SOURCES_OF_A_SITE}")
    train, test = read_source(site.data, spec, site.columns, site.label_column, f"sites.{name}.data")
    if test is not None and site.test is not None:
        raise ConfigError(f"sites.{name}.test = {site.test}: {site.data} has a test split of its own; leave it out")
    return _divided(name, train, test, spec, share if site.test is None else site.test, seed)


def read_source(
    source: str, spec: Spec, columns: Sequence[str], label_column: str, key: str
) -> tuple[Rows, Rows | None]:
    """The samples that a site's `data` names, and its test split if it has one of its own."""
    if is_path(source):
        thing = load_code(source, f"{key} = {source!r}")
        return _given(thing() if callable(thing) else thing, spec, f"{key} = {source!r}")
    path = Path(source)
    if path.is_dir():
        return _folder(path, spec)
    if path.suffix.lower() in TABLES and path.is_file():
        return _table(path, spec, columns, label_column), None
    missing = "there is no such file or folder" if not path.exists() else "this kind of file is not read"
    raise ConfigError(f"{key} = {source!r}: {missing}; it is {SOURCES_OF_A_SITE}")


def _divided(name: str, train: Rows, test: Rows | None, spec: Spec, share: float, seed: int) -> Holding:
    _checked(train.data, spec, f"site {name}")
    if test is not None:
        return Holding(train.data, _checked(test.data, spec, f"site {name}, test"), train.texts)
    n = len(train.data)
    count = min(max(int(share * n + 0.5), 1), n - 1) if share > 0 else 0
    order = torch.randperm(n, generator=torch_rng(seed, "site test", name))
    kept, held = train.take(order[count:].sort().values), train.take(order[:count].sort().values)
    return Holding(kept.data, held.data, kept.texts)


def _checked(data: Data[Tensor], spec: Spec, what: str) -> Data[Tensor]:
    """`data`, checked against the spec."""
    found = tuple(data.inputs.shape[1:])
    if len(data) and found != spec.shape:
        raise DataError(f"{what}: samples of shape {found}; data.shape is {spec.shape}, the same for all sites")
    if (data.inputs.dtype == torch.int64) != bool(spec.vocabulary):
        raise DataError(f"{what}: samples are {data.inputs.dtype}; {spec.name} has {_kind(spec)}")
    check_samples(what, data, spec.classes, spec.vocabulary)
    if data.inputs.ndim == 4 and not data.inputs.dtype.is_floating_point and not spec.mean:
        raise ConfigError(
            f"{what}: pixels need data.mean and data.std, because no site may depend on what others hold; "
            "for plain values from 0 to 1 write mean = [0.0], std = [1.0]"
        )
    return data


def _kind(spec: Spec) -> str:
    return "texts" if spec.vocabulary else "images or vectors"


def _given(own: Any, spec: Spec, what: str) -> tuple[Rows, Rows | None]:
    if isinstance(own, Dataset) and own.texts is not None:
        splits = ((own.texts.train, own.train.labels), (own.texts.test, own.test.labels))
        train, test = (_texts(texts, labels, spec, what) for texts, labels in splits)
        return train, test
    if isinstance(own, Dataset):
        train, test = (Rows(_not_only_tokens(data, spec, what)) for data in (own.train, own.test))
        return train, test
    if isinstance(own, Data):
        own = (own.inputs, own.labels)
    if not isinstance(own, tuple | list) or len(own) != 2:
        raise DataError(
            f"{what}: a {type(own).__name__}; expected (inputs, labels), or a Dataset as solera.from_tensors returns it"
        )
    if are_texts(own[0]):
        labels = data_of(what, torch.zeros(len(own[0]), 1), own[1]).labels
        return _texts(own[0], labels, spec, what), None
    data = _not_only_tokens(data_of(what, *own), spec, what)
    return Rows(Data(data.inputs.clone(), data.labels.clone())), None


def _texts(texts: Sequence[Text], labels: Tensor, spec: Spec, what: str) -> Rows:
    """Texts, read by the tokenizer of the site's model."""
    if not spec.vocabulary:
        raise DataError(f"{what}: samples are texts; {spec.name} has {_kind(spec)}")
    refuse_empty(what, texts, range(len(texts)))
    return Rows(Data(spec.tokens(texts), labels), tuple(texts))


def _not_only_tokens(data: Data[Tensor], spec: Spec, what: str) -> Data[Tensor]:
    """`data`; refused if it has token ids and the site's model has its own tokenizer."""
    if spec.columns and data.inputs.dtype == torch.int64:
        raise DataError(
            f"{what}: samples are token ids, but the site's model reads texts with its own tokenizer, "
            f"{spec.tokenizer}: give texts, as (texts, labels) or by solera.data.from_texts"
        )
    return data


# ---- files ------------------------------------------------------------------------------------------


def _folder(folder: Path, spec: Spec) -> tuple[Rows, Rows | None]:
    """Images in a folder for each class. A site need not have all classes."""
    if len(spec.shape) != 3:
        raise ConfigError(f"{folder}: a folder of images, but data.shape = {list(spec.shape)} is not that of images")
    splits = homes(folder)
    found = {split: Rows(_pictures(home, spec)) for split, home in splits.items()}
    return found["train"], found.get("test")


def _pictures(home: Path, spec: Spec) -> Data[Tensor]:
    rows = [(path, each.name) for each in class_folders(home) for path in pictures_in(each)]
    if not rows:
        raise DataError(f"{home}: there are no images; expected {LAYOUT}")
    labels = spec.numbers([name for _, name in rows], str(home))
    return Data(fitted([path for path, _ in rows], spec.shape), labels)


def _table(path: Path, spec: Spec, columns: Sequence[str], label_column: str) -> Rows:
    """A table with named columns: numbers, texts or images."""
    table = read_table(path, [label_column, *columns])
    names = table.names
    written = [int(v) if isinstance(v, float) and v.is_integer() else v for v in table.cells(label_column)]  # 1.0 is 1
    labels = spec.numbers(written, f"{path}, column {label_column}")
    if not len(labels):
        raise DataError(f"{path}: has no rows below the header")
    if spec.vocabulary:
        chosen = columns if len(columns) == 2 else [_one(path, columns, names, TEXT_COLUMNS, "text")]
        return _texts(texts_of(table, chosen), labels, spec, str(path))
    if len(spec.shape) == 3:
        cells = table.cells(_one(path, columns, names, IMAGE_COLUMNS, "image"))
        return Rows(Data(to_shape(images_of(cells, spec.shape[0], str(path)), spec.shape), labels))
    numbers = []
    for column in columns or [name for name in names if name != label_column]:
        try:
            numbers.append(np.asarray(table.cells(column), dtype=np.float32))
        except (ValueError, TypeError) as e:
            raise DataError(
                f"{path}: column {column!r} holds something else than numbers ({e}); set columns to those that do"
            ) from None
    return Rows(Data(torch.from_numpy(np.stack(numbers, 1)), labels))


def _one(path: Path, columns: Sequence[str], header: Sequence[str], usual: Sequence[str], kind: str) -> str:
    if len(columns) > 1:
        more = ", or two for pairs" if kind == "text" else ""
        raise ConfigError(f"{path}: columns = {list(columns)}: name one {kind} column{more}")
    chosen = [*columns, *(c for c in usual if c in header)]
    if not chosen:
        raise DataError(f"{path}: has no {kind} column; it has {', '.join(header)}: set columns to one of them")
    return chosen[0]
