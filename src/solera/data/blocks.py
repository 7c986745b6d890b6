"""Texts for language models: one stream of tokens, cut into blocks in which every token's successor is known.

The texts of one user on one topic follow each other, each with an end mark, and the stream is cut into blocks of
`length` + 1 tokens. A block begins with the last token of the one before, so every token but a stream's first is
predicted once. There is no padding, so no position has to be left out of a loss. What is left of a stream, less than a
block, is dropped.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from ..core.task import Data
from .dataset import Dataset
from .encodings import Columns, Encoding, Text

log = logging.getLogger("solera")


def as_blocks(data: Dataset, readers: dict[str, Encoding]) -> Dataset:
    """The data set for language models with these tokenizers (by model), which must be one and the same."""
    encoding = one_encoding(readers)
    if data.texts is None:
        raise ConfigError(
            f"data.task = 'causal-lm' needs texts, but {data.name} has samples of shape {data.shape}; choose a text "
            "set, or give texts (solera.data.from_texts)"
        )
    length = data.length
    labels, users = data.train.labels, data.users
    inputs, first = blocks_of(data.texts.train, encoding, length, labels, users, f"{data.name}, train")
    held, their = blocks_of(data.texts.test, encoding, length, data.test.labels, None, f"{data.name}, test")
    return replace(
        data,
        train=Data(inputs, labels[first]),
        test=Data(held, data.test.labels[their]),
        users=None if users is None else users[first],
        vocabulary=encoding.vocabulary,
        texts=None,
        columns=(Columns(encoding, 0, length),),
        task="causal-lm",
    )


def one_encoding(readers: dict[str, Encoding]) -> Encoding:
    """The tokenizer of all models. Raises ConfigError if they have several, or one that cannot make a stream."""
    first, encoding = next(iter(readers.items()))
    for name, other in readers.items():
        if other != encoding:
            raise ConfigError(
                f"data.task = 'causal-lm': {first} reads texts with the tokenizer {encoding.name!r}, {name} with "
                f"{other.name!r}; their tokens cannot be compared, so all models must have the same"
            )
    if encoding.stream is None:
        raise ConfigError(
            f"data.task = 'causal-lm': {first} reads texts with the tokenizer {encoding.name!r}, which makes no "
            "stream; choose language models, such as gpt-nano, gpt-micro and lstm-lm"
        )
    return encoding


def blocks_of(
    texts: Sequence[Text], encoding: Encoding, length: int, labels: Tensor, users: Tensor | None, what: str
) -> tuple[Tensor, Tensor]:
    """Blocks, int64 [blocks, length + 1], and for each a row of the texts whose label and user are the block's."""
    assert encoding.stream is not None
    people = torch.zeros_like(labels) if users is None else users
    streams: dict[tuple[int, int], list[int]] = {}
    begins: dict[tuple[int, int], int] = {}
    for i, (text, key) in enumerate(zip(texts, zip(people.tolist(), labels.tolist(), strict=True), strict=True)):
        begins.setdefault(key, i)
        streams.setdefault(key, []).extend(encoding.stream(text if isinstance(text, str) else "\n".join(text)))
    blocks, rows, lost = [], [], 0
    for key, stream in streams.items():
        count = max(0, (len(stream) - 1) // length)
        lost += len(stream) - 1 - count * length
        if count:
            tokens = torch.tensor(stream[: count * length + 1], dtype=torch.int64)
            blocks.append(tokens.unfold(0, length + 1, length))
            rows += [begins[key]] * count
    if not blocks:
        raise DataError(
            f"{what}: no text of one user and class has the {length + 1} tokens of a block; lower data.length"
        )
    total = sum(map(len, streams.values()))
    if lost > total // 10:
        log.warning("%s: %d of %d tokens do not fill a block of %d and are left out", what, lost, total, length)
    return torch.cat(blocks), torch.tensor(rows)
