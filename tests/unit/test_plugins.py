"""Names, entry points and paths; and that a path is code."""

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import solera
from own_code import TABLES, imports, write_own
from solera.core.errors import ConfigError, DataError
from solera.core.plugins import (
    Registry,
    anchored,
    architectures,
    code_allowed,
    is_path,
    label,
    paths_in,
    sha256_of,
    short,
)
from solera.core.plugins import load as load_path
from solera.core.settings import NonNegative, settings
from solera.data import SOURCES, load, register_data
from solera.engines import ENGINES, EngineConfig, InProcess, engine_info, engine_named, register_engine
from solera.method import METHODS, Method, find_method, name_of, register
from solera.methods import FedAvg
from solera.models import MODELS, build, model_info, register_model
from solera.models.factory import ModelsConfig
from solera.runs.config import load_config, to_toml
from solera.scenario.scenario import Scenario
from solera.testing import check_engine, check_method, small, toy


@pytest.fixture(autouse=True)
def forget():
    """What a test registers is not there for other tests."""
    registries = (METHODS, MODELS, SOURCES, ENGINES)
    before = [dict(r) for r in registries]
    yield
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A configuration with everything of one's own in a file beside it."""
    return write_own(tmp_path / "own")


# ---- what is a path ---------------------------------------------------------------------------------


def test_what_is_a_path():
    for path in ("mypkg.fed:Mine", "own.py:Mine", "/a b/own.py:make_small", "../x/own.py:f", "nets:net"):
        assert is_path(path), path
    for name in (
        "fedavg",
        "hf:bert",
        "hf:org/bert-base",
        "own.py",
        "owner/name",
        "a:b:c",
        "a b:c",
        ":x",
        "x:",
        3,
        None,
    ):
        assert not is_path(name), name


def test_what_paths_are_called():
    assert (label("/home/me/own.py:Mine"), label("mypkg.fed:Mine"), label("fedavg")) == (
        "own.py:Mine",
        "mypkg.fed:Mine",
        "fedavg",
    )
    assert (short("/home/me/own.py:Mine"), short("mypkg.fed:Mine"), short("fedavg")) == ("Mine", "Mine", "fedavg")
    models = ["a.py:Net", "lenet5", "b.py:net", "c.py:lenet5", "a.py:Net", "d.py:_net"]
    assert architectures(models) == {
        "lenet5": "lenet5",
        "net": "a.py:Net",
        "net-2": "b.py:net",
        "lenet5-2": "c.py:lenet5",
        "net-3": "d.py:_net",
    }


def test_files_are_looked_for_beside_the_toml(tmp_path):
    tables = {"method": {"name": "own.py:Mine"}, "models": {"clients": ["mlp", "x/own.py:Net", "pkg:Net"]}, "run": {}}
    whole = anchored(tables, tmp_path)
    assert whole["method"]["name"] == f"{tmp_path}/own.py:Mine"
    assert whole["models"]["clients"] == ["mlp", f"{tmp_path}/x/own.py:Net", "pkg:Net"]
    assert tables["method"]["name"] == "own.py:Mine"
    assert paths_in(whole) == {
        f"{tmp_path}/own.py:Mine": "method.name",
        f"{tmp_path}/x/own.py:Net": "models.clients",
        "pkg:Net": "models.clients",
    }
    assert paths_in({"method": 3, "models": {"clients": 4}, "data": {}}) == {}


# ---- a path is code ---------------------------------------------------------------------------------


