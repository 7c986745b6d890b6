"""MNFL, its comparison methods and its parameter version: equal to the equations by hand, calm when things go wrong."""

import dataclasses
import hashlib
import math
from functools import partial

import numpy as np
import pytest
import torch

import mnfl_by_hand as by_hand
from solera.core.errors import ConfigError
from solera.core.federation import QuorumNotMet
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.method import METHODS
from solera.methods.fedavg import FedAvg
from solera.methods.feddf import FedDF
from solera.methods.local import LocalOnly
from solera.methods.mnfl import MNFL, MNFLCode, MNFLTwice
from solera.methods.mnflparam import MNFLParameters
from solera.methods.pfeddf import PFedDF
from solera.methods.simpfl import SimPFL, TopKPFL, cosines
from solera.methods.steps import predictions
from solera.methods.steps.coefficients import uniform_matrix
from solera.methods.steps.personal import score_tuned
from solera.methods.steps.screen import Robust
from solera.methods.steps.teaching import Memory
from solera.runs.config import load_config, recipe_names
from solera.runs.loop import check_server
from solera.testing import check_method
from solera.train.aggregate import weighted_mean
from solera.train.distill import Distill, divergence
from solera.train.fitting import Local, evaluate, fit, logits_of
from solera.train.similarity import Coefficients, by_cosine, by_rank
from solera.train.teachers import entropy
from toys import Conv, Samples, World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
DISTIL = Local(epochs=2, batch=16, lr=0.05)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
CLIENTS = [f"c{i}" for i in range(5)]
SETTINGS = {"local": LOCAL, "distill": DISTIL, "temperature": 2.0}
FAST = Coefficients(lr=0.05, rho=0.1)  # enough for all coefficients to move, and few to reach 0
PUBLIC = 40


class Known(Samples):
    """Public samples that can be compared by their digest."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inputs.numpy().tobytes()).hexdigest()


class Federation(World):
    """A world whose clients hold the public samples too: `held[k]`, where it differs from the server's."""

    def __init__(self, *args, public, **options):
        super().__init__(*args, public=public, **options)
        self.server.public = Known(public)
        self.held = {}

    def client(self, k, seed, state, place=None):
        client = super().client(k, seed, state)
        client.public = self.held.get(k, self.server.public)
        return client

    def model(self, k):
        """The weights client k holds now."""
        return kept_by(self.fed, k)["model"]


def mixed(tmp, sizes=SIZES, **options) -> Federation:
    """Five clients of different sizes, two architectures (one with BatchNorm), 40 public samples."""
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    parties = [(P, Data(*images(n, n))) for n, P in zip(sizes, KINDS, strict=True)]
    return Federation(tmp, builders, parties, public=images(PUBLIC, seed=9)[0], **options)


def trained(world: Federation, k: str, seed: int, weights=None, local=LOCAL):
    P = world.fed.architecture(k)
    model = world.server.model(P, world.server.init(P) if weights is None else weights)
    fit(model, world.data[k].inputs, world.data[k].labels, local, seed)
    return model


def distilled(model, inputs, targets, seed, temperature=2.0):
    def loss(m, x, y):
        return divergence(m(x), y, entropy(y), temperature)

    fit(model, inputs, targets, DISTIL, seed, loss)
    return model


def predicted(model, inputs, temperature=2.0):
    return (logits_of(model, inputs) / temperature).softmax(-1)


def said(s, reduction="sum"):
    return by_hand.divergence(s.double().numpy(), reduction)


def same_matrix(c, expected, digits=7):
    return np.allclose(c.numpy(), expected, rtol=0, atol=10.0**-digits)


# ---- MNFL is its equations --------------------------------------------------------------------------


