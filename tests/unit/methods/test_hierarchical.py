"""Hierarchical fusion: its two levels by hand, what it is equal to, what travels between them."""

import dataclasses

import pytest
import torch

import by_hand
from run_directories import lines_of
from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.wire import Packed, digest
from solera.methods.fedavg import FedAvg
from solera.methods.feddf import FedDF
from solera.methods.hierarchical import Hierarchical
from solera.methods.steps.low_bit import LowBitUpload
from solera.methods.steps.screen import Robust, Screen
from solera.testing import run_toy
from solera.train.distill import Distill
from solera.train.fitting import Local
from toys import Conv, World, images, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
FUSION, ABOVE, NONE = Distill(steps=6, batch=16), Distill(steps=4, batch=16, lr=2e-3), Distill(steps=0)
METHOD = Hierarchical(LOCAL, FUSION, ABOVE, grouping="blocks")  # c0, c1, c2 and c3, c4
SIZES, KINDS, GROUP = (5, 12, 9, 20, 7), "cmcmc", (0, 0, 0, 1, 1)
X = images(40, seed=9)[0]


def mixed(tmp, **options) -> World:
    """Five clients of different sizes, two architectures (one with BatchNorm), 40 public samples."""
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    parties = [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)]
    return World(tmp, builders, parties, **{"public": X, **options})


def taught(student, teachers, cfg, seed, weights=None):
    hands = by_hand.batches(40, cfg.steps, cfg.batch, seed)
    loss = by_hand.kl_towards(by_hand.mean_logits(list(teachers), X, weights))
    by_hand.teach(student, X, loss, hands, optimizer="adam", lr=cfg.lr, cosine=True, clip=5.0)
    return student


def groups_by_hand(world, start):
    """The models of both groups after local training and their own fusion: (architecture, group) -> model."""
    uploads = {}
    for i, seed in enumerate(world.seeds):
        data = world.data[f"c{i}"]
        uploads[i] = world.server.model(KINDS[i], start.weights[GROUP[i]][KINDS[i]])
        by_hand.train(uploads[i], data.inputs, data.labels, epochs=2, batch=8, lr=0.05, seed=seed)
    found = {}
    for g in (0, 1):
        own = [i for i in uploads if GROUP[i] == g]
        for A in "cm":
            same = [i for i in own if KINDS[i] == A]
            mean = by_hand.mean_of([uploads[i] for i in same], [SIZES[i] for i in same])
            student = world.server.model(A, mean)
            found[A, g] = taught(student, [uploads[i] for i in own], FUSION, world.fed.seed("fusion"))
    return found


def close(a, b):
    return by_hand.close(a, b, ignoring=by_hand.WITHOUT_GRADIENT)


# ---- what it computes ------------------------------------------------------------------------------


def test_a_round_by_hand(tmp_path):
    """Groups fuse their clients; above, the average of the groups learns from the mean logits of all their models."""
    world = mixed(tmp_path)
    start, end = world.run(METHOD)
    groups = groups_by_hand(world, start)
    examples = {("c", 0): 5 + 9, ("m", 0): 12, ("c", 1): 7, ("m", 1): 20}
    for A in "cm":
        mean = by_hand.mean_of([groups[A, g] for g in (0, 1)], [examples[A, g] for g in (0, 1)])
        student = taught(world.server.model(A, mean), groups.values(), ABOVE, world.fed.seed("above", "fusion"))
        assert close(student.state_dict(), end.fused[A])
        assert not close(mean, end.fused[A])
        assert all(end.weights[g][A] is end.fused[A] for g in (0, 1))
    assert end.votes == [{}, {}]


def test_logits_alone_by_hand(tmp_path):
    """Every group distils the mean of the groups' logits into its own models; a group has one voice."""
    world = mixed(tmp_path)
    start, end = world.run(dataclasses.replace(METHOD, exchange="logits"))
    groups = groups_by_hand(world, start)
    before = {g: model.state_dict() for g, model in groups.items()}
    for (A, g), weights in before.items():
        student = world.server.model(A, {n: t.clone() for n, t in weights.items()})
        student = taught(student, groups.values(), ABOVE, world.fed.seed("above", "fusion"))
        assert close(student.state_dict(), end.weights[g][A])
    assert end.fused == {}
    assert sorted(METHOD.__class__(exchange="logits").models(end)) == ["c.0", "c.1", "m.0", "m.1"]
    assert not same_bits(end.weights[0]["m"], end.weights[1]["m"])


