"""Clients that are drawn twice where a twin would be something else, against numbers worked out here.

tests/contract/test_cohorts.py compares a client drawn twice with two clients, for every method where they are the same.
"""

import dataclasses
from collections import Counter

import pytest
import torch

from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.methods.fd import FD
from solera.methods.fedbe import FedDistill
from solera.methods.feddf import FedDF
from solera.methods.framework.ensemble_trainers import Bayesian
from solera.methods.pfedhn import Hypernet, PFedHN
from solera.methods.steps.teaching import Swag
from solera.methods.steps.training import local_update
from solera.train.distill import Distill
from solera.train.fitting import Local
from toys import Constant, Quadratic, World, images, kept_by, mlp, quadratic_data

STEPS = Distill(steps=1, batch=8)
STILL = Local(epochs=0)


def drawn(world: World, **copies: int) -> World:
    def sample() -> list[str]:
        world.fed.copies = Counter(copies)
        return sorted(copies)

    world.fed.sample = sample
    return world


def two(tmp) -> World:
    parties = [("m", Data(*images(n, n))) for n in (6, 9)]
    return drawn(World(tmp, {"m": lambda: mlp(0)}, parties, public=images(8, seed=9)[0]), c0=3, c1=1)


LOCAL = Local(epochs=1, batch=16, lr=0.1)


@pytest.mark.parametrize("place", ["feddf", "framework"])
def test_swag_s_mean_is_that_of_the_cohort(tmp_path, place):
    """c0 three times and c1 once: without any spread a sampled model is (3 w_0 + w_1) / 4."""
    world, sent = two(tmp_path), {}
    ask = world.fed.submit

    def heard(*args, **payload):
        wait = ask(*args, **payload)
        return lambda: sent.setdefault("replies", wait())

    world.fed.submit = heard
    if place == "feddf":
        method = FedDF(LOCAL, STEPS, teaching=Swag(samples=1, scale=0.0, include_clients=False))
    else:
        alone = {"include_clients": False, "include_average": False}
        method = FedDistill(LOCAL, STEPS, ensemble_trainer=Bayesian(posterior="swag", samples=1, scale=1e-16, **alone))
    world.run(method)
    (_, found), w = world.server.ensembles[-1].members[-1], {k: r.weights for k, r in sent["replies"].items()}
    for name, value in found.items():
        torch.testing.assert_close(value, (3 * w["c0"][name] + w["c1"][name]) / 4, rtol=0, atol=1e-6)


def test_clients_count_in_swag_s_reported_ensemble_as_often_as_they_teach(tmp_path):
    world = two(tmp_path)
    world.run(FedDF(LOCAL, STEPS, teaching=Swag(samples=2)))
    (reported,) = [e for e in world.server.ensembles if e.name == "swag"]
    assert reported.weights == [3, 1, 1, 1]  # c0, c1 and the two samples
    assert reported.build is not None  # they are judged as the clients' models answer, also with few bits


def test_the_hypernetwork_s_gradient_is_the_mean_over_the_cohort(tmp_path):
    """f_i = (x - b_i)^2 / 2, one step of 1/2: Delta_i = (theta_i - b_i) / 2; c0 counts three times, c1 once."""
    parties = [("q", Data(*quadratic_data(1, b))) for b in (4, -2)]
    world = drawn(World(tmp_path, {"q": Quadratic}, parties, classes=2), c0=3, c1=1)
    plain = Hypernet(embedding=1, layers=0, lr=1.0, momentum=0.0, weight_decay=0.0, clip=None)
    start, end = world.run(PFedHN(Local(steps=1, lr=0.5), plain))
    h, bias = start.phi["head/q/x/weight"].double(), start.phi["head/q/x/bias"]  # theta_i = h v_i + bias
    v = start.v.double()
    delta = [(h[0] * v[i] + bias - b) / 2 for i, b in enumerate((4, -2))]
    mean = (3 * delta[0] + delta[1]) / 4
    torch.testing.assert_close(end.phi["head/q/x/bias"], bias - mean, rtol=0, atol=1e-6)
    along = (3 * delta[0] * v[0] + delta[1] * v[1]) / 4
    torch.testing.assert_close(end.phi["head/q/x/weight"].double()[0], h[0] - along, rtol=0, atol=1e-6)
    for i, share in enumerate((0.75, 0.25)):
        torch.testing.assert_close(end.v[i].double(), v[i] - share * delta[i] * h[0], rtol=0, atol=1e-6)


def test_a_client_s_own_table_is_not_among_the_others_however_often_it_was_drawn(tmp_path):
    """FD: the mean over the other members of the cohort; c0 is there twice, c1 three times, c2 once."""
    logits = [(0.0, 1.0), (2.0, 0.0), (0.5, 0.5)]
    world = World(tmp_path, {"k": lambda: Constant(0, 0)}, [("k", Data(*quadratic_data(1, 1)))] * 3, classes=2)
    drawn(world, c0=2, c1=3, c2=1)
    method = FD(STILL, final_pass=True)
    state = world.run(method, 0)[-1]
    for k, own in zip(world.fed.clients, logits, strict=True):
        world.fed.ledger[k] = world.fed.engine.states.save(k, 0, {"model": weights_of(Constant(*own))})
    world.fed.begin(0)
    end = method.round(state, world.fed, world.server)
    p = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    of = {"c0": (3 * p[1] + p[2]) / 4, "c1": (2 * p[0] + p[2]) / 3, "c2": (2 * p[0] + 3 * p[1]) / 5}
    for k, row in of.items():
        torch.testing.assert_close(kept_by(world.fed, k)["teacher"]["rows"][0].double(), row, rtol=0, atol=1e-6)
    torch.testing.assert_close(end.table[0].double(), (2 * p[0] + 3 * p[1] + p[2]) / 6, rtol=0, atol=1e-6)


def test_a_mean_knows_of_how_many_draws_it_is(tmp_path):
    world = two(tmp_path)
    S = world.fed.sample()
    how = {"weights": world.server.init("m"), "local": LOCAL, "mu": 0.0}
    assert world.fed.mean(local_update, S, by=world.fed.architecture, **how).counts == {"m": 4}
    world.fed.dismiss()  # from here on everyone counts once
    assert world.fed.mean(local_update, S, by=world.fed.architecture, **how).counts == {"m": 2}


def test_the_next_round_s_clients_are_not_counted_by_this_one_s(tmp_path):
    """A round that draws anew, and one whose clients are named by the method, begin with nobody drawn."""
    world = two(tmp_path)
    world.fed.sample()
    assert world.fed.copies == {"c0": 3, "c1": 1}
    world.fed.begin(1)
    assert world.fed.copies == {}
    config = dataclasses.replace(world.fed.config, fraction=0.5)
    assert [config.cohort(n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]  # half of them, rounded up at a half