def test_a_round_is_algorithm_1(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(MNFL(**SETTINGS, coefficients=FAST))
    x, clients = world.server.public.inputs, list(world.fed.clients)
    models = {k: trained(world, k, seed) for k, seed in zip(clients, world.seeds[:5], strict=True)}  # eq. (5)
    s = torch.stack([predicted(m, x) for m in models.values()])
    mean = s.double().sum(0) / 5  # eq. (2) with c_0 = 1/N
    for k, seed in zip(clients, world.seeds[5:], strict=True):
        distilled(models[k], x, mean.float(), seed)  # eq. (6)
        assert same_bits(world.model(k), weights_of(models[k]))
    assert same_matrix(
        end.c, by_hand.learned(start.c.numpy(), said(s), np.array(SIZES), 5, FAST.lr, FAST.rho)
    )  # eq. (7)
    assert torch.equal(start.c, torch.full((5, 5), 0.2, dtype=torch.float64))
    assert not torch.allclose(end.c, start.c, atol=1e-3)


def test_the_second_round_goes_on_with_the_learned_mixtures(tmp_path):
    world = mixed(tmp_path)
    _, c, _ = (state.c for state in world.run(MNFL(**SETTINGS, coefficients=FAST), 2))
    once = mixed(tmp_path / "once")
    once.run(MNFL(**SETTINGS, coefficients=FAST))
    x, clients = world.server.public.inputs, list(world.fed.clients)
    models = {k: trained(world, k, s, once.model(k)) for k, s in zip(clients, world.seeds[10:15], strict=True)}
    s = [{"": predicted(m, x)} for m in models.values()]
    for i, k in enumerate(clients):
        target = weighted_mean(s, (c[:, i] / c[:, i].max()).tolist())[""]
        assert same_bits(world.model(k), weights_of(distilled(models[k], x, target, world.seeds[15 + i])))


def test_after_distillation_predictions_can_be_made_anew(tmp_path):
    world = mixed(tmp_path)
    state = world.run(MNFLTwice(**SETTINGS, coefficients=FAST))[-1]
    x = world.server.public.inputs
    models = [world.server.model(world.fed.architecture(k), world.model(k)) for k in world.fed.clients]
    s = torch.stack([predicted(m, x) for m in models])
    start = np.full((5, 5), 0.2)
    assert same_matrix(state.c, by_hand.learned(start, said(s), np.array(SIZES), 5, FAST.lr, FAST.rho))
    assert world.fed.up["distil_and_predict"].floats == 5 * PUBLIC * 4


def test_the_order_of_the_authors_code(tmp_path):
    """Newcomers train an epoch; then predict, learn c, distil with the new c, and train last."""
    world = mixed(tmp_path)
    state = world.run(MNFLCode(**SETTINGS, coefficients=FAST))[-1]
    x, clients = world.server.public.inputs, list(world.fed.clients)
    one = dataclasses.replace(LOCAL, epochs=1)
    models = {k: trained(world, k, s, local=one) for k, s in zip(clients, world.seeds[:5], strict=True)}
    s = [predicted(m, x) for m in models.values()]
    for i, k in enumerate(clients):
        column = state.c[:, i] / state.c[:, i].max()
        target = weighted_mean([{"": p} for p in s], column.tolist())[""]
        distilled(models[k], x, target, world.seeds[5 + i])
        again = predictions.seed_from(world.seeds[5 + i], "train")
        assert same_bits(world.model(k), weights_of(trained(world, k, again, weights_of(models[k]))))
    assert not torch.allclose(state.c, torch.full((5, 5), 0.2).double(), atol=1e-3)


def test_in_that_order_only_newcomers_train_before_they_predict(tmp_path):
    world = mixed(tmp_path)
    method = MNFLCode(local=Local(epochs=0), distill=Local(epochs=0), temperature=2.0)
    world.run(method, 1)
    before = {k: world.model(k) for k in world.fed.clients}  # one epoch each
    world.run(method, 2)
    assert all(same_bits(world.model(k), before[k]) for k in before)
    assert not same_bits(before["c0"], world.server.init("c"))


def test_epochs_can_grow_by_one_a_round(tmp_path):
    still = Local(epochs=0)
    ends = {}
    for grow in (False, True):
        world = mixed(tmp_path / str(grow))
        world.run(MNFL(local=LOCAL, distill=still, grow_epochs=grow), 2)
        ends[grow] = world.model("c1")
        seeds = world.seeds[1], world.seeds[11]
    model = trained(world, "c1", seeds[0], local=dataclasses.replace(LOCAL, epochs=1))
    assert same_bits(ends[True], weights_of(trained(world, "c1", seeds[1], weights_of(model))))
    assert not same_bits(ends[True], ends[False])


def test_the_loss_of_the_authors_code_weighs_clients_equally(tmp_path):
    """mean (s_bar - s_n)^2 + rho mean (c_mn - 1/N)^2, without D_n/D."""
    cfg = Coefficients(lr=0.4, rho=0.7, constraint="none", steps=2)
    world, code = mixed(tmp_path), {"c_loss": "mse", "c_reduction": "mean"}
    state = world.run(MNFL(local=LOCAL, distill=Local(epochs=0), temperature=1.0, coefficients=cfg, **code))[-1]
    x = world.server.public.inputs
    s = torch.stack([predicted(trained(world, k, seed), x, 1.0) for k, seed in zip(CLIENTS, world.seeds, strict=False)])
    c = torch.full((5, 5), 0.2, dtype=torch.float64)
    for _ in range(2):
        c = c.requires_grad_()
        mixture = torch.einsum("mn,mrj->nrj", c, s.double())
        loss = (mixture - s.double()).square().mean((1, 2)).sum() + 0.7 * (c - 0.2).square().mean(0).sum()
        c = (c - 0.4 * torch.autograd.grad(loss, c)[0]).detach()
    assert torch.allclose(state.c, c, rtol=0, atol=1e-12)


CODE = Coefficients(auto_lr=True, constraint="softmax5")


@pytest.mark.parametrize(
    "method",
    [
        MNFLCode(c_loss="mse", grow_epochs=True, coefficients=CODE),
        MNFLTwice(coefficients=Coefficients(constraint="none")),
    ],
    ids=["code", "post_distill"],
)
def test_variants_keep_the_contract_of_a_method(tmp_path, method):
    """The defaults are tried on every engine elsewhere."""
    check_method(method, tmp_path, engines=())


# ---- the matrix -------------------------------------------------------------------------------------


def test_columns_sum_to_one_and_move_towards_clients_alike(tmp_path):
    """Clients 0, 1 know classes 0 and 1, clients 2, 3 the others: each pair finds itself."""
    x, y = images(400, seed=1)
    halves = [Data(x[(y // 2) == half], y[(y // 2) == half]) for half in (0, 1)]
    parties = [("m", Data(d.inputs[i::2], d.labels[i::2])) for d in halves for i in (0, 1)]
    world = Federation(tmp_path, {"m": lambda: mlp(1)}, parties, public=images(100, seed=3)[0])
    local = Local(epochs=5, batch=20, lr=0.1)
    cfg = Coefficients(lr=0.5, rho=0.05)
    states = world.run(MNFL(local, DISTIL, coefficients=cfg, temperature=1.0), 3)
    for state in states:
        assert torch.allclose(state.c.sum(0), torch.ones(4).double(), rtol=0, atol=1e-12)
        assert bool((state.c >= 0).all())
    c = states[-1].c
    for n, friend in enumerate((1, 0, 3, 2)):
        strangers = [m for m in range(4) if m not in (n, friend)]
        assert c[n, n] > 0.25 < c[friend, n]
        assert c[strangers, n].max() < 0.15


def test_mn4_without_a_pull_it_reaches_the_identity(tmp_path):
    """Four clients that know a class each."""
    x, y = images(200, seed=1)
    parties = [("m", Data(x[y == c], y[y == c])) for c in range(4)]
    world = Federation(tmp_path, {"m": lambda: mlp(1)}, parties, public=images(PUBLIC, seed=3)[0])
    cfg = Coefficients(lr=1.0, rho=0.0, steps=500)
    alone = MNFL(Local(epochs=3, batch=10, lr=0.05), Local(epochs=0), coefficients=cfg, temperature=1.0)
    end = world.run(alone)[-1]
    assert torch.allclose(end.c, torch.eye(4).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "still", [{"coefficients": Coefficients(lr=0.0)}, {"coefficients": Coefficients(rho=math.inf)}, {"rule": "uniform"}]
)
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_a_uniform_matrix_is_the_plain_average_of_fedmd_to_the_bit(tmp_path, still, fraction):
    world = mixed(tmp_path / "a", fraction=fraction)
    told = []
    original = world.fed.engine.start

    def start(calls):
        told.extend((c.client, c.message.tensors[0]) for c in calls if c.task.endswith("distil_locally"))
        return original(calls)

    world.fed.engine.start = start
    end = world.run(MNFL(**SETTINGS, **still))[-1]
    S = world.fed.sample()
    assert [k for k, _ in told] == S
    assert len(S) == (5 if fraction == 1 else 3)
    x = world.server.public.inputs
    total = sum(predicted(trained(world, k, s), x).double() for k, s in zip(S, world.seeds, strict=False))
    assert all(torch.equal(target, (total / len(S)).float()) for _, target in told)
    uniform = mixed(tmp_path / "b", fraction=fraction)
    assert torch.equal(uniform.run(MNFL(**SETTINGS, rule="uniform"))[-1].c, end.c)
    assert all(same_bits(world.model(k), uniform.model(k)) for k in S)


def test_the_matrix_is_written_down_every_round(tmp_path):
    world = mixed(tmp_path)
    for state in world.run(MNFL(**SETTINGS, coefficients=FAST), 2)[2:]:
        (event,) = world.events("coefficients")
        assert event["clients"] == list(world.fed.clients)
        assert torch.allclose(torch.tensor(event["matrix"]).double(), state.c, atol=6e-7)
        assert all(x == round(x, 6) for row in event["matrix"] for x in row)


def test_large_matrices_are_written_down_every_tenth_round_and_too_large_ones_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("solera.methods.steps.coefficients.NOTED_CLIENTS", 4)
    world = mixed(tmp_path)
    method = MNFL(local=Local(epochs=0), distill=Local(epochs=0))
    state, noted = method.init(world.fed, world.server), []
    for t in range(12):
        world.fed.begin(t)
        world.server.begin()
        state = method.round(state, world.fed, world.server)
        noted += [t] * len(world.events("coefficients"))
    assert noted == [0, 10]
    monkeypatch.setattr("solera.methods.steps.coefficients.MOST_CLIENTS", 4)
    with pytest.raises(ConfigError, match="5 clients have 25 coefficients"):
        uniform_matrix(world.fed)


# ---- who takes part ---------------------------------------------------------------------------------


def test_mn6_only_coefficients_between_participants_change(tmp_path):
    world = mixed(tmp_path)
    world.fed.config = dataclasses.replace(world.fed.config, fraction=0.5)
    world.fed.sample = lambda: ["c0", "c2", "c3"]
    start = world.run(MNFL(**SETTINGS, coefficients=FAST))[-1]
    assert torch.allclose(start.c.sum(0), torch.ones(5).double(), rtol=0, atol=1e-12)
    moved = (start.c - 0.2).abs() > 1e-9
    assert moved.nonzero().tolist() == [[m, n] for m in (0, 2, 3) for n in (0, 2, 3)]
    assert kept_by(world.fed, "c1") == {}
    before = world.model("c0")
    world.fed.sample = lambda: ["c1", "c2"]
    world.fed.begin(1)
    MNFL(**SETTINGS, coefficients=FAST).round(start, world.fed, world.server)
    assert same_bits(world.model("c0"), before)  # the absent keep their models


def test_with_some_absent_a_teacher_is_the_mixture_of_those_present(tmp_path):
    world = mixed(tmp_path)
    c = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)).double()
    c = c / c.sum(0)
    world.fed.config = dataclasses.replace(world.fed.config, fraction=0.5)
    world.fed.sample = lambda: ["c1", "c4"]
    end = world.run(MNFL(**SETTINGS), state=MNFL.State(c))[-1]
    x = world.server.public.inputs
    models = [trained(world, k, s) for k, s in zip(("c1", "c4"), world.seeds, strict=False)]
    s = torch.stack([predicted(m, x) for m in models]).double()
    for i, (k, n) in enumerate((("c1", 1), ("c4", 4))):
        a, b = (c[[1, 4], n] / c[[1, 4], n].sum()).tolist()
        by_hand = distilled(models[i], x, (a * s[0] + b * s[1]).float(), world.seeds[2 + i])
        assert all(torch.allclose(v, world.model(k)[name], atol=1e-5) for name, v in weights_of(by_hand).items())
    assert torch.allclose(end.c.sum(0), torch.ones(5).double(), rtol=0, atol=1e-12)


def test_a_client_without_examples_learns_but_does_not_train(tmp_path):
    world = mixed(tmp_path, sizes=(5, 12, 0, 20, 7))
    end = world.run(MNFL(**SETTINGS, coefficients=FAST))[-1]
    assert not same_bits(world.model("c2"), world.server.init("c"))
    x = world.server.public.inputs
    untrained = predicted(world.server.model("c", world.server.init("c")), x)
    s = [predicted(trained(world, k, z), x) for k, z in zip(CLIENTS, world.seeds, strict=False) if k != "c2"]
    s.insert(2, untrained)
    D, start = np.array([5, 12, 0, 20, 7]), np.full((5, 5), 0.2)
    assert same_matrix(end.c, by_hand.learned(start, said(torch.stack(s)), D, 5, FAST.lr, FAST.rho))
    assert torch.allclose(end.c[:, 2], torch.full((5,), 0.2).double(), rtol=0, atol=1e-8)  # nothing but the pull


def test_a_single_client_teaches_itself(tmp_path):
    world = Federation(tmp_path, {"m": lambda: mlp(1)}, [("m", Data(*images(9)))], public=images(PUBLIC)[0])
    for method in (MNFL(**SETTINGS), SimPFL(**SETTINGS), TopKPFL(**SETTINGS)):
        assert world.run(method)[-1].c.tolist() == [[1.0]]
        alone = weights_of(trained(world, "c0", world.seeds[0]))
        assert all(torch.allclose(t, alone[n], atol=1e-6) for n, t in world.model("c0").items())
        world = Federation(
            tmp_path / type(method).__name__, {"m": lambda: mlp(1)}, [("m", Data(*images(9)))], public=images(PUBLIC)[0]
        )


@pytest.mark.parametrize("method", [MNFL, SimPFL, TopKPFL])
def test_without_public_samples_it_is_local_training(tmp_path, method):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    start, *_, end = a.run(method(local=LOCAL, public_size=0), 2)
    b.run(LocalOnly(LOCAL), 2)
    assert digest(start) == digest(end)
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)
    assert sum(t.floats for t in (*a.fed.up.values(), *a.fed.down.values())) == 0


def test_without_distillation_steps_models_are_those_of_local_training(tmp_path):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    a.run(MNFL(local=LOCAL, distill=Local(epochs=0)))
    b.run(LocalOnly(LOCAL))
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)


# ---- what crosses the wire --------------------------------------------------------------------------


@pytest.mark.parametrize("method", [MNFL, SimPFL, TopKPFL])
@pytest.mark.parametrize("size", [None, 13])
def test_mn10_only_indices_predictions_and_targets_travel(tmp_path, method, size):
    world = mixed(tmp_path)
    world.run(method(**SETTINGS, public_size=size))
    r, m, C = size or PUBLIC, 5, 4
    ask, teach = "train_and_assess", "distil_locally"
    down, up = world.fed.down, world.fed.up
    assert set(down) == {ask, teach}
    assert (down[ask].floats, down[ask].integers) == (0, m * r)
    assert (up[ask].floats, up[ask].integers) == (m * r * C, 0)
    assert (down[teach].floats, down[teach].integers) == (m * r * C, 0)
    assert (up[teach].floats, up[teach].integers) == (0, 0)
    header = 1200  # bytes of a message beside its numbers, at most
    assert 4 * m * r * C < up[ask].bytes < 4 * m * r * C + m * header
    assert 4 * m * r < down[ask].bytes < 4 * m * r + m * header


def test_the_samples_of_a_round_are_drawn_anew_and_forgotten(tmp_path):
    world = mixed(tmp_path, per_round=10)
    seen = []
    original = Known.__getitem__

    class Watched(Known):
        def __getitem__(self, i):
            seen.append(tuple(i.tolist()))
            return original(self, i)

    world.server.public = Watched(world.server.public.inputs)
    world.run(MNFL(**SETTINGS), 2)
    assert len(seen) == 20
    assert [len(set(seen[i : i + 10])) for i in (0, 10)] == [1, 1]  # the same for all, to predict and to distil
    assert len(set(seen)) == 2
    assert all(len(i) == 10 for i in seen)
    assert set(kept_by(world.fed, "c0")) == {"model"}


# ---- clients that are of no use ---------------------------------------------------------------------


def without(tmp, gone, method) -> Federation:
    world = mixed(tmp)
    world.fed.config = dataclasses.replace(world.fed.config, fraction=0.5)
    world.fed.sample = lambda: [k for k in CLIENTS if k != gone]
    world.last = world.run(method)[-1]
    return world


@pytest.mark.parametrize("method", [MNFL, SimPFL, TopKPFL])
def test_a_client_with_other_public_data_loses_its_seat(tmp_path, method):
    for held, says in ((Known(images(PUBLIC, seed=10)[0]), "other public data"), (None, "no public data")):
        world = mixed(tmp_path / says)
        world.held["c3"] = held
        end = world.run(method(**SETTINGS))[-1]
        (failure,) = world.fed.failures
        assert failure["client"] == "c3"
        assert says in failure["reason"]
        assert kept_by(world.fed, "c3") == {}  # it has not even trained
        other = without(tmp_path / f"{says} b", "c3", method(**SETTINGS))
        assert digest(end) == digest(other.last)
        assert all(same_bits(world.model(k), other.model(k)) for k in CLIENTS if k != "c3")


def test_a_client_whose_training_blows_up_keeps_its_model_and_leaves_the_round(tmp_path):
    world = mixed(tmp_path)
    state = world.run(MNFL(**SETTINGS))[-1]
    before = world.model("c1")
    world.data["c1"] = Data(torch.full_like(world.data["c1"].inputs, 1e38), world.data["c1"].labels)
    world.fed.begin(1)
    end = MNFL(**SETTINGS).round(state, world.fed, world.server)
    assert [f["client"] for f in world.fed.failures] == ["c1"]
    assert "training diverged" in world.fed.failures[0]["reason"]
    assert same_bits(world.model("c1"), before)
    assert torch.equal(end.c[:, 1], state.c[:, 1])
    assert torch.equal(end.c[1], state.c[1])


def test_predictions_that_are_not_finite_never_leave_the_client(tmp_path):
    world = mixed(tmp_path)
    one_leap = Local(epochs=1, batch=64, lr=1e38)  # the loss before it is still fine
    with pytest.raises(QuorumNotMet, match="not finite"):
        world.run(MNFL(local=one_leap))
    assert {f["client"] for f in world.fed.failures} == set(CLIENTS)
    assert kept_by(world.fed, "c1") == {}


@pytest.mark.parametrize("kind", [MNFL, MNFLTwice])
def test_a_client_whose_distillation_blows_up_is_named_and_keeps_the_trained_model(tmp_path, kind):
    world = mixed(tmp_path)
    with pytest.raises(QuorumNotMet):
        world.run(kind(local=LOCAL, distill=Local(epochs=3, batch=8, lr=1e30)))
    for k, seed in zip(CLIENTS, world.seeds[:5], strict=True):
        assert same_bits(world.model(k), weights_of(trained(world, k, seed)))
    assert [f["client"] for f in world.fed.failures] == CLIENTS
    assert all("training diverged" in f["reason"] for f in world.fed.failures)


def test_a_client_whose_training_after_distillation_blows_up_keeps_the_model_it_had(tmp_path):
    world = mixed(tmp_path)
    method = MNFLCode(local=LOCAL, distill=DISTIL)
    state = world.run(dataclasses.replace(method, local=Local(epochs=0)))[-1]
    before = {k: world.model(k) for k in CLIENTS}
    wild = dataclasses.replace(method, distill=Local(epochs=0), local=Local(epochs=9, batch=8, lr=1e30))
    world.fed.begin(1)
    with pytest.raises(QuorumNotMet):
        wild.round(state, world.fed, world.server)
    assert all(same_bits(world.model(k), before[k]) for k in CLIENTS)


def lie(world: Federation, monkeypatch, k: str, change) -> None:
    """Client k sends other predictions than its model's."""
    original, asked = predictions._predict, []
    client = world.client

    def watched(name, seed, state, place=None):
        asked.append(name)
        return client(name, seed, state)

    world.client = watched
    monkeypatch.setattr(predictions, "_predict", lambda *a: change(original(*a)) if asked[-1] == k else original(*a))


@pytest.mark.parametrize(
    "change",
    [lambda p: p[1:], lambda p: p[:, :2], lambda p: p - 0.5, lambda p: 3 * p, lambda p: p * torch.tensor([0.0])],
)
def test_predictions_of_another_shape_or_that_are_no_probabilities_are_left_out(tmp_path, monkeypatch, change):
    world = mixed(tmp_path / "a")
    lie(world, monkeypatch, "c2", change)
    end = world.run(MNFL(**SETTINGS))[-1]
    assert [e["client"] for e in world.fed.failures] == ["c2"]
    monkeypatch.undo()
    assert digest(end) == digest(without(tmp_path / "b", "c2", MNFL(**SETTINGS)).last)


def test_a_round_without_usable_predictions_is_void(tmp_path, monkeypatch):
    world = mixed(tmp_path)
    monkeypatch.setattr(predictions, "_predict", lambda *a: torch.zeros(PUBLIC, 4))
    with pytest.raises(QuorumNotMet, match=r"0 of 5 clients gave a valid reply to train_and_assess.*not probabilities"):
        world.run(MNFL(**SETTINGS))


# ---- BatchNorm --------------------------------------------------------------------------------------


def test_batchnorm_statistics_follow_the_public_samples_unless_frozen(tmp_path):
    ends = {}
    for norm in ("train", "frozen"):
        world = mixed(tmp_path / norm)
        world.run(MNFL(**SETTINGS, student_norm=norm))
        ends[norm] = world.model("c0")
    local = weights_of(trained(world, "c0", world.seeds[0]))
    assert torch.equal(ends["frozen"]["1.running_mean"], local["1.running_mean"])
    assert not torch.equal(ends["train"]["1.running_mean"], local["1.running_mean"])
    assert not torch.equal(ends["frozen"]["0.weight"], local["0.weight"])


# ---- Sim-pFL and TopK-pFL ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mixture"),
    [
        (SimPFL(**SETTINGS), by_cosine),
        (SimPFL(**SETTINGS, scale="l1"), partial(by_cosine, scale="l1")),
        (TopKPFL(**SETTINGS, k=2), partial(by_rank, k=2)),
        (TopKPFL(**SETTINGS), partial(by_rank, k=5)),
    ],
)
def test_similar_clients_teach_each_other(tmp_path, method, mixture):
    world = mixed(tmp_path)
    state = world.run(method)[-1]
    x = world.server.public.inputs
    models = [trained(world, k, s) for k, s in zip(CLIENTS, world.seeds, strict=False)]
    s = torch.stack([predicted(m, x) for m in models])
    assert torch.equal(state.c, mixture(cosines(s)))
    assert torch.allclose(state.c.sum(0), torch.ones(5).double(), rtol=0, atol=1e-12)
    for i, k in enumerate(CLIENTS):
        target = weighted_mean([{"": p} for p in s], (state.c[:, i] / state.c[:, i].max()).tolist())[""]
        assert same_bits(world.model(k), weights_of(distilled(models[i], x, target, world.seeds[5 + i])))


