"""FD: tables of labels go round, nobody is taught by itself, and without a teacher it is local training."""

import dataclasses

import pytest
import torch

from public_toys import CLIENTS, mixed, spoil
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import WireError, decode, encode
from solera.methods.fd import FD, LabelTable, label_loss, train_and_report
from solera.methods.local import LocalOnly
from solera.testing import check_method, run_toy
from solera.train.fitting import Diverged, Local, fit, logits_of
from toys import same_bits

LOCAL = Local(steps=6, batch=8, lr=0.05)
METHOD = FD(LOCAL, gamma=0.5)
C = 4


def trained(world, k, seed, weights=None, teacher=None):
    """Client k's model after its local steps, and its outputs by label, by hand."""
    P = world.fed.architecture(k)
    model = world.server.model(P, world.server.init(P) if weights is None else weights)
    teacher = torch.zeros(C, C) if teacher is None else teacher
    outputs: dict[int, list[torch.Tensor]] = {}

    def objective(m, x, y):
        z = m(x)
        for label, p in zip(y.tolist(), z.detach().softmax(-1), strict=True):
            outputs.setdefault(label, []).append(p.double())
        return label_loss(z, y, teacher, 0.5)

    fit(model, world.data[k].inputs, world.data[k].labels, LOCAL, seed, objective)
    return weights_of(model), {label: torch.stack(p).mean(0) for label, p in outputs.items()}


def mean_of_others(reported, k):
    """The teacher of client k by hand: label by label, over those of the others that hold it."""
    table = torch.zeros(C, C, dtype=torch.float64)
    for label in range(C):
        if rows := [means[label] for j, means in reported.items() if j != k and label in means]:
            table[label] = torch.stack(rows).mean(0)
    return table


def test_two_rounds_by_hand(tmp_path):
    world = mixed(tmp_path)
    world.run(METHOD, 1)
    models, reported = {}, {}
    for k, seed in zip(CLIENTS, world.seeds[:5], strict=True):
        models[k], reported[k] = trained(world, k, seed)
        assert same_bits(world.model(k), models[k])
    for k in CLIENTS:
        assert torch.allclose(world.kept(k)["teacher"]["rows"].double(), mean_of_others(reported, k), atol=1e-6)
    teachers = {k: world.kept(k)["teacher"]["rows"] for k in CLIENTS}
    world.run(METHOD, 2)
    for k, seed in zip(CLIENTS, world.seeds[20:25], strict=True):
        assert same_bits(world.model(k), trained(world, k, seed, models[k], teachers[k])[0])


def test_the_state_is_what_all_said_on_average(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(METHOD)
    reported = {k: trained(world, k, seed)[1] for k, seed in zip(CLIENTS, world.seeds[:5], strict=True)}
    assert not start.table.any()
    assert torch.allclose(end.table.double(), mean_of_others(reported, "nobody"), atol=1e-6)


@pytest.mark.parametrize(("gamma", "rounds"), [(0.0, 3), (0.5, 1)])
def test_without_weight_and_in_the_first_round_it_is_local_training_to_the_bit(tmp_path, gamma, rounds):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    a.run(FD(LOCAL, gamma), rounds)
    b.run(LocalOnly(LOCAL), rounds)
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)


def test_regression_nobody_is_taught_by_its_own_outputs(tmp_path):
    """Another library averages a device's own outputs into its teacher."""
    world = mixed(tmp_path)
    own = images_of_class(world, "c3", 2)
    world.data = {k: own if k == "c3" else images_of_class(world, k, 1) for k in CLIENTS}
    world.run(METHOD)
    assert not world.kept("c3")["teacher"]["rows"][2].any()  # nobody else holds class 2
    assert world.kept("c0")["teacher"]["rows"][2].any()
    assert world.kept("c0")["teacher"]["rows"][1].any()


def images_of_class(world, k, label) -> Data:
    data = world.data[k]
    return Data(data.inputs, torch.full_like(data.labels, label))


def test_regression_soft_labels_are_probabilities_not_logits(tmp_path):
    """Another library hands raw logits to the cross-entropy as soft labels."""
    world = mixed(tmp_path)
    world.run(METHOD, 2)
    for k in CLIENTS:
        rows = world.kept(k)["teacher"]["rows"]
        sums = rows.sum(-1)
        assert bool((rows >= 0).all())
        assert bool((((sums - 1).abs() < 1e-6) | (sums == 0)).all())
    with pytest.raises(WireError, match="neither probabilities nor zeros"):
        decode(encode({"rows": torch.full((C, C), 2.0)}), LabelTable, {"classes": C})


def test_outputs_can_be_those_of_the_trained_model(tmp_path):
    world = mixed(tmp_path)
    world.run(dataclasses.replace(METHOD, final_pass=True))
    reported = {}
    for k in CLIENTS:
        model, data = world.server.model(world.fed.architecture(k), world.model(k)), world.data[k]
        p = logits_of(model, data.inputs).softmax(-1).double()
        reported[k] = {int(y): p[data.labels == y].mean(0) for y in data.labels.unique()}
    for k in CLIENTS:
        assert torch.allclose(world.kept(k)["teacher"]["rows"].double(), mean_of_others(reported, k), atol=1e-6)


