"""Trying another method on a working configuration: `--set method.name=X` alone, for every method there is."""

import dataclasses
import tomllib

import pytest

from solera import methods
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig
from solera.lab.sweep import notes, plan
from solera.method import METHODS, name_of
from solera.methods.feddf import FedDF
from solera.runs import loop
from solera.runs.config import Config, load_config, merged, to_toml
from solera.runs.loop import check_start
from solera.scenario.scenario import Scenario
from solera.train.distill import Distill
from solera.train.fitting import Local

RECIPE = "quickstart/feddf"
SMALL = ["run.rounds=1", "data.train_size=600", "data.test_size=100", "public.size=100", "engine.name=inprocess"]
OURS = sorted(name for name, cls in METHODS.items() if cls.__module__.startswith("solera.methods."))
# What cannot run there: three architectures for a method that mixes parameters.
REFUSED = {"mnflparam": "needs clients of one architecture, models.clients has lenet5, mlp, tiny-cnn"}


def scenario_of(config: Config) -> Scenario:
    return Scenario(config.data, config.models, config.partition, config.public, seed=config.run.seed, workers=1)


@pytest.mark.parametrize("name", OURS)
def test_every_method_that_can_run_on_the_quickstart_does_so_by_its_name_alone(name):
    config = load_config(RECIPE, [f"method.name={name}", *SMALL])
    assert name_of(config.method) == name
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            check_start(config.method, scenario_of(config), config.federation)
        return
    check_start(config.method, scenario_of(config), config.federation)
    again = load_config(tomllib.loads(to_toml(config)))
    assert again == config
    assert again.notes == ()  # config.toml is the effective configuration: nothing is decided a second time


@pytest.mark.parametrize("name", ["fedet", "mnfl", "fedgems"])
def test_it_really_runs(name, tmp_path, caplog):
    config = load_config(RECIPE, [f"method.name={name}", *SMALL, "method.local.epochs=1", "federation.fraction=0.2"])
    summary = loop.run(config, tmp_path / "run").summary
    assert summary["method"] == name
    written = tomllib.loads((tmp_path / "run/config.toml").read_text("utf-8"))
    if name != "fedet":
        assert written["data"]["client_test"] == 0.2
        assert "data.client_test = 0.2 is set for" in caplog.text
    if name != "mnfl":
        assert written["models"]["server"] == "fedet-cnn"
    assert written["models"]["head"] == ("shared" if name == "fedet" else "plain")


def test_local_training_and_the_federation_carry_over_and_nothing_else():
    feddf = load_config(RECIPE)
    variants = {name for name in OURS if issubclass(METHODS[name], FedDF)}  # FedDF but for an equation
    for name in sorted(variants):
        assert load_config(RECIPE, [f"method.name={name}"]).method.fusion == feddf.method.fusion, name
    assert variants == {"feddf", "feddf-previous", "pfeddf"}
    for name in set(OURS) - variants - {"fedmd", "pfedme"}:  # those two train in a way of their own
        other = load_config(RECIPE, [f"method.name={name}"])
        assert other.method.local == feddf.method.local == Local(epochs=3, batch=32, lr=0.05), name
        assert (other.partition, other.federation, other.run) == (feddf.partition, feddf.federation, feddf.run)
        own = METHODS[name]()
        for field in dataclasses.fields(own):
            if field.name != "local":
                assert getattr(other.method, field.name) == getattr(own, field.name), (name, field.name)
    assert load_config(RECIPE, ["method.name=fedbe"]).method.fusion != Distill(steps=60, batch=64)
    assert load_config("feddf/table3", ["method.name=fedavg"]).method.average == "weighted"  # table3 says uniform


def test_what_did_not_carry_over_is_said():
    said = load_config(RECIPE, ["method.name=fedavg"]).notes
    assert said == (
        "fedavg instead of feddf: method.local is kept; method.fusion.steps, method.fusion.batch did not carry over",
    )
    (first, _) = load_config(RECIPE, ["method.name=pfedme"]).notes
    assert "method.local.epochs" in first
    assert load_config(RECIPE).notes == ()


def test_local_training_that_the_other_method_refuses_carries_over_in_part():
    base = merged(RECIPE, ["method.local.momentum=0.9", "method.local.lr=0.03"])
    config = load_config(base, ["method.name=scaffold"])
    assert config.method.local == Local(epochs=3, batch=32, lr=0.03)
    assert any(
        note.startswith("of method.local only epochs, batch, lr carry over: ") and "needs plain SGD" in note
        for note in config.notes
    )
    assert load_config(base, ["method.name=scaffold", "method.allow_momentum=true"]).method.local.momentum == 0.9
    adam = merged(RECIPE, ["method.local.optimizer=adam", "method.local.lr=0.001"])
    assert load_config(adam, ["method.name=scaffold"]).method.local == Local(epochs=3, batch=32, lr=Local.lr)


