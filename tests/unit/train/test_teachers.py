"""Ensembles and their cache: the oracles KD-1, KD-2 and FDF-4, what a teacher must never do, how little it keeps."""

import errno
import gc
import os
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.func import functional_call

from solera.core.tensors import weights_of
from solera.train.chain import resized
from solera.train.distill import divergence, kd_loss
from solera.train.fitting import logits_of
from solera.train.teachers import Cache, Ensemble, Rows, drop_worst, entropy, frozen, lowest_entropy, soft_targets
from toys import Constant, Conv, equal_rows, images, mlp, same_bits

TEACHERS = ((2.0, 0.0, -1.0), (0.0, 1.0, 1.0))
STUDENT = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
RULES = ("avg_logits", "avg_probs", "avg_losses")


def close(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9)


def taught(rule: str, temperature: float = 1.0, t_squared: bool = False) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Targets, loss and gradient of the student of KD-1 under a rule."""
    p, h = Ensemble([Constant(*z) for z in TEACHERS], rule, temperature=temperature)(torch.zeros(1, 1))
    z = STUDENT.clone().requires_grad_()
    loss = divergence(z, p, h, temperature, t_squared)
    loss.backward()
    return p, loss.item(), z.grad


def test_kd_1():
    p, loss, grad = taught("avg_logits")
    close(p, [0.50648039, 0.30719589, 0.18632372])
    close(soft_targets(STUDENT)[0], [0.38365173, 0.38365173, 0.23269654])
    assert loss == pytest.approx(0.0309906128, abs=5e-11)
    close(grad, [-0.12282866, 0.07645585, 0.04637281])


def test_kd_1_temperature_4():
    _, loss, grad = taught("avg_logits", 4.0)
    assert loss == pytest.approx(0.0018126100, abs=5e-11)
    close(grad, [-0.00720877, 0.00382937, 0.0033794])
    _, loss, grad = taught("avg_logits", 4.0, t_squared=True)
    assert loss == pytest.approx(0.0290017606, abs=5e-11)
    close(grad, [-0.11534035, 0.06126988, 0.05407048])


def test_kd_2():
    p, loss, grad = taught("avg_probs")
    close(p, [0.49957857, 0.268257, 0.23216443])
    assert loss == pytest.approx(0.0353924818, abs=5e-11)
    same_p, mean_of_losses, same_grad = taught("avg_losses")
    assert mean_of_losses == pytest.approx(0.3032903919, abs=5e-11)
    assert torch.equal(p, same_p)
    assert torch.equal(grad, same_grad)


def test_avg_losses_is_the_mean_of_the_single_losses_at_any_temperature():
    for temperature in (0.5, 1.0, 4.0):
        single = [kd_loss(STUDENT, torch.tensor([z], dtype=torch.float64), temperature, True) for z in TEACHERS]
        loss = taught("avg_losses", temperature, True)[1]
        assert loss == pytest.approx(sum(s.item() for s in single) / 2, abs=1e-12)


def test_kd_loss_is_forward_kl_mean_over_the_batch():
    g = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 50, 7, generator=g, dtype=torch.float64).unbind()
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(kd_loss(student, teacher, 3.0), expected)
    torch.testing.assert_close(kd_loss(student, teacher, 3.0, t_squared=True), 9 * expected)


def test_probability_zero_is_no_trouble():
    p = torch.tensor([[1.0, 0.0, 0.0]])
    assert entropy(p).item() == 0
    assert torch.isfinite(divergence(torch.tensor([[0.0, 0.0, 0.0]]), p, entropy(p)))
    extreme = kd_loss(torch.tensor([[0.0, 300.0]]), torch.tensor([[300.0, 0.0]]))
    assert extreme.item() == pytest.approx(300.0)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("rule", RULES)
def test_a_student_equal_to_all_teachers_has_no_loss_and_no_gradient(rule, count):
    model, (x, _) = Conv(0).eval(), images(64)
    p, h = Ensemble([Conv(0) for _ in range(count)], rule, temperature=2.0)(x)
    loss = divergence(model(x), p, h, 2.0)
    loss.backward()
    assert abs(loss.item()) < 1e-7
    if rule != "avg_probs":  # its entropy is computed from averaged probabilities: equal to rounding only
        assert loss.item() == 0
    assert all(torch.count_nonzero(w.grad) == 0 for w in model.parameters())


def test_weights_count_and_permuting_teachers_changes_nothing_but_rounding():
    models, (x, _) = [Conv(0), mlp(1), Conv(2, norm=False)], images(40)
    for rule in RULES:
        p, h = Ensemble(models, rule, [1, 2, 3])(x)
        q, k = Ensemble([models[i] for i in (2, 0, 1)], rule, [3, 1, 2])(x)
        torch.testing.assert_close((p, h), (q, k), rtol=1e-6, atol=1e-6)
        twice = Ensemble([models[0], models[1], models[1]], rule)(x)
        torch.testing.assert_close(Ensemble(models[:2], rule, [1, 2])(x), twice, rtol=1e-6, atol=1e-6)
    alone = Ensemble(models, weights=[0, 1, 0])(x)[0]
    assert torch.equal(alone, soft_targets(logits_of(models[1], x))[0])


def test_mean_logits_of_different_architectures():
    models, (x, _) = [Conv(0), mlp(1), Conv(2, norm=False)], images(40)
    mean = torch.stack([logits_of(m, x) for m in models]).double().mean(0)
    torch.testing.assert_close(Ensemble(models)(x)[0].double(), mean.softmax(-1), rtol=1e-5, atol=1e-6)


def test_teachers_are_frozen():
    models, (x, _) = [Conv(0).train(), Conv(1, dropout=0.5).train()], images(40)
    before = [weights_of(m) for m in models]
    teacher = Ensemble(models)
    first = teacher(x)
    assert torch.equal(first[0], teacher(x)[0])  # no dropout
    assert not first[0].requires_grad
    assert all(same_bits(weights_of(m), b) for m, b in zip(models, before, strict=True))
    assert not any(m.training for m in models)
    assert not any(p.requires_grad for m in models for p in m.parameters())


def test_an_ensemble_of_nobody_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Ensemble([])
    with pytest.raises(ValueError, match="as many weights"):
        Ensemble([mlp(0)], weights=[1, 2])
    with pytest.raises(ValueError, match="as many weights"):
        Ensemble([mlp(0)], weights=[0])


# ---- frozen models ---------------------------------------------------------------------------------


class Factory:
    """Builds modules as the server does, and knows which of them are still there."""

    def __init__(self) -> None:
        self.templates = {"c": Conv(0).to(memory_format=torch.channels_last), "m": mlp(0)}
        self.made: list[weakref.ref] = []
        self._lock = threading.Lock()

    def __call__(self, P: str, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
        model = resized(self.templates[P], weights).eval()
        with self._lock:
            self.made.append(weakref.ref(model))
        return model

    def alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.made)


def thirty() -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Thirty models of two architectures, with BatchNorm statistics that differ."""
    models = [("c", Conv(i)) if i % 3 else ("m", mlp(i)) for i in range(30)]
    for i, (P, model) in enumerate(models):
        if P == "c":
            model.train()(images(20, seed=i)[0])
    return [(P, weights_of(model)) for P, model in models]


