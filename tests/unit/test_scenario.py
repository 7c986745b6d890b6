"""Scenarios: no sample is in two places, clients have names, samples from elsewhere, models with their own habits."""

import ast
import csv
import dataclasses
import json
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import solera
from run_directories import lines_of
from solera.core.errors import ConfigError, DataError
from solera.core.federation import FederationConfig
from solera.core.task import Data
from solera.data import PartitionConfig, PublicConfig, from_folder, from_tensors, load
from solera.data.partition import Partition
from solera.engines import default_workers
from solera.methods import FedAvg, FedAvgFT, FedDF, FedMD
from solera.models.factory import ModelsConfig
from solera.place.placement import Placement
from solera.report.figures import report_data
from solera.report.loading import read_all
from solera.runs.config import EngineConfig, RunConfig, load_config, to_toml
from solera.runs.loop import scenario_of, simulate
from solera.scenario.scenario import Scenario
from solera.scenario.task_data import DataConfig
from solera.testing import small, toy
from solera.train.fitting import Local

ROWS = 120
KINDS = [
    {"kind": "iid"},
    {"kind": "quantity", "alpha": 1.0},
    {"kind": "classes"},
    {"kind": "dirichlet", "alpha": 1.0, "variant": "block"},
    {"kind": "dirichlet", "alpha": 1.0, "variant": "class"},
    {"kind": "dirichlet", "alpha": 1.0, "variant": "client"},
    {"kind": "user"},
    {"kind": "user", "min_size": 9},
]


def vectors(n=ROWS, **options):
    """Every sample is told from every other one by its first number: its row."""
    x = torch.cat([torch.arange(n)[:, None], torch.arange(n)[:, None] % 7], 1).float()
    y = torch.arange(n) % 3
    return from_tensors((x, y), (-1 - x[:9], y[:9]), classes=3, **options)


def texts(folder):
    for split, count in (("train", ROWS), ("test", 9)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["text", "label", "user"])
            out.writerows([f"{split} w{i}a w{i}b w{i}c", i % 3, f"Writer {i % 11}"] for i in range(count))
    return load("owner/texts", folder)


def pictures(folder):
    Image = pytest.importorskip("PIL.Image")
    for i in range(ROWS + 12):
        home = folder / "abc"[i % 3]
        home.mkdir(exist_ok=True)
        Image.fromarray(np.full((2, 2), 400 * i, np.uint16)).save(home / f"{i}.png")
    return from_folder(folder, test_size=12)


@pytest.fixture(scope="module")
def every_data(tmp_path_factory):
    """Vectors, texts and a folder of images, with a model for each, and the row of every prepared sample."""
    found = {
        "vectors": (vectors(users=[f"site {i % 11}" for i in range(ROWS)]), "mlp"),
        "texts": (texts(tmp_path_factory.mktemp("texts")), "text-bag"),
        "pictures": (pictures(tmp_path_factory.mktemp("pictures")), "mlp"),
    }
    return {name: (data, model, row_of(data)) for name, (data, model) in found.items()}


def row_of(data):
    prepared = data.prepare(data.train.inputs)
    known = {sample.numpy().tobytes(): i for i, sample in enumerate(prepared)}
    assert len(known) == len(data.train)  # no two are alike
    return known


def places(scenario, known):
    """The rows in each client's two sets, and in the server's two."""
    sets = {}
    for k in scenario.roster:
        client = scenario.client(k, 0, {})
        sets[k, "train"], sets[k, "test"] = client.train.inputs, client.test.inputs
    if scenario.validation is not None:
        sets["server", "validation"] = scenario.validation.inputs
    if scenario.public is not None:
        sets["server", "public"] = scenario.public[torch.arange(len(scenario.public))]
    return {where: [known[sample.numpy().tobytes()] for sample in inputs] for where, inputs in sets.items()}


def assert_disjoint(found):
    everywhere = [row for rows in found.values() for row in rows]
    assert len(everywhere) == len(set(everywhere)), "a sample is in two places"


def last(run):
    return lines_of(run)[-1]


