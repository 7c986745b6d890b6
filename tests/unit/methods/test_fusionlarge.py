"""A large server model beside FedDF's students: equal to FedDF, FedAvg and Fed-ET where it should be."""

import dataclasses
import itertools

import pytest
import torch

import by_hand
from solera.core.errors import ConfigError
from solera.core.federation import QuorumNotMet
from solera.core.task import Data
from solera.core.wire import digest
from solera.methods.fedavg import FedAvg
from solera.methods.feddf import FedDF
from solera.methods.fedet import FedET
from solera.methods.fusionlarge import FusionLarge, hard
from solera.methods.steps.screen import Robust, Screen
from solera.methods.steps.training import head_of
from solera.models import wrap
from solera.runs.loop import check_server
from solera.testing import check_method, run_toy, small, split_wide, toy_for, wide
from solera.train.distill import Distill
from solera.train.fitting import Local
from solera.train.teachers import Ensemble
from toys import Constant, Conv, World, images, mlp, same_bits, spoil

TRAINING = {"epochs": 2, "batch": 8, "lr": 0.05}
LOCAL = Local(**TRAINING)
FUSION = Distill(steps=6, batch=16)
SGD = Distill(steps=7, batch=16, optimizer="sgd", lr=0.05, schedule="constant", clip=None)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
BUILDERS = {
    "c": lambda: wrap(Conv(0), "8", representation=8, head_hidden=8),
    "m": lambda: wrap(mlp(1), "3", representation=8, head_hidden=8),
    "large": lambda: wrap(mlp(2, width=64), "3", representation=8, head_hidden=8),
}


def world(tmp, **options) -> World:
    """Five clients of different sizes, two architectures (one with BatchNorm), a larger model on the server."""
    parties = [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)]
    made = World(tmp, BUILDERS, parties, **{"public": images(40, seed=9)[0], "large": "large", **options})
    made.server.architectures.remove("large")
    return made


@pytest.mark.parametrize(
    "screen",
    [
        Screen(),
        Screen("uniform", buffers="last"),
        Robust("median", update_clip=1.0),
        Robust(drop_worst=True, teachers_by="multi_krum"),
    ],
    ids=str,
)
def test_the_small_models_are_those_of_feddf_bit_for_bit(tmp_path, screen):
    data = {"fraction": 0.6, "validation": Data(*images(60, seed=4))}
    a = world(tmp_path / "a", **data).run(FedDF(LOCAL, FUSION, screen=screen), 3)[-1]
    b = world(tmp_path / "b", **data).run(FusionLarge(LOCAL, FUSION, screen=screen), 3)[-1]
    assert digest(a.weights) == digest(b.small)


def test_the_small_models_are_those_of_fedavg_unless_distilled(tmp_path):
    a = world(tmp_path / "a", fraction=0.6).run(FedAvg(LOCAL), 3)[-1]
    b = world(tmp_path / "b", fraction=0.6).run(FusionLarge(LOCAL, FUSION, client_models="averaged"), 3)[-1]
    assert digest(a.weights) == digest(b.small)


def test_the_large_model_goes_on_from_where_it_was(tmp_path):
    """In the first round from its initial weights, in the second from those of the first."""
    w = world(tmp_path)
    x, states = images(40, seed=9)[0], w.run(FusionLarge(LOCAL, FUSION), 2)
    for t, (before, after) in enumerate(itertools.pairwise(states)):
        models = []
        for k, seed in zip(w.fed.clients, w.seeds[5 * t : 5 * t + 5], strict=True):
            models.append(w.server.model(w.fed.architecture(k), before.small[w.fed.architecture(k)]))
            by_hand.train(models[-1], w.data[k].inputs, w.data[k].labels, **TRAINING, seed=seed)
        w.fed.begin(t)
        hands = by_hand.batches(40, FUSION.steps, FUSION.batch, w.fed.seed("fusion"))
        loss = by_hand.kl_towards(by_hand.mean_logits(models, x))

        def taught(start, loss=loss, hands=hands):
            student = w.server.model("large", start.large.weights)
            by_hand.teach(student, x, loss, hands, optimizer="adam", lr=1e-3, cosine=True, clip=5.0)
            return student.state_dict()

        assert by_hand.close(after.large.weights, taught(before))
    assert not by_hand.close(after.large.weights, taught(states[0]))


def test_fed_et_is_a_setting_of_it(tmp_path):
    """Without the diversity term. Cross-entropy is summed in another order: equal but for rounding."""
    back = FusionLarge(
        LOCAL,
        SGD,
        ensemble="confidence",
        targets="hard",
        client_models="averaged",
        head="shared",
        screen=Screen("uniform"),
    )
    a = world(tmp_path / "a").run(FedET(LOCAL, SGD, diversity=0.0), 2)[-1]
    b = world(tmp_path / "b").run(back, 2)[-1]
    torch.testing.assert_close(a.large.weights, b.large.weights, rtol=0, atol=1e-5)
    for P in "cm":
        torch.testing.assert_close(a.small[P], b.small[P], rtol=0, atol=1e-5)
    assert digest(world(tmp_path / "c").run(dataclasses.replace(back, targets="soft"), 2)[-1]) != digest(b)


def test_a_shared_head_reaches_the_small_models_before_they_are_distilled(tmp_path):
    still = dataclasses.replace(FUSION, lr=0.0, student_norm="frozen")
    end = world(tmp_path / "a").run(FusionLarge(LOCAL, still, head="shared"))[-1]
    for P in "cm":
        assert same_bits(head_of(end.small[P]), head_of(end.large.weights))
    moved = world(tmp_path / "b").run(FusionLarge(LOCAL, FUSION, head="shared"))[-1]
    assert not same_bits(head_of(moved.small["c"]), head_of(moved.large.weights))


