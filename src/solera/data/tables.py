"""Readers of tables: parquet files, csv and tsv files, JSON lines, Hugging Face data sets."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core.errors import DataError
from .catalogue import SourceInfo
from .dataset import stored
from .encodings import Text
from .images import stack, stack_pictures
from .readers import Split, files_in, image_split

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
        """Those that are given, by their setting."""
        roles = {"text": self.text, "pair": self.pair, "label": self.label, "user": self.user}
        return {f"{role}_column": name for role, name in roles.items() if name is not None}


USUAL = Given()


@dataclass(frozen=True)
class Columns:
    """The columns of a table, by their role."""

    input: str
    label: str | None
    user: str | None
    is_text: bool
    pair: str | None = None

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys(n for n in (self.input, self.pair, self.label, self.user) if n is not None))


def find_columns(available: Sequence[str], info: SourceInfo, where: str, given: Given = USUAL) -> Columns:
    """The columns of inputs, labels and users: those given, else those of the source, else the usual names."""

    def pick(role: str, *usual: str) -> str | None:
        name: str | None = getattr(given, role)
        if name is not None and name not in available:
            raise DataError(f"{where}: has no column {name!r}; it has {', '.join(available)}")
        return name or next((known for known in usual if known in available), None)

    own_input, own_label, own_user = (*info.columns, "", "", "")[:3]
    image = None if info.is_text or given.text else pick("image", own_input, *IMAGE_COLUMNS)
    text = None if image or len(info.shape) == 3 else pick("text", own_input, *TEXT_COLUMNS)
    label = pick("label", own_label, *LABEL_COLUMNS)
    content = image or text
    if content is None or (label is None and given.labelled):
        wanted = info.columns[:2] or ("image or text", "label")
        raise DataError(
            f"{where}: needs the columns {' and '.join(wanted)}, but has {', '.join(available) or 'none'}; rename "
            "them, or name yours: data.text_column, data.label_column (from Python: solera.data.from_hf or "
            "from_texts)"
        )
    return Columns(content, label, pick("user", own_user, *USER_COLUMNS), image is None, pick("pair"))


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


def file_split(path: Path, info: SourceInfo, given: Given) -> Split | None:
    """The rows of one file; None if it is not a table that this source may be in."""
    readers = {".parquet": _parquet_split, ".csv": _csv_text, ".tsv": _csv_text}
    readers |= {".jsonl": _jsonl_split, ".ndjson": _jsonl_split}
    read = readers.get(path.suffix.lower())
    fits = len(info.shape) < 2 and set(info.formats) & {"parquet", "csv", "jsonl"}
    return read([path], info, given) if read and fits else None


def parquet_splits(folder: Path, info: SourceInfo, given: Given = USUAL) -> dict[str, Split]:
    """Parquet files with the hub's column names."""
    files = split_files(folder, (".parquet",), info.config)
    return {split: _parquet_split(paths, info, given) for split, paths in files.items()}


def csv_splits(folder: Path, info: SourceInfo, given: Given = USUAL) -> dict[str, Split]:
    """Csv (or tab-separated .tsv) files. Texts have a header with the hub's columns, or the source's own layout without
    a header. Images are rows of a label and the pixels, with or without a header."""
    files = split_files(folder, (".csv", ".tsv"), info.config)
    if len(info.shape) >= 2:
        return {split: _csv_images(paths, info) for split, paths in files.items()}
    return {split: _csv_text(paths, info, given) for split, paths in files.items()}


def jsonl_splits(folder: Path, info: SourceInfo, given: Given = USUAL) -> dict[str, Split]:
    """JSON lines: one object for each text, with the columns as keys."""
    files = split_files(folder, (".jsonl", ".ndjson"), info.config)
    return {split: _jsonl_split(paths, info, given) for split, paths in files.items()}


def hub_split(rows: Any, columns: Columns, channels: int | None, what: str) -> Split:
    """A split of a Hugging Face data set (or any object that is indexed by row number and by column name)."""
    labels = [0] * len(rows) if columns.label is None else list(rows[columns.label])
    if None in labels:
        raise DataError(f"{what}: row {labels.index(None)} has no {columns.label}; use a labelled split")
    users = None if columns.user is None else np.asarray([str(u) for u in rows[columns.user]])

    def take(wanted: np.ndarray) -> Tensor | list[Text]:
        if columns.pair is not None:
            return _pairs([[rows[int(i)][c] for i in wanted] for c in (columns.input, columns.pair)], what)
        return _inputs([rows[int(i)][columns.input] for i in wanted], columns.is_text, channels, what)

    feature = getattr(rows, "features", {}).get(columns.label)
    return Split(_one_each(labels, what), take, users, tuple(getattr(feature, "names", None) or ()))


def _inputs(values: list[Any], is_text: bool, channels: int | None, what: str) -> Tensor | list[Text]:
    if is_text:
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise DataError(f"{what}: row {i} is {type(value).__name__}; expected text")
        return values
    pictures = [value["bytes"] if isinstance(value, dict) else value for value in values]
    if isinstance(pictures[0], list | np.ndarray | Tensor):
        return stored(stack(pictures, what), what)
    return stack_pictures(pictures, what, channels)


def _channels(info: SourceInfo) -> int | None:
    return info.shape[0] if len(info.shape) == 3 else None


