"""The generalised framework: what its settings are equal to, its oracles, and what it does where groups are missing."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import by_hand
from run_directories import lines_of
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig, QuorumNotMet
from solera.core.randomness import seed_from
from solera.core.task import Data
from solera.core.wire import digest
from solera.method import described
from solera.methods.fedavg import FedAvg, FedAvgM, FedProx
from solera.methods.fedbe import FedBE, FedDistill
from solera.methods.feddf import FedDF
from solera.methods.fedeed import Codistillation, FedEED, FedEnsemble
from solera.methods.framework.algorithm import Framework
from solera.methods.framework.cohort import Cohort
from solera.methods.framework.ensemble_trainers import Bayesian, Clients, EnsembleTrainer, Member
from solera.methods.framework.global_trainers import Basic, Codistilling, GlobalTrainer, NoDistillation, Warmup
from solera.methods.framework.grouping import Seeds, split
from solera.methods.framework.local_trainers import (
    FedAvgMTrainer,
    FedProxTrainer,
    LocalTrainer,
    PerGroup,
    ScaffoldTrainer,
)
from solera.methods.scaffold import Scaffold
from solera.methods.steps.screen import Robust, Screen
from solera.runs.config import EngineConfig, RunConfig, load_config
from solera.runs.loop import check_server, simulate
from solera.testing import check_method, deep, run_toy, toy, wide
from solera.train.distill import Distill
from solera.train.fitting import Local, fit
from solera.train.teachers import Ensemble
from toys import Constant, Conv, Quadratic, World, images, kept_by, mlp, quadratic_data, same_bits

LOCAL = Local(epochs=1, batch=8, lr=0.05)
FUSION = Distill(steps=6, batch=16)
PER_GROUP = PerGroup(parts=(LocalTrainer(), ScaffoldTrainer()))
CLIENTS, BASIC, NONE = Clients(), Basic(), NoDistillation()
DESIGNATED = GlobalTrainer()


def mixed(tmp, **options) -> World:
    """Ten clients of different sizes, two architectures (one with BatchNorm), 40 public samples."""
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    parties = [(P, Data(*images(n, n))) for n, P in zip(range(5, 15), "cm" * 5, strict=True)]
    return World(tmp, builders, parties, **{"public": images(40, seed=9)[0], **options})


def one_kind(tmp, n: int = 8, **options) -> World:
    """Clients of one architecture (with BatchNorm)."""
    parties = [("c", Data(*images(5 + i, i))) for i in range(n)]
    return World(tmp, {"c": seeded_conv}, parties, **{"public": images(40, seed=9)[0], **options})


def seeded_conv() -> Conv:
    """A new initialisation every time it is built, from the generator the server seeds."""
    return Conv(int(torch.randint(10**6, ())))


def taught(world: World, t: int, student, teachers) -> dict:
    """A student after the distillation of round t, by hand."""
    x = images(40, seed=9)[0]
    world.fed.begin(t)
    hands = by_hand.batches(40, FUSION.steps, FUSION.batch, world.fed.seed("fusion"))
    loss = by_hand.kl_towards(by_hand.mean_logits(teachers, x))
    by_hand.teach(student, x, loss, hands, optimizer="adam", lr=1e-3, cosine=True, clip=5.0)
    return student.state_dict()


def close(a: dict, b: dict) -> bool:
    return by_hand.close(a, b, ignoring=by_hand.WITHOUT_GRADIENT)


def framework(**settings) -> Framework:
    return Framework(**{"local": LOCAL, "fusion": FUSION, **settings})


def clients_of(world: World, t: int, method) -> dict:
    """Who is in which group in round t."""
    world.fed.begin(t)
    return split(method.shares, method.schedule, world.fed, world.server)


def weights(state, k: int = 0) -> dict:
    return {P: own[k] for P, own in state.models.items()}


# ---- what it must not do, by name -----------------------------------------------------------------


def test_the_other_groups_train_while_the_teachers_are_asked(tmp_path, monkeypatch):
    """Where the clients are only called after the teachers were asked, nothing overlaps (and no number tells)."""
    world, order = one_kind(tmp_path), []
    call, start = Ensemble.__call__, Cohort.start

    def started(self, groups, *rest):
        order.append(sorted(k for _, k in groups))
        start(self, groups, *rest)

    monkeypatch.setattr(Cohort, "start", started)
    monkeypatch.setattr(Ensemble, "__call__", lambda self, x: order.append("asked") or call(self, x))
    world.run(FedEED(LOCAL, FUSION, K=3, pipeline=True), 2)
    second = order[order.index([1, 2], 1) :]  # of the second round
    assert second[0] == [1, 2]
    assert set(second[1:-1]) == {"asked"}
    assert second[-1] == [0]  # the designated model is ready last


def test_fedeed_never_stops_early(tmp_path):
    """Also where the server has a validation set and the framework would: the paper dropped it."""
    fusion = Distill(steps=40, batch=16, lr=0.0, student_norm="frozen", every=1, patience=1)
    steps = {}
    for name, method in (("fedeed", FedEED(LOCAL, fusion, K=2)), ("framework", framework(fusion=fusion, K=2))):
        world = one_kind(tmp_path / name, validation=Data(*images(30, seed=3)))
        world.run(method)
        steps[name] = [e["steps"] for e in world.events("distilled")]
        assert [e["accuracy"] is None for e in world.events("distilled")] == [name == "fedeed"]
    assert steps == {"fedeed": [40], "framework": [2]}  # a student that never gets better is given up


# ---- what it is equal to ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"average": how} for how in ("weighted", "uniform", "median", "trimmed_mean", "krum", "multi_krum", "bulyan")]
    + [{"average": "weighted", "update_clip": 1.0}, {"average": "median", "max_byzantine": 0, "update_clip": 0.5}],
    ids=str,
)
def test_one_group_clients_basic_is_feddf_bit_for_bit(tmp_path, settings):
    screen = Robust(**settings)
    method = framework(K=1, screen=screen, ensemble_trainer=CLIENTS, global_trainer=BASIC)
    ours = mixed(tmp_path / "a", fraction=0.6).run(method, 3)
    theirs = mixed(tmp_path / "b", fraction=0.6).run(FedDF(LOCAL, FUSION, screen=screen), 3)
    for a, b in zip(ours, theirs, strict=True):
        assert digest(weights(a)) == digest(b.weights)


def test_and_with_early_stopping_and_a_proximal_term_too(tmp_path):
    validation = Data(*images(60, seed=4))
    fusion = Distill(steps=12, batch=16, every=3, patience=3, keep_init_if_better=True)
    method = framework(
        K=1,
        fusion=fusion,
        local_trainer=FedProxTrainer(mu=0.5),
        ensemble_trainer=CLIENTS,
        global_trainer=BASIC,
    )
    ours = mixed(tmp_path / "a", validation=validation).run(method, 2)[-1]
    theirs = mixed(tmp_path / "b", validation=validation).run(FedDF(LOCAL, fusion, mu=0.5), 2)[-1]
    assert digest(weights(ours)) == digest(theirs.weights)


def test_and_on_a_whole_run_with_dropout_and_batchnorm(tmp_path):
    local, fusion = Local(epochs=1, batch=16), Distill(steps=6, batch=16)
    ours = Framework(local, fusion, ensemble_trainer=CLIENTS, global_trainer=BASIC, K=1)
    a = run_toy(ours, tmp_path / "a")
    b = run_toy(FedDF(local, fusion), tmp_path / "b")
    assert digest({P: m.weights for P, m in a.models.items()}) == digest({P: m.weights for P, m in b.models.items()})
    assert a.summary["models"] == b.summary["models"]
    assert a.summary["bytes"] == b.summary["bytes"]


@pytest.mark.parametrize("needs_models", [False, True])
@pytest.mark.parametrize(
    ("trainer", "method"),
    [
        (LocalTrainer(), FedAvg(LOCAL)),
        (LocalTrainer(), FedAvg(LOCAL, "uniform")),
        (FedProxTrainer(mu=0.3), FedProx(LOCAL, mu=0.3)),
        (FedAvgMTrainer(momentum=0.4), FedAvgM(LOCAL, momentum=0.4)),
        (ScaffoldTrainer(), Scaffold(LOCAL)),
        (ScaffoldTrainer(weighted=True), Scaffold(LOCAL, weighted=True)),
        (ScaffoldTrainer(shared_c=True), Scaffold(LOCAL)),
    ],
    ids=lambda x: getattr(x, "kind", None),
)
def test_one_group_without_distillation_is_the_local_trainers_method(tmp_path, trainer, method, needs_models):
    ensemble = CLIENTS if needs_models else EnsembleTrainer()
    screen = Screen(getattr(method, "average", "weighted"))
    ours = framework(K=1, local_trainer=trainer, ensemble_trainer=ensemble, global_trainer=NONE, screen=screen)
    a = mixed(tmp_path / "a", fraction=0.6, public=None).run(ours, 3)[-1]
    b = mixed(tmp_path / "b", fraction=0.6, public=None).run(method, 3)[-1]
    assert digest(weights(a)) == digest(b.weights)


def test_designated_leaves_the_other_models_as_none_does(tmp_path):
    a = one_kind(tmp_path / "a").run(framework(K=3, global_trainer=DESIGNATED), 3)[-1]
    b = one_kind(tmp_path / "b").run(framework(K=3, global_trainer=NONE), 3)[-1]
    for k in (1, 2):
        assert same_bits(a.models["c"][k], b.models["c"][k])
    assert not same_bits(a.models["c"][0], b.models["c"][0])


def test_warm_up_is_none_for_w_rounds(tmp_path):
    none = one_kind(tmp_path / "n").run(framework(K=2, global_trainer=NONE), 4)
    basic = one_kind(tmp_path / "b").run(framework(K=2, global_trainer=BASIC), 1)
    warm = one_kind(tmp_path / "w").run(framework(K=2, global_trainer=Warmup(warmup=2)), 4)
    assert [digest(s) for s in warm[:3]] == [digest(s) for s in none[:3]]
    assert digest(warm[3]) != digest(none[3])
    assert digest(basic[1]) != digest(none[1])
    at_once = one_kind(tmp_path / "0").run(framework(K=2, global_trainer=Warmup(warmup=0)), 1)
    assert digest(at_once[1]) == digest(basic[1])


def test_one_model_teaching_itself_does_not_move(tmp_path):
    still = dataclasses.replace(FUSION, student_norm="frozen")
    a = one_kind(tmp_path / "a").run(framework(K=1, fusion=still), 2)[-1]
    b = one_kind(tmp_path / "b").run(FedAvg(LOCAL), 2)[-1]
    assert digest(weights(a)) == digest(b.weights)
    moving = one_kind(tmp_path / "c")
    c = moving.run(framework(K=1, fusion=dataclasses.replace(FUSION, lr=0.0)), 1)[-1]
    plain = one_kind(tmp_path / "d").run(FedAvg(LOCAL), 1)[-1].weights["c"]
    assert {n for n in plain if not torch.equal(plain[n], c.models["c"][0][n])} <= {n for n in plain if "1." in n}


def test_a_round_of_fedeed_is_what_the_paper_says(tmp_path):
    world = one_kind(tmp_path)
    method = FedEED(LOCAL, FUSION, K=2, R=2)
    start, one, two = world.run(method, 2)
    teachers = [world.server.model("c", m.weights) for checkpoint in two.history for m in checkpoint]
    assert len(teachers) == 4
    for k in (0, 1):  # before distillation: no star
        own = [i for i, (_, g) in clients_of(world, 0, method).items() if g == k]
        sent = [world.server.model("c", start.models["c"][k]) for _ in own]
        for i, model in zip(own, sent, strict=True):
            seed = seed_from(0, 0, 0 if k else 1, i, "task")  # the designated group is the second exchange
            by_hand.train(model, world.data[i].inputs, world.data[i].labels, epochs=1, batch=8, lr=0.05, seed=seed)
        mean = by_hand.mean_of(sent, [len(world.data[i]) for i in own])
        assert by_hand.close(mean, one.history[0][k].weights)
    student = world.server.model("c", two.history[-1][0].weights)
    assert close(taught(world, 1, student, teachers), two.models["c"][0])
    assert same_bits(two.models["c"][1], two.history[-1][1].weights)
    assert not same_bits(start.models["c"][0], start.models["c"][1])  # K independent seeds


# ---- oracles ---------------------------------------------------------------------------------------


def test_eed_1_groups_are_disjoint_complete_and_fixed_by_the_seed(tmp_path):
    world = one_kind(tmp_path)
    seen = []
    for t in range(3):
        world.fed.begin(t)
        group = split((1, 1, 1), "random", world.fed, world.server)
        assert list(group) == world.fed.sample()
        assert sorted(Counter(k for _, k in group.values()).items()) == [(0, 3), (1, 3), (2, 2)]
        assert split((1, 1, 1), "random", world.fed, world.server) == group
        seen.append(tuple(group.values()))
    assert len(set(seen)) == 3


def test_uneven_groups(tmp_path):
    world = one_kind(tmp_path)
    group = split((4, 2, 2), "random", world.fed, world.server)
    assert Counter(group.values()) == {("c", 0): 4, ("c", 1): 2, ("c", 2): 2}
    state = world.run(framework(K=3, group_sizes=(4, 2, 2)))[-1]
    assert world.events("groups_empty") == []
    assert len(state.models["c"]) == 3


def test_eed_2_ensemble_sizes(tmp_path):
    method = FedEED(LOCAL, FUSION, K=4, R=4)
    states = one_kind(tmp_path).run(method, 5)
    assert [len(method.ensemble_of(s).members) for s in states[1:]] == [4, 8, 12, 16, 16]


def test_eed_3_the_teacher_is_the_mean_of_logits():
    class Server:
        def model(self, P, weights):
            return Constant(*weights["logits"].tolist())

    logits = [(1.0, 0.0), (0.0, 1.0), (3.0, 0.0), (0.0, 2.0)]
    members = [Member("p", i % 2, {"logits": torch.tensor(z)}, 1.0) for i, z in enumerate(logits)]
    for T, expected in ((1.0, (0.5621765, 0.4378235)), (4.0, (0.51561992, 0.48438008))):
        p, _ = EnsembleTrainer().teacher(members, "avg_logits", T, Server())(torch.zeros(3, 1))
        assert p[0].tolist() == pytest.approx(expected, abs=5e-9)


def test_eed_4_traffic(tmp_path):
    def floats(trainer):
        world = World(
            tmp_path / str(trainer), {"m": lambda: mlp(0)}, [("m", Data(*images(8)))] * 4, public=images(9)[0]
        )
        world.run(framework(K=2, local_trainer=trainer))
        return sum(t.floats for way in (world.fed.down, world.fed.up) for t in way.values())

    plain = floats(LocalTrainer())
    assert floats(FedProxTrainer()) == plain
    assert floats(ScaffoldTrainer()) == 2 * plain


def test_be_5_ensemble_size(tmp_path):
    method = FedBE(LOCAL, FUSION, save_ensemble=True)
    state = one_kind(tmp_path, 8).run(method)[-1]
    assert len(method.ensemble_of(state).members) == 10 + 8 + 1
    assert FedBE(LOCAL, FUSION).ensemble_of(one_kind(tmp_path / "b").run(FedBE(LOCAL, FUSION))[-1]) is None


def test_scaffold_variates_are_kept_for_each_client_and_group(tmp_path):
    """SCA-1 in one group, while the other group's clients and variate know nothing of it."""
    parties = [("q", Data(*quadratic_data(a, b))) for a, b in ((1, 1), (2, -1), (1, 1), (2, -1))]
    world = World(tmp_path, {"q": Quadratic}, parties, classes=2)
    method = Framework(Local(steps=2, lr=0.1), local_trainer=ScaffoldTrainer(), global_trainer=NONE, K=2)
    group = {"c0": ("q", 0), "c1": ("q", 0), "c2": ("q", 1), "c3": ("q", 1)}
    swapped = {k: ("q", 1 - g) for k, (_, g) in group.items()}
    state = method.init(world.fed, world.server)
    plans = iter([group, swapped])

    def planned(*_):
        return next(plans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("solera.methods.framework.algorithm.split", planned)
        for t in range(2):
            world.fed.begin(t)
            state = method.round(state, world.fed, world.server)
            held = [set(kept_by(world.fed, k)) for k in group]
            assert held[0] == ({"control.0"} if t == 0 else {"control.0", "control.1"})
            if t == 0:  # one of N = 4 clients each: x = -0.085 and c = 0.425 / 2 in either group
                assert [x["x"].item() for x in state.models["q"]] == pytest.approx([-0.085] * 2, abs=1e-12)
                assert [c["x"].item() for c in state.memory["q"]] == pytest.approx([0.2125] * 2, abs=1e-12)
    first = kept_by(world.fed, "c0")
    assert first["control.0"]["x"].item() == pytest.approx(-0.95, abs=1e-12)  # untouched by the visit to the other


def test_shared_variates_are_one_for_each_client_and_architecture(tmp_path):
    world = one_kind(tmp_path)
    method = framework(K=2, local_trainer=ScaffoldTrainer(shared_c=True))
    state = world.run(method, 2)[-1]
    assert set(kept_by(world.fed, "c0")) == {"control"}
    assert state.memory["c"][1] == {}
    own = one_kind(tmp_path / "own").run(framework(K=2, local_trainer=ScaffoldTrainer()), 2)[-1]
    assert digest(own.models) != digest(state.models)


# ---- who teaches whom ------------------------------------------------------------------------------


@pytest.mark.parametrize("exclude", [False, True])
def test_students_share_what_the_teachers_say_to_each_draw_unless_teachers_differ(tmp_path, monkeypatch, exclude):
    world, asked, call = one_kind(tmp_path), [], Ensemble.__call__
    world.server.public.fresh = True
    world.server.public.draw = lambda i, seed: world.server.public[i] + seed % 7 / 50
    monkeypatch.setattr(Ensemble, "__call__", lambda self, x: asked.append(len(x)) or call(self, x))
    trainer = Codistilling(warmup=0, exclude_self=exclude)
    world.run(framework(K=3, global_trainer=trainer))
    assert len(world.events("distilled")) == 3
    assert asked == [16] * FUSION.steps * (3 if exclude else 1)


def test_answers_on_disk_give_the_same_bits(tmp_path):
    ends = [
        one_kind(tmp_path / str(kept)).run(framework(K=2, fusion=dataclasses.replace(FUSION, **kept)))[-1]
        for kept in ({}, {"cache_on_disk": True}, {"cache_dtype": "float16"})
    ]
    assert digest(ends[0]) == digest(ends[1]) != digest(ends[2])


def test_exclude_self_has_the_other_model_alone_as_teacher(tmp_path):
    world = one_kind(tmp_path)
    method = Codistillation(LOCAL, FUSION, K=2, global_trainer=Codistilling(warmup=0, exclude_self=True))
    end = world.run(method)[-1]
    for k in (0, 1):
        own, other = (world.server.model("c", end.history[-1][i].weights) for i in (k, 1 - k))
        assert close(taught(world, 0, own, [other]), end.models["c"][k])


def test_a_model_alone_has_no_teacher_but_itself(tmp_path):
    alone = one_kind(tmp_path / "a")
    a = alone.run(Codistillation(LOCAL, FUSION, K=1, global_trainer=Codistilling(warmup=0, exclude_self=True)), 2)[-1]
    b = one_kind(tmp_path / "b").run(FedAvg(LOCAL), 2)[-1]
    assert digest(weights(a)) == digest(b.weights)
    assert alone.events("distilled") == []


def test_codistillation_with_self_is_basic_after_its_warm_up(tmp_path):
    a = one_kind(tmp_path / "a").run(Codistillation(LOCAL, FUSION, K=2, global_trainer=Codistilling(warmup=1)), 2)[-1]
    b = one_kind(tmp_path / "b").run(framework(K=2, global_trainer=Warmup(warmup=1)), 2)[-1]
    assert digest(a) == digest(b)


def test_clients_of_several_groups_teach_all_students(tmp_path):
    world = one_kind(tmp_path)
    method = framework(K=2, ensemble_trainer=CLIENTS, global_trainer=BASIC, save_ensemble=True)
    state = world.run(method)[-1]
    assert [m.group for m in state.history[-1]].count(0) == 4
    assert len(state.history[-1]) == 8
    assert len(world.events("distilled")) == 2


def test_weighted_clients_count_by_their_examples(tmp_path):
    method = framework(K=1, ensemble_trainer=Clients(weighted=True), save_ensemble=True)
    state = one_kind(tmp_path).run(method)[-1]
    assert [m.share for m in state.history[-1]] == [5.0 + i for i in range(8)]
    plain = one_kind(tmp_path / "p").run(framework(K=1, ensemble_trainer=CLIENTS))[-1]
    assert digest(plain.models) != digest(state.models)


def test_confidence_is_fed_ets_weighting(tmp_path):
    ends = {
        rule: digest(one_kind(tmp_path / rule).run(FedEED(LOCAL, FUSION, K=2, rule=rule))[-1])
        for rule in ("avg_logits", "avg_probs", "confidence")
    }
    assert len(set(ends.values())) == 3


@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet", "swag"])
def test_drawn_teachers(tmp_path, posterior):
    ensemble = Bayesian(posterior=posterior, samples=3)
    method = framework(K=2, ensemble_trainer=ensemble, global_trainer=BASIC, save_ensemble=True)
    world = mixed(tmp_path)
    state = world.run(method)[-1]
    groups = Counter((m.architecture, m.group) for m in state.history[-1])
    assert groups == {("c", 0): 3 + 1 + 3, ("c", 1): 2 + 1 + 3, ("m", 0): 7, ("m", 1): 6}
    drawn = [m.weights for m in state.history[-1] if (m.architecture, m.group) == ("c", 0)][-1]
    probe, _ = images(40, seed=9)
    if posterior != "dirichlet":  # nobody trained it: its statistics are those of the public samples
        model = world.server.model("c", drawn)
        torch.testing.assert_close(model[1].running_mean, model[0](probe).mean((0, 2, 3)), atol=1e-5, rtol=1e-4)
    assert digest(mixed(tmp_path / "again").run(method)[-1]) == digest(state)


def test_feddistill_can_leave_the_clients_out(tmp_path):
    for include, size in ((True, 8 + 10), (False, 10)):
        swag = Bayesian(posterior="swag", include_average=False, include_clients=include)
        method = FedDistill(LOCAL, FUSION, ensemble_trainer=swag, save_ensemble=True)
        state = one_kind(tmp_path / str(include)).run(method)[-1]
        assert len(method.ensemble_of(state).members) == size


def test_fedbes_sharpened_and_normalised_variants_differ(tmp_path):
    settings = [{}, {"sharpen": 0.5}, {"update_normalised": True}, {"posterior": "dirichlet"}]
    methods = [FedBE(LOCAL, FUSION, ensemble_trainer=Bayesian(**s)) for s in settings]
    ends = [one_kind(tmp_path / str(i)).run(method)[-1] for i, method in enumerate(methods)]
    assert len({digest(e.models) for e in ends}) == len(settings)


def test_one_designated_student_for_each_architecture(tmp_path):
    world = mixed(tmp_path)
    method = framework(K=2)
    state = world.run(method)[-1]
    assert [(e["architecture"], e["group"]) for e in world.events("distilled")] == [("c", 0), ("m", 0)]
    assert set(method.models(state)) == {"c", "m"}
    assert {(m.architecture, m.group) for m in state.history[-1]} == {(P, k) for P in "cm" for k in (0, 1)}
    every = framework(K=2, global_trainer=BASIC)
    assert set(every.models(state)) == {"c", "c.1", "m", "m.1"}
    assert every.models(state)["m.1"].weights is state.models["m"][1]


# ---- Fed-ensemble's schedule -------------------------------------------------------------------------


def test_strata_are_fixed_and_each_model_meets_each_once_in_an_age(tmp_path):
    world = one_kind(tmp_path, 9)
    trained: dict[int, list[frozenset]] = {0: [], 1: [], 2: []}
    for t in range(6):
        world.fed.begin(t)
        group = split((1, 1, 1), "strata", world.fed, world.server)
        for k in trained:
            trained[k].append(frozenset(c for c, (_, g) in group.items() if g == k))
    strata = set(trained[0])
    assert sorted(len(s) for s in strata) == [3, 3, 3]
    for k in trained:
        assert set(trained[k][:3]) == set(trained[k][3:]) == strata
    state = world.run(FedEnsemble(LOCAL, K=3, schedule="strata"), 2)[-1]
    assert len(state.history[-1]) == 3


def test_fed_ensemble_needs_no_public_samples(tmp_path):
    world = one_kind(tmp_path, public=None)
    method = FedEnsemble(LOCAL, K=2)
    end = world.run(method)[-1]
    assert described(method).public == "none"
    assert set(method.models(end)) == {"c", "c.1"}
    (report,) = world.server.ensembles
    assert [w for _, w in report.members] == [m.weights for m in end.history[-1]]


# ---- overlap -----------------------------------------------------------------------------------------


def overlapping(out, pipeline, engine="inprocess", rounds=4, models=None, **settings):
    method = FedEED(Local(epochs=1, batch=16), Distill(steps=6, batch=16), K=2, R=2, pipeline=pipeline, **settings)
    scenario = toy(models or {"wide": wide, "deep": deep})
    config = RunConfig(rounds=rounds)
    return simulate(scenario, method, out, config, FederationConfig(0.75), EngineConfig(engine, 2), resume=True)


@pytest.mark.parametrize("trainer", [LocalTrainer, ScaffoldTrainer])
def test_overlap_changes_no_bit(tmp_path, trainer):
    # The architecture with dropout is the second one: its student must not depend on who is distilled beside it.
    settings = {"local_trainer": trainer(), "models": {"broad": wide, "deep": deep}}
    off = overlapping(tmp_path / "off", False, **settings)
    for engine in ("processes", "inprocess"):
        found = overlapping(tmp_path / engine, True, engine, **settings)
        assert found.digest == off.digest, engine
        assert found.summary["models"]["deep"]["accuracy"] == off.summary["models"]["deep"]["accuracy"]


def test_overlapping_rounds_report_the_designated_model_of_the_round_before_but_the_last(tmp_path):
    for name, pipeline in (("off", False), ("on", True)):
        overlapping(tmp_path / name, pipeline)
    off, on = ([m["models"] for m in lines_of(tmp_path / name)] for name in ("off", "on"))
    assert on[1:-1] == off[:-2]
    assert on[-1] == off[-1]
    off, on = ([m["ensembles"] for m in lines_of(tmp_path / name)] for name in ("off", "on"))
    assert on == off


def test_an_overlapping_run_goes_on_after_its_end_as_if_there_had_been_none(tmp_path):
    for rounds in (1, 3, 4):
        stepwise = overlapping(tmp_path / "steps", True, rounds=rounds)
    assert stepwise.digest == overlapping(tmp_path / "once", False).digest


def test_nothing_is_distilled_twice(tmp_path):
    for pipeline in (False, True):
        overlapping(tmp_path / str(pipeline), pipeline)
        events = [e for m in lines_of(tmp_path / str(pipeline)) for e in m["events"] if e["kind"] == "distilled"]
        assert Counter((e["architecture"], e["of_round"]) for e in events) == {
            (P, t): 1 for P in ("deep", "wide") for t in range(4)
        }


def test_the_timeline_shows_what_overlaps(tmp_path):
    def spans(pipeline):
        overlapping(tmp_path / str(pipeline), pipeline, "processes", rounds=2)
        last = lines_of(tmp_path / str(pipeline))[-1]
        events = [e for e in last["events"] if e["kind"] == "timeline"]
        others = next(e for e in events if e["what"] == "train" and "deep.1" in e["groups"])
        return (
            others,
            [e for e in events if e["what"] == "distil"],
            [e for e in events if "deep.0" in e.get("groups", ())],
        )

    others, (distil,), (first,) = spans(False)
    assert distil["start"] >= max(others["end"], first["end"])
    others, distil, (first,) = spans(True)
    assert others["start"] <= distil[0]["start"] < distil[0]["end"] <= others["end"]
    assert first["start"] >= distil[0]["end"]


def test_a_void_round_puts_the_distillation_off_once_more(tmp_path):
    def end(pipeline):
        world, method = one_kind(tmp_path / str(pipeline)), FedEED(LOCAL, FUSION, K=2, pipeline=pipeline)
        state = world.run(method, 2)[-1]
        world.fed.begin(2)
        data, world.data = world.data, dict.fromkeys(world.data)  # everybody fails
        with pytest.raises(QuorumNotMet):
            method.round(state, world.fed, world.server)
        world.data = data
        world.fed.begin(3)
        return digest(method.finish(method.round(state, world.fed, world.server), world.fed, world.server))

    assert end(False) == end(True)


# ---- groups that are missing, and numbers that are not -------------------------------------------------


def only(world: World, *ids: str) -> World:
    world.fed.sample = lambda: list(ids)
    return world


def test_an_empty_group_keeps_its_model_and_stays_in_the_ensemble(tmp_path):
    world = only(one_kind(tmp_path), "c0", "c1")
    start, end = world.run(FedEED(LOCAL, FUSION, K=4))
    (event,) = world.events("groups_empty")
    assert event["groups"] == [2, 3]
    assert len(end.history[-1]) == 4
    for k in (2, 3):
        assert same_bits(end.models["c"][k], start.models["c"][k])
        assert same_bits(end.history[-1][k].weights, start.models["c"][k])
    assert not same_bits(end.models["c"][1], start.models["c"][1])


def test_a_designated_model_without_clients_is_distilled_from_its_old_weights(tmp_path):
    world = only(mixed(tmp_path), "c1", "c3", "c5", "c7")  # of architecture m alone
    start, end = world.run(framework(K=2))
    assert {e["architecture"] for e in world.events("distilled")} == {"c", "m"}
    teachers = [world.server.model(m.architecture, m.weights) for m in end.history[-1]]
    assert close(taught(world, 0, world.server.model("c", start.models["c"][0]), teachers), end.models["c"][0])


def test_with_basic_distillation_models_without_clients_stay(tmp_path):
    world = only(mixed(tmp_path), "c1", "c3", "c5", "c7")
    start, end = world.run(framework(K=2, global_trainer=BASIC))
    assert all(same_bits(end.models["c"][k], start.models["c"][k]) for k in (0, 1))


def test_a_group_whose_clients_all_fail_does_not_void_the_round(tmp_path):
    world = one_kind(tmp_path)
    method = FedEED(LOCAL, FUSION, K=4)
    group = split(method.shares, "random", world.fed, world.server)
    for k in group:
        if group[k] == ("c", 0):
            world.data[k] = None
    start, end = world.run(method)
    assert len(world.fed.failures) == 2
    assert same_bits(end.history[-1][0].weights, start.models["c"][0])
    assert not same_bits(end.models["c"][0], start.models["c"][0])  # taught all the same


@dataclasses.dataclass(frozen=True)
class Spoiled(LocalTrainer):
    """A trainer for which all groups blow up, except one."""

    spared: dict = dataclasses.field(default_factory=dict)

    def update(self, sent, memory, mean, share):
        new, memory = super().update(sent, memory, mean, share)
        return new if same_bits(sent, self.spared) else {n: t * float("nan") for n, t in new.items()}, memory


def test_an_aggregate_that_is_not_finite_is_neither_kept_nor_asked(tmp_path):
    world = one_kind(tmp_path)
    trainer = Spoiled(spared=world.server.init("c", 0))
    start, end = world.run(framework(K=2, local_trainer=trainer, R=2))
    assert [(e["architecture"], e["group"]) for e in world.events("aggregate_rejected")] == [("c", 1)]
    assert same_bits(end.models["c"][1], start.models["c"][1])
    assert [m.group for m in end.history[-1]] == [0]


def test_when_no_aggregate_is_finite_nobody_teaches(tmp_path):
    world = one_kind(tmp_path)
    start, end = world.run(framework(K=2, local_trainer=Spoiled()))
    assert end.history == [[]]
    assert world.server.ensembles == world.events("distilled") == []
    assert digest(end.models) == digest(start.models)


def test_a_client_with_non_finite_logits_is_neither_averaged_nor_a_teacher(tmp_path):
    world = one_kind(tmp_path)
    original = world.client

    def client(name, seed, state, place=None):
        c = original(name, seed, state)
        if name == "c3":
            c.train = Data(c.train.inputs[:0], c.train.labels[:0])
            huge = Conv(0)
            with torch.no_grad():
                for p in huge.parameters():
                    p.fill_(3e38)
            c.model = lambda weights=None: huge
        return c

    world.client = client
    method = framework(K=1, ensemble_trainer=CLIENTS, global_trainer=BASIC)
    end = world.run(method)[-1]
    assert [e["client"] for e in world.fed.failures] == ["c3"]
    without = only(one_kind(tmp_path / "b"), *[k for k in world.fed.clients if k != "c3"])
    assert digest(without.run(method)[-1]) == digest(end)


def test_no_usable_upload_leaves_the_state(tmp_path):
    world = only(one_kind(tmp_path), "c3")
    original = world.client

    def client(name, seed, state, place=None):
        c = original(name, seed, state)
        c.train = Data(c.train.inputs[:0], c.train.labels[:0])
        huge = Conv(0)
        with torch.no_grad():
            for p in huge.parameters():
                p.fill_(3e38)
        c.model = lambda weights=None: huge
        return c

    world.client = client
    with pytest.raises(QuorumNotMet, match=r"0 of .* clients .*non-finite logits on public samples"):
        world.run(framework(K=1, ensemble_trainer=CLIENTS, global_trainer=BASIC))


# ---- averages that tolerate Byzantine clients ------------------------------------------------------------


def uploads_of(world: World, method, t: int, start, seeds) -> dict:
    """What each client of round t sent, by hand, as one vector: {client: numbers}."""
    found = {}
    for (k, g), seed in zip(clients_of(world, t, method).items(), seeds, strict=True):
        model = world.server.model("c", start.models["c"][g[1]])
        fit(model, world.data[k].inputs, world.data[k].labels, LOCAL, seed)
        found[k] = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return found


def vector(world: World, weights: dict) -> torch.Tensor:
    return torch.cat([weights[n].double().flatten() for n, _ in world.server.template("c").named_parameters()])


@pytest.mark.parametrize("how", ["median", "trimmed_mean", "multi_krum"])
def test_the_average_of_a_group_tolerates_byzantine_clients(tmp_path, how):
    world = one_kind(tmp_path, 10)
    method = framework(K=2, screen=Robust(how), global_trainer=NONE)
    start, end = world.run(method)
    found = uploads_of(world, method, 0, start, world.seeds)
    group = clients_of(world, 0, method)
    for number in range(2):
        x = torch.stack([found[k] for k, g in group.items() if g == ("c", number)])
        assert len(x) == 5
        nearest = torch.stack([row.sort().values[1:3].sum() for row in torch.cdist(x, x).square()])
        by_hand = {
            "median": x.median(0).values,
            "trimmed_mean": x.sort(0).values[1:-1].mean(0),
            "multi_krum": x[nearest.argsort()[:2]].mean(0),
        }[how]
        assert torch.allclose(vector(world, end.models["c"][number]), by_hand, atol=1e-6)
    assert [m.group for m in end.history[-1]] == [0, 1]  # the ensemble is kept, as with means


def test_an_update_is_clipped_to_the_median_of_all_groups(tmp_path):
    """A liar in a group of two would set the median of its own group."""
    world = one_kind(tmp_path, 6)
    method = framework(K=3, screen=Robust("uniform", update_clip=1.0), global_trainer=NONE)
    start, end = world.run(method)
    group = clients_of(world, 0, method)
    sent = {k: vector(world, start.models["c"][g[1]]) for k, g in group.items()}
    moved = {k: x - sent[k] for k, x in uploads_of(world, method, 0, start, world.seeds).items()}
    lengths = sorted(d.norm() for d in moved.values())
    bound = (lengths[2] + lengths[3]) / 2
    for number in range(3):
        own = [sent[k] + moved[k] * min(1, bound / moved[k].norm()) for k, g in group.items() if g[1] == number]
        assert torch.allclose(vector(world, end.models["c"][number]), torch.stack(own).mean(0), atol=1e-6)
    long = {k for k in moved if moved[k].norm() > bound}
    assert {e["client"] for e in world.events("update_clipped")} >= long  # statistics are clipped for themselves


def test_one_liar_takes_fedeed_over_but_not_with_these_averages(tmp_path):
    """A bias of 10,000 for one class: the mean is nowhere near where the honest clients are."""
    for how, held in (({}, False), ({"average": "median"}, True), ({"update_clip": 2.0}, True)):
        world = one_kind(tmp_path / str(held) / "".join(how), 8)
        original = world.client

        def client(name, seed, state, place=None, original=original):
            c = original(name, seed, state)
            if name == "c3":
                plain, c.train = c.model, Data(c.train.inputs[:0], c.train.labels[:0])
                c.model = lambda weights=None: wrong(plain(weights))
            return c

        world.client = client
        end = world.run(FedEED(LOCAL, FUSION, K=2, screen=Robust(**how)))[-1]
        largest = max(t.abs().max().item() for m in end.history[-1] for n, t in m.weights.items() if "bias" in n)
        assert (largest < 10) == held, (how, largest)


def wrong(model):
    last = list(model.parameters())[-1]
    with torch.no_grad():
        last[0] = 1e4
    return model


def test_a_robust_average_needs_the_clients_models_and_says_so():
    robust = FedEED(screen=Robust("median"), R=2)
    assert described(robust).privacy == "individual replies"
    assert robust.keeps_ensemble
    with pytest.raises(ConfigError, match=r"no_single_groups = true: method.screen needs individual"):
        FedEED(screen=Robust(update_clip=2.0), no_single_groups=True)


# ---- groups of one client --------------------------------------------------------------------------------


def test_privacy_follows_from_the_slots():
    assert described(Framework()).privacy == "means only (no slot needs individual models)"
    assert (
        described(FedEED()).privacy
        == described(FedEnsemble()).privacy
        == described(Codistillation()).privacy
        == "means only"
    )
    assert described(FedBE()).privacy == described(FedDistill()).privacy == "individual replies"
    individual = framework(ensemble_trainer=CLIENTS)
    assert described(individual).privacy == "individual replies (for method.ensemble_trainer)"
    assert described(FedEED(local_trainer=ScaffoldTrainer())).state == "a control variate for each group it was in"


def test_strata_are_of_one_size_and_meet_every_model_in_an_age(tmp_path):
    world = one_kind(tmp_path, 6)
    groups = []
    for t in range(2):
        world.fed.begin(t)
        groups.append(split((1, 1), "strata", world.fed, world.server))
        assert sorted(g for _, g in groups[-1].values()) == [0, 0, 0, 1, 1, 1]
    assert all(groups[0][k] != groups[1][k] for k in world.fed.clients)


def test_with_a_fixed_schedule_model_i_always_goes_to_client_i(tmp_path):
    """FedEED's A.7. With more clients than models client i has model i mod K."""
    world = one_kind(tmp_path, 6)
    for t in range(3):
        world.fed.begin(t)
        group = split((1, 1, 1, 1), "fixed", world.fed, world.server)
        assert {world.fed.clients.index(k): g for k, (_, g) in group.items()} == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1}
    assert FedEED(LOCAL, FUSION, K=4, schedule="fixed").schedule == "fixed"


