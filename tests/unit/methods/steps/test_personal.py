"""Fine-tuning and scoring of a client's own model: numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from solera.core.task import Client, Data
from solera.methods.steps.personal import (
    Tuning,
    common_model,
    fine_tune,
    score_own,
    score_own_or_received,
    score_received,
    score_tuned,
    train_alone,
    tuning_payload,
)
from solera.models import wrap
from solera.train.fitting import Local, Score
from toys import Constant, Quadratic, World, quadratic_data


def client(model: nn.Module, train: Data, test: Data | None = None, state: dict | None = None) -> Client:
    state = {} if state is None else state
    return Client("c0", "a", train, train if test is None else test, None, 2, 3, state, model)


def labels(*y: int) -> Data:
    return Data(torch.zeros(len(y), 1, dtype=torch.float64), torch.tensor(y))


def logits(*z: float) -> dict[str, torch.Tensor]:
    return {"logits": torch.tensor(z, dtype=torch.float64)}


def test_fine_tuning_is_local_training_that_stays_on_the_client():
    """Two steps of 0.1 on (x - 1)^2 from 0: 0.2, then 0.36."""
    c = client(Quadratic(), Data(*quadratic_data(2.0, 1.0)))
    sent = Quadratic(0.0).state_dict()
    assert fine_tune(c, weights=sent, tuning=Tuning(Local(steps=2, lr=0.1))) is None
    assert c.state["model"]["x"].item() == pytest.approx(0.36, abs=1e-12)
    assert sent["x"].item() == 0.0


@pytest.mark.parametrize("kd", [1.0, 2.0])
def test_kd_pulls_the_answers_back_to_those_received(kd):
    """z <- z - lr ((q - y) + kd (q - p)), p the answers of the received model, y the label."""
    c, lr = client(Constant(0.0, 0.0), labels(0)), 0.5
    fine_tune(c, weights=logits(0.0, 1.0), tuning=Tuning(Local(steps=3, lr=lr), kd=kd))
    z = [0.0, 1.0]
    softmax = lambda v: [math.exp(a) / sum(map(math.exp, v)) for a in v]  # noqa: E731
    p = softmax(z)
    for _ in range(3):
        q = softmax(z)
        z = [a - lr * ((b - y) + kd * (b - r)) for a, b, y, r in zip(z, q, (1.0, 0.0), p, strict=True)]
    assert c.state["model"]["logits"].tolist() == pytest.approx(z, abs=1e-9)


def test_a_frozen_base_stays_and_the_head_is_trained():
    torch.manual_seed(0)
    split = wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), classifier="1")
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    sent = {n: t.clone() for n, t in split.state_dict().items()}
    c = client(split, Data(x, y))
    fine_tune(c, weights=sent, tuning=Tuning(Local(steps=1, lr=0.1, batch=6), freeze_base=True))
    moved = {n for n, t in c.state["model"].items() if not torch.equal(t, sent[n])}
    assert moved == {n for n in sent if n.startswith("head.")}


def test_a_client_without_samples_keeps_what_it_received():
    c = client(Constant(0.0, 0.0), labels())
    fine_tune(c, weights=logits(1.0, 2.0), tuning=Tuning(Local(steps=3)))
    assert c.state["model"]["logits"].tolist() == [1.0, 2.0]


def test_scores_count_the_right_answers_and_the_mean_loss():
    c = client(Constant(0.0, 0.0), labels(0), test=labels(0, 1, 1), state={"model": logits(0.0, math.log(3))})
    found = score_own(c)  # 3/4 for label 1
    assert (found.correct, found.total) == (2, 3)
    assert found.loss == pytest.approx((math.log(4) + 2 * math.log(4 / 3)) / 3, abs=1e-6)


def test_who_has_no_model_is_not_counted_or_is_given_one():
    c = client(Constant(0.0, 0.0), labels(0), test=labels(1, 1))
    assert score_own(c) == Score(0, 0, 0.0)
    assert score_received(c, weights=None) == Score(0, 0, 0.0)
    assert score_received(c, weights=logits(0.0, 1.0)).correct == 2
    assert score_own_or_received(c, weights=logits(0.0, 1.0)).correct == 2
    c.state["model"] = logits(1.0, 0.0)
    assert score_own_or_received(c, weights=logits(0.0, 1.0)).correct == 0


def test_before_the_end_a_copy_is_tuned_and_dropped():
    how = {"weights": logits(0.0, 0.1), "tuning": Tuning(Local(steps=5, lr=1.0))}
    c = client(Constant(0.0, 0.0), labels(0), state={"model": logits(0.0, 5.0)})
    assert score_tuned(c, **how, tuned=False).correct == 1  # the received model, tuned to label 0
    assert c.state["model"]["logits"].tolist() == [0.0, 5.0]
    assert score_tuned(c, **how, tuned=True).correct == 0  # its own, which says 1


def test_training_alone_goes_on_from_the_clients_own_model():
    c = client(Quadratic(0.0), Data(*quadratic_data(2.0, 1.0)))
    train_alone(c, local=Local(steps=1, lr=0.1))
    assert c.state["model"]["x"].item() == pytest.approx(0.2, abs=1e-12)
    train_alone(c, local=Local(steps=1, lr=0.1))
    assert c.state["model"]["x"].item() == pytest.approx(0.36, abs=1e-12)


def test_payloads_have_the_model_of_each_clients_architecture(tmp_path):
    parties = [(A, labels(0)) for A in "ab"]
    world = World(tmp_path, {"a": lambda: Constant(1.0, 0.0), "b": lambda: Constant(2.0, 0.0)}, parties, classes=2)
    x, tuning = {A: world.server.init(A) for A in "ab"}, Tuning(Local())
    for payload in (common_model(x, world.fed), tuning_payload(x, tuning, world.fed)):
        assert [payload["weights"].of(k)["logits"][0].item() for k in ("c0", "c1")] == [1.0, 2.0]
    assert tuning_payload(x, tuning, world.fed)["tuning"] is tuning