def test_k_of_all_clients_is_the_plain_average(tmp_path):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    a.run(TopKPFL(**SETTINGS, k=9))
    b.run(MNFL(**SETTINGS, rule="uniform"))
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)


def test_receivers_that_take_part_have_coefficients_with_those_present_only(tmp_path):
    world = without(tmp_path, "c3", SimPFL(**SETTINGS))
    c = world.last.c
    assert c[3, [0, 1, 2, 4]].tolist() == [0] * 4
    assert c[:, 3].tolist() == [0.2] * 5
    assert torch.allclose(c.sum(0), torch.ones(5).double(), rtol=0, atol=1e-12)


# ---- the parameter version --------------------------------------------------------------------------


def alike(tmp, **options) -> World:
    parties = [("c", Data(*images(n, n))) for n in SIZES]
    return World(tmp, {"c": lambda: Conv(0)}, parties, **options)


@pytest.mark.parametrize("still", [Coefficients(lr=0.0), Coefficients(rho=math.inf)])
def test_parameters_mixed_uniformly_are_fedavg_to_the_bit(tmp_path, still):
    a, b = alike(tmp_path / "a", fraction=0.6), alike(tmp_path / "b", fraction=0.6)
    end = a.run(MNFLParameters(LOCAL, still), 1)[-1]
    average = b.run(FedAvg(LOCAL, "uniform"), 1)[-1].weights["c"]
    assert list(end.start) == a.fed.sample()
    assert all(same_bits(w, average) for w in end.start.values())
    a, b = alike(tmp_path / "all"), alike(tmp_path / "fedavg")
    end = a.run(MNFLParameters(LOCAL, still), 3)[-1]
    average = b.run(FedAvg(LOCAL, "uniform"), 3)[-1].weights["c"]
    assert all(same_bits(w, average) for w in end.start.values())