@pytest.mark.parametrize("rule", [*RULES, "confidence", "clipped_logits", "standardised_logits", "median_probs"])
def test_frozen_models_answer_as_modules_of_their_own_to_the_bit(rule):
    build, members, (x, _) = Factory(), thirty(), images(70)
    own = [build(P, w) for P, w in members]
    shares = [1.0 + i % 4 for i in range(30)]
    expected = Ensemble(own, rule, shares, 2.0)(x)
    said = Ensemble(frozen(members, build), rule, shares, 2.0)(x)
    assert all(torch.equal(a, b) for a, b in zip(said, expected, strict=True))


def test_an_ensemble_of_thirty_needs_one_module_an_architecture():
    build, members, (x, _) = Factory(), thirty(), images(100)
    teacher = Ensemble(frozen(members, build))
    assert build.alive() == 0
    Cache.of(teacher, x, torch.arange(100), batch=32)
    assert len(build.made) == build.alive() == 2
    del teacher
    assert build.alive() == 0


def test_each_thread_has_modules_of_its_own_and_the_bits_of_one_thread():
    build, members, (x, _) = Factory(), thirty(), images(300)
    teacher = Ensemble(frozen(members, build))
    serial = Cache.of(teacher, x, torch.arange(300), batch=20)
    with ThreadPoolExecutor(4) as pool:
        run = lambda jobs: list(pool.map(lambda job: job(), jobs))  # noqa: E731
        for _ in range(5):
            threads = Cache.of(teacher, x, torch.arange(300), run, batch=20)
            assert all(torch.equal(a, b) for a, b in zip(serial.targets, threads.targets, strict=True))
        assert build.alive() <= 2 * (1 + 4)
    assert build.alive() == 2  # those of the other threads have gone with them


