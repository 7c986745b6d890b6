"""Sites: clients that have a name and bring their own data, in a simulation and in a deployment alike.

What a site holds follows from its own table and its own files alone, so that a site that reads only its own data gets
the samples that a simulation of all sites gave it:

- What a sample looks like (`Form`) is stated, not found: shape, classes and normalisation constants come from the
  configuration, and are the same for all.
- The split into training and test samples is drawn from (seed, the site's name), from its own rows.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from ..core.plugins import is_path
from ..core.plugins import load as load_code
from ..core.settings import BelowOne, settings
from ..core.task import Data
from .dataset import Arrays, Dataset, Task, are_texts, check_samples, data_of, stored
from .encodings import Columns, Encoding, Text, encoded
from .folders import LAYOUT, class_folders, decoded, homes, pictures_in
from .images import is_deep, open_picture, stack, stack_pictures
from .sampling import torch_rng
from .tables import IMAGE_COLUMNS, TEXT_COLUMNS
from .tokens import WORDS, refuse_empty
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
    columns: list[str] = field(default_factory=list)  # of a table: inputs in order (texts: one or two); []: usual names
    label_column: str = "label"  # of a table: the class
    tasks: list[str] | None = None  # deployment: those that the site answers; `solera deploy init` writes them
    bounds: dict[str, Any] | None = None  # deployment: of their arguments; `solera deploy init` writes them


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
    columns: tuple[Columns, ...] = ()  # as of a Dataset: of all tokenizers, or (`read_by`) of one site's alone
    task: ClassVar[Task] = "classification"  # sites learn no language models

    @classmethod
    def of(cls, data: Dataset) -> "Form":
        """The form of a data set's samples."""
        names = data.class_names
        return cls(data.name, data.shape, data.classes, data.mean, data.std, data.vocabulary, names, data.columns)

    def read_by(self, encoding: Encoding) -> "Form":
        """The form of a party whose model has this tokenizer. No other one's tokens are in its samples."""
        if encoding == WORDS and not self.columns:
            return self
        if not self.vocabulary:
            raise ConfigError(
                f"{self.name}: a model brings the tokenizer {encoding.name!r} and needs texts, but samples have shape "
                f"{self.shape}; choose another model, or data of texts (data.name = 'texts')"
            )
        own = () if encoding == WORDS else (Columns(encoding, 0, self.length),)
        return replace(self, shape=(self.length,), vocabulary=encoding.vocabulary, columns=own)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Stored samples as input of a model."""
        return normalise(inputs, self.mean, self.std)

    @property
    def length(self) -> int:
        """Text only: the tokens that one model reads of a text."""
        return self.columns[0].length if self.columns else self.shape[0]

    @property
    def tokenizer(self) -> str:
        """The names of the tokenizers that models bring; "" if they bring none."""
        return ", ".join(c.encoding.name for c in self.columns)

    def tokens(self, texts: Sequence[Text]) -> Tensor:
        """Texts as samples."""
        return encoded(texts, [c.encoding for c in self.columns] or [WORDS], self.length)[0]

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
            raise DataError(f"{what}: samples are {data.inputs.dtype}; {self.name} has {self.kind}")
        check_samples(what, data, self.classes, self.vocabulary)
        if data.inputs.ndim == 4 and not data.inputs.dtype.is_floating_point and not self.mean:
            raise ConfigError(
                f"{what}: pixels need data.mean and data.std, because no site may depend on what others hold; "
                "for plain values from 0 to 1 write mean = [0.0], std = [1.0]"
            )
        return data

    @property
    def kind(self) -> str:
        """What samples are, for an error message."""
        return "texts" if self.vocabulary else "images or vectors"


class Rows(NamedTuple):
    """Samples as a source gives them, and the texts that they were, if so."""

    data: Data[Tensor]
    texts: tuple[Text, ...] | None = None

    def take(self, rows: Tensor) -> "Rows":
        """Some of them."""
        texts = None if self.texts is None else tuple(self.texts[i] for i in rows.tolist())
        return Rows(Data(self.data.inputs[rows], self.data.labels[rows]), texts)


@dataclass(frozen=True)
class Holding:
    """What one site holds, as stored."""

    train: Data[Tensor]
    test: Data[Tensor]
    texts: tuple[Text, ...] | None = None  # text only, if known: those of the training samples


def hold(name: str, given: Own, form: Form, share: float, seed: int) -> Holding:
    """The samples of the site `name`, divided into training and test samples."""
    train, test = _given(given, form, f"site {name}")
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
) -> tuple[Rows, Rows | None]:
    """The samples that a site's `data` names, and its test split if it has one of its own."""
    if is_path(source):
        thing = load_code(source, f"{key} = {source!r}")
        return _given(thing() if callable(thing) else thing, form, f"{key} = {source!r}")
    path = Path(source)
    if path.is_dir():
        return _folder(path, form)
    if path.suffix in TABLES and path.is_file():
        return _table(path, form, columns, label_column), None
    missing = "there is no such file or folder" if not path.exists() else "this kind of file is not read"
    raise ConfigError(f"{key} = {source!r}: {missing}; it is {SOURCES_OF_A_SITE}")


