"""Exchanging predictions: what a client says and learns, as numbers worked out by hand, and who is not believed."""

import math

import pytest
import torch

from public_toys import Known
from solera.core.errors import ConfigError, DataError
from solera.core.task import Client, Data
from solera.methods.fedgkt import FedGKT
from solera.methods.mnfl import MNFL
from solera.methods.simpfl import SimPFL, TopKPFL
from solera.methods.steps.predictions import (
    Drawn,
    Predictions,
    Probabilities,
    are_probabilities,
    distil_and_predict,
    distil_and_train,
    distil_locally,
    draw,
    label_problems,
    participants,
    public_problems,
    train_and_answer,
    train_and_assess,
    train_and_predict,
    train_and_score,
    usable,
)
from solera.train.fitting import Diverged, Local
from toys import Constant, World, replies_of

SET = Known(torch.zeros(6, 1, dtype=torch.float64))
DRAWN = Drawn(torch.tensor([4, 1], dtype=torch.int32), SET.digest)
STILL = Local(steps=0)


def softmax(z, T: float = 1.0) -> list[float]:
    return [math.exp(a / T) / sum(math.exp(b / T) for b in z) for a in z]


def labels(*y: int) -> Data:
    return Data(torch.zeros(len(y), 1, dtype=torch.float64), torch.tensor(y))


def client(*z: float, state: dict | None = None, train: Data | None = None) -> Client:
    own = labels(1) if train is None else train
    return Client("c0", "a", own, labels(0, 1), SET, len(z), 3, {} if state is None else state, Constant(*z))


def model(*z: float) -> dict[str, torch.Tensor]:
    return {"logits": torch.tensor(z, dtype=torch.float64)}


def test_predictions_are_the_softmax_at_the_temperature():
    c = client(0.0, 2.0)
    said = train_and_predict(c, local=STILL, only_new=False, drawn=DRAWN, classes=2, temperature=4.0)
    assert said.probs.dtype == torch.float32
    assert said.probs.tolist() == [pytest.approx(softmax((0.0, 2.0), 4.0), abs=1e-6)] * 2
    assert c.state["model"]["logits"].tolist() == [0.0, 2.0]
    assert c.state["drawn"]["indices"].tolist() == [4, 1]


def test_training_comes_first_and_with_only_new_not_for_those_who_have_a_model():
    """One step of 1 on label 1 from (0, 0): z = (-1/2, 1/2)."""
    step = Local(steps=1, lr=1.0)
    new, old = client(0.0, 0.0), client(0.0, 0.0, state={"model": model(0.0, 3.0)})
    for c, expected in ((new, (-0.5, 0.5)), (old, (0.0, 3.0))):
        train_and_predict(c, local=step, only_new=True, drawn=DRAWN, classes=2, temperature=1.0)
        assert c.state["model"]["logits"].tolist() == pytest.approx(expected, abs=1e-12)
    train_and_predict(old, local=step, only_new=False, drawn=DRAWN, classes=2, temperature=1.0)
    assert old.state["model"]["logits"][1].item() > 3.0


def test_answers_and_scores_for_a_mean():
    question = {"local": STILL, "indices": DRAWN.indices, "digest": DRAWN.digest, "classes": 2}
    assert train_and_answer(client(0.0, 2.0), **question).probs[0].tolist() == pytest.approx(softmax((0.0, 2.0)))
    assert train_and_score(client(0.0, 2.0), **question).logits.tolist() == [[0.0, 2.0]] * 2


def test_an_assessment_has_the_private_loss_and_the_own_test_split():
    c = client(0.0, math.log(3))
    said = train_and_assess(c, local=STILL, only_new=False, drawn=DRAWN, classes=2, temperature=1.0)
    assert said.loss == pytest.approx(math.log(4 / 3), abs=1e-6)  # 3/4 for its only sample, of label 1
    assert (said.test.correct, said.test.total) == (1, 2)


def test_distillation_goes_down_the_divergence_from_the_targets():
    """z <- z - lr (q - p) / T with q = softmax(z / T), on the samples asked about, which are then forgotten."""
    z, p, T, lr = [0.0, 1.0], (0.7, 0.3), 2.0, 3.0
    targets = torch.tensor([p, p])
    how = {"targets": targets, "distil": Local(steps=2, lr=lr), "temperature": T, "student_norm": "train"}
    for _ in range(2):
        z = [a - lr * (q - s) / T for a, q, s in zip(z, softmax(z, T), p, strict=True)]
    for task, more in ((distil_locally, {}), (distil_and_predict, {}), (distil_and_train, {"local": STILL})):
        c = client(0.0, 0.0, state={"model": model(0.0, 1.0), "drawn": {"indices": DRAWN.indices}})
        said = task(c, **how, **more)
        assert c.state["model"]["logits"].tolist() == pytest.approx(z, abs=1e-7)
        assert "drawn" not in c.state
        if task is distil_and_predict:
            assert said.probs[1].tolist() == pytest.approx(softmax(z, T), abs=1e-6)


