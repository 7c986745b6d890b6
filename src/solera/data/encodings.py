"""Texts as numbers: one tokenizer for each kind of model, all of them side by side.

A text data set keeps its texts. Each tokenizer that a model of the run needs (an `Encoding`) turns them into token ids
once, before the first round. The ids of all encodings stand beside each other in the columns of one tensor, so a sample
is one row, and rows are drawn, sent to a device and looked up like those of images. A model takes its own
columns as its first step (`reading`). So models with different tokenizers answer the same minibatch, and their logits
are compared sample by sample.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, DataError

Text = str | tuple[str, str]  # a text, or a pair of them
Encode = Callable[[Sequence[Text], int], tuple[Tensor, int]]


@dataclass(frozen=True)
class Encoding:
    """A tokenizer: facts about its ids that a model needs, and the function that makes them."""

    name: str  # of the tokenizer: models of one name share the ids
    vocabulary: int  # number of token ids
    padding: int  # the id that fills short texts
    encode: Encode = field(compare=False, repr=False)  # (texts, length) -> int64 [n, length], and how many were cut
    # For language models: a whole text as ids, with the one that ends it.
    stream: Callable[[str], list[int]] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Columns:
    """The columns of a sample that belong to an encoding."""

    encoding: Encoding
    start: int
    stop: int
    cut: int = 0  # training texts that were longer

    @property
    def length(self) -> int:
        """Tokens of a text."""
        return self.stop - self.start


def _bytes(text: str) -> list[int]:
    """The bytes of a text, without those of value 0, and a 0 at the end."""
    return [*text.encode("utf-8", "surrogatepass").replace(b"\0", b""), 0]


def _encode_bytes(texts: Sequence[Text], length: int) -> tuple[Tensor, int]:
    tokens, cut = torch.zeros(len(texts), length, dtype=torch.int64), 0
    for row, text in zip(tokens, texts, strict=True):
        ids = _bytes(text if isinstance(text, str) else "\n".join(text))
        cut += len(ids) > length + 1  # the end mark may be missing
        row[: len(ids)] = torch.tensor(ids[:length])
    return tokens, cut


BYTES = Encoding("bytes", 256, 0, _encode_bytes, _bytes)  # needs no file and can be turned back into text


def unique(encodings: Iterable[Encoding]) -> list[Encoding]:
    """Every encoding once, in the order of its first use."""
    return list({e.name: e for e in encodings}.values())


def encoded(texts: Sequence[Text], encodings: Sequence[Encoding], length: int) -> tuple[Tensor, list[int]]:
    """The ids of all encodings side by side, int64 [n, encodings * length]; and how many texts each of them cut."""
    blocks, cuts = zip(*(e.encode(texts, length) for e in encodings), strict=True)
    return torch.cat(blocks, 1), list(cuts)


def _parts(text: Text) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def digest_of(texts: Sequence[Text]) -> str:
    """sha256 of texts and their order."""
    total = hashlib.sha256()
    for text in texts:
        for part in _parts(text):
            raw = part.encode("utf-8", "surrogatepass")
            total.update(len(raw).to_bytes(8, "big") + raw)
        total.update(b"\0")
    return total.hexdigest()


def as_bytes(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Texts as two tensors that can be sent: their UTF-8 end to end, and the length of each (of both of a pair)."""
    parts = [[part.encode("utf-8", "surrogatepass") for part in _parts(text)] for text in texts]
    whole = bytearray(b"".join(part for row in parts for part in row))
    lengths = torch.tensor([[len(part) for part in row] for row in parts], dtype=torch.int64)
    return torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.zeros(0, dtype=torch.uint8), lengths


def from_bytes(raw: Tensor, lengths: Tensor) -> list[Text]:
    """The texts encoded by `as_bytes`. Raises DataError if the two tensors do not fit together."""
    shaped = raw.dtype == torch.uint8 and raw.ndim == 1 and lengths.dtype == torch.int64 and lengths.ndim == 2
    if not shaped or lengths.shape[1] not in (1, 2) or bool((lengths < 0).any()) or int(lengths.sum()) != len(raw):
        raise DataError(f"texts of {len(raw)} bytes do not have the lengths that they are said to have")
    whole, texts, at = raw.numpy().tobytes(), [], 0
    try:
        for row in lengths.tolist():
            parts = []
            for length in row:
                parts.append(whole[at : at + length].decode("utf-8", "surrogatepass"))
                at += length
            texts.append(parts[0] if len(parts) == 1 else (parts[0], parts[1]))
    except UnicodeDecodeError as e:
        raise DataError(f"text {len(texts)} is not UTF-8 ({e.reason})") from None
    return texts


class _Take:
    """A forward pre-hook that cuts a model's own columns out of its input.

    A row that is no longer than these columns is the model's own already: a site holds no other tokens.
    """

    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs[0].shape[1] == self.stop - self.start:
            return inputs
        return (inputs[0][:, self.start : self.stop], *inputs[1:])


def reading(model: nn.Module, columns: Columns) -> nn.Module:
    """The model, which from now on takes these columns of a sample: `model.encoding` says which.

    A hook on the part that sees the input first, so no weight gets another name, and a copy of the model keeps it. In a
    model that is split it is on the body, which methods also ask alone.
    """
    first = getattr(model, "body", model)
    first.register_forward_pre_hook(_Take(columns.start, columns.stop))
    model.encoding = columns.encoding  # type: ignore[assignment]
    return model


# ---- the hashing tokenizer --------------------------------------------------------------------------


# Text to numbers without a vocabulary file. A text is lower-cased and split into words (letters and digits, with
# inner apostrophes). The token of a word is its blake2b hash in 1..19,999, so server and clients get the same tokens;
# two words may have the same one. Token 0 pads short texts on the right; long texts are cut. A text without words
# becomes the token of the empty word, so no sample is only padding.
VOCABULARY = 20_000  # number of token ids, including the padding
LENGTH = 64  # default number of tokens of a sample
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def token(word: str) -> int:
    """The token of one lower-case word."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (VOCABULARY - 1)


def tokenize(texts: Sequence[Text], length: int = LENGTH) -> Tensor:
    """Texts as int64 tokens [n, length]. The words of a pair follow each other."""
    return _encode(texts, length)[0]


def _encode(texts: Sequence[Text], length: int) -> tuple[Tensor, int]:
    """The tokens, and how many texts have more words than `length`."""
    if length < 1:
        raise ConfigError(f"length = {length}: a text needs at least one token")
    known: dict[str, int] = {}
    tokens, cut = np.zeros((len(texts), length), np.int64), 0
    for row, text in zip(tokens, texts, strict=True):
        words = WORD.findall((text if isinstance(text, str) else " ".join(text)).lower()) or [""]
        cut += len(words) > length
        for place, word in enumerate(words[:length]):
            if word not in known:
                known[word] = token(word)
            row[place] = known[word]
    return torch.from_numpy(tokens), cut


def refuse_empty(what: str, texts: Sequence[Text], rows: Sequence[int]) -> None:
    """Refuse texts without a visible character: usually a mistake in the table. `rows`: their numbers there."""
    empty = [i for i, t in zip(rows, texts, strict=True) if not (t if isinstance(t, str) else "".join(t)).strip()]
    if empty:
        some = ", ".join(map(str, empty[:5])) + ", ..." * (len(empty) > 5)
        raise DataError(f"{what}: {len(empty)} of {len(rows)} rows have no text (counted from 0: {some}); remove them")


WORDS = Encoding("words", VOCABULARY, 0, _encode)  # how texts are read unless a model brings a tokenizer of its own
