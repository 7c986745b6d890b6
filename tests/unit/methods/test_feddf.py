"""FedDF: equal to FedAvg without distillation, to Algorithm 3 by hand with it, and calm when things go wrong."""

import dataclasses
import gc
import re
import weakref

import pytest
import torch
from torch import nn

import by_hand
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig, QuorumNotMet
from solera.core.task import Data
from solera.core.wire import digest
from solera.methods.fedavg import FedAvg, FedProx
from solera.methods.feddf import FedDF
from solera.methods.pfeddf import FedDFPrevious
from solera.methods.steps.screen import Robust, Screen
from solera.runs.loop import check_server
from solera.testing import run_toy
from solera.train.distill import Distill
from solera.train.fitting import Local, evaluate
from solera.train.teachers import Ensemble
from toys import Conv, World, images, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
FUSION = Distill(steps=6, batch=16)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"


def mixed(tmp, **options) -> World:
    """Five clients of different sizes, two architectures (one with BatchNorm), 40 public samples."""
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    parties = [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)]
    return World(tmp, builders, parties, **{"public": images(40, seed=9)[0], **options})


def uploads(world: World, state, clients=None) -> dict[str, nn.Module]:
    """Every client's model after its local training, by hand."""
    models = {}
    for k, seed in zip(clients or world.fed.clients, world.seeds, strict=True):
        P, data = world.fed.architecture(k), world.data[k]
        models[k] = world.server.model(P, state.weights[P])
        by_hand.train(models[k], data.inputs, data.labels, epochs=2, batch=8, lr=0.05, seed=seed)
    return models


def taught(world: World, student: nn.Module, teachers, x=None, copies=None) -> dict:
    """A student after Adam with a cosine and clipped gradients on the KL from the mean of the teachers' logits."""
    x = images(40, seed=9)[0] if x is None else x
    world.fed.begin(0)
    hands = by_hand.batches(40, FUSION.steps, FUSION.batch, world.fed.seed("fusion"))
    loss = by_hand.kl_towards(by_hand.mean_logits(list(teachers), x, copies))
    by_hand.teach(student, x, loss, hands, optimizer="adam", lr=1e-3, cosine=True, clip=5.0)
    return student.state_dict()


def close(a: dict, b: dict) -> bool:
    return by_hand.close(a, b, ignoring=by_hand.WITHOUT_GRADIENT)


# ---- what it is equal to ---------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["weighted", "uniform"])
def test_without_steps_it_is_fedavg_bit_for_bit(tmp_path, average):
    a = mixed(tmp_path / "a", fraction=0.8).run(FedAvg(LOCAL, average), 3)[-1]
    none = Distill(steps=0)
    b = mixed(tmp_path / "b", fraction=0.8).run(FedDF(LOCAL, none, screen=Screen(average)), 3)[-1]
    assert digest(a) == digest(b)
    c = mixed(tmp_path / "c", fraction=0.8, public=None).run(FedDF(LOCAL, none, screen=Screen(average)), 3)[-1]
    assert digest(a) == digest(c)


def test_with_zero_learning_rate_it_is_fedavg_bit_for_bit(tmp_path):
    a = mixed(tmp_path / "a").run(FedAvg(LOCAL), 2)[-1]
    still = dataclasses.replace(FUSION, lr=0.0, student_norm="frozen")
    b = mixed(tmp_path / "b").run(FedDF(LOCAL, still), 2)[-1]
    assert digest(a) == digest(b)


def test_without_steps_and_with_a_proximal_term_it_is_fedprox(tmp_path):
    a = mixed(tmp_path / "a").run(FedProx(LOCAL, mu=0.5), 2)[-1]
    b = mixed(tmp_path / "b").run(FedDF(LOCAL, Distill(steps=0), mu=0.5), 2)[-1]
    assert digest(a) == digest(b)


