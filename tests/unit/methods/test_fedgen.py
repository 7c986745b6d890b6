"""FedGen: what it is without its generator, what travels, who is believed, and that labels reach those without them."""

import dataclasses

import pytest
import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig, QuorumNotMet
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.engines import Call
from solera.engines.faulty import Faulty
from solera.methods.fedavg import FedAvg
from solera.methods.fedgen import (
    FedGen,
    LatentGenerator,
    latent_generator,
    latent_generator_of,
    phases,
    train_with_generator,
    with_latents,
)
from solera.methods.steps.training import CountedUpdate, head_of, usable_counts
from solera.models import wrap
from solera.testing import run_toy, split_deep, split_wide, wide
from solera.train.fitting import Local, evaluate, logits_of
from solera.train.generators import draw
from toys import Conv, Data, World, images, mlp, replies_of, same_bits

LOCAL = Local(epochs=2, batch=16, lr=0.05)
QUICK = LatentGenerator(steps=5, batch=16, hidden=16, noise=4)
ONE = {"deep": split_deep}
BOTH = {"wide": split_wide, "deep": split_deep}


def split_mlp() -> nn.Module:
    return wrap(mlp(0), classifier="3", representation=8, head_hidden=8)


def split_conv() -> nn.Module:
    return wrap(Conv(1), classifier="8", representation=8, head_hidden=8)


def world(tmp, parties, **options) -> World:
    return World(tmp, {"c": split_conv, "m": split_mlp}, parties, shape=(1, 8, 8), **options)


def of_labels(labels: list[int], n: int = 60, seed: int = 0) -> Data:
    x, y = images(n, seed)
    mine = torch.isin(y, torch.tensor(labels))
    return Data(x[mine], y[mine])


# ---- special cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "off", [{"generated_weight": 0.0}, {"early_stop": 0, "agreement_weight": 1.0}], ids=["no weight", "no epochs"]
)
def test_without_generated_latents_it_is_fedavg_bit_for_bit(off, tmp_path):
    plain = run_toy(FedAvg(LOCAL), tmp_path / "fedavg", models=ONE)
    without = run_toy(FedGen(LOCAL, generator=QUICK, **off), tmp_path / "fedgen", models=ONE)
    assert digest(without.state.weights) == digest(plain.state.weights)


def test_a_mix_that_does_not_share_its_head_is_fedavg_too(tmp_path):
    plain = run_toy(FedAvg(LOCAL), tmp_path / "fedavg", models=BOTH)
    method = FedGen(LOCAL, generator=QUICK, generated_weight=0.0, share_head=False)
    assert digest(run_toy(method, tmp_path / "fedgen", models=BOTH).state.weights) == digest(plain.state.weights)


def test_the_first_round_is_without_the_generator_and_the_second_with_it(tmp_path):
    def end(rounds, weight):
        method = FedGen(LOCAL, generator=QUICK, generated_weight=weight)
        return digest(run_toy(method, tmp_path / f"{rounds}-{weight}", rounds=rounds, models=ONE).state.weights)

    assert end(1, 10.0) == end(1, 0.0)
    assert end(2, 10.0) != end(2, 0.0)


def test_a_generator_that_was_never_taught_is_not_used(tmp_path):
    """A void first round leaves the prior at 0: the second one is the first that counts."""
    place = world(tmp_path, [("m", of_labels([0, 1, 2, 3]))])
    method = FedGen(LOCAL, generator=QUICK)
    state = method.init(place.fed, place.server)
    place.fed.begin(1)
    late = method.round(state, place.fed, place.server)
    place.fed.begin(1)
    never = dataclasses.replace(method, generated_weight=0.0).round(state, place.fed, place.server)
    assert digest(late.weights) == digest(never.weights)


def test_no_server_step_leaves_the_generator(tmp_path):
    states = world(tmp_path, [("m", of_labels([0, 1, 2, 3]))]).run(
        FedGen(LOCAL, generator=dataclasses.replace(QUICK, steps=0))
    )
    assert same_bits(states[0].generator, states[1].generator)


@pytest.mark.parametrize(
    ("local", "epochs", "expected"),
    [
        (Local(epochs=5), 20, (5, 0)),
        (Local(epochs=5), 2, (2, 3)),
        (Local(epochs=5), 0, (0, 5)),
        (Local(steps=30, batch=10), 2, (10, 20)),  # 45 samples are 5 batches
        (Local(steps=7, batch=10), 2, (7, 0)),
    ],
)
def test_generated_latents_stop_early(local, epochs, expected):
    unit = "epochs" if local.steps is None else "steps"
    assert tuple(getattr(part, unit) for part in phases(local, epochs, 45)) == expected


