"""What a run would ignore, and numbers that no run can mean, are refused: all of a file at once, in one line."""

import tomllib
from typing import Any

import pytest
import torch

from solera.cli.info_commands import SELF_TEST
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig
from solera.core.settings import SettingsError
from solera.data import load
from solera.engines.engine_settings import FlowerConfig
from solera.method import find_method
from solera.runs import loop
from solera.runs.callbacks import Callback
from solera.runs.config import load_config, recipe_names, to_toml
from solera.runs.loop import scenario_of, simulate
from solera.runs.words import flat
from solera.testing import small, toy_for

TINY = SELF_TEST | {"engine": {"name": "inprocess"}}
HUGE = "99999999999999999999999"


def refused(*overrides: str, tables: dict[str, Any] = TINY) -> list[str]:
    """What is wrong with a configuration."""
    with pytest.raises(SettingsError) as caught:
        load_config(tables, overrides)
    assert "\n" not in str(caught.value)
    return caught.value.problems


# ---- all at once ------------------------------------------------------------------------------------


def test_everything_that_is_wrong_with_a_file_is_said_at_once():
    tables = {
        "nonsense": {"a": 1},
        "run": {"rounds": -1, "seeds": 3},
        "data": {"client_test": 0.9999, "colour": 3, "length": 9, "split": [0.5]},
        "partition": {"kind": "iid", "clients": 4, "alpha": 1e-300, "min_per_class": -1},
        "models": {"clients": ["mlp"], "server": "vgg9", "options": {"lenet5": {"zzz": 1}}},
        "public": {"source": "held-out", "name": "x", "classes": [0, 0]},
        "federation": {"max_empty_rounds": int(HUGE)},
        "track": {"mlflow": "ftp://x"},
        "engine": {"workers": -1},
        "method": {
            "name": "feddf",
            "screen": {"kind": "robust", "max_byzantine": 100},
            "foo": 1,
            "fusion": {"steps": int(HUGE), "lr": -1},
        },
    }
    wanted = [
        "[nonsense]", "run.rounds", "run.seeds", "data.client_test", "data.colour", "data.length", "data.split",
        "partition.alpha", "partition.min_per_class", "models.server", "[models.options.lenet5]",
        "public.name", "public.classes", "federation.max_empty_rounds", "track.mlflow", "engine.workers",
        "method.screen.max_byzantine", "method.foo", "method.fusion.steps", "method.fusion.lr",
    ]  # fmt: skip
    found = refused(tables=tables)
    for key in wanted:
        assert [p for p in found if p.startswith((f"{key} ", f"{key}:"))], key
    assert len(found) == len(wanted), found


def test_what_follows_from_a_wrong_choice_is_not_said():
    """Of an unknown kind nobody knows which settings are read."""
    found = refused("partition.kind=diriclet", "partition.classes_per_client=3", "public.source=x", "public.name=y")
    assert [p.partition(" ")[0] for p in found] == ["partition.kind", "public.source"]


# ---- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("federation.max_empty_rounds", ()),
        ("engine.per_device", ()),
        ("partition.classes_per_client", ("partition.kind=classes",)),
        ("method.screen.max_byzantine", ("method.screen.kind=robust",)),
        ("method.teaching.samples", ("method.teaching.kind=swag",)),
        ("method.K", ("method.name=framework",)),
        ("method.tune_epochs", ("method.name=fedavgft",)),
        ("run.seed", ()),
        ("models.options.mlp.hidden", ()),
    ],
)
def test_an_integer_that_no_run_can_mean_is_refused(key: str, more: tuple[str, ...]):
    known = flat(tomllib.loads(to_toml(load_config(TINY, more))))
    assert key in known or key == "models.options.mlp.hidden", "there is such a setting"
    limit = 2**63 - 1 if key == "run.seed" else 2**31 - 1
    for value in (HUGE, str(limit + 1)):
        found = refused(*more, f"{key}={value}")
        assert any(f"= {value}: " in p and f"at most {limit:,}" in p for p in found), found