def own_partition(draw, total):
    """Some of the rows, cut anywhere, for clients with or without names."""
    order = draw(st.permutations(range(total)))[: draw(st.integers(1, total))]
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=6)))
    clients = len(cuts) + 1
    names = tuple(f"site-{i}" for i in range(clients)) if draw(st.booleans()) else None
    return Partition(torch.tensor(order), torch.tensor([0, *cuts, len(order)]), names)


@settings(deadline=None, max_examples=250)
@given(draws=st.data())
def test_no_sample_is_in_two_places(every_data, draws):
    draw = draws.draw
    data, model, known = every_data[draw(st.sampled_from(sorted(every_data)))]
    if draw(st.booleans()):
        split = own_partition(draw, len(data.train))
    else:
        kind = draw(st.sampled_from([kind for kind in KINDS if data.users is not None or kind["kind"] != "user"]))
        split = PartitionConfig(clients=draw(st.integers(3, 6)), **kind)
    size = draw(st.sampled_from([None, 1, 17, 40]))
    public = PublicConfig(draw(st.sampled_from(["none", "held-out"])), size=size)
    validation, client_test = draw(st.sampled_from([0.0, 0.1, 0.3])), draw(st.sampled_from([0.0, 0.25]))
    seed = draw(st.integers(0, 2**20))
    kept = round(validation * len(data.train))
    wanted = kept
    if public.source == "held-out":
        wanted += (len(data.train) - kept) // 5 if size is None else size
    try:
        scenario = Scenario(
            data, [model], split, public, validation=validation, client_test=client_test, seed=seed, workers=1
        )
    except ConfigError as refusal:
        scenario, reason = None, str(refusal)
    if scenario is None:
        if isinstance(split, Partition):
            assert wanted > len(data.train) - len(split.order)
            assert "the partition gives row" in reason
        else:
            assert reason.startswith("partition.")
        return
    found = places(scenario, known)
    assert_disjoint(found)
    assert len(found.get(("server", "validation"), [])) == kept
    assert len(found.get(("server", "public"), [])) == wanted - kept
    rows = sum(map(len, found.values()))
    if isinstance(split, Partition):
        assert rows == wanted + len(split.order)
        for k, name in enumerate(scenario.roster):
            assert sorted(found[name, "train"] + found[name, "test"]) == split.indices(k).tolist()
    elif split.kind != "user":
        assert rows == len(data.train)
    assert [len(found[k, "train"]) for k in scenario.roster] == scenario.roster.sizes.tolist()
    assert [int(scenario.held(i).sum()) for i in range(len(scenario.roster))] == scenario.roster.sizes.tolist()


def test_public_samples_are_no_clients():
    data = vectors()
    scenario = Scenario(data, ["mlp"], PartitionConfig("iid", clients=4), PublicConfig(size=40))
    found = places(scenario, row_of(data))
    assert len(found["server", "public"]) == 40
    assert_disjoint(found)
    assert int(scenario.roster.sizes.sum()) == ROWS - 40
    assert len(scenario.server.all_train) == ROWS - 40


def test_validation_samples_are_no_clients():
    data = vectors()
    scenario = Scenario(data, ["mlp"], PartitionConfig("iid", clients=4), PublicConfig("none"), validation=0.25)
    found = places(scenario, row_of(data))
    assert len(found["server", "validation"]) == 30
    assert_disjoint(found)
    assert int(scenario.roster.sizes.sum()) == ROWS - 30
    assert len(scenario.server.all_train) == ROWS - 30


def test_a_partition_is_of_rows_of_the_whole_training_set():
    scenario = Scenario(vectors(), ["mlp"], PartitionConfig("iid", clients=4), PublicConfig(size=40), validation=0.1)
    for i, k in enumerate(scenario.roster):
        assert scenario.client(k, 0, {}).train.inputs[:, 0].long().tolist() == scenario.partition.indices(i).tolist()


