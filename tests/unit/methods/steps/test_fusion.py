"""The fusion step: students equal to distillation in plain torch, teachers asked once, events with the same facts."""

import pytest
import torch
from torch import nn

import by_hand
from solera.core.task import Data
from solera.methods.feddf import FedDF
from solera.methods.steps import fusion
from solera.methods.steps.fusion import (
    asked,
    copies_of,
    finite_models,
    first_batch,
    fuse,
    logits_problems,
    outcome_of,
    public_indices,
    side_by_side,
    visited,
    with_statistics,
)
from solera.methods.steps.teaching import Lesson, LowEntropy, Teaching
from solera.methods.steps.training import Update
from solera.train.distill import Distill, Memo
from solera.train.fitting import Diverged, Fitted
from solera.train.teachers import Cache
from toys import Constant, Conv, Samples, World, images, mlp, replies_of, same_bits

PUBLIC = 40
CFG = Distill(steps=6, batch=16, optimizer="sgd", lr=0.1, schedule="constant", clip=None)
D = torch.arange(PUBLIC)


@pytest.fixture
def world(tmp_path) -> World:
    """Two architectures without BatchNorm, a client each, 40 public samples."""
    builders = {"c": lambda: Conv(0, norm=False), "m": lambda: mlp(1)}
    parties = [(A, Data(*images(6, seed=i))) for i, A in enumerate("cm")]
    world = World(tmp_path, builders, parties, public=images(PUBLIC, seed=9)[0])
    world.fed.begin(0)
    return world


class Teacher:
    """The mean of two models' logits, as probabilities, and which samples it was asked about."""

    def __init__(self):
        self.models, self.asked = [mlp(5), mlp(6)], []

    def __call__(self, inputs):
        self.asked += inputs.sum((1, 2, 3)).tolist()
        p = by_hand.mean_logits(self.models, inputs).softmax(-1)
        return p, -(p * p.log()).sum(-1)


def students(world: World) -> dict[str, dict[str, torch.Tensor]]:
    return {A: world.server.init(A) for A in world.server.architectures}


def taught(world: World, A: str, d: torch.Tensor = D, cfg: Distill = CFG) -> dict[str, torch.Tensor]:
    """A student after the steps, in plain torch."""
    x, teacher = images(PUBLIC, seed=9)[0][d], Teacher()
    hands = by_hand.batches(len(d), cfg.steps, cfg.batch, world.fed.seed("fusion"))
    student = world.server.model(A, world.server.init(A))
    loss = by_hand.kl_towards(by_hand.mean_logits(teacher.models, x))
    by_hand.teach(student, x, loss, hands, optimizer="sgd", lr=cfg.lr)
    return student.state_dict()


# ---- students ------------------------------------------------------------------------------------


def test_every_student_is_distilled_as_if_alone(world):
    start = students(world)
    found = fuse(start, Teacher(), D, CFG, world.fed.seed, world.server)
    for A in "cm":
        assert by_hand.close(found[A], taught(world, A))
        assert not by_hand.close(found[A], start[A])
    assert same_bits(start["c"], world.server.init("c"))


def test_only_the_samples_of_the_round_teach(world):
    some = D[5:25]
    found = fuse(students(world), Teacher(), some, CFG, world.fed.seed, world.server)
    assert by_hand.close(found["m"], taught(world, "m", some))


def test_without_steps_or_students_nothing_is_asked_or_noted(world):
    teacher, still = Teacher(), Distill(steps=0)
    assert fuse({}, teacher, D, CFG, world.fed.seed, world.server) == {}
    start = students(world)
    found = fuse(start, teacher, D, still, world.fed.seed, world.server)
    assert all(same_bits(found[A], start[A]) for A in start)
    assert asked(teacher, True, D, still, world.fed.seed, world.server) is teacher
    assert teacher.asked == []
    assert world.server.events == []


def test_a_loss_of_ones_own_takes_the_place_of_the_divergence(world):
    def distance(logits, probs, entropy):
        return (logits.softmax(-1) - probs).square().sum(-1).mean()

    found = fuse({"m": world.server.init("m")}, Teacher(), D, CFG, world.fed.seed, world.server, distance)
    x, teacher = images(PUBLIC, seed=9)[0], Teacher()
    p = teacher(x)[0]
    student = world.server.model("m", world.server.init("m"))
    hands = by_hand.batches(PUBLIC, CFG.steps, CFG.batch, world.fed.seed("fusion"))
    by_hand.teach(student, x, lambda z, i: distance(z, p[i], None), hands, optimizer="sgd", lr=CFG.lr)
    assert by_hand.close(found["m"], student.state_dict())