def _pairs(parts: list[list[Any]], what: str) -> list[Text]:
    first, second = (_inputs(part, True, None, what) for part in parts)
    return list(zip(first, second, strict=True))  # type: ignore[arg-type]


def _parquet_split(paths: list[Path], info: SourceInfo, given: Given) -> Split:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{paths[0]}: reading parquet needs pyarrow; install it with: pip install 'solera[data]'"
        ) from error
    try:
        schema = pq.read_schema(paths[0])
        columns = find_columns(schema.names, info, str(paths[0]), given)
        table = pa.concat_tables([pq.read_table(path, columns=columns.names) for path in paths])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{paths[0]}: cannot be read as parquet ({error}); download it again") from error
    for name in columns.names:
        if table[name].null_count:
            raise DataError(f"{paths[0]}: column {name} has {table[name].null_count} empty cells")
    users = None if columns.user is None else np.asarray([str(u) for u in table[columns.user].to_pylist()])

    def cells(column: str, rows: np.ndarray) -> list[Any]:
        # By chunks: one array of all images of a large set would overflow its 32-bit offsets.
        values, begin = [], 0
        for chunk in table[column].chunks:
            inside = rows[(rows >= begin) & (rows < begin + len(chunk))] - begin
            values += chunk.take(pa.array(inside)).to_pylist()
            begin += len(chunk)
        return values

    def take(rows: np.ndarray) -> Tensor | list[Text]:
        if columns.pair is not None:
            return _pairs([cells(c, rows) for c in (columns.input, columns.pair)], str(paths[0]))
        return _inputs(cells(columns.input, rows), columns.is_text, _channels(info), str(paths[0]))

    labels = [0] * len(table) if columns.label is None else table[columns.label].to_pylist()
    return Split(_one_each(labels, str(paths[0])), take, users, _named_classes(schema.metadata or {}, columns.label))


def _one_each(labels: list[Any], what: str) -> np.ndarray:
    """Labels as an array: one number or name for each row."""
    for i, value in enumerate(labels):
        if isinstance(value, list | tuple | dict | set) or getattr(value, "ndim", 0) > 0:
            raise DataError(
                f"{what}: the label of row {i} (counted from 0) is a {type(value).__name__}; expected one class, by "
                "number or by name"
            )
    return np.asarray(labels)


def _named_classes(metadata: Mapping[bytes, bytes], label: str | None) -> tuple[str, ...]:
    """The names of the classes that the hub writes into its parquet files; none if they are not there."""
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        names = feature.get("names") or ()
    except (KeyError, ValueError, TypeError, AttributeError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _jsonl_split(paths: list[Path], info: SourceInfo, given: Given) -> Split:
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
        for i, line in enumerate(lines):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {i + 1} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f'{path}: line {i + 1} is a {type(row).__name__}; expected an object, {{"text": ...}}')
            rows.append(row)
    if not rows:
        raise DataError(f"{paths[0]}: is empty")
    columns = find_columns(list(rows[0]), info, str(paths[0]), given)
    for i, row in enumerate(rows):
        if missing := [name for name in columns.names if row.get(name) is None]:
            raise DataError(f"{paths[0]}: row {i + 1} has no {missing[0]!r}")

    def take(wanted: np.ndarray) -> Tensor | list[Text]:
        if columns.pair is not None:
            return _pairs([[rows[i][c] for i in wanted] for c in (columns.input, columns.pair)], str(paths[0]))
        return _inputs([rows[i][columns.input] for i in wanted], True, None, str(paths[0]))

    labels = [0] * len(rows) if columns.label is None else [row[columns.label] for row in rows]
    users = None if columns.user is None else np.asarray([str(row[columns.user]) for row in rows])
    return Split(_one_each(labels, str(paths[0])), take, users)


def _csv_text(paths: list[Path], info: SourceInfo, given: Given) -> Split:
    texts: list[Text] = []
    labels: list[str] = []
    users: list[str] = []
    for path in paths:
        table = _csv_rows(path, info.plain.encoding if info.plain else "utf-8")
        header = table[0]
        pair: int | None = None
        if set(LABEL_COLUMNS) & set(header) or info.plain is None or given.text or given.label:
            columns = find_columns(header, info, str(path), given)
            label = None if columns.label is None else header.index(columns.label)
            text: tuple[int, ...] = (header.index(columns.input),)
            pair = None if columns.pair is None else header.index(columns.pair)
            user = None if columns.user is None else header.index(columns.user)
            first, table = 0, table[1:]
        else:
            label, text, user, first = info.plain.label, info.plain.text, info.plain.user, info.plain.first_label
            if not _is_number(header[info.plain.label]):
                table = table[1:]
        for i, row in enumerate(table):
            if len(row) <= max(label or 0, *text, pair or 0, user or 0):
                raise DataError(f"{path}: data row {i + 1} has {len(row)} columns, too few")
            cell = "0" if label is None else row[label]
            labels.append(str(int(cell) - first) if _is_number(cell) else cell)
            joined = " ".join(row[t] for t in text)
            texts.append(joined if pair is None else (joined, row[pair]))
            if user is not None:
                users.append(row[user])
    numbers = np.asarray([int(x) for x in labels]) if all(map(_is_number, labels)) else np.asarray(labels)
    return Split(numbers, lambda rows: [texts[i] for i in rows], np.asarray(users) if users else None)


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
