"""The hashing tokenizer."""

import hashlib

import pytest
import torch

from solera.core.errors import ConfigError
from solera.data import tokenize
from solera.data.encodings import VOCABULARY


def by_hand(word):
    return 1 + int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") % 19_999


def test_words_are_lower_cased_hashed_and_padded():
    tokens = tokenize(["Don't STOP -- me_now!", "42 é"], length=6)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [
        [by_hand("don't"), by_hand("stop"), by_hand("me"), by_hand("now"), 0, 0],
        [by_hand("42"), by_hand("é"), 0, 0, 0, 0],
    ]


def test_long_texts_are_cut_and_empty_ones_are_not_all_padding():
    tokens = tokenize(["a b c d", "?!", ""], length=3)
    assert tokens[0].tolist() == [by_hand("a"), by_hand("b"), by_hand("c")]
    assert tokens[1].tolist() == tokens[2].tolist() == [by_hand(""), 0, 0]


def test_no_tokens_at_all_are_refused():
    with pytest.raises(ConfigError, match="length = 0"):
        tokenize(["a"], length=0)


def test_tokens_use_the_whole_vocabulary_but_not_the_padding():
    tokens = tokenize([" ".join(f"w{i}" for i in range(30_000))], length=30_000)
    assert int(tokens.min()) >= 1
    assert int(tokens.max()) < VOCABULARY
    assert len(tokens.unique()) > 0.7 * VOCABULARY