def test_the_limits_themselves_are_allowed():
    assert load_config(TINY, ["run.seed=9223372036854775807"]).run.seed == 2**63 - 1
    assert FederationConfig(max_empty_rounds=2**31 - 1).max_empty_rounds == 2**31 - 1
    with pytest.raises(ConfigError, match="at most 2,147,483,647"):
        FederationConfig(max_empty_rounds=2**31)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("partition.alpha=1e-300", "a number of at least 1e-09"),
        ("data.client_test=0.9999", "of at most 0.9"),
        ("data.validation=0.95", "of at most 0.9"),
        ("public.classes=[0, 0]", "each once"),
        ("public.classes=[-1]", "from 0"),
    ],
)
def test_absurd_values_are_refused(setting: str, says: str):
    key = setting.partition("=")[0]
    (found,) = refused(setting, "partition.kind=dirichlet")
    assert found.startswith(f"{key} = ")
    assert says in found


def test_more_byzantine_clients_than_a_round_has_are_refused():
    four = ["partition.clients=8", "federation.fraction=0.5", "method.screen.kind=robust"]
    config = load_config(TINY, [*four, "method.screen.max_byzantine=3"])
    assert config.method.screen.max_byzantine == 3  # type: ignore[attr-defined]
    (found,) = refused(*four, "method.screen.max_byzantine=4")
    assert found == "method.screen.max_byzantine = 4: a round has 4 of 8 clients; choose less"


def test_a_fraction_that_leaves_no_public_sample_is_refused_before_the_run_has_a_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"public.fraction = 1e-06: of the public samples not one is left"):
        loop.run(load_config(TINY, ["public.fraction=1e-6"]), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert len(scenario_of(load_config(TINY, ["public.fraction=0.025"])).public) == 1


def test_constants_for_other_channels_are_a_mistake_of_the_configuration():
    with pytest.raises(ConfigError, match=r"data.mean = \[0.5, 0.5\] .* has 1 channels") as caught:
        scenario_of(load_config(TINY, ["data.mean=[0.5, 0.5]", "data.std=[0.5, 0.5]"]))
    assert caught.value.exit_code == 2
    assert load("fashion-mnist", train_size=20, test_size=10).normalised([0.5], [0.5]).mean == (0.5,)


def test_an_engine_that_cannot_run_here_leaves_no_directory(tmp_path):
    config = load_config(TINY, ["engine.name=flower"])
    with pytest.raises(ConfigError, match="solera deploy init"):
        loop.run(config, tmp_path / "r")
    method = small(find_method("fedavg")())
    with pytest.raises(ConfigError, match="solera deploy init"):
        simulate(toy_for(method), method, tmp_path / "r", engine=FlowerConfig())
    assert not (tmp_path / "r").exists()


# ---- settings that are not read ---------------------------------------------------------------------

UNREAD = {
    'data.classes=["a", "b"]': "of [sites]",
    "data.shape=[3]": "of [sites]",
    "data.text_column=x": "of texts",
    "data.pair_column=x": "of texts",
    "data.length=9": "of texts",
    "public.name=cifar100": 'public.source = "dataset"',
    "public.path=/tmp": 'public.source = "dataset" or "generator"',
    "public.noise=gauss": 'public.source = "noise"',
    "models.server=vgg9": "only with a method that trains such a model",
    "models.options={lenet5={hidden=-1}}": "[models.options.lenet5] is not read",
    "models.options={lenet5={zzz=1}}": "[models.options.lenet5] is not read",
    "partition.alpha=3": 'partition.kind = "dirichlet" or "quantity"',
    "partition.variant=equal": 'partition.kind = "dirichlet"',
    "partition.classes_per_client=3": 'partition.kind = "classes"',
    "track.mlflow_experiment=mine": "of track.mlflow",
}


@pytest.mark.parametrize("setting", UNREAD)
def test_a_setting_that_is_not_read_is_refused(setting: str):
    (found,) = refused(setting)
    assert found.startswith(f"{setting.partition('=')[0]} = ") or found.startswith("[models.options.")
    assert UNREAD[setting] in found
    assert found.endswith("leave it out")


@pytest.mark.parametrize(
    "settings",
    [
        ("data.text_column=x", 'models.clients=["lstm"]'),
        ("data.length=9", 'models.clients=["lstm"]'),
        ("public.name=kmnist", "public.source=dataset"),
        ("public.noise=gauss", "public.source=noise", "public.size=10"),
        ("models.server=vgg9", "method.name=fedet"),
        ("models.server=vgg9", "method.name=dsfl"),
        ("models.server=vgg9", "method.name=centralised"),
        ('models.options={small={model="mlp"}}', 'models.clients=["small"]'),
        ("partition.alpha=3", "partition.kind=quantity"),
        ("partition.variant=equal", "partition.kind=dirichlet"),
        ("public.size=40", "public.source=held-out"),
    ],
)
def test_where_it_is_read_it_is_taken(settings: tuple[str, ...]):
    config = load_config(TINY, settings)
    key, _, value = settings[0].partition("=")
    if "{" not in value:
        assert str(getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2])) in (value, f"{value}.0")


