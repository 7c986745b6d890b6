"""FedDF's options in the authors' code and beside it: buffers of the last client, earlier students and accurate clients
as teachers, averages and teachers that tolerate Byzantine clients. Local training, models and distances are worked out
here.
"""

import math

import pytest
import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.methods.feddf import FedDF
from solera.methods.pfeddf import PFedDF
from solera.methods.steps.screen import Robust, Screen
from solera.methods.steps.teaching import ByAccuracy, Memory
from solera.runs.loop import check_server
from solera.train.distill import Distill, distill
from solera.train.fitting import Local, evaluate, fit, rate_at
from solera.train.norms import parameter_names
from solera.train.teachers import Ensemble
from toys import Conv, Quadratic, World, images, mlp, quadratic_data, same_bits

LOCAL = Local(epochs=1, batch=8, lr=0.05)
FUSION = Distill(steps=6, batch=16)


def world(tmp, n: int = 5, architecture: str = "c", **options) -> World:
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    parties = [(architecture, Data(*images(8 + 2 * i, i))) for i in range(n)]
    given = {"public": images(40, seed=9)[0], "validation": Data(*images(30, seed=5)), **options}
    return World(tmp, {architecture: builders[architecture]}, parties, **given)


def uploads(w: World, A: str, start: dict) -> list[dict]:
    """What the clients of the last round sent, by hand."""
    sent = []
    for k, seed in zip(w.fed.clients, w.seeds[-len(w.fed.clients) :], strict=True):
        model = w.server.model(A, start)
        fit(model, w.data[k].inputs, w.data[k].labels, LOCAL, seed)
        sent.append(weights_of(model))
    return sent


def flat(w: dict, names: list[str]) -> torch.Tensor:
    return torch.cat([w[n].double().flatten() for n in names])


# ---- the average --------------------------------------------------------------------------------------


def test_buffers_of_the_last_client(tmp_path):
    """As the authors' code: parameters are averaged, running statistics and counters are those of the last client."""
    w = world(tmp_path, public=None)
    start, end = w.run(FedDF(LOCAL, Distill(steps=0), screen=Screen("uniform", buffers="last")))
    sent = uploads(w, "c", start.weights["c"])
    names = set(parameter_names(w.server.template("c")))
    for name, got in end.weights["c"].items():
        if name in names:
            mean = torch.stack([s[name].double() for s in sent]).mean(0)
            assert torch.allclose(got.double(), mean, atol=1e-6)
        else:
            assert torch.equal(got, sent[-1][name])
    assert any(not torch.equal(sent[0][n], sent[-1][n]) for n in end.weights["c"] if n not in names)


@pytest.mark.parametrize("how", ["krum", "multi_krum", "bulyan", "trimmed_mean"])
def test_line_11_tolerates_byzantine_clients(tmp_path, how):
    w = world(tmp_path, n=7, public=None)
    start, end = w.run(FedDF(LOCAL, Distill(steps=0), screen=Robust(how)))
    sent = uploads(w, "c", start.weights["c"])
    names = parameter_names(w.server.template("c"))
    x = torch.stack([flat(s, names) for s in sent])
    d = torch.cdist(x, x).square()
    scores = torch.stack([row.sort().values[1:5].sum() for row in d])  # n - f - 2 = 4 neighbours
    got = flat(end.weights["c"], names)
    if how == "krum":
        assert torch.allclose(got, x[scores.argmin()], atol=1e-6)
    elif how == "multi_krum":
        assert torch.allclose(got, x[scores.argsort()[:4]].mean(0), atol=1e-6)
    elif how == "trimmed_mean":
        assert torch.allclose(got, x.sort(0).values[1:-1].mean(0), atol=1e-6)
    else:  # of five picked the three nearest to the median; some five of seven must give it
        near = [x[list(set(range(7)) - {i, j})] for i in range(7) for j in range(i)]
        means = [five.gather(0, (five - five.median(0).values).abs().argsort(0)[:3]).mean(0) for five in near]
        assert any(torch.allclose(got, m, atol=1e-6) for m in means)
    assert not w.events("fewer_liars")


