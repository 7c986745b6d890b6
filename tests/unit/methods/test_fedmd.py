"""FedMD: equal to its steps by hand, one mean of logits, public data that does not grow."""

import dataclasses

import pytest
import torch

from public_toys import CLIENTS, PUBLIC, Exchange, Known, accuracies, halves, mixed, spoil, watch
from solera.core.errors import ConfigError
from solera.core.randomness import seed_from
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.methods.fedmd import DISTANCES, FedMD
from solera.methods.local import LocalOnly
from solera.runs.loop import check_fit, check_server
from solera.testing import check_method, toy
from solera.train.fitting import Local, fit, logits_of, towards
from toys import Constant, images, mlp, same_bits

NONE = Local(epochs=0)
FIRST = Local(epochs=2, batch=8, lr=1e-3, optimizer="adam")
DIGEST = Local(epochs=2, batch=16, lr=1e-3, optimizer="adam")
REVISIT = Local(epochs=1, batch=5, lr=1e-3, optimizer="adam")
METHOD = FedMD(pretrain=FIRST, private=FIRST, digest=DIGEST, revisit=REVISIT)
STILL = FedMD(pretrain=NONE, private=NONE, digest=DIGEST, revisit=NONE)
SCORE, TEACH = "prepare_and_score", "digest_and_revisit"


def by_hand(world, seeds, models=None, method=METHOD):
    """The clients' models after a round; `models` are those they had before."""
    x, labels = world.server.public.inputs, world.server.public.labels
    ready = dict(models or {})
    for k, seed in zip(CLIENTS, seeds[:5], strict=True):
        if models is None:
            P = world.fed.architecture(k)
            ready[k] = world.server.model(P, world.server.init(P))
            if labels is not None:
                fit(ready[k], x, labels, method.pretrain, seed_from(seed, "pretrain"))
            fit(ready[k], world.data[k].inputs, world.data[k].labels, method.private, seed)
    consensus = (sum(logits_of(model, x).double() for model in ready.values()) / 5).float()
    for k, seed in zip(CLIENTS, seeds[5:], strict=True):
        fit(ready[k], x, consensus, method.digest, seed, towards(DISTANCES[method.loss]))
        fit(ready[k], world.data[k].inputs, world.data[k].labels, method.revisit, seed_from(seed, "train"))
    return ready


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("loss", ["l1", "kl"])
def test_two_rounds_by_hand(tmp_path, labelled, loss):
    """Transfer learning once; then, each round, communicate, aggregate, distribute, digest and revisit."""
    method = dataclasses.replace(METHOD, loss=loss)
    world = mixed(tmp_path, labelled=labelled)
    world.run(method, 2)
    models = by_hand(world, world.seeds[:10], method=method)
    models = by_hand(world, world.seeds[10:], models, method)
    assert all(same_bits(world.model(k), weights_of(models[k])) for k in CLIENTS)


def test_the_losses_are_those_of_the_definition():
    student, consensus = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0, 0.5, 0.0]])
    assert DISTANCES["l1"](student, consensus).item() == pytest.approx(0.1666667, abs=1e-7)
    assert DISTANCES["kl"](student, consensus).item() == pytest.approx(0.0309906128, abs=1e-7)
    assert DISTANCES["l1"](consensus, consensus).item() == 0


def test_the_consensus_is_the_plain_mean_of_logits(tmp_path):
    """Scores before the softmax, every client the same, however many examples it has."""
    builders = {"a": lambda: Constant(2, 0, -1), "b": lambda: Constant(0, 1, 1)}
    parties = [("a", Data(*images(3))), ("b", Data(*images(30)))]
    world = Exchange(tmp_path, builders, parties, public=Known(images(6)[0]), classes=3)
    told = watch(world, "digest_and_revisit")
    world.run(dataclasses.replace(STILL, digest=NONE))
    assert [k for k, _ in told] == ["c0", "c1"]
    assert all(torch.equal(consensus, torch.tensor([[1.0, 0.5, 0.0]] * 6)) for _, (consensus,) in told)