# ---- the wire and the state -------------------------------------------------------------------------


def test_wire_sizes_are_those_of_the_paper(tmp_path):
    """Down d + |G| + C floats, up d floats and C counts."""
    place = world(tmp_path, [("m", of_labels([0, 1]))])
    state = place.run(FedGen(LOCAL, generator=QUICK))[-1]
    d = sum(p.numel() for p in split_mlp().parameters())
    G = sum(t.numel() for t in state.generator.values() if t.is_floating_point())
    assert G == (4 + 4) * 16 + 16 + 4 * 16 + 16 * 8 + 8  # two layers, and BatchNorm's four vectors
    (down,), (up,) = place.fed.down.values(), place.fed.up.values()
    assert (down.floats, up.floats) == (d + G + 4, d)
    assert (down.integers, up.integers) == (1, 4)  # BatchNorm's counter; the label counts


def test_labels_that_nobody_of_the_round_holds_are_not_in_the_prior(tmp_path):
    place = world(tmp_path, [("m", of_labels([0, 1])), ("c", of_labels([1, 2]))])
    start, end = place.run(FedGen(LOCAL, generator=QUICK))
    assert start.prior.tolist() == [0, 0, 0, 0]
    assert [p > 0 for p in end.prior.tolist()] == [True, True, True, False]
    assert end.prior.sum().item() == pytest.approx(1)
    uniform = place.run(FedGen(LOCAL, generator=QUICK, labels="uniform"))[-1]
    assert uniform.prior.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_weights_of_generated_latents_decay(tmp_path, monkeypatch):
    place = world(tmp_path, [("m", of_labels([0, 1, 2, 3]))])
    sent = []
    ask = place.fed.map
    monkeypatch.setattr(place.fed, "map", lambda *a, **how: (sent.append(how["generated_weight"]), ask(*a, **how))[1])
    place.run(FedGen(LOCAL, generator=QUICK, generated_weight=10.0), rounds=3)
    assert sent == [10.0, 9.8, 10.0 * 0.98**2]


@pytest.mark.parametrize(("lr", "alpha"), [(0.01, 10.0), (0.001, 10.0), (0.05, 2.0), (0.1, 1.0), (0.0, 0.0)])
def test_without_a_value_the_weight_goes_down_with_the_learning_rate(tmp_path, monkeypatch, lr, alpha):
    """So that the head's steps towards generated latents are those of the authors, 10 times 0.01, and no larger."""
    place = world(tmp_path, [("m", of_labels([0, 1, 2, 3]))])
    sent = []
    ask = place.fed.map
    monkeypatch.setattr(place.fed, "map", lambda *a, **how: (sent.append(how["generated_weight"]), ask(*a, **how))[1])
    place.run(FedGen(dataclasses.replace(LOCAL, lr=lr), generator=QUICK))
    assert sent == pytest.approx([alpha])


def test_all_architectures_get_one_head_also_those_without_a_client(tmp_path):
    place = world(tmp_path, [("m", of_labels([0, 1])), ("c", of_labels([1, 2])), ("m", of_labels([3]))])
    start, one = place.run(FedGen(LOCAL, generator=QUICK))
    for state in (start, one):
        assert same_bits(head_of(state.weights["m"]), head_of(state.weights["c"]))
    place.fed.begin(1)
    place.fed.sample = lambda: ["c0"]
    two = FedGen(LOCAL, generator=QUICK).round(one, place.fed, place.server)
    assert same_bits(head_of(two.weights["m"]), head_of(two.weights["c"]))
    body = {n for n in one.weights["c"] if not n.startswith("head.")}
    assert all(torch.equal(one.weights["c"][n], two.weights["c"][n]) for n in body)
    assert not torch.equal(one.weights["c"]["head.0.weight"], two.weights["c"]["head.0.weight"])


# ---- who is believed --------------------------------------------------------------------------------


def test_counts_that_do_not_sum_to_the_registered_examples_lose_the_seat(tmp_path):
    parties = [("m", of_labels([0, 1])), ("m", of_labels([2, 3]))]
    place = world(tmp_path / "a", parties)
    place.data["c1"] = of_labels([2, 3], 90)  # more than it registered with
    honest = world(tmp_path / "b", parties)
    honest.fed.sample = lambda: ["c0"]
    method = FedGen(LOCAL, generator=QUICK)
    assert digest(place.run(method)[-1]) == digest(honest.run(method)[-1])
    (event,) = place.fed.failures
    assert event["client"] == "c1"
    assert "label counts" in event["reason"]


