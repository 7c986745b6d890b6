"""FedAvg with fine-tuning: FedAvg to the bit, then personal models; the head alone; near the common model's answers."""

import dataclasses

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.methods.fedavg import FedAvg
from solera.methods.fedavgft import FedAvgFT
from solera.methods.steps.personal import score_tuned
from solera.models import wrap
from solera.testing import check_method, run_toy, wide
from solera.train.distill import kd_loss
from solera.train.fitting import Local, evaluate, fit, logits_of
from toys import Conv, World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
CLIENTS = [f"c{i}" for i in range(5)]


def mixed(tmp, sizes=SIZES, head="plain", **options) -> World:
    """Five clients of different sizes, two split architectures, one of them with BatchNorm and dropout."""
    builders = {
        "c": lambda: wrap(Conv(0, dropout=0.2), classifier="8", head=head),
        "m": lambda: wrap(mlp(1), classifier="3", head=head),
    }
    return World(tmp, builders, [(P, Data(*images(n, n))) for n, P in zip(sizes, KINDS, strict=True)], **options)


def own(world: World, k: str) -> dict:
    return kept_by(world.fed, k)["model"]


def finished(world: World, method: FedAvgFT, rounds: int = 1):
    return method.finish(world.run(method, rounds)[-1], world.fed, world.server)


def scored(world: World, method: FedAvgFT, state) -> dict:
    return world.fed.map(score_tuned, CLIENTS, **method.personal(state, world.fed).payload)


def test_it_is_fedavg_and_then_fine_tuning(tmp_path):
    a, b = mixed(tmp_path / "a", fraction=0.6), mixed(tmp_path / "b", fraction=0.6)
    method = FedAvgFT(LOCAL, tune_epochs=3)
    states = a.run(method, 2)
    plain = b.run(FedAvg(LOCAL), 2)
    assert [digest(s.weights) for s in states] == [digest(s.weights) for s in plain]
    seen = len(a.seeds)
    end = method.finish(states[-1], a.fed, a.server)
    assert (end.tuned, states[-1].tuned) == (True, False)
    assert digest(end.weights) == digest(plain[-1].weights)  # the common model is unchanged
    model = a.server.model("m", end.weights["m"])
    fit(model, a.data["c1"].inputs, a.data["c1"].labels, dataclasses.replace(LOCAL, epochs=3), a.seeds[seen + 1])
    assert same_bits(own(a, "c1"), weights_of(model))
    assert scored(a, method, end)["c1"] == evaluate(model, a.data["c1"].inputs, a.data["c1"].labels)


def test_without_epochs_it_is_fedavg_judged_by_each_client(tmp_path):
    world = mixed(tmp_path)
    method = FedAvgFT(LOCAL, tune_epochs=0)
    end = finished(world, method)
    for k in CLIENTS:
        P, data = world.fed.architecture(k), world.data[k]
        assert same_bits(own(world, k), end.weights[P])
        assert scored(world, method, end)[k] == evaluate(
            world.server.model(P, end.weights[P]), data.inputs, data.labels
        )


def test_the_number_of_local_steps_does_not_limit_fine_tuning():
    assert FedAvgFT(Local(steps=1, batch=8)).tuning.local == Local(epochs=5, steps=None, batch=8)


@pytest.mark.parametrize("how", [{}, {"freeze_base": True}, {"kd": 1.0}, {"freeze_base": True, "kd": 1.0}])
def test_a_client_without_examples_keeps_the_common_model(tmp_path, how):
    world = mixed(tmp_path, sizes=(5, 12, 0, 20, 7))
    end = finished(world, FedAvgFT(LOCAL, **how))
    assert same_bits(own(world, "c2"), end.weights["c"])
    assert not same_bits(own(world, "c0"), end.weights["c"])


@pytest.mark.parametrize("how", [{}, {"freeze_base": True}, {"kd": 1.0}])
def test_a_client_whose_fine_tuning_blows_up_is_dropped_and_named(tmp_path, how):
    world = mixed(tmp_path)
    world.data["c1"] = Data(world.data["c1"].inputs * 1e30, world.data["c1"].labels)
    method = FedAvgFT(LOCAL, **how)
    state = FedAvgFT.State({P: world.server.init(P) for P in "cm"}, False)
    end = method.finish(state, world.fed, world.server)
    assert [f["client"] for f in world.fed.failures] == ["c1"]
    assert "training diverged" in world.fed.failures[0]["reason"]
    assert set(scored(world, method, end)) == set(CLIENTS) - {"c1"}


@pytest.mark.parametrize("head", ["plain", "shared", "projection"])
@pytest.mark.parametrize("kd", [0.0, 1.0])
def test_freeze_base_trains_the_head_and_nothing_else(tmp_path, head, kd):
    """Statistics included: a base that is frozen in name only would follow the client's samples with its BatchNorm."""
    world = mixed(tmp_path, head=head)
    end = finished(world, FedAvgFT(LOCAL, freeze_base=True, kd=kd))
    for k in CLIENTS:
        before, after = end.weights[world.fed.architecture(k)], own(world, k)
        changed = {n for n in before if not torch.equal(before[n], after[n])}
        assert changed == {n for n in before if n.startswith("head.")}


