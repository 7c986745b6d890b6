"""FedGEMS and FedGEM: equal to their steps by hand, what is asked and pooled, the wire, what is refused."""

import dataclasses
import hashlib

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.federation import QuorumNotMet
from solera.core.randomness import seed_from
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.data import PublicConfig
from solera.methods.fedgems import FedGEMS, fused_logits, learn_from_server, reliable_weights, towards
from solera.methods.steps.predictions import Drawn
from solera.runs.loop import check_server
from solera.testing import check_method, run_toy
from solera.train.fitting import Diverged, Local, fit, logits_of
from toys import Conv, Samples, World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
DISTIL = Local(epochs=1, batch=8, lr=0.03)
SERVER = Local(epochs=2, batch=8, lr=0.01, optimizer="adam")
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
CLIENTS = [f"c{i}" for i in range(5)]
PUBLIC, C = 40, 4
METHOD = FedGEMS(LOCAL, DISTIL, SERVER)
X, Y = images(PUBLIC, seed=9)


class Labelled(Samples):
    """Public samples with labels, known by their digest."""

    def __init__(self, inputs, labels):
        super().__init__(inputs)
        self.labels = labels

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inputs.numpy().tobytes() + self.labels.numpy().tobytes()).hexdigest()


class Site(World):
    """Five clients of two architectures, a larger model on the server, 40 labelled public samples."""

    def __init__(self, tmp, large="large", **options):
        builders = {"c": lambda: Conv(0), "m": lambda: mlp(1), "large": lambda: mlp(2, width=48)}
        parties = [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)]
        super().__init__(tmp, builders, parties, public=X, large=large, **options)
        self.server.architectures.remove("large")
        self.server.public = Labelled(X, Y)
        self.held = {}

    def client(self, k, seed, state, place=None):
        client = super().client(k, seed, state)
        client.public = self.held.get(k, self.server.public)
        return client

    def state(self, k):
        return kept_by(self.fed, k)

    def trained(self, k, seed):
        """Client k's first answer is given after training on private data."""
        P = self.fed.architecture(k)
        model = self.server.model(P, self.server.init(P))
        fit(model, self.data[k].inputs, self.data[k].labels, LOCAL, seed)
        return model

    def next(self, method, state, t):
        self.fed.begin(t)
        self.server.begin()
        return method.round(state, self.fed, self.server)


def with_logits(state, wrong=()):
    """The state with a pool that knows everything but the samples `wrong`."""
    pooled = torch.ones(PUBLIC, dtype=torch.bool)
    pooled[list(wrong)] = False
    return dataclasses.replace(state, pooled=pooled)


# ---- a round is its definition ----------------------------------------------------------------------


def test_a_round_is_its_steps_by_hand(tmp_path):
    site = Site(tmp_path)
    start, end = site.run(METHOD)
    large = site.server.model("large", start.large.weights)
    z = logits_of(large, X)
    right = z.argmax(-1) == Y
    assert 0 < right.sum() < PUBLIC
    models = {k: site.trained(k, seed) for k, seed in zip(CLIENTS, site.seeds[:5], strict=True)}
    p = torch.stack([logits_of(m, X[~right]).softmax(-1) for m in models.values()])
    alpha = reliable_weights(p, Y[~right])
    told = alpha.sum(0) > 0
    teacher, share = torch.zeros(PUBLIC, C), torch.ones(PUBLIC)
    teacher[~right] = (alpha[..., None] * p.double().log()).sum(0).float()
    share[~right] = torch.where(told, 0.75, 1.0)
    teacher[right] = z[right]  # with a share of 1 it does not matter
    site.fed.begin(0)
    fit(large, X, torch.arange(PUBLIC), SERVER, site.fed.seed("server"), towards(Y, teacher, share))
    assert same_bits(end.large.weights, weights_of(large))
    assert torch.equal(end.pooled, right)
    assert torch.equal(end.pool[right], z[right])  # as they were when it was right, before training

    logits = logits_of(large, X)
    for k, seed in zip(CLIENTS, site.seeds[5:], strict=True):  # public, then private
        fit(models[k], X, torch.arange(PUBLIC), DISTIL, seed, towards(Y, logits, torch.full((PUBLIC,), 0.75)))
        fit(models[k], site.data[k].inputs, site.data[k].labels, LOCAL, seed_from(seed, "train"))
        assert same_bits(site.state(k)["model"], weights_of(models[k]))
        assert set(site.state(k)) == {"model"}


