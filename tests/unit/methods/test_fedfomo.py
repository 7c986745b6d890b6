"""FedFomo: equal to its steps by hand; what a client keeps aside, whom it is sent, and what it may say."""

import dataclasses
import statistics

import pytest
import torch

from camps import CAMPS, accuracy, camps, numbers
from solera.core.errors import ConfigError
from solera.core.randomness import seed_from
from solera.core.task import TASKS, Data
from solera.core.tensors import weights_of
from solera.methods import fedfomo
from solera.methods.fedavg import FedAvg
from solera.methods.fedfomo import FedFomo, mix_and_train, split
from solera.train.aggregate import weighted_mean
from solera.train.fitting import Local, evaluate, fit
from toys import Conv, World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
PLAIN = {"local": LOCAL, "lr_decay": 1.0}


def parts_of(world, k):
    return split(world.client(k, 0, {}), 0.2, seed_from(world.fed.run_seed, "validation split"))


def trained(world, k, seed, weights, local=LOCAL):
    model, (train, _) = world.server.model(world.fed.architecture(k), weights), parts_of(world, k)
    fit(model, train.inputs, train.labels, local, seed)
    return weights_of(model)


def test_the_first_round_is_local_training_on_what_is_not_kept_aside(tmp_path):
    world = camps(tmp_path)
    end = world.run(FedFomo(**PLAIN))[-1]
    for k, seed in zip(world.fed.clients, world.seeds[:6], strict=True):
        assert same_bits(end.models[k], trained(world, k, seed, world.server.init("m")))
    assert end.affinity == {k: {} for k in world.fed.clients}


def test_the_second_round_by_hand(tmp_path):
    """Baseline is the model before the last training; the client's own trained model is a candidate as well."""
    world = camps(tmp_path)
    _, first, second = world.run(FedFomo(**PLAIN, M=2), 2)
    theta, names = world.server.init("m"), list(world.server.init("m"))
    seeds = dict(zip(world.fed.clients, world.seeds[6:12], strict=True))
    for k in world.fed.clients:
        givers = list(second.affinity[k])
        assert len(givers) == 2
        assert k not in givers
        candidates = [first.models[k], *(first.models[m] for m in givers)]
        _, kept = parts_of(world, k)
        L = [evaluate(world.server.model("m", w), kept.inputs, kept.labels).loss for w in [theta, *candidates]]
        far = [sum((w[n].double() - theta[n].double()).square().sum() for n in names).sqrt() for w in candidates]
        raw = [float((L[0] - L_m) / f) for L_m, f in zip(L[1:], far, strict=True)]
        assert list(second.affinity[k].values()) == pytest.approx(raw[1:], rel=1e-5)
        positive = [max(0.0, r) for r in raw]
        assert sum(positive) > 0
        start = weighted_mean(candidates, [p / max(positive) for p in positive])
        wanted = trained(world, k, seeds[k], start)
        assert all(torch.allclose(second.models[k][n], wanted[n], atol=1e-5) for n in names)


def test_affinity_is_summed_and_the_best_are_sent_again(tmp_path):
    world = camps(tmp_path)
    states = world.run(FedFomo(**PLAIN, M=2, epsilon=0.0), 3)
    row = states[2].affinity["c0"]
    later = states[3].affinity["c0"]
    method = FedFomo(M=2, epsilon=0.0)
    world.fed.begin(3)
    chosen = method.choose("c0", states[3], world.fed)
    scores = {m: later.get(m, 0.0) for m in world.fed.clients if m != "c0"}
    assert sorted(scores[m] for m in chosen) == sorted(scores.values())[-2:]
    assert set(row) <= set(later)


def test_exploration_fades(tmp_path):
    world = camps(tmp_path)
    models = {k: {} for k in world.fed.clients}
    state = FedFomo.State(models, {"c0": {"c1": 2.0, "c2": 1.0}})
    method = FedFomo(M=1, epsilon=1.0, epsilon_decay=0.1)
    seen = {}
    for t in (0, 10):
        picks = set()
        for seed in range(30):
            world.fed.run_seed = seed
            world.fed.begin(t)
            picks |= set(method.choose("c0", state, world.fed))
        seen[t] = picks
    assert seen[0] == {"c1", "c2", "c3", "c4", "c5"}
    assert seen[10] == {"c1"}


def test_the_learning_rate_decays(tmp_path):
    world = camps(tmp_path)
    fast = world.run(FedFomo(LOCAL, lr_decay=0.5, epsilon=0.0), 2)[-1]
    still = camps(tmp_path / "still").run(FedFomo(LOCAL, lr_decay=1.0, epsilon=0.0), 2)[-1]
    assert not same_bits(fast.models["c0"], still.models["c0"])


# ---- what is kept aside -----------------------------------------------------------------------------


def test_a_fifth_is_kept_aside_always_the_same(tmp_path):
    world = camps(tmp_path)
    train, kept = parts_of(world, "c0")
    assert (len(train), len(kept)) == (32, 8)
    again = split(world.client("c0", 77, {}), 0.2, seed_from(0, "validation split"))  # another round, another seed
    assert torch.equal(again[1].inputs, kept.inputs)
    together = torch.cat([train.inputs, kept.inputs]).flatten(1)
    assert len(together.unique(dim=0)) == 40  # all samples, none twice