def test_a_list_of_frozen_models_can_be_asked_in_any_order():
    build, members, (x, _) = Factory(), thirty(), images(40)
    models = list(frozen(members, build))
    for i in (7, 3, 29, 3, 0):
        assert torch.equal(logits_of(models[i], x), logits_of(build(*members[i]), x))


def test_frozen_models_leave_their_weights_alone_and_are_never_in_training_mode():
    build, members, (x, _) = Factory(), thirty(), images(40)
    before = [{n: t.clone() for n, t in w.items()} for _, w in members]
    models = frozen(members, build)
    Ensemble(models)(x)
    models[1].train()(x)  # whatever anybody does to them
    assert all(same_bits(w, b) for (_, w), b in zip(members, before, strict=True))
    assert all(same_bits(weights_of(m), b) for m, b in zip(models, before, strict=True))
    inside = [ref() for ref in build.made]
    assert not any(layer.training for model in inside for layer in model.modules())
    assert not any(p.requires_grad for model in inside for p in model.parameters())


def test_a_gradient_can_pass_through_a_frozen_model_until_the_next_one_is_asked():
    build, members = Factory(), thirty()
    one, other = (m for m in frozen(members, build)[1:3])
    x, y = (images(8)[0].requires_grad_() for _ in range(2))
    one(x).square().sum().backward()
    build(*members[1])(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    late = one(x).square().sum()
    other(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # never a wrong gradient
        late.backward()


def test_models_of_one_architecture_may_differ_in_width():
    build, (x, _) = Factory(), images(40)
    wide, narrow = weights_of(mlp(1, width=32)), weights_of(mlp(2, width=5))
    models = frozen([("m", wide), ("m", narrow), ("m", wide)], build)
    said = [logits_of(m, x) for m in models]
    assert torch.equal(said[0], said[2])
    assert torch.equal(said[1], logits_of(build("m", narrow), x))


def test_weights_that_do_not_fit_are_refused_by_torch_as_ever():
    weights = weights_of(mlp(1))
    models = frozen([("m", weights), ("m", {f"x{n}": t for n, t in weights.items()})], Factory())
    models[0](images(4)[0])
    with pytest.raises(RuntimeError, match="Missing key"):
        models[1](images(4)[0])


# ---- the cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_cached_equals_recomputed_to_the_bit(rule):
    models, (x, _) = [Conv(0), mlp(1), Conv(2)], images(700)
    teacher, same = Ensemble(models, rule, temperature=2.0), equal_rows(*models)
    g = torch.Generator().manual_seed(0)
    visited = torch.randperm(700, generator=g)[:613]
    cache = Cache.of(teacher, x, visited, batch=512)
    for size in (1, 5, 31, 32, 100, 128, 613):
        i = visited[torch.randperm(613, generator=g)[:size]]
        assert all(same(a, b) for a, b in zip(cache[i], teacher(x[i]), strict=True)), size


def test_cache_rows_belong_to_samples_not_to_positions():
    x = torch.arange(50)[:, None].double()
    cache = Cache.of(lambda inputs: (inputs * 10,), x, torch.tensor([7, 3, 49, 11]), batch=2)
    assert cache[torch.tensor([49, 3, 3])][0].flatten().tolist() == [490, 30, 30]


def test_cache_asks_once_about_each_visited_sample_and_refuses_others():
    asked: list[int] = []

    def teacher(inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked.extend(inputs.flatten().long().tolist())
        return (inputs,)

    cache = Cache.of(teacher, torch.arange(100)[:, None].double(), torch.arange(0, 100, 3), batch=10)
    assert sorted(asked) == list(range(0, 100, 3))
    cache[torch.tensor([0, 3])]
    assert len(asked) == 34
    with pytest.raises(IndexError, match="no stored targets"):
        cache[torch.tensor([1])]


def test_cache_computed_side_by_side_has_the_same_bits():
    teacher, (x, _) = Ensemble([Conv(i) for i in range(4)]), images(300)
    serial = Cache.of(teacher, x, torch.arange(300), batch=50)
    with ThreadPoolExecutor(2) as pool:
        threads = Cache.of(teacher, x, torch.arange(300), lambda fs: list(pool.map(lambda f: f(), fs)), batch=50)
    assert all(torch.equal(a, b) for a, b in zip(serial.targets, threads.targets, strict=True))


def test_halves_are_off_by_no_more_than_their_spacing():
    """Round to nearest: half of the spacing of float16 numbers, 2^-11 of a normal one and 2^-25 below 2^-14."""
    g = torch.Generator().manual_seed(0)
    exponents = torch.randint(-40, 1, (4000, 5), generator=g)
    p = (torch.rand(4000, 5, generator=g) + 1).double().ldexp(exponents - 1).float()
    p[0] = torch.tensor([0.0, 1.0, 2.0**-14, 2.0**-24, 2.0**-26])
    h = entropy(p)
    kept, same_h = Cache.of(lambda i: (p[i], h[i]), torch.arange(4000), torch.arange(4000), half=True)[
        torch.arange(4000)
    ]
    off = (kept.double() - p.double()).abs()
    normal = p >= 2.0**-14
    assert (off[normal] / p[normal].double()).max() <= 2.0**-11
    assert off[~normal].max() <= 2.0**-25
    assert off[normal].max() > 2.0**-13  # it was rounded at all
    assert kept[0].tolist() == [0.0, 1.0, 2.0**-14, 2.0**-24, 0.0]
    assert kept.dtype == torch.float32
    assert torch.equal(same_h, h)


def test_only_numbers_for_each_class_are_halved_and_nan_stays_nan():
    labels, dissent = torch.arange(3000), torch.rand(3000, 4)
    dissent[5, 2] = float("nan")
    cache = Cache.of(lambda i: (labels[i], dissent[i]), labels, labels, half=True)
    assert [t.dtype for t in cache.targets] == [torch.int64, torch.float16]
    kept_labels, kept = cache[labels]
    assert torch.equal(kept_labels, labels)  # 2049 is no float16
    assert torch.equal(kept.isnan(), dissent.isnan())
    assert cache.targets[1].nbytes == dissent.nbytes // 2


@pytest.mark.parametrize("half", [False, True])
def test_on_disk_are_the_bits_of_memory(half):
    teacher, (x, _) = Ensemble([Conv(i) for i in range(3)]), images(300)
    visited = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:211]
    memory = Cache.of(teacher, x, visited, batch=50, half=half)
    with ThreadPoolExecutor(2) as pool:
        run = lambda jobs: list(pool.map(lambda job: job(), jobs))  # noqa: E731
        disk = Cache.of(teacher, x, visited, run, batch=50, half=half, on_disk=True)
    assert all(torch.equal(a, b) for a, b in zip(memory.targets, disk.targets, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(memory[visited[:9]], disk[visited[:9]], strict=True))


def mapped(folder: os.PathLike[str]) -> int:
    """How many files of `folder` this process has mapped, with or without a name."""
    with open("/proc/self/maps") as lines:
        return sum(str(folder) in line for line in lines)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="looks at Linux' list of mapped files")
def test_the_file_has_no_name_and_is_gone_with_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x = torch.rand(1000, 10)
    cache = Cache.of(lambda x: (x, x[:, 0]), x, torch.arange(1000), on_disk=True)
    assert os.listdir(tmp_path) == []
    assert mapped(tmp_path) == 2
    assert torch.equal(cache.targets[0], x)
    del cache
    gc.collect()
    assert mapped(tmp_path) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux' device that is always full")
def test_a_full_disk_is_told_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b"))  # noqa: SIM115
    with pytest.raises(OSError, match=r"has no space .* 3\.1 MiB .*set TMPDIR .*cache_on_disk") as caught:
        Rows(80000, on_disk=True).write(0, (torch.rand(7, 10),))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.errno == errno.ENOSPC


def test_a_cache_is_written_in_place_so_there_is_never_a_second_copy():
    rows = Rows(100)
    rows.write(40, (torch.full((20, 3), 4.0),))
    place = rows.targets[0].data_ptr()
    rows.write(0, (torch.full((40, 3), 1.0),))
    rows.write(60, (torch.full((40, 3), 9.0),))
    assert rows.targets[0].data_ptr() == place
    assert rows.targets[0][:, 1].tolist() == [1.0] * 40 + [4.0] * 20 + [9.0] * 40


def test_no_samples_are_an_empty_cache_anywhere():
    for on_disk in (False, True):
        cache = Cache.of(lambda x: (x,), torch.rand(5, 3), torch.empty(0, dtype=torch.int64), on_disk=on_disk)
        assert cache.targets[0].shape == (0, 3)


def test_the_surest_samples_are_chosen_alike_from_any_cache():
    teacher, (x, _) = Ensemble([Conv(0), mlp(1)]), images(1200)
    indices = torch.arange(0, 1200, 2)
    cache = Cache.of(teacher, x, indices, on_disk=True)
    expected = indices[entropy(teacher(x[indices])[0]).topk(50, largest=False).indices.sort().values]
    assert torch.equal(lowest_entropy(cache, indices, 50), expected)


def test_stored_targets_need_no_indices():
    probs = torch.rand(5, 3)
    assert torch.equal(Cache([probs])[torch.tensor([4, 0])][0], probs[[4, 0]])


def test_a_teacher_that_answers_for_a_batch_is_independent_of_the_models_own_batches():
    """Guards against teachers in training mode, whose answers depend on who else is in the batch."""
    model, (x, _) = Conv(0), images(64)
    whole = Ensemble([model])(x)[0]
    weights = weights_of(model)
    by_hand = functional_call(model.eval(), weights, (x,)).softmax(-1)
    torch.testing.assert_close(whole, by_hand, rtol=1e-6, atol=1e-7)
    assert torch.equal(Ensemble([model])(x[:7])[0], whole[:7])


# ---- drop-worst ------------------------------------------------------------------------------------


def test_fdf_4():
    accuracies = [a / 100 for a in (9.8, 35.0, 11.9, 12.1, 40.0)]
    assert drop_worst(accuracies, classes=10) == [1, 3, 4]
    assert drop_worst([0.12, 0.1199], classes=10) == [0]  # the threshold itself is good enough


def test_drop_worst_keeps_the_best_when_all_guess():
    assert drop_worst([0.05, 0.1, 0.08], classes=10) == [1]
    assert drop_worst([0.1, 0.1], classes=10) == [0]  # ties: the lowest position
    assert drop_worst([], classes=10) == []


def test_outliers_are_dropped_only_if_nobody_guesses():
    # all but the best: mean .5, deviation .2; the limit is .2
    accuracies = [0.6, 0.9, 0.6, 0.6, 0.6, 0.1]
    others = torch.tensor([0.6, 0.6, 0.6, 0.6, 0.1], dtype=torch.float64)
    limit = (others.mean() - 1.5 * others.std(correction=0)).item()
    assert 0.1 < limit < 0.6
    assert drop_worst(accuracies, 20, outlier=True) == [0, 1, 2, 3, 4]
    assert drop_worst(accuracies, 20) == [0, 1, 2, 3, 4, 5]
    assert drop_worst([*accuracies, 0.01], 20, outlier=True) == [0, 1, 2, 3, 4, 5]  # 0.01 guesses: no outlier test
    assert drop_worst([0.5], 10, outlier=True) == [0]
    assert drop_worst([0.5, 0.4], 10, outlier=True) == [0, 1]


def test_threshold_range():
    assert drop_worst([0.0, 0.5], 10, threshold=0) == [0, 1]
    for bad in (-0.1, 10.1):
        with pytest.raises(ValueError, match="threshold"):
            drop_worst([0.5], 10, threshold=bad)