@pytest.mark.parametrize("order", ["paper", "code"])
def test_parameters_are_mixed_by_the_coefficients(tmp_path, order):
    world = alike(tmp_path)
    cfg = Coefficients(lr=0.9, rho=0.01, lam=500.0)
    start, end = world.run(MNFLParameters(LOCAL, cfg, order, c_reduction="mean"))
    models = [trained(world, k, s) for k, s in zip(CLIENTS, world.seeds, strict=True)]
    w = [weights_of(m) for m in models]
    flat = torch.stack([torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in models])
    c = torch.full((5, 5), 0.2, dtype=torch.float64, requires_grad=True)
    D = torch.tensor(SIZES, dtype=torch.float64)
    loss = ((c.T @ flat - flat).square().sum(1) / (2 * flat.shape[1]) * D / D.sum()).sum()
    raw = c.detach() - 0.9 * 500 * torch.autograd.grad(loss, c)[0]
    assert torch.allclose(end.c, _columns_on_simplex(raw), rtol=0, atol=1e-9)
    assert not torch.allclose(end.c, start.c, atol=1e-3)
    used = start.c if order == "paper" else end.c
    for n, k in enumerate(CLIENTS):
        assert same_bits(end.start[k], weighted_mean(w, (used[:, n] / used[:, n].max()).tolist()))
        assert same_bits(kept_by(world.fed, k)["model"], w[n])  # what is judged: after training
    assert len(world.events("coefficients")) == 1


