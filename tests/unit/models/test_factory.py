"""The one way to build a model and to rebuild it; and how far a setting travels until it is used."""

import pathlib
import sys

import pytest
import torch
from torch import nn

import solera
from solera.core.errors import ConfigError
from solera.core.randomness import repeatable
from solera.data.dataset import Spec
from solera.data.encodings import BYTES, VOCABULARY, WORDS, Columns
from solera.models.factory import ModelFactory, ModelsConfig
from solera.runs.config import load_config
from solera.runs.loop import scenario_of

ROOT = pathlib.Path(solera.__file__).parent
IMAGES = Spec("images", (3, 8, 8), 4)
TABLES = {
    "data": {"train_size": 100, "test_size": 20}, "models": {"clients": ["resnet8"], "norm": "group"},
    "partition": {"clients": 2}, "public": {"source": "none"}, "method": {"name": "fedavg"},
}  # fmt: skip


def test_architectures_of_the_settings_are_built_by_their_names_in_the_run():
    options = {"small": {"model": "mlp", "bits": 1, "hidden": [5]}}
    factory = ModelFactory(IMAGES, ModelsConfig(clients=["mlp", "small"], server="lenet5", options=options))
    assert list(factory.given) == ["mlp", "small", "lenet5"]
    assert factory.variants["small"].precision == {"bits": 1}
    first = factory.make("small").state_dict()
    assert {len(t) for t in first.values()} == {5, 4}
    with pytest.raises(ConfigError, match="no architecture is called 'large'; known here: mlp, small, lenet5"):
        factory.make("large")


@pytest.mark.parametrize("given", ["mlp", nn.Linear(8, 4), lambda: nn.Linear(8, 4)])
def test_a_model_is_rebuilt_from_its_weights(given):
    factory = ModelFactory(Spec("vectors", (8,), 4), ModelsConfig(clients=["mine"]), {"mine": given})
    model = repeatable(1, lambda: factory.make("mine"))
    again = repeatable(2, lambda: factory.make("mine", model.state_dict()))
    assert again is not model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_weights_of_another_model_are_refused():
    factory = ModelFactory(Spec("vectors", (8,), 4), ModelsConfig(clients=["mlp"]))
    with pytest.raises(RuntimeError, match="Missing key"):
        factory.make("mlp", nn.Linear(8, 4).state_dict())


def test_a_model_reads_the_columns_of_its_own_tokenizer():
    columns = (Columns(WORDS, 0, 6), Columns(BYTES, 6, 12))
    spec = Spec("texts", (12,), 2, vocabulary=VOCABULARY, columns=columns)
    model = ModelFactory(spec, ModelsConfig(clients=["text-bag"])).make("text-bag").eval()
    assert model.encoding == WORDS
    tokens = torch.randint(200, (3, 12))
    assert torch.equal(model(tokens), model(tokens[:, :6]))


def test_a_setting_is_in_few_hands_between_the_file_and_its_use():
    """`models.norm`: every function that has its value in hand, or takes it out of the settings."""
    hands = []

    def look(frame, event, _):
        file = pathlib.Path(frame.f_code.co_filename)
        if event == "return" and file.is_relative_to(ROOT):
            known = frame.f_locals.values()
            reads = "norm" in frame.f_code.co_names and any(isinstance(value, ModelsConfig) for value in known)
            if reads or any(type(value) is str and value == "group" for value in known):
                hands.append("/".join(file.relative_to(ROOT).parts))

    def files(work):
        hands.clear()
        sys.setprofile(look)
        try:
            return work(), set(hands)
        finally:
            sys.setprofile(None)

    config, reading = files(lambda: load_config(TABLES))
    _, building = files(lambda: scenario_of(config))
    beside = {"runs/supply.py", "runs/words.py"}  # what other settings make of it: it does not pass them
    assert building == {"models/factory.py", "models/registry.py"}
    assert len(reading - beside | building | {"models/zoo/layers.py"}) <= 5
