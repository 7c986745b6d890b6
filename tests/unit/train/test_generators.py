"""Generators and their losses against numbers worked out by hand, the oracles GEN-1 and FTG-1, and the two loops."""

import copy
import math

import pytest
import torch
from torch import nn

from solera.core.tensors import weights_of
from solera.data.public import Generator
from solera.methods.fedftg import FineTune, class_ensemble, disagreement, fine_tune, hard_sample_loss, input_generator
from solera.methods.fedgen import LatentGenerator, ensemble_loss, latent_generator, latent_generator_of, teach_latents
from solera.train.fitting import Local, evaluate, fit, logits_of
from solera.train.generators import (
    ImageDecoder,
    diversity,
    draw,
    label_prior,
    label_weights,
    restored,
    weighted_cross_entropy,
)
from toys import Conv, images, mlp, same_bits

COUNTS = torch.tensor([[10, 0, 5], [30, 20, 0]])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- label counts -----------------------------------------------------------------------------------


def test_gen_1():
    alpha = label_weights(COUNTS)
    assert alpha.T.tolist() == [[0.25, 0.75], [0.0, 1.0], [1.0, 0.0]]


def test_ftg_1():
    assert label_prior(COUNTS).tolist() == pytest.approx([0.61538462, 0.30769231, 0.07692308], abs=1e-8)


def test_a_label_that_nobody_holds_has_no_weight_and_is_never_drawn():
    counts = torch.tensor([[3, 0, 1], [2, 0, 0]])
    assert label_weights(counts)[:, 1].tolist() == [0.0, 0.0]
    for kind in ("counts", "uniform"):
        prior = label_prior(counts, kind)
        _, labels = draw(prior, 20_000, 1, rng())
        assert set(labels.tolist()) == {0, 2}
    assert prior.tolist() == [0.5, 0.0, 0.5]


def test_nobody_holds_anything():
    assert label_prior(torch.zeros(2, 3, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]


def test_labels_are_drawn_as_often_as_they_are_held():
    noise, labels = draw(label_prior(COUNTS), 30_000, 2, rng())
    assert (torch.bincount(labels) / 30_000).tolist() == pytest.approx([8 / 13, 4 / 13, 1 / 13], abs=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.02)
    assert noise.std().item() == pytest.approx(1, abs=0.02)


# ---- losses -----------------------------------------------------------------------------------------


def test_diversity_by_hand():
    """Two samples: noise apart 1 (squared, mean of its numbers), outputs apart (1 + 3) / 2; mean over 4 pairs: 1."""
    noise, outputs = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert diversity(noise, outputs).item() == pytest.approx(math.exp(-1), abs=1e-7)
    assert diversity(noise, torch.ones(2, 2)).item() == 1


def test_diversity_of_images_is_that_of_their_pixels():
    noise, images = torch.randn(5, 3, generator=rng()), torch.randn(5, 2, 4, 4, generator=rng(1))
    total = 0.0
    for i in range(5):
        for j in range(5):
            total += (noise[i] - noise[j]).square().mean().item() * (images[i] - images[j]).abs().mean().item()
    assert diversity(noise, images).item() == pytest.approx(math.exp(-total / 25), rel=1e-5)


def log_sum(*z: float) -> float:
    return math.log(sum(math.exp(v) for v in z))


def test_ensemble_loss_by_hand():
    """One sample of label 0, of which the clients hold a quarter and three quarters."""
    logits, y = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]]), torch.tensor([0])
    alpha = label_weights(COUNTS).float()
    of_mean = log_sum(0.25, 1.5, 0) - 0.25
    of_each = 0.25 * (log_sum(1, 0, 0) - 1) + 0.75 * log_sum(0, 2, 0)
    assert ensemble_loss(logits, y, alpha, "avg_logits").item() == pytest.approx(of_mean, abs=1e-6)
    assert ensemble_loss(logits, y, alpha, "avg_losses").item() == pytest.approx(of_each, abs=1e-6)


