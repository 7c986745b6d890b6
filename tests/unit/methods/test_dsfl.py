"""DS-FL: equal to its steps by hand, one mean for all, and a server model that learns without a label."""

import dataclasses

import pytest
import torch

from public_toys import CLIENTS, Known, accuracies, halves, mixed, spoil, watch
from solera.core.errors import ConfigError
from solera.core.federation import QuorumNotMet
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.methods.dsfl import DSFL, reduce_entropy
from solera.methods.local import LocalOnly
from solera.methods.steps.predictions import towards_targets
from solera.runs.loop import check_fit, check_server
from solera.testing import check_method, large, run_toy, toy
from solera.train.fitting import Local, evaluate, fit, logits_of
from toys import Conv, images, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
DISTIL = Local(epochs=2, batch=16, lr=0.05)
METHOD = DSFL(LOCAL, DISTIL)
NONE = Local(epochs=0)
ASKED = {"probabilities": "train_and_answer", "logits": "train_and_score"}
TEACH = "distil_locally"


def trained(world, seeds):
    models = {}
    for k, seed in zip(CLIENTS, seeds, strict=True):
        P = world.fed.architecture(k)
        models[k] = world.server.model(P, world.server.init(P))
        fit(models[k], world.data[k].inputs, world.data[k].labels, LOCAL, seed)
    return models


@pytest.mark.parametrize(
    ("era_input", "aggregation", "target"),
    [
        ("probabilities", "era", lambda mean: reduce_entropy(mean, 0.1)),
        ("probabilities", "sa", lambda mean: mean),
        ("logits", "era", lambda mean: reduce_entropy(mean, 0.1)),
        ("logits", "sa", lambda mean: mean.softmax(-1)),
    ],
)
def test_a_round_by_hand(tmp_path, era_input, aggregation, target):
    """Update, predict, aggregate, and distil clients and the server's model alike."""
    world = mixed(tmp_path)
    start, end = world.run(dataclasses.replace(METHOD, era_input=era_input, aggregation=aggregation))
    x, models = world.server.public.inputs, trained(world, world.seeds[:5])
    said = [logits_of(model, x) for model in models.values()]
    if era_input == "probabilities":
        said = [z.softmax(-1) for z in said]
    y = target((sum(s.double() for s in said) / 5).float())
    for k, seed in zip(CLIENTS, world.seeds[5:], strict=True):
        fit(models[k], x, y, DISTIL, seed, towards_targets())
        assert same_bits(world.model(k), weights_of(models[k]))
    assert start.server.architecture == end.server.architecture == "c"  # the first architecture, there being no other
    assert same_bits(start.server.weights, world.server.init("c"))
    own = world.server.model("c", start.server.weights)
    fit(own, x, y, DISTIL, world.fed.seed("distil"), towards_targets())
    assert same_bits(end.server.weights, weights_of(own))


def test_the_server_trains_the_model_it_is_given(tmp_path):
    world = mixed(tmp_path)
    world.server.builders["big"], world.server.large = lambda: mlp(5, width=32), "big"
    end = world.run(METHOD)[-1]
    assert list(METHOD.models(end)) == ["big"]
    assert end.server.weights["1.weight"].shape == (32, 64)
    found = run_toy(DSFL(Local(epochs=1), Local(epochs=1)), tmp_path / "toy", rounds=1, server=("large", large))
    assert list(found.summary["models"]) == ["large"]


def test_without_distillation_it_is_local_training(tmp_path):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    start, end = a.run(DSFL(LOCAL, NONE))
    b.run(LocalOnly(LOCAL))
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)
    assert digest(start) == digest(end)


@pytest.mark.parametrize("era_input", list(ASKED))
def test_indices_predictions_and_labels_travel_and_only_a_mean_is_seen(tmp_path, era_input):
    world = mixed(tmp_path, per_round=13)
    world.run(dataclasses.replace(METHOD, era_input=era_input))
    down, up, m, r, C = world.fed.down, world.fed.up, 5, 13, 4
    ask = ASKED[era_input]
    assert set(down) == {ask, TEACH}
    assert (down[ask].floats, down[ask].integers) == (0, m * r)
    assert (up[ask].floats, up[ask].integers) == (m * r * C, 0)
    assert (down[TEACH].floats, down[TEACH].integers) == (m * r * C, 0)
    assert (up[TEACH].floats, up[TEACH].integers) == (0, 0)
    assert world.fed.verbs == {"mean"}
    assert set(world.kept("c0")) == {"model"}


