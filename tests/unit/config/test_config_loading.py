"""Reading configurations: defaults, overrides, files and recipes, and writing them back."""

import dataclasses
import re
import tomllib

import pytest

from solera.core.errors import ConfigError
from solera.data import PartitionConfig
from solera.method import METHODS, name_of
from solera.runs.config import Config, load_config, recipe_names, recipe_text, to_toml
from solera.runs.words import flat, show


def reload(config: Config) -> Config:
    return load_config(tomllib.loads(to_toml(config)))


def test_a_method_name_is_all_that_is_needed():
    config = load_config({"method": {"name": "fedavg"}})
    assert config.run.rounds == 10
    assert config.partition.clients == 20
    assert name_of(config.method) == "fedavg"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_survives_the_round_trip(name):
    config = load_config({"method": {"name": name}})
    assert reload(config) == config


def test_unusual_settings_survive_the_round_trip():
    config = load_config(
        {
            "run": {"seed": 2**62, "name": "a b.c"},
            "data": {"path": "somewhere", "train_size": 100, "client_test": 0.25},
            "public": {"source": "dataset", "name": "mnist", "classes": [1, 2], "size": 50, "per_round": 10},
            "models": {"clients": ["mlp", "mlp", "lenet5"]},
            "federation": {"deadline_s": 1.5, "sampling": "size", "replacement": True},
            "method": {"name": "feddf", "local": {"lr": 1e-7, "steps": 3}, "fusion": {"clip": "none"}},
            "engine": {"name": "inprocess", "threads": 2},
        }
    )
    assert reload(config) == config
    assert config.method.local.lr == 1e-7


def test_none_switches_off_what_has_a_default():
    config = load_config({"method": {"name": "feddf", "fusion": {"clip": "none", "patience": "none"}}})
    assert config.method.fusion.clip is None
    assert config.method.fusion.patience is None
    assert 'clip = "none"' in to_toml(config)
    assert reload(config) == config
    assert load_config({"method": {"name": "feddf"}}).method.fusion.clip == 5.0


def test_the_effective_configuration_has_every_setting():
    tables = tomllib.loads(to_toml(load_config({"method": {"name": "feddf"}})))
    assert list(tables) == ["run", "data", "partition", "public", "models", "federation", "method", "engine", "track"]
    assert tables["method"]["name"] == "feddf"
    assert tables["method"]["fusion"]["schedule"] == "cosine"
    assert tables["run"]["eval_every"] == 1


def test_part_of_a_nested_table_keeps_the_methods_own_defaults():
    plain = load_config({"method": {"name": "feddf"}}).method
    changed = load_config({"method": {"name": "feddf", "local": {"lr": 0.5}}}).method
    assert changed.local == dataclasses.replace(plain.local, lr=0.5)


def test_an_integer_serves_as_a_number():
    config = load_config({"partition": {"alpha": 1}, "method": {"name": "feddf"}})
    assert config.partition.alpha == 1.0
    assert isinstance(config.partition.alpha, float)


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(
        {"data": {"path": "here"}, "public": {"source": "generator", "path": "~/there"}, "method": {"name": "fedavg"}}
    )
    assert config.data.path == str(tmp_path / "here")
    assert config.public.path is not None
    assert config.public.path.startswith("/")
    assert "~" not in config.public.path


def test_the_source_is_not_changed():
    source = {"run": {"rounds": 2}, "method": {"name": "feddf", "local": {"lr": 0.5}}}
    load_config(source, ["run.rounds=3", "method.local.lr=0.1", "method.name=fedavg"])
    assert source == {"run": {"rounds": 2}, "method": {"name": "feddf", "local": {"lr": 0.5}}}


# ---- overrides --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ("run.rounds=3", "run", "rounds", 3),
        (" run.rounds = 3 ", "run", "rounds", 3),
        ("run.name=abc", "run", "name", "abc"),
        ('run.name="abc"', "run", "name", "abc"),
        ("run.name=", "run", "name", ""),
        ("partition.alpha=1", "partition", "alpha", 1.0),
        ("partition.alpha=1e-2", "partition", "alpha", 0.01),
        ('models.clients=["mlp", "lenet5"]', "models", "clients", ["mlp", "lenet5"]),
        ("models.server=none", "models", "server", None),
        ("public.labels=true", "public", "labels", True),
    ],
)
def test_overrides(override, table, key, value):
    assert getattr(getattr(load_config("toy", [override]), table), key) == value


def test_later_overrides_win_and_tables_can_be_given_whole():
    config = load_config("toy", ["run.rounds=3", "run.rounds=4", "method.local={lr=0.3}", "method.local.batch=7"])
    assert config.run.rounds == 4
    assert (config.method.local.lr, config.method.local.batch, config.method.local.epochs) == (0.3, 7, 2)


