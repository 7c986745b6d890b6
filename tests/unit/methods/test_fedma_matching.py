"""Matching neurons: the oracle MA-1, BBP-MAP by hand and on known neurons, networks whose neurons change places."""

import itertools
import math

import pytest
import torch
from torch import nn

from solera.core.tensors import weights_of
from solera.methods.fedma import (
    BBP,
    assign,
    match_bbp,
    match_fixed_width,
    matching_gain,
    merge_classes,
    merge_neurons,
    move_columns,
    neurons_of,
    squared_distances,
)
from solera.train.chain import chain, resized
from toys import same_bits

FIRST = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
SECOND = torch.tensor([[0.2, 1.8], [1.2, -0.2]], dtype=torch.float64)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64)


# ---- MA-1 -------------------------------------------------------------------------------------------


def test_ma_1():
    cost = squared_distances(FIRST, SECOND)
    torch.testing.assert_close(cost, torch.tensor([[3.88, 0.08], [0.08, 6.28]], dtype=torch.float64))
    assert assign(cost).tolist() == [1, 0]
    places = match_fixed_width([FIRST, SECOND], [1.0, 1.0], FIRST)
    assert [p.tolist() for p in places] == [[0, 1], [1, 0]]
    merged = merge_neurons([{"weight": FIRST}, {"weight": SECOND}], places, [1.0, 1.0])["weight"]
    torch.testing.assert_close(merged, torch.tensor([[1.1, -0.1], [0.1, 1.9]], dtype=torch.float64))
    naive = merge_neurons([{"weight": FIRST}, {"weight": SECOND}], [torch.arange(2)] * 2, [1.0, 1.0])["weight"]
    torch.testing.assert_close(naive, torch.tensor([[0.6, 0.9], [0.6, 0.9]], dtype=torch.float64))


def test_distances_are_those_of_the_differences():
    a, b = normal(7, 5), normal(4, 5, seed=1)
    torch.testing.assert_close(squared_distances(a, b), (a[:, None] - b).square().sum(-1))


def test_neurons_are_matched_with_the_mean_of_those_before():
    """The third client is nearer to the second alone, but the mean decides, weighted."""
    near = [torch.tensor([[v], [10.0]], dtype=torch.float64) for v in (0.0, 8.0)]
    third = torch.tensor([[5.5], [9.0]], dtype=torch.float64)
    assert match_fixed_width([*near, third], [1.0, 1.0, 1.0], near[0])[2].tolist() == [0, 1]
    swapped = torch.tensor([[9.6], [8.0]], dtype=torch.float64)
    assert match_fixed_width([*near, swapped], [1.0, 3.0, 1.0], near[0])[2].tolist() == [1, 0]


@pytest.mark.parametrize("how", ["fixed_width", "bbp"])
@pytest.mark.parametrize("whose", [0, 1, 2])
def test_the_order_in_which_a_client_holds_its_neurons_changes_nothing(how, whose):
    """Also of the first client, and also where neurons are new."""
    base = normal(6, 4) * 3
    clients = [{"weight": base + 0.1 * normal(6, 4, seed=k)} for k in range(3)]
    clients[1]["weight"][4:] = normal(2, 4, seed=9) * 5  # neurons of its own

    def result(layers):
        neurons = [neurons_of(a) for a in layers]
        if how == "bbp":
            places = match_bbp(neurons, base, BBP(gamma=7), rng())
        else:
            places = match_fixed_width(neurons, [1.0, 2.0, 1.0], base)
        return merge_neurons(layers, places, [1.0, 2.0, 1.0])

    shuffled = [dict(a) for a in clients]
    shuffled[whose] = {"weight": clients[whose]["weight"][torch.randperm(6, generator=rng(5))]}
    assert same_bits(result(clients), result(shuffled))


# ---- BBP-MAP ----------------------------------------------------------------------------------------


