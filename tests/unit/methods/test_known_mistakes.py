"""Mistakes that other implementations of these methods have made, one test for each: none of them here.

Some are tested beside the method they belong to, and not again here:

    FL-bench FedMD   public samples of all rounds pile up       test_fedmd: regression_public_data_does_not_grow
    FedML FedGKT     logits paired by the number of the batch   test_fedgkt: fedml_pairs_logits_by_batch_number_...
    HtFLlib FD       logits as soft labels, one's own included  test_fd: regression_...
    AIJack FedGEMS   KL swapped; unreliable clients counted     methods/test_fedgems_selection: ..._aijack
"""

import dataclasses

import pytest
import torch

from public_toys import mixed as exchange
from solera.core.federation import Replies
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.methods.fedavg import FedAvg
from solera.methods.feddf import FedDF
from solera.methods.fedet import FedET, diversity, ensemble_loss
from solera.methods.mnfl import MNFL, kl_loss
from solera.methods.steps.fusion import finite_models
from solera.methods.steps.screen import Robust
from solera.methods.steps.training import Update
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import small, toy_for
from solera.train.aggregate import weighted_mean
from solera.train.consensus import confidence_weights, consensus
from solera.train.distill import Distill
from solera.train.fitting import Local, fit, logits_of
from solera.train.norms import batchnorms
from solera.train.similarity import Coefficients, learn
from solera.train.teachers import drop_worst
from toys import Conv, World, images, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
SIZES = (6, 12, 9, 20)


def convs(tmp, **options) -> World:
    """Four clients of different sizes with BatchNorm, and 40 public samples."""
    parties = [("c", Data(*images(n, n))) for n in SIZES]
    return World(tmp, {"c": lambda: Conv(0)}, parties, **{"public": images(40, seed=9)[0], **options})


# ---- KT-pFL (MNFL) ----------------------------------------------------------------------------------


def test_fedted_ktpfl_the_coefficients_never_move(tmp_path):
    """Its mixture is made before the coefficients ask for a gradient: all that is left is 0 at 1/N."""
    world = exchange(tmp_path)
    start, end = world.run(MNFL(LOCAL, LOCAL, temperature=1.0))  # at the paper's rate, the default
    assert torch.equal(start.c, torch.full((5, 5), 0.2, dtype=torch.float64))
    assert (end.c - start.c).abs().max() > 1e-3


def test_official_ktpfl_a_softmax_that_is_stored_forgets_what_was_learned():
    """With softmax(5 c) kept as the new c, a lead shrinks by 5/N a round though no prediction speaks against it."""
    N = 20
    share, alike = torch.full((N,), 1 / N, dtype=torch.float64), torch.full((N, 3, 2), 0.5)
    c = torch.full((N, N), 0.9 / N, dtype=torch.float64) + 0.1 * torch.eye(N, dtype=torch.float64)
    kept = {}
    for constraint in ("simplex", "softmax5"):
        kept[constraint] = c
        for _ in range(3):
            cfg = Coefficients(lr=0.1, rho=0.0, constraint=constraint)
            kept[constraint] = learn(kept[constraint], kl_loss(alike, "sum").slope, share, N, cfg)
    assert torch.allclose(kept["simplex"], c, rtol=0, atol=1e-12)
    assert (kept["softmax5"] - 1 / N).abs().max() < 0.005  # an option here, for comparison only


# ---- Fed-ET -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("teachers", [1, 2, 7])
def test_takfl_fedet_variances_divided_by_their_mean(teachers):
    """Then the weights sum to the number of models, and what they say together is that many times too large."""
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64).expand(teachers, 2, 3)
    assert torch.allclose(confidence_weights(probs).sum(0), torch.ones(2, dtype=torch.float64))
    assert torch.allclose(consensus(probs).probs, probs[0])


def test_fedet_nan_where_no_model_dissents():
    """Dividing by the weight of those who dissent is 0/0 where nobody does; so are variances where nobody knows."""
    agree = torch.tensor([[[0.7, 0.2, 0.1]], [[0.6, 0.3, 0.1]]])
    for probs in (agree, torch.full((2, 1, 3), 1 / 3)):
        found = consensus(probs)
        logits = torch.tensor([[0.2, 0.1, -0.4]], requires_grad=True)
        loss = ensemble_loss(logits, found.labels, found.dissent)
        loss.backward()
        assert not found.dissent.any()
        assert bool(torch.isfinite(loss))
        assert bool(torch.isfinite(logits.grad).all())