def test_groups_are_averaged_in_order(tmp_path, monkeypatch):
    """They may share a control variate, whose last bits depend on it; the order of a set is another in each process."""
    seen, average = [], Cohort._average

    def watched(self, *args):
        found = average(self, *args)
        seen.append(list(found[0]))
        return found

    monkeypatch.setattr(Cohort, "_average", watched)
    one_kind(tmp_path).run(framework(ensemble_trainer=CLIENTS, K=8))
    assert seen == [[("c", k) for k in range(8)]]


def test_no_single_groups_serves_no_group_of_one(tmp_path):
    method = FedEED(LOCAL, FUSION, K=2, no_single_groups=True)
    world = only(one_kind(tmp_path), "c0", "c1", "c2")
    start, end = world.run(method)
    (event,) = world.events("group_too_small")
    assert (event["architecture"], event["group"]) == ("c", 1)
    assert same_bits(end.models["c"][1], start.models["c"][1])
    assert len(world.fed.answered) == 2
    assert world.fed.verbs == {"mean"}
    only(world, "c0", "c1")
    with pytest.raises(QuorumNotMet, match="no_single_groups"):
        world.run(method)


def test_no_single_groups_drops_a_group_of_which_one_client_is_left(tmp_path):
    method = FedEED(LOCAL, FUSION, K=2, no_single_groups=True)
    world = one_kind(tmp_path, 4)
    group = split(method.shares, "random", world.fed, world.server)
    world.data[next(k for k, g in group.items() if g == ("c", 1))] = None
    start, end = world.run(method)
    (event,) = world.events("group_too_small")
    assert (event["architecture"], event["group"]) == ("c", 1)
    assert event["reason"] == "all clients but one have failed"
    assert same_bits(end.models["c"][1], start.models["c"][1])