def test_the_gains_of_bbp_map_by_hand():
    prior = BBP(sigma=0.5, sigma0=2.0, gamma=7.0, width_cap=4)  # p = 4, 1/sigma0^2 = 1/4
    w = torch.tensor([[1.0, -1.0], [0.5, 0.0]], dtype=torch.float64)
    G = torch.tensor([[4.0, 0.0], [0.0, 8.0], [1.0, 1.0]], dtype=torch.float64)
    count = torch.tensor([1, 2, 1])
    gain = matching_gain(w, G, count, 4, prior)
    assert gain.shape == (2, 4)  # three that are there, and room for one new
    first = (8**2 + 4**2) / 8.25 - 16 / 4.25 + math.log(1 / 3)
    second = (2**2 + 8**2) / 12.25 - 64 / 8.25 + math.log(2 / 2)
    new = (4**2 + 4**2) / 4.25 - 2 * math.log(1) + 2 * math.log(7 / 4)
    assert gain[0, 0].item() == pytest.approx(first, abs=1e-12)
    assert gain[1, 1].item() == pytest.approx(second, abs=1e-12)
    assert gain[0, 3].item() == pytest.approx(new, abs=1e-12)
    wider = matching_gain(w, G, count, 4, BBP(0.5, 2.0, 7.0, width_cap=99))
    assert (wider[0, 3] - wider[0, 4]).item() == pytest.approx(2 * math.log(2), abs=1e-12)


def test_bbp_recovers_the_neurons_that_clients_drew_theirs_from():
    """Ten true neurons, each client has seven of them, noisy and in its own order: the ten are found."""
    truth = normal(10, 20) * 3
    clients, drawn = [], []
    for k in range(8):
        mine = torch.randperm(10, generator=rng(100 + k))[:7]
        drawn.append(mine)
        clients.append(truth[mine] + 0.1 * normal(7, 20, seed=k))
    places = match_bbp(clients, clients[0], BBP(sigma=0.5, sigma0=3.0, gamma=1.0), rng())
    found = merge_neurons([{"w": c} for c in clients], places, [1.0] * 8)["w"]
    assert len(found) == 10
    nearest = squared_distances(found, truth).argmin(1)
    assert sorted(nearest.tolist()) == list(range(10))
    assert float((found - truth[nearest]).abs().max()) < 0.25
    for here, mine in zip(places, drawn, strict=True):
        assert nearest[here].tolist() == mine.tolist()


def test_new_neurons_come_in_the_order_of_their_norms():
    ours = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    theirs = torch.tensor([[0.0, -20.0], [30.0, 0.0]], dtype=torch.float64)  # far from ours: new ones
    places = match_bbp([ours, theirs], ours, BBP(gamma=100.0, sweeps=0), rng())
    assert [p.tolist() for p in places] == [[0, 1], [3, 2]]


def test_bbp_does_not_grow_beyond_the_cap():
    clients = [normal(6, 4, seed=k) * 5 for k in range(4)]  # nothing in common
    widths = {cap: 1 + int(max(p.max() for p in match_bbp(clients, clients[0], BBP(width_cap=cap), rng())))
              for cap in (1, 6, 9, 700)}  # fmt: skip
    assert widths[1] == widths[6] == 6
    assert widths[9] == 9
    assert 9 < widths[700] <= 24


def test_every_client_keeps_its_neurons_apart():
    clients = [normal(6, 4, seed=k) for k in range(5)]
    for here in match_bbp(clients, clients[0], BBP(), rng()):
        assert len(set(here.tolist())) == 6


def test_a_single_client_is_left_as_it_is():
    w = normal(5, 3)
    shuffled = torch.tensor([3, 1, 4, 0, 2])
    for places in (match_bbp([w[shuffled]], w, BBP(), rng()), match_fixed_width([w[shuffled]], [1.0], w)):
        assert places[0].tolist() == shuffled.tolist()


@pytest.mark.parametrize("wrong", [{"sigma": 0}, {"sigma0": -1}, {"gamma": math.inf}, {"sweeps": -1}, {"width_cap": 0}])
def test_priors_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BBP(**wrong)


# ---- merging and moving -----------------------------------------------------------------------------


def test_a_neuron_is_the_mean_of_those_who_hold_it():
    layers = [{"weight": torch.tensor([[1.0], [2.0]]), "bias": torch.tensor([1.0, 0.0])} for _ in range(2)]
    layers[1] = {n: t + 4 for n, t in layers[1].items()}
    merged = merge_neurons(layers, [torch.tensor([0, 1]), torch.tensor([2, 0])], [1.0, 3.0])
    assert merged["weight"].flatten().tolist() == [(1 + 3 * 6) / 4, 2.0, 5.0]
    assert merged["bias"].tolist() == [(1 + 3 * 4) / 4, 0.0, 5.0]
    assert merged["weight"].dtype == torch.float32


