"""Defences against single clients: long updates are cut, models that guess are left out."""

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.methods.feddf import FedDF
from solera.methods.steps.screen import Robust, Screen
from solera.methods.steps.training import Update, by_architecture
from solera.train.distill import Distill
from toys import Constant, Quadratic, World, quadratic_data, replies_of


def number(x: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([x], dtype=torch.float64)}


def test_an_update_is_cut_to_a_multiple_of_the_median_of_its_architecture(tmp_path):
    """From 1: updates of 1, 2 and 30, median 2. At 1.5 times the median only the last is cut, to 3."""
    parties = [(A, Data(*quadratic_data(1, 1))) for A in "qqqr"]
    world = World(tmp_path, {"q": Quadratic, "r": Quadratic}, parties, classes=2)
    x = replies_of({k: Update(number(u)) for k, u in zip(world.fed.clients, (2.0, -1.0, 31.0, 500.0), strict=True)})
    M = {"q": number(1.0), "r": number(0.0)}
    screened = Robust(update_clip=1.5).uploads(x, by_architecture(M, world.fed), world.fed, world.server)
    found = {k: u.weights["x"].item() for k, u in screened.items()}
    assert found == {"c0": 2.0, "c1": -1.0, "c2": pytest.approx(4.0), "c3": 500.0}
    assert [e["client"] for e in world.events("update_clipped")] == ["c2"]


def test_an_update_is_what_changed_since_the_model_that_was_sent(tmp_path):
    """From 0, 10 and 100: updates of 1, 2 and 30."""
    parties = [("q", Data(*quadratic_data(1, 1)))] * 3
    world = World(tmp_path, {"q": Quadratic}, parties, classes=2)
    x = replies_of({k: Update(number(u)) for k, u in zip(world.fed.clients, (1.0, 12.0, 130.0), strict=True)})
    sent = {"c0": number(0.0), "c1": number(10.0), "c2": number(100.0)}
    got = Robust(update_clip=1.5).uploads(x, sent.__getitem__, world.fed, world.server)
    assert {k: u.weights["x"].item() for k, u in got.items()} == {"c0": 1.0, "c1": 12.0, "c2": pytest.approx(103.0)}


def test_without_a_factor_uploads_stay(tmp_path):
    world = World(tmp_path, {"q": Quadratic}, [("q", Data(*quadratic_data(1, 1)))], classes=2)
    x = replies_of({"c0": Update(number(1e9))})
    for screen in (Screen(), Robust()):
        assert screen.uploads(x, {"c0": number(0.0)}.__getitem__, world.fed, world.server) is x
        assert x["c0"].weights == number(1e9)
    assert world.server.events == []


@pytest.fixture
def guessing(tmp_path) -> World:
    """Two clients say 0, one says 1; of ten validation samples eight are of class 0."""
    held_out = Data(torch.zeros(10, 1, dtype=torch.float64), torch.tensor([0] * 8 + [1] * 2))
    parties = [("a", Data(*quadratic_data(1, 1)))] * 3
    return World(tmp_path, {"a": lambda: Constant(0.0, 0.0)}, parties, classes=2, validation=held_out)


def models_of(world: World):
    said = {"c0": (1.0, 0.0), "c1": (0.0, 1.0), "c2": (2.0, 0.0)}
    models = {k: Constant(*z) for k, z in said.items()}
    return models, replies_of({k: Update(m.state_dict()) for k, m in models.items()})


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0.4, ["c0", "c1", "c2"]), (1.2, ["c0", "c2"])],  # accuracies 0.8, 0.2, 0.8; chance is 0.5
)
def test_models_that_guess_are_left_out(guessing, threshold, kept):
    models, x = models_of(guessing)
    screen = Robust(drop_worst=True, drop_threshold=threshold)
    assert list(screen.members(models, x, guessing.fed, guessing.server)) == kept
    assert list(x) == kept
    why = "drop_worst: an accuracy of 0.2000 on the validation samples"
    assert x.failures == ({} if "c1" in kept else {"c1": why})


def test_they_stay_unless_asked_for(guessing):
    models, x = models_of(guessing)
    for screen in (Screen(), Robust()):
        assert screen.members(models, x, guessing.fed, guessing.server) is models
    assert list(x) == ["c0", "c1", "c2"]


def test_settings_that_make_no_sense_are_refused(guessing):
    assert list(Robust(drop_worst=True, update_clip=1.0).fits(guessing.server)) == []
    (found,) = Robust(drop_threshold=2.1).fits(guessing.server)
    assert found == "drop_threshold = 2.1: 2 times chance is an accuracy of 1"
    for changed in ({"drop_threshold": -0.1}, {"update_clip": 0.0}, {"drop_outliers": True}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            Robust(**changed)


def test_guessing_is_measured_on_a_validation_set(guessing):
    guessing.server.validation = None
    (found,) = FedDF(fusion=Distill(steps=0), screen=Robust(drop_worst=True)).fits(guessing.server)
    assert found == "method.screen.drop_worst needs a validation set on the server: set data.validation"