def test_a_round_is_algorithm_3(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(FedDF(LOCAL, FUSION, screen=Screen("uniform")))
    models = uploads(world, start)
    for P in "cm":
        mean = by_hand.mean_of([m for k, m in models.items() if KINDS[int(k[1])] == P])
        assert close(taught(world, world.server.model(P, mean), models.values()), end.weights[P])
        assert not close(mean, end.weights[P])


def test_a_client_drawn_twice_is_two_teachers(tmp_path):
    world = mixed(tmp_path)
    world.fed.config = FederationConfig(sampling="size", replacement=True)
    start, end = world.run(FedDF(LOCAL, FUSION))
    world.fed.begin(0)
    S = world.fed.sample()
    copies = {k: world.fed.copies[k] for k in S}
    assert max(copies.values()) > 1
    models = {k: m for k, m in uploads(world, start, S).items() if k in copies}
    for P in {world.fed.architecture(k) for k in S}:
        own = [k for k in S if world.fed.architecture(k) == P]
        mean = by_hand.mean_of([models[k] for k in own], [copies[k] * len(world.data[k]) for k in own])
        voices = [copies[k] for k in S]
        assert close(taught(world, world.server.model(P, mean), models.values(), copies=voices), end.weights[P])
        once = taught(world, world.server.model(P, mean), models.values())
        assert not close(once, end.weights[P])
    (reported,) = world.server.ensembles
    assert reported.weights == [copies[k] for k in S]  # what is measured is what teaches


def test_one_architecture_and_identical_clients_do_not_move_beyond_their_average(tmp_path):
    data = Data(*images(10))
    world = World(tmp_path, {"c": lambda: Conv(0)}, [("c", data)] * 3, public=images(40)[0])
    frozen = dataclasses.replace(FUSION, student_norm="frozen")
    idle = Local(epochs=0)  # every upload is what was sent
    start, end = world.run(FedDF(idle, frozen))
    assert digest(start) == digest(end)
    assert world.events("distilled")[0]["loss"] == 0


def test_side_by_side_gives_the_same_bits(tmp_path):
    a = mixed(tmp_path / "a").run(FedDF(LOCAL, FUSION), 2)[-1]
    b = mixed(tmp_path / "b", workers=2).run(FedDF(LOCAL, FUSION), 2)[-1]
    assert digest(a) == digest(b)


def test_students_with_dropout_do_not_depend_on_workers(tmp_path):
    def end(workers):
        builders = {"c": lambda: Conv(0, dropout=0.3), "m": lambda: mlp(1)}
        parties = [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)]
        world = World(tmp_path / str(workers), builders, parties, public=images(40)[0], workers=workers)
        return digest(world.run(FedDF(LOCAL, FUSION), 2)[-1])

    assert end(1) == end(2)


# ---- options ---------------------------------------------------------------------------------------


def test_from_previous_starts_at_the_last_fused_model(tmp_path):
    world = mixed(tmp_path)
    start, end = world.run(FedDFPrevious(LOCAL, FUSION))
    models = uploads(world, start)
    for P in "cm":
        student = world.server.model(P, start.weights[P])
        assert close(taught(world, student, models.values()), end.weights[P])


@pytest.mark.parametrize("rule", ["avg_logits", "avg_probs", "avg_losses"])
def test_ensemble_rules(tmp_path, rule):
    world = mixed(tmp_path)
    state = world.run(FedDF(LOCAL, FUSION, ensemble=rule))[-1]
    logits = mixed(tmp_path / "l").run(FedDF(LOCAL, FUSION))[-1]
    probs = mixed(tmp_path / "p").run(FedDF(LOCAL, FUSION, ensemble="avg_probs"))[-1]
    assert (digest(state) == digest(logits)) == (rule == "avg_logits")
    assert (digest(state) == digest(probs)) == (rule != "avg_logits")  # the same gradient, another loss value


def test_absent_architectures_stay_or_are_distilled_from_where_they_are(tmp_path):
    stay, move = FedDFPrevious(LOCAL, FUSION), FedDFPrevious(LOCAL, FUSION, distill_absent=True)
    for i, method in enumerate((FedDF(LOCAL, FUSION), stay, move)):
        world = mixed(tmp_path / str(i))
        world.fed.sample = lambda: ["c1", "c3"]
        start, end = world.run(method)
        assert same_bits(start.weights["c"], end.weights["c"]) == (method is not move)
        assert not same_bits(start.weights["m"], end.weights["m"])


def test_only_the_samples_of_the_round_are_used(tmp_path):
    world = mixed(tmp_path, per_round=10)
    asked: set[int] = set()
    public = world.server.public
    original = type(public).__getitem__
    rounds = []

    class Watched(type(public)):
        def __getitem__(self, i):
            asked.update(i.tolist())
            return original(self, i)

    world.server.public = Watched(public.inputs)
    method = FedDF(LOCAL, FUSION)
    state = method.init(world.fed, world.server)
    for t in range(2):
        asked.clear()
        world.fed.begin(t)
        state = method.round(state, world.fed, world.server)
        rounds.append(frozenset(asked))
        assert len(asked) == 10
    assert len(set(rounds)) == 2


