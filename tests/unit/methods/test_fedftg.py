"""FedFTG: FedAvg without its fine-tuning, counts that travel once, frozen teachers, and what it refuses."""

import dataclasses

import pytest
import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig, QuorumNotMet
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.methods import fedftg
from solera.methods.fedavg import FedAvg
from solera.methods.fedftg import FedFTG, FineTune
from solera.runs.loop import check_server
from solera.testing import run_toy
from solera.train.fitting import Local, evaluate
from toys import Conv, Data, World, images, mlp, same_bits

LOCAL = Local(epochs=2, batch=16, lr=0.05)
QUICK = FineTune(steps=2, batch=8, noise=4, features=2)


def world(tmp, parties, shape=(1, 8, 8), **options) -> World:
    return World(tmp, {"c": lambda: Conv(0), "m": lambda: mlp(1)}, parties, shape=shape, **options)


def of_labels(labels: list[int], n: int = 60, seed: int = 0) -> Data:
    x, y = images(n, seed)
    mine = torch.isin(y, torch.tensor(labels))
    return Data(x[mine], y[mine])


HALVES = [("m", of_labels([0, 1])), ("m", of_labels([2, 3]))]
MIXED = [("m", of_labels([0, 1])), ("c", of_labels([2, 3])), ("c", of_labels([1, 2]))]


# ---- special cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "off", [{"steps": 0}, {"student_steps": 0}, {"student_lr": 0.0}], ids=["no turns", "no steps", "no step size"]
)
def test_without_fine_tuning_it_is_fedavg_bit_for_bit(off, tmp_path):
    """A mix with BatchNorm and dropout; with a step size of 0 also the statistics stay those of the average."""
    plain = run_toy(FedAvg(LOCAL), tmp_path / "fedavg")
    method = FedFTG(LOCAL, tune=dataclasses.replace(QUICK, **off))
    without = run_toy(method, tmp_path / "fedftg")
    assert digest(without.state.weights) == digest(plain.state.weights)


def test_without_fine_tuning_the_wire_is_fedavgs_too(tmp_path):
    place = world(tmp_path, MIXED)
    state = place.run(FedFTG(LOCAL, tune=FineTune(steps=0)))[-1]
    d = sum(t.numel() for P, _ in MIXED for t in state.weights[P].values() if t.is_floating_point())
    (down,), (up,) = place.fed.down.values(), place.fed.up.values()
    assert (down.floats, up.floats) == (d, d)
    assert up.integers == 2  # the counters of the two models with BatchNorm
    assert (state.generator, state.counts) == ({}, {})


def test_fine_tuning_changes_every_architecture_that_took_part(tmp_path):
    tuned = world(tmp_path / "a", MIXED).run(FedFTG(LOCAL, tune=QUICK))[-1]
    plain = world(tmp_path / "b", MIXED).run(FedAvg(LOCAL))[-1]
    for P in ("m", "c"):
        assert not same_bits(tuned.weights[P], plain.weights[P])
    assert torch.equal(tuned.weights["c"]["1.running_var"], plain.weights["c"]["1.running_var"])  # frozen


def test_an_architecture_without_a_client_stays(tmp_path):
    place = world(tmp_path, MIXED)
    place.fed.sample = lambda: ["c0"]
    start, end = place.run(FedFTG(LOCAL, tune=QUICK))
    assert same_bits(start.weights["c"], end.weights["c"])
    assert not same_bits(start.weights["m"], end.weights["m"])
    assert [e["architecture"] for e in place.events("distilled")] == ["m"]


def test_the_step_size_of_the_global_model_decays(tmp_path, monkeypatch):
    used = []
    whole = fedftg.fine_tune

    def spy(*args):
        used.append(args[6])
        return whole(*args)

    monkeypatch.setattr(fedftg, "fine_tune", spy)
    world(tmp_path, HALVES).run(FedFTG(LOCAL, tune=dataclasses.replace(QUICK, student_lr=0.1)), rounds=3)
    assert used == pytest.approx([0.1, 0.1 * 0.998, 0.1 * 0.998**2], rel=1e-12)


# ---- label counts -----------------------------------------------------------------------------------