def test_fedftg_terms_by_hand():
    one, other = torch.tensor([[1.0, -1.0], [0.0, 4.0]]), torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    shares = torch.tensor([1.0, 0.5])
    assert disagreement(one, other, shares).item() == pytest.approx((1 * 1 + 0.5 * 3) / 2)
    expected = (log_sum(1, -1) - 1 + 0.5 * (log_sum(0, 4) - 4)) / 2
    assert weighted_cross_entropy(one, torch.tensor([0, 1]), shares).item() == pytest.approx(expected, abs=1e-6)


def test_class_ensemble_weighs_teachers_by_the_label():
    logits = torch.tensor([[[math.log(3), 0.0, 0.0]] * 3, [[0.0, math.log(8), 0.0]] * 3])
    said = class_ensemble(logits, torch.tensor([0, 1, 2]), label_weights(COUNTS).float())
    first, second = torch.tensor([0.6, 0.2, 0.2]), torch.tensor([0.1, 0.8, 0.1])
    torch.testing.assert_close(said, torch.stack([0.25 * first + 0.75 * second, second, first]))


def test_hard_sample_loss_is_fidelity_minus_disagreement():
    teacher, student, other = (nn.Linear(4, 3) for _ in range(3))
    x, y, shares = torch.randn(6, 4), torch.arange(6) % 3, torch.rand(6)
    found = hard_sample_loss(x, y, teacher, [student, other], shares, FineTune(fidelity=2.0, hardness=3.0))
    gaps = [disagreement(teacher(x), s(x), shares) for s in (student, other)]
    torch.testing.assert_close(found, 2 * weighted_cross_entropy(teacher(x), y, shares) - 3 * (gaps[0] + gaps[1]) / 2)


# ---- networks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 5, 7), (8,)])
def test_generated_inputs_have_the_shape_and_the_scale_of_prepared_ones(shape):
    G = input_generator(shape, noise=6, classes=3, features=4).train()
    x = G(*draw(torch.full((3,), 1 / 3), 200, 6, rng()))
    assert x.shape == (200, *shape)
    over = [0, *range(2, x.ndim)]  # channel by channel
    assert x.mean(over).abs().max() < 1e-4
    torch.testing.assert_close(x.var(over, unbiased=False), torch.ones(shape[0]), atol=0.05, rtol=0)


def test_inputs_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="can be generated"):
        input_generator((4, 4), 3, 2, 4)


def test_a_generator_is_rebuilt_from_its_weights_alone_and_without_chance():
    G = latent_generator(latent=5, noise=4, classes=3, hidden=7)
    G(*draw(torch.ones(3), 16, 4, rng()))  # statistics that are not the initial ones
    before = torch.get_rng_state()
    back = latent_generator_of(weights_of(G), 3)
    assert torch.equal(torch.get_rng_state(), before)
    sample = draw(torch.ones(3), 9, back.noise, rng())
    assert torch.equal(back(*sample), G.eval()(*sample))
    with torch.no_grad():
        back.get_parameter("net.0.weight").zero_()
    assert bool(G.get_parameter("net.0.weight").any())  # a copy


def test_what_is_generated_for_a_label_does_not_depend_on_the_batch():
    G = restored(lambda: latent_generator(5, 4, 3, 7), weights_of(latent_generator(5, 4, 3, 7)))
    noise, y = draw(torch.ones(3), 64, 4, rng())
    torch.testing.assert_close(G(noise, y)[:8], G(noise[:8], y[:8]))


def test_the_frozen_generator_of_public_data_has_the_same_layers():
    """Files that were written before the layers moved are still read: names and initial bits are those of the part."""
    torch.manual_seed(3)
    old = Generator((1, 10, 14), 6, 4)
    torch.manual_seed(3)
    new = ImageDecoder((1, 10, 14), 6, 4)
    assert same_bits(old.state_dict(), new.state_dict())
    assert next(iter(old.state_dict())) == "dense.0.weight"
    assert list(old.state_dict())[-1] == "grow.3.bias"


# ---- FedGen's loop ----------------------------------------------------------------------------------


def heads(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).train() for _ in range(count)]