def test_teachers_may_differ_from_student_to_student(world):
    """Each is named by (architecture, number), and so are the events."""
    start = {("m", 0): world.server.init("m"), ("m", 1): world.server.init("m")}

    def sure_of(label):
        probs = torch.eye(4)[label]
        return lambda inputs: (probs.expand(len(inputs), -1), torch.zeros(len(inputs)))

    teachers = {("m", 0): sure_of(0), ("m", 1): sure_of(2)}
    found = fuse(start, teachers, D, CFG, world.fed.seed, world.server, of_round=7)
    inputs = images(PUBLIC, seed=9)[0]
    for (A, k), label in zip(start, (0, 2), strict=True):
        before, after = (world.server.model(A, w)(inputs).softmax(-1)[:, label] for w in (start[A, k], found[A, k]))
        assert (after > before).all()
    assert [(e["architecture"], e["group"], e["of_round"]) for e in world.server.events] == [("m", 0, 7), ("m", 1, 7)]


def test_each_student_is_noted(world):
    fuse(students(world), Teacher(), D, CFG, world.fed.seed, world.server, dissent=0.5)
    first, second = world.server.events
    assert list(first) == ["kind", "architecture", "dissent", "steps", "best_step", "loss", "accuracy"]
    assert (first["kind"], first["steps"], first["best_step"], first["accuracy"]) == ("distilled", 6, 6, None)
    assert [first["architecture"], second["architecture"]] == ["c", "m"]
    assert first["loss"] > 0


def test_a_student_that_diverges_stays_where_it_was_and_is_noted(world):
    cfg = Distill(steps=6, batch=16, optimizer="sgd", lr=1e30, schedule="constant", clip=None)
    start = {"m": world.server.init("m")}
    found = fuse(start, Teacher(), D, cfg, world.fed.seed, world.server)
    assert same_bits(found["m"], start["m"])
    assert [e["kind"] for e in world.server.events] == ["distill_diverged"]


def test_the_validation_set_stops_early_only_where_it_may(world):
    """On labels that contradict the teacher every step makes it worse: the first look is the best."""
    x = images(PUBLIC, seed=9)[0]
    teacher, start = Teacher(), {"m": world.server.init("m")}
    wrong = (teacher(x)[0].argmax(-1) + 1) % 4
    world.server.validation = Data(x, wrong)
    cfg = Distill(steps=40, batch=16, optimizer="sgd", lr=0.5, schedule="constant", every=4, clip=None)
    fuse(start, teacher, D, cfg, world.fed.seed, world.server)
    fuse(start, teacher, D, cfg, world.fed.seed, world.server, validate=False)
    checked, free = world.server.events
    assert checked["accuracy"] is not None
    assert checked["best_step"] < 40
    assert (free["accuracy"], free["best_step"]) == (None, 40)


# ---- random numbers and threads ------------------------------------------------------------------


def test_a_job_leaves_nothing_behind_so_that_it_may_be_run_twice(world):
    def twice(functions, seeds):
        first = [f() for f in functions]
        again = [f() for f in functions]
        assert all(same_bits(a[0], b[0]) for a, b in zip(first, again, strict=True) if isinstance(a, tuple))
        return again

    world.server.parallel = twice
    found = fuse(students(world), Teacher(), D, CFG, world.fed.seed, world.server)
    assert by_hand.close(found["c"], taught(world, "c"))


def test_students_draw_from_the_seeds_of_their_jobs(world):
    """So a student's dropout does not depend on company: it keeps its number when it is distilled alone."""
    seeds = []
    world.server.parallel = lambda functions, given: seeds.append(list(given)) or [f() for f in functions]
    teacher = asked(Teacher(), True, D, CFG, world.fed.seed, world.server)
    fuse(students(world), teacher, D, CFG, world.fed.seed, world.server)
    fuse({"m": world.server.init("m")}, teacher, D, CFG, world.fed.seed, world.server, jobs=[1])
    job = [world.fed.seed("job", i) for i in range(2)]
    assert seeds[1:] == [job, job[1:]]


