"""The two ends of the scale: local-only models stay on their clients, centralised training sees all data."""

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.method import Exchange
from solera.methods.centralised import Centralised
from solera.methods.local import LocalOnly
from solera.methods.steps.personal import score_own
from solera.scenario.server import Server
from solera.train.fitting import Local, evaluate, fit
from toys import Conv, World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)


def mixed(tmp, **options) -> World:
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    return World(tmp, builders, [(P, Data(*images(n, n))) for n, P in ((9, "c"), (14, "m"), (20, "c"))], **options)


def test_local_models_go_on_from_where_they_were(tmp_path):
    world = mixed(tmp_path)
    world.run(LocalOnly(LOCAL), rounds=2)
    for i, k in enumerate(world.fed.clients):
        model = world.server.model(world.fed.architecture(k), world.server.init(world.fed.architecture(k)))
        for seed in world.seeds[i::3]:
            fit(model, world.data[k].inputs, world.data[k].labels, LOCAL, seed)
        assert same_bits(kept_by(world.fed, k)["model"], weights_of(model))


def test_nothing_of_a_local_model_leaves_the_client(tmp_path):
    world = mixed(tmp_path)
    world.run(LocalOnly(LOCAL))
    assert sum(t.floats for t in (*world.fed.down.values(), *world.fed.up.values())) == 0
    assert LocalOnly().models(LocalOnly.State(1)) == {}


def test_each_client_scores_its_own_model(tmp_path):
    world = mixed(tmp_path)
    assert LocalOnly().personal(LocalOnly.State(1), world.fed) == Exchange(score_own)
    untrained = world.fed.map(score_own, list(world.fed.clients))
    assert all(score.total == 0 for score in untrained.values())  # nobody has a model of its own yet
    world.run(LocalOnly(Local(epochs=30, batch=8, lr=0.1)))
    world.fed.begin(1)
    trained = world.fed.map(score_own, list(world.fed.clients))
    assert all(trained[k].total == len(world.data[k]) for k in trained)
    assert min(r.accuracy for r in trained.values()) > 0.9


def test_a_local_model_that_blows_up_is_not_kept(tmp_path):
    world = mixed(tmp_path)
    world.run(LocalOnly(LOCAL))
    before = kept_by(world.fed, "c0")["model"]
    x = world.data["c0"].inputs
    world.data["c0"] = Data(torch.full_like(x, 1e38), world.data["c0"].labels)
    world.fed.begin(1)
    LocalOnly(LOCAL).round(LocalOnly.State(1), world.fed, world.server)
    after = kept_by(world.fed, "c0")["model"]
    assert all(torch.isfinite(t).all() for t in after.values())
    assert same_bits(before, after)


def test_centralised_trains_every_architecture_on_all_data(tmp_path):
    world = mixed(tmp_path)
    end = world.run(Centralised(LOCAL))[-1]
    world.fed.begin(0)
    for P in "cm":
        model = world.server.model(P, world.server.init(P))
        everything = world.server.all_train
        assert len(everything) == 43
        fit(model, everything.inputs, everything.labels, LOCAL, world.fed.seed("centralised", P))
        assert same_bits(end.weights[P], weights_of(model))
    assert world.fed.down == {}


def test_centralised_learns_and_does_not_depend_on_workers(tmp_path):
    ends = []
    for workers in (1, 2):
        world = mixed(tmp_path / str(workers), workers=workers)
        state = world.run(Centralised(Local(epochs=20, batch=8, lr=0.05)))[-1]
        ends.append(digest(state))
    test, truth = images(100, seed=50)
    models = Centralised().models(state)
    assert min(evaluate(world.server.model(P, m.weights), test, truth).accuracy for P, m in models.items()) > 0.8
    assert ends[0] == ends[1]


def test_centralised_includes_the_servers_own_architecture_and_keeps_it_when_training_blows_up(tmp_path):
    world = mixed(tmp_path)
    world.server.builders["big"] = lambda: mlp(2, width=64)
    world.server.large = "big"
    end = world.run(Centralised(Local(epochs=1, batch=8, lr=1e38)))[-1]
    assert list(end.weights) == ["c", "m", "big"]
    assert all(torch.isfinite(t).all() for w in end.weights.values() for t in w.values())


def test_centralised_needs_the_data(tmp_path):
    world = mixed(tmp_path)
    bare = Server({"c": lambda: Conv(0)}, ["c"], 0, 4)
    method = Centralised()
    with pytest.raises(ConfigError, match="simulation"):
        method.round(method.init(world.fed, bare), world.fed, bare)