def test_a_table_goes_up_and_one_comes_down_whatever_the_models(tmp_path):
    world = mixed(tmp_path)
    world.run(METHOD)
    up, down = world.fed.up, world.fed.down
    numbers = {name: (t.floats, t.integers) for name, t in up.items()}
    assert numbers == {"train_and_report": (5 * C * C, 0), "take_others": (0, 0)}
    numbers = {name: (t.floats, t.integers) for name, t in down.items()}
    assert numbers == {"train_and_report": (0, 0), "take_others": (5 * C * C, 0)}
    assert world.fed.verbs == {"mean"}


def test_who_is_absent_keeps_its_model_and_its_table(tmp_path):
    world = mixed(tmp_path)
    state = world.run(METHOD)[-1]
    before = world.kept("c1")
    world.fed.sample = lambda: ["c0", "c2", "c3"]
    world.fed.begin(1)
    METHOD.round(state, world.fed, world.server)
    assert all(same_bits(world.kept("c1")[part], before[part]) for part in before)
    assert set(world.kept("c0")) == {"model", "teacher"}  # what it reported is not kept


def test_a_client_drawn_twice_counts_twice_but_not_for_itself(tmp_path):
    world = mixed(tmp_path)
    world.fed.config = FederationConfig(sampling="size", replacement=True)
    world.run(METHOD)
    copies = dict(world.fed.copies)
    assert max(copies.values()) > 1 < len(copies)
    seeds = dict(zip(sorted(copies), world.seeds, strict=False))
    reported = {k: trained(world, k, seeds[k])[1] for k in copies}
    for k in copies:
        several = {(j, i): reported[j] for j in copies for i in range(copies[j]) if j != k}
        found = world.kept(k)["teacher"]["rows"].double()
        assert torch.allclose(found, mean_of_others(several, k), atol=1e-6)


@pytest.mark.parametrize("lie", [lambda t: t[:1], lambda t: t * 1e6, lambda t: -t, lambda t: t.double()])
def test_a_bad_table_costs_a_client_its_seat_and_nothing_else(tmp_path, lie):
    world = mixed(tmp_path / "a")
    spoil(world, "c3", "train_and_report", lie)
    end = world.run(METHOD)[-1]
    assert [f["client"] for f in world.fed.failures] == ["c3"]
    other = mixed(tmp_path / "b")
    other.fed.sample = lambda: [k for k in CLIENTS if k != "c3"]
    assert torch.equal(end.table, other.run(METHOD)[-1].table)
    assert "teacher" not in world.kept("c3")


def test_a_client_whose_training_blows_up_keeps_its_model(tmp_path):
    world = mixed(tmp_path)
    state = world.run(METHOD)[-1]
    before = world.model("c1")
    world.data["c1"] = Data(torch.full_like(world.data["c1"].inputs, 1e38), world.data["c1"].labels)
    world.fed.begin(1)
    METHOD.round(state, world.fed, world.server)
    assert [f["client"] for f in world.fed.failures] == ["c1"]
    assert "training diverged" in world.fed.failures[0]["reason"]
    assert same_bits(world.model("c1"), before)


def test_a_model_whose_outputs_are_not_finite_is_not_kept(tmp_path):
    world = mixed(tmp_path)
    huge = {n: t * 3e38 for n, t in world.server.init("m").items()}
    how = {"local": Local(epochs=0), "gamma": 0.5, "classes": C}
    with pytest.raises(Diverged, match="predictions that are not finite"):
        train_and_report(world.client("c1", 0, {"model": huge}), final_pass=True, **how)


def test_it_learns(tmp_path):
    found = run_toy(FD(Local(steps=20, batch=16)), tmp_path, rounds=4)
    assert found.summary["personal"]["mean"] > 0.85  # three classes
    assert found.models == {}


def test_the_others_tables_are_followed(tmp_path):
    """With a large weight the outputs of all clients for a label come closer to each other."""
    spread = {}
    for gamma in (0.0, 2.0):
        world = mixed(tmp_path / str(gamma))
        world.run(FD(Local(steps=30, batch=8, lr=0.05), gamma, final_pass=True), 4)
        tables = torch.stack([world.kept(k)["teacher"]["rows"] for k in CLIENTS])
        spread[gamma] = tables.std(0).mean().item()
    assert spread[2.0] < 0.8 * spread[0.0]


def test_a_federation_of_one_has_no_teacher(tmp_path):
    world = mixed(tmp_path)
    world.fed.sample = lambda: ["c3"]
    world.run(METHOD, 2)
    assert not world.kept("c3")["teacher"]["rows"].any()


@pytest.mark.parametrize("gamma", [-0.1, float("inf"), float("nan")])
def test_impossible_weights_are_refused(gamma):
    with pytest.raises(ConfigError, match="gamma"):
        FD(gamma=gamma)


def test_the_variant_keeps_the_contract_of_a_method(tmp_path):
    check_method(FD(gamma=1.0, final_pass=True), tmp_path, engines=())