class Fresh:
    """Public samples that are drawn with noise."""

    fresh = True

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return self.inner[i]

    def draw(self, i, seed):
        noise = torch.randn(self.inner[i].shape, generator=torch.Generator().manual_seed(seed))
        return self.inner[i] + 0.1 * noise

    def round_indices(self, per_round, seed):
        return self.inner.round_indices(per_round, seed)


def test_students_share_what_the_teachers_say_to_each_draw(tmp_path, monkeypatch):
    world, asked, call = mixed(tmp_path), [], Ensemble.__call__
    world.server.public = Fresh(world.server.public)
    monkeypatch.setattr(Ensemble, "__call__", lambda self, x: asked.append(len(x)) or call(self, x))
    start, end = world.run(FedDF(LOCAL, FUSION, screen=Screen("uniform")))
    assert asked == [16] * FUSION.steps  # not once more for the second architecture
    models = uploads(world, start)
    world.fed.begin(0)
    for P in "cm":
        student = world.server.model(P, by_hand.mean_of([m for k, m in models.items() if KINDS[int(k[1])] == P]))
        seed = world.fed.seed("fusion")
        hands = by_hand.batches(40, FUSION.steps, FUSION.batch, seed)
        views = [world.server.public.draw(torch.tensor(hand), seed + t) for t, hand in enumerate(hands, 1)]
        loss = by_hand.kl_towards(by_hand.mean_logits(list(models.values()), torch.cat(views)))
        rows = [list(range(16 * t, 16 * t + 16)) for t in range(FUSION.steps)]
        by_hand.teach(student, torch.cat(views), loss, rows, optimizer="adam", lr=1e-3, cosine=True, clip=5.0)
        assert close(student.state_dict(), end.weights[P])


@pytest.mark.parametrize("fresh", [False, True])
def test_answers_on_disk_give_the_same_bits_and_halves_nearly(tmp_path, fresh):
    def end(name, **kept):
        world = mixed(tmp_path / name)
        world.server.public = Fresh(world.server.public) if fresh else world.server.public
        return world.run(FedDF(LOCAL, dataclasses.replace(FUSION, optimizer="sgd", lr=0.1, **kept)))[-1].weights

    memory, disk, half = end("a"), end("b", cache_on_disk=True), end("c", cache_dtype="float16")
    assert digest(memory) == digest(disk)
    assert digest(memory) != digest(half)
    for P in "cm":
        for name, t in memory[P].items():
            torch.testing.assert_close(half[P][name], t, rtol=0, atol=2e-3)


def test_a_round_has_one_module_of_each_architecture_for_all_its_teachers(tmp_path):
    parties = [("cm"[i % 2], Data(*images(8, i))) for i in range(30)]
    validation = Data(*images(30, seed=4))
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    world = World(tmp_path, builders, parties, public=images(40)[0], validation=validation)
    real, made, most = world.server.model, [], [0]

    def model(P, weights):
        gc.collect()
        made.append(weakref.ref(built := real(P, weights)))
        most[0] = max(most[0], sum(ref() is not None for ref in made))
        return built

    world.server.model = model
    world.run(FedDF(Local(epochs=0), FUSION, screen=Robust(drop_worst=True, drop_threshold=0.0)))
    assert len(world.events("teachers")[0]["clients"]) == 30
    assert most[0] == 3  # the teachers' two, and one student at a time


def test_public_samples_that_are_augmented_at_each_draw(tmp_path):
    ends = []
    for workers in (1, 2):
        world = mixed(tmp_path / str(workers), workers=workers)
        world.server.public = Fresh(world.server.public)
        ends.append(digest(world.run(FedDF(LOCAL, FUSION))[-1]))
    assert ends[0] == ends[1]
    assert ends[0] != digest(mixed(tmp_path / "static").run(FedDF(LOCAL, FUSION))[-1])


