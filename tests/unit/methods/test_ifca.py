"""IFCA: clusters found, clusters left alone, and FedAvg where there is only one."""

import dataclasses

import pytest
import torch

from camps import CAMPS, accuracy, camps, numbers
from solera.core.errors import ConfigError
from solera.core.federation import QuorumNotMet
from solera.core.task import TASKS, Data
from solera.core.tensors import weights_of
from solera.methods.fedavg import FedAvg
from solera.methods.ifca import IFCA, choose_and_train
from solera.train.aggregate import uniform_mean
from solera.train.fitting import Local, evaluate, fit
from toys import Conv, World, images, mlp, same_bits

LOCAL = Local(steps=4, batch=8, lr=0.05)
KINDS = "cmcmc"


def mixed(tmp, **options) -> World:
    parties = [(P, Data(*images(12 + n, n))) for n, P in enumerate(KINDS)]
    return World(tmp, {"c": lambda: Conv(0, dropout=0.2), "m": lambda: mlp(1)}, parties, **options)


def seeded(tmp, **options) -> World:
    """The camps, with models that are different for different seeds (those of toys are not)."""
    world = camps(tmp, **options)
    world.server.builders["m"] = lambda: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )
    return world


@pytest.mark.parametrize("average", ["uniform", "weighted"])
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_one_cluster_is_fedavg_to_the_bit(tmp_path, average, fraction):
    one = mixed(tmp_path / "ifca", fraction=fraction).run(IFCA(LOCAL, k=1, average=average), 3)[-1]
    avg = mixed(tmp_path / "avg", fraction=fraction).run(FedAvg(LOCAL, average), 3)[-1]
    assert all(same_bits(one.clusters[P][0], avg.weights[P]) for P in "cm")


def test_clusters_begin_differently_and_the_first_as_every_other_method(tmp_path):
    world = seeded(tmp_path)
    (start,) = world.run(IFCA(LOCAL, k=3), 0)
    models = start.clusters["m"]
    assert same_bits(models[0], world.server.init("m"))
    assert not any(same_bits(models[i], models[j]) for i in range(3) for j in range(i))


def test_a_round_by_hand(tmp_path):
    world = seeded(tmp_path)
    start, end = world.run(IFCA(LOCAL, k=3))
    members = {0: [], 1: [], 2: []}
    for k, seed in zip(world.fed.clients, world.seeds, strict=True):
        data = world.data[k]
        losses = [evaluate(world.server.model("m", w), data.inputs, data.labels).loss for w in start.clusters["m"]]
        j = losses.index(min(losses))
        model = world.server.model("m", start.clusters["m"][j])
        fit(model, data.inputs, data.labels, LOCAL, seed)
        members[j].append(weights_of(model))
    assert sum(1 for m in members.values() if m) > 1
    for j, models in members.items():
        wanted = uniform_mean(models) if models else start.clusters["m"][j]  # an empty cluster stays as it is
        assert same_bits(end.clusters["m"][j], wanted)


def test_ties_go_to_the_first_and_empty_clusters_stay_as_they_are(tmp_path):
    world = camps(tmp_path)  # its models begin the same, whatever the seed
    start, end = world.run(IFCA(LOCAL, k=3))
    assert world.events("clusters")[0]["chosen"] == dict.fromkeys(world.fed.clients, 0)
    assert not same_bits(end.clusters["m"][0], start.clusters["m"][0])
    assert all(same_bits(end.clusters["m"][j], start.clusters["m"][j]) for j in (1, 2))


def test_wire(tmp_path):
    world = mixed(tmp_path)
    world.run(IFCA(LOCAL, k=3))
    sizes = [numbers(world.server.init(P)) for P in KINDS]
    floats, counters = sum(s[0] for s in sizes), sum(s[1] for s in sizes)  # counters of BatchNorm
    down, up = world.fed.down["choose_and_train"], world.fed.up["choose_and_train"]
    assert (down.floats, down.integers) == (3 * floats, 3 * counters)
    assert (up.floats, up.integers) == (floats, counters + 5)


def test_clients_find_their_camp_and_do_what_one_model_cannot(tmp_path):
    """From initial models that tell the camps apart, which not all do (the paper restarts from others)."""
    local = Local(steps=20, batch=10, lr=0.1)
    world = seeded(tmp_path / "two", seed=1)
    state = world.run(IFCA(local, k=2), 8)[-1]
    chosen = world.events("clusters")[0]["chosen"]
    assert [{chosen[k] for k in camp} for camp in CAMPS] in ([{0}, {1}], [{1}, {0}])
    theirs = [accuracy(world, k, state.clusters["m"][j]) for k, j in chosen.items()]
    one = seeded(tmp_path / "one", seed=1).run(IFCA(local, k=1), 8)[-1].clusters["m"][0]
    assert min(theirs) > 0.85
    assert max(accuracy(world, k, one) for k in chosen) < 0.8


def test_clients_are_judged_by_the_cluster_they_choose(tmp_path):
    world = seeded(tmp_path)
    method = IFCA(LOCAL, k=2)
    state = world.run(method, 2)[-1]
    asked = method.personal(state, world.fed)
    scores = world.fed.map(asked.task, list(world.fed.clients), **asked.payload)
    for k, score in scores.items():
        data = world.data[k]
        found = [evaluate(world.server.model("m", w), data.inputs, data.labels) for w in state.clusters["m"]]
        assert score == min(found, key=lambda s: s.loss)
    assert set(method.models(state)) == {"m", "m.1"}


@pytest.mark.parametrize("cluster", [torch.tensor(2), torch.tensor(-1), torch.tensor([0, 1]), torch.tensor(0.0)])
def test_a_cluster_that_is_none_costs_the_seat_not_the_round(tmp_path, monkeypatch, cluster):
    def lying(client, **inbox):
        honest = choose_and_train.fn(client, **inbox)
        if client.id == "c3":
            object.__setattr__(honest, "cluster", cluster)
        return honest

    monkeypatch.setitem(TASKS, choose_and_train.name, dataclasses.replace(choose_and_train, fn=lying))
    world = seeded(tmp_path)
    end = world.run(IFCA(LOCAL, k=2))[-1]
    refused = [f["client"] for f in world.fed.failures]
    assert refused == ["c3"]
    assert "c3" not in world.events("clusters")[0]["chosen"]
    assert len(end.clusters["m"]) == 2


def test_too_few_usable_replies_make_the_round_void(tmp_path, monkeypatch):
    def lying(client, **inbox):
        return dataclasses.replace(choose_and_train.fn(client, **inbox), cluster=torch.tensor(9))

    monkeypatch.setitem(TASKS, choose_and_train.name, dataclasses.replace(choose_and_train, fn=lying))
    with pytest.raises(QuorumNotMet, match=r"0 of . clients gave a valid reply to choose_and_train.*cluster 9 of 2"):
        seeded(tmp_path).run(IFCA(LOCAL, k=2))


def test_refusals():
    with pytest.raises(ConfigError, match="k = 0"):
        IFCA(k=0)
