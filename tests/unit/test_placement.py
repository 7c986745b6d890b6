"""Where data and models are: the table of tricks, what is put once per process, and what stays on the CPU.

There is no other device here: torch's "meta" stands in for one, whose tensors have a device and no numbers.
"""

import copy
import dataclasses
import os

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from solera.core.errors import ConfigError
from solera.core.federation import Federation
from solera.core.tensors import CPU, beside, device_of, weights_of
from solera.data import PartitionConfig, PublicConfig, from_tensors
from solera.engines import ClientStates, InProcess, Processes, Threads
from solera.methods.steps.training import local_update
from solera.models import build
from solera.place import placement as devices
from solera.place.placement import TRICKS, Placement, tricks_of
from solera.scenario.scenario import Scenario
from solera.testing import toy, wide
from solera.train.chain import resized
from solera.train.fitting import Local, fit, logits_of, minibatches
from toys import Conv, images, mlp, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")


@pytest.fixture
def elsewhere(monkeypatch):
    """A place on another device than the CPU."""
    monkeypatch.setitem(TRICKS, "meta", TRICKS["cpu"])
    monkeypatch.setattr(devices, "device_memory", lambda device: None)  # it has none
    monkeypatch.setattr(Placement, "open", lambda self: None)  # nor a generator
    return Placement("meta")


def test_a_device_without_a_row_in_the_table_is_refused_by_its_name():
    assert tricks_of(CPU) is TRICKS["cpu"]
    for make in (lambda: tricks_of(torch.device("meta")), lambda: Placement("meta")):
        with pytest.raises(ConfigError, match="nothing can be computed on 'meta'; there is cpu, cuda"):
            make()


def test_on_the_cpu_nothing_is_moved_or_copied():
    place, model, x = Placement(), mlp(0), torch.ones(3)
    weights = weights_of(model)
    assert place.put(x) is x
    assert place.module(model) is model
    assert beside(model, weights) is weights
    assert device_of(nn.ReLU()) == CPU


def test_data_and_templates_are_put_once(elsewhere):
    x, template = torch.ones(3), mlp(0)
    there = elsewhere.put(x)
    assert (there.device.type, x.device.type) == ("meta", "cpu")
    assert elsewhere.put(x) is there
    assert elsewhere.put(there) is there
    assert elsewhere.put(torch.ones(3)) is not there
    assert Placement("meta").put(x) is not there  # another worker's
    model = elsewhere.module(template)
    assert (device_of(model).type, device_of(template).type) == ("meta", "cpu")
    assert elsewhere.module(template) is model
    assert device_of(copy.deepcopy(model)).type == "meta"


def test_weights_are_on_the_cpu_wherever_the_model_is():
    with FakeTensorMode():  # of what is on "meta" there is no copy
        model = nn.BatchNorm1d(3, device="cuda")
        assert device_of(model).type == "cuda"
        assert {t.device.type for t in weights_of(model).values()} == {"cpu"}


def test_what_a_training_loop_needs_is_brought_beside_the_model(elsewhere):
    weights = weights_of(mlp(0))
    model = resized(elsewhere.module(mlp(1)), weights)
    assert device_of(model).type == "meta"
    assert {t.device.type for t in beside(model, weights).values()} == {"meta"}


def test_copies_of_weights_are_contiguous_and_nobodys(tmp_path):
    model = build("tiny-cnn", 10, (1, 28, 28))
    weights = weights_of(model)
    assert all(t.is_contiguous() and not t.requires_grad for t in weights.values())
    before = {n: t.clone() for n, t in weights.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert same_bits(weights, before)


@pytest.mark.parametrize("augment", [[], [lambda batch, rng: batch]], ids=["plain", "fresh"])
def test_a_client_has_its_data_and_its_models_where_it_is_served(elsewhere, augment):
    with_images = scenario(augment)
    client = with_images.client("c00", 0, {}, elsewhere)
    assert {t.device.type for t in (client.test.inputs, client.test.labels, client.train.labels)} == {"meta"}
    x, y = next(minibatches(client.train.inputs, client.train.labels, Local(batch=4), 0))
    assert (x.device.type, y.device.type) == ("meta", "meta")
    assert device_of(client.model()).type == "meta"
    assert device_of(client.model(with_images.server.init("m"))).type == "meta"
    assert {t.device.type for t in with_images.server.init("m").values()} == {"cpu"}
    with_images.server.move(elsewhere)
    assert device_of(with_images.server.model("m", with_images.server.init("m"))).type == "meta"


def scenario(augment) -> Scenario:
    x, y = images(40)
    data = from_tensors((x, y), (x, y), classes=4, mean=(0.5,), std=(0.5,))
    split = PartitionConfig("iid", clients=2)
    return Scenario(data, {"m": lambda: mlp(0)}, split, PublicConfig("none"), client_test=0.2, augment=augment)


@pytest.mark.parametrize("kind", [InProcess, Threads, Processes])
def test_whoever_serves_a_call_has_a_place_of_its_own_process(kind, tmp_path, monkeypatch):
    made = Placement.__init__

    def noted(self, *args, **options):
        made(self, *args, **options)
        self.pid = os.getpid()

    monkeypatch.setattr(Placement, "__init__", noted)
    inner = toy({"wide": wide})

    class Watched:
        roster = inner.roster

        def client(self, k, seed, state, place):
            assert place.pid == os.getpid(), f"the place of process {place.pid} in process {os.getpid()}"
            return inner.client(k, seed, state, place)

    engine = kind(Watched(), ClientStates(tmp_path), 2)
    try:
        fed = Federation(engine, 0)
        fed.begin(0)
        sent = {"weights": inner.server.init("wide"), "local": Local(epochs=1), "mu": 0.1}
        assert len(fed.map(local_update, list(inner.roster), **sent)) == len(inner.roster)
    finally:
        engine.close()


# ---- what the table decides -------------------------------------------------------------------------


def test_the_table_says_how_many_samples_are_asked_about_at_a_time(monkeypatch):
    seen = []

    class Watching(Conv):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    x, model = images(270)[0], Watching(0)
    answers = logits_of(model, x)
    assert seen == [128, 128, 32]  # the last 14, padded
    monkeypatch.setitem(TRICKS, "cpu", dataclasses.replace(TRICKS["cpu"], asked=100, least_rows=75))
    seen.clear()
    torch.testing.assert_close(logits_of(model, x), answers)
    assert seen == [100, 100, 75]
    seen.clear()
    logits_of(model, x, batch=90)
    assert seen == [90, 90, 90]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_table_says_which_kernels_step(monkeypatch, optimizer):
    used = []
    kernel = getattr(TRICKS["cpu"], optimizer)
    counted = {optimizer: lambda *args, **options: used.append(optimizer) or kernel(*args, **options)}
    monkeypatch.setitem(TRICKS, "cpu", dataclasses.replace(TRICKS["cpu"], **counted))
    done = fit(mlp(0), *images(20), Local(epochs=2, batch=10, optimizer=optimizer), 0)
    assert len(used) == done.steps == 4


def test_the_table_says_how_models_are_laid_out(monkeypatch):
    def innermost(model):
        return all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.ndim == 4)

    def made():
        return build("tiny-cnn", 10, (3, 28, 28))

    assert innermost(made())
    monkeypatch.setitem(TRICKS, "cpu", dataclasses.replace(TRICKS["cpu"], layout=torch.contiguous_format))
    assert not innermost(made())