def test_the_best_student_on_the_validation_set_is_kept(tmp_path):
    validation = Data(*images(60, seed=4))
    world = mixed(tmp_path, validation=validation)
    fusion = Distill(steps=12, batch=16, every=3, patience=3, keep_init_if_better=True)
    end = world.run(FedDF(LOCAL, fusion))[-1]
    average = mixed(tmp_path / "b").run(FedAvg(LOCAL))[-1]
    noted = {e["architecture"]: e for e in world.events("distilled")}
    for P in "cm":
        model = world.server.model(P, end.weights[P])
        accuracy = evaluate(model, validation.inputs, validation.labels).accuracy
        assert accuracy == noted[P]["accuracy"]
        start = world.server.model(P, average.weights[P])
        assert accuracy >= evaluate(start, validation.inputs, validation.labels).accuracy
        assert noted[P]["best_step"] == 0 or noted[P]["steps"] - noted[P]["best_step"] in (0, 3)


def test_batchnorm_statistics_of_the_student_follow_the_public_samples(tmp_path):
    moved = mixed(tmp_path / "a").run(FedDF(LOCAL, FUSION))[-1].weights["c"]
    frozen = (
        mixed(tmp_path / "b").run(FedDF(LOCAL, dataclasses.replace(FUSION, student_norm="frozen")))[-1].weights["c"]
    )
    average = mixed(tmp_path / "c").run(FedAvg(LOCAL))[-1].weights["c"]
    assert torch.equal(frozen["1.running_mean"], average["1.running_mean"])
    assert not torch.equal(moved["1.running_mean"], average["1.running_mean"])
    assert int(moved["1.num_batches_tracked"]) == int(average["1.num_batches_tracked"]) + FUSION.steps


def test_the_teachers_joint_prediction_can_be_measured(tmp_path):
    world = mixed(tmp_path)
    world.run(FedDF(LOCAL, FUSION, report_ensemble=False))
    assert world.server.ensembles == []
    assert world.fed.failures == []
    world.run(FedDF(LOCAL, FUSION, report_ensemble=True))
    (report,) = world.server.ensembles
    assert [P for P, _ in report.members] == list(KINDS)


# ---- teachers that are of no use -------------------------------------------------------------------


def overflow(world: World, k: str) -> None:
    """Make client k upload finite weights whose logits are not."""
    original = world.client

    def client(name, seed, state, place=None):
        c = original(name, seed, state)
        if name == k:
            c.train = Data(c.train.inputs[:0], c.train.labels[:0])  # nothing to train on: uploaded as it is
            c.model = lambda weights=None: _huge(c.template)
        return c

    world.client = client


def _huge(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3e38)
    return model


def test_g3_a_teacher_with_non_finite_logits_is_neither_averaged_nor_asked(tmp_path):
    world = mixed(tmp_path)
    overflow(world, "c3")
    end = world.run(FedDF(LOCAL, FUSION))[-1]
    assert [e["client"] for e in world.fed.failures] == ["c3"]
    without = mixed(tmp_path / "b")
    without.fed.sample = lambda: ["c0", "c1", "c2", "c4"]
    assert digest(end) == digest(without.run(FedDF(LOCAL, FUSION))[-1])


def test_no_usable_teacher_leaves_the_state(tmp_path):
    world = mixed(tmp_path)
    overflow(world, "c1")
    world.fed.sample = lambda: ["c1"]
    for method in (FedDF(LOCAL, FUSION), FedDFPrevious(LOCAL, FUSION, distill_absent=True)):
        with pytest.raises(QuorumNotMet, match=r"0 of 1 clients .*non-finite logits on public samples"):
            world.run(method)
        assert world.events("distilled") == []


def test_g7_a_diverging_student_falls_back_to_the_average_and_is_noted(tmp_path):
    world = mixed(tmp_path)
    wild = Distill(steps=30, batch=16, optimizer="sgd", lr=1e20, clip=None, schedule="constant")
    end = world.run(FedDF(LOCAL, wild))[-1]
    assert {e["architecture"] for e in world.events("distill_diverged")} == {"c", "m"}
    assert digest(end) == digest(mixed(tmp_path / "b").run(FedAvg(LOCAL))[-1])


