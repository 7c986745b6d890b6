"""Readers of tables: parquet files with the hub's column names, csv and tsv files, Hugging Face data sets."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import DataError
from .catalogue import SourceInfo
from .dataset import stored
from .images import stack, stack_pictures
from .readers import Split, files_in, image_split
from .text import tokenize

IMAGE_COLUMNS = ("image", "img")
TEXT_COLUMNS = ("text", "sentence", "content")
LABEL_COLUMNS = ("label", "labels", "fine_label", "sentiment")
USER_COLUMNS = ("user", "user_id")
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "testdata"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}


@dataclass(frozen=True)
class Columns:
    """The columns of a table, by their role."""

    input: str
    label: str
    user: str | None
    is_text: bool


def find_columns(
    available: Sequence[str], info: SourceInfo, where: str, given: Mapping[str, str | None] | None = None
) -> Columns:
    """The columns of inputs, labels and users: those given, else those of the source, else the usual names."""
    given = given or {}

    def pick(role: str, *usual: str) -> str | None:
        name = given.get(role)
        if name is not None and name not in available:
            raise DataError(f"{where}: has no column {name!r}; it has {', '.join(available)}")
        return name or next((known for known in usual if known in available), None)

    own_input, own_label, own_user = (*info.columns, "", "", "")[:3]
    image = None if info.is_text or given.get("text") else pick("image", own_input, *IMAGE_COLUMNS)
    text = None if image or len(info.shape) == 3 else pick("text", own_input, *TEXT_COLUMNS)
    label = pick("label", own_label, *LABEL_COLUMNS)
    content = image or text
    if content is None or label is None:
        wanted = info.columns[:2] or ("image or text", "label")
        raise DataError(
            f"{where}: needs the columns {' and '.join(wanted)}, but has {', '.join(available) or 'none'}; "
            "rename them, or pass your column names to solera.data.from_hf, or tensors to solera.data.from_tensors"
        )
    return Columns(content, label, pick("user", own_user, *USER_COLUMNS), image is None)


def split_word(name: str) -> str | None:
    """The split in the name of a file, folder or hub split: train, test, validation; None if there is none."""
    words = re.split(r"[-_.]", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def split_files(folder: Path, suffixes: tuple[str, ...], config: str | None) -> dict[str, list[Path]]:
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


def parquet_splits(folder: Path, info: SourceInfo, length: int) -> dict[str, Split]:
    """Parquet files with the hub's column names."""
    files = split_files(folder, (".parquet",), info.config)
    return {split: _parquet_split(paths, info, length) for split, paths in files.items()}


def csv_splits(folder: Path, info: SourceInfo, length: int) -> dict[str, Split]:
    """Csv (or tab-separated .tsv) files. Texts have a header with the hub's columns, or the source's own layout without
    a header. Images are rows of a label and the pixels, with or without a header."""
    files = split_files(folder, (".csv", ".tsv"), info.config)
    read = _csv_text if len(info.shape) < 2 else _csv_images
    return {split: read(paths, info, length) for split, paths in files.items()}


def hub_split(rows: Any, columns: Columns, length: int, channels: int | None, what: str) -> Split:
    """A split of a Hugging Face data set (or any object that is indexed by row number and by column name)."""
    labels = list(rows[columns.label])
    if None in labels:
        raise DataError(f"{what}: row {labels.index(None)} has no {columns.label}; use a labelled split")
    users = None if columns.user is None else np.asarray([str(u) for u in rows[columns.user]])

    def take(wanted: np.ndarray) -> Tensor:
        return _inputs([rows[int(i)][columns.input] for i in wanted], columns.is_text, length, channels, what)

    return Split(np.asarray(labels), take, users)


def _inputs(values: list[Any], is_text: bool, length: int, channels: int | None, what: str) -> Tensor:
    if is_text:
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise DataError(f"{what}: row {i} is {type(value).__name__}; expected text")
        return tokenize(values, length)
    pictures = [value["bytes"] if isinstance(value, dict) else value for value in values]
    if isinstance(pictures[0], list | np.ndarray | Tensor):
        return stored(stack(pictures, what), what)
    return stack_pictures(pictures, what, channels)


def _channels(info: SourceInfo) -> int | None:
    return info.shape[0] if len(info.shape) == 3 else None


def _parquet_split(paths: list[Path], info: SourceInfo, length: int) -> Split:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{paths[0]}: reading parquet needs pyarrow; install it with: pip install 'solera[data]'"
        ) from error
    try:
        columns = find_columns(pq.read_schema(paths[0]).names, info, str(paths[0]))
        wanted = [name for name in (columns.input, columns.label, columns.user) if name is not None]
        table = pa.concat_tables([pq.read_table(path, columns=wanted) for path in paths])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{paths[0]}: cannot be read as parquet ({error}); download it again") from error
    for name in wanted:
        if table[name].null_count:
            raise DataError(f"{paths[0]}: column {name} has {table[name].null_count} empty cells")
    users = None if columns.user is None else np.asarray([str(u) for u in table[columns.user].to_pylist()])

    def take(rows: np.ndarray) -> Tensor:
        # By chunks: one array of all images of a large set would overflow its 32-bit offsets.
        values, begin = [], 0
        for chunk in table[columns.input].chunks:
            inside = rows[(rows >= begin) & (rows < begin + len(chunk))] - begin
            values += chunk.take(pa.array(inside)).to_pylist()
            begin += len(chunk)
        return _inputs(values, columns.is_text, length, _channels(info), str(paths[0]))

    return Split(np.asarray(table[columns.label].to_pylist()), take, users)


def _csv_text(paths: list[Path], info: SourceInfo, length: int) -> Split:
    texts: list[str] = []
    labels: list[str] = []
    users: list[str] = []
    for path in paths:
        table = _csv_rows(path, info.plain.encoding if info.plain else "utf-8")
        header = table[0]
        if set(LABEL_COLUMNS) & set(header) or info.plain is None:
            columns = find_columns(header, info, str(path))
            label = header.index(columns.label)
            text: tuple[int, ...] = (header.index(columns.input),)
            user = None if columns.user is None else header.index(columns.user)
            first, table = 0, table[1:]
        else:
            label, text, user, first = info.plain.label, info.plain.text, info.plain.user, info.plain.first_label
            if not _is_number(header[label]):
                table = table[1:]
        for i, row in enumerate(table):
            if len(row) <= max(label, *text, user or 0):
                raise DataError(f"{path}: data row {i + 1} has {len(row)} columns, too few")
            labels.append(str(int(row[label]) - first) if _is_number(row[label]) else row[label])
            texts.append(" ".join(row[t] for t in text))
            if user is not None:
                users.append(row[user])
    numbers = np.asarray([int(x) for x in labels]) if all(map(_is_number, labels)) else np.asarray(labels)
    return Split(numbers, lambda rows: tokenize([texts[i] for i in rows], length), np.asarray(users) if users else None)


def _csv_rows(path: Path, encoding: str) -> list[list[str]]:
    tabs = path.suffix == ".tsv"
    try:
        with path.open(newline="", encoding=encoding) as file:
            reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(file)
            rows = [row for row in reader if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({error})") from error
    if not rows:
        raise DataError(f"{path}: is empty")
    return rows


def _csv_images(paths: list[Path], info: SourceInfo, length: int) -> Split:
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
