"""Sites: clients that have a name and bring their own data, in a simulation and in a deployment alike.

What a site holds follows from its own table and its own files alone, so that a site that reads only its own data gets
the samples that a simulation of all sites gave it:

- What a sample looks like (`Form`) is stated, not found: shape, classes and normalisation constants come from the
  configuration, and are the same for all.
- The split into training and test samples is drawn from (seed, the site's name), from its own rows.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..encodings import Columns, Text, encoded
from ..errors import ConfigError, DataError
from ..plugins import is_path
from ..plugins import load as load_code
from ..settings import BelowOne, settings
from ..task import Data
from .dataset import Arrays, Dataset, Task, check_samples, data_of, stored
from .folders import LAYOUT, class_folders, decoded, homes, pictures_in
from .images import is_deep, open_picture, stack, stack_pictures
from .sampling import torch_rng
from .tables import IMAGE_COLUMNS, TEXT_COLUMNS
from .text import WORDS
from .transforms import normalise, to_shape

TABLES = (".csv", ".tsv", ".parquet")
Own = Data | Arrays | Dataset  # what a site's own Python gives, or returns when it is called
SOURCES_OF_A_SITE = (
    "a folder of images with a folder for each class, a .csv, .tsv or .parquet file, or your own Python "
    "(package.module:attribute or file.py:attribute)"
)


@settings
class SiteConfig:
    """One site, [sites.NAME]: a client that brings its own data and its own model."""

    data: str | None = None  # a folder of images, a .csv, .tsv or .parquet file, or own Python; only the site needs it
    model: str | None = None  # its architecture
    test: BelowOne | None = None  # share of its samples kept as its private test split; default: data.client_test
    key: str | None = None  # deployment: the file of its public key
    columns: list[str] = field(default_factory=list)  # of a table: the inputs, in this order; []: by their usual names
    label_column: str = "label"  # of a table: the class


@dataclass(frozen=True)
class Form:
    """What the samples of all sites and of the server look like. No data is needed to know it."""

    name: str
    shape: tuple[int, ...]  # of one prepared sample
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocabulary: int = 0  # text only
    class_names: tuple[str, ...] = ()
    columns: tuple[Columns, ...] = ()  # as of a Dataset: sites share one tokenizer
    task: ClassVar[Task] = "classification"  # sites learn no language models

    @classmethod
    def of(cls, data: Dataset) -> "Form":
        """The form of a data set's samples."""
        return cls(data.name, data.shape, data.classes, data.mean, data.std, data.vocabulary, data.class_names)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Stored samples as input of a model."""
        return normalise(inputs, self.mean, self.std)

    @property
    def length(self) -> int:
        """Text only: the number of tokens of a sample."""
        return self.shape[0]

    def tokens(self, texts: Sequence[Text]) -> Tensor:
        """Texts as samples."""
        return encoded(texts, [WORDS], self.length)[0]

    def numbers(self, labels: Sequence[Any], what: str) -> Tensor:
        """Labels (names or numbers) as numbers of classes."""
        known = {name: i for i, name in enumerate(self.class_names)}
        found = [str(label) for label in labels]
        if strange := sorted({label for label in found if label not in known and not label.isdecimal()}):
            said = ", ".join(self.class_names[:10]) or f"0 to {self.classes - 1}"
            raise DataError(f"{what}: the class {strange[0]!r} is not one of data.classes ({said})")
        return torch.tensor([known[n] if n in known else int(n) for n in found], dtype=torch.int64)

    def checked(self, data: Data[Tensor], what: str) -> Data[Tensor]:
        """`data`, if it has this form."""
        found = tuple(data.inputs.shape[1:])
        if len(data) and found != self.shape:
            raise DataError(f"{what}: samples of shape {found}; data.shape is {self.shape}, the same for all sites")
        if (data.inputs.dtype == torch.int64) != bool(self.vocabulary):
            raise DataError(f"{what}: samples are {data.inputs.dtype}; {self.name} has {self._kind()}")
        check_samples(what, data, self.classes, self.vocabulary)
        if data.inputs.ndim == 4 and not data.inputs.dtype.is_floating_point and not self.mean:
            raise ConfigError(
                f"{what}: pixels need data.mean and data.std, because no site may depend on what others hold; "
                "for plain values from 0 to 1 write mean = [0.0], std = [1.0]"
            )
        return data

    def _kind(self) -> str:
        return "texts" if self.vocabulary else "images or vectors"


@dataclass(frozen=True)
class Holding:
    """What one site holds, as stored."""

    train: Data[Tensor]
    test: Data[Tensor]


def hold(name: str, given: Own, form: Form, share: float, seed: int) -> Holding:
    """The samples of the site `name`, divided into training and test samples."""
    train, test = _given(given, f"site {name}")
    return _divided(name, train, test, form, share, seed)


def read_site(name: str, site: SiteConfig, form: Form, share: float, seed: int) -> Holding:
    """The samples of the site `name`, from the source that its table names. `share` is used if it has none itself."""
    if site.data is None:
        raise ConfigError(f"sites.{name}.data is missing: it is {SOURCES_OF_A_SITE}")
    train, test = read_source(site.data, form, site.columns, site.label_column, f"sites.{name}.data")
    if test is not None and site.test is not None:
        raise ConfigError(f"sites.{name}.test = {site.test}: {site.data} has a test split of its own; leave it out")
    return _divided(name, train, test, form, share if site.test is None else site.test, seed)


def read_source(
    source: str, form: Form, columns: Sequence[str], label_column: str, key: str
) -> tuple[Data[Tensor], Data[Tensor] | None]:
    """The samples that a site's `data` names, and its test split if it has one of its own."""
    if is_path(source):
        thing = load_code(source, f"{key} = {source!r}")
        return _given(thing() if callable(thing) else thing, f"{key} = {source!r}")
    path = Path(source)
    if path.is_dir():
        return _folder(path, form)
    if path.suffix in TABLES and path.is_file():
        return _table(path, form, columns, label_column), None
    missing = "there is no such file or folder" if not path.exists() else "this kind of file is not read"
    raise ConfigError(f"{key} = {source!r}: {missing}; it is {SOURCES_OF_A_SITE}")


