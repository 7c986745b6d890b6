"""Every method trains on augmented samples, with the same bits on every engine; what frozen models say follows them."""

import pytest
import torch
import torch.nn.functional as F

import solera.methods  # noqa: F401  (registers them)
from solera import EngineConfig, PartitionConfig, PublicConfig, RunConfig, Scenario, from_tensors
from solera.core.errors import RunError
from solera.core.task import Client, Data
from solera.core.tensors import Views
from solera.method import METHODS, find_method
from solera.methods.fedavg import FedAvg
from solera.methods.moon import MOON
from solera.methods.steps.personal import Tuning, fine_tune
from solera.models import wrap
from solera.runs.loop import simulate
from solera.runs.read import read_run
from solera.testing import run_toy, small
from solera.train.fitting import Local, minibatches
from toys import Conv, World, images, mlp

ENGINES = ("inprocess", "threads", "processes")


def blurred(batch, rng):
    """A function of one's own, on vectors as on images."""
    return batch + 0.3 * torch.randn(batch.shape, generator=rng)


def crooked(batch, rng):
    return batch + 0.2 * torch.randn(batch.shape, generator=rng)


FAMILIES = ("feddf", "fedgkt", "framework", "heterofl", "mnfl", "scaffold")  # one of each; the others: make rest


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in FAMILIES else pytest.mark.rest)
        for n, cls in sorted(METHODS.items())
        if cls.__module__.startswith("solera.")
    ],
)
def test_every_method_trains_on_augmented_samples(name, tmp_path):
    method = small(find_method(name)())
    plain = run_toy(method, tmp_path / "plain", rounds=2).digest
    found = {run_toy(method, tmp_path / e, e, rounds=2, augment=[blurred]).digest for e in ("inprocess", "threads")}
    assert len(found) == 1
    assert plain not in found


def pictures() -> Scenario:
    x, y = images(120)
    x = (x.clamp(-4, 4) * 30 + 127).to(torch.uint8)
    data = from_tensors((x[:90], y[:90]), (x[90:], y[90:]), classes=4)
    models = {"c": lambda: Conv(0, dropout=0.2), "m": lambda: mlp(1)}
    split, public = PartitionConfig("iid", clients=4), PublicConfig(size=20, augment=["crop", "flip"], fresh=True)
    return Scenario(data, models, split, public, client_test=0.25, augment=["crop", "flip", "jitter", "gray"])


@pytest.mark.parametrize("name", ["feddf", "scaffold", "fedavgft"])
def test_named_steps_give_the_same_bits_on_every_engine(name, tmp_path):
    method = small(find_method(name)())
    digests = {
        simulate(pictures(), method, tmp_path / e, RunConfig(rounds=2), engine=EngineConfig(e, workers=2)).digest
        for e in ENGINES
    }
    assert len(digests) == 1


def test_a_run_is_not_continued_with_other_steps(tmp_path):
    method = small(FedAvg())
    begun = run_toy(method, tmp_path, rounds=1, augment=[blurred])
    with pytest.raises(RunError, match=r"started with data\.augment = .*blurred.*, not .*crooked"):
        run_toy(method, tmp_path, rounds=2, augment=[crooked])
    with pytest.raises(RunError, match=r"started with data\.augment = .*blurred.*, not unset"):
        run_toy(method, tmp_path, rounds=2)
    assert run_toy(method, tmp_path, rounds=1, augment=[blurred]).digest == begun.digest
    assert [step.rpartition(":")[2] for step in read_run(tmp_path).settings["data.augment"]] == ["blurred"]


# ---- what frozen models say, by hand ----------------------------------------------------------------

X, Y = images(20)
LOCAL = Local(epochs=2, batch=8, lr=0.05)
FRESH = Views(
    20,
    lambda rows: X[rows],
    lambda rows, seed: X[rows] + torch.randn(X[rows].shape, generator=torch.Generator().manual_seed(seed)),
)


def split_conv():
    return wrap(Conv(0), classifier="8", head="projection")


def test_moon_asks_its_frozen_models_about_what_the_model_is_shown(tmp_path):
    world = World(tmp_path, {"c": split_conv}, [("c", Data(X, Y))])
    world.data["c0"] = Data(FRESH, Y)
    _, one, two = world.run(MOON(LOCAL, mu=2.0, tau=0.7), 2)
    model, received, previous = (world.server.model("c", one.weights["c"]) for _ in range(3))  # one client: the same
    optimizer = torch.optim.SGD(model.parameters(), LOCAL.lr)
    for a, b in minibatches(FRESH, Y, LOCAL, world.seeds[1]):
        with torch.no_grad():
            z_glob, z_prev = received.represent(a), previous.represent(a)
        model.train()
        z = model.represent(a)
        near, far = (torch.exp(F.cosine_similarity(z, other) / 0.7) for other in (z_glob, z_prev))
        loss = F.cross_entropy(model.head(z), b) - 2.0 * torch.log(near / (near + far)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(two.weights["c"][name], t, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("freeze", [False, True])
def test_fine_tuning_stays_near_what_the_received_model_says_of_what_is_shown(freeze):
    client = Client("k", "c", Data(FRESH, Y), Data(X, Y), None, 4, 5, {}, split_conv())
    sent = client.model().state_dict()
    fine_tune(client, weights=sent, tuning=Tuning(LOCAL, freeze_base=freeze, kd=0.7))
    model, received = client.model(sent), client.model(sent)
    received.eval()
    trained = model.head if freeze else model
    optimizer = torch.optim.SGD(trained.parameters(), LOCAL.lr)
    for a, b in minibatches(FRESH, Y, LOCAL, 5):
        with torch.no_grad():
            anchor = received(a).softmax(-1)
        model.train()
        if freeze:
            model.eval()
            trained.train()
        q = model(a).log_softmax(-1)
        loss = F.nll_loss(q, b) + 0.7 * (anchor * (anchor.log() - q)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(client.state["model"][name], t, rtol=1e-4, atol=1e-5)