def test_a_groups_voice_does_not_grow_with_its_architectures(tmp_path):
    """Three models of one group and one of the other: with logits each group is heard once."""
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1), "w": lambda: mlp(2, width=8)}
    parties = [(P, Data(*images(n, n))) for n, P in ((5, "c"), (8, "m"), (9, "w"), (7, "m"), (6, "m"), (8, "m"))]
    world = World(tmp_path, builders, parties, public=X)
    world.run(dataclasses.replace(METHOD, exchange="logits"))
    (reported,) = world.server.ensembles
    assert reported.names == ["c.0", "m.0", "w.0", "m.1"]
    assert reported.weights == [1 / 3, 1 / 3, 1 / 3, 1]
    world.run(METHOD)
    assert world.server.ensembles[-1].weights == [1, 1, 1, 1]


# ---- what it is equal to ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slots",
    [
        {},
        {"upload": LowBitUpload(bits=1)},
        {"screen": Robust("median", update_clip=1.0)},
        {"screen": Robust("trimmed_mean", teachers_by="krum", buffers="last")},
        {"screen": Robust(drop_worst=True)},
    ],
    ids=str,
)
def test_one_group_is_feddf_bit_for_bit(tmp_path, slots):
    data = {"fraction": 0.8, "validation": Data(*images(60, seed=4))}
    a = mixed(tmp_path / "a", **data).run(FedDF(LOCAL, FUSION, **slots), 2)[-1]
    b = mixed(tmp_path / "b", **data).run(dataclasses.replace(METHOD, groups=1, **slots), 2)[-1]
    assert all(same_bits(a.weights[A], b.fused[A]) for A in "cm")
    if slots:
        plain = mixed(tmp_path / "c", **data).run(FedDF(LOCAL, FUSION), 2)[-1]
        assert not all(same_bits(a.weights[A], plain.weights[A]) for A in "cm")


def test_a_groups_screen_sees_its_own_clients_only(tmp_path):
    """c0 and c2 have one architecture in the first group; all others are alone in theirs, so nothing compares to them.
    In one federation there are three of one and two of the other."""
    clip = Robust(update_clip=1.0)
    world = mixed(tmp_path / "a")
    world.run(dataclasses.replace(METHOD, screen=clip))
    (clipped,) = {e["client"] for e in world.events("update_clipped")}
    assert clipped in ("c0", "c2")
    flat = mixed(tmp_path / "b")
    flat.run(FedDF(LOCAL, FUSION, screen=clip))
    assert {e["client"] for e in flat.events("update_clipped")} & {"c1", "c3"}


def test_when_all_guess_the_best_client_of_each_group_stays(tmp_path):
    world = mixed(tmp_path, validation=Data(*images(50, seed=4)))
    start, end = world.run(dataclasses.replace(METHOD, screen=Robust(drop_worst=True, drop_threshold=4.0)))
    gone = [GROUP[int(f["client"][1])] for f in world.fed.failures]
    assert sorted(gone) == [0, 0, 1]
    assert any(not same_bits(start.fused[A], end.fused[A]) for A in "cm")


@pytest.mark.parametrize("average", ["weighted", "uniform"])
@pytest.mark.parametrize("groups", [2, 4])
def test_without_distillation_it_is_fedavg_in_any_groups(tmp_path, average, groups):
    method = Hierarchical(LOCAL, NONE, NONE, groups=groups, screen=Screen(average))
    a = mixed(tmp_path / "a", fraction=0.8).run(FedAvg(LOCAL, average), 3)[-1]
    b = mixed(tmp_path / "b", fraction=0.8, public=None).run(method, 3)[-1]
    assert all(by_hand.close(a.weights[A], b.fused[A], apart=1e-6) for A in "cm")


# ---- rounds between fusions above ------------------------------------------------------------------


def test_groups_go_their_own_ways_until_they_are_fused(tmp_path):
    world = mixed(tmp_path)
    method = dataclasses.replace(METHOD, every=2)
    states = world.run(method, 3)
    assert not same_bits(states[1].weights[0]["m"], states[1].weights[1]["m"])
    assert same_bits(states[1].fused["m"], states[0].fused["m"])  # what is shown is what was fused last
    assert states[1].votes == [{"c": 14, "m": 12}, {"c": 7, "m": 20}]
    assert states[2].weights[0]["m"] is states[2].weights[1]["m"] is states[2].fused["m"]
    end = method.finish(states[3], world.fed, world.server)  # a third round is not lost
    assert not same_bits(end.fused["m"], states[2].fused["m"])
    assert method.finish(end, world.fed, world.server) is end


def test_a_run_ends_fused(tmp_path):
    less = {"steps": 3, "batch": 16}
    method = Hierarchical(Local(epochs=1), Distill(**less), Distill(**less), every=2)
    whole = run_toy(method, tmp_path / "whole", rounds=3)
    assert set(whole.models) == {"wide", "deep"}
    assert whole.state.votes == [{}, {}]
    logits = dataclasses.replace(method, exchange="logits", every=1)
    assert set(run_toy(logits, tmp_path / "logits", rounds=1).models) == {"wide.0", "wide.1", "deep.0", "deep.1"}


