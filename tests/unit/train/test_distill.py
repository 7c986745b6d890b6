"""Distillation: the oracles FDF-2 and FDF-3, zero steps and zero gradients, early stopping, and falling back."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import by_hand
from solera.core.tensors import weights_of
from solera.train.aggregate import uniform_mean
from solera.train.distill import Distill, Memo, cached, cosine, distill, divergence, visits
from solera.train.fitting import Local, evaluate, fit, logits_of
from solera.train.teachers import Cache, Ensemble, soft_targets
from toys import Constant, Conv, images, mlp, same_bits

QUICK = Distill(steps=12, batch=16, every=3, patience=6)
PUBLIC = images(60, seed=5)[0]


def ensemble(*seeds: int, norm: bool = True) -> Ensemble:
    return Ensemble([Conv(s, norm) for s in seeds])


def test_a_gradient_is_clipped_by_its_norm_and_keeps_its_direction():
    """Clipped by value, number by number, it would point elsewhere."""
    clip, lr = 0.05, 0.1
    cfg = Distill(steps=1, batch=60, optimizer="sgd", lr=lr, schedule="constant", clip=clip)
    student, teacher = mlp(0), mlp(1)
    loss = by_hand.kl_towards(by_hand.mean_logits([teacher], PUBLIC))
    gradients = torch.autograd.grad(loss(student(PUBLIC), list(range(60))), list(student.parameters()))
    length = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert length > 2 * clip
    before = [p.detach().clone() for p in student.parameters()]
    distill(student, PUBLIC, Ensemble([teacher]), cfg, 0)
    for p, start, g in zip(student.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(p.detach() - start, -lr * g * clip / length, rtol=1e-3, atol=1e-7)


def test_visits_are_hands_from_a_deck():
    for n, steps, batch in ((40, 6, 16), (100, 9, 64), (7, 5, 5), (3, 4, 128)):
        assert visits(n, steps, batch, 4).tolist() == by_hand.batches(n, steps, batch, 4)


# ---- which samples, which step sizes ---------------------------------------------------------------


def test_visits_walk_through_shuffles():
    walk = visits(10, 7, 4, seed=3)
    assert walk.shape == (7, 4)
    flat = walk.flatten().tolist()
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10))
    assert flat[:10] != flat[10:20]
    assert torch.equal(walk, visits(10, 7, 4, seed=3))
    assert not torch.equal(walk, visits(10, 7, 4, seed=4))


@settings(deadline=None)
@given(n=st.integers(1, 60), steps=st.integers(0, 40), batch=st.integers(1, 70), seed=st.integers(0, 5))
def test_no_minibatch_has_a_sample_twice_and_every_pass_has_each_once(n, steps, batch, seed):
    walk = visits(n, steps, batch, seed)
    assert walk.shape == (steps, min(n, batch))
    assert all(len(set(row)) == len(row) for row in walk.tolist())
    flat = walk.flatten()
    for begin in range(0, len(flat), n):
        drawn = flat[begin : begin + n].bincount(minlength=n)
        assert int(drawn.max()) == 1  # of the last pass, which may be cut short: at most once
    counts = flat.bincount(minlength=n)
    assert int(counts.max() - counts.min()) <= 1


@settings(deadline=None)
@given(batch=st.integers(1, 20), passes=st.integers(1, 4), each=st.integers(1, 4), seed=st.integers(0, 5))
def test_where_passes_end_with_a_minibatch_the_walk_is_one_shuffle_after_the_other(batch, passes, each, seed):
    n, g = batch * each, torch.Generator().manual_seed(seed)
    shuffles = torch.cat([torch.randperm(n, generator=g) for _ in range(passes)])
    assert torch.equal(visits(n, passes * each, batch, seed), shuffles.view(-1, batch))


def test_fewer_samples_than_a_batch_are_one_batch():
    walk = visits(3, 5, 128, seed=0)
    assert walk.shape == (5, 3)
    assert all(sorted(row) == [0, 1, 2] for row in walk.tolist())
    student = Conv(0)
    assert distill(student, PUBLIC[:3], ensemble(1), QUICK, 0).steps == 12


def test_no_steps_no_visits_and_no_samples_no_distillation():
    assert visits(10, 0, 4, seed=0).shape == (0, 4)
    with pytest.raises(ValueError, match="no public sample"):
        visits(0, 5, 4, seed=0)


def test_fdf_3():
    assert cosine(1e-3, 0, 10_000) == 1e-3
    assert cosine(1e-3, 1000, 10_000) == pytest.approx(9.7552826e-4, abs=5e-12)
    assert cosine(1e-3, 5000, 10_000) == pytest.approx(5e-4, abs=1e-15)
    assert cosine(1e-3, 10_000, 10_000) == pytest.approx(0.0, abs=1e-15)


def test_the_divergence_by_hand():
    """p = (1/4, 3/4) against softmax(2, 0) and, at T = 2, softmax(1, 0); the loss is a mean over the batch."""
    z, p = torch.tensor([[2.0, 0.0]] * 3, dtype=torch.float64), torch.tensor([[0.25, 0.75]] * 3, dtype=torch.float64)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    for temperature, top in ((1.0, 2.0), (2.0, 1.0)):
        q = math.exp(top) / (math.exp(top) + 1)
        kl = 0.25 * math.log(0.25 / q) + 0.75 * math.log(0.75 / (1 - q))
        h = torch.full((3,), entropy, dtype=torch.float64)
        assert divergence(z, p, h, temperature).item() == pytest.approx(kl, rel=1e-12)
        assert divergence(z, p, h, temperature, t_squared=True).item() == pytest.approx(temperature**2 * kl, rel=1e-12)


def test_no_gradient_is_left_behind():
    student = Conv(0)
    distill(student, PUBLIC, ensemble(1), QUICK, 0)
    assert all(p.grad is None for p in student.parameters())


def test_the_schedule_is_the_one_the_student_gets():
    """One free logit with a constant gradient of 1: plain SGD moves it by the sum of the step sizes."""
    for schedule, total in (("cosine", sum(cosine(0.1, s, 8) for s in range(8))), ("constant", 0.8)):
        student = Constant(0.0, 0.0)
        cfg = Distill(steps=8, optimizer="sgd", lr=0.1, schedule=schedule, clip=None)
        distill(student, torch.zeros(4, 1), lambda x: (x,), cfg, 0, loss=lambda z, _: z[:, 0].mean())
        assert student.logits[0].item() == pytest.approx(-total)


def test_clipping_bounds_the_gradient():
    def moved(clip):
        student = Constant(0.0, 0.0)
        cfg = Distill(steps=1, optimizer="sgd", lr=1.0, clip=clip)
        distill(student, torch.zeros(4, 1), lambda x: (x,), cfg, 0, loss=lambda z, _: 30 * z[:, 0].mean())
        return -student.logits[0].item()

    assert moved(5.0) == pytest.approx(5.0, rel=1e-5)
    assert moved(None) == pytest.approx(30.0)


# ---- what must not move ----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_zero_learning_rate_or_zero_steps_leave_the_student(optimizer):
    for cfg in (
        Distill(steps=5, lr=0.0, optimizer=optimizer, student_norm="frozen"),
        Distill(steps=0, optimizer=optimizer),
    ):
        student = Conv(0)
        before = weights_of(student)
        distill(student, PUBLIC, ensemble(1, 2), cfg, 0)
        assert same_bits(weights_of(student), before)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("rule", ["avg_logits", "avg_probs", "avg_losses"])
def test_a_student_equal_to_its_teachers_does_not_move(optimizer, rule):
    student = Conv(0)
    before = weights_of(student)
    cfg = Distill(steps=6, batch=32, optimizer=optimizer, student_norm="frozen")
    done = distill(student, PUBLIC, Ensemble([Conv(0) for _ in range(3)], rule), cfg, 0)
    assert same_bits(weights_of(student), before)
    assert done.loss == pytest.approx(0.0, abs=1e-7)


def test_student_statistics_follow_the_public_samples_or_stay_frozen():
    for mode in ("train", "frozen"):
        student = Conv(0)
        before = weights_of(student)
        distill(student, PUBLIC, ensemble(1), Distill(steps=5, batch=16, student_norm=mode), 0)
        after = weights_of(student)
        still = torch.equal(before["1.running_mean"], after["1.running_mean"])
        assert still == (mode == "frozen")
        assert not torch.equal(before["0.weight"], after["0.weight"])


def test_frozen_statistics_stay_frozen_across_a_look_at_the_validation_set():
    x, y = images(30)
    student = Conv(0)
    before = student[1].running_mean.clone()
    cfg = Distill(steps=6, batch=16, every=2, student_norm="frozen")
    distill(student, PUBLIC, ensemble(1), cfg, 0, validate=lambda m: evaluate(m, x, y).accuracy)
    assert torch.equal(student[1].running_mean, before)


def test_looking_at_the_validation_set_does_not_change_the_training():
    x, y = images(30)
    cfg = Distill(steps=6, batch=16, every=2, patience=None)
    students = [Conv(0), Conv(0)]
    distill(students[0], PUBLIC, ensemble(1), cfg, 0)
    rising = iter(range(100))

    def validate(model: nn.Module) -> float:
        evaluate(model.eval(), x, y)  # a careless one that changes the mode
        return next(rising)

    distill(students[1], PUBLIC, ensemble(1), cfg, 0, validate=validate)
    assert same_bits(weights_of(students[0]), weights_of(students[1]))


def test_teachers_and_their_statistics_never_change():
    teacher = ensemble(1, 2, 3)
    before = [weights_of(m) for m in teacher.models]
    distill(Conv(0), PUBLIC, teacher, QUICK, 0)
    assert all(same_bits(weights_of(m), b) for m, b in zip(teacher.models, before, strict=True))


# ---- what must move --------------------------------------------------------------------------------


def test_the_student_comes_close_to_the_mean_of_different_teachers():
    teacher = Ensemble([Conv(1), mlp(2)])
    student = mlp(0, width=32)
    target = teacher(PUBLIC)[0]
    start = (logits_of(student, PUBLIC).softmax(-1) - target).abs().max()
    done = distill(student, PUBLIC, teacher, Distill(steps=300, batch=30, lr=5e-3), 0)
    end = (logits_of(student, PUBLIC).softmax(-1) - target).abs().max()
    assert end < start / 5
    assert -1e-6 < done.loss < 1e-3  # 0 is the least, but for rounding
    assert (done.steps, done.best_step, done.diverged, done.accuracy) == (300, 300, False, None)


def test_cached_and_live_teachers_give_the_same_student_bit_for_bit():
    chosen = torch.arange(0, 60, 2)
    live, cached = Conv(0), Conv(0)
    teacher = ensemble(1, 2)
    distill(live, PUBLIC, teacher, QUICK, 7, indices=chosen)
    seen = chosen[visits(len(chosen), QUICK.steps, QUICK.batch, 7)].unique()
    distill(cached, PUBLIC, Cache.of(teacher, PUBLIC, seen), QUICK, 7, indices=chosen)
    assert same_bits(weights_of(live), weights_of(cached))


def test_only_the_chosen_samples_are_seen():
    student, chosen = Conv(0), torch.tensor([3, 14, 15, 9, 26])
    cache = Cache.of(ensemble(1), PUBLIC, chosen)  # would raise for any other sample
    assert distill(student, PUBLIC, cache, QUICK, 0, indices=chosen).steps == 12


def test_seed_decides_and_nothing_else():
    weights = []
    for seed in (1, 1, 2):
        student = Conv(0)
        torch.rand(seed)  # the global generator must not matter
        distill(student, PUBLIC, ensemble(1), QUICK, seed)
        weights.append(weights_of(student))
    assert same_bits(weights[0], weights[1])
    assert not same_bits(weights[0], weights[2])


def test_samples_augmented_at_each_draw_are_shown_to_teacher_and_student_alike():
    class Augmented:
        fresh = True

        def __init__(self) -> None:
            self.seeds: list[int] = []

        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the static view was used")

        def draw(self, i: torch.Tensor, seed: int) -> torch.Tensor:
            self.seeds.append(seed)
            return PUBLIC[i] + torch.randn(PUBLIC[i].shape, generator=torch.Generator().manual_seed(seed))

    shown: list[torch.Tensor] = []

    def teacher(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shown.append(x)
        return soft_targets(torch.zeros(len(x), 4))

    class Watching(Conv):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x is shown[-1]
            return super().forward(x)

    public = Augmented()
    distill(Watching(0), public, teacher, QUICK, 3)
    assert public.seeds == [3 + step for step in range(1, QUICK.steps + 1)]
    with pytest.raises(ValueError, match="drawn anew"):
        distill(Conv(0), public, Cache([torch.zeros(60, 4)]), QUICK, 3)


class Noisy:
    """Public samples that are drawn with noise."""

    fresh = True

    def __len__(self) -> int:
        return len(PUBLIC)

    def __getitem__(self, i: torch.Tensor) -> torch.Tensor:
        return PUBLIC[i]

    def draw(self, i: torch.Tensor, seed: int) -> torch.Tensor:
        return PUBLIC[i] + torch.randn(PUBLIC[i].shape, generator=torch.Generator().manual_seed(seed))


class Counting:
    """A teacher that counts the mini-batches it is asked about."""

    def __init__(self, teacher) -> None:
        self.teacher, self.count = teacher, 0

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count += 1
        return self.teacher(x)


def students_of(memo: Memo | None, teacher, cfg: Distill, workers: int = 1) -> list[dict]:
    """Three students on the same draws, as they end."""

    def student(model: nn.Module) -> dict:
        distill(model, Noisy(), memo or teacher, cfg, 7, indices=torch.arange(50))
        return weights_of(model)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(student, [Conv(0), Conv(1), mlp(2)]))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("on_disk", [False, True])
def test_students_share_the_answers_to_draws_they_have_in_common(workers, on_disk):
    cfg, teacher = replace(QUICK, cache_on_disk=on_disk), Counting(ensemble(1, 2))
    alone = students_of(None, teacher, cfg)
    assert teacher.count == 3 * cfg.steps
    teacher.count = 0
    shared = students_of(Memo(teacher, torch.arange(50), cfg, 7), teacher, cfg, workers)
    assert teacher.count == cfg.steps
    assert all(same_bits(a, b) for a, b in zip(alone, shared, strict=True))


def test_a_memo_never_asks_about_steps_that_nobody_takes():
    cfg, teacher = Distill(steps=400, batch=16, every=2, patience=2), Counting(ensemble(1))
    memo = Memo(teacher, torch.arange(60), cfg, 7)
    ends = [distill(Conv(i), Noisy(), memo, cfg, 7, validate=lambda _: 0.5).steps for i in range(2)]
    assert ends == [4, 4]
    assert teacher.count == 4


def test_a_memo_rounds_for_all_students_alike():
    cfg, teacher = replace(QUICK, cache_dtype="float16"), ensemble(1, 2)

    def rounded(x):
        p, h = teacher(x)
        return p.half().float(), h

    memo = Memo(teacher, torch.arange(50), cfg, 7)
    by_hand = students_of(None, rounded, cfg)
    assert all(same_bits(a, b) for a, b in zip(students_of(memo, teacher, cfg), by_hand, strict=True))


@pytest.mark.parametrize(("seed", "chosen"), [(8, torch.arange(50)), (7, torch.arange(10, 60))])
def test_a_memo_has_no_answers_to_other_draws(seed, chosen):
    memo = Memo(ensemble(1), torch.arange(50), QUICK, 7)
    with pytest.raises(ValueError, match="a memo for seed 7"):
        distill(Conv(0), Noisy(), memo, QUICK, seed, indices=chosen)


def test_how_answers_are_kept_is_a_setting():
    teacher, chosen = ensemble(1, 2), torch.arange(5, 50)
    live, (p, h) = cached(teacher, PUBLIC, chosen, QUICK)[chosen], teacher(PUBLIC[chosen])
    assert torch.equal(live[0], p)
    for on_disk in (False, True):
        cfg = replace(QUICK, cache_dtype="float16", cache_on_disk=on_disk)
        q, k = cached(teacher, PUBLIC, chosen, cfg)[chosen]
        assert torch.equal(q, p.half().float())
        assert torch.equal(k, h)
        assert not torch.equal(q, p)


def test_one_public_sample_and_batchnorm():
    student = Conv(0)
    before = student[1].running_mean.clone()
    assert distill(student, PUBLIC[:1], ensemble(1), QUICK, 0).steps == 12
    assert torch.equal(student[1].running_mean, before)


# ---- early stopping --------------------------------------------------------------------------------


def trace(peak: int, cfg: Distill) -> tuple[object, list[int]]:
    """Distil a single number with a validation accuracy that peaks at step `peak`."""
    student, looks = Constant(0.0, 0.0), []

    def validate(model: nn.Module) -> float:
        looks.append(len(looks) * cfg.every + (0 if cfg.keep_init_if_better else cfg.every))
        return -abs(looks[-1] - peak) / 1e5

    loss = lambda z, _: z[:, 0].mean()  # noqa: E731
    done = distill(student, torch.zeros(2, 1), lambda x: (x,), cfg, 0, loss=loss, validate=validate)
    return done, looks


@pytest.mark.parametrize(("peak", "stop"), [(300, 1300), (9500, 10_000), (100, 1100)])
def test_fdf_2(peak, stop):
    done, looks = trace(peak, Distill(steps=10_000, batch=2, optimizer="sgd", every=100, patience=1000))
    assert done.steps == stop
    assert done.best_step == peak
    assert looks == list(range(100, stop + 1, 100))


def test_no_patience_never_stops():
    done, _ = trace(30, Distill(steps=300, every=10, patience=None))
    assert (done.steps, done.best_step) == (300, 30)


def test_the_best_student_is_returned_not_the_last():
    student = Constant(0.0, 0.0)
    accuracies = iter([0.1, 0.5, 0.5, 0.3])  # the second 0.5 is not strictly better
    kept: list[float] = []

    def validate(model: nn.Module) -> float:
        kept.append(model.logits[0].item())
        return next(accuracies)

    cfg = Distill(steps=8, every=2, optimizer="sgd", lr=0.1)
    loss = lambda z, _: z[:, 0].mean()  # noqa: E731
    done = distill(student, torch.zeros(2, 1), lambda x: (x,), cfg, 0, loss=loss, validate=validate)
    assert (done.best_step, done.accuracy) == (4, 0.5)
    assert student.logits[0].item() == kept[1] != kept[3]
    assert not student.training


def test_fewer_steps_than_the_first_look_are_looked_at_once():
    done, looks = trace(0, Distill(steps=7, every=100))
    assert (done.steps, done.best_step, len(looks)) == (7, 7, 1)


def test_the_undistilled_student_wins_only_if_allowed_and_better():
    done, _ = trace(0, Distill(steps=20, every=10, keep_init_if_better=True))
    assert done.best_step == 0
    done, _ = trace(20, Distill(steps=20, every=10, keep_init_if_better=True))
    assert done.best_step == 20
    done, _ = trace(0, Distill(steps=20, every=10))
    assert done.best_step == 10
    with pytest.raises(ValueError, match="validation"):
        distill(mlp(0), PUBLIC, ensemble(1), Distill(steps=1, keep_init_if_better=True), 0)


@pytest.mark.parametrize(
    ("initial", "looks", "best", "steps"),
    [
        (0.5, [0.3, 0.5, 0.4, 0.4], 4, 8),  # a tie is the trained student's
        (0.6, [0.3, 0.5, 0.4, 0.4], 0, 8),  # the initial one is better, and did not stop anything early
        (0.6, [0.3, 0.3, 0.3, 0.3], 0, 6),  # patience counts from the first look, at step 2
        (0.2, [0.3, 0.3, 0.3, 0.3], 2, 6),
    ],
)
def test_the_undistilled_student_loses_ties_and_patience_counts_from_the_first_look(initial, looks, best, steps):
    student, accuracies = Constant(0.0, 0.0), iter([initial, *looks])
    seen: dict[float, float] = {}

    def validate(model: nn.Module) -> float:
        accuracy = next(accuracies)
        seen.setdefault(accuracy, model.logits[0].item())
        return accuracy

    cfg = Distill(steps=8, every=2, patience=4, optimizer="sgd", lr=0.1, keep_init_if_better=True)
    loss = lambda z, _: z[:, 0].mean()  # noqa: E731
    done = distill(student, torch.zeros(2, 1), lambda x: (x,), cfg, 0, loss=loss, validate=validate)
    accuracy = initial if best == 0 else max(looks)
    assert (done.best_step, done.steps, done.accuracy) == (best, steps, accuracy)
    if initial != accuracy or best == 0:
        assert student.logits[0].item() == seen[accuracy]
    else:
        assert student.logits[0].item() < seen[initial] == 0


# ---- G7: falling back ------------------------------------------------------------------------------


def exploding(at: int):
    calls = iter(range(1, 1000))
    return lambda z, p, h: z.sum() * (math.nan if next(calls) == at else 1.0)


def test_g7_falls_back_to_the_start_without_a_validation_set():
    student = mlp(0)
    before = weights_of(student)
    done = distill(student, PUBLIC, ensemble(1), QUICK, 0, loss=exploding(5))
    assert (done.diverged, done.steps, done.best_step) == (True, 5, 0)
    assert same_bits(weights_of(student), before)
    assert math.isfinite(done.loss)
    assert distill(student, PUBLIC, ensemble(1), QUICK, 0, loss=exploding(1)).loss is None


def test_g7_falls_back_to_the_best_look():
    student = mlp(0)
    seen = []

    def validate(model: nn.Module) -> float:
        seen.append(weights_of(model))
        return [0.9, 0.2][len(seen) - 1]

    done = distill(student, PUBLIC, ensemble(1), QUICK, 0, loss=exploding(8), validate=validate)
    assert (done.diverged, done.steps, done.best_step, done.accuracy) == (True, 8, 3, 0.9)
    assert same_bits(weights_of(student), seen[0])


def test_g7_a_last_step_that_ruins_the_weights_is_noticed():
    student = Constant(1.0, 1.0)
    cfg = Distill(steps=1, optimizer="sgd", lr=1e200, clip=None, schedule="constant")
    huge = lambda z, _: z[:, 0].mean() * 1e200  # noqa: E731
    done = distill(student, torch.zeros(2, 1), lambda x: (x,), cfg, 0, loss=huge)
    assert done.diverged
    assert student.logits.tolist() == [1.0, 1.0]


# ---- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", -1), ("batch", 0), ("every", 0), ("patience", 0), ("temperature", 0.0), ("lr", -1.0), ("clip", -5.0)],
)
def test_impossible_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Distill(**{field: value})


def test_distillation_repairs_an_average_of_models_that_do_not_match():
    """The point of it all, in miniature: a model and the same one with its hidden units in another order."""
    x, y = images(400, seed=1)
    one, other, student = mlp(0, width=8), mlp(0, width=8), mlp(0, width=8)
    fit(one, x, y, Local(epochs=10, batch=20, lr=0.1), 0)
    w = weights_of(one)
    flipped = {n: w[n].flip(0) for n in ("1.weight", "1.bias")}
    other.load_state_dict(w | flipped | {"3.weight": w["3.weight"].flip(1)})
    student.load_state_dict(uniform_mean([w, weights_of(other)]))
    test, truth = images(300, seed=2)
    before = evaluate(student, test, truth).accuracy
    cfg = Distill(steps=300, batch=64, lr=5e-3)
    distill(student, images(400, seed=3)[0], Ensemble([one, other]), cfg, 0)
    assert evaluate(one, test, truth).accuracy == evaluate(other, test, truth).accuracy > 0.98
    assert before < 0.9
    assert evaluate(student, test, truth).accuracy > 0.98