def test_identical_clients_have_nothing_to_digest(tmp_path):
    """Their loss is 0, so a model is not moved, not even by Adam."""
    parties = [("m", Data(*images(n))) for n in (4, 9, 6)]
    world = Exchange(tmp_path, {"m": lambda: mlp(1)}, parties, public=Known(images(PUBLIC)[0]))
    one = dataclasses.replace(STILL, digest=dataclasses.replace(DIGEST, batch=PUBLIC))
    world.run(one)
    start = world.server.init("m")
    assert all(torch.allclose(t, start[n], atol=1e-6) for k in world.fed.clients for n, t in world.model(k).items())


def test_without_digest_it_is_local_training(tmp_path):
    a, b = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    a.run(FedMD(pretrain=NONE, private=FIRST, digest=NONE, revisit=NONE))
    b.run(LocalOnly(FIRST))
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)


# ---- labels ----------------------------------------------------------------------------------------


def test_public_samples_without_labels_are_said_once_and_skipped(tmp_path):
    world, unasked, labelled = mixed(tmp_path / "a"), mixed(tmp_path / "b"), mixed(tmp_path / "c", labelled=True)
    state = world.run(METHOD)[-1]
    (event,) = world.events("pretraining_skipped")
    assert "public.labels = true" in event["reason"]
    unasked.run(dataclasses.replace(METHOD, pretrain=NONE))
    assert not unasked.events("pretraining_skipped")
    assert all(same_bits(world.model(k), unasked.model(k)) for k in CLIENTS)
    labelled.run(METHOD)
    assert not labelled.events("pretraining_skipped")
    world.fed.begin(1)
    world.server.begin()
    METHOD.round(state, world.fed, world.server)
    assert not world.events("pretraining_skipped")


def test_labels_are_for_the_start_only(tmp_path):
    """A client that has a model never looks at them again, and one that comes later catches up."""
    world = mixed(tmp_path, labelled=True)
    world.fed.sample = lambda: ["c0", "c1"]
    state = world.run(METHOD)[-1]
    assert world.kept("c2") == {}
    world.fed.sample = lambda: ["c1", "c2"]
    old, late = world.server.model("m", world.model("c1")), world.server.model("c", world.server.init("c"))
    told, seen = watch(world, "digest_and_revisit"), len(world.seeds)
    world.fed.begin(1)
    METHOD.round(state, world.fed, world.server)
    x, y, seed = world.server.public.inputs, world.server.public.labels, world.seeds[seen + 1]
    fit(late, x, y, FIRST, seed_from(seed, "pretrain"))
    fit(late, world.data["c2"].inputs, world.data["c2"].labels, FIRST, seed)
    consensus = ((logits_of(old, x).double() + logits_of(late, x).double()) / 2).float()
    assert all(torch.equal(sent, consensus) for _, (sent,) in told)


def test_transfer_learning_helps_where_private_samples_are_few(tmp_path):
    found = {}
    for labelled in (True, False):
        world = mixed(tmp_path / str(labelled), labelled=labelled)
        longer = Local(epochs=20, batch=8, lr=1e-3, optimizer="adam")
        world.run(dataclasses.replace(METHOD, pretrain=longer))
        found[labelled] = sum(accuracies(world)) / 5
    assert found[True] > found[False] + 0.1


# ---- the wire --------------------------------------------------------------------------------------


def test_indices_scores_and_the_consensus_travel_and_only_a_mean_is_seen(tmp_path):
    world = mixed(tmp_path, per_round=13)
    world.run(METHOD)
    down, up, m, r, C = world.fed.down, world.fed.up, 5, 13, 4
    assert set(down) == {SCORE, TEACH}
    assert (down[SCORE].floats, down[SCORE].integers) == (0, m * r)
    assert (up[SCORE].floats, up[SCORE].integers) == (m * r * C, 0)
    assert (down[TEACH].floats, down[TEACH].integers) == (m * r * C, 0)
    assert (up[TEACH].floats, up[TEACH].integers) == (0, 0)
    assert world.fed.verbs == {"mean"}