def test_a_line_break_does_not_smuggle_in_other_keys():
    with pytest.raises(ConfigError, match=r"run\.rounds"):
        load_config("toy", ["run.rounds=3\nseed=7"])


def test_another_method_does_not_hide_mistakes():
    source = {"method": {"name": "feddf", "fusin": {"steps": 3}}}
    with pytest.raises(ConfigError, match=r"method\.fusion"):
        load_config(source, ["method.name=fedavg"])
    with pytest.raises(ConfigError, match=r"\[method\.fusion\]"):
        load_config({"method": {"name": "feddf"}}, ["method.name=fedavg", "method.fusion.steps=3"])


@pytest.mark.parametrize("override", ["rounds", "", "=3", "run..rounds=3", "run.rounds", "ru n.rounds=3", "../x=1"])
def test_overrides_that_are_none(override):
    with pytest.raises(ConfigError, match="key=value"):
        load_config("toy", [override])


def test_an_override_cannot_turn_a_value_into_a_table():
    with pytest.raises(ConfigError, match=r"run\.seed is a value"):
        load_config("toy", ["run.seed.low=3"])


# ---- files and recipes ------------------------------------------------------------------------------


def test_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[run]\nrounds = 7\n[method]\nname = "fedavg"\n')
    assert load_config(path).run.rounds == 7
    assert load_config(str(path), ["run.rounds=8"]).run.rounds == 8


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml.*No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\nrounds = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML.*line 1"):
        load_config(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bad\.toml.*UTF-8"):
        load_config(bad)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config("a\0b.toml")


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        load_config("tpy")
    with pytest.raises(ConfigError, match="quickstart/feddf"):
        load_config("../no/such/thing")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name):
    config = load_config(name)
    assert reload(config) == config
    assert recipe_text(name).startswith("# ")


SET = re.compile(r"--set\s+(?:'([^']+)'|(\S+))")


@pytest.mark.parametrize("name", recipe_names())
def test_every_line_of_set_in_a_recipe_works(name):
    """The comments say which --set gives the other rows of a table."""
    for line in recipe_text(name).splitlines():
        if not line.startswith("#"):
            continue
        found = SET.findall(line)
        assert len(found) == line.count("--set"), "the setting is on the next line"
        overrides = [quoted or bare.strip("(),:;.") for quoted, bare in found]
        keys = [o.partition("=")[0] for o in overrides]
        together = [overrides] if len(set(keys)) == len(keys) else [[o] for o in overrides]  # or one or the other
        for chosen in together if overrides else []:
            settings = flat(tomllib.loads(to_toml(load_config(name, chosen))))
            for key, _, value in (o.partition("=") for o in chosen):
                now = settings.get(key, settings.get(f"{key}.kind", "none"))  # a slot's kind in short
                assert show(now) == show(_plain(value)), key


def _plain(value):
    try:
        return tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return value  # a text needs no quotes on the command line


def test_the_recipes_of_the_issue_are_there():
    wanted = {"toy", "quickstart/fedavg", "quickstart/feddf", "feddf/fig4-cifar10"}
    wanted |= {f"feddf/table{n}" for n in (1, 2, 3, 5, 6, 8)}
    assert wanted <= set(recipe_names())


def test_the_quickstart_compares_like_with_like():
    a, b = load_config("quickstart/fedavg"), load_config("quickstart/feddf")
    assert dataclasses.replace(a, method=None) == dataclasses.replace(b, method=None)
    assert a.method.local == b.method.local
    assert (b.partition.clients, b.partition.alpha, len(b.models.clients)) == (20, 0.1, 3)


def test_a_table_that_may_be_absent_is_switched_off_by_false():
    tables = {"method": {"name": "fedavg"}, "models": {"lora": {"rank": 4}}}
    assert load_config(tables).models.lora.rank == 4
    for off in ("false", "none"):
        config = load_config(tables, [f"models.lora={off}"])
        assert config.models.lora is None
        assert load_config(tomllib.loads(to_toml(config))) == config


def test_a_table_is_built_and_checked_once(monkeypatch):
    checks, problems = [], PartitionConfig.problems
    monkeypatch.setattr(PartitionConfig, "problems", lambda self: [checks.append(self), *problems(self)][1:])
    found = load_config({"method": {"name": "fedet"}, "partition": {"clients": 3}}, ["partition.alpha=0.5"])
    assert found.models.server, "it was supplied: this builds no table but its own again"
    assert checks == [found.partition]