@pytest.mark.parametrize(
    ("era_input", "lie"),
    [
        ("probabilities", lambda t: t[:-1]),
        ("probabilities", lambda t: t * 2),
        ("probabilities", lambda t: t - 0.5),
        ("probabilities", lambda t: t.double()),
        ("logits", lambda t: t[:, :2]),
        ("logits", lambda t: t / 0),
    ],
)
def test_a_bad_reply_costs_a_client_its_seat_and_nothing_else(tmp_path, era_input, lie):
    method = dataclasses.replace(METHOD, era_input=era_input)
    world, other = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    spoil(world, "c0", ASKED[era_input], lie)
    told = watch(world, "distil_locally")
    end = world.run(method)[-1]
    assert [f["client"] for f in world.fed.failures] == ["c0"]
    other.fed.sample = lambda: CLIENTS[1:]
    assert digest(other.run(method)[-1]) == digest(end)
    assert [k for k, _ in told] == CLIENTS[1:]


def test_models_that_blow_up_are_not_kept(tmp_path):
    world = mixed(tmp_path)
    state = world.run(METHOD)[-1]
    before = world.model("c1")
    world.fed.begin(1)
    world.server.begin()
    leap = Local(epochs=2, batch=64, lr=1e38)
    with pytest.raises(QuorumNotMet, match="training diverged"):
        dataclasses.replace(METHOD, local=NONE, distill=leap).round(state, world.fed, world.server)
    assert same_bits(world.model("c1"), before)
    (event,) = world.events("distill_diverged")
    assert event["architecture"] == "c"
    world.data["c1"] = Data(torch.full_like(world.data["c1"].inputs, 1e38), world.data["c1"].labels)
    world.fed.begin(2)
    METHOD.round(state, world.fed, world.server)
    assert [f["client"] for f in world.fed.failures] == ["c1"]
    assert same_bits(world.model("c1"), before)


def test_a_client_with_other_public_data_loses_its_seat(tmp_path):
    world = mixed(tmp_path)
    world.held["c3"] = Known(images(40, seed=10)[0])
    world.run(METHOD)
    assert [f["client"] for f in world.fed.failures] == ["c3"]
    assert "other public data" in world.fed.failures[0]["reason"]


def test_clients_learn_what_they_have_never_seen_and_the_server_without_a_label(tmp_path):
    world = halves(tmp_path)
    local = Local(epochs=5, batch=10, lr=0.1)
    end = world.run(DSFL(local, Local(epochs=5, batch=10, lr=0.1)), 4)[-1]
    x, y = images(300, seed=8)
    assert evaluate(world.server.model("m", end.server.weights), x, y).accuracy > 0.8
    assert min(accuracies(world)) > 0.7  # a client knows two of four classes


def test_era_makes_surer_labels_than_the_simple_mean(tmp_path):
    """Where clients that know different classes are averaged, the mean is undecided."""
    confidence = {}
    for aggregation in ("era", "sa"):
        world = halves(tmp_path / aggregation)
        told = watch(world, "distil_locally")
        world.run(DSFL(Local(epochs=5, batch=10, lr=0.1), DISTIL, aggregation))
        confidence[aggregation] = told[0][1][0].amax(-1).mean().item()
    assert confidence["era"] > confidence["sa"] + 0.1


@pytest.mark.parametrize("temperature", [0.0, -0.1, 1.0, float("nan")])
def test_impossible_temperatures_are_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        DSFL(temperature=temperature)


def test_what_it_needs(tmp_path):
    world = mixed(tmp_path)
    world.server.public.fresh = True
    with pytest.raises(ConfigError, match="same public samples"):
        check_server(METHOD, world.server)
    with pytest.raises(ConfigError, match=r"data\.client_test"):
        check_fit(DSFL(), toy(client_test=0.0))
    check_fit(DSFL(judge_clients=False), toy(client_test=0.0))
    narrow = mixed(tmp_path / "narrow")
    narrow.server.builders["c"] = lambda: Conv(0, classes=3)
    with pytest.raises(ConfigError, match="logits"):
        check_server(METHOD, narrow.server)


@pytest.mark.parametrize(
    "method", [DSFL(era_input="logits", student_norm="frozen"), DSFL(aggregation="sa", judge_clients=False)]
)
def test_variants_keep_the_contract_of_a_method(tmp_path, method):
    check_method(method, tmp_path, engines=())
