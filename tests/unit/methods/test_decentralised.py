"""Decentralised fusion: a round by hand, samples that follow from a seed, and nothing but logits on the way."""

import dataclasses

import pytest
import torch

import by_hand
from public_toys import CLIENTS, Known, accuracies, halves, mixed, spoil, watch
from run_directories import lines_of
from solera.core.errors import ConfigError
from solera.core.wire import Packed
from solera.data import PublicConfig, from_tensors, public_from_noise
from solera.data.public import Generator, make_public, save_generator
from solera.methods.decentralised import Decentralised, made_from
from solera.methods.local import LocalOnly
from solera.testing import run_toy
from solera.train.fitting import Local
from toys import images, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
DISTIL = Local(epochs=1, batch=64, lr=0.05)  # one step sees all public samples, in whatever order
METHOD = Decentralised(LOCAL, DISTIL)
ASK, TELL = "train_and_infer", "distil_inferred"


def task():
    """A data set of images like the toy's."""
    x = (torch.rand(8, 1, 8, 8) * 255).to(torch.uint8)
    return from_tensors((x, torch.arange(8) % 4), (x, torch.arange(8) % 4), classes=4, mean=(0.5,), std=(0.5,))


def noise(size=40, fresh=True, seed=0):
    """Uniform noise in the shape of the toy images, as every peer makes it."""
    return public_from_noise(task(), PublicConfig(source="noise", size=size, fresh=fresh), seed)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_round_by_hand(tmp_path, temperature):
    """Train, infer, take the mean of all logits, and step down the KL from it, each peer with its own model."""
    world = mixed(tmp_path)
    world.run(dataclasses.replace(METHOD, temperature=temperature))
    x, models = world.server.public.inputs, {}
    for k, seed in zip(CLIENTS, world.seeds[:5], strict=True):
        A, data = world.fed.architecture(k), world.data[k]
        models[k] = world.server.model(A, world.server.init(A))
        by_hand.train(models[k], data.inputs, data.labels, epochs=2, batch=8, lr=0.05, seed=seed)
    loss = by_hand.kl_towards(by_hand.mean_logits(list(models.values()), x), temperature)
    for k, model in models.items():
        by_hand.teach(model, x, loss, [list(range(40))], optimizer="sgd", lr=0.05)
        assert by_hand.close(world.model(k), model.state_dict())


def test_without_distillation_it_is_local_training(tmp_path):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    a.run(Decentralised(LOCAL, Local(epochs=0)))
    b.run(LocalOnly(LOCAL))
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)


def test_peers_learn_classes_they_never_saw(tmp_path):
    method = Decentralised(Local(epochs=2, batch=16, lr=0.05), Local(epochs=5, batch=32, lr=1e-2, optimizer="adam"))
    together, alone = halves(tmp_path / "a"), halves(tmp_path / "b")
    together.run(method, 8)
    alone.run(LocalOnly(method.local), 8)
    assert min(accuracies(together)) > max(accuracies(alone)) + 0.1


# ---- samples that follow from a seed ---------------------------------------------------------------


def test_the_same_generator_and_seed_make_the_same_samples():
    one, other = noise(), noise()  # made apart, as at two peers
    assert one is not other
    assert torch.equal(made_from(7, 40, one), made_from(7, 40, other))
    assert not torch.equal(made_from(7, 40, one), made_from(8, 40, other))  # the next round has new ones
    assert len(made_from(7, 13, one)) == 13
    still = noise(fresh=False)
    assert torch.equal(made_from(7, 40, still), still[torch.arange(40)])
    assert len(made_from(7, 13, still)) == 13