def _columns_on_simplex(raw: torch.Tensor) -> torch.Tensor:
    """By bisection, independently of the code."""
    out = []
    for v in raw.T:
        low, high = v.min() - 1, v.max()
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if (v - middle).clamp_min(0).sum() > 1 else (low, middle)
        out.append((v - low).clamp_min(0))
    return torch.stack(out, 1)


@pytest.mark.parametrize("rule", ["sim", "topk"])
def test_similar_parameters_give_more(tmp_path, rule):
    world = alike(tmp_path)
    end = world.run(MNFLParameters(LOCAL, rule=rule, k=2))[-1]
    models = [trained(world, k, s) for k, s in zip(CLIENTS, world.seeds, strict=True)]
    flat = torch.stack([torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in models])
    cosine = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1)
    if rule == "sim":
        c = cosine - cosine.amin(0)
        c = c / c.sum(0)
    else:
        c = torch.zeros(5, 5, dtype=torch.float64)
        for n in range(5):
            nearest = max((m for m in range(5) if m != n), key=lambda m: cosine[m, n])
            c[n, n] = c[nearest, n] = 0.5
    assert torch.allclose(end.c, c, rtol=0, atol=1e-9)
    for n, k in enumerate(CLIENTS):
        found = torch.cat([end.start[k][name].double().flatten() for name, _ in models[0].named_parameters()])
        assert torch.allclose(found, c[:, n] @ flat, rtol=0, atol=1e-6)