def test_fedet_a_diversity_term_without_a_gradient():
    """A variance of detached teachers' logits is a number the student cannot change."""
    found = consensus(torch.tensor([[[0.7, 0.2, 0.1]], [[0.1, 0.3, 0.6]]]))
    assert found.dissent.any()
    logits = torch.zeros(1, 3, requires_grad=True)
    diversity(logits, found.dissent).sum().backward()
    assert logits.grad.abs().max() > 0.05


def test_fedet_weights_from_the_test_set(tmp_path):
    """Whatever the test set says of the clients' models, the run ends in the same bits."""
    method, runs = small(FedET()), []
    for lie in (False, True):
        scenario = toy_for(method)
        test = scenario.dataset.test
        told = Data(test.inputs, (test.labels + 1) % 3) if lie else test
        scenario.dataset = dataclasses.replace(scenario.dataset, test=told)
        runs.append(simulate(scenario, method, tmp_path / str(lie), RunConfig(rounds=2)))
    accuracies = [run.summary["models"]["large"]["accuracy"] for run in runs]
    assert accuracies[0] != accuracies[1]
    assert runs[0].digest == runs[1].digest


# ---- averages and FedDF -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedAvg(LOCAL), FedDF(LOCAL, Distill(steps=0))], ids=["pfllib", "official feddf"])
def test_batchnorm_statistics_of_one_client_for_all(tmp_path, method):
    """Averages of parameters only: the running statistics are the first client's, or the last one's."""
    world = convs(tmp_path)
    start, end = world.run(method)
    uploads = []
    for k, seed in zip(world.fed.clients, world.seeds, strict=True):
        model = world.server.model("c", start.weights["c"])
        fit(model, world.data[k].inputs, world.data[k].labels, LOCAL, seed)
        uploads.append(weights_of(model))
    mean = weighted_mean(uploads, SIZES)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(end.weights["c"][name], mean[name])
        assert not any(torch.allclose(mean[name], upload[name], rtol=1e-3) for upload in uploads)


def test_official_feddf_teachers_are_left_in_training_mode_by_their_validation(tmp_path):
    """Then an answer depends on the rest of the batch, and the statistics drift with every question."""
    world = convs(tmp_path, validation=Data(*images(50, seed=4)))
    screen = Robust(drop_worst=True, drop_threshold=0.0)
    sent = world.server.init("c")
    x, d = Replies((k, Update(sent)) for k in world.fed.clients), torch.arange(40)
    teachers = finite_models(x, world.server.public[d[:8]], world.fed, world.server)
    teachers = screen.members(teachers, x, world.fed, world.server)
    assert list(teachers) == list(world.fed.clients)
    for model in teachers.values():
        assert not any(layer.training for layer in [model, *batchnorms(model)])
        assert same_bits(weights_of(model), sent)
        together = model(world.server.public[d])
        assert torch.allclose(model(world.server.public[d[:2]]), together[:2], rtol=0, atol=1e-6)
        assert torch.equal(logits_of(model, world.server.public[d[:2]]), logits_of(model, world.server.public[d])[:2])


def test_official_feddf_fewer_steps_than_the_first_look_at_the_validation_set(tmp_path):
    """There the best student so far is then none, and the round crashes."""
    world = convs(tmp_path, validation=Data(*images(50, seed=4)))
    start, end = world.run(FedDF(LOCAL, Distill(steps=3, batch=8, every=100)))
    assert [(e["steps"], e["best_step"]) for e in world.events("distilled")] == [(3, 3)]
    assert not same_bits(start.weights["c"], end.weights["c"])


@pytest.mark.parametrize("classes", [2, 3, 10, 200, 1000])
def test_official_feddf_a_threshold_for_known_data_sets_only(classes):
    """A percentage is compared with a share (nobody is ever dropped), other numbers of classes and a round in which
    all guess are errors."""
    chance = 1 / classes
    assert drop_worst([chance, 1.19 * chance, 1.21 * chance], classes) == [2]
    assert drop_worst([0.5 * chance, chance, 0.9 * chance], classes) == [1]