def test_drop_worst_applies_before_averaging_and_before_distilling(tmp_path):
    validation = Data(*images(200, seed=4))
    world = mixed(tmp_path, validation=validation)
    method = FedDF(LOCAL, FUSION, screen=Robust(drop_worst=True))
    # Let the models be good enough to be told apart, and client 3 know one class only.
    world.data["c3"] = Data(world.data["c3"].inputs, torch.zeros_like(world.data["c3"].labels))
    start = world.run(FedAvg(Local(epochs=30, batch=8, lr=0.1)))[-1]
    start = FedDF.State(start.weights)
    end = world.run(method, state=start)[-1]
    gone = {f["client"]: re.search(r"drop_worst: an accuracy of (0\.\d+)", f["reason"]) for f in world.fed.failures}
    assert "c3" in gone
    assert all(float(a[1]) < 1.2 / 4 for a in gone.values())
    without = mixed(tmp_path / "b", validation=validation)
    without.fed.sample = lambda: [k for k in without.fed.clients if k not in gone]
    assert digest(end) == digest(without.run(FedDF(LOCAL, FUSION), state=start)[-1])


def test_when_all_guess_the_best_teacher_stays(tmp_path):
    world = mixed(tmp_path, validation=Data(*images(50, seed=4)))
    world.run(FedDF(LOCAL, FUSION, screen=Robust(drop_worst=True, drop_threshold=4.0)))
    assert len(world.fed.failures) == 4
    assert len(world.events("distilled")) == 1


# ---- what is refused at the start ------------------------------------------------------------------


def test_settings_that_need_something_are_refused_before_the_first_round(tmp_path):
    world = mixed(tmp_path / "a", public=None)
    with pytest.raises(ConfigError, match="public"):
        check_server(FedDF(), world.server)
    world = mixed(tmp_path / "b")
    for key, method in (
        ("screen.drop_worst", FedDF(screen=Robust(drop_worst=True))),
        ("fusion.keep_init_if_better", FedDF(fusion=Distill(keep_init_if_better=True))),
    ):
        with pytest.raises(ConfigError, match=f"^method.{key} needs a validation set on the server: set data.valid"):
            check_server(method, world.server)
    with pytest.raises(ConfigError, match=r"^method\.screen\.drop_threshold = 4\.1: 4 times chance is an accuracy"):
        check_server(FedDF(screen=Robust(drop_threshold=4.1)), world.server)
    with pytest.raises(ConfigError, match=r"^FedDF\.mu = -1\.0: expected"):
        FedDF(mu=-1.0)
    with pytest.raises(ConfigError, match=r"^Robust\.drop_outliers = true has no effect without drop_worst"):
        Robust(drop_outliers=True)


def test_architectures_must_answer_with_the_same_classes(tmp_path):
    builders = {"c": lambda: Conv(0), "odd": lambda: mlp(0, classes=7)}
    parties = [("c", Data(*images(5))), ("odd", Data(*images(5)))]
    world = World(tmp_path, builders, parties, public=images(10)[0])
    with pytest.raises(ConfigError, match="'odd' gives logits"):
        check_server(FedDF(), world.server)


def test_it_beats_averaging_where_clients_differ(tmp_path):
    """Two architectures, clients with two classes each: distillation lets them share what averaging cannot."""
    x, y = images(400, seed=1)
    parties = [(P, Data(x[(y // 2) == half], y[(y // 2) == half])) for P, half in (("c", 0), ("m", 1))]
    test, truth = images(200, seed=2)

    def accuracy(tmp, method):
        builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
        world = World(tmp, builders, parties, public=images(300, seed=3)[0])
        end = world.run(method, 2)[-1]
        return [evaluate(world.server.model(P, end.weights[P]), test, truth).accuracy for P in "cm"]

    local = Local(epochs=5, batch=20, lr=0.05)
    alone = accuracy(tmp_path / "a", FedAvg(local))
    shared = accuracy(tmp_path / "b", FedDF(local, Distill(steps=200, batch=64)))
    assert max(alone) < 0.6
    assert min(shared) > max(alone) + 0.1


@dataclasses.dataclass(frozen=True)
class Constant(FedDF):
    """Teachers that always say the first class."""

    def teacher(self, models, copies):
        def say(inputs):
            probs = torch.zeros(len(inputs), 3)
            probs[:, 0] = 1
            return probs, torch.zeros(len(inputs))

        return say


def test_the_ensemble_that_is_measured_is_the_one_that_teaches(tmp_path):
    found = run_toy(Constant(local=Local(epochs=1), fusion=Distill(steps=1)), tmp_path, rounds=1)
    assert found.summary["ensembles"]["teachers"]["accuracy"] == pytest.approx(1 / 3)  # of three equal classes