def test_the_wire_of_the_parameter_version_is_a_model_each_way(tmp_path):
    world = alike(tmp_path)
    world.run(MNFLParameters(LOCAL))
    d = sum(t.numel() for t in world.server.init("c").values() if t.is_floating_point())
    (down,), (up,) = world.fed.down.values(), world.fed.up.values()
    assert down.floats == up.floats == 5 * d


# ---- pFedDF -----------------------------------------------------------------------------------------

FUSION = Distill(steps=6, batch=16)


def test_pfeddf_is_feddf_and_then_fine_tuning(tmp_path):
    a, b = mixed(tmp_path / "a", fraction=0.6), mixed(tmp_path / "b", fraction=0.6)
    method = PFedDF(tune_epochs=3, local=LOCAL, fusion=FUSION)
    state = a.run(method, 2)[-1]
    plain = b.run(FedDF(LOCAL, FUSION), 2)[-1]
    assert digest(state.weights) == digest(plain.weights)
    assert not state.tuned
    seen = len(a.seeds)
    end = method.finish(state, a.fed, a.server)
    assert end.tuned
    assert digest(end.weights) == digest(plain.weights)
    down = a.fed.down["fine_tune"]
    sizes = [sum(t.numel() for t in end.weights[P].values() if t.is_floating_point()) for P in KINDS]
    assert down.floats == sum(sizes)  # one more model down for each client, and nothing up
    assert a.fed.up["fine_tune"].floats == 0
    three = dataclasses.replace(LOCAL, epochs=3)
    for k, seed in zip(CLIENTS, a.seeds[seen:], strict=True):
        model = trained(a, k, seed, end.weights[a.fed.architecture(k)], three)
        assert same_bits(a.model(k), weights_of(model))
        score = a.fed.map(score_tuned, [k], **method.personal(end, a.fed).payload)[k]
        assert score.correct == evaluate(model, a.data[k].inputs, a.data[k].labels).correct