def test_what_a_partition_of_ones_own_leaves_is_the_servers():
    data = vectors()
    mine = Partition.of({"a": range(0, 60), "b": range(60, 80)})
    scenario = Scenario(data, ["mlp"], mine, PublicConfig(size=30), validation=10 / ROWS)
    found = places(scenario, row_of(data))
    assert found["a", "train"] == list(range(60))
    assert sorted(found["server", "public"] + found["server", "validation"]) == list(range(80, 120))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"public": PublicConfig(size=40)},
            r"public data of 40 samples: the partition gives rows 0, 1, 2, 3, 4, \.\.\. \(100 in all\) of 120 to "
            r'clients and leaves 20, .*leave rows out .*public\.source = "none"',
        ),
        ({"public": None}, "public data of 24 samples: the partition gives rows 0, 1"),  # held-out is the default
        (
            {"public": PublicConfig("none"), "validation": 0.2},
            "validation data of 24 samples: the partition gives rows 0",
        ),
    ],
)
def test_a_sample_that_a_client_holds_is_not_held_out(options, message):
    mine = Partition(torch.arange(100).flip(0), torch.tensor([0, 50, 100]))
    with pytest.raises(ConfigError, match=message):
        Scenario(vectors(), ["mlp"], mine, **options)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 120], "partition: row 120 of the training set, which has rows 0 to 119"),
        ([0, -3, 5], "partition: row -3 of the training set"),
        ([7, 1, 7, 7, 9, 9], "partition: rows 7, 9 more than once"),
    ],
)
def test_rows_that_are_not_there_or_given_twice_are_refused_by_name(order, message):
    with pytest.raises(ConfigError, match=message):
        Scenario(
            vectors(), ["mlp"], Partition(torch.tensor(order), torch.tensor([0, 2, len(order)])), PublicConfig("none")
        )


# ---- names ------------------------------------------------------------------------------------------


SITES = ("Charit\u00e9 Berlin", "lyon", "St. Mary's")
CALLED = ["charite-berlin", "lyon", "st.-mary-s"]


def sites(n=ROWS, **options):
    data = vectors(n, users=[SITES[i % 3] for i in range(n)])
    options = {"partition": PartitionConfig(kind="user"), "public": PublicConfig("none"), **options}
    models = ModelsConfig(clients=["small", "large"], assign=options.pop("assign", "even"))
    return Scenario(data, models, modules={"small": lambda: nn.Linear(2, 3), "large": lambda: mlp()}, **options)


def mlp():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))


def test_the_users_name_is_the_clients():
    for seed in (0, 1):
        scenario = sites(seed=seed)
        assert list(scenario.roster) == CALLED
        for i, k in enumerate(CALLED):
            assert scenario.client(k, 0, {}).train.inputs[:, 0].long().tolist() == list(range(i, ROWS, 3))


def test_the_users_name_is_the_clients_even_if_others_rows_are_held_out():
    scenario = sites(public=PublicConfig(size=30), validation=0.1)
    assert list(scenario.roster) == CALLED
    for i, k in enumerate(CALLED):
        assert set(scenario.client(k, 0, {}).train.inputs[:, 0].long().remainder(3).tolist()) == {i}


def test_a_site_has_the_model_it_is_given():
    scenario = sites(assign={"lyon": "large", "charite-berlin": "small", "st.-mary-s": "small"})
    assert {k: info.architecture for k, info in scenario.roster.items()} == {
        "charite-berlin": "small", "lyon": "large", "st.-mary-s": "small",
    }  # fmt: skip
    assert sites(assign=dict.fromkeys(CALLED, "large")).server.architectures == ["large"]


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        ({"lyon": "small"}, "assign: no model for charite-berlin, st.-mary-s; name one of small, large"),
        (dict.fromkeys(CALLED, "huge"), "assign: charite-berlin: 'huge', .*: no such model; there are small, large"),
        (
            dict.fromkeys([*CALLED, "paris"], "small"),
            "assign: no client is called paris; there are charite-berlin, lyon",
        ),
    ],
)
def test_a_wrong_assignment_is_refused_by_name(assign, message):
    with pytest.raises(ConfigError, match=message):
        sites(assign=assign)


