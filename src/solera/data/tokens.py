"""The hashing tokenizer: text to numbers without a vocabulary file.

A text is lower-cased and split into words (letters and digits, with inner apostrophes). The token of a word is its
blake2b hash in 1..19,999. So server and clients get the same tokens without sharing a vocabulary; different words may
have the same token. Token 0 pads short texts on the right; long texts are cut. A text without words becomes the token
of the empty word, so no sample is only padding.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from .encodings import Encoding, Text

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
    """A text without a character that can be seen teaches nothing, and is a mistake in the table as a rule. `rows` are
    the numbers of the texts there."""
    empty = [i for i, t in zip(rows, texts, strict=True) if not (t if isinstance(t, str) else "".join(t)).strip()]
    if empty:
        some = ", ".join(map(str, empty[:5])) + ", ..." * (len(empty) > 5)
        raise DataError(f"{what}: {len(empty)} of {len(rows)} rows have no text (counted from 0: {some}); remove them")


WORDS = Encoding("words", VOCABULARY, 0, _encode)  # how texts are read unless a model brings a tokenizer of its own