def test_regression_public_data_does_not_grow(tmp_path):
    """Another library appends every round's samples to a list and ships them all, while clients use the first five."""
    world = mixed(tmp_path, per_round=10)
    told = watch(world, "prepare_and_score")
    state, bytes_, kept = METHOD.init(world.fed, world.server), set(), set()
    for t in range(4):
        world.fed.begin(t)
        state = METHOD.round(state, world.fed, world.server)
        bytes_.add(tuple(t.bytes for way in (world.fed.down, world.fed.up) for t in way.values()))
        kept.add(tuple(world.kept("c1")))
    assert len(bytes_) == 1
    assert kept == {("model",)}
    drawn = {tuple(indices.tolist()) for _, (indices,) in told}
    assert len(drawn) == 4  # other samples every round, the same for all clients
    assert {len(i) for i in drawn} == {10}


@pytest.mark.parametrize(
    "lie", [lambda t: t[:-1], lambda t: t[:, :3], lambda t: t[:1], lambda t: t.double(), lambda t: t / 0]
)
@pytest.mark.parametrize("client", ["c0", "c3"])
def test_a_bad_reply_costs_a_client_its_seat_and_nothing_else(tmp_path, lie, client):
    """Also if it is the first to come: the mean has the size that was asked for, not that of the first reply."""
    world, other = mixed(tmp_path / "a"), mixed(tmp_path / "b")
    spoil(world, client, "prepare_and_score", lie)
    told = watch(world, "digest_and_revisit")
    world.run(METHOD)
    assert [f["client"] for f in world.fed.failures] == [client]
    other.fed.sample = lambda: [k for k in CLIENTS if k != client]
    same = watch(other, "digest_and_revisit")
    other.run(METHOD)
    assert [k for k, _ in told] == [k for k, _ in same] == other.fed.sample()
    assert torch.equal(told[0][1][0], same[0][1][0])


def test_a_client_that_blows_up_keeps_its_model(tmp_path):
    world = mixed(tmp_path)
    state = world.run(METHOD)[-1]
    before = world.model("c1")
    world.data["c1"] = Data(torch.full_like(world.data["c1"].inputs, 1e38), world.data["c1"].labels)
    world.fed.begin(1)
    dataclasses.replace(METHOD, digest=NONE).round(state, world.fed, world.server)
    assert same_bits(world.model("c1"), before)
    newcomer = mixed(tmp_path / "new")
    newcomer.data["c1"] = world.data["c1"]
    newcomer.run(METHOD)
    assert [f["client"] for f in newcomer.fed.failures] == ["c1"]
    assert newcomer.kept("c1") == {}


def test_a_client_with_other_public_data_loses_its_seat(tmp_path):
    world = mixed(tmp_path)
    world.held["c3"] = Known(images(PUBLIC, seed=10)[0])
    world.run(METHOD)
    assert [f["client"] for f in world.fed.failures] == ["c3"]
    assert "other public data" in world.fed.failures[0]["reason"]
    assert world.kept("c3") == {}


# ---- what comes of it ------------------------------------------------------------------------------


def test_clients_learn_classes_they_have_never_seen(tmp_path):
    adam = Local(epochs=5, batch=20, lr=2e-3, optimizer="adam")
    found = {}
    for epochs in (0, 10):
        world = halves(tmp_path / str(epochs))
        digest, revisit = dataclasses.replace(adam, epochs=epochs), dataclasses.replace(adam, epochs=1)
        world.run(FedMD(adam, adam, digest, revisit), 3)
        found[epochs] = accuracies(world)
    assert max(found[0]) < 0.6  # a client knows two of four classes
    assert min(found[10]) > 0.65


# ---- refusals --------------------------------------------------------------------------------------


def test_labels_must_fit_the_models_and_samples_must_be_the_same_for_all(tmp_path):
    world = mixed(tmp_path, labelled=True)
    world.server.public.labels = world.server.public.labels + 3
    with pytest.raises(ConfigError, match="public labels go up to 6, but the models have 4 outputs"):
        check_server(METHOD, world.server)
    world.server.public = None
    with pytest.raises(ConfigError, match=r"set public\.source"):
        check_server(METHOD, world.server)
    world = mixed(tmp_path)
    world.server.public.fresh = True
    with pytest.raises(ConfigError, match="same public samples"):
        check_server(METHOD, world.server)
    with pytest.raises(ConfigError, match=r"data\.client_test"):
        check_fit(FedMD(), toy(client_test=0.0))


def test_the_variant_keeps_the_contract_of_a_method(tmp_path):
    check_method(FedMD(loss="kl", student_norm="frozen"), tmp_path, engines=())