def test_no_single_groups_drops_every_group_of_which_one_client_is_left(tmp_path):
    method = FedEED(LOCAL, FUSION, K=3, no_single_groups=True)
    world = one_kind(tmp_path, 6)
    group = split(method.shares, "random", world.fed, world.server)
    for k in (1, 2):
        world.data[next(c for c, g in group.items() if g == ("c", k))] = None
    start, end = world.run(method)
    assert sorted(e["group"] for e in world.events("group_too_small")) == [1, 2]
    assert all(same_bits(end.models["c"][k], start.models["c"][k]) for k in (1, 2))


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Framework(K=0), "K = 0"),
        (lambda: FedEED(K=0), "K = 0"),
        (lambda: FedEED(R=0), "R = 0"),
        (lambda: Framework(ensemble_trainer=CLIENTS, R=2), "R = 2.*'aggregated'"),
        (lambda: Bayesian(samples=0), "samples = 0"),
        (lambda: Bayesian(alpha=0.0), "alpha = 0.0"),
        (lambda: EnsembleTrainer(sharpen=-1.0), "sharpen = -1.0"),
        (lambda: FedProxTrainer(mu=-1.0), "mu = -1.0"),
        (lambda: FedAvgMTrainer(momentum=1.0), "momentum = 1.0"),
        (lambda: Framework(local_trainer=ScaffoldTrainer(), screen=Robust("median")), "'scaffold'.*no robust average"),
        (lambda: Framework(local_trainer=PER_GROUP, screen=Robust(update_clip=1.0)), "no clipping"),
        (lambda: Warmup(warmup=-1), "warmup = -1"),
        (lambda: Basic(exclude_self=True), "exclude_self"),
        (lambda: Framework(group_sizes=(1, 2, 3)), "group_sizes"),
        (lambda: Framework(group_sizes=(1, 0)), "group_sizes"),
        (lambda: Framework(group_sizes=(2, 1), schedule="strata"), "strata"),
        (lambda: Framework(group_sizes=(2, 1), schedule="fixed"), "group_sizes.*fixed"),
        (lambda: Framework(global_trainer=BASIC, pipeline=True), "pipeline"),
        (lambda: Framework(ensemble_trainer=CLIENTS, no_single_groups=True), "no_single_groups.*ensemble_trainer"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(make, words):
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_temperatures_below_zero_are_refused():
    with pytest.raises(ConfigError, match=r"method.fusion.temperature = 0.0: expected a number above 0"):
        load_config({"method": {"name": "fedeed", "fusion": {"temperature": 0.0}}})


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (FedEED(K=9), {}, r"method.K = 9: only 8 clients of 'c' can be active"),
        (FedEED(K=5), {"fraction": 0.5}, r"method.K = 5: only 4 clients.*fraction = 0.5"),
        (FedEED(K=4, no_single_groups=True), {"fraction": 0.5}, "method.no_single_groups = true: 4 clients"),
    ],
)
def test_groups_that_cannot_be_filled_are_refused_before_the_first_round(tmp_path, method, options, words):
    world = one_kind(tmp_path, **options)
    with pytest.raises(ConfigError, match=words) as caught:
        method.init(world.fed, world.server)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (FedEED(K=2), {"public": None}, "public.source"),
        (FedEED(K=2, fusion=Distill(keep_init_if_better=True)), {}, "keep_init_if_better"),
        (FedEED(K=2, local=Local(momentum=0.9), local_trainer=ScaffoldTrainer()), {}, "plain SGD"),
    ],
)
def test_what_the_server_lacks_is_refused_before_any_work(tmp_path, method, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_server(method, one_kind(tmp_path, **options).server)
    assert "\n" not in str(caught.value)


def test_a_quorum_the_designated_group_can_never_meet_is_refused(tmp_path):
    world = one_kind(tmp_path)
    world.fed.config = FederationConfig(min_replies=3)
    with pytest.raises(ConfigError, match=r"federation.min_replies = 3"):
        FedEED(K=4).init(world.fed, world.server)
    FedEnsemble(K=4).init(world.fed, world.server)  # all groups are one exchange


# ---- by name, with own objects, and for inference ----------------------------------------------------------


def test_slots_are_filled_by_name():
    config = load_config(
        {
            "method": {
                "name": "framework",
                "K": 3,
                "group_sizes": [4, 2, 2],
                "local_trainer": {"kind": "scaffold", "shared_c": True},
                "ensemble_trainer": {"kind": "bayesian", "posterior": "swag"},
                "global_trainer": {"kind": "designated"},
            }
        }
    )
    method = config.method
    assert method.local_trainer == ScaffoldTrainer(shared_c=True)
    assert method.ensemble_trainer == Bayesian(posterior="swag")
    assert method.shares == (4, 2, 2)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"ensemble_trainer": {"kind": "agregated"}}, "method.ensemble_trainer.kind.*did you mean 'aggregated'"),
        ({"ensemble_trainer": {"R": 2}}, "method.ensemble_trainer.R = 2: this setting is now called 'method.R'"),
        ({"ensemble_trainer": {"samples": 2}}, "ensemble_trainer.samples = 2: only kind = 'bayesian'"),
        ({"samples": 2}, "method.samples = 2: this setting is now method.ensemble_trainer.samples"),
        ({"W": 2}, "method.W = 2: this setting is now method.global_trainer.warmup"),
        ({"average": "median"}, "method.average = .*: this setting is now method.screen.average"),
        ({"local_trainer": {"kinds": ["fedavg"]}}, "kinds = .*: this setting is now called .*local_trainer.parts"),
        ({"K": 0}, "method.K = 0"),
        ({"pipeline": True, "global_trainer": {"kind": "basic"}}, "method.pipeline = true: only designated"),
        ({"pipeline": "eager"}, 'method.pipeline = "eager": expected true or false'),
        ({"no_single_groups": True, "ensemble_trainer": {"kind": "clients"}}, "method.no_single_groups = true"),
        ({"secure": True}, "method.secure = true: this setting is now called 'no_single_groups'"),
    ],
)
def test_mistakes_in_a_configuration_name_their_key(table, words):
    with pytest.raises(ConfigError, match=words):
        load_config({"method": {"name": "framework", **table}})