def test_pfeddf_without_epochs_is_feddf_judged_by_each_client(tmp_path):
    world = mixed(tmp_path)
    method = PFedDF(tune_epochs=0, local=LOCAL, fusion=FUSION)
    end = method.finish(world.run(method)[-1], world.fed, world.server)
    assert all(same_bits(world.model(k), end.weights[world.fed.architecture(k)]) for k in CLIENTS)
    assert {n: digest(m.weights) for n, m in method.models(end).items()} == {P: digest(end.weights[P]) for P in "cm"}


def test_pfeddf_before_the_end_a_tuned_copy_is_judged_and_dropped(tmp_path):
    world = mixed(tmp_path)
    method = PFedDF(tune_epochs=30, local=Local(batch=8, lr=0.1), fusion=FUSION)
    state = world.run(method)[-1]
    scores = world.fed.map(score_tuned, CLIENTS, **method.personal(state, world.fed).payload)
    assert kept_by(world.fed, "c0") == {}
    untuned = world.fed.map(
        score_tuned, CLIENTS, **dataclasses.replace(method, tune_epochs=0).personal(state, world.fed).payload
    )
    assert sum(s.correct for s in scores.values()) > sum(s.correct for s in untuned.values())


def test_pfeddf_a_client_whose_tuned_copy_blows_up_is_dropped(tmp_path):
    world = mixed(tmp_path)
    method = PFedDF(local=Local(epochs=1, batch=8, lr=1e38), fusion=Distill(steps=0))
    state = PFedDF.State({P: world.server.init(P) for P in "cm"}, False)
    with pytest.raises(QuorumNotMet, match="training diverged"):
        method.finish(state, world.fed, world.server)
    assert kept_by(world.fed, "c1") == {}