def test_code_is_refused_unless_it_is_allowed(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    everything = [lambda: load_config(own), lambda: load_path("os:getcwd", "x")]
    everything += [lambda kind=kind: kind("own.py:Mine") for kind in (find_method, model_info, load, engine_named)]
    for key in ("method", "models", "data", "engine"):
        tables = {"method": {"name": "fedavg"}, "models": {}, key: TABLES[key]}
        everything.append(lambda tables=tables: load_config(tables))
    for refused in everything:
        with pytest.raises(ConfigError, match=r"names code\. Only commands that run something .* import code"):
            refused()
    assert imports(own.parent) == 0


def test_everything_of_ones_own_from_a_file_beside_the_toml(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not where the file is
    with code_allowed(tmp_path):
        config = load_config(own)
        assert load_config(own) == config
    assert imports(own.parent) == 1
    assert (type(config.method).__name__, config.method.extra, name_of(config.method)) == ("Mine", 3, "own.py:Mine")
    assert (type(config.engine).__name__, config.engine.greeting) == ("Counting", "hello")
    scenario = Scenario(config.data, config.models, config.partition, config.public, seed=0, workers=1)
    assert scenario.server.architectures == ["make_small", "wide"]
    assert (scenario.dataset.name, len(scenario.dataset.train)) == ("own.py:points", 180)
    text = to_toml(config)
    assert f'name = "{own.parent}/own.py:Mine"' in text
    with code_allowed("/"):  # it means the same from anywhere
        assert load_config(solera.runs.config.tomllib.loads(text)) == config
    assert len(sha256_of(f"{own.parent}/own.py:Mine") or "") == 64


def test_a_path_to_a_module(own, monkeypatch):
    monkeypatch.syspath_prepend(own.parent)
    with code_allowed("/"):
        config = load_config({"method": {"name": "own:Mine"}, "models": {"clients": ["own:Wide", "lenet5"]}})
    assert config.models.clients == ["own:Wide", "lenet5"]
    assert name_of(config.method) == "own:Mine"
    assert sys.modules.pop("own").Mine is type(config.method)


def test_what_a_path_lacks_is_named(own):
    with code_allowed(own.parent):
        for path, said in (
            ("own.py:Mina", r"method\.name = 'own\.py:Mina': .*own\.py has no 'Mina'; did you mean 'Mine'\?"),
            ("other.py:Mine", r"other\.py: No such file"),
            ("nowhere.at.all:Mine", "there is no module 'nowhere': is it installed"),
            ("own:Mine", r"no module 'own': is it installed\? For the file beside the TOML, write 'own\.py:\.\.\.'"),
            ("own.py:NOTHING", "3 does not derive from solera.method.Method"),
            ("own.py:make_small", "'make_small' does not derive from solera.method.Method"),
            ("own.py", "a path to code is 'package.module:attribute'"),
        ):
            with pytest.raises(ConfigError, match=said):
                find_method(path)
        with pytest.raises(ConfigError, match="builds a model, got a int"):
            model_info("own.py:NOTHING", "models.clients")
        with pytest.raises(ConfigError, match=r"expected a function that returns a solera\.data\.Dataset, not a int"):
            load("own.py:NOTHING")
        with pytest.raises(ConfigError, match=r"engine '.*own\.py:Mine' \(Mine\) lacks 'workers'"):
            engine_named("own.py:Mine")
        (own.parent / "broken.py").write_text("import own")
        with pytest.raises(
            ConfigError, match=r"no module 'own'.* cannot import each other: each is found only by its path"
        ):
            find_method("broken.py:x")
        (own.parent / "wrong.py").write_text("1 / 0")
        with pytest.raises(ConfigError, match=r"wrong\.py:x' cannot be imported: ZeroDivisionError"):
            find_method("wrong.py:x")


def test_no_bytecode_is_run_or_left(own):
    with code_allowed(own.parent):
        find_method("own.py:Mine")
    assert not (own.parent / "__pycache__").exists()


def test_a_name_wins_over_a_path_and_a_path_cannot_be_registered():
    for registry in (METHODS, MODELS, SOURCES, ENGINES):
        with pytest.raises(ConfigError, match="has the form of a path"):
            registry.add("own.py:Mine", next(iter(registry.values())))
        with pytest.raises(ConfigError, match="has the form of a path"):
            registry.add("hf:mine", next(iter(registry.values())))


def test_what_comes_with_the_library_keeps_its_name():
    with code_allowed("/"):
        assert find_method("solera.methods:FedAvg") is FedAvg
    assert name_of(FedAvg()) == "fedavg"
    for decorate in (register("fedavg"), register_engine("threads"), register_data("mnist"), register_model("mlp")):
        with pytest.raises(ConfigError, match="is taken by solera"):
            decorate(type("Own", (FedAvg, EngineConfig), {"__module__": "mine"}))


def test_a_registered_class_is_written_down_by_its_path(tmp_path):
    """A new process could not find the name: nothing would import the file that registers it."""
    (tmp_path / "named.py").write_text(
        "import solera\nfrom solera.methods import FedAvg\n"
        "@solera.method.register('by-decorator')\n@solera.core.settings.settings\nclass Mine(FedAvg):\n    pass\n"
        "@solera.models.register_model('own-text', kind='text')\ndef words(classes): ...\n".replace(
            "import solera\n", "import solera\nimport solera.core.settings\n"
        )
    )
    with code_allowed(tmp_path):
        config = load_config({"method": {"name": "named.py:Mine"}})
        assert model_info("named.py:words").kind == "text"
    assert METHODS["by-decorator"] is type(config.method)
    assert f"{tmp_path}/named.py:Mine" in to_toml(config)


# ---- entry points -----------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with one plug-in of each kind, and one that is broken."""
    (tmp_path / "pluggy_pkg.py").write_text(write_own(tmp_path / "own").with_name("own.py").read_text())
    info = tmp_path / "pluggy_pkg-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pluggy-pkg\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[solera.methods]\npkg-method = pluggy_pkg:Mine\npkg-broken = pluggy_pkg:nothing\n"
        "[solera.models]\npkg-net = pluggy_pkg:Wide\n"
        "[solera.datasets]\npkg-points = pluggy_pkg:points\n"
        "[solera.engines]\npkg-engine = pluggy_pkg:Counting\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("pluggy_pkg", None)


def test_entry_points_are_found_by_name_without_permission(installed, caplog):
    config = load_config(
        {
            "method": {"name": "pkg-method", "extra": 2},
            "models": {"clients": ["pkg-net", "lenet5"]},
            "data": {"name": "pkg-points"},
            "engine": {"name": "pkg-engine"},
        }
    )
    assert (name_of(config.method), config.method.extra) == ("pkg-method", 2)
    assert len(load("pkg-points").train) == 180
    assert type(config.engine).__name__ == "Counting"
    assert load_config(solera.runs.config.tomllib.loads(to_toml(config))) == config
    with pytest.raises(ConfigError, match="did you mean 'pkg-method'"):
        find_method("pkg-metod")
    with pytest.raises(ConfigError, match="'pkg-broken' of the package 'pluggy-pkg' cannot be used: AttributeError"):
        find_method("pkg-broken")
    METHODS.load_entry_points()  # as `solera ls` does: one that is broken hides no other
    assert "'pkg-broken' of the package" in caplog.text


# ---- one's own by decorator -------------------------------------------------------------------------


def test_a_data_set_by_decorator(tmp_path):
    asked = []

    @register_data("mine", title="Mine")
    def mine(path, seed, image_size=None):
        asked.append((path, seed))
        x = torch.arange(120.0).reshape(40, 3)
        return solera.from_tensors(
            (x, torch.arange(40) % 2), (x, torch.arange(40) % 2), users=[str(i) for i in range(40)]
        )

    data = load("mine", tmp_path, train_size=10, test_size=6, seed=3)
    assert asked == [(tmp_path, 3)]
    assert (data.name, len(data.train), len(data.test)) == ("mine", 10, 6)
    assert data.train.labels.sum() == 5
    assert len(data.users) == 10
    assert SOURCES["mine"].title == "Mine"
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        load("mime")

    @register_data("takes-sizes")
    def takes_sizes(train_size):
        assert train_size == 4
        return mine(None, 0)

    assert len(load("takes-sizes", train_size=4).train) == 40
    with pytest.raises(ConfigError, match=r"data\.path = 'x': the loader of 'takes-sizes' takes no path"):
        load("takes-sizes", "x")
    register_data("wrong")(lambda: [1, 2])
    with pytest.raises(DataError, match="'wrong': its loader returns a list; expected a Dataset"):
        load("wrong")


def test_models_by_path_from_python(own):
    data = toy().dataset
    with code_allowed(own.parent):
        scenario = Scenario(
            data, ModelsConfig(clients=["own.py:Wide", "mlp", "own.py:Wide"], server="own.py:make_small")
        )
        mixed = Scenario(data, {"mine": "own.py:Wide", "other": lambda: nn.Linear(8, 3)})
    assert (scenario.server.architectures, scenario.server.large) == (["mlp", "wide"], "make_small")
    assert scenario.roster.architecture_of[:3].tolist() == [0, 1, 0]
    assert type(mixed.server.model("mine", mixed.server.init("mine"))).__name__ == "Wide"
    assert build(f"{own.parent}/own.py:Wide", 3, (8,), width=2).net[0].out_features == 2


# ---- engines ----------------------------------------------------------------------------------------


class Counter(InProcess):
    calls = 0

    def start(self, calls):
        type(self).calls += len(calls)
        return super().start(calls)


@settings
class Counting:
    """Counts its calls.

    And that is all."""

    workers: int = 1
    threads: int = 1

    def open(self, host, states):
        return Counter(host, states)


def test_an_engine_of_ones_own(tmp_path):
    check_engine(Counting().open, tmp_path / "check")
    register_engine("counting")(Counting)
    rounds = solera.RunConfig(rounds=1)
    digests = set()
    for i, engine in enumerate(
        (None, "inprocess", EngineConfig("inprocess"), "counting", Counting, Counting(workers=2))
    ):
        Counter.calls = 0
        digests.add(solera.simulate(toy(), small(FedAvg()), tmp_path / str(i), rounds, engine=engine).digest)
        assert bool(Counter.calls) == (i > 2), engine
    assert len(digests) == 1
    config = load_config({"method": {"name": "fedavg"}, "engine": {"name": "counting", "workers": 3}})
    assert config.engine == Counting(workers=3)
    assert engine_info("counting").title == "Counts its calls."
    assert load_config(solera.runs.config.tomllib.loads(to_toml(config))) == config


def test_what_is_no_engine_is_refused(tmp_path):
    for engine, said in (
        ("proceses", r"engine\.name = 'proceses' is not known; did you mean 'processes'"),
        (InProcess, "InProcess must be a dataclass: its fields are the engine's settings"),
    ):
        with pytest.raises((ConfigError, TypeError), match=said):
            solera.simulate(toy(), FedAvg(), tmp_path, engine=engine)
    with pytest.raises(TypeError, match="lacks 'open'"):
        register_engine("x")(settings(type("Half", (), {"workers": 1, "threads": 1})))
    register_engine("counting")(Counting)
    with pytest.raises(
        ConfigError, match=r"engine\.wokers = 3: there is no such setting; did you mean 'engine\.workers'"
    ):
        load_config({"method": {"name": "fedavg"}, "engine": {"name": "counting", "wokers": 3}})
    with pytest.raises(ConfigError, match=r"engine\.workers = \"many\": expected an integer"):
        load_config({"method": {"name": "fedavg"}, "engine": {"name": "counting", "workers": "many"}})


def test_another_engine_by_an_override_drops_what_it_does_not_have(own):
    with code_allowed(own.parent):
        config = load_config(own, ["engine.name=threads", "engine.workers=2"])
    assert config.engine == EngineConfig("threads", 2)
    assert any("engine.greeting did not carry over" in note for note in config.notes)


def test_a_registry_for_anything():
    registry: Registry[int] = Registry("number", "solera.nothing", lambda thing, name: len(thing()), {"zero": 0})
    registry.register("three")(lambda: "abc")
    assert (registry.find("three"), registry.names()) == (3, ["zero", "three"])
    with pytest.raises(ConfigError, match=r"number 'tree' is not known; did you mean 'three'\?"):
        registry.find("tree")
    with pytest.raises(ConfigError, match=r"key = 'qq' is not known; known names: three, zero"):
        registry.find("qq", "key")


def test_a_loader_keeps_its_own_defaults():
    seen = []

    @register_data("has-defaults")
    def has_defaults(train_size=40, test_size=None, *, seed):
        seen.append((train_size, test_size, seed))
        x = torch.zeros(train_size + 10, 2)
        return solera.from_tensors((x[10:], torch.arange(train_size) % 2), (x[:10], torch.arange(10) % 2))

    try:
        assert len(load("has-defaults").train) == 40
        assert len(load("has-defaults", train_size=20).train) == 20
        assert [s[:2] for s in seen] == [(40, None), (20, None)]
    finally:
        del SOURCES["has-defaults"]


@dataclasses.dataclass(frozen=True)
class Derived(solera.methods.FedProx):
    """The same method, to be told from it by its name alone."""


def test_a_derived_method_keeps_the_settings_of_the_first():
    base = {"method": {"name": "fedprox", "mu": 0.5, "local": {"epochs": 3}}}
    register("derived-prox")(Derived)
    try:
        config = load_config(base, ["method.name=derived-prox"])
        assert (type(config.method), config.method.mu, config.method.local.epochs) == (Derived, 0.5, 3)
        assert load_config(base, ["method.name=fedavgm"]).method.local.epochs == 3
    finally:
        del METHODS["derived-prox"]


def test_a_method_need_not_be_registered_to_be_checked(tmp_path):
    check_method(Derived(), tmp_path, engines=())
    with pytest.raises(TypeError, match=r"does not derive from solera\.method\.Method"):
        check_method(3, tmp_path)

    @dataclasses.dataclass(frozen=True)
    class Plain(Method):
        mu: NonNegative = 0.1

    Plain.__abstractmethods__ = frozenset()
    with pytest.raises(ConfigError, match=r"^Plain\.mu = -1: expected a number of at least 0$"):
        Plain(mu=-1)


OWN = """
from dataclasses import dataclass, field

from solera.method import Client, settings, task
from solera.methods import FedAvg, FedDF
from solera.methods.steps.teaching import Teaching


@task("twice.noted")
def noted(client: Client) -> None: ...


@settings
class Largest(Teaching):
    kind: str = field(default="twice-largest", init=False)


@dataclass(frozen=True)
class MyFedDF(FedDF):
    pass
"""


TWICE = """
import tomllib
import twice
from solera.core.plugins import code_allowed, load
from solera.methods.steps.teaching import Teaching
from solera.runs.config import load_config, to_toml

with code_allowed("."):
    assert load("twice.py:noted", "x") is twice.noted
    assert Teaching.kinds()["twice-largest"] is load("twice.py:Largest", "x")
    text = to_toml(load_config({"method": {"name": "twice.py:MyFedDF", "teaching": "twice-largest"}}))
    assert "/twice.py:MyFedDF" in text  # so the run can be resumed
    assert load_config(tomllib.loads(text)).method.teaching.kind == "twice-largest"
    load("other.py:noted", "x")
"""


def test_one_file_by_name_and_by_path(tmp_path):
    """Its tasks and kinds are the same; another file's are refused, with both places."""
    for name in ("twice", "other"):
        (tmp_path / f"{name}.py").write_text(OWN)
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]  # the others' classes stay in a process
    said = r"'twice\.noted' is already twice\.noted \(.*twice\.py\): choose .* for .*noted \(.*other\.py\)"
    assert re.search(said, last), done.stderr
