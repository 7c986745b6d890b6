"""pFedHN: a round by hand, momentum that lasts, architectures that share a trunk, and clients that it suits."""

import dataclasses
import statistics

import pytest
import torch
from torch import nn

from camps import accuracy, camps, numbers
from solera.core.errors import ConfigError
from solera.core.federation import QuorumNotMet
from solera.core.task import TASKS, Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.engines.faulty import Faulty
from solera.methods.fedavg import FedAvg
from solera.methods.pfedhn import Hypernet, PFedHN, generate, pull_back
from solera.methods.steps.training import Update, local_update
from solera.runs.loop import check_fit
from solera.testing import toy
from solera.train.fitting import Local, fit
from toys import Conv, World, images, mlp

LOCAL = Local(steps=4, batch=8, lr=0.05, momentum=0.9)
SMALL = Hypernet(layers=2, width=10, lr=0.1)


def mixed(tmp, **options) -> World:
    parties = [(P, Data(*images(12, n))) for n, P in enumerate("cmcmc")]
    return World(tmp, {"c": lambda: Conv(0, norm=False), "m": lambda: mlp(1)}, parties, **options)


def gradient_by_hand(world, state, seeds):
    """The mean over clients of the vector-Jacobian products, for phi and for the embeddings."""
    by_phi = {n: torch.zeros_like(t) for n, t in state.phi.items()}
    by_v = torch.zeros_like(state.v)
    for i, (k, seed) in enumerate(zip(world.fed.clients, seeds, strict=True)):
        P = world.fed.architecture(k)
        theta = generate(state.phi, state.v[i], P)
        model = world.server.model(P, theta)
        fit(model, world.data[k].inputs, world.data[k].labels, LOCAL, seed)
        after = weights_of(model)
        g, by_v[i] = pull_back(state.phi, state.v[i], P, {n: theta[n] - after[n] for n in theta})
        by_v[i] /= len(world.fed.clients)
        for n, t in g.items():
            by_phi[n] += t / len(world.fed.clients)
    return by_phi | {"v": by_v}


def test_two_rounds_are_two_steps_of_one_optimizer(tmp_path):
    """Momentum lasts from round to round: it is part of the state, or a resumed run would end elsewhere."""
    world = mixed(tmp_path)
    states = world.run(PFedHN(LOCAL, SMALL), 2)
    x = {n: t.clone().requires_grad_() for n, t in (states[0].phi | {"v": states[0].v}).items()}
    optimizer = torch.optim.SGD(x.values(), 0.1, momentum=0.9, weight_decay=1e-3)
    for t in (0, 1):
        gradient = gradient_by_hand(world, states[t], world.seeds[5 * t : 5 * t + 5])
        for n, p in x.items():
            p.grad = gradient[n]
        nn.utils.clip_grad_norm_(x.values(), 50.0)
        optimizer.step()
        for n, p in (states[t + 1].phi | {"v": states[t + 1].v}).items():
            assert torch.allclose(p, x[n], atol=1e-6), (t, n)
    assert any(bool(t.any()) for t in states[1].velocity.values())


def test_embeddings_have_a_quarter_of_the_clients_as_size(tmp_path):
    assert mixed(tmp_path / "5").run(PFedHN(LOCAL, SMALL), 0)[0].v.shape == (5, 2)  # floor(1 + 5/4)
    assert camps(tmp_path / "6").run(PFedHN(LOCAL, SMALL), 0)[0].v.shape == (6, 2)
    given = Hypernet(layers=1, width=4, embedding=7)
    assert camps(tmp_path / "7").run(PFedHN(LOCAL, given), 0)[0].v.shape == (6, 7)


def test_only_who_takes_part_moves_its_embedding_and_its_architectures_heads(tmp_path):
    world = mixed(tmp_path, fraction=0.2)  # one client a step, as in the paper
    quiet = Hypernet(layers=2, width=10, lr=0.1, weight_decay=0.0)
    start, end = world.run(PFedHN(LOCAL, quiet), 1)
    (k,) = world.fed.answered
    i, P = world.fed.clients.index(k), world.fed.architecture(k)
    assert [bool((a != b).any()) for a, b in zip(start.v, end.v, strict=True)] == [j == i for j in range(5)]
    for n, t in end.phi.items():
        moved = not torch.equal(t, start.phi[n])
        if n.startswith(f"head/{P}/"):
            assert moved
        elif n.startswith("head/"):
            assert not moved
    assert not torch.equal(end.phi["trunk/0/weight"], start.phi["trunk/0/weight"])