def test_counts_travel_once(tmp_path):
    """Up d floats each round, and C counts when a client takes part for the first time."""
    place = world(tmp_path, HALVES)
    method = FedFTG(LOCAL, tune=QUICK)
    d = sum(p.numel() for p in mlp(0).parameters())
    state, integers = method.init(place.fed, place.server), []
    for t, cohort in enumerate((["c0"], ["c0", "c1"], ["c0", "c1"])):
        place.fed.begin(t)
        place.fed.sample = lambda cohort=cohort: cohort
        state = method.round(state, place.fed, place.server)
        (down,), (up,) = place.fed.down.values(), place.fed.up.values()
        assert (down.floats, up.floats) == (len(cohort) * d, len(cohort) * d)
        integers.append(up.integers)
    assert integers == [4, 4, 0]
    assert {k: c.tolist() for k, c in state.counts.items()} == {
        f"c{i}": torch.bincount(data.labels, minlength=4).tolist() for i, (_, data) in enumerate(HALVES)
    }


def test_counts_that_do_not_sum_to_the_registered_examples_lose_the_seat(tmp_path):
    """Neither a teacher nor averaged."""
    place = world(tmp_path / "a", HALVES)
    place.data["c1"] = of_labels([2, 3], 90)
    alone = world(tmp_path / "b", HALVES)
    alone.fed.sample = lambda: ["c0"]
    method = FedFTG(LOCAL, tune=QUICK)
    assert digest(place.run(method)[-1]) == digest(alone.run(method)[-1])
    assert [e["client"] for e in place.fed.failures] == ["c1"]


def test_whoever_is_rejected_counts_against_the_quorum(tmp_path):
    place = world(tmp_path, HALVES)
    place.data["c1"] = of_labels([2, 3], 90)
    place.fed.config = FederationConfig(min_replies=2)
    with pytest.raises(QuorumNotMet, match=r"1 of 2 clients .*min_replies is 2; first reason: label counts"):
        place.run(FedFTG(LOCAL, tune=QUICK))


def test_no_usable_upload_leaves_everything(tmp_path):
    place = world(tmp_path, HALVES[:1])
    place.data["c0"] = of_labels([0, 1], 90)
    with pytest.raises(QuorumNotMet, match=r"0 of 1 clients .*label counts that are not those"):
        place.run(FedFTG(LOCAL, tune=QUICK))