def _divided(name: str, train: Rows, test: Rows | None, form: Form, share: float, seed: int) -> Holding:
    form.checked(train.data, f"site {name}")
    if test is not None:
        return Holding(train.data, form.checked(test.data, f"site {name}, test"), train.texts)
    n = len(train.data)
    count = min(max(int(share * n + 0.5), 1), n - 1) if share > 0 else 0
    order = torch.randperm(n, generator=torch_rng(seed, "site test", name))
    kept, held = train.take(order[count:].sort().values), train.take(order[:count].sort().values)
    return Holding(kept.data, held.data, kept.texts)


def _given(own: Any, form: Form, what: str) -> tuple[Rows, Rows | None]:
    if isinstance(own, Dataset) and own.texts is not None:
        splits = ((own.texts.train, own.train.labels), (own.texts.test, own.test.labels))
        train, test = (_texts(texts, labels, form, what) for texts, labels in splits)
        return train, test
    if isinstance(own, Dataset):
        train, test = (Rows(_not_only_tokens(data, form, what)) for data in (own.train, own.test))
        return train, test
    if isinstance(own, Data):
        own = (own.inputs, own.labels)
    if not isinstance(own, tuple | list) or len(own) != 2:
        raise DataError(
            f"{what}: a {type(own).__name__}; expected (inputs, labels), or a Dataset as solera.from_tensors returns it"
        )
    if are_texts(own[0]):
        labels = data_of(what, torch.zeros(len(own[0]), 1), own[1]).labels
        return _texts(own[0], labels, form, what), None
    data = _not_only_tokens(data_of(what, *own), form, what)
    return Rows(Data(data.inputs.clone(), data.labels.clone())), None


def _texts(texts: Sequence[Text], labels: Tensor, form: Form, what: str) -> Rows:
    """Texts, read by the tokenizer of the site's model."""
    if not form.vocabulary:
        raise DataError(f"{what}: samples are texts; {form.name} has {form.kind}")
    refuse_empty(what, texts, range(len(texts)))
    return Rows(Data(form.tokens(texts), labels), tuple(texts))


def _not_only_tokens(data: Data[Tensor], form: Form, what: str) -> Data[Tensor]:
    """`data`, unless it is token ids and the site's model has a tokenizer of its own."""
    if form.columns and data.inputs.dtype == torch.int64:
        raise DataError(
            f"{what}: samples are token ids, but the site's model reads texts with its own tokenizer, "
            f"{form.tokenizer}: give texts, as (texts, labels) or by solera.data.from_texts"
        )
    return data


# ---- files ------------------------------------------------------------------------------------------


def _folder(folder: Path, form: Form) -> tuple[Rows, Rows | None]:
    """Images in a folder for each class. A site need not have all classes."""
    if len(form.shape) != 3:
        raise ConfigError(f"{folder}: a folder of images, but data.shape = {list(form.shape)} is not that of images")
    splits = homes(folder)
    found = {split: Rows(_pictures(home, form)) for split, home in splits.items()}
    return found["train"], found.get("test")


def _pictures(home: Path, form: Form) -> Data[Tensor]:
    rows = [(path, each.name) for each in class_folders(home) for path in pictures_in(each)]
    if not rows:
        raise DataError(f"{home}: there are no images; expected {LAYOUT}")
    labels = form.numbers([name for _, name in rows], str(home))
    deep = any(is_deep(open_picture(path.read_bytes(), str(path), 0)) for path, _ in rows)
    return Data(decoded([path for path, _ in rows], form.shape, deep), labels)


def _table(path: Path, form: Form, columns: Sequence[str], label_column: str) -> Rows:
    """A table with named columns: numbers, texts or, in a parquet file, images."""
    header, column_of = _columns(path)
    if label_column not in header:
        raise DataError(f"{path}: has no column {label_column!r} for the class; it has {', '.join(header)}")
    if missing := [c for c in columns if c not in header]:
        raise DataError(f"{path}: has no column {missing[0]!r}; it has {', '.join(header)}")
    labels = form.numbers([_whole(value) for value in column_of(label_column)], f"{path}, column {label_column}")
    if form.vocabulary:
        return _texts(_texts_of(path, columns, header, column_of), labels, form, str(path))
    if len(form.shape) == 3:
        chosen = _one(path, columns, header, IMAGE_COLUMNS, "image")
        return Rows(Data(to_shape(_images(column_of(chosen), form.shape[0], str(path)), form.shape), labels))
    wanted = list(columns) or [c for c in header if c != label_column]
    return Rows(Data(torch.from_numpy(np.stack([_floats(path, c, column_of(c)) for c in wanted], 1)), labels))


def _texts_of(
    path: Path, columns: Sequence[str], header: Sequence[str], column_of: Callable[[str], Sequence[Any]]
) -> list[Text]:
    """The texts of a table; with two columns, pairs of them."""
    if len(columns) == 2:
        first, second = ([str(text) for text in column_of(c)] for c in columns)
        return list(zip(first, second, strict=True))
    return [str(text) for text in column_of(_one(path, columns, header, TEXT_COLUMNS, "text"))]


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
        more = ", or two for pairs" if kind == "text" else ""
        raise ConfigError(f"{path}: columns = {list(columns)}: name one {kind} column{more}")
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