def test_what_an_override_decides_otherwise_is_left_out_with_a_note():
    tables = TINY | {
        "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.5},
        "models": {"clients": ["mlp"], "server": "vgg9", "options": {"mlp": {"hidden": [8]}}},
        "method": {"name": "fedet"},
    }
    config = load_config(tables, ["partition.kind=iid", "method.name=fedavg", 'models.clients=["tiny-cnn"]'])
    assert (config.partition.alpha, config.models.server, config.models.options) == (0.1, None, {})
    for key, decided in (
        ("partition.alpha", "partition.kind"),
        ("models.server", "method.name"),
        ("models.options.mlp", "models.clients"),
    ):
        assert f"{key} did not carry over: {decided} was changed" in config.notes
    with pytest.raises(ConfigError, match=r"models.server .* is not read"):  # said here: it is not left out
        load_config(tables, ["method.name=fedavg", "models.server=vgg9"])
    with pytest.raises(ConfigError, match=r"models.server .* is not read"):
        load_config(tables | {"method": {"name": "fedavg"}}, ["run.rounds=1"])


@pytest.mark.parametrize("recipe", recipe_names())
def test_no_recipe_has_a_setting_that_is_not_read(recipe: str):
    config = load_config(recipe)
    assert load_config(tomllib.loads(to_toml(config))) == config
    assert not [note for note in config.notes if "did not carry over" in note]


# ---- what changes what a method is ------------------------------------------------------------------


class Said(Callback):
    """Notes warnings, and when the first round begins."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        self.said.append(text)

    def begin(self, facts: Any, before: Any) -> None:
        self.said.append("begin")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fedmd", "FedMD leaves out its pretraining: the public samples have no labels"),
        ("fedgkt", "FedGKT shows the server the features and the label of every training sample"),
        ("centralised", "centralised trains on all clients' data in one place"),
        ("fedavg", ""),
    ],
)
def test_a_run_says_at_its_start_what_its_method_leaves_out_or_shows(name: str, says: str, tmp_path):
    method, heard = small(find_method(name)()), Said()
    scenario = toy_for(method)
    if name == "fedmd":
        assert scenario.server.public is not None
        scenario.server.public.labels = None
    simulate(scenario, method, tmp_path, callbacks=[heard])
    before = heard.said[: heard.said.index("begin")]
    assert [text for text in before if says and says in text] == before
    assert len(before) == bool(says)


def test_with_labels_fedmd_says_nothing():
    method = small(find_method("fedmd")())
    scenario = toy_for(method)
    assert scenario.server.public is not None
    scenario.server.public.labels = torch.zeros(len(scenario.server.public), dtype=torch.int64)
    assert list(method.remarks(scenario.server)) == []