def test_the_score_between_distilling_and_training_is_of_the_distilled_model():
    c = client(0.0, 0.0, train=labels(1), state={"model": model(1.0, 0.0), "drawn": {"indices": DRAWN.indices}})
    how = {"targets": torch.tensor([[0.9, 0.1]] * 2), "distil": STILL, "temperature": 1.0, "student_norm": "train"}
    said = distil_and_train(c, **how, local=Local(steps=50, lr=1.0))
    assert (said.correct, said.total) == (1, 2)  # says 0
    assert c.state["model"]["logits"].argmax().item() == 1  # and has learned 1 since


def test_other_public_data_is_refused_before_any_work():
    c = client(0.0, 0.0)
    with pytest.raises(DataError, match="c0 holds other public data"):
        train_and_predict(
            c, local=STILL, only_new=False, drawn=Drawn(DRAWN.indices, "0" * 64), classes=2, temperature=1.0
        )
    c.public = None
    with pytest.raises(DataError, match="c0 holds no public data"):
        train_and_predict(c, local=STILL, only_new=False, drawn=DRAWN, classes=2, temperature=1.0)
    assert c.state == {}


def test_predictions_that_are_not_finite_are_never_sent():
    with pytest.raises(Diverged, match="not finite"):
        train_and_predict(client(math.inf, 0.0), local=STILL, only_new=False, drawn=DRAWN, classes=2, temperature=1.0)


@pytest.mark.parametrize(
    ("rows", "fine"),
    [([[0.25, 0.75]], True), ([[0.2505, 0.75]], True), ([[0.26, 0.75]], False), ([[-0.1, 1.1]], False)],
)
def test_what_probabilities_are(rows, fine):
    assert are_probabilities(torch.tensor(rows)) == fine
    if not fine:
        with pytest.raises(ValueError, match="not probabilities"):
            Probabilities(torch.tensor(rows))


@pytest.fixture
def world(tmp_path) -> World:
    parties = [("a", labels(0)), ("a", labels(1)), ("a", labels())]
    world = World(tmp_path, {"a": lambda: Constant(0.0, 0.0)}, parties, classes=2)
    world.server.public = SET
    world.fed.begin(0)
    return world


def test_usable_predictions_are_stacked_and_others_rejected(world):
    fine = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    x = replies_of({"c0": Predictions(fine), "c1": Predictions(fine - 1), "c2": Predictions(2 * fine)})
    S, s = usable(x, world.fed)
    assert S == ["c0"]
    assert s.tolist() == [fine.tolist()]
    assert list(x) == ["c0"]
    assert all("not probabilities" in x.failures[k] for k in ("c1", "c2"))


def test_everybody_takes_part_where_nobody_is_drawn(world):
    assert participants(world.fed) == ["c0", "c1", "c2"]  # c2 has no example, and can learn


def test_a_rounds_samples_are_as_many_as_asked_for(world):
    world.server.per_round = 4
    assert len(draw(0, world.fed, world.server)) == 0
    assert len(draw(2, world.fed, world.server)) == 2
    assert len(draw(None, world.fed, world.server)) == 4


def test_public_data_on_which_nothing_can_be_exchanged_is_refused(world):
    assert list(public_problems("it", 6, world.server)) == []
    assert list(public_problems("it", 7, world.server)) == ["method.public_size = 7, but there are 6 public samples"]
    world.server.public = Known(SET.inputs, torch.tensor([0, 1, 2, 0, 1, 2]))
    (found,) = label_problems("it", world.server, "leave it")
    assert "labels go up to 2, but the models have 2 outputs" in found
    world.server.public.fresh = True
    (found,) = public_problems("it", None, world.server)
    assert "must see the same public samples" in found


@pytest.mark.parametrize("method", [MNFL, SimPFL, TopKPFL, FedGKT])
@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperatures_that_divide_nothing_are_refused(method, temperature):
    with pytest.raises(ConfigError, match="temperature"):
        method(temperature=temperature)