def _divided(name: str, train: Data[Tensor], test: Data[Tensor] | None, form: Form, share: float, seed: int) -> Holding:
    form.checked(train, f"site {name}")
    if test is not None:
        return Holding(train, form.checked(test, f"site {name}, test"))
    n = len(train)
    count = min(max(int(share * n + 0.5), 1), n - 1) if share > 0 else 0
    order = torch.randperm(n, generator=torch_rng(seed, "site test", name))
    kept, held = order[count:].sort().values, order[:count].sort().values
    return Holding(
        Data(train.inputs[kept], train.labels[kept]),
        Data(train.inputs[held], train.labels[held]),
    )


def _given(own: Any, what: str) -> tuple[Data[Tensor], Data[Tensor] | None]:
    if isinstance(own, Dataset):
        return own.train, own.test
    if isinstance(own, Data):
        own = (own.inputs, own.labels)
    if not isinstance(own, tuple | list) or len(own) != 2:
        raise DataError(
            f"{what}: a {type(own).__name__}; expected (inputs, labels), or a Dataset as solera.from_tensors returns it"
        )
    data = data_of(what, *own)
    return Data(data.inputs.clone(), data.labels.clone()), None


# ---- files ------------------------------------------------------------------------------------------


def _folder(folder: Path, form: Form) -> tuple[Data[Tensor], Data[Tensor] | None]:
    """Images in a folder for each class. A site need not have all classes."""
    if len(form.shape) != 3:
        raise ConfigError(f"{folder}: a folder of images, but data.shape = {list(form.shape)} is not that of images")
    splits = homes(folder)
    found = {split: _pictures(home, form) for split, home in splits.items()}
    return found["train"], found.get("test")


