"""Which steps of a distillation count, on a student that goes down by lr at each: after step s its weight is -s."""

import math

import pytest
import torch

from solera.core.tensors import Views
from solera.train.distill import Distill, Memo, distill, visits
from toys import Constant, Conv, images, mlp


def ended(validate=None, n: int = 4, **settings) -> tuple[float, object]:
    """Where the student ends, and what was done: by steps of 1."""
    cfg = Distill(**{"batch": n, "optimizer": "sgd", "lr": 1.0, "schedule": "constant", "clip": None, **settings})
    student = Constant(0.0)
    done = distill(student, torch.zeros(n, 1), lambda x: (x,), cfg, 0, loss=lambda z, _: z.mean(), validate=validate)
    return -student.logits.item(), done


@pytest.mark.parametrize(
    ("every", "start", "steps", "averaged"),
    [
        (1, 0, 4, [1, 2, 3, 4]),
        (2, 0, 5, [2, 4]),
        (2, 3, 8, [5, 7]),  # counted from the start: not the start itself
        (4, 4, 8, [8]),
        (3, 4, 8, [7]),
        (3, 0, 3, [3]),
        (3, 0, 2, [2]),  # none: the last weights
        (2, 4, 5, [5]),
    ],
)
def test_swa_averages_every_so_many_steps_after_its_start(every, start, steps, averaged):
    found, _ = ended(steps=steps, swa_every=every, swa_start=start)
    assert found == pytest.approx(sum(averaged) / len(averaged))


def test_swa_takes_no_part_in_early_stopping():
    found, done = ended(lambda student: -student.logits.item(), steps=6, swa_every=2, every=1, patience=1)
    assert found == pytest.approx(4)
    assert done.steps == 6


@pytest.mark.parametrize(
    ("patience", "steps", "best"),
    [(1, 4, 3), (2, 5, 3), (3, 6, 3), (4, 9, 7), (None, 9, 7)],
)
def test_patience_counts_the_steps_after_the_best_look(patience, steps, best):
    """Best at step 3, then at step 7, in time for a patience of 4; equally good is not better."""
    accuracy = {1: 0.1, 2: 0.2, 3: 0.5, 4: 0.4, 5: 0.5, 6: 0.5, 7: 0.6}
    look = lambda student: accuracy.get(round(-student.logits.item()), 0.0)  # noqa: E731
    found, done = ended(look, steps=9, every=1, patience=patience)
    assert (found, done.steps, done.best_step) == (best, steps, best)


def test_the_last_step_is_looked_at_whatever_the_distance():
    found, done = ended(lambda student: -student.logits.item(), steps=5, every=3, patience=None)
    assert (found, done.best_step) == (5, 5)


def test_the_recorded_loss_is_the_mean_of_the_last_steps():
    _, done = ended(steps=5, every=2)
    assert done.loss == pytest.approx(-(3 + 4) / 2)  # before steps 4 and 5


@pytest.mark.parametrize("clip", [0.25, 5.0])
def test_the_gradient_is_clipped_to_its_norm(clip):
    found, _ = ended(steps=3, clip=clip)
    assert found == pytest.approx(3 * min(1.0, clip), rel=1e-4)


def test_every_step_draws_its_samples_anew_and_students_share_the_draws():
    x, seen = images(6)[0], []

    def drawn(rows, seed):
        seen.append((seed, tuple(rows.tolist())))
        return x[rows]

    public, asked = Views(6, lambda rows: x[rows], drawn), []
    cfg = Distill(steps=4, batch=4, optimizer="sgd", lr=0.0)

    def teacher(inputs):
        asked.append(len(inputs))
        p = torch.full((len(inputs), 4), 0.25)
        return p, -(p * p.log()).sum(-1)

    memo = Memo(teacher, torch.arange(6), cfg, 5)
    for seed in (1, 2):
        distill(mlp(seed), public, memo, cfg, 5)
    assert len({s for s, _ in seen[:4]}) == 4
    assert seen[:4] == seen[4:]
    assert [rows for _, rows in seen[:4]] == [tuple(row.tolist()) for row in visits(6, 4, 4, 5)]
    assert asked == [4] * 4  # once for both students
    distill(mlp(1), public, teacher, cfg, 6)
    assert seen[8:] != seen[:4]  # another seed, other rows


def test_statistics_of_averaged_weights_are_those_of_the_samples_distilled_on():
    """Of the round's samples, not of all public ones."""
    x, chosen = images(12)[0], torch.tensor([6, 7, 9, 10, 11])
    student = Conv(0)
    uniform = lambda inputs: (torch.full((len(inputs), 4), 0.25), torch.full((len(inputs),), math.log(4)))  # noqa: E731
    cfg = Distill(steps=2, batch=5, optimizer="sgd", lr=0.0, swa_every=1)
    distill(student, x, uniform, cfg, 0, indices=chosen)
    with torch.no_grad():
        seen = student[0](x[chosen])
    torch.testing.assert_close(student[1].running_mean, seen.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(student[1].running_var, seen.var((0, 2, 3)), rtol=1e-4, atol=1e-6)