def test_sums_are_float64():
    """Products rounded to float32 on the way would differ in the last bit of some of a thousand weights."""
    w = [normal(1000, 1, seed=k).float() for k in range(3)]
    n, places = [0.1, 0.7, 1.3], [torch.arange(1000)] * 3
    exact = (0.1 * w[0].double() + 0.7 * w[1].double() + 1.3 * w[2].double()) / (0.1 + 0.7 + 1.3)
    assert torch.equal(merge_neurons([{"w": t} for t in w], places, n)["w"], exact.float())


def test_classes_are_weighted_one_by_one():
    layers = [{"weight": torch.full((2, 3), v), "bias": torch.full((2,), v)} for v in (1.0, 3.0)]
    merged = merge_classes(layers, torch.tensor([[10.0, 0.0], [30.0, 5.0]], dtype=torch.float64))
    assert merged["weight"][:, 0].tolist() == [2.5, 3.0]
    assert merged["bias"].tolist() == [2.5, 3.0]


def reordered(model, at, places):
    """`model` with the neurons of layer number `at` in another order."""
    layers, weights = chain(model), weights_of(model)
    here, after = layers[at], layers[at + 1]
    for name in here.own(weights):
        weights[name] = torch.empty_like(weights[name]).index_copy_(0, places, weights[name])
    weights[after.weight] = move_columns(weights[after.weight], places, len(places), after.block)
    return resized(model, weights)


def small_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(6 * 4, 7), nn.ReLU(), nn.Linear(7, 3),
    )  # fmt: skip


@pytest.mark.parametrize("at", [0, 1, 2])  # convolution to convolution, to Linear in blocks of pixels, Linear to Linear
def test_a_network_in_another_order_is_the_same_function(at):
    model, x = small_cnn().eval().double(), normal(5, 1, 8, 8)
    width = len(weights_of(model)[chain(model)[at].weight])
    places = torch.randperm(width, generator=rng(at + 1))
    other = reordered(model, at, places).eval()
    torch.testing.assert_close(other(x), model(x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_room_for_neurons_that_others_have_does_not_change_the_function(at):
    model, x = small_cnn().eval().double(), normal(5, 1, 8, 8)
    layers, weights = chain(model), weights_of(model)
    here, after = layers[at], layers[at + 1]
    old = len(weights[here.weight])
    places = torch.arange(old) + 2
    for name in here.own(weights):
        t = weights[name]
        weights[name] = torch.cat([torch.ones(2, *t.shape[1:], dtype=t.dtype), t])
    weights[after.weight] = move_columns(weights[after.weight], places, old + 2, after.block)
    wider = resized(model, weights).eval()
    torch.testing.assert_close(wider(x), model(x), atol=1e-12, rtol=1e-12)


def test_matching_puts_shuffled_copies_of_a_network_together_again():
    """The mean of copies in different orders is the network itself; without matching it is another one."""
    model, x = small_cnn().eval().double(), normal(5, 1, 8, 8)
    layers = chain(model)
    copies = [model]
    for k in range(2):
        copy = model
        for at in range(3):
            width = len(weights_of(model)[layers[at].weight])
            copy = reordered(copy, at, torch.randperm(width, generator=rng(7 * k + at)))
        copies.append(copy.eval())
    held, merged = [weights_of(c) for c in copies], weights_of(model)
    for here, after in itertools.pairwise(layers):
        sent = [{n: w[n] for n in here.own(w)} for w in held]
        places = match_fixed_width([neurons_of(a) for a in sent], [1.0] * 3, neurons_of(sent[0]))
        merged |= merge_neurons(sent, places, [1.0] * 3)
        for w, p in zip(held, places, strict=True):
            w[after.weight] = move_columns(w[after.weight], p, len(p), after.block)
    last = layers[-1]
    merged |= merge_classes([{n: w[n] for n in last.own(w)} for w in held], torch.ones(3, 3, dtype=torch.float64))
    torch.testing.assert_close(resized(model, merged).eval()(x), model(x), atol=1e-12, rtol=1e-12)
    naive = {n: sum(weights_of(c)[n] for c in copies) / 3 for n in merged}
    assert not torch.allclose(resized(model, naive).eval()(x), model(x), atol=0.01)