def test_the_papers_letters_can_be_set():
    config = load_config("feddf/table1", ["method.name=fedeed", "method.R=2", "method.K=3"])
    assert (config.method.K, config.method.R) == (3, 2)
    with pytest.raises(ConfigError, match=r"^method.R = 0: expected an integer of at least 1"):
        load_config({"method": {"name": "fedeed", "R": 0}})


def test_a_new_combination_just_runs(tmp_path):
    method = framework(
        K=2,
        local_trainer=ScaffoldTrainer(),
        R=2,
        rule="confidence",
        pipeline=True,
        no_single_groups=False,
    )
    check_method(method, tmp_path, engines=["processes"])


# ---- a local trainer for each group, members that are fine-tuned, labelled server data ------------------


def labelled(tmp, make=None, **options) -> World:
    """Clients of one architecture, and public samples with labels."""
    world = (make or one_kind)(tmp, **options)
    world.server.public.labels = images(40, seed=9)[1]
    return world


@pytest.mark.parametrize("other", [FedProxTrainer(mu=0.7), FedAvgMTrainer(), ScaffoldTrainer()])
def test_every_group_has_a_local_trainer_of_its_own(tmp_path, other):
    """A round of two groups by hand: each group trains and aggregates in its own way."""
    world = one_kind(tmp_path)
    trainer = PerGroup(parts=(LocalTrainer(), other))
    start, end = world.run(framework(K=2, local_trainer=trainer, global_trainer=NONE))
    group = split((1, 1), "random", world.fed, world.server)
    order = [k for g in (0, 1) for k in group if group[k] == ("c", g)]  # an exchange for each kind
    uploads = {}
    for k, seed in zip(order, world.seeds, strict=True):
        g = group[k][1]
        model, data = world.server.model("c", start.models["c"][g]), world.data[k]
        sent = {n: p.detach().clone() for n, p in model.named_parameters()}
        mu = 0.7 if g == 1 and other.kind == "fedprox" else 0.0
        rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).split(8)
        model.train()
        for own in (r for r in rows if len(r) > 1):  # SCAFFOLD's control variates are zero in the first round
            loss = torch.nn.functional.cross_entropy(model(data.inputs[own]), data.labels[own])
            loss = loss + mu / 2 * sum((p - sent[n]).square().sum() for n, p in model.named_parameters())
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, d in zip(model.parameters(), gradients, strict=True):
                    p -= 0.05 * d
        uploads[k] = model
    for g in (0, 1):
        own = [k for k in order if group[k] == ("c", g)]
        uniform = g == 1 and other.kind == "scaffold"
        mean = by_hand.mean_of([uploads[k] for k in own], [1 if uniform else len(world.data[k]) for k in own])
        assert by_hand.close(mean, end.models["c"][g], apart=1e-5)
    assert bool(end.memory["c"][1]) == (other.kind != "fedprox")
    assert end.memory["c"][0] == {}