def test_wire(tmp_path):
    world = mixed(tmp_path)
    world.run(PFedHN(LOCAL, SMALL))
    d = sum(numbers(world.server.init(P))[0] for P in "cmcmc")
    assert world.fed.down["local_update"].floats == world.fed.up["local_update"].floats == d


def test_one_hypernetwork_makes_models_that_contradict_each_other(tmp_path):
    local = Local(steps=20, batch=10, lr=0.1)
    world = camps(tmp_path / "hn")
    method = PFedHN(local, Hypernet(width=50, lr=0.1))
    state = world.run(method, 25)[-1]
    theirs = statistics.fmean(accuracy(world, k, method.made(state, k, world.fed)) for k in world.fed.clients)
    one = camps(tmp_path / "avg").run(FedAvg(local), 6)[-1].weights["m"]
    assert theirs > 0.85
    assert statistics.fmean(accuracy(world, k, one) for k in world.fed.clients) < 0.7


def test_clients_are_judged_by_the_model_made_for_them(tmp_path):
    world = mixed(tmp_path, fraction=0.4)
    method = PFedHN(LOCAL, SMALL)
    state = world.run(method)[-1]
    asked = method.personal(state, world.fed)
    scores = world.fed.map(asked.task, list(world.fed.clients), **asked.payload)
    assert len(scores) == 5  # also those that never took part: they have an embedding
    model = world.server.model("c", method.made(state, "c4", world.fed))
    assert scores["c4"].correct == int((model(world.data["c4"].inputs).argmax(-1) == world.data["c4"].labels).sum())
    assert method.models(state) == {}


def test_a_client_whose_training_blows_up_leaves_no_trace(tmp_path):
    ends = []
    for name, plan in (("blown up", None), ("dropped", lambda call: "drop" if call.client == "c1" else None)):
        world = mixed(tmp_path / name)
        if plan:
            world.fed.engine = Faulty(world.fed.engine, plan)
        else:
            world.data["c1"] = Data(torch.full((12, 1, 8, 8), 1e7), torch.arange(12) % 4)
        ends.append(world.run(PFedHN(LOCAL, SMALL))[-1])
        assert [f["client"] for f in world.fed.failures] == ["c1"]
    assert digest(ends[0]) == digest(ends[1])


@pytest.mark.parametrize("huge", [3e38, -1e30])
def test_a_reply_too_large_to_be_a_gradient_costs_the_seat_not_the_hypernetwork(tmp_path, monkeypatch, huge):
    def lying(client, **inbox):
        honest = local_update.fn(client, **inbox)
        lie = {n: torch.full_like(t, huge) for n, t in honest.weights.items()}
        return Update(lie) if client.id in liars else honest

    monkeypatch.setitem(TASKS, local_update.name, dataclasses.replace(local_update, fn=lying))
    liars = {"c1"}
    lied = mixed(tmp_path / "lied")
    end = lied.run(PFedHN(LOCAL, SMALL))[-1]
    assert [e["client"] for e in lied.fed.failures] == ["c1"]
    liars = set()
    without = mixed(tmp_path / "without")
    without.fed.engine = Faulty(without.fed.engine, lambda call: "drop" if call.client == "c1" else None)
    assert digest(end) == digest(without.run(PFedHN(LOCAL, SMALL))[-1])
    liars = set(lied.fed.clients)
    with pytest.raises(QuorumNotMet, match=r"0 of . clients .*too large to use as a gradient"):
        mixed(tmp_path / "all").run(PFedHN(LOCAL, SMALL))


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.layer(x) * self.scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.again = self.layer

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)), "running statistics of BatchNorm"),
        (Buffered, "'scale', a buffer"),
        (Tied, "'again.weight', shared with another"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_any_work(model, said):
    with pytest.raises(ConfigError, match=said):
        check_fit(PFedHN(), toy(models={"odd": model}))
