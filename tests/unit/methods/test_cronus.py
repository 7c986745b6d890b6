"""Cronus: equal to its steps by hand, and hardly moved by clients that lie."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from public_toys import CLIENTS, PUBLIC, accuracies, halves, mixed, spoil, watch
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.methods.cronus import Cronus, filtered_mean
from solera.runs.loop import check_server
from solera.testing import check_method
from solera.train.fitting import Local, fit, logits_of, towards
from toys import images, same_bits

FIRST = Local(epochs=2, batch=8, lr=0.05)
LOCAL = Local(epochs=1, batch=8, lr=0.05)
METHOD = Cronus(FIRST, LOCAL, epsilon=0.4)
ASK, TEACH = "train_and_predict", "train_mixed"


def soft_labels(world, seeds):
    """What each client says of the public samples after its first training alone, and its model."""
    models = []
    for k, seed in zip(CLIENTS, seeds, strict=True):
        P = world.fed.architecture(k)
        models.append(world.server.model(P, world.server.init(P)))
        fit(models[-1], world.data[k].inputs, world.data[k].labels, FIRST, seed)
    said = [logits_of(model, world.server.public.inputs).softmax(-1) for model in models]
    return models, torch.stack(said)


def test_a_round_by_hand(tmp_path):
    """Alone; soft labels up; a robust mean down; then private and public samples in one set."""
    world = mixed(tmp_path)
    told = watch(world, "train_mixed")
    world.run(METHOD)
    models, said = soft_labels(world, world.seeds[:5])
    targets = filtered_mean(said, 0.4)
    assert all(torch.equal(sent, targets) for _, (sent,) in told)
    for i, k in enumerate(CLIENTS):
        data = world.data[k]
        inputs = torch.cat([data.inputs, world.server.public.inputs])
        labels = torch.cat([F.one_hot(data.labels, 4).float(), targets])
        fit(models[i], inputs, labels, LOCAL, world.seeds[5 + i], towards(F.cross_entropy))  # soft cross-entropy
        mine = weights_of(models[i])
        assert all(torch.allclose(t, mine[n], atol=1e-5) for n, t in world.model(k).items())


def test_only_newcomers_train_alone(tmp_path):
    world = mixed(tmp_path)
    still = dataclasses.replace(METHOD, local=Local(epochs=0))
    world.run(still, 1)
    before = {k: world.model(k) for k in CLIENTS}
    world.run(still, 3)
    assert all(same_bits(world.model(k), before[k]) for k in CLIENTS)
    assert not same_bits(before["c1"], world.server.init("m"))


def test_the_mean_is_the_plain_mean(tmp_path):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    told = watch(a, "train_mixed")
    a.run(dataclasses.replace(METHOD, aggregate="mean"))
    b.run(dataclasses.replace(METHOD, epsilon=0.0))
    _, said = soft_labels(a, a.seeds[:5])
    assert torch.allclose(told[0][1][0], said.mean(0), atol=1e-6)
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)


def test_all_public_samples_go_both_ways(tmp_path):
    world = mixed(tmp_path)
    world.run(METHOD)
    down, up, m, C = world.fed.down, world.fed.up, 5, 4
    assert set(down) == {ASK, TEACH}
    assert (down[ASK].floats, down[ASK].integers) == (0, m * PUBLIC)
    assert (up[ASK].floats, up[ASK].integers) == (m * PUBLIC * C, 0)
    assert (down[TEACH].floats, down[TEACH].integers) == (m * PUBLIC * C, 0)
    assert (up[TEACH].floats, up[TEACH].integers) == (0, 0)
    assert set(world.kept("c0")) == {"model"}


def test_a_client_drawn_twice_speaks_twice(tmp_path):
    world = mixed(tmp_path)
    world.fed.config = FederationConfig(sampling="size", replacement=True)
    told = watch(world, "train_mixed")
    world.run(METHOD)
    S, copies = sorted(world.fed.copies), world.fed.copies
    assert max(copies.values()) > 1
    seeds = dict(zip(S, world.seeds, strict=False))
    _, said = soft_labels(world, [seeds.get(k, 0) for k in CLIENTS])
    several = torch.cat([said[CLIENTS.index(k)].expand(copies[k], -1, -1) for k in S])
    assert torch.equal(told[0][1][0], filtered_mean(several, 0.4))


def liar(answers: torch.Tensor) -> torch.Tensor:
    """The class it holds for least likely, as if it were certain."""
    return F.one_hot(answers.argmin(-1), answers.shape[-1]).float()


def test_a_liar_owns_neither_the_labels_nor_the_models(tmp_path):
    """One of four lies; the labels of the robust mean stay near the truth."""
    x, y = images(300, seed=1)
    found, error = {}, {}
    for aggregate in ("robust", "mean"):
        world = halves(tmp_path / aggregate)
        world.data = {k: Data(x[i::4], y[i::4]) for i, k in enumerate(world.fed.clients)}  # all alike
        spoil(world, "c2", "train_and_predict", liar)
        told = watch(world, "train_mixed")
        first = Local(epochs=8, batch=10, lr=0.1)
        world.run(Cronus(first, Local(epochs=3, batch=10, lr=0.1), aggregate, 0.3), 3)
        found[aggregate] = sum(accuracies(world)) / 4
        truth = images(100, seed=3)[1]
        error[aggregate] = (told[-1][1][0] - F.one_hot(truth, 4)).abs().mean().item()
    assert error["robust"] < 0.6 * error["mean"]
    assert found["robust"] > 0.9


@pytest.mark.parametrize("lie", [lambda t: t[:-1], lambda t: t * 2, lambda t: t - 0.5])
def test_predictions_that_are_none_are_left_out(tmp_path, lie):
    world, other = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    spoil(world, "c3", "train_and_predict", lie)
    told, same = watch(world, "train_mixed"), watch(other, "train_mixed")
    world.run(METHOD)
    assert [e["client"] for e in world.fed.failures] == ["c3"]
    other.fed.sample = lambda: [k for k in CLIENTS if k != "c3"]
    other.run(METHOD)
    assert [k for k, _ in told] == [k for k, _ in same]
    assert torch.equal(told[0][1][0], same[0][1][0])


def test_a_model_that_blows_up_is_not_kept(tmp_path):
    world = mixed(tmp_path)
    state = world.run(METHOD)[-1]
    before = world.model("c1")
    world.data["c1"] = Data(torch.full_like(world.data["c1"].inputs, 1e38), world.data["c1"].labels)
    world.fed.begin(1)
    METHOD.round(state, world.fed, world.server)
    assert same_bits(world.model("c1"), before)


def test_clients_learn_classes_they_have_never_seen(tmp_path):
    found = {}
    for epochs in (0, 3):
        world = halves(tmp_path / str(epochs))
        local = Local(epochs=epochs, batch=10, lr=0.1)
        world.run(Cronus(Local(epochs=5, batch=10, lr=0.1), local, epsilon=0.0), 8)
        found[epochs] = accuracies(world)
    assert max(found[0]) < 0.6  # a client knows two of four classes
    assert min(found[3]) > 0.7


@pytest.mark.parametrize("epsilon", [-0.1, 0.5, float("nan")])
def test_impossible_shares_are_refused(epsilon):
    with pytest.raises(ConfigError, match="epsilon"):
        Cronus(epsilon=epsilon)


def test_it_needs_public_samples_that_stay_the_same(tmp_path):
    world = mixed(tmp_path)
    world.server.public.fresh = True
    with pytest.raises(ConfigError, match="same public samples"):
        check_server(METHOD, world.server)
    world.server.public = None
    with pytest.raises(ConfigError, match=r"set public\.source"):
        check_server(METHOD, world.server)


def test_the_variant_keeps_the_contract_of_a_method(tmp_path):
    check_method(Cronus(aggregate="mean"), tmp_path, engines=())