def test_kinds_that_are_all_the_same_are_one_kind(tmp_path):
    """One kind is one exchange: also the same bits."""
    same = PerGroup(parts=(FedProxTrainer(mu=0.5), FedProxTrainer(mu=0.5)))
    a = one_kind(tmp_path / "a").run(framework(K=2, local_trainer=same, global_trainer=BASIC), 2)[-1]
    b = one_kind(tmp_path / "b").run(framework(K=2, local_trainer=FedProxTrainer(mu=0.5), global_trainer=BASIC), 2)[-1]
    assert digest(a) == digest(b)


def test_kinds_and_individual_models_and_overlap(tmp_path):
    """Whoever needs single models gets them in every kind, and overlap still changes no bit."""
    trainer, ends = PerGroup(parts=(ScaffoldTrainer(), FedAvgMTrainer(), LocalTrainer())), []
    for pipeline in (False, True):
        world, method = (
            one_kind(tmp_path / str(pipeline), n=9),
            framework(K=3, local_trainer=trainer, pipeline=pipeline),
        )
        end = world.run(method, 2)[-1]
        ends.append(digest(method.finish(end, world.fed, world.server).models))
    assert ends[0] == ends[1]
    single = framework(K=3, local_trainer=trainer, ensemble_trainer=CLIENTS, global_trainer=NONE)
    a = one_kind(tmp_path / "single", n=9).run(single, 2)[-1]
    b = one_kind(tmp_path / "means", n=9).run(dataclasses.replace(single, ensemble_trainer=EnsembleTrainer()), 2)[-1]
    assert digest(a.models) == digest(b.models)