def test_what_the_server_was_once_right_about_it_recalls_and_does_not_ask_for(tmp_path):
    site = Site(tmp_path)
    start = METHOD.init(site.fed, site.server)
    z = logits_of(site.server.model("large", start.large.weights), X)
    wrong = (z.argmax(-1) != Y).nonzero().flatten().tolist()
    unknown = wrong[:3]
    pool = torch.nn.functional.one_hot(Y, C).float() * 5
    state = dataclasses.replace(with_logits(start, unknown), pool=pool)
    before = state.pool.clone()
    end = site.next(METHOD, state, 0)
    assert site.fed.down["train_and_predict"].integers == 5 * 3
    (event,) = site.events("selected")
    assert (event["samples"], event["right"], event["asked"]) == (PUBLIC, PUBLIC - len(wrong), 3)
    known = [i for i in wrong if i not in unknown]
    assert torch.equal(end.pool[known], before[known])
    assert torch.equal(state.pool, before)  # the state it was given is left alone

    model = site.server.model("large", start.large.weights)
    models = [site.trained(k, seed) for k, seed in zip(CLIENTS, site.seeds[:5], strict=True)]
    p = torch.stack([logits_of(m, X[unknown]).softmax(-1) for m in models])
    alpha = reliable_weights(p, Y[unknown])
    teacher, share = end.pool.clone(), torch.ones(PUBLIC)
    share[known] = 0.75
    teacher[unknown] = (alpha[..., None] * p.double().log()).sum(0).float()
    share[unknown] = torch.where(alpha.sum(0) > 0, 0.75, 1.0)
    fit(model, X, torch.arange(PUBLIC), SERVER, site.fed.seed("server"), towards(Y, teacher, share))
    assert same_bits(end.large.weights, weights_of(model))


def test_without_anything_to_ask_clients_still_learn(tmp_path):
    site = Site(tmp_path)
    state = with_logits(METHOD.init(site.fed, site.server))
    site.next(METHOD, state, 0)
    assert list(site.fed.up) == ["learn_from_server"]
    assert all("model" in site.state(k) for k in CLIENTS)


def test_fedgem_asks_for_all_pools_nothing_and_takes_the_plain_mean(tmp_path):
    site = Site(tmp_path)
    start, end = site.run(dataclasses.replace(METHOD, selective=False))
    assert not end.pooled.any()
    assert site.fed.up["train_and_predict"].floats == 5 * PUBLIC * C
    z = torch.stack([logits_of(site.trained(k, s), X) for k, s in zip(CLIENTS, site.seeds[:5], strict=True)])
    model = site.server.model("large", start.large.weights)
    fit(
        model, X, torch.arange(PUBLIC), SERVER, site.fed.seed("server"),
        towards(Y, z.mean(0), torch.full((PUBLIC,), 0.75)),
    )  # fmt: skip
    torch.testing.assert_close(weights_of(model), end.large.weights, rtol=1e-3, atol=1e-4)


def test_epsilon_1_is_learning_from_labels(tmp_path):
    """The clients' answers then change nothing on the server, whoever gives them."""
    method = dataclasses.replace(METHOD, epsilon=1.0)
    a, b = Site(tmp_path / "a"), Site(tmp_path / "b")
    b.fed.sample = lambda: ["c1"]
    assert digest(a.run(method)[-1]) == digest(b.run(method)[-1])
    start, end = Site(tmp_path / "c").run(method)
    model = a.server.model("large", start.large.weights)
    fit(model, X, Y, SERVER, a.fed.seed("server"))
    torch.testing.assert_close(weights_of(model), end.large.weights, rtol=1e-4, atol=1e-5)


def test_only_newcomers_train_before_they_answer(tmp_path):
    site = Site(tmp_path)
    site.run(METHOD)
    kept = {k: site.state(k)["model"] for k in CLIENTS}
    site.fed.begin(1)
    S, fused, _ = dataclasses.replace(METHOD, selective=False).ensemble(
        CLIENTS, torch.arange(PUBLIC), Y, site.fed, site.server
    )
    p = torch.stack([logits_of(site.server.model(site.fed.architecture(k), kept[k]), X).softmax(-1) for k in S])
    assert torch.equal(fused, fused_logits(p, torch.full((5, PUBLIC), 0.2)))


# ---- the wire ---------------------------------------------------------------------------------------