def test_only_labels_that_somebody_of_the_round_holds_are_generated(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(fedftg, "fine_tune", lambda *args: (seen.append(args[3:5]), [None])[1])
    place = world(tmp_path, [("m", of_labels([0, 1])), ("m", of_labels([1, 3]))])
    place.run(FedFTG(LOCAL, tune=QUICK))
    alpha, prior = seen[0]
    assert [p > 0 for p in prior.tolist()] == [True, True, False, True]
    assert alpha.sum(0).tolist() == pytest.approx([1, 1, 0, 1])
    assert alpha[:, 0].tolist() == [1, 0]


# ---- teachers, and what goes wrong ------------------------------------------------------------------


def test_teachers_never_change(tmp_path, monkeypatch):
    whole = fedftg.fine_tune

    def watched(G, students, teachers, *rest):
        before = [weights_of(t) for t in teachers]
        assert not any(t.training for t in teachers)
        result = whole(G, students, teachers, *rest)
        assert all(same_bits(w, weights_of(t)) for w, t in zip(before, teachers, strict=True))
        assert not any(t.training for t in teachers)
        return result

    monkeypatch.setattr(fedftg, "fine_tune", watched)
    world(tmp_path, MIXED).run(FedFTG(LOCAL, tune=QUICK), rounds=2)


def test_fine_tuning_that_blows_up_leaves_the_average_and_the_generator(tmp_path):
    place = world(tmp_path / "a", MIXED)
    start, end = place.run(FedFTG(LOCAL, tune=dataclasses.replace(QUICK, student_lr=1e38, steps=5)))
    plain = world(tmp_path / "b", MIXED).run(FedAvg(LOCAL))[-1]
    assert digest(end.weights) == digest(plain.weights)
    assert same_bits(start.generator, end.generator)
    assert len(place.events("distill_diverged")) == 1


def test_a_model_that_answers_with_no_numbers_is_neither_averaged_nor_a_teacher(tmp_path, monkeypatch):
    """Weights that are numbers, but so large that logits are not."""
    place = world(tmp_path / "a", HALVES)
    ask = place.fed.map

    def with_a_giant(*args, **how):
        x = ask(*args, **how)
        x["c1"] = dataclasses.replace(x["c1"], weights={n: t.sign() * 1e38 for n, t in x["c1"].weights.items()})
        return x

    monkeypatch.setattr(place.fed, "map", with_a_giant)
    alone = world(tmp_path / "b", HALVES)
    alone.fed.sample = lambda: ["c0"]
    method = FedFTG(LOCAL, tune=QUICK)
    assert digest(place.run(method)[-1]) == digest(alone.run(method)[-1])
    (event,) = place.fed.failures
    assert (event["client"], event["reason"]) == ("c1", "non-finite logits on generated samples")


def test_the_state_that_a_round_is_given_stays(tmp_path):
    place = world(tmp_path, MIXED)
    states = place.run(FedFTG(LOCAL, tune=QUICK))
    before = digest(states[1])
    place.fed.begin(1)
    FedFTG(LOCAL, tune=QUICK).round(states[1], place.fed, place.server)
    assert digest(states[1]) == before
    assert not same_bits(states[0].generator, states[1].generator)


# ---- what it is for ---------------------------------------------------------------------------------


def test_what_two_clients_know_reaches_an_architecture_of_which_they_are_not(tmp_path):
    """Client c2 has another architecture and one class; its global model learns the others from generated inputs."""
    parties = [("m", of_labels([0, 1], 200)), ("m", of_labels([2, 3], 200)), ("other", of_labels([0], 80))]
    test = images(400, 9)
    local = Local(epochs=5, batch=16, lr=0.05)
    accuracy = {}
    for steps in (0, 20):
        builders = {"m": lambda: mlp(1), "other": lambda: mlp(2, width=24)}
        place = World(tmp_path / str(steps), builders, parties, shape=(1, 8, 8))
        tune = FineTune(steps=steps, batch=32, noise=8, features=4, student_lr=0.1)
        state = place.run(FedFTG(local, tune=tune), rounds=2)[-1]
        accuracy[steps] = evaluate(place.server.model("other", state.weights["other"]), *test).accuracy
    assert accuracy[0] < 0.4
    assert accuracy[20] > accuracy[0] + 0.3


def test_it_learns_more_than_averaging_alone(tmp_path):
    local = Local(epochs=2, batch=16, lr=0.1)
    methods = {"fedavg": FedAvg(local), "fedftg": FedFTG(local, tune=FineTune(student_lr=0.05))}
    ends = {name: run_toy(m, tmp_path / name, rounds=6).summary["models"] for name, m in methods.items()}
    assert ends["fedavg"]["deep"]["accuracy"] < 0.75
    assert all(scores["accuracy"] > 0.95 for scores in ends["fedftg"].values())


# ---- refusals ---------------------------------------------------------------------------------------


class Words(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 4))


def test_tokens_are_refused_unless_nothing_is_generated(tmp_path):
    g = torch.Generator().manual_seed(0)
    data = Data(torch.randint(9, (20, 5), generator=g), torch.randint(4, (20,), generator=g))
    place = World(tmp_path, {"t": Words}, [("t", data)], shape=(5,), tokens=True)
    with pytest.raises(ConfigError, match="tokens"):
        check_server(FedFTG(), place.server)
    with pytest.raises(ConfigError, match="tokens"):
        check_server(FedFTG(), place.server)
    place.run(FedFTG(LOCAL, tune=FineTune(steps=0)))


@pytest.mark.parametrize("shape", [None, (8, 8)])
def test_inputs_of_an_unknown_shape_are_refused(shape, tmp_path):
    place = world(tmp_path, HALVES, shape=shape)
    with pytest.raises(ConfigError, match=r"images \[C, H, W\] or vectors"):
        check_server(FedFTG(), place.server)