def test_seeds_of_an_earlier_round_give_what_that_round_would_have_given(world):
    then = fuse(students(world), Teacher(), D, CFG, world.fed.seed, world.server)
    earlier = world.fed.seed
    kept = {key: earlier(*key) for key in (("fusion",), ("job", 0), ("job", 1))}
    world.fed.begin(3)
    now = fuse(students(world), Teacher(), D, CFG, lambda *key: kept[key], world.server)
    assert all(same_bits(then[A], now[A]) for A in then)
    other = fuse(students(world), Teacher(), D, CFG, world.fed.seed, world.server)
    assert not same_bits(then["m"], other["m"])


def test_jobs_run_side_by_side_have_their_numbers_as_seeds(world):
    seeds = []
    world.server.parallel = lambda functions, given: seeds.extend(given) or [f() for f in functions]
    assert side_by_side(world.fed.seed, world.server, [lambda: "a", lambda: "b"]) == ["a", "b"]
    assert seeds == [world.fed.seed("job", 0), world.fed.seed("job", 1)]


# ---- the teachers --------------------------------------------------------------------------------


def test_a_teacher_is_asked_once_about_each_sample_that_is_visited(world):
    teacher, cfg = Teacher(), Distill(steps=2, batch=8, optimizer="sgd")
    fuse(students(world), teacher, D, cfg, world.fed.seed, world.server)
    hands = by_hand.batches(PUBLIC, 2, 8, world.fed.seed("fusion"))
    seen = sorted({i for hand in hands for i in hand})
    assert visited(D, cfg, world.fed.seed).tolist() == seen
    assert sorted(teacher.asked) == sorted(images(PUBLIC, seed=9)[0][seen].sum((1, 2, 3)).tolist())


def test_what_has_been_asked_is_not_asked_again(world):
    teacher = Teacher()
    answers = asked(teacher, True, D, CFG, world.fed.seed, world.server)
    assert isinstance(answers, Cache)
    assert asked(answers, True, D, CFG, world.fed.seed, world.server) is answers
    once = len(teacher.asked)
    fuse(students(world), answers, D, CFG, world.fed.seed, world.server)
    assert len(teacher.asked) == once


class Fresh(Samples):
    """Samples that are brighter with every draw."""

    fresh = True

    def draw(self, indices, seed):
        return self.inputs[indices] + seed % 1000 / 1000


@pytest.mark.parametrize("number", [1, 2])
def test_samples_that_change_with_every_draw_are_asked_about_once_a_minibatch(world, number, monkeypatch):
    """A single student needs no memory for that."""
    world.server.public = Fresh(images(PUBLIC, seed=9)[0])
    teacher, made = Teacher(), []

    class Counted(Memo):
        def __init__(self, *how):
            made.append(how)
            super().__init__(*how)

    monkeypatch.setattr(fusion, "Memo", Counted)
    some = dict(list(students(world).items())[:number])
    fuse(some, teacher, D, CFG, world.fed.seed, world.server)
    assert len(teacher.asked) == CFG.steps * CFG.batch
    assert len(made) == number - 1
    shared = asked(teacher, number > 1, D, CFG, world.fed.seed, world.server)
    assert isinstance(shared, Memo) == (number > 1)


def test_the_surest_samples_are_chosen_by_the_teachers_entropy(world):
    teacher = Teacher()
    lesson = Lesson(world.fed, world.server, CFG, D, world.server.model, "avg_logits", False)
    answers, d = LowEntropy(top=5).narrow(teacher, D, lesson)
    entropies = teacher(images(PUBLIC, seed=9)[0])[1]
    assert d.tolist() == sorted(entropies.argsort()[:5].tolist())
    assert isinstance(answers, Cache)
    same, everything = Teaching().narrow(teacher, D, lesson)
    assert same is teacher
    assert everything is D