# ---- groups ----------------------------------------------------------------------------------------


def test_every_architecture_is_dealt_to_all_groups(tmp_path):
    world = mixed(tmp_path)
    group = Hierarchical().group_of(world.fed)
    assert group == Hierarchical().group_of(world.fed)
    assert sorted(group) == list(world.fed.clients)
    for A in "cm":
        assert {group[k] for k in group if world.fed.architecture(k) == A} == {0, 1}
    assert METHOD.group_of(world.fed) == {f"c{i}": g for i, g in enumerate(GROUP)}
    world.fed.begin(7)
    assert Hierarchical().group_of(world.fed) == group


def test_a_group_without_a_client_this_round_gets_what_the_others_found(tmp_path):
    world = mixed(tmp_path)
    world.fed.sample = lambda: ["c3", "c4"]
    start, end = world.run(METHOD)
    feddf = mixed(tmp_path / "feddf")
    feddf.fed.sample = lambda: ["c3", "c4"]
    assert all(same_bits(end.fused[A], feddf.run(FedDF(LOCAL, FUSION))[-1].weights[A]) for A in "cm")
    assert end.weights[0]["m"] is end.fused["m"]
    assert digest(world.run(dataclasses.replace(METHOD, exchange="logits"))[-1].weights[0]) == digest(start.weights[0])


# ---- what travels ----------------------------------------------------------------------------------


def test_bytes_between_groups_and_the_server_above(tmp_path):
    world = mixed(tmp_path)
    world.run(METHOD)
    numbers = {A: sum(t.numel() for t in world.server.init(A).values() if t.is_floating_point()) for A in "cm"}
    down, up = world.fed.down["fuse_above"], world.fed.up["fuse_above"]
    assert (down.messages, up.messages) == (2, 2)
    assert down.floats == up.floats == 2 * (numbers["c"] + numbers["m"])
    both = Packed({A: world.server.init(A) for A in "cm"}).size
    assert down.bytes == up.bytes == 2 * both
    assert down.content["parameters"] >= 4 * down.floats
    assert world.fed.up["local_update"].floats == 3 * numbers["c"] + 2 * numbers["m"]


def test_bytes_of_logits(tmp_path):
    world = mixed(tmp_path, per_round=13)
    world.run(dataclasses.replace(METHOD, exchange="logits"))
    down, up = world.fed.down["synchronise_logits"], world.fed.up["synchronise_logits"]
    assert "fuse_above" not in world.fed.up
    assert down.floats == up.floats == 2 * 13 * 4
    assert up.content["predictions"] == 4 * up.floats


def test_one_group_sends_nothing_further_up(tmp_path):
    world = mixed(tmp_path)
    world.run(dataclasses.replace(METHOD, groups=1))
    assert set(world.fed.up) == {"local_update"}


def test_a_run_records_them(tmp_path):
    less = {"steps": 3, "batch": 16}
    run_toy(Hierarchical(Local(epochs=1), Distill(**less), Distill(**less)), tmp_path, rounds=1)
    (line,) = lines_of(tmp_path)
    assert "fuse_above" in str(line)


# ---- when something is wrong -----------------------------------------------------------------------


def test_more_groups_than_clients(tmp_path):
    with pytest.raises(ConfigError, match=r"method.groups = 6: there are only 5 clients"):
        mixed(tmp_path).run(dataclasses.replace(METHOD, groups=6))


def test_logits_need_distillation_and_the_same_samples(tmp_path):
    with pytest.raises(ConfigError, match=r"above.steps = 0"):
        Hierarchical(above=NONE, exchange="logits")
    world = mixed(tmp_path)
    world.server.public.fresh = True
    with pytest.raises(ConfigError, match=r"leave out public.fresh"):
        world.run(dataclasses.replace(METHOD, exchange="logits"))


@pytest.mark.parametrize(
    ("fusion", "above", "public"), [(FUSION, NONE, "server"), (NONE, ABOVE, "server"), (NONE, NONE, "none")]
)
def test_public_samples_are_needed_where_anything_is_distilled(fusion, above, public):
    assert Hierarchical(LOCAL, fusion, above).traits().public == public


def test_a_spoiled_upload_costs_one_client(tmp_path):
    world = mixed(tmp_path)
    ask = world.fed.map

    def huge(*args, **payload):
        replies = ask(*args, **payload)
        for t in replies["c1"].weights.values():
            t.mul_(torch.tensor(1e38))
        return replies

    world.fed.map = huge
    end = world.run(METHOD)[-1]
    assert [f["client"] for f in world.fed.failures] == ["c1"]
    assert all(torch.isfinite(t).all() for w in end.fused.values() for t in w.values())
