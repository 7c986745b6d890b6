"""Tables: one reader for parquet, csv, tsv and JSON lines, and the splits of data sets that come in tables.

Only parquet needs pyarrow. Its readers of csv and JSON are not used, because they guess types: a text that looks like a
date comes back as one, and "NA" as nothing.
"""

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core.errors import DataError
from .catalogue import PlainTable, SourceInfo
from .dataset import stored
from .encodings import Text
from .images import stack, stack_pictures
from .readers import Split, files_in, image_split

IMAGE_COLUMNS = ("image", "img")
TEXT_COLUMNS = ("text", "sentence", "content")
LABEL_COLUMNS = ("label", "labels", "fine_label", "sentiment")
USER_COLUMNS = ("user", "user_id")
SUFFIXES = {"parquet": (".parquet",), "csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson")}
TABLES = tuple(suffix for several in SUFFIXES.values() for suffix in several)
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "testdata"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}


# ---- reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Named columns of cells. A column is loaded when it is asked for."""

    where: str  # the file, for error messages
    names: Sequence[str]
    parts: Callable[[str], Sequence[Any]]  # a column in pieces: lists, or the arrays that a parquet file stores
    class_names: Callable[[str], Sequence[str] | None] = lambda label: None  # if the file names the classes
    written: bool = False  # cells are strings, numbers too

    def refuse_without(self, name: str) -> None:
        """Raise DataError if there is no such column."""
        if name not in self.names:
            raise DataError(f"{self.where}: has no column {name!r}; it has {', '.join(self.names)}")

    def cells(self, name: str, rows: np.ndarray | None = None) -> list[Any]:
        """A column, or these of its rows (sorted). An empty cell is refused."""
        self.refuse_without(name)
        found: list[Any] = []
        begin = 0
        for part in self.parts(name):  # not joined: the images of a large set would overflow an array's 32-bit offsets
            if rows is None:
                found += part if isinstance(part, list) else part.to_pylist()
            else:
                inside = rows[(rows >= begin) & (rows < begin + len(part))] - begin
                found += part.take(inside).to_pylist() if hasattr(part, "take") else [part[i] for i in inside.tolist()]
                begin += len(part)
        for i, cell in enumerate(found):
            if cell is None:
                raise DataError(f"{self.where}: {_place(name, i, rows)} is empty; fill it, or remove the row")
        return found


def _place(column: str, i: int, rows: np.ndarray | None) -> str:
    return f"row {i if rows is None else int(rows[i])} (counted from 0) of column {column!r}"


def read_table(path: Path, columns: Sequence[str] = (), plain: PlainTable | None = None) -> Table:
    """The table in a file, which must have the named `columns`.

    A csv file that is `plain` has no header. Its columns are then called text, label and user.
    """
    kind = path.suffix.lower()
    if kind == ".parquet":
        table = _parquet(path)
    else:
        table = _csv(path, columns, plain) if kind in SUFFIXES["csv"] else _json_lines(path)
    for name in columns:
        table.refuse_without(name)
    return table


def joined(tables: Sequence[Table]) -> Table:
    """The rows of several tables, one after the other."""
    first = tables[0]
    if len(tables) == 1:
        return first

    def parts(name: str) -> list[Any]:
        for table in tables:
            if name not in table.names:
                raise DataError(f"{table.where}: has no column {name!r}, but {first.where} has; give both the same")
        return [part for table in tables for part in table.parts(name)]

    where = f"{first.where} and {len(tables) - 1} more"
    return Table(where, first.names, parts, first.class_names, first.written)