def _pictures(home: Path, form: Form) -> Data[Tensor]:
    rows = [(path, each.name) for each in class_folders(home) for path in pictures_in(each)]
    if not rows:
        raise DataError(f"{home}: there are no images; expected {LAYOUT}")
    labels = form.numbers([name for _, name in rows], str(home))
    deep = any(is_deep(open_picture(path.read_bytes(), str(path), 0)) for path, _ in rows)
    return Data(decoded([path for path, _ in rows], form.shape, deep), labels)


def _table(path: Path, form: Form, columns: Sequence[str], label_column: str) -> Data[Tensor]:
    """A table with named columns: numbers, texts or, in a parquet file, images."""
    header, column_of = _columns(path)
    if label_column not in header:
        raise DataError(f"{path}: has no column {label_column!r} for the class; it has {', '.join(header)}")
    if missing := [c for c in columns if c not in header]:
        raise DataError(f"{path}: has no column {missing[0]!r}; it has {', '.join(header)}")
    labels = form.numbers([_whole(value) for value in column_of(label_column)], f"{path}, column {label_column}")
    if form.vocabulary:
        chosen = _one(path, columns, header, TEXT_COLUMNS, "text")
        return Data(form.tokens([str(text) for text in column_of(chosen)]), labels)
    if len(form.shape) == 3:
        chosen = _one(path, columns, header, IMAGE_COLUMNS, "image")
        return Data(to_shape(_images(column_of(chosen), form.shape[0], str(path)), form.shape), labels)
    wanted = list(columns) or [c for c in header if c != label_column]
    return Data(torch.from_numpy(np.stack([_floats(path, c, column_of(c)) for c in wanted], 1)), labels)


def _columns(path: Path) -> tuple[list[str], Callable[[str], Sequence[Any]]]:
    """The names of a table's columns, and the values of one of them."""
    if path.suffix == ".parquet":
        table = _parquet(path)
        return list(table.column_names), lambda name: table[name].to_pylist()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",") if row]
    except (csv.Error, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({e})") from e
    if len(rows) < 2:
        raise DataError(f"{path}: has no rows below the header")
    header, *rows = rows
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise DataError(f"{path}: data row {i + 1} has {len(row)} columns, the header {len(header)}")
    return header, lambda name: [row[header.index(name)] for row in rows]


def _parquet(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError(f"{path}: reading parquet needs pyarrow; install it with: pip install 'solera[data]'") from e
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read as parquet ({e})") from e
    for name in table.column_names:
        if table[name].null_count:
            raise DataError(f"{path}: column {name} has {table[name].null_count} empty cells")
    return table


def _images(values: Sequence[Any], channels: int, what: str) -> Tensor:
    """Images out of the cells of a table: files as bytes, as the hub stores them, or nested lists of numbers."""
    pictures = [value["bytes"] if isinstance(value, dict) else value for value in values]
    if isinstance(pictures[0], list):
        return stored(stack(pictures, what), what)
    return stack_pictures(pictures, what, channels)


def _one(path: Path, columns: Sequence[str], header: Sequence[str], usual: Sequence[str], kind: str) -> str:
    if len(columns) > 1:
        raise ConfigError(f"{path}: columns = {list(columns)}: name one {kind} column")
    chosen = [*columns, *(c for c in usual if c in header)]
    if not chosen:
        raise DataError(f"{path}: has no {kind} column; it has {', '.join(header)}: set columns to one of them")
    return chosen[0]


def _floats(path: Path, column: str, values: Sequence[Any]) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.float32)
    except (ValueError, TypeError) as e:
        raise DataError(
            f"{path}: column {column!r} holds something else than numbers ({e}); set columns to those that do"
        ) from None


def _whole(value: Any) -> Any:
    """A class as it is written in a table: 1.0 is 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
