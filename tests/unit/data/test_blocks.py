"""Texts as blocks of tokens for language models."""

import pytest
import torch

from solera.core.errors import ConfigError, DataError
from solera.data import from_tensors, from_texts, load
from solera.data.dataset import as_blocks
from solera.data.encodings import BYTES, WORDS, Encoding, digest_of


def own(texts, users=None, length=3, test=("abcd", "efgh")):
    labels = [i % 2 for i in range(len(texts))]
    return from_texts((texts, labels), (list(test), [0, 1]), length=length, users=users)


def read(data):
    return [bytes(row).decode() for row in data.train.inputs.tolist()]


def test_every_token_but_the_first_is_predicted_once():
    data = as_blocks(own(["abc", "u", "de", "xyz"]), {"gpt": BYTES})
    # class 0: abc, end, de, end; class 1: u, end, xy; the rest fills no block
    assert read(data) == ["abc\0", "\0de\0", "u\0xy"]
    assert data.train.labels.tolist() == [0, 0, 1]
    assert (data.shape, data.outputs, data.vocabulary, data.length) == ((3,), 256, 256, 3)


def test_texts_of_different_users_are_never_joined():
    data = as_blocks(own(["abcdefg", "hij", "klmnopq", "rst"], ["u", "u", "v", "v"]), {"gpt": BYTES})
    assert read(data) == ["abcd", "defg", "hij\0", "klmn", "nopq", "rst\0"]
    assert [data.user_names[u] for u in data.users.tolist()] == ["u", "u", "u", "v", "v", "v"]
    assert data.train.labels.tolist() == [0, 0, 1, 0, 0, 1]


def test_bytes_can_be_turned_back_and_have_no_zero_inside():
    assert bytes(BYTES.stream("Grüße\0!")) == "Grüße!".encode() + b"\0"
    tokens, cut = BYTES.encode(["ab", ("a", "b"), "abcdef"], 4)
    assert tokens.tolist() == [[97, 98, 0, 0], [97, 10, 98, 0], [97, 98, 99, 100]]
    assert cut == 1


def test_one_tokenizer_for_all_models():
    other = Encoding("others", 99, 0, WORDS.encode, BYTES.stream)
    with pytest.raises(ConfigError, match=r"a reads texts with the tokenizer 'bytes', b with 'others'.*the same"):
        as_blocks(own(["abcd", "efgh"]), {"a": BYTES, "b": other})
    with pytest.raises(ConfigError, match=r"lstm reads texts with the tokenizer 'words', which makes no stream"):
        as_blocks(own(["abcd", "efgh"]), {"lstm": WORDS})


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(DataError, match=r"own, train: no text .* 10 tokens of a block; lower data.length"):
        as_blocks(own(["abc", "de"], length=9), {"gpt": BYTES})
    tokens = from_tensors((torch.ones(4, 3, dtype=torch.int64), [0, 1, 0, 1]), (torch.ones(2, 3).long(), [0, 1]))
    with pytest.raises(ConfigError, match=r"needs texts, but own has samples of shape"):
        as_blocks(tokens, {"gpt": BYTES})


def test_many_left_over_tokens_are_told(caplog):
    as_blocks(own(["abcdefgh", "i", "j"], length=8, test=["abcdefghi", "abcdefghij"]), {"gpt": BYTES})
    assert "own, train: 3 of 13 tokens do not fill a block of 8 and are left out" in caplog.text


def test_the_made_up_texts_never_change():
    data = load("toy-text", length=24)
    assert data.texts.train[0] == (
        "a cold rain crossed the old road before noon. later the wind crossed the valley. and so the storm hid the "
        "quiet town."
    )
    assert (len(data.train), len(data.test), data.classes, len(data.user_names)) == (1600, 400, 4, 24)
    assert data.class_names == ("weather", "kitchen", "harbour", "garden")
    assert (
        digest_of(data.texts.train + data.texts.test)
        == "6c7e8527d8ce67b41261d6aa6a09431d23d1672bef17a4d22a0c5710355ed2cc"
    )