def _parquet(path: Path) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError(f"{path}: reading parquet needs pyarrow; install it with: pip install 'solera[data]'") from e

    def reading(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (pa.ArrowException, OSError) as e:
            raise DataError(f"{path}: cannot be read as parquet ({e}); download it again") from e

    schema = reading(lambda: pq.read_schema(path))

    def class_names(label: str) -> Sequence[str] | None:
        try:  # as the hub writes them into its files
            names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
        except (KeyError, ValueError, TypeError):
            return None
        return names if isinstance(names, list) else None

    def parts(name: str) -> list[Any]:
        chunks: list[Any] = reading(lambda: pq.ParquetFile(path).read(columns=[name])[name].chunks)
        return chunks

    return Table(str(path), schema.names, parts, class_names)


def _csv(path: Path, columns: Sequence[str], plain: PlainTable | None) -> Table:
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix.lower() == ".tsv" else {}
    try:
        with path.open(newline="", encoding=plain.encoding if plain else "utf-8-sig") as file:
            reader = csv.reader(file, **options)
            numbered = [(reader.line_num, row) for row in reader if row]
    except (csv.Error, OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({e})") from e
    if not numbered:
        raise DataError(f"{path}: is empty")
    names, rows = numbered[0][1], [row for _, row in numbered[1:]]
    if plain is not None and (columns or set(LABEL_COLUMNS) & set(names)):
        plain = None
    width = len(names) if plain is None else max(len(names), plain.label + 1, *(t + 1 for t in plain.text))
    for line, row in numbered:
        if len(row) != width:
            raise DataError(f"{path}: line {line} has {len(row)} columns, expected {width}; is a quote missing?")
    if plain is not None:
        whole = [names, *rows] if _is_number(names[plain.label]) else rows
        names = ["text", "label"] if plain.user is None else ["text", "label", "user"]
        rows = [[" ".join(row[t] for t in plain.text), row[plain.label], row[plain.user or 0]] for row in whole]
        for row in rows:
            row[1] = str(int(row[1]) - plain.first_label) if _is_number(row[1]) else row[1]
    return Table(str(path), names, lambda name: [[row[names.index(name)] for row in rows]], written=True)


def _json_lines(path: Path) -> Table:
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({e})") from e
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{path}: line {i + 1} is not JSON ({e})") from None
        if not isinstance(row, dict):
            raise DataError(f'{path}: line {i + 1} is a {type(row).__name__}; expected an object, {{"text": ...}}')
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: is empty")
    return Table(str(path), list(rows[0]), lambda name: [[row.get(name) for row in rows]])


@dataclass(frozen=True)
class _HubColumn:
    """A column of a Hugging Face data set: a cell is decoded when it is asked for."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row][self.name]

    def to_pylist(self) -> list[Any]:
        return list(self.rows[self.name])


def hub_table(rows: Any, where: str) -> Table:
    """A Hugging Face data set, or any object that is indexed by row number and by column name."""
    features = getattr(rows, "features", {})
    return Table(
        where,
        rows.column_names,
        lambda name: [_HubColumn(rows, name)],
        lambda label: getattr(features.get(label), "names", None),
    )


def texts_of(table: Table, columns: Sequence[str], rows: np.ndarray | None = None) -> list[Text]:
    """The texts in a column, or the pairs of texts in two."""
    several = [table.cells(name, rows) for name in columns]
    for name, cells in zip(columns, several, strict=True):
        for i, cell in enumerate(cells):
            if not isinstance(cell, str):
                kind = type(cell).__name__
                raise DataError(f"{table.where}: {_place(name, i, rows)} is {kind}; expected text")
    return several[0] if len(several) == 1 else list(zip(*several, strict=True))


def images_of(cells: Sequence[Any], channels: int | None, what: str) -> Tensor:
    """Images out of the cells of a table: files as bytes, as the hub stores them, pictures, or arrays of numbers."""
    pictures = [cell["bytes"] if isinstance(cell, dict) else cell for cell in cells]
    if isinstance(pictures[0], list | np.ndarray | Tensor):
        return stored(stack(pictures, what), what)
    return stack_pictures(pictures, what, channels)


# ---- splits of a data set ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The columns that a user names, by their role; None: found by the usual names."""

    text: str | None = None
    pair: str | None = None  # the second text of a pair: it has no usual name
    label: str | None = None
    user: str | None = None
    image: str | None = None
    labelled: bool = True  # False: texts without labels will do, as language models need none

    @property
    def named(self) -> dict[str, str]:
        """The given ones, by their setting."""
        roles = {"text": self.text, "pair": self.pair, "label": self.label, "user": self.user}
        return {f"{role}_column": name for role, name in roles.items() if name is not None}


USUAL = Given()


def table_split(table: Table, info: SourceInfo, given: Given = USUAL) -> Split:
    """A split of a data set out of a table. Columns are those given, else those of the set, else the usual names."""
    where, names = table.where, table.names

    def pick(role: str, *usual: str) -> str | None:
        return getattr(given, role) or next((name for name in usual if name in names), None)

    own_input, own_label, own_user = (*info.columns, "", "", "")[:3]
    image = None if info.is_text or given.text else pick("image", own_input, *IMAGE_COLUMNS)
    text = None if image or len(info.shape) == 3 else pick("text", own_input, *TEXT_COLUMNS)
    label, user = pick("label", own_label, *LABEL_COLUMNS), pick("user", own_user, *USER_COLUMNS)
    content = image or text
    if content is None or (label is None and given.labelled):
        wanted = info.columns[:2] or ("image or text", "label")
        raise DataError(
            f"{where}: needs the columns {' and '.join(wanted)}, but has {', '.join(names) or 'none'}; rename "
            "them, or name yours: data.text_column, data.label_column (from Python: solera.data.from_hf)"
        )
    inputs = (content, given.pair) if given.pair else (content,)
    channels = info.shape[0] if len(info.shape) == 3 else None

    def take(rows: np.ndarray) -> Tensor | list[Text]:
        return images_of(table.cells(content, rows), channels, where) if image else texts_of(table, inputs, rows)

    for name in inputs:
        table.refuse_without(name)
    labels = [0] * sum(map(len, table.parts(content))) if label is None else table.cells(label)
    for i, value in enumerate(labels):
        if isinstance(value, list | tuple | dict | set) or getattr(value, "ndim", 0) > 0:
            raise DataError(
                f"{where}: the label of row {i} (counted from 0) is a {type(value).__name__}; expected one class, by "
                "number or by name"
            )
    if label and table.written and all(map(_is_number, labels)):
        labels = [int(value) for value in labels]
    users = None if user is None else np.asarray([str(u) for u in table.cells(user)])
    class_names = table.class_names(label) if label else None
    return Split(np.asarray(labels), take, users, tuple(map(str, class_names or ())))


def file_split(path: Path, info: SourceInfo, given: Given) -> Split | None:
    """The rows of one file; None if it is not a table that this source may be in."""
    fits = len(info.shape) < 2 and set(info.formats) & set(SUFFIXES) and path.suffix.lower() in TABLES
    return table_split(_read([path], info, given), info, given) if fits else None


def folder_tables(form: str, folder: Path, info: SourceInfo, given: Given) -> dict[str, Split]:
    """The splits of the files of a format in a folder. Csv files of images are rows of a label and the pixels."""
    files = _split_files(folder, SUFFIXES[form], info.config)
    if form == "csv" and len(info.shape) >= 2:
        return {split: _csv_images(paths, info) for split, paths in files.items()}
    return {split: table_split(_read(paths, info, given), info, given) for split, paths in files.items()}


def _read(paths: Sequence[Path], info: SourceInfo, given: Given) -> Table:
    return joined([read_table(path, list(given.named.values()), info.plain) for path in paths])


def split_word(name: str) -> str | None:
    """The split in the name of a file, folder or hub split: train, test, validation; None if there is none."""
    words = re.split(r"[-_.]", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def _split_files(folder: Path, suffixes: tuple[str, ...], config: str | None) -> dict[str, list[Path]]:
    """The files of each split, by a word in the file's name (train-00000-of-00001) or in its folder's name.

    If several folders hold splits, the one with the name of the hub's configuration is used.
    """
    groups: dict[Path, dict[str, list[Path]]] = {}
    for path in files_in(folder, depth=3):
        if path.suffix in suffixes:
            for home, name in ((path.parent, path.stem), (path.parent.parent, path.parent.name)):
                if split := split_word(name):
                    groups.setdefault(home, {}).setdefault(split, []).append(path)
                    break
    if len(groups) > 1:
        chosen = {home: splits for home, splits in groups.items() if home.name == config or home == folder}
        if len(chosen) != 1:
            names = ", ".join(str(home.relative_to(folder)) for home in groups)
            raise DataError(f"{folder}: several folders hold data ({names}); set path to one of them")
        groups = chosen
    return next(iter(groups.values()), {})


def _csv_images(paths: list[Path], info: SourceInfo) -> Split:
    pixels = int(np.prod(info.shape))
    tables = []
    for path in paths:
        with path.open() as file:
            header = file.readline()
        try:
            skip = 0 if _is_number(header.split(",")[0]) else 1
            table = np.loadtxt(path, np.int64, delimiter=",", skiprows=skip, ndmin=2)
        except ValueError as error:
            raise DataError(f"{path}: cannot be read as rows of a label and pixels ({error})") from error
        if table.shape[1] != pixels + 1 or table[:, 1:].min() < 0 or table[:, 1:].max() > 255:
            raise DataError(
                f"{path}: each row must be a label and {pixels} pixels 0..255; found {table.shape[1]} columns"
            )
        tables.append(table)
    whole = np.concatenate(tables)
    images = whole[:, 1:].astype(np.uint8).reshape(-1, *info.shape)
    return image_split(images, whole[:, 0], paths[0], "csv", info)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*-?\d+\s*", text) is not None
