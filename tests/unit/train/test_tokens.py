"""Training, teaching and judging models that answer at every token: the class axis is last, every token is a sample."""

import math

import pytest
import torch
from torch import nn

from solera.train.distill import Distill, distill, kd_loss
from solera.train.fitting import Local, cross_entropy, evaluate, fit
from solera.train.teachers import Ensemble


class Table(nn.Module):
    """A bigram model: the logits of the next token are a row of a table."""

    def __init__(self, rows):
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))

    def forward(self, tokens):
        return self.rows[tokens]


ROWS = [[0.0, 1.0, 2.0], [1.0, 0.0, -1.0], [0.5, 0.5, 0.5]]
X, Y = torch.tensor([[0, 1], [2, 0]]), torch.tensor([[2, 0], [1, 1]])


def log_prob(row, token):
    return row[token] - math.log(sum(math.exp(z) for z in row))


def test_the_loss_is_the_mean_over_tokens():
    pairs = [(0, 2), (1, 0), (2, 1), (0, 1)]
    by_hand = -sum(log_prob(ROWS[a], b) for a, b in pairs) / 4
    model = Table(ROWS)
    assert cross_entropy(model, X, Y).item() == pytest.approx(by_hand, abs=1e-6)
    score = evaluate(model, X, Y)
    assert score.loss == pytest.approx(by_hand, abs=1e-6)
    assert (score.correct, score.total) == (2, 4)  # 0 -> 2 and 1 -> 0; ties go to the lowest token


def test_a_step_of_sgd_by_hand():
    model = Table(ROWS)
    fit(model, X, Y, Local(steps=1, batch=2, lr=0.5), seed=0)
    expected = [list(row) for row in ROWS]
    for a, b in [(0, 2), (1, 0), (2, 1), (0, 1)]:
        for k in range(3):
            p = math.exp(log_prob(ROWS[a], k))
            expected[a][k] -= 0.5 / 4 * (p - (k == b))
    assert torch.allclose(model.rows.detach(), torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("rule", ["avg_logits", "avg_probs"])
def test_token_level_distillation_by_hand(rule):
    others = [[0.3, -0.2, 0.1], [2.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]
    probs, _ = Ensemble([Table(ROWS), Table(others)], rule)(X)
    assert probs.shape == (2, 2, 3)
    told = {}  # the teacher's distribution after each token
    for a in range(3):
        if rule == "avg_logits":
            mean = [(p + q) / 2 for p, q in zip(ROWS[a], others[a], strict=True)]
            told[a] = [math.exp(log_prob(mean, k)) for k in range(3)]
        else:
            each = [[math.exp(log_prob(row[a], k)) for k in range(3)] for row in (ROWS, others)]
            told[a] = [(p + q) / 2 for p, q in zip(*each, strict=True)]
    for n in range(2):
        for place in range(2):
            assert probs[n, place].tolist() == pytest.approx(told[int(X[n, place])], abs=1e-6)

    start = [[0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]
    student = Table(start)
    cfg = Distill(steps=1, batch=2, lr=0.5, optimizer="sgd", schedule="constant", clip=None)
    done = distill(student, X, Ensemble([Table(ROWS), Table(others)], rule), cfg, seed=0)
    expected, loss = [list(row) for row in start], 0.0
    for a in X.flatten().tolist():
        q = [math.exp(log_prob(start[a], k)) for k in range(3)]
        loss += sum(p * math.log(p / q[k]) for k, p in enumerate(told[a])) / 4
        for k in range(3):
            expected[a][k] -= 0.5 / 4 * (q[k] - told[a][k])
    assert done.loss == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(student.rows.detach(), torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("rule", ["confidence", "clipped_logits", "standardised_logits", "median_probs"])
def test_other_rules_treat_every_token_as_a_sample(rule):
    torch.manual_seed(0)
    models = [Table(torch.randn(3, 3).tolist()) for _ in range(3)]
    probs, entropy = Ensemble(models, rule)(X)
    flat, each = Ensemble(models, rule)(X.flatten())
    assert torch.equal(probs.flatten(0, 1), flat)
    assert torch.equal(entropy.flatten(), each)


def test_the_loss_of_logits_of_tokens():
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    each = [kd_loss(a[:, i], b[:, i]) for i in range(4)]
    assert kd_loss(a, b).item() == pytest.approx(sum(e.item() for e in each) / 4, abs=1e-6)


def test_a_long_text_is_scored_in_parts():
    torch.manual_seed(0)
    model, x = Table(torch.randn(3, 3).tolist()), torch.randint(0, 3, (150, 4))
    y = x.roll(1, 0)
    score = evaluate(model, x, y)
    by_hand = -sum(
        log_prob(model.rows[a].tolist(), b) for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)
    )
    assert score.loss == pytest.approx(by_hand / 600, abs=1e-5)
    assert score.total == 600