def test_identical_generators_and_a_controlled_random_state(tmp_path):
    """Footnote 3: two peers that read the same file make the same images from the same seed, new ones each round."""
    torch.manual_seed(3)
    save_generator(Generator((1, 8, 8), latent=4, features=2), tmp_path / "g.safetensors")
    how = PublicConfig(source="generator", path=str(tmp_path / "g.safetensors"), size=12, fresh=True)
    one, other = (make_public(how, task(), torch.empty(0), seed=0) for _ in range(2))
    assert one.digest == other.digest
    assert torch.equal(made_from(7, 12, one), made_from(7, 12, other))
    assert not torch.equal(made_from(7, 12, one), made_from(8, 12, one))


def test_what_is_distilled_is_what_was_inferred(tmp_path):
    """With samples made anew each round, mean logits belong to the samples that peers make again: a peer alone has
    nothing to learn from itself."""
    world = mixed(tmp_path)
    world.server.public = noise()
    world.fed.sample = lambda: ["c1"]  # without BatchNorm
    world.run(METHOD)
    alone = mixed(tmp_path / "alone")
    alone.fed.sample = lambda: ["c1"]
    alone.run(LocalOnly(LOCAL))
    assert by_hand.close(world.model("c1"), alone.model("c1"), apart=1e-6)


# ---- what travels ----------------------------------------------------------------------------------


def test_a_seed_goes_down_logits_go_up_and_their_mean_comes_back(tmp_path):
    world = mixed(tmp_path, per_round=13)
    world.run(METHOD)
    down, up, m, r, C = world.fed.down, world.fed.up, 5, 13, 4
    assert set(down) == {ASK, TELL}
    assert (down[ASK].floats, down[ASK].integers) == (0, 0)
    assert (up[ASK].floats, up[ASK].integers) == (m * r * C, 0)
    assert (down[TELL].floats, down[TELL].integers) == (m * r * C, 0)
    assert (up[TELL].floats, up[TELL].integers) == (0, 0)
    assert up[ASK].content == {"predictions": 4 * m * r * C}
    assert down[ASK].bytes < 5 * 600  # a seed, a digest and the settings of the training
    assert world.fed.verbs == {"mean"}
    assert set(world.kept("c0")) == {"model"}


def test_everybody_is_told_the_same(tmp_path):
    world = mixed(tmp_path)
    told = watch(world, TELL)
    world.run(METHOD)
    assert [k for k, _ in told] == CLIENTS
    assert all(torch.equal(t[0], told[0][1][0]) for _, t in told)


def test_a_run_has_no_model_of_its_own(tmp_path):
    result = run_toy(Decentralised(Local(epochs=1), Local(epochs=1)), tmp_path, rounds=2)
    assert result.models == {}
    assert result.state.rounds == 2
    assert result.summary["personal"]["clients"] == 8
    assert {"train_and_infer", "distil_inferred"} <= set(str(lines_of(tmp_path)[0]).split("'"))


# ---- when something is wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("lie", [lambda t: t[:-1], lambda t: t[:, :2], lambda t: t / 0, lambda t: t.double()])
def test_a_bad_reply_costs_a_peer_its_seat_and_nothing_else(tmp_path, lie):
    world, other = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    spoil(world, "c0", ASK, lie)
    told = watch(world, TELL)
    world.run(METHOD)
    assert [f["client"] for f in world.fed.failures] == ["c0"]
    assert [k for k, _ in told] == CLIENTS[1:]
    other.fed.sample = lambda: CLIENTS[1:]
    other.run(METHOD)
    assert all(same_bits(world.model(k), other.model(k)) for k in CLIENTS[1:])


def test_a_peer_with_another_generator_loses_its_seat(tmp_path):
    world = mixed(tmp_path)
    world.held["c3"] = Known(images(40, seed=10)[0])
    world.run(METHOD)
    (failure,) = world.fed.failures
    assert failure["client"] == "c3"
    assert "other public data" in failure["reason"]


def test_samples_that_the_server_sends_are_refused(tmp_path):
    world = mixed(tmp_path)
    world.server.lent = Packed(torch.zeros(64))
    with pytest.raises(ConfigError, match=r"leave out public.where = 'server'"):
        world.run(METHOD)