@pytest.mark.parametrize("rule", ["avg_logits", "avg_losses"])
def test_the_heads_come_to_see_the_labels_of_latents(rule):
    models = heads()
    before = [weights_of(m) for m in models]
    counts = torch.tensor([[5, 5, 0, 0], [0, 5, 5, 0], [5, 0, 5, 0]])
    torch.manual_seed(0)
    G = latent_generator(5, 6, 4, 32)
    cfg = LatentGenerator(steps=300, lr=1e-2, ensemble=rule)
    alpha, prior = label_weights(counts).float(), label_prior(counts).float()
    first = teach_latents(G, models, alpha, prior, LatentGenerator(steps=1, lr=0.0, ensemble=rule), rng())
    last = teach_latents(G, models, alpha, prior, cfg, rng())
    assert last < first / 2
    noise, y = draw(prior, 200, 6, rng(5))
    answers = (alpha[:, y, None] * torch.stack([logits_of(m, G(noise, y)) for m in models])).sum(0)
    assert (answers.argmax(-1) == y).float().mean() > 0.95
    assert all(same_bits(w, weights_of(m)) for w, m in zip(before, models, strict=True))  # parameters and statistics


def test_the_generators_loss_by_hand():
    """With a rate of 0 the mean over the steps is that of the loss at the start: cross-entropy, and pair by pair."""
    models, alpha, prior = heads(2), torch.tensor([[0.3, 1.0, 0.6, 0.5], [0.7, 0.0, 0.4, 0.5]]), torch.full((4,), 0.25)
    torch.manual_seed(0)
    G = latent_generator(5, 6, 4, 32)
    cfg = LatentGenerator(steps=3, lr=0.0, batch=8, weight_decay=0.0, diversity=2.5)
    found = teach_latents(copy.deepcopy(G), models, alpha, prior, cfg, rng(3))
    again, expected = rng(3), []
    for _ in range(3):
        noise, y = draw(prior, 8, 6, again)
        z = G.train()(noise, y)
        logits = sum(alpha[k][y][:, None] * models[k].eval()(z) for k in range(2))
        own = -logits.log_softmax(-1)[range(8), y].mean()
        pairs = [(noise[i] - noise[j]).square().mean() * (z[i] - z[j]).abs().mean() for i in range(8) for j in range(8)]
        expected.append((own + 2.5 * torch.exp(-torch.stack(pairs).mean())).item())
    assert found == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_no_step_leaves_the_generator():
    G = latent_generator(5, 6, 4, 8)
    before = weights_of(G)
    assert teach_latents(G, heads(1), torch.ones(1, 4), torch.ones(4) / 4, LatentGenerator(steps=0), rng()) is None
    assert same_bits(before, weights_of(G))


# ---- FedFTG's loop ----------------------------------------------------------------------------------

SMALL = FineTune(steps=3, batch=8, noise=4, features=2)
ALPHA, PRIOR = torch.tensor([[0.5, 1.0, 0.0, 0.5], [0.5, 0.0, 1.0, 0.5]]), torch.full((4,), 0.25)


def tuned(cfg: FineTune, students: list[nn.Module], teachers: list[nn.Module], lr: float = 0.05) -> list[float | None]:
    torch.manual_seed(0)
    G = input_generator((1, 8, 8), cfg.noise, 4, cfg.features)
    return fine_tune(G, students, teachers, ALPHA[: len(teachers)], PRIOR, cfg, lr, rng())


def test_teachers_are_frozen_and_their_statistics_never_change():
    teachers = [Conv(1), Conv(2)]
    before = [weights_of(t) for t in teachers]
    tuned(SMALL, [Conv(3)], [t.train() for t in teachers])
    assert all(same_bits(w, weights_of(t)) for w, t in zip(before, teachers, strict=True))


def test_the_divergence_of_a_student_by_hand():
    """Nothing moves: generated in evaluation mode, KL(sum_k alpha_k^y softmax(teacher_k) || softmax(student))."""
    torch.manual_seed(0)
    G = input_generator((1, 8, 8), 4, 4, 2)
    student, teachers = Conv(3), [Conv(1), Conv(2)]
    cfg = FineTune(steps=1, batch=8, noise=4, features=2, generator_steps=0, student_steps=2)
    (found,) = fine_tune(copy.deepcopy(G), [student], teachers, ALPHA, PRIOR, cfg, 0.0, rng())
    noise, y = draw(PRIOR, 8, 4, rng())
    x = G.eval()(noise, y)
    p = sum(ALPHA[k][y][:, None] * teachers[k].eval()(x).softmax(-1) for k in range(2))
    expected = (p * (p.log() - student.eval()(x).log_softmax(-1))).sum(-1).mean()
    assert found == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(("norm", "moves"), [("frozen", False), ("train", True)])