def test_members_are_fine_tuned_each_for_itself_and_global_models_go_on_untuned(tmp_path):
    tune = Local(epochs=2, batch=16, lr=0.05)
    world = labelled(tmp_path / "a")
    method = framework(K=2, ensemble_trainer=EnsembleTrainer(tune=tune), global_trainer=NONE)
    end = world.run(method)[-1]
    plain = labelled(tmp_path / "b").run(framework(K=2, global_trainer=NONE))[-1]
    assert digest(end.models) == digest(plain.models)
    x, y = images(40, seed=9)
    for i, (member, before) in enumerate(zip(end.history[-1], plain.history[-1], strict=True)):
        model = world.server.model("c", before.weights)
        by_hand.train(model, x, y, epochs=2, batch=16, lr=0.05, seed=world.fed.seed("tune", i))
        assert by_hand.close(model.state_dict(), member.weights)
    (reported,) = world.server.ensembles
    assert same_bits(reported.members[0][1], end.history[-1][0].weights)  # what is measured is what teaches


def test_a_member_whose_tuning_diverges_stays_as_it_was(tmp_path):
    world = labelled(tmp_path / "a")
    leap = EnsembleTrainer(tune=Local(epochs=1, batch=16, lr=1e38))
    end = world.run(framework(K=2, ensemble_trainer=leap, global_trainer=NONE))[-1]
    plain = labelled(tmp_path / "b").run(framework(K=2, global_trainer=NONE))[-1]
    assert digest(end.history) == digest(plain.history)
    assert [e["group"] for e in world.events("tuning_diverged")] == [0, 1]


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_labelled_server_data_adds_cross_entropy(tmp_path, temperature):
    """KL from the ensemble at temperature T + 0.5 times the cross-entropy with the labels, by hand."""
    world, sgd = labelled(tmp_path / "a"), Distill(steps=6, batch=16, optimizer="sgd", lr=0.05, temperature=temperature)
    trainer = GlobalTrainer(label_weight=0.5)
    end = world.run(framework(K=2, fusion=sgd, global_trainer=trainer))[-1]
    before = labelled(tmp_path / "b").run(framework(K=2, global_trainer=NONE))[-1]
    # designated groups are an exchange of their own: take the aggregates from the history, not from `before`
    members = [world.server.model("c", m.weights) for m in end.history[-1]]
    assert len(members) == len(before.history[-1]) == 2
    x, y = images(40, seed=9)
    kl = by_hand.kl_towards(by_hand.mean_logits(members, x), temperature)

    def loss(z, hand):
        ce = -torch.stack([z[b].log_softmax(0)[y[i]] for b, i in enumerate(hand)]).mean()
        return kl(z, hand) + 0.5 * ce

    student = world.server.model("c", end.history[-1][0].weights)
    hands = by_hand.batches(40, 6, 16, world.fed.seed("fusion"))
    by_hand.teach(student, x, loss, hands, optimizer="sgd", lr=0.05, cosine=True, clip=5.0)
    assert close(student.state_dict(), end.models["c"][0])