def test_what_is_kept_aside_is_never_trained_on(tmp_path):
    worlds = [camps(tmp_path / str(i)) for i in (0, 1)]
    kept = parts_of(worlds[0], "c0")[1]
    data = worlds[1].data["c0"]
    held = torch.tensor([any(torch.equal(x, h) for h in kept.inputs) for x in data.inputs])
    worlds[1].data["c0"] = Data(data.inputs, torch.where(held, (data.labels + 1) % 4, data.labels))
    first, second = (w.run(FedFomo(**PLAIN))[-1].models["c0"] for w in worlds)
    assert same_bits(first, second)


@pytest.mark.parametrize(("n", "sizes"), [(1, (1, 1)), (2, (1, 1)), (3, (2, 1)), (10, (8, 2))])
def test_small_clients(tmp_path, n, sizes):
    world = World(tmp_path, {"m": lambda: mlp(1)}, [("m", Data(*images(n)))])
    train, kept = parts_of(world, "c0")
    assert (len(train), len(kept)) == sizes
    world.run(FedFomo(**PLAIN), 2)


# ---- wire, partners, replies ------------------------------------------------------------------------


def test_wire(tmp_path):
    world = camps(tmp_path)
    d = numbers(world.server.init("m"))[0]
    method = FedFomo(**PLAIN, M=3)
    (state,) = world.run(method, 1)[1:]
    name = "mix_and_train"
    assert (world.fed.down[name].floats, world.fed.up[name].floats) == (6 * d, 6 * d)  # nobody's model but the initial
    world.fed.begin(1)
    method.round(state, world.fed, world.server)
    assert (world.fed.down[name].floats, world.fed.up[name].floats) == (6 * 3 * d, 6 * (d + 3))


def test_models_are_sent_within_an_architecture_and_with_their_statistics(tmp_path):
    parties = [(P, Data(*images(12, n))) for n, P in enumerate("cmcmc")]
    world = World(tmp_path, {"c": lambda: Conv(0), "m": lambda: mlp(1)}, parties)
    state = world.run(FedFomo(**PLAIN), 3)[-1]
    assert set(state.affinity["c0"]) == {"c2", "c4"}
    assert set(state.affinity["c1"]) == {"c3"}
    assert not world.fed.failures


def test_gains_of_another_number_than_models_sent_are_refused(tmp_path, monkeypatch):
    world = camps(tmp_path)
    method = FedFomo(**PLAIN, M=2)
    state = world.run(method)[-1]

    def lying(client, **inbox):
        honest = mix_and_train.fn(client, **inbox)
        return dataclasses.replace(honest, gains=torch.ones(7)) if client.id == "c3" else honest

    monkeypatch.setitem(TASKS, mix_and_train.name, dataclasses.replace(mix_and_train, fn=lying))
    world.fed.begin(1)
    end = method.round(state, world.fed, world.server)
    assert [e["client"] for e in world.fed.failures] == ["c3"]
    assert same_bits(end.models["c3"], state.models["c3"])
    assert end.affinity["c3"] == {}
    assert not same_bits(end.models["c0"], state.models["c0"])


def test_a_client_whose_training_blows_up_keeps_its_last_good_model(tmp_path):
    world = camps(tmp_path)
    method = FedFomo(**PLAIN)
    first = world.run(method)[-1]
    before = kept_by(world.fed, "c1")
    world.data["c1"] = Data(world.data["c1"].inputs * 1e6, world.data["c1"].labels)
    world.fed.begin(1)
    second = method.round(first, world.fed, world.server)
    assert same_bits(second.models["c1"], first.models["c1"])
    assert same_bits(kept_by(world.fed, "c1")["model"], before["model"])
    assert [f["client"] for f in world.fed.failures] == ["c1"]


def test_clients_find_their_camp_and_do_what_one_model_cannot(tmp_path):
    local = Local(epochs=4, batch=10, lr=0.1)
    world = camps(tmp_path / "fomo")
    state = world.run(FedFomo(local, M=3), 6)[-1]
    theirs = statistics.fmean(accuracy(world, k, w) for k, w in state.models.items())
    one = camps(tmp_path / "avg").run(FedAvg(local), 6)[-1].weights["m"]
    assert theirs > 0.85
    assert statistics.fmean(accuracy(world, k, one) for k in state.models) < 0.7
    for camp in CAMPS:
        for k in camp:
            row = state.affinity[k]
            friends = [row.get(m, 0.0) for m in camp if m != k]
            strangers = [g for m, g in row.items() if m not in camp]
            assert max(friends) > max(strangers)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"M": 0}, "M = 0"),
        ({"epsilon": 1.5}, "epsilon = 1.5"),
        ({"epsilon_decay": -0.1}, "epsilon_decay = -0.1"),
        ({"lr_decay": 1.1}, "lr_decay = 1.1"),
        ({"validation": 0.0}, "validation = 0.0"),
        ({"validation": 1.0}, "validation = 1.0"),
    ],
)
def test_refusals(bad, said):
    with pytest.raises(ConfigError, match=said):
        FedFomo(**bad)


def test_the_samples_kept_aside_follow_the_seed_of_the_run(tmp_path, monkeypatch):
    """And not the client's name alone: with other seeds other samples are kept, as with every other choice of a run."""
    kept = {}
    for seed in (0, 1):
        world = camps(tmp_path / str(seed), seed=seed)
        seen = []
        monkeypatch.setattr(fedfomo, "split", lambda *a, seen=seen: (seen.append(split(*a)), seen[-1])[1])
        world.run(FedFomo(LOCAL), 2)
        first, second = seen[0][1], seen[len(world.data)][1]  # of one client, in two rounds
        assert torch.equal(first.inputs, second.inputs)
        kept[seed] = first.inputs
    assert kept[0].shape == kept[1].shape
    assert not torch.equal(kept[0], kept[1])