def test_names_are_in_all_that_a_run_leaves(tmp_path):
    def broken():
        class Broken(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 3)

            def forward(self, x):
                if self.training:
                    raise RuntimeError("the scanner is off")
                return self.inner(x)

        return Broken()

    data = vectors(users=[SITES[i % 3] for i in range(ROWS)])
    assign = {"charite-berlin": "good", "lyon": "broken", "st.-mary-s": "good"}
    scenario = Scenario(
        data,
        ModelsConfig(clients=["good", "broken"], assign=assign),
        PartitionConfig(kind="user"),
        PublicConfig("none"),
        modules={"good": lambda: nn.Linear(2, 3), "broken": broken},
        client_test=0.2,
    )
    simulate(scenario, small(FedAvgFT()), tmp_path, RunConfig(rounds=1), engine=EngineConfig("inprocess"))
    line = last(tmp_path)
    assert {f["client"] for f in line["failures"]} == {"lyon"}
    assert line["personal"]["clients"] == 2
    shown = json.loads((tmp_path / "partition.json").read_text())["shown"]
    assert [row["client"] for row in shown] == CALLED
    assert "lyon" in json.dumps(report_data(read_all([tmp_path])))
    assert sorted(p.name for p in (tmp_path / "clients").iterdir()) == ["charite-berlin", "st.-mary-s"]


def test_a_configuration_may_leave_the_number_of_users_open(tmp_path):
    def loaded(text):
        (tmp_path / "c.toml").write_text(text)
        return load_config(tmp_path / "c.toml")

    method = '[method]\nname = "fedavg"\n'
    config = loaded(method + '[partition]\nkind = "user"\n')
    assert config.partition.clients is None
    assert loaded(to_toml(config)).partition == config.partition
    default = loaded(method)
    assert default.partition.clients == 20
    assert loaded(to_toml(default)).partition == default.partition


# ---- samples from elsewhere -------------------------------------------------------------------------


def test_a_validation_set_of_ones_own():
    x, y = torch.full((5, 2), 1000.0), torch.tensor([0, 1, 2, 0, 1])
    for form in ((x, y), Data(x, y), (x.numpy(), y.tolist())):
        scenario = sites(validation=form)
        assert scenario.server.validation.inputs is scenario.validation.inputs
        assert scenario.validation.inputs.tolist() == x.tolist()
        assert scenario.validation.labels.tolist() == y.tolist()
        assert int(scenario.roster.sizes.sum()) == ROWS  # nothing is taken from the clients