def test_a_frozen_base_gives_the_head_what_a_whole_model_would(tmp_path):
    """Without BatchNorm and dropout: the same as training the whole model with the gradient of the base left out."""
    world = mixed(tmp_path)
    method = FedAvgFT(LOCAL, freeze_base=True)
    state = world.run(method)[-1]
    seen = len(world.seeds)
    method.finish(state, world.fed, world.server)
    model = world.server.model("m", state.weights["m"])
    for p in model.body.parameters():
        p.requires_grad_(False)
    data, tuning = world.data["c1"], dataclasses.replace(LOCAL, epochs=5)
    fit(model, data.inputs, data.labels, tuning, world.seeds[seen + 1])
    assert all(torch.allclose(t, own(world, "c1")[n], atol=1e-6) for n, t in weights_of(model).items())


def test_kd_keeps_the_answers_near_those_of_the_common_model(tmp_path):
    def distance(kd: float) -> float:
        world = mixed(tmp_path / str(kd))
        method = FedAvgFT(Local(epochs=2, batch=8, lr=0.1), tune_epochs=20, kd=kd)
        end = finished(world, method)
        x = images(40, 9)[0]
        models = [world.server.model("m", w) for w in (end.weights["m"], own(world, "c3"))]
        return kd_loss(logits_of(models[1], x), logits_of(models[0], x)).item()

    none, some, much = (distance(kd) for kd in (0.0, 1.0, 10.0))
    assert none > 2 * some > 4 * much > 0


def test_kd_is_the_stated_loss(tmp_path):
    """One full-batch step by hand: the pull is zero there; and a second one, where it is not."""
    world = mixed(tmp_path)
    method = FedAvgFT(Local(epochs=1, batch=64, lr=0.5), tune_epochs=2, kd=3.0)
    end = finished(world, method)
    data = world.data["c1"]
    model, common = (world.server.model("m", end.weights["m"]) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        p, log_q = common(data.inputs).softmax(-1).detach(), model(data.inputs).log_softmax(-1)
        ce = -log_q[torch.arange(len(data)), data.labels].mean()
        loss = ce + 3.0 * (p * (p.log() - log_q)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(torch.allclose(t, own(world, "c1")[n], atol=1e-5) for n, t in weights_of(model).items())


def test_before_the_end_a_copy_is_judged_and_dropped(tmp_path):
    world = mixed(tmp_path)
    method = FedAvgFT(Local(epochs=1, batch=8, lr=0.1), tune_epochs=30)
    state = world.run(method)[-1]
    tuned = scored(world, method, state)
    assert kept_by(world.fed, "c0") == {}
    plain = scored(world, dataclasses.replace(method, tune_epochs=0), state)
    assert sum(s.correct for s in tuned.values()) > sum(s.correct for s in plain.values())


def test_the_wire_is_that_of_fedavg_and_a_model_down_at_the_end(tmp_path):
    world = mixed(tmp_path)
    finished(world, FedAvgFT(LOCAL))
    d = {P: sum(t.numel() for t in world.server.init(P).values() if t.is_floating_point()) for P in "cm"}
    total = sum(d[P] for P in KINDS)
    down, up = ({name: t.floats for name, t in way.items()} for way in (world.fed.down, world.fed.up))
    assert down == {"local_update": total, "fine_tune": total}
    assert up == {"local_update": total, "fine_tune": 0}


def test_it_learns_models_that_suit_their_clients(tmp_path):
    """Two groups of clients with contrary labels: no common model can serve both."""
    x, y = images(400, seed=2)
    parts = [Data(x[i::4], y[i::4] if i < 2 else 3 - y[i::4]) for i in range(4)]
    world = World(tmp_path, {"m": lambda: mlp(1)}, [("m", d) for d in parts])
    method = FedAvgFT(Local(epochs=3, batch=20, lr=0.1), tune_epochs=10)
    end = finished(world, method, 3)
    personal = world.fed.map(score_tuned, list(world.fed.clients), **method.personal(end, world.fed).payload)
    common = dataclasses.replace(method, tune_epochs=0).personal(FedAvgFT.State(end.weights, False), world.fed).payload
    plain = world.fed.map(score_tuned, list(world.fed.clients), **common)
    assert min(s.accuracy for s in personal.values()) > 0.85
    assert max(s.accuracy for s in plain.values()) < 0.8


def test_the_summary_has_both(tmp_path):
    summary = run_toy(FedAvgFT(Local(epochs=3, batch=16, lr=0.1)), tmp_path, rounds=4).summary
    assert set(summary["models"]) == {"wide", "deep"}
    assert summary["personal"]["mean"] > 0.8


def test_variants_keep_the_contract_of_a_method(tmp_path):
    check_method(FedAvgFT(freeze_base=True, kd=0.5, average="uniform"), tmp_path, engines=())


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tune_epochs = -1"):
        FedAvgFT(tune_epochs=-1)
    with pytest.raises(ConfigError, match="kd = -1"):
        FedAvgFT(kd=-1.0)
    assert FedAvgFT().traits().split == "none"
    with pytest.raises(ConfigError, match="'fedavgft' needs models made of a body, an adapter and a head"):
        run_toy(FedAvgFT(LOCAL, freeze_base=True), tmp_path, models={"wide": wide})