def test_pfeddf_has_all_settings_of_feddf():
    """So that a recipe of feddf runs as pfeddf by changing the name alone."""
    ours = {f.name: getattr(PFedDF(), f.name) for f in dataclasses.fields(PFedDF)}
    theirs = {f.name: getattr(FedDF(), f.name) for f in dataclasses.fields(FedDF)}
    assert ours == {"tune_epochs": 5, **theirs}
    feddf = {"name": "feddf", "mu": 0.5, "screen": {"kind": "robust", "average": "median"}, "teaching": "memory"}
    ours = load_config({"method": feddf}, ["method.name=pfeddf"]).method
    assert ours == PFedDF(mu=0.5, screen=Robust("median"), teaching=Memory())


# ---- what is refused at the start -------------------------------------------------------------------


@pytest.mark.parametrize("method", [MNFL, SimPFL, TopKPFL])
def test_public_data_that_cannot_be_used_is_refused(tmp_path, method):
    world = mixed(tmp_path)
    with pytest.raises(ConfigError, match="public_size = 41, but there are 40"):
        check_server(method(public_size=41), world.server)
    world.server.public.fresh = True
    with pytest.raises(ConfigError, match="must see the same"):
        check_server(method(), world.server)
    world.server.public = None
    with pytest.raises(ConfigError, match=r"set public\.source"):
        check_server(method(), world.server)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r'order = "code": this setting is now another method.*mnfl-code'):
        load_config({"method": {"name": "mnfl", "order": "code"}})
    with pytest.raises(ConfigError, match=r"c_pred = .*: this setting is now another method.*mnfl-twice"):
        load_config({"method": {"name": "mnfl", "c_pred": "post_distill"}})
    for method in (MNFL, SimPFL, TopKPFL):
        with pytest.raises(ConfigError, match="temperature = 0"):
            method(temperature=0.0)
    with pytest.raises(ConfigError, match="k = 0"):
        TopKPFL(k=0)
    with pytest.raises(ConfigError, match="tune_epochs = -1"):
        PFedDF(tune_epochs=-1)


# ---- recipes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("mnfl/")])
def test_recipes_load_and_have_a_test_split_for_each_client(name):
    config = load_config(name)
    assert config.data.client_test > 0
    assert type(config.method) in {METHODS[n] for n in ("mnfl", "mnfl-code", "mnflparam")}


def test_there_are_recipes():
    assert {"mnfl/laptop", "mnfl/table1", "mnfl/table2", "mnfl/official-code"} <= set(recipe_names())


@pytest.mark.parametrize("other", ["simpfl", "topkpfl"])
def test_the_comparison_methods_take_over_a_recipe(other):
    mine, theirs = load_config("mnfl/table1").method, load_config("mnfl/table1", [f"method.name={other}"]).method
    for name in ("local", "distill", "temperature", "public_size"):
        assert getattr(theirs, name) == getattr(mine, name)


@pytest.mark.parametrize("method", [MNFL(), SimPFL(), TopKPFL()])
def test_there_is_no_global_model(method):
    assert method.models(method.State(torch.ones(1, 1))) == {}