def test_statistics_of_a_global_model_follow_generated_samples_only_if_asked(norm, moves):
    student = Conv(3)
    before = weights_of(student)
    tuned(FineTune(steps=2, batch=8, noise=4, features=2, student_norm=norm), [student], [Conv(1), Conv(2)])
    after = weights_of(student)
    assert torch.equal(before["1.running_mean"], after["1.running_mean"]) is not moves
    assert not torch.equal(before["0.weight"], after["0.weight"])


def test_the_generators_turn_leaves_the_global_model():
    student = Conv(3)
    before = weights_of(student)
    losses = tuned(FineTune(steps=2, batch=8, noise=4, features=2, student_steps=0), [student], [Conv(1)])
    assert same_bits(before, weights_of(student))
    assert losses == [None]
    assert all(p.grad is None for p in student.parameters())


def test_a_global_model_that_is_its_only_teacher_has_nothing_to_learn():
    """Loss at the floor, for a client that holds every label: alpha = 1."""
    student, teacher = Conv(3), Conv(3)
    torch.manual_seed(0)
    G = input_generator((1, 8, 8), 4, 4, 2)
    (loss,) = fine_tune(G, [student], [teacher], torch.ones(1, 4), PRIOR, SMALL, 0.05, rng())
    assert loss == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(weights_of(student), weights_of(teacher), atol=1e-6, rtol=0)


def test_without_any_data_a_model_learns_all_classes_from_teachers_that_know_half_of_them_each():
    x, y = images(400, 5)
    teachers = []
    for known in ((0, 1), (2, 3)):
        mine = torch.isin(y, torch.tensor(known))
        teachers.append(mlp(1))
        fit(teachers[-1], x[mine], y[mine], Local(epochs=10, batch=16, lr=0.05), 0)
    student, test = mlp(3), images(400, 9)
    assert max(evaluate(m, *test).accuracy for m in (*teachers, student)) < 0.55
    torch.manual_seed(0)
    G = input_generator((1, 8, 8), 4, 4, 4)
    alpha = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    fine_tune(G, [student], teachers, alpha, PRIOR, FineTune(steps=20, batch=16, noise=4, features=4), 0.2, rng())
    assert evaluate(student, *test).accuracy > 0.9


def test_hard_samples_are_those_about_which_models_disagree():
    """Without the term the generator finds samples that the teacher is sure of; with it, disagreement as well."""

    def gap(hardness: float) -> float:
        teacher, student = mlp(1).requires_grad_(False), mlp(3)
        torch.manual_seed(0)
        G = input_generator((1, 8, 8), 4, 4, 2)
        cfg = FineTune(
            steps=40, batch=16, noise=4, features=2, hardness=hardness, fidelity=1 - hardness, student_steps=0
        )
        fine_tune(G, [student], [teacher], torch.ones(1, 4), PRIOR, cfg, 0.0, rng())
        x = G.eval()(*draw(PRIOR, 100, 4, rng(7)))
        return disagreement(teacher(x), student(x), torch.ones(100)).item()

    assert gap(1.0) > 1.2 * gap(0.0)


@pytest.mark.parametrize(
    ("kind", "settings", "word"),
    [
        (LatentGenerator, {"batch": 1}, "batch"),
        (LatentGenerator, {"noise": 0}, "noise"),
        (LatentGenerator, {"diversity": -1.0}, "diversity"),
        (FineTune, {"batch": 1}, "batch"),
        (FineTune, {"steps": -1}, "steps"),
        (FineTune, {"generator_lr": float("inf")}, "generator_lr"),
        (FineTune, {"hardness": -0.1}, "hardness"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, settings, word):
    with pytest.raises(ValueError, match=word):
        kind(**settings)


def test_the_least_that_makes_sense_is_accepted():
    latent = LatentGenerator(noise=1, hidden=1, steps=0, batch=2, lr=0.0, weight_decay=0.0, diversity=0.0)
    assert (latent.noise, latent.hidden, latent.batch) == (1, 1, 2)
    assert FineTune(steps=0, batch=2).batch == 2