def test_hard_targets_are_certain_and_their_loss_is_cross_entropy():
    teacher = Ensemble([Constant(2.0, 0.0, -1.0), Constant(0.0, 1.0, 1.0)])
    probs, entropy = hard(teacher, torch.zeros(4, 1))
    assert probs.tolist() == [[1.0, 0.0, 0.0]] * 4
    assert entropy.tolist() == [0.0] * 4


def test_the_best_student_on_the_validation_set_is_kept(tmp_path):
    w = world(tmp_path, validation=Data(*images(60, seed=3)))
    w.run(FusionLarge(LOCAL, dataclasses.replace(FUSION, every=2, keep_init_if_better=True)))
    assert all(e["accuracy"] is not None for e in w.events("distilled"))
    assert [e["architecture"] for e in w.events("distilled")] == ["large", "c", "m"]


def test_an_architecture_without_a_client_stays_and_gets_a_shared_head_only(tmp_path):
    for head in ("own", "shared"):
        w = world(tmp_path / head)
        w.fed.sample = lambda: ["c1", "c3"]
        start, end = w.run(FusionLarge(LOCAL, FUSION, head=head))
        expected = start.small["c"] | (head_of(end.large.weights) if head == "shared" else {})
        assert same_bits(end.small["c"], expected)


def test_a_round_without_a_usable_upload_changes_nothing(tmp_path):
    w = world(tmp_path)
    method = FusionLarge(LOCAL, FUSION)
    start = method.init(w.fed, w.server)
    spoil(w, *w.fed.clients)
    with pytest.raises(QuorumNotMet, match=r"0 of 5 clients .*non-finite logits on public samples"):
        w.run(method, state=start)


def test_answers_on_disk_give_the_same_bits(tmp_path):
    ends = [
        world(tmp_path / str(kept)).run(FusionLarge(LOCAL, dataclasses.replace(FUSION, **kept)))[-1]
        for kept in ({}, {"cache_on_disk": True}, {"cache_dtype": "float16"})
    ]
    assert digest(ends[0]) == digest(ends[1]) != digest(ends[2])


@pytest.mark.parametrize("head", ["own", "shared"])
@pytest.mark.parametrize("client_models", ["distilled", "averaged"])
def test_all_students_share_what_the_teachers_say_to_each_draw(tmp_path, monkeypatch, head, client_models):
    w, asked, call = world(tmp_path), [], Ensemble.__call__
    w.server.public.fresh = True
    w.server.public.draw = lambda i, seed: w.server.public[i] + seed % 7 / 50
    monkeypatch.setattr(Ensemble, "__call__", lambda self, x: asked.append(len(x)) or call(self, x))
    w.run(FusionLarge(LOCAL, FUSION, head=head, client_models=client_models))
    assert len(w.events("distilled")) == (3 if client_models == "distilled" else 1)
    assert asked == [16] * FUSION.steps


def test_no_steps_leave_the_large_model_and_average_the_others(tmp_path):
    start, end = world(tmp_path / "a").run(FusionLarge(LOCAL, Distill(steps=0)))
    assert same_bits(start.large.weights, end.large.weights)
    assert digest(end.small) == digest(world(tmp_path / "b").run(FedAvg(LOCAL))[-1].weights)


def test_more_workers_give_the_same_bits(tmp_path):
    a = world(tmp_path / "a").run(FusionLarge(LOCAL, FUSION), 2)[-1]
    b = world(tmp_path / "b", workers=2).run(FusionLarge(LOCAL, FUSION), 2)[-1]
    assert digest(a) == digest(b)


def test_any_client_model_will_do_unless_heads_are_shared(tmp_path):
    assert set(run_toy(small(FusionLarge()), tmp_path / "a", rounds=1).models) == {"wide", "deep", "large"}
    with pytest.raises(ConfigError, match=r"'wide' is a plain Sequential.*solera\.models\.wrap"):
        run_toy(FusionLarge(head="shared"), tmp_path / "b", models={"wide": wide})
    shared = toy_for(FusionLarge(head="shared"))
    assert {type(shared.server.template(P)).__name__ for P in ("wide", "deep", "large")} == {"SplitModel"}
    assert type(split_wide()).__name__ == "SplitModel"


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"models\.server"):
        run_toy(FusionLarge(), tmp_path, server=None)
    with pytest.raises(ConfigError, match=r"data\.validation"):
        run_toy(FusionLarge(fusion=Distill(keep_init_if_better=True)), tmp_path, validation=0.0)
    w = world(tmp_path, large=None)
    with pytest.raises(ConfigError, match=r"models\.server"):
        check_server(FusionLarge(), w.server)


def test_it_learns_on_the_toy_federation(tmp_path):
    method = FusionLarge(Local(epochs=4, batch=16, lr=0.1), Distill(steps=60, batch=32, lr=0.01))
    result = run_toy(method, tmp_path, rounds=6)
    assert all(m["accuracy"] > 0.85 for m in result.summary["models"].values())
    assert result.summary["ensembles"]["teachers"]["accuracy"] > 0.85


def test_contract_with_a_shared_head(tmp_path):
    check_method(FusionLarge(head="shared", targets="hard", ensemble="confidence"), tmp_path, engines=["processes"])