@pytest.mark.parametrize(
    "counts",
    [
        None,
        torch.tensor([-1, 3, 0, 0]),
        torch.zeros(4).long(),
    ],
)
def test_counts_that_cannot_be_are_noted(counts, tmp_path):
    x, y = images(2)
    place = world(tmp_path, [("m", Data(x, y))])
    assert usable_counts(replies_of({"c0": CountedUpdate(counts, {})}), {}, place.fed, place.server) == {}
    assert len(place.fed.failures) == 1


def test_a_head_that_answers_with_no_numbers_is_left_out(tmp_path):
    place = world(tmp_path, [("m", of_labels([0, 1])), ("m", of_labels([2, 3]))])
    method = FedGen(LOCAL, generator=QUICK)
    state = method.init(place.fed, place.server)
    huge = {n: t * 1e38 if n.startswith("head.") else t for n, t in state.weights["m"].items()}
    x = replies_of({"c0": CountedUpdate(None, state.weights["m"]), "c1": CountedUpdate(None, huge)})
    counts = dict.fromkeys(x, torch.ones(4))
    assert list(method.heads(x, counts, state, place.fed, place.server)) == ["c0"]
    assert "generated latents" in place.fed.failures[0]["reason"]


def test_whoever_is_rejected_counts_against_the_quorum(tmp_path):
    place = world(tmp_path, [("m", of_labels([0, 1])), ("m", of_labels([2, 3]))])
    place.data["c1"] = of_labels([2, 3], 90)
    place.fed.config = FederationConfig(min_replies=2)
    with pytest.raises(QuorumNotMet, match=r"1 of 2 clients .*min_replies is 2; first reason: label counts"):
        place.run(FedGen(LOCAL, generator=QUICK))


def test_no_usable_upload_leaves_everything(tmp_path):
    place = world(tmp_path, [("m", of_labels([0, 1]))])
    place.data["c0"] = of_labels([0, 1], 90)
    with pytest.raises(QuorumNotMet, match=r"0 of 1 clients .*label counts that are not those"):
        place.run(FedGen(LOCAL, generator=QUICK))


def test_a_generator_that_blows_up_is_not_kept(tmp_path):
    place = world(tmp_path, [("m", of_labels([0, 1, 2, 3]))])
    start, end = place.run(FedGen(LOCAL, generator=dataclasses.replace(QUICK, lr=1e38, steps=20)))
    assert same_bits(start.generator, end.generator)
    assert end.prior.tolist() == [0, 0, 0, 0]
    assert len(place.events("generator_diverged")) == 1


def test_a_client_whose_counts_are_spoiled_on_the_way_does_not_stop_the_round(tmp_path):
    def plan(call: Call) -> str | None:
        return "truncate" if call.client == "c1" else None

    place = world(tmp_path, [("m", of_labels([0, 1])), ("m", of_labels([2, 3]))])
    place.fed.engine = Faulty(place.fed.engine, plan)
    end = place.run(FedGen(LOCAL, generator=QUICK))[-1]
    assert [p > 0 for p in end.prior.tolist()] == [True, True, False, False]


# ---- what it is for ---------------------------------------------------------------------------------


def test_a_client_keeps_labels_it_does_not_hold(tmp_path):
    """Trained on labels 0 and 1 alone a model forgets the others; with the generator's latents it remembers more."""
    place = world(tmp_path, [("m", of_labels([0, 1], 200)), ("m", of_labels([2, 3], 200))])
    method = FedGen(Local(epochs=10, batch=16, lr=0.1), generator=LatentGenerator(steps=200, lr=3e-3))
    state = place.run(method)[-1]
    G = latent_generator_of(state.generator, 4)
    noise, y = draw(torch.tensor([0.0, 0.0, 0.5, 0.5]), 200, G.noise, torch.Generator().manual_seed(1))
    z, other = G(noise, y).detach(), of_labels([2, 3], 400, 9)

    def accuracies(weight: float) -> tuple[float, float]:
        client = place.client("c0", 1, {})
        sent = {"weights": state.weights["m"], "generator": state.generator, "prior": state.prior, "classes": 4}
        how = {"local": method.local, "generated_weight": weight, "agreement_weight": 0.0, "early_stop": 20}
        model = client.model(train_with_generator(client, **sent, **how).weights)
        of_latents = (logits_of(model.get_submodule("head"), z).argmax(-1) == y).float().mean().item()
        return of_latents, evaluate(model, other.inputs, other.labels).accuracy

    (latents_without, without), (latents_with, with_generator) = accuracies(0.0), accuracies(1.0)
    assert latents_without < 0.6
    assert latents_with > 0.95
    assert with_generator > without + 0.2


