"""What the server owns, and where a round leaves its notes."""

import pytest
import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.scenario.server import Server
from solera.train.fitting import Score


def make(**options):
    builders = {"q": lambda: nn.Linear(2, 3), "p": lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))}
    return Server(builders, ["q", "p"], seed=5, num_classes=3, **options)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_architectures_are_in_the_order_of_their_names():
    assert make().architectures == ["p", "q"]


def test_initial_weights_follow_from_the_seed_the_architecture_and_the_copy():
    first, again, other = make(), make(), Server({"q": lambda: nn.Linear(2, 3)}, ["q"], 6, 3)
    torch.manual_seed(1)  # whatever the global generator does
    assert same(first.init("q"), again.init("q"))
    assert same(first.init("q", 1), again.init("q", 1))
    assert not same(first.init("q"), first.init("q", 1))
    assert not same(first.init("q"), other.init("q"))


def test_initial_weights_are_copies():
    server = make()
    server.init("q")["weight"].zero_()
    assert server.template("q").weight.abs().sum() > 0


def test_a_model_has_the_weights_it_is_given_is_in_evaluation_mode_and_nobody_elses():
    server = make()
    weights = {n: torch.ones_like(t) for n, t in server.init("p").items()}
    model = server.model("p", weights)
    assert same(model.state_dict(), weights)
    assert not model.training
    with torch.no_grad():
        model[0].weight.zero_()
    assert weights["0.weight"].sum() == 6
    assert server.template("p")[0].weight.abs().sum() > 0


def test_an_architecture_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="no architecture is called 'r'; known here: q, p"):
        make().init("r")


def test_features_are_of_models_that_are_split():
    with pytest.raises(ConfigError, match=r"'q' is not: wrap it with solera\.models\.wrap"):
        make().feature_dim("q")


def test_all_training_data_is_there_in_a_simulation_only():
    data = Data(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    assert make(all_train=lambda: data).all_train is data
    with pytest.raises(ConfigError, match="simulation only"):
        _ = make().all_train


def test_the_notes_of_a_round_are_forgotten_when_the_next_begins():
    server = make()
    weights = server.init("q")
    server.report_ensemble("teachers", (("q", weights), ("q", weights)), weights=(0.25, 0.75), names=("c1", "c2"))
    server.report_average("q", weights)
    server.report_stages(after_training={"c1": Score(1, 2, 0.5)}, after_distilling=None)
    server.event("distilled", architecture="q", steps=3)
    (noted,) = server.ensembles
    assert (noted.name, noted.rule, noted.weights, noted.names) == (
        "teachers",
        "avg_logits",
        [0.25, 0.75],
        ["c1", "c2"],
    )
    assert list(server.averages) == ["q"]
    assert list(server.stages) == ["after_training", "after_distilling"]
    assert server.events == [{"kind": "distilled", "architecture": "q", "steps": 3}]
    server.begin()
    assert (server.ensembles, server.averages, server.stages, server.events) == ([], {}, {}, [])