def test_the_wire_shrinks_with_what_the_server_learns(tmp_path):
    site = Site(tmp_path)
    state, ups = METHOD.init(site.fed, site.server), []
    for t in range(4):
        unknown = int((~state.pooled).sum())
        state = site.next(METHOD, state, t)
        (event,) = site.events("selected")
        q = event["asked"]
        assert q <= unknown
        down, up = site.fed.down, site.fed.up
        floats = [sum(t.floats for t in way.values()) for way in (down, up)]
        integers = [sum(t.integers for t in way.values()) for way in (down, up)]
        assert floats == [5 * PUBLIC * C, 5 * q * C]
        assert integers == [5 * (PUBLIC + q), 0]
        ups.append(q)
    assert ups == sorted(ups, reverse=True)
    assert ups[-1] < ups[0]


def test_a_share_of_the_public_samples_a_round(tmp_path):
    site = Site(tmp_path, per_round=10)
    state = site.run(METHOD)[-1]
    assert state.pooled.sum() <= 10
    assert sum(t.floats for t in site.fed.down.values()) == 5 * 10 * C
    assert state.pool.shape == (PUBLIC, C)


# ---- clients that misbehave -------------------------------------------------------------------------


def test_a_client_with_other_public_data_takes_no_part(tmp_path):
    site = Site(tmp_path)
    site.held["c1"] = Labelled(X, (Y + 1) % C)  # the same images, other labels
    state = METHOD.init(site.fed, site.server)
    site.next(METHOD, state, 0)
    assert [(f["client"], f["task"]) for f in site.fed.failures] == [("c1", "train_and_predict")]
    other = Site(tmp_path / "unasked")
    other.held["c1"] = site.held["c1"]
    other.next(METHOD, with_logits(state), 0)  # also where nothing is asked
    assert [f["client"] for f in other.fed.failures] == ["c1"]
    assert "holds other public data" in other.fed.failures[0]["reason"]


def test_a_client_whose_training_blows_up_keeps_its_model(tmp_path):
    site = Site(tmp_path)
    site.run(METHOD)
    drawn = Drawn(torch.arange(PUBLIC).int(), site.server.public.digest)
    for where in ("distil", "local"):
        client = site.client("c1", 0, site.state("c1"))
        before = dict(client.state["model"])
        how = {"distil": DISTIL, "local": LOCAL} | {where: Local(epochs=3, batch=4, lr=1e7)}
        with pytest.raises(Diverged, match="training diverged"):
            learn_from_server(client, drawn=drawn, logits=torch.zeros(PUBLIC, C), epsilon=0.75, **how)
        assert same_bits(client.state["model"], before)


def test_a_large_model_that_blows_up_is_dropped(tmp_path):
    site = Site(tmp_path)
    start, end = site.run(dataclasses.replace(METHOD, server=Local(epochs=3, batch=8, lr=1e9)))
    assert same_bits(start.large.weights, end.large.weights)
    assert site.events("server_diverged")


def test_nobody_usable_is_a_void_round(tmp_path):
    site = Site(tmp_path)
    site.held = dict.fromkeys(CLIENTS, Labelled(X + 1, Y))
    with pytest.raises(QuorumNotMet):
        site.run(METHOD)


# ---- the rest ---------------------------------------------------------------------------------------


def test_it_learns_on_the_toy_federation(tmp_path):
    clients = Local(epochs=2, batch=16, lr=0.05)
    method = FedGEMS(clients, clients, Local(epochs=4, batch=8, lr=0.01, optimizer="adam"))
    result = run_toy(method, tmp_path, rounds=4)
    assert result.summary["models"]["large"]["accuracy"] > 0.85  # chance is a third
    assert result.summary["personal"]["mean"] > 0.8


def test_what_is_refused(tmp_path):
    for epsilon in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="epsilon"):
            FedGEMS(epsilon=epsilon)
    with pytest.raises(ConfigError, match=r"models\.server"):
        check_server(FedGEMS(), Site(tmp_path / "a", large=None).server)
    with pytest.raises(ConfigError, match=r"public\.labels = true"):
        run_toy(FedGEMS(), tmp_path / "b", public=PublicConfig(size=60))
    site = Site(tmp_path / "c")
    site.server.public.labels = Y + 3
    with pytest.raises(ConfigError, match=r"public labels go up to 6, but the models have 4 outputs.*another public"):
        check_server(FedGEMS(), site.server)
    site = Site(tmp_path / "d")
    site.server.public.fresh = True
    with pytest.raises(ConfigError, match=r"leave out public\.fresh"):
        check_server(FedGEMS(), site.server)


def test_contract_of_fedgem(tmp_path):
    check_method(FedGEMS(selective=False), tmp_path, engines=())