def test_bytes_from_elsewhere_are_normalised_by_the_tasks_constants():
    images = torch.randint(0, 256, (60, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = from_tensors((images, torch.arange(60) % 3), (images[:6], torch.arange(6) % 3))
    one = (images[:2], torch.tensor([1, 2]))
    scenario = Scenario(
        data, ["mlp"], PartitionConfig("iid", clients=2), PublicConfig("none"), validation=one, client_test={"c01": one}
    )
    wanted = (images[:2, None] / 255 - data.mean[0]) / data.std[0]
    assert torch.allclose(scenario.validation.inputs, wanted, atol=1e-6)
    assert torch.allclose(scenario.client("c01", 0, {}).test.inputs, wanted, atol=1e-6)


def test_clients_have_test_sets_of_their_own():
    x, y = torch.full((4, 2), 1000.0), torch.tensor([0, 1, 2, 0])
    scenario = sites(client_test={"lyon": (x, y), "st.-mary-s": Data(x[:1], y[:1])})
    tests = {k: scenario.client(k, 0, {}).test for k in scenario.roster}
    assert {k: len(test) for k, test in tests.items()} == {"charite-berlin": 0, "lyon": 4, "st.-mary-s": 1}
    assert tests["lyon"].inputs.tolist() == x.tolist()
    assert int(scenario.roster.sizes.sum()) == ROWS
    x.zero_()
    assert scenario.client("lyon", 0, {}).test.inputs.tolist() == [[1000.0, 1000.0]] * 4  # a copy


def test_personal_methods_are_judged_by_the_tests_given(tmp_path):
    """The labels of one client's test are all right and those of another are all wrong: no split could do that."""
    data = vectors(30)
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([9.0, 0.0, 0.0]))  # always class 0
    x = torch.zeros(5, 2)
    tests = {"c00": (x, torch.zeros(5, dtype=torch.int64)), "c01": (x, torch.ones(5, dtype=torch.int64))}
    scenario = Scenario(data, {"p": model}, PartitionConfig("iid", clients=3), PublicConfig("none"), client_test=tests)
    method = FedAvgFT(Local(steps=1, batch=4, lr=1e-6))
    simulate(scenario, method, tmp_path, RunConfig(rounds=1), engine=EngineConfig("inprocess"))
    judged = last(tmp_path)["personal"]  # of c00 all answers are right, of c01 none
    assert (judged["clients"], judged["mean"], judged["std"]) == (2, 0.5, 0.5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"validation": (torch.zeros(3, 4), torch.arange(3))},
            DataError,
            r"validation: samples .* shape \(4,\), those",
        ),
        ({"validation": (torch.zeros(3, 2), torch.tensor([0, 1, 3]))}, DataError, "validation: labels run from 0 to 3"),
        ({"validation": (torch.zeros(3, 2), torch.arange(2))}, DataError, "validation: 3 inputs but 2 labels"),
        (
            {"validation": (torch.zeros(3, 2).long(), torch.arange(3))},
            DataError,
            r"validation: samples are torch\.int64",
        ),
        ({"client_test": {"paris": (torch.zeros(1, 2), [0])}}, ConfigError, "client_test: no client is called paris"),
        ({"client_test": {"lyon": (torch.zeros(1, 3), [0])}}, DataError, "client_test of lyon: samples are"),
        ({"validation": 1.0}, ConfigError, r"DataConfig\.validation = 1\.0"),
        ({"client_test": -0.1}, ConfigError, r"DataConfig\.client_test = -0\.1"),
    ],
)
def test_samples_that_do_not_fit_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        sites(**options)


def test_a_personal_method_refuses_empty_test_sets(tmp_path):
    with pytest.raises(ConfigError, match="judged by each client's own test split"):
        simulate(sites(client_test={}), small(FedAvgFT()), tmp_path, RunConfig(rounds=1))


# ---- models with habits of their own, and defaults --------------------------------------------------


class Silent(nn.Module):
    """Its train() returns nothing, and so does its eval(), which calls it: like the FedDF authors' ResNet."""

    def __init__(self, width=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

    def train(self, mode=True):
        super().train(mode)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("method", [FedAvg(), FedDF(), FedMD(), FedAvgFT()], ids=lambda m: type(m).__name__)
def test_a_model_whose_train_returns_nothing_works(method, tmp_path):
    models = (
        {"silent": Silent} if isinstance(method, FedAvg | FedAvgFT) else {"silent": Silent, "wider": lambda: Silent(9)}
    )
    result = simulate(
        toy(models, clients=3),
        small(method),
        tmp_path,
        RunConfig(rounds=1),
        FederationConfig(),
        EngineConfig("inprocess"),
    )
    assert result.summary["rounds"] == 1
    assert last(tmp_path)["failures"] == []


def test_nothing_uses_what_train_and_eval_return():
    """Of torch's own modules it is the module; of anybody's it may be nothing."""
    used = []
    for path in pathlib.Path(solera.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        alone = {id(statement.value) for statement in ast.walk(tree) if isinstance(statement, ast.Expr)}
        calls = (c for c in ast.walk(tree) if isinstance(c, ast.Call) and isinstance(c.func, ast.Attribute))
        asked = (c for c in calls if c.func.attr in ("train", "eval") and not c.args)  # methods have train(S, ...)
        used += [f"{path.name}:{c.lineno}" for c in asked if id(c) not in alone]
    assert used == []


def test_the_server_works_on_all_cores_unless_told_otherwise():
    assert sites().server.parallel.workers == default_workers()
    assert sites(workers=3).server.parallel.workers == 3


def test_the_number_of_workers_changes_no_bit(tmp_path):
    digests = {
        simulate(
            toy(clients=3, workers=workers), small(FedDF()), tmp_path / str(workers), RunConfig(rounds=2),
            engine=EngineConfig("inprocess"),
        ).digest
        for workers in (None, 1, 3)
    }  # fmt: skip
    assert len(digests) == 1


def test_a_scenario_keeps_its_data_whatever_becomes_of_the_callers():
    x, y = torch.randn(40, 2), torch.arange(40) % 3
    data = from_tensors((x, y), (x[:5], y[:5]))
    scenario = Scenario(data, ["mlp"], PartitionConfig("iid", clients=2), PublicConfig(size=5))
    before = dataclasses.astuple(scenario.client("c00", 0, {}).train), scenario.public[torch.arange(5)]
    x.zero_()
    y.zero_()
    after = dataclasses.astuple(scenario.client("c00", 0, {}).train), scenario.public[torch.arange(5)]
    assert torch.equal(before[0][0], after[0][0])
    assert torch.equal(before[0][1], after[0][1])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"norm": "Batch"}, r"ModelsConfig\.norm = \"Batch\".*did you mean 'batch'"),
        ({"head": "share"}, r"ModelsConfig\.head = \"share\".*did you mean 'shared'"),
        ({"assign": "evenly"}, r"ModelsConfig\.assign = \"evenly\".*did you mean 'even'"),
        ({"client_test": 1.5}, r"DataConfig\.client_test = 1\.5"),
    ],
)
def test_settings_from_python_are_checked_as_those_of_a_file(settings, says):
    with pytest.raises(ConfigError, match=says):
        toy(**settings)


