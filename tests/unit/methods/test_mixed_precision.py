"""Full-precision and low-bit clients in one federation (FedDF, Algorithm 3): `[models.options.NAME]`."""

import tomllib

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.methods.fedavg import FedAvg
from solera.methods.feddf import FedDF
from solera.methods.steps.low_bit import LowBitUpload, coarse_names, quantise_activations
from solera.models.factory import ModelsConfig
from solera.runs import loop
from solera.runs.config import load_config, to_toml
from solera.runs.loop import check_start
from solera.scenario.scenario import Scenario
from solera.train.distill import Distill
from solera.train.fitting import Local, logits_of
from toys import World, images, mlp, same_bits

LOCAL = Local(epochs=1, batch=10, lr=0.05)
MIXED = {"low": {"bits": 1}}
WHERE_SAID = LowBitUpload(bits=32)  # only where models.options says so


def world(tmp, precision=MIXED, public=True):
    parties = [(A, Data(*images(20, seed=i))) for i, A in enumerate(["full", "low"] * 2)]
    builders = {"full": lambda: mlp(0), "low": lambda: mlp(0)}
    return World(tmp, builders, parties, public=images(40, seed=9)[0] if public else None, precision=precision)


def test_full_and_one_bit_clients_answer_in_one_exchange(tmp_path):
    """Full-precision clients train as without any low-bit client beside them."""
    w = world(tmp_path / "a", public=False)
    end = w.run(FedDF(LOCAL, Distill(steps=0), upload=WHERE_SAID))[-1]
    plain = world(tmp_path / "b", {}, public=False)
    same = plain.run(FedDF(LOCAL, Distill(steps=0)))[-1]
    assert same_bits(end.weights["full"], same.weights["full"])
    assert not same_bits(end.weights["low"], same.weights["low"])
    (up,), (exact,) = w.fed.up.values(), plain.fed.up.values()
    model = w.server.template("low")
    names = coarse_names(model, LowBitUpload(bits=1))
    n_w = sum(model.get_parameter(n).numel() for n in names)
    n_scale = sum(len(model.get_parameter(n)) for n in names)
    assert up.messages == 4
    assert exact.floats - up.floats == 2 * (n_w - n_scale)  # of four clients, two sent packed weights


def test_an_architecture_can_be_exempt_from_the_bits_of_all(tmp_path):
    one = world(tmp_path / "a").run(FedDF(LOCAL, Distill(steps=20, batch=20), upload=WHERE_SAID))[-1]
    w = world(tmp_path / "b", {"full": {"bits": 32}})
    other = w.run(FedDF(LOCAL, Distill(steps=20, batch=20), upload=LowBitUpload(bits=1)))[-1]
    assert all(same_bits(one.weights[A], other.weights[A]) for A in one.weights)


def test_both_kinds_teach_both_students(tmp_path):
    fused = world(tmp_path / "a").run(FedDF(LOCAL, Distill(steps=20, batch=20), upload=WHERE_SAID))[-1]
    averaged = world(tmp_path / "b").run(FedDF(LOCAL, Distill(steps=0), upload=WHERE_SAID))[-1]
    for A in ("full", "low"):
        assert not same_bits(fused.weights[A], averaged.weights[A])
        assert len(fused.weights[A]["1.weight"].abs().unique()) > 100  # students have full precision


def test_teachers_answer_with_the_activations_of_their_clients(tmp_path):
    w = world(tmp_path, {"low": {"activations": 1}})
    weights, x = w.server.init("low"), images(8, seed=3)[0]
    model = WHERE_SAID.build(w.server)("low", weights)
    plain = w.server.model("low", weights)
    hidden = plain[2](plain[1](plain[0](x)))
    assert torch.allclose(logits_of(model, x), plain[3](quantise_activations(hidden, 1)), atol=1e-6)
    same = WHERE_SAID.build(w.server)("full", weights)
    assert torch.equal(logits_of(same, x), logits_of(plain, x))
    w.run(FedDF(LOCAL, Distill(steps=5, batch=20), upload=WHERE_SAID))
    (report,) = w.server.ensembles
    assert report.build is not None
    assert not torch.equal(report.build("low", weights)(x), plain(x))


def test_a_rounding_that_no_client_does_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^method\.upload\.bits = 32: it rounds no weight; set bits from 1 to 8"):
        world(tmp_path, {}).run(FedDF(LOCAL, upload=LowBitUpload(bits=32, skip_ends=True)))
    states = world(tmp_path / "b").run(
        FedDF(LOCAL, Distill(steps=0), upload=LowBitUpload(bits=32, training="error_feedback"))
    )
    assert not same_bits(states[0].weights["low"], states[1].weights["low"])


@pytest.mark.parametrize("method", [FedAvg(LOCAL), FedDF(LOCAL)])
def test_without_a_low_bit_upload_methods_train_in_full_precision(tmp_path, method):
    with pytest.raises(ConfigError, match=r"full precision.*low.*feddf with method\.upload\.kind = 'low-bit'"):
        world(tmp_path).run(method)


TOML = """
[run]
rounds = 1
[data]
train_size = 200
test_size = 50
[partition]
clients = 4
[models]
clients = ["mlp", "mlp-1bit"]
[models.options.mlp-1bit]
model = "mlp"
bits = 1
activations = 2
[method]
name = "feddf"
[method.upload]
kind = "low-bit"
bits = 32
[method.local]
epochs = 1
[method.fusion]
steps = 3
[engine]
name = "inprocess"
"""


def test_one_network_in_two_precisions_from_toml(tmp_path):
    """Two names for one model of the zoo; the run's models are rebuilt from its directory."""
    from solera.use.trained import open_run

    config = load_config(tomllib.loads(TOML))
    assert load_config(tomllib.loads(to_toml(config))) == config
    assert config.models.built == ["mlp", "mlp"]
    loop.run(config, tmp_path / "run")
    trained = open_run(tmp_path / "run")
    assert sorted(trained.names) == ["mlp", "mlp-1bit"]
    assert type(trained.model("mlp-1bit")) is type(trained.model("mlp"))


def test_options_of_the_model_itself():
    plain = TOML.replace("bits = 1\nactivations = 2", "hidden = [7]").replace('"low-bit"\nbits = 32', '"whole"')
    config = load_config(tomllib.loads(plain))
    scenario = Scenario(config.data, config.models, config.partition, config.public, seed=0, workers=1)
    widths = {A: {len(t) for t in scenario.server.init(A).values() if t.ndim == 2} for A in ("mlp", "mlp-1bit")}
    assert 7 in widths["mlp-1bit"]
    assert 7 not in widths["mlp"]
    check_start(config.method, scenario, config.federation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nobody": {"bits": 1}}, "options.nobody: no architecture"),
        ({"mlp": {"bits": 9}}, "options.mlp.bits = 9: expected 1 to 8"),
        ({"mlp": {"activations": True}}, "options.mlp.activations = true"),
        ({"mlp": {"model": 3}}, "options.mlp.model = 3"),
        ({"mlp": {"model": "a.b:c"}}, "options.mlp.model.*registered name"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelsConfig(clients=["mlp"], options=options)


def test_a_variant_of_no_model_is_named_with_its_key():
    with pytest.raises(ConfigError, match=r"models.options.x.model.*mlp2"):
        load_config({"models": {"clients": ["x"], "options": {"x": {"model": "mlp2"}}}, "method": {"name": "feddf"}})