def test_what_needs_labels_says_so(tmp_path):
    tuning, labels = EnsembleTrainer(tune=Local(epochs=1)), GlobalTrainer(label_weight=1.0)
    assert framework(ensemble_trainer=tuning, global_trainer=NONE).traits().public == "server"
    for method in (framework(ensemble_trainer=tuning), framework(global_trainer=labels)):
        assert method.traits().public_labels == "needed"
    assert framework().traits().public_labels == "unused"
    assert framework(global_trainer=labels, fusion=Distill(steps=0)).traits().public_labels == "unused"
    run_toy(framework(ensemble_trainer=tuning, global_trainer=labels), tmp_path / "run", rounds=1)
    world = labelled(tmp_path / "more")
    world.server.public.labels = torch.full((40,), 7)
    with pytest.raises(ConfigError, match=r"public labels go up to 7, but the models have 4 outputs"):
        world.run(framework(global_trainer=labels))
    world = labelled(tmp_path / "fresh")
    world.server.public.fresh = True
    with pytest.raises(ConfigError, match=r"label_weight: samples that change"):
        world.run(framework(global_trainer=labels))


def test_kinds_are_as_many_as_groups():
    with pytest.raises(ConfigError, match=r"local_trainer.parts: 1 trainers; K = 2 groups need one each"):
        framework(K=2, local_trainer=PerGroup(parts=(LocalTrainer(),)))
    with pytest.raises(ConfigError, match="no control variate to share"):
        PerGroup(parts=(LocalTrainer(), ScaffoldTrainer(shared_c=True)))
    parts = {"kind": "per-group", "parts": [{"kind": "fedavg"}, {"kind": "scaffold"}]}
    table = {"name": "fedeed", "K": 2, "local_trainer": parts}
    method = load_config({"method": table}).method
    assert described(method).state == "a control variate for each group it was in"
    with pytest.raises(ConfigError, match="needs plain SGD"):
        check_server(framework(local=Local(momentum=0.9), local_trainer=method.local_trainer), toy().server)


