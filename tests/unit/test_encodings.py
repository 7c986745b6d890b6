"""Texts that are read with several tokenizers in one run: the columns of a sample, and which of them a model takes."""

import copy
import json

import pytest
import torch
from torch import nn

import solera
from solera.core.errors import ConfigError, DataError
from solera.data import PublicConfig, tokenize
from solera.data.encodings import WORDS, Columns, Encoding, as_bytes, digest_of, encoded, from_bytes, reading, unique
from solera.engines import EngineConfig
from solera.methods.feddf import FedDF
from solera.models import as_split
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.scenario.scenario import Scenario
from solera.train.distill import Distill
from solera.train.fitting import Local, logits_of

TEXTS = ["good film", "bad", "a fine day", "no", "so dull a plot", "great", "poor", "nice and good"] * 6
LABELS = [1, 0, 1, 0, 0, 1, 0, 1] * 6


def by_letters(texts, length):
    """a = 1, b = 2, ...; anything else 27."""
    rows = [[ord(c) - 96 if "a" <= c <= "z" else 27 for c in text][:length] for text in texts]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows]), sum(len(t) > length for t in texts)


LETTERS = Encoding("letters", 28, 0, by_letters)


class Letters(nn.Module):
    """Counts letters."""

    encoding = LETTERS

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(28, 2)

    def forward(self, ids):
        assert int(ids.max()) < 28, "these are not letters"
        return self.fc(nn.functional.one_hot(ids, 28).sum(1).float())


def data(length=6):
    return solera.data.from_texts((TEXTS, LABELS), (TEXTS[:8], LABELS[:8]), length=length)


def test_texts_are_kept_and_read_by_words_unless_a_model_brings_a_tokenizer():
    own = data()
    assert own.texts.train == tuple(TEXTS)
    assert torch.equal(own.train.inputs, tokenize(TEXTS, 6))
    assert own.encoded([WORDS]) is own


def test_every_encoding_has_its_columns():
    both = data().encoded([LETTERS, WORDS])
    assert both.shape == (12,)
    assert both.length == 6
    assert both.train.inputs[1].tolist() == [2, 1, 4, 0, 0, 0, *tokenize(["bad"], 6)[0].tolist()]
    assert [(c.encoding.name, c.start, c.stop) for c in both.columns] == [("letters", 0, 6), ("words", 6, 12)]
    assert both.columns[0].cut == sum(len(t) > 6 for t in TEXTS)
    assert both.columns[1].cut == 0
    assert torch.equal(both.tokens(["bad"])[0], both.train.inputs[1])
    assert unique([LETTERS, WORDS, LETTERS]) == [LETTERS, WORDS]


def test_a_model_takes_its_own_columns_and_so_does_its_copy():
    model = reading(Letters(), Columns(LETTERS, 6, 12))
    ids, _ = encoded(TEXTS, [WORDS, LETTERS], 6)
    wanted = Letters()
    wanted.load_state_dict(model.state_dict())
    assert torch.equal(model(ids), wanted(ids[:, 6:]))
    assert torch.equal(copy.deepcopy(model)(ids), wanted(ids[:, 6:]))
    assert model.encoding is LETTERS


def test_a_row_that_is_the_model_s_own_already_is_taken_as_it_is():
    model = reading(Letters(), Columns(LETTERS, 6, 12))
    ids, _ = encoded(TEXTS, [WORDS, LETTERS], 6)
    assert torch.equal(model(ids[:, 6:]), model(ids))


def test_texts_become_bytes_and_texts_again():
    for texts in (["good film", "", "Grüße \ud800", "a\0b"], [("a", "bc"), ("", "d")]):
        raw, lengths = as_bytes(texts)
        assert raw.dtype == torch.uint8
        assert lengths.shape == (len(texts), 1 if isinstance(texts[0], str) else 2)
        assert from_bytes(raw, lengths) == texts
    assert as_bytes([""])[0].tolist() == []