def test_the_objective_by_hand():
    """Cross-entropy + alpha CE on latents + beta KL(head of latents of the own labels || prediction)."""
    torch.manual_seed(0)
    model, G = split_mlp().eval(), latent_generator(8, 3, 4, 6).eval().requires_grad_(False)
    x, y = images(10)
    prior = torch.tensor([0.5, 0.5, 0.0, 0.0])
    found = with_latents(G, prior, 6, 2.0, 3.0, torch.Generator().manual_seed(4))(model, x, y)
    rng = torch.Generator().manual_seed(4)
    noise, drawn = draw(prior, 6, 3, rng)
    p = model.head(G(torch.cat([torch.randn(10, 3, generator=rng)]), y)).softmax(-1)
    q = model(x).log_softmax(-1)
    expected = nn.functional.nll_loss(q, y)
    expected = expected + 2 * nn.functional.cross_entropy(model.head(G(noise, drawn)), drawn)
    expected = expected + 3 * nn.functional.kl_div(q, p, reduction="batchmean")
    torch.testing.assert_close(found, expected)


def test_it_learns_more_than_averaging_alone(tmp_path):
    """The deeper architecture gains: by a head that all share, and by latents on top of that."""
    local = Local(epochs=2, batch=16, lr=0.1)
    methods = {"fedavg": FedAvg(local), "heads": FedGen(local, generated_weight=0.0), "fedgen": FedGen(local)}
    methods["fedgen"] = dataclasses.replace(methods["fedgen"], generated_weight=1.0)
    ends = {name: run_toy(m, tmp_path / name, rounds=6, models=BOTH).summary["models"] for name, m in methods.items()}
    accuracy = {name: models["deep"]["accuracy"] for name, models in ends.items()}
    assert accuracy["fedavg"] + 0.1 < accuracy["heads"] < accuracy["fedgen"] - 0.1
    assert all(scores["accuracy"] > 0.9 for scores in ends["fedgen"].values())


def test_the_pull_towards_latents_of_the_own_label_changes_training_and_still_learns(tmp_path):
    method = FedGen(Local(epochs=2, batch=16, lr=0.1), generated_weight=1.0, agreement_weight=1.0)
    scores = run_toy(method, tmp_path, rounds=6).summary["models"]
    assert all(s["accuracy"] > 0.8 for s in scores.values())


def test_tokens_are_no_obstacle(tmp_path):
    """Latents are vectors whatever the inputs are."""

    def text() -> nn.Module:
        torch.manual_seed(0)
        return wrap(
            nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 4)), "2", representation=6, head_hidden=6
        )

    g = torch.Generator().manual_seed(0)
    data = Data(torch.randint(9, (20, 5), generator=g), torch.randint(4, (20,), generator=g))
    place = World(tmp_path, {"t": text}, [("t", data)], shape=(5,), tokens=True)
    state = place.run(FedGen(LOCAL, generator=QUICK), rounds=2)[-1]
    assert state.generator["net.3.weight"].shape == (6, 16)


def test_the_state_that_a_round_is_given_stays(tmp_path):
    place = world(tmp_path, [("m", of_labels([0, 1])), ("c", of_labels([2, 3]))])
    states = place.run(FedGen(LOCAL, generator=QUICK), rounds=1)
    before = digest(states[1])
    place.fed.begin(1)
    FedGen(LOCAL, generator=QUICK).round(states[1], place.fed, place.server)
    assert digest(states[1]) == before
    assert not same_bits(states[0].generator, states[1].generator)
    assert weights_of(place.server.template("m")).keys() == states[1].weights["m"].keys()


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"generated_weight": -1.0}, "generated_weight"),
        ({"agreement_weight": float("nan")}, "agreement_weight"),
        ({"decay": 1.1}, "decay"),
        ({"early_stop": -1}, "early_stop"),
    ],
)
def test_settings_are_refused(settings, word):
    with pytest.raises(ConfigError, match=word):
        FedGen(**settings)


def test_models_in_one_piece_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="body, an adapter and a head"):
        run_toy(FedGen(), tmp_path, models={"wide": wide})


def test_heads_of_different_shapes_are_refused(tmp_path):
    other = {"wide": split_wide, "odd": lambda: wrap(wide(), classifier="2", representation=8, head_hidden=9)}
    with pytest.raises(ConfigError, match="one head"):
        run_toy(FedGen(), tmp_path, models=other)


def test_a_server_that_does_not_know_its_inputs_is_refused(tmp_path):
    place = World(tmp_path, {"m": split_mlp}, [("m", of_labels([0]))])
    with pytest.raises(ConfigError, match="shape"):
        FedGen().init(place.fed, place.server)