def test_fewer_clients_tolerate_fewer_byzantine_ones_and_the_round_says_so(tmp_path):
    w = world(tmp_path, n=4, public=None)
    w.run(FedDF(LOCAL, Distill(steps=0), screen=Robust("krum", max_byzantine=2)))
    (event,) = w.events("fewer_liars")
    assert {k: event[k] for k in ("rule", "clients", "asked", "borne")} == {
        "rule": "krum",
        "clients": 4,
        "asked": 2,
        "borne": 0,
    }


# ---- the teachers ---------------------------------------------------------------------------------------


def asked_teachers(monkeypatch) -> list[tuple[list[nn.Module], list[float]]]:
    seen: list[tuple[list[nn.Module], list[float]]] = []
    plain = FedDF.teacher
    monkeypatch.setattr(
        FedDF, "teacher", lambda self, models, copies: (seen.append((models, copies)), plain(self, models, copies))[1]
    )
    return seen


def test_krum_chooses_the_teachers_and_the_average_keeps_all(tmp_path, monkeypatch):
    w = world(tmp_path, n=7)
    seen = asked_teachers(monkeypatch)
    start, _ = w.run(FedDF(LOCAL, FUSION, screen=Robust("uniform", teachers_by="multi_krum")))
    sent = uploads(w, "c", start.weights["c"])
    names = parameter_names(w.server.template("c"))
    x = torch.stack([flat(s, names) for s in sent])
    scores = torch.stack([row.sort().values[1:5].sum() for row in torch.cdist(x, x).square()])
    best = sorted(scores.argsort()[:4].tolist())
    ((models, copies),) = seen
    assert copies == [1.0] * 4
    assert all(same_bits(dict(m.state_dict()), sent[i]) for m, i in zip(models, best, strict=True))
    assert [e["client"] for e in w.events("teacher_left_out")] == [f"c{i}" for i in range(7) if i not in best]
    averaged = world(tmp_path / "b", n=7).run(FedDF(LOCAL, Distill(steps=0), screen=Screen("uniform")))[-1]
    (average,) = w.server.averages.values()
    assert same_bits(average, averaged.weights["c"])


def test_teachers_count_by_their_accuracy(tmp_path, monkeypatch):
    """The targets are softmax of the mean logits, weighted by validation accuracies."""
    w = world(tmp_path, architecture="m")
    seen = asked_teachers(monkeypatch)
    method = FedDF(LOCAL, Distill(steps=6, batch=16, every=100, patience=None), teaching=ByAccuracy())
    start, _ = w.run(method)
    sent = uploads(w, "m", start.weights["m"])
    held = w.server.validation
    wanted = [evaluate(w.server.model("m", s), held.inputs, held.labels).accuracy for s in sent]
    ((models, votes),) = seen
    assert votes == pytest.approx(wanted)
    assert len(set(votes)) > 1
    x = images(40, seed=9)[0]
    logits = sum(a * w.server.model("m", s)(x).double() for a, s in zip(wanted, sent, strict=True)) / sum(wanted)
    assert torch.allclose(Ensemble(models, "avg_logits", votes)(x)[0].double(), logits.softmax(-1), atol=1e-6)


def test_accuracies_need_a_validation_set(tmp_path):
    with pytest.raises(ConfigError, match=r'^method\.teaching\.kind = "accuracy" needs a validation set'):
        world(tmp_path, validation=None).run(FedDF(LOCAL, FUSION, teaching=ByAccuracy()))