@pytest.mark.parametrize(
    ("raw", "lengths", "said"),
    [
        ([97, 98], [[1]], "texts of 2 bytes do not have the lengths"),
        ([97, 98], [[3], [-1]], "do not have the lengths"),
        ([97, 98], [[1, 1, 0]], "do not have the lengths"),
        ([97, 98], [2], "do not have the lengths"),
        ([97, 255], [[1], [1]], "text 1 is not UTF-8"),
    ],
)
def test_bytes_that_are_no_texts_are_refused(raw, lengths, said):
    with pytest.raises(DataError, match=said):
        from_bytes(torch.tensor(raw, dtype=torch.uint8), torch.tensor(lengths))
    with pytest.raises(DataError, match="do not have the lengths"):
        from_bytes(torch.tensor(raw), torch.tensor(lengths))


def test_the_body_of_a_split_model_takes_them_for_whoever_asks_it():
    class Counts(nn.Module):
        def forward(self, ids):
            return nn.functional.one_hot(ids, 28).sum(1).float()

    model = reading(as_split(Counts(), 28, 2, "plain"), Columns(LETTERS, 6, 12))
    ids, _ = encoded(TEXTS, [WORDS, LETTERS], 6)
    assert torch.equal(model.features(ids), Counts()(ids[:, 6:]))
    assert torch.equal(model(ids), model.head(Counts()(ids[:, 6:])))


def scenario(**options):
    return Scenario(
        data(),
        {"letters": Letters(), "text-bag": "text-bag"},
        solera.PartitionConfig("iid", clients=4),
        PublicConfig("held-out", size=16),
        seed=3,
        **options,
    )


def test_clients_with_different_tokenizers_teach_each_other(tmp_path):
    made = scenario()
    assert [c.encoding.name for c in made.dataset.columns] == ["letters", "words"]
    assert made.server.template("letters").encoding == LETTERS
    assert made.server.template("text-bag").body.embedding.num_embeddings == WORDS.vocabulary
    method = FedDF(local=Local(epochs=1, batch=4), fusion=Distill(steps=3, batch=8))
    result = simulate(made, method, tmp_path, RunConfig(rounds=1), engine=EngineConfig("inprocess"))
    assert set(result.models) == {"letters", "text-bag"}
    told = json.loads((tmp_path / "run.json").read_text())["experiment"]["data"]["encodings"]
    assert told[0] == {"tokenizer": "letters", "length": 6, "cut": made.dataset.columns[0].cut}


def test_samples_of_one_s_own_are_given_as_texts():
    made = scenario(validation=(["good", "bad"], [1, 0]))
    assert torch.equal(made.validation.inputs, made.dataset.tokens(["good", "bad"]))
    answers = logits_of(made.server.template("letters"), made.validation.inputs)
    assert torch.equal(answers, logits_of(made.server.template("letters"), made.dataset.tokens(["good", "bad"])))


def test_public_texts_are_known_by_what_they_say_not_by_who_reads_them():
    here = scenario().public
    some = here.subset(torch.tensor([1, 0]))
    assert some.texts == (here.texts[1], here.texts[0])
    assert some.digest != here.subset(torch.tensor([0, 1])).digest
    letters = Scenario(
        data(),
        {"letters": Letters()},
        solera.PartitionConfig("iid", clients=4),
        PublicConfig("held-out", size=16),
        seed=3,
    )
    assert letters.public.shape != here.shape
    assert letters.public.digest == here.digest


def test_the_digest_of_texts_tells_pairs_and_order():
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    assert digest_of([("a", "b")]) != digest_of(["a", "b"])
    assert digest_of([("a", "b")]) == digest_of([("a", "b")])


def test_token_ids_alone_cannot_be_read_by_another_tokenizer():
    ids = solera.from_tensors((tokenize(TEXTS), LABELS), (tokenize(TEXTS), LABELS))
    with pytest.raises(ConfigError, match=r"brings the tokenizer 'letters' and needs texts.*token ids only"):
        Scenario(ids, {"letters": Letters()}, solera.PartitionConfig("iid", clients=2), PublicConfig("none"))


@pytest.mark.parametrize("bad", [None, 3, ("a", "b", "c"), ["a"]])
def test_what_is_no_text_is_named(bad):
    with pytest.raises(DataError, match=r"own, train: sample 1 is .*expected a text"):
        solera.data.from_texts((["a", bad], [0, 1]), (["a"], [0]))
