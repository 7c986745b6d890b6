"""Rounds in which clients and whole architectures are absent, worked out by hand over several rounds."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

import by_hand
import public_toys
from mnfl_by_hand import on_simplex
from public_toys import CLIENTS, SIZES
from solera.core.task import Data
from solera.methods.fedeed import Codistillation
from solera.methods.framework.global_trainers import Codistilling
from solera.methods.hierarchical import Hierarchical
from solera.methods.mnfl import MNFL, MNFLCode
from solera.methods.scaffold import Scaffold, ScaffoldUp
from solera.methods.steps.screen import Screen
from solera.train.distill import Distill
from solera.train.fitting import Local
from solera.train.similarity import Coefficients
from toys import Conv, Quadratic, World, images, mlp, quadratic_data

HALFWAY = Local(steps=1, lr=0.5)  # on (x - b)^2 / 2: from x to (x + b) / 2


def rounds(world: World, method, *cohorts: list[str]) -> list:
    """The states after each of these cohorts; a client may be named twice."""
    (state,) = world.run(method, 0)
    states = [state]
    for t, cohort in enumerate(cohorts):

        def sample(cohort: list[str] = cohort) -> list[str]:
            world.fed.copies = Counter(cohort)
            return sorted(world.fed.copies)

        world.fed.sample = sample
        world.fed.begin(t)
        world.server.begin()
        states.append(method.round(states[-1], world.fed, world.server))
    return states


# ---- hierarchical: groups and architectures that are absent ----------------------------------------


def quadratics(tmp, *clients: tuple[str, float, int]) -> World:
    """Clients (architecture, optimum, examples)."""
    parties = [(A, Data(*quadratic_data(1, b, n))) for A, b, n in clients]
    return World(tmp, {"q": Quadratic, "r": Quadratic}, parties, classes=2)


def x_of(weights: dict) -> dict[str, float]:
    return {A: w["x"].item() for A, w in weights.items()}


@pytest.mark.parametrize("average", ["weighted", "uniform"])
def test_what_goes_into_a_group_counts_above_until_it_is_fused(tmp_path, average):
    """Six rounds, fused every second; c0 is drawn twice, and an architecture or a whole group is absent."""
    world = quadratics(tmp_path, ("q", 4, 1), ("r", 2, 2), ("q", 8, 3), ("q", 0, 2), ("r", 6, 1))  # 0, 1, 2 and 3, 4
    none = Distill(steps=0)
    method = Hierarchical(HALFWAY, none, none, groups=2, grouping="blocks", every=2, screen=Screen(average))
    cohorts = (["c0", "c0", "c3"], ["c1", "c2", "c4"], ["c3"], ["c4"], ["c0"], ["c3"])
    states = rounds(world, method, *cohorts)
    n = {"c0": 2, "c1": 2, "c2": 3, "c3": 2, "c4": 1} if average == "weighted" else dict.fromkeys(CLIENTS, 1)
    n["c0"] = 2  # 1 example, twice

    assert x_of(states[1].weights[0]) == pytest.approx({"q": 2, "r": 0}, abs=1e-12)
    assert x_of(states[1].weights[1]) == pytest.approx({"q": 0, "r": 0}, abs=1e-12)
    assert states[1].votes == [{"q": n["c0"]}, {"q": n["c3"]}]
    # round 1: group 0's q goes from 2 to 5 and has votes of two rounds, group 1's stays at 0 with those of the first
    q = 5 * (n["c0"] + n["c2"]) / (n["c0"] + n["c2"] + n["c3"])
    r = (1 * n["c1"] + 3 * n["c4"]) / (n["c1"] + n["c4"])
    assert x_of(states[2].fused) == pytest.approx({"q": q, "r": r}, abs=1e-12)
    assert states[2].votes == [{}, {}]
    # rounds 2 and 3: group 0 has nobody, so the models of group 1 are everyone's
    assert states[3].votes == [{}, {"q": n["c3"]}]
    assert x_of(states[4].fused) == pytest.approx({"q": q / 2, "r": (r + 6) / 2}, abs=1e-12)
    # rounds 4 and 5: nobody has r, which stays
    first, second = (q / 2 + 4) / 2, q / 4
    q = (first * 1 + second * n["c3"]) / (1 + n["c3"])
    assert x_of(states[6].fused) == pytest.approx({"q": q, "r": (r + 6) / 2}, abs=1e-12)
    assert all(x_of(own) == x_of(states[6].fused) for own in states[6].weights)


def test_a_group_that_was_absent_is_not_heard_but_is_taught(tmp_path):
    """Three groups of one client that exchange logits; in the second round the third has nobody."""
    parties = [("m", Data(*images(n, n))) for n in (5, 8, 6)]
    world = World(tmp_path, {"m": lambda: mlp(1)}, parties, public=images(40, seed=9)[0])
    steps = Distill(steps=2, batch=40, optimizer="sgd", lr=0.5, schedule="constant")
    method = Hierarchical(Local(epochs=1), Distill(steps=0), steps, groups=3, grouping="blocks", exchange="logits")
    heard = []
    report = world.server.report_ensemble
    world.server.report_ensemble = lambda *a, **k: heard.append(k["names"]) or report(*a, **k)
    states = rounds(world, method, ["c0", "c1", "c2"], ["c0", "c1"])
    assert heard == [["m.0", "m.1", "m.2"], ["m.0", "m.1"]]
    x = images(40, seed=9)[0]
    student = world.server.model("m", states[1].weights[2]["m"])
    teachers = [world.server.model("m", w) for _, w in world.server.ensembles[-1].members]
    loss = by_hand.kl_towards(by_hand.mean_logits(teachers, x))
    by_hand.teach(student, x, loss, [list(range(40))] * 2, optimizer="sgd", lr=0.5, clip=5.0)
    assert by_hand.close(student.state_dict(), states[2].weights[2]["m"])


# ---- SCAFFOLD: N ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Scaffold, ScaffoldUp])
def test_n_is_the_clients_with_examples_of_one_architecture(tmp_path, kind):
    """The oracle SCA-1 beside an empty client and one of another architecture; and SCA-3, where one of two is there."""
    data = [Data(*quadratic_data(a, b, n)) for a, b, n in ((1, 1, 1), (2, -1, 1), (1, 1, 0), (1, 5, 1))]
    for case, cohort, expected in (
        ("all", ["c0", "c1", "c3"], (-0.085, 0.425)),
        ("one", ["c0", "c3"], (0.19, -0.475)),
        ("none of the other", ["c0", "c1"], (-0.085, 0.425)),
    ):
        world = World(
            tmp_path / case, {"q": Quadratic, "r": Quadratic}, list(zip("qqqr", data, strict=True)), classes=2
        )
        end = rounds(world, kind(Local(steps=2, lr=0.1)), cohort)[-1]
        assert (end.weights["q"]["x"].item(), end.control["q"]["x"].item()) == pytest.approx(expected, abs=1e-12)


# ---- MNFL: the gradient of eq. (7) with some absent ------------------------------------------------


def objective(c: torch.Tensor, s: list[torch.Tensor], here: list[int], c_loss: str, free: bool) -> torch.Tensor:
    """Objective (4) of the clients `here`, as torch can differentiate it: N = 5, lambda = 1, rho = 0.7.

    A receiver's mixture is of those present: their coefficients by their sum, or, where sums are free, by the share of
    the clients that are present.
    """
    total = torch.zeros((), dtype=torch.float64)
    D = sum(SIZES[n] for n in here)
    for i, n in enumerate(here):
        column = c[here, n]
        mix = column * 5 / len(here) if free else column / column.detach().sum()
        mixed = sum(mix[j] * s[j] for j in range(len(here)))
        if c_loss == "kl":
            loss = SIZES[n] / D * (mixed * (mixed.log() - s[i].log())).sum()
            rho = 0.7
        else:  # the authors' code: clients count the same, and the penalty is a mean over all of a column
            loss, rho = (mixed - s[i]).square().mean(-1).sum(), 0.7 / 5
        total = total + loss + rho * (column - 1 / 5).square().sum()
    return total


@pytest.mark.parametrize("order", ["paper", "code"])
@pytest.mark.parametrize("constraint", ["simplex", "none"])
@pytest.mark.parametrize("c_loss", ["kl", "mse"])
def test_coefficients_follow_the_gradient_where_some_are_absent(tmp_path, c_loss, constraint, order):
    here, N = [0, 2, 4], 5
    c = torch.from_numpy(np.random.default_rng(3).dirichlet(np.ones(N), N).T)
    world = public_toys.mixed(tmp_path)
    cfg = Coefficients(lr=0.02, rho=0.7, constraint=constraint)
    local = Local(epochs=3, batch=64, lr=0.1)  # all samples in one minibatch
    of_order = MNFLCode if order == "code" else MNFL
    method = of_order(local, Local(epochs=1, lr=0.1), temperature=2.0, c_loss=c_loss, coefficients=cfg)
    world.fed.config = dataclasses.replace(world.fed.config, fraction=0.6)
    world.fed.sample = lambda: [CLIENTS[i] for i in here]
    end = world.run(method, state=MNFL.State(c))[-1]

    s = []
    for i in here:
        data = world.data[CLIENTS[i]]
        A = world.fed.architecture(CLIENTS[i])
        model = world.server.model(A, world.server.init(A))
        epochs = 1 if order == "code" else 3  # there a client that is new trains for one epoch before it predicts
        by_hand.train(model, data.inputs, data.labels, epochs=epochs, batch=64, lr=0.1, seed=0)
        s.append((by_hand.mean_logits([model], world.server.public.inputs).double() / 2.0).softmax(-1))
    leaf = c.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(leaf, s, here, c_loss, constraint == "none"), leaf)
    expected = c - 0.02 * gradient
    if constraint == "simplex":  # which keeps the sum of a column's part
        for n in here:
            expected[here, n] = torch.from_numpy(on_simplex(expected[here, n].numpy(), float(c[here, n].sum())))
    assert torch.allclose(end.c, expected, rtol=0, atol=2e-5)
    assert (expected - c).abs().max() > 1e-3
    gone = [i for i in range(N) if i not in here]
    assert torch.equal(end.c[gone], c[gone])
    assert torch.equal(end.c[:, gone], c[:, gone])


# ---- codistillation: who teaches whom, with two architectures --------------------------------------


def test_a_model_s_teachers_are_all_others_of_both_architectures(tmp_path):
    """exclude_self leaves out one model: not its group in the other architecture, and not its own architecture."""
    builders: dict[str, Callable] = {"c": lambda: Conv(0, norm=False), "m": lambda: mlp(1)}
    parties = [(A, Data(*images(n, n))) for n, A in zip(range(5, 13), "cm" * 4, strict=True)]
    x = images(24, seed=9)[0]
    world = World(tmp_path, builders, parties, public=x)
    fusion = Distill(steps=2, batch=24, optimizer="sgd", lr=0.5, schedule="constant")
    others = Codistilling(warmup=0, exclude_self=True)
    end = world.run(Codistillation(Local(epochs=1, batch=8), fusion, K=2, global_trainer=others))[-1]
    groups = [("c", 0), ("c", 1), ("m", 0), ("m", 1)]
    members = {(m.architecture, m.group): m.weights for m in end.history[-1]}
    assert sorted(members) == groups
    for A, k in groups:
        teachers = [world.server.model(g[0], members[g]) for g in groups if g != (A, k)]
        student = world.server.model(A, members[A, k])
        loss = by_hand.kl_towards(by_hand.mean_logits(teachers, x))
        by_hand.teach(student, x, loss, [list(range(24))] * 2, optimizer="sgd", lr=0.5, clip=5.0)
        assert by_hand.close(student.state_dict(), end.models[A][k])