def test_students_of_earlier_rounds_teach(tmp_path, monkeypatch):
    """With two rounds of memory: no student in the first round, one student in the second, two from the third on."""
    w = world(tmp_path)
    seen = asked_teachers(monkeypatch)
    states = w.run(FedDF(LOCAL, FUSION, teaching=Memory(rounds=2)), 4)
    taught = [[m.weights for m in models[5:]] for models, _ in seen]
    assert [len(t) for t in taught] == [0, 1, 2, 2]
    for t, models in enumerate(taught):
        for age, got in enumerate(models):
            assert same_bits(got, states[t - age].weights["c"])
    assert all(copies == [1.0] * len(models) for models, copies in seen)
    assert sorted(states[-1].weights) == ["c", "c@1"]
    assert sorted(FedDF().models(states[-1])) == ["c"]
    assert same_bits(states[-1].weights["c@1"], states[-2].weights["c"])
    one = world(tmp_path / "one").run(FedDF(LOCAL, FUSION, teaching=Memory(rounds=1)), 2)
    assert sorted(one[-1].weights) == ["c"]  # what a round starts with teaches without being kept
    none = world(tmp_path / "none").run(FedDF(LOCAL, FUSION), 2)
    assert same_bits(none[1].weights["c"], one[1].weights["c"])
    assert not same_bits(none[2].weights["c"], one[2].weights["c"])


def test_memory_needs_distillation(tmp_path):
    with pytest.raises(ConfigError, match=r"^method\.fusion\.steps = 0: method\.teaching concerns distillation"):
        check_server(FedDF(fusion=Distill(steps=0), teaching=Memory(rounds=1)), world(tmp_path).server)


def test_pfeddf_has_the_same_options(tmp_path):
    """Its common models are FedDF's with the same options, to the bit."""
    options = {"teaching": Memory(rounds=2), "screen": Robust("krum", teachers_by="bulyan", buffers="last")}
    ends = [
        world(tmp_path / method.__name__, n=7).run(method(LOCAL, FUSION, **options), 3)[-1].weights
        for method in (FedDF, PFedDF)
    ]
    assert list(ends[0]) == list(ends[1]) == ["c", "c@1"]
    assert all(same_bits(ends[0][name], ends[1][name]) for name in ends[0])


# ---- learning rates within a local training ------------------------------------------------------------


def test_rates_by_hand():
    cfg = Local(lr=0.8, schedule="cosine")
    assert [round(rate_at(cfg, t, 4), 6) for t in range(4)] == [0.8, 0.682843, 0.4, 0.117157]
    steps = Local(lr=1.0, schedule="multistep")
    assert [rate_at(steps, t, 8) for t in range(8)] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert {rate_at(Local(lr=0.3), t, 5) for t in range(5)} == {0.3}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "multistep"])
def test_steps_follow_the_schedule(schedule):
    """On a/2 (x - b)^2 a step is x <- x - lr a (x - b): the distance from b shrinks by 1 - lr a."""
    model = Quadratic(5.0)
    inputs, labels = quadratic_data(1.0, 1.0, 2)
    done = fit(model, inputs, labels, Local(epochs=4, batch=1, lr=0.2, schedule=schedule), 0)
    factors = {
        "constant": [0.2] * 8,
        "cosine": [0.1 * (1 + math.cos(math.pi * t / 8)) for t in range(8)],
        "multistep": [0.2] * 4 + [0.02] * 2 + [0.002] * 2,
    }[schedule]
    assert model.x.item() == pytest.approx(1 + 4 * math.prod(1 - f for f in factors), abs=1e-12)
    assert done.lr_sum == pytest.approx(sum(factors))


def test_by_default_every_option_is_off(tmp_path):
    """A distillation by hand equals FedDF's with all options at their defaults."""
    w = world(tmp_path, validation=None)
    start, end = w.run(FedDF(LOCAL, FUSION, screen=Screen("uniform")))
    sent = uploads(w, "c", start.weights["c"])
    from solera.train.aggregate import uniform_mean

    student = w.server.model("c", uniform_mean(sent))
    teachers = Ensemble([w.server.model("c", s) for s in sent])
    distill(student, images(40, seed=9)[0], teachers, FUSION, w.fed.seed("fusion"))
    assert same_bits(weights_of(student), end.weights["c"])