def test_steps_and_epochs_take_turns():
    by_steps = load_config(RECIPE, ["method.name=fedet", "method.local.steps=7"])
    assert (by_steps.method.local.steps, by_steps.method.local.lr) == (7, 0.05)
    by_epochs = load_config("fedet/laptop", ["method.name=feddf", "method.local.epochs=2"])
    assert (by_epochs.method.local.steps, by_epochs.method.local.epochs) == (None, 2)
    kept = load_config({"method": {"name": "fedet"}}, ["method.name=feddf"]).method.local
    assert kept == methods.FedET().local
    assert kept.steps == 30


def test_what_somebody_decided_stays_and_is_refused_with_the_reason():
    for setting, why in (
        ("data.client_test=0.0", "set data.client_test"),
        ("public.source=none", "needs public data"),
    ):
        small = [s for s in SMALL if not (s.startswith("public.") and setting == "public.source=none")]
        config = load_config(RECIPE, ["method.name=mnfl", setting, *small])
        with pytest.raises(ConfigError, match=why):
            check_start(config.method, scenario_of(config), config.federation)
    config = load_config({"method": {"name": "local"}, "data": {"client_test": 0.0}})
    assert config.data.client_test == 0.0
    config = load_config(RECIPE, ["method.name=fedeed", "method.K=9"])
    with pytest.raises(ConfigError, match=r"method\.K = 9: only \d clients"):
        check_start(config.method, scenario_of(config), config.federation)


def test_a_recipe_without_public_samples_gets_some_for_a_method_that_needs_them():
    config = load_config("heterofl/laptop", ["method.name=feddf"])
    assert config.public.source == "held-out"
    assert any(note.startswith('public.source = "held-out" is set for feddf') for note in config.notes)


def test_few_clients_make_fewer_groups():
    config = load_config(RECIPE, ["method.name=fedeed", *SMALL, "partition.clients=7", "federation.fraction=1.0"])
    assert config.method.K == 2  # of 7 clients with three architectures 3, 2 and 2
    check_start(config.method, scenario_of(config), config.federation)


@pytest.mark.parametrize(
    ("clients", "server"),
    [(["lenet5"], "fedet-cnn"), (["resnet8", "vgg9"], "vgg11"), (["fedet-cnn"], "vgg9"), (["text-bag"], "lstm")],
)
def test_the_server_gets_a_model_larger_than_the_clients(clients, server):
    config = load_config({"method": {"name": "fusionlarge"}, "models": {"clients": clients}})
    assert config.models.server == server


def test_norm_layers_follow_the_method():
    assert load_config(RECIPE, ["method.name=fedma"]).models.norm == "none"
    assert load_config(RECIPE, ["method.name=pfedhn"]).models.norm == "group"
    assert load_config("toy", ["method.name=pfedhn"]).models.norm == "batch"  # neither mlp nor lenet5 has any


def test_it_is_the_same_in_a_sweep(tmp_path):
    given = {
        "base": RECIPE,
        "method": {"fusion": {"steps": 5}},
        "sweep": {"seeds": [0, 1], "grid": {"method.name": ["feddf", "fedet", "mnfl", "fedavg"]}},
    }
    planned = {run.name: run.config for run in plan(given, tmp_path, "s", SMALL)}
    assert planned["feddf/s0"].method.fusion.steps == 5
    assert planned["fedet/s1"].method.fusion == methods.FedET().fusion
    assert planned["mnfl/s0"].data.client_test == 0.2
    assert planned["feddf/s0"].data.client_test == 0.0
    assert planned["fedavg/s0"].method.local.epochs == 3
    said = notes(plan(given, tmp_path, "s", SMALL))
    assert len(said) == len(set(said))
    assert sum("data.client_test = 0.2 is set for mnfl" in note for note in said) == 1  # not once for each seed
    assert FederationConfig(fraction=0.4) == planned["fedet/s0"].federation


def test_one_architecture_needs_no_common_head():
    assert load_config({"method": {"name": "fedgen"}}).models.head == "plain"
    several = {"method": {"name": "fedgen"}, "models": {"clients": ["mlp", "lenet5"]}}
    assert load_config(several).models.head == "shared"