def test_a_client_drawn_twice_has_two_voices(world):
    world.fed.copies.update({"c0": 2, "c1": 1})
    assert copies_of(["c0", "c1", "c2"], world.fed) == [2.0, 1.0, 1.0]
    teacher = FedDF(fusion=Distill(temperature=2.0)).teacher([Constant(3.0, 0.0), Constant(0.0, 3.0)], [2.0, 1.0])
    probs, entropy = teacher(torch.zeros(1, 1))
    expected = torch.tensor([2.0, 1.0]).div(2).softmax(0)  # mean logits (2, 1), at temperature 2
    assert torch.allclose(probs[0].double(), expected.double(), atol=1e-6)
    assert entropy[0].item() == pytest.approx(-(expected * expected.log()).sum().item(), abs=1e-6)


def test_models_that_answer_with_infinite_numbers_are_rejected(world):
    sent = {k: world.server.init(world.fed.architecture(k)) for k in ("c0", "c1")}
    sent["c1"]["3.bias"][0] = float("inf")
    x = replies_of({k: Update(weights) for k, weights in sent.items()})
    assert list(finite_models(x, D[:0], world.fed, world.server)) == ["c0", "c1"]  # no model is asked
    assert list(finite_models(x, world.server.public[D[:1]], world.fed, world.server)) == ["c0"]
    assert list(x) == ["c0"]
    assert x.failures["c1"] == "non-finite logits on public samples"


def test_an_untrained_model_gets_the_statistics_of_the_samples(tmp_path):
    world = World(tmp_path, {"c": lambda: Conv(0)}, [("c", Data(*images(6)))], public=images(PUBLIC)[0])
    inputs = images(30, seed=2)[0]
    found = with_statistics("c", world.server.init("c"), inputs, world.server)
    with torch.no_grad():
        before = world.server.model("c", world.server.init("c"))[0](inputs)
    assert torch.allclose(found["1.running_mean"], before.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(found["1.running_var"], before.var((0, 2, 3)), rtol=1e-3)


# ---- samples, and what cannot work ---------------------------------------------------------------


def test_the_samples_of_a_round_follow_from_its_seed(world):
    world.server.per_round = 12
    d = public_indices(CFG, world.fed.seed, world.server)
    order = torch.randperm(PUBLIC, generator=torch.Generator().manual_seed(world.fed.seed("public")))
    assert d.tolist() == sorted(order[:12].tolist())
    assert len(public_indices(Distill(steps=0), world.fed.seed, world.server)) == 0
    assert torch.equal(first_batch(d, Distill(batch=3), world.server), images(PUBLIC, seed=9)[0][d[:3]])
    assert len(first_batch(d[:0], CFG, world.server)) == 0


def test_a_training_that_blows_up_is_an_outcome():
    fitted = Fitted(3, 0.5, 0.1)
    assert outcome_of(lambda: fitted) is fitted

    def blow_up():
        raise Diverged("loss is inf", 4)

    assert outcome_of(blow_up).steps == 4


def test_architectures_with_other_outputs_are_refused(world):
    assert list(logits_problems("it", world.server)) == []
    world.server.num_classes = 3
    expected = [f"it: {A!r} gives logits (1, 4) for one sample, not (1, 3)" for A in world.server.architectures]
    assert list(logits_problems("it", world.server)) == expected  # every architecture, not only the first


@pytest.mark.parametrize(("top", "per_round", "fine"), [(5, 5, True), (6, 5, False), (41, None, False)])
def test_more_of_the_surest_samples_than_a_round_has_are_refused(world, top, per_round, fine):
    world.server.per_round = per_round
    found = list(LowEntropy(top=top).fits(world.server))
    assert len(found) == (not fine)
    assert all(f.startswith(f"top = {top}: a round has {per_round or 40} public samples") for f in found)


def test_the_surest_of_samples_that_change_are_refused(world):
    world.server.public = Fresh(world.server.public.inputs)
    (found,) = LowEntropy(top=5).fits(world.server)
    assert "change with every draw" in found


def test_the_students_modules_are_their_own(world):
    """Nobody keeps a module that a student was trained in."""
    made: list[nn.Module] = []
    build = world.server.model
    world.server.model = lambda A, w: made.append(build(A, w)) or made[-1]
    found = fuse(students(world), Teacher(), D, CFG, world.fed.seed, world.server)
    assert len(made) == 2
    with torch.no_grad():
        for p in made[0].parameters():
            p.fill_(0.0)
    assert by_hand.close(found["c"], taught(world, "c"))
