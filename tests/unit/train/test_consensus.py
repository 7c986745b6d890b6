"""Fed-ET's consensus: the oracles FET-1 to FET-4, and what must hold for any teachers."""

import math

import pytest
import torch
import torch.nn.functional as F

from solera.core.tensors import weights_of
from solera.methods.fedet import ConsensusTeacher, diversity, ensemble_loss, normalised
from solera.train.consensus import confidence, confidence_weights, consensus
from solera.train.distill import Distill, distill
from solera.train.teachers import Cache, Ensemble
from toys import Constant, Conv, images, mlp, same_bits

FET_1 = ((0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.1, 0.2, 0.7))
FET_2 = ((0.5, 0.1, 0.4), (0.1, 0.5, 0.4))
FET_4 = ((0.98, 0.01, 0.01), (0.2, 0.5, 0.3), (0.25, 0.45, 0.3))
STUDENT = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()


def one_sample(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)[:, None]


def close(got: torch.Tensor, expected: list[float], atol: float = 5e-9) -> None:
    torch.testing.assert_close(got.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def some(teachers: int, samples: int = 40, classes: int = 5, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(teachers, samples, classes, generator=g, dtype=torch.float64)).softmax(-1)


# ---- oracles ---------------------------------------------------------------------------------------


def test_fet_1_consensus():
    p = one_sample(FET_1)
    close(confidence(p), [0.06888889, 0.04222222, 0.06888889])
    close(confidence_weights(p), [0.38271605, 0.2345679, 0.38271605])
    found = consensus(p)
    close(found.probs, [0.44691358, 0.22345679, 0.32962963])
    assert found.labels.tolist() == [0]
    close(found.dissent, [0.0382716, 0.07654321, 0.26790123])  # D = {2}: the third teacher alone
    close(found.dissent.sum(), [0.38271605])


def test_a_model_that_knows_nothing_has_a_confidence_of_exactly_0():
    for classes in (3, 10, 1000):  # with 10 and 1000 the plain variance is a rounding error
        assert confidence(torch.full((1, classes), 1 / classes)).item() == 0


def test_fet_1_loss_and_gradient():
    _, labels, dissent = consensus(one_sample(FET_1))
    z = STUDENT.clone().requires_grad_()
    assert F.cross_entropy(z, labels).item() == pytest.approx(0.6931471806, abs=5e-11)
    raw = diversity(z, dissent).item()
    assert raw == pytest.approx(-0.1245988301, abs=5e-11)
    A = dissent.sum().item()
    assert diversity(z, normalised(dissent)).item() == pytest.approx(0.6348972651, abs=5e-11)
    assert raw == pytest.approx(A * 0.6348972651 + A * math.log(A), abs=5e-11)
    loss = ensemble_loss(z, labels, dissent, 0.05)
    assert loss.item() == pytest.approx(0.6869172391, abs=5e-11)
    loss.backward()
    close(z.grad, [-0.49234568, 0.30191358, 0.1904321])


def test_fet_2_the_label_may_be_nobodys_first_choice():
    found = consensus(one_sample(FET_2))
    close(confidence_weights(one_sample(FET_2)), [0.5, 0.5])
    close(found.probs, [0.3, 0.3, 0.4])
    assert found.labels.tolist() == [2]
    close(found.dissent, [0.3, 0.3, 0.4])  # everybody dissents: A = 1
    assert math.isfinite(ensemble_loss(STUDENT, found.labels, found.dissent).item())


@pytest.mark.parametrize("classes", [2, 3, 7, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fet_3_teachers_that_know_nothing_count_the_same(classes, dtype):
    p = torch.zeros(3, 4, classes, dtype=dtype).softmax(-1)
    assert confidence(p).eq(0).all()
    assert confidence_weights(p).eq(torch.tensor(1 / 3, dtype=dtype)).all()
    assert consensus(p).labels.tolist() == [0] * 4
    assert consensus(p).dissent.eq(0).all()
    copies = torch.tensor([2, 1, 1])
    assert confidence_weights(p, copies)[:, 0].tolist() == [0.5, 0.25, 0.25]


def test_fet_4_a_confident_outlier_wins_against_two():
    p = one_sample(FET_4)
    close(confidence_weights(p), [0.90176347, 0.06708836, 0.03114817])
    found = consensus(p)
    assert found.labels.tolist() == [0]
    assert p.argmax(-1).flatten().mode().values == 1  # what the majority says
    close(found.probs, [0.90493291, 0.05657849, 0.03848859])
    close(found.dissent, [0.02120472, 0.04756086, 0.02947096])


# ---- properties ------------------------------------------------------------------------------------


def test_a_teacher_that_knows_nothing_has_no_weight_beside_one_that_does():
    p = torch.stack([torch.full((1, 3), 1 / 3, dtype=torch.float64), one_sample(FET_1)[0]])
    assert confidence_weights(p).flatten().tolist() == [0.0, 1.0]


def test_a_single_teacher_agrees_with_itself():
    p = some(1)
    found = consensus(p)
    assert torch.equal(found.probs, p[0])
    assert torch.equal(found.labels, p[0].argmax(-1))
    assert found.dissent.eq(0).all()


def test_sums_and_ranges():
    p = some(6)
    alpha, found = confidence_weights(p), consensus(p)
    torch.testing.assert_close(alpha.sum(0), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(40, dtype=torch.float64))
    dissents = p.argmax(-1) != found.labels
    torch.testing.assert_close(found.dissent.sum(-1), (alpha * dissents).sum(0))
    assert dissents.any()
    assert not dissents.all()
    assert (found.dissent <= found.probs + 1e-15).all()


def test_the_order_of_the_teachers_does_not_matter():
    p, order = some(6), torch.tensor([4, 0, 5, 2, 1, 3])
    a, b = consensus(p), consensus(p[order])
    assert torch.equal(a.labels, b.labels)
    torch.testing.assert_close(a.dissent, b.dissent, rtol=0, atol=1e-15)
    torch.testing.assert_close(a.probs, b.probs, rtol=0, atol=1e-15)


def test_population_and_sample_variance_give_the_same_weights():
    p = some(4)
    v = p.var(-1, correction=1)
    torch.testing.assert_close(confidence_weights(p), v / v.sum(0))


def test_copies_are_repeated_teachers():
    p, copies = some(3), torch.tensor([1, 3, 2])
    a, b = consensus(p, copies), consensus(p.repeat_interleave(copies, 0))
    assert torch.equal(a.labels, b.labels)
    torch.testing.assert_close(a.dissent, b.dissent, rtol=0, atol=1e-15)
    assert not torch.equal(a.labels, consensus(p).labels)


def test_without_dissent_the_loss_is_the_cross_entropy_whatever_lambda():
    logits = torch.tensor([[800.0, 0.0, -800.0], [0.1, 0.2, 0.3]], requires_grad=True)
    labels, nobody = torch.tensor([2, 1]), torch.zeros(2, 3)
    assert diversity(logits, nobody).eq(0).all()
    assert normalised(nobody).eq(0).all()
    with_term = ensemble_loss(logits, labels, nobody, 5.0)
    assert torch.equal(with_term, F.cross_entropy(logits, labels))
    assert torch.isfinite(with_term)
    with_term.backward()
    assert torch.isfinite(logits.grad).all()


def test_dissent_with_zero_probabilities_is_finite():
    found = consensus(one_sample([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)]))
    assert found.labels.tolist() == [0]
    close(found.dissent, [0.0, 1 / 3, 0.0])
    assert math.isfinite(ensemble_loss(STUDENT, found.labels, found.dissent, 0.5).item())


def test_lambda_zero_is_plain_cross_entropy_to_the_bit():
    p = some(5)
    z = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    found = consensus(p)
    plain, with_zero = z.clone().requires_grad_(), z.clone().requires_grad_()
    a, b = F.cross_entropy(plain, found.labels), ensemble_loss(with_zero, found.labels, found.dissent.float(), 0.0)
    a.backward()
    b.backward()
    assert torch.equal(a, b)
    assert torch.equal(plain.grad, with_zero.grad)


def test_the_gradient_is_the_dissenters_pull_weighted_by_their_confidence():
    found = consensus(some(5))
    z = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    diversity(z, found.dissent).sum().backward()
    A = found.dissent.sum(-1, keepdim=True)
    torch.testing.assert_close(z.grad, A * z.softmax(-1) - found.dissent)


# ---- as a teacher ----------------------------------------------------------------------------------


def test_the_teacher_works_on_softmax_outputs():
    models = [Constant(*torch.tensor(row).log().tolist()) for row in FET_1]
    labels, dissent = ConsensusTeacher(models)(torch.zeros(2, 1))
    assert labels.tolist() == [0, 0]
    torch.testing.assert_close(
        dissent[1], torch.tensor([0.0382716, 0.07654321, 0.26790123]).double(), rtol=0, atol=1e-7
    )
    labels, dissent = ConsensusTeacher(models, [1, 1, 9])(torch.zeros(1, 1))
    assert labels.tolist() == [2]


def test_cached_and_asked_per_batch_are_the_same_bits():
    x = images(150)[0]
    teacher = ConsensusTeacher([Conv(0), mlp(1), Conv(2, width=4)], [1, 2, 1])
    cache = Cache.of(teacher, x, torch.arange(150), batch=64)
    cfg = Distill(steps=12, batch=20, optimizer="sgd", lr=0.05, schedule="constant", clip=None)
    a, b = mlp(5), mlp(5)
    distill(a, x, cache, cfg, 3, loss=ensemble_loss)
    distill(b, x, teacher, cfg, 3, loss=ensemble_loss)
    assert same_bits(weights_of(a), weights_of(b))
    assert not same_bits(weights_of(a), weights_of(mlp(5)))


def test_the_teachers_stay_as_they_are():
    model = Conv(0)
    before = weights_of(model)
    ConsensusTeacher([model.train()])(images(40)[0])
    assert same_bits(before, weights_of(model))
    assert not model.training


def test_no_models_and_wrong_copies_are_refused():
    with pytest.raises(ValueError, match="at least one model"):
        ConsensusTeacher([])
    with pytest.raises(ValueError, match="copies"):
        ConsensusTeacher([mlp(0), mlp(1)], [1])
    with pytest.raises(ValueError, match="copies"):
        ConsensusTeacher([mlp(0)], [0])


# ---- as a rule of an ensemble ----------------------------------------------------------------------


def test_the_ensemble_rule_is_the_consensus():
    models, x = [Conv(0), mlp(1), Conv(2, width=4)], images(40)[0]
    p, h = Ensemble(models, "confidence", [1, 2, 1])(x)
    logits = torch.stack([m(x) for m in models]).double()
    expected = consensus(logits.softmax(-1), torch.tensor([1, 2, 1])).probs
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(h, -(p * p.log()).sum(-1))


def test_the_ensemble_rule_when_nobody_knows_anything():
    p, _ = Ensemble([Constant(0.0, 0.0, 0.0), Constant(5.0, 5.0, 5.0)], "confidence")(torch.zeros(1, 1))
    close(p, [1 / 3, 1 / 3, 1 / 3])