def test_normalisation_constants_of_a_configuration_replace_those_of_the_data_set():
    """The reference is the stored byte itself: (x / 255 - mean) / std."""
    config = load_config(
        {"method": {"name": "fedavg"}, "data": {"mean": [0.25], "std": [0.5]}, "public": {"source": "none"}},
        ["data.train_size=40", "data.test_size=20", "partition.clients=2"],
    )
    scenario = scenario_of(config)
    stored = scenario.dataset.test.inputs[3, 0, 14, 14].item()
    assert scenario.test.inputs[3, 0, 14, 14].item() == pytest.approx((stored / 255 - 0.25) / 0.5, abs=1e-6)
    assert (scenario.dataset.mean, scenario.dataset.std) == ((0.25,), (0.5,))


@pytest.mark.parametrize(
    ("given", "said"), [({"mean": [0.5]}, "give both"), ({"mean": [0.5], "std": [0.0]}, r"data.std\[0\] = 0.0")]
)
def test_normalisation_constants_that_cannot_be_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        load_config({"method": {"name": "fedavg"}, "data": given})


def test_arguments_replace_the_settings_of_their_name():
    data = DataConfig(train_size=60, test_size=10, client_test=0.5, validation=0.5)
    split, public = PartitionConfig("iid", clients=2), PublicConfig("none")
    told = Scenario(data, ["mlp"], split, public)
    assert (len(told.validation), len(told.client("c00", 0, {}).test)) == (30, 8)
    one = (torch.zeros(2, 28, 28, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    given = Scenario(data, ["mlp"], split, public, validation=one, client_test=0.1)
    assert (len(given.validation), len(given.client("c00", 0, {}).test)) == (2, 3)


def test_every_client_is_a_host_of_its_own_part():
    own, model = (torch.randn(6, 2), torch.arange(6) % 3), nn.Linear(2, 3)
    for scenario in (sites(), Scenario(vectors(), sites={"a": (own, model), "b": (own, model)})):
        for i, k in enumerate(scenario.roster):
            host = scenario.hosts[k]
            assert host.roster == {k: scenario.roster[k]}
            assert len(host.train) == int(scenario.held(i).sum())
            alone, here = host.client(k, 0, {}, Placement()), scenario.client(k, 0, {})
            assert torch.equal(alone.train.inputs, here.train.inputs)
            with pytest.raises(KeyError):
                host.client("another", 0, {}, Placement())