class LargestGroup(EnsembleTrainer):
    """An ensemble trainer of our own: only the first model teaches."""

    def members(self, w, uploads, sent, d, seeds, server):
        return [Member(P, k, x, 1.0) for (P, k), x in w.items() if k == 0]

    def teacher(self, members, rule, temperature, server):
        return Ensemble([server.model(m.architecture, m.weights) for m in members], temperature=temperature)


def test_own_objects_fill_slots_too(tmp_path):
    world = one_kind(tmp_path)
    method = framework(K=2, ensemble_trainer=LargestGroup(), global_trainer=BASIC)
    state = world.run(method)[-1]
    assert [m.group for m in state.history[-1]] == [0]
    assert described(method).privacy.startswith("means only")
    aggregate = one_kind(tmp_path / "b").run(framework(K=2, global_trainer=NONE))[-1]
    student = world.server.model("c", aggregate.models["c"][1])
    teacher = world.server.model("c", aggregate.models["c"][0])
    assert close(taught(world, 0, student, [teacher]), state.models["c"][1])


def test_the_ensemble_is_saved_and_predicts_as_it_was_measured(tmp_path):
    result = overlapping(tmp_path, False)
    scenario = toy()
    files = sorted((tmp_path / "models").glob("ensemble-*.safetensors"))
    assert len(files) == 2 * 2 * 2  # architectures, K, R
    members = []
    for path in files:
        stored = load_file(path)
        with open(path, "rb") as f:
            facts = json.loads(f.read()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]
        assert facts["share"] == "1.0"
        members.append(scenario.server.model(facts["architecture"], stored))
    said = Ensemble(members)(scenario.test.inputs)[0]
    accuracy = (said.argmax(-1) == scenario.test.labels).float().mean().item()
    assert accuracy == pytest.approx(result.summary["ensembles"]["ensemble"]["accuracy"])


def test_seeds_are_those_of_the_round_they_belong_to(tmp_path):
    world = one_kind(tmp_path)
    world.fed.begin(3)
    assert Seeds(world.fed.run_seed, 3)("fusion") == world.fed.seed("fusion")
    assert Seeds(world.fed.run_seed, 2)("fusion") != world.fed.seed("fusion")
