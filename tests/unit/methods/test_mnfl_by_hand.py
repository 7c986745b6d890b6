"""MNFL against its equations in plain numpy and torch: whole rounds, both reductions, some clients absent, eq. (4)."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mnfl_by_hand as by_hand
from public_toys import Exchange, Known, mixed
from solera.core.task import Data
from solera.method import METHODS
from solera.methods.local import LocalOnly
from solera.methods.mnfl import MNFL, MNFLCode
from solera.methods.mnflparam import MNFLParameters
from solera.methods.simpfl import SimPFL
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import small, toy_for
from solera.testing.contracts import _federation
from solera.train.fitting import Local
from solera.train.similarity import Coefficients
from toys import World, images, mlp

SIZES = (5, 12, 9, 20, 7)
CLIENTS = [f"c{i}" for i in range(5)]
WHOLE = Local(epochs=3, batch=64, lr=0.1)  # all samples in one minibatch: their order does not matter
ALL = Local(epochs=2, batch=64, lr=0.1)
T = 2.0
UNIFORM = np.full((5, 5), 0.2)


def descend(model, inputs, loss_of, epochs, lr=0.1):
    """Plain gradient descent on all samples."""
    model.train()
    for _ in range(epochs):
        model.zero_grad()
        loss_of(model(inputs)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
    return model.eval()


def trained_by_hand(world, k):
    model, data = (
        world.server.model(world.fed.architecture(k), world.server.init(world.fed.architecture(k))),
        world.data[k],
    )
    return descend(model, data.inputs, lambda z: F.cross_entropy(z, data.labels), WHOLE.epochs)


def predicted_by_hand(model, inputs):
    with torch.no_grad():
        return (model(inputs).double() / T).softmax(-1).numpy()


def loss_by_hand(model, data):
    with torch.no_grad():
        return float(-model(data.inputs).double().log_softmax(-1)[range(len(data.labels)), data.labels].mean())


def near(c, expected, atol=2e-5):
    return np.allclose(np.asarray(c), expected, rtol=0, atol=atol)


# ---- whole rounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"c_reduction": "mean"}, {"c_batch": 11}, {"c_reduction": "mean", "c_batch": 11}]
)
def test_a_round_of_mnfl(tmp_path, settings):
    world = mixed(tmp_path)
    method = MNFL(WHOLE, ALL, temperature=T, **settings)
    end = world.run(method)[-1]
    x = world.server.public.inputs
    models = [trained_by_hand(world, k) for k in CLIENTS]  # eq. (5)
    s = np.stack([predicted_by_hand(m, x) for m in models])
    rows = method.batch(len(x), world.fed).numpy()
    assert len(set(rows)) == min(len(x), settings.get("c_batch", 256))
    of = by_hand.divergence(s[:, rows], settings.get("c_reduction", "sum"))
    c = by_hand.learned(UNIFORM, of, np.array(SIZES), 5, lr=0.01, rho=0.7)  # eq. (7), with the paper's settings
    assert near(end.c, c)
    private = [loss_by_hand(m, world.data[k]) for m, k in zip(models, CLIENTS, strict=True)]
    target = torch.from_numpy(s.mean(0)).float()  # eq. (2) with c = 1/N
    for k, model in zip(CLIENTS, models, strict=True):  # eq. (6)
        descend(model, x, lambda z: (target * (target.log() - (z / T).log_softmax(-1))).sum(-1).mean(), ALL.epochs)
        mine = world.server.model(world.fed.architecture(k), world.model(k))
        assert torch.allclose(mine(x), model(x), rtol=0, atol=2e-4)

    (told,) = world.events("objective")  # eq. (4)
    D = np.array(SIZES)
    assert told["private"] == pytest.approx((D / D.sum()) @ private, rel=1e-4)
    for name, matrix in {"learned": c, "own": np.eye(5), "uniform": UNIFORM}.items():
        collaborative = sum(D[n] / D.sum() * of(matrix[:, n], n) for n in range(5))
        assert told["ensemble_loss"][name] == pytest.approx(collaborative, rel=1e-3, abs=1e-6)
        pull = 0.7 * ((matrix - 0.2) ** 2).sum()
        assert told["ensemble_objective"][name] == pytest.approx(collaborative + pull, rel=1e-3)
    assert told["collaborative"] == told["ensemble_loss"]["learned"]
    assert told["pull"] == pytest.approx(0.7 * ((c - 0.2) ** 2).sum(), rel=1e-2, abs=1e-6)
    assert told["total"] == pytest.approx(told["private"] + told["collaborative"] + told["pull"])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_round_of_the_parameter_version(tmp_path, reduction):
    parties = [("m", Data(*images(n, n))) for n in SIZES]
    world = World(tmp_path, {"m": lambda: mlp(1)}, parties)
    end = world.run(MNFLParameters(WHOLE, c_reduction=reduction))[-1]
    models = [trained_by_hand(world, k) for k in CLIENTS]
    v = np.stack([torch.cat([p.detach().flatten() for p in m.parameters()]).double().numpy() for m in models])
    of = by_hand.distance(v, reduction)
    c = by_hand.learned(UNIFORM, of, np.array(SIZES), 5, lr=0.01, rho=0.7)
    assert near(end.c, c, 1e-7)
    moved = np.abs(c - UNIFORM).max()
    assert moved > 1e-4 if reduction == "sum" else moved < 1e-6  # "mean" at the paper's rate: FedAvg
    (told,) = world.events("objective")
    D = np.array(SIZES)
    assert told["private"] == pytest.approx(
        sum(d / D.sum() * loss_by_hand(m, world.data[k]) for d, m, k in zip(D, models, CLIENTS, strict=True)), rel=1e-4
    )
    assert told["ensemble_loss"]["uniform"] == pytest.approx(
        sum(D[n] / D.sum() * of(UNIFORM[:, n], n) for n in range(5)), rel=1e-4
    )


@pytest.mark.parametrize("version", ["predictions", "parameters"])
def test_with_some_absent(tmp_path, version):
    """D is the samples of those present, and the gradient is that of the mixture c_mn / (their mass)."""
    here, c = [0, 2, 4], np.random.default_rng(3).dirichlet(np.ones(5), 5).T
    if version == "predictions":
        world, method, state = mixed(tmp_path), MNFL(WHOLE, ALL, temperature=T), MNFL.State(torch.from_numpy(c))
    else:
        world = World(tmp_path, {"m": lambda: mlp(1)}, [("m", Data(*images(n, n))) for n in SIZES])
        method, state = MNFLParameters(WHOLE), MNFLParameters.State(torch.from_numpy(c), {})
    world.fed.config = dataclasses.replace(world.fed.config, fraction=0.6)
    world.fed.sample = lambda: [CLIENTS[i] for i in here]
    end = world.run(method, state=state)[-1]
    models = [trained_by_hand(world, CLIENTS[i]) for i in here]
    if version == "predictions":
        of = by_hand.divergence(np.stack([predicted_by_hand(m, world.server.public.inputs) for m in models]))
    else:
        of = by_hand.distance(
            np.stack([torch.cat([p.detach().flatten() for p in m.parameters()]).double().numpy() for m in models])
        )
    expected = c.copy()
    expected[np.ix_(here, here)] = by_hand.learned(
        c[np.ix_(here, here)], of, np.array(SIZES)[here], 5, lr=0.01, rho=0.7
    )
    assert near(end.c, expected)
    assert np.abs(expected - c).max() > 1e-3


def test_the_batch_of_the_coefficients_is_drawn_anew_each_round(tmp_path):
    world, method = mixed(tmp_path), MNFL(c_batch=7)
    seen = []
    for t in range(3):
        world.fed.begin(t)
        rows = method.batch(40, world.fed).tolist()
        assert rows == method.batch(40, world.fed).tolist() == sorted(set(rows))
        assert len(rows) == 7
        assert 0 <= min(rows) < max(rows) < 40
        seen.append(tuple(rows))
    assert len(set(seen)) == 3
    with pytest.raises(ValueError, match="c_batch"):
        MNFL(c_batch=0)


# ---- with the defaults it learns --------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "least"), [({}, 0.51), ({"temperature": 1.0}, 0.75)])
def test_with_the_defaults_two_groups_of_clients_find_themselves(tmp_path, settings, least):
    """Clients 0 to 2 know classes 0 and 1, the others 2 and 3: the matrix goes from uniform towards two blocks."""
    x, y = images(600, seed=1)
    parties = [("m", Data(x[y // 2 == half][i::3], y[y // 2 == half][i::3])) for half in (0, 1) for i in range(3)]
    world = Exchange(tmp_path, {"m": lambda: mlp(1)}, parties, public=Known(images(300, seed=3)[0]))
    own = []
    for state in world.run(MNFL(**settings), 4):
        c = state.c.numpy()
        assert near(c.sum(0), np.ones(6), 1e-12)
        own.append(np.mean([c[:3, :3].sum(0), c[3:, 3:].sum(0)]))
    assert own[0] == pytest.approx(0.5)
    assert all(b > a for a, b in itertools.pairwise(own[:4])), own  # then it is almost all
    assert own[-1] > least, own


# ---- the best coefficients --------------------------------------------------------------------------


def test_the_objective_names_what_the_coefficients_are_worth(tmp_path):
    """Theorem 4.1 and remark 4.1: the best mixture is no worse than oneself alone, and no worse than the average."""
    world = mixed(tmp_path)
    method = MNFL(WHOLE, ALL, temperature=T)
    state = method.init(world.fed, world.server)
    for t in range(3):
        world.fed.begin(t)
        world.server.begin()
        state = method.round(state, world.fed, world.server)
        (told,) = world.events("objective")
        of = told["ensemble_objective"]
        assert of["optimal"] <= min(of["learned"], of["own"], of["uniform"])
        assert told["ensemble_loss"]["own"] == pytest.approx(0, abs=1e-9)
        if t:
            assert of["optimal"] <= of["learned"] < of["uniform"]
        json.dumps(told, allow_nan=False)


def test_an_endless_pull_has_no_objective_and_many_clients_one_in_ten_rounds(tmp_path, monkeypatch):
    world = mixed(tmp_path)
    world.run(MNFL(WHOLE, ALL, coefficients=Coefficients(rho=float("inf"))))
    assert not world.events("objective")
    monkeypatch.setattr("solera.methods.steps.coefficients.SEARCHED_CLIENTS", 4)
    noted = []
    for t in range(11):
        world.fed.begin(t)
        world.server.begin()
        MNFL(Local(epochs=0), Local(epochs=0)).round(
            MNFL.State(torch.full((5, 5), 0.2).double()), world.fed, world.server
        )
        noted += [t] * len(world.events("objective"))
    assert noted == [0, 10]


# ---- what is measured -------------------------------------------------------------------------------


def lines(home):
    return [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", [MNFL, SimPFL])
def test_own_models_are_scored_after_training_and_after_distilling(tmp_path, method):
    """After the first training every client is where local training alone would have it."""
    local = Local(epochs=2, batch=16)
    for name, m in {
        "taught": method(local, Local(epochs=5, lr=0.5), temperature=1.0),
        "alone": LocalOnly(local),
    }.items():
        simulate(toy_for(m), m, tmp_path / name, RunConfig(rounds=2))
    taught, alone = lines(tmp_path / "taught"), lines(tmp_path / "alone")
    stages = taught[0]["personal_stages"]
    assert list(stages) == ["after_training", "after_distilling"]
    assert {k: stages["after_training"][k] for k in alone[0]["personal"]} == pytest.approx(alone[0]["personal"])
    assert stages["after_distilling"] == taught[0]["personal"] != stages["after_training"]
    assert "personal_stages" not in alone[0]
    summary = json.loads((tmp_path / "taught" / "summary.json").read_text())
    assert summary["personal_stages"] == taught[-1]["personal_stages"]


def test_in_the_order_of_the_code_they_are_scored_after_distilling_first(tmp_path):
    """Newcomers train one epoch, distil, and train: without the last, both scores are the same."""
    for name, epochs in {"trained": 3, "not": 0}.items():
        m = MNFLCode(Local(epochs=epochs, batch=16, lr=0.5), Local(epochs=1))
        simulate(toy_for(m), m, tmp_path / name, RunConfig(rounds=1))
    stages = {name: lines(tmp_path / name)[0]["personal_stages"] for name in ("trained", "not")}
    assert all(list(s) == ["after_distilling", "after_training"] for s in stages.values())
    assert stages["not"]["after_distilling"] == stages["not"]["after_training"]
    assert stages["trained"]["after_distilling"] == stages["not"]["after_distilling"]
    assert stages["trained"]["after_distilling"] != stages["trained"]["after_training"]
    assert stages["trained"]["after_training"] == lines(tmp_path / "trained")[0]["personal"]


@pytest.mark.parametrize(
    "name", [n for n, cls in METHODS.items() if cls().traits().personal and cls.__module__.startswith("solera.")]
)
def test_own_models_are_judged_on_the_test_split(tmp_path, name):
    """Every method with a model for each client: as many answers are counted as the client's test split has samples."""
    method = small(METHODS[name]())
    scenario = toy_for(method)
    fed = _federation(scenario, tmp_path)
    fed.begin(0)
    state = method.round(method.init(fed, scenario.server), fed, scenario.server)
    asked = method.personal(state, fed)
    scores = fed.map(asked.task, list(fed.clients), **asked.payload)
    clients = {k: scenario.client(k, 0, {}) for k in scores}
    assert {k: s.total for k, s in scores.items()} == {k: len(c.test) for k, c in clients.items()}
    assert all(len(c.test) not in (0, len(c.train)) for c in clients.values())


def test_what_a_client_says_of_itself_is_of_its_private_and_its_test_samples(tmp_path):
    """Its loss is that of the training split, its score that of the test split."""
    world = mixed(tmp_path)
    other = Data(*images(31, seed=77))
    client = world.client

    def with_test_split(k, seed, state, place=None):
        c = client(k, seed, state)
        c.test = other
        return c

    world.client = with_test_split
    world.run(MNFL(WHOLE, ALL, temperature=T))
    scores, private = world.server.stages["after_training"], 0.0
    for k, size in zip(CLIENTS, SIZES, strict=True):
        model = trained_by_hand(world, k)
        private += size / sum(SIZES) * loss_by_hand(model, world.data[k])
        assert scores[k].total == 31
        assert scores[k].correct == int((model(other.inputs).argmax(-1) == other.labels).sum())
    assert world.events("objective")[0]["private"] == pytest.approx(private, rel=1e-4)
