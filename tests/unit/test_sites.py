"""Sites: each is made of its own table and files alone, and gives the client that the simulation of all has."""

import csv
import dataclasses
import functools
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from run_directories import lines_of
from solera import Scenario, simulate
from solera.core.errors import ConfigError, DataError
from solera.core.plugins import code_allowed
from solera.data import PublicConfig, from_tensors
from solera.data.dataset import Spec
from solera.data.site_data import SiteConfig, hold, read_site
from solera.engines import serve
from solera.methods import FedAvg
from solera.place.placement import Placement
from solera.runs import loop
from solera.runs.config import RunConfig, load_config, to_toml
from solera.runs.loop import scenario_of
from solera.runs.sites import server_of_sites, site_host
from solera.scenario.host import check_hellos
from solera.train.fitting import Local

FORM = Spec("own", (2,), 2, class_names=("benign", "malignant"))


def photos(folder, seed, classes=("cat", "dog"), size=6):
    """A folder of gray images with a folder for each class."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 120, (size, size)) + 100 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


def table(file, rows, header=("age", "size", "label")):
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([header, *rows])
    return str(file)


OWN = """
import torch

def scans():
    g = torch.Generator().manual_seed(7)
    labels = torch.arange(14) % 2
    return (torch.randint(0, 120, (14, 6, 6), generator=g) + 100 * labels[:, None, None]).to(torch.uint8), labels
"""


@pytest.fixture
def hospital(tmp_path):
    """Three sites with three kinds of source, and the server's own images; the tables that describe them."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    photos(tmp_path / "server", 0)
    photos(tmp_path / "a", 1, size=8)  # other sizes are brought to data.shape
    g = np.random.default_rng(5)
    labels = (np.arange(10) % 2).tolist()
    pixels = [(g.integers(0, 120, (1, 6, 6)) + 100 * y).tolist() for y in labels]
    pq.write_table(pa.table({"image": pixels, "label": labels}), tmp_path / "b.parquet")
    (tmp_path / "own.py").write_text(OWN)
    return {
        "run": {"rounds": 2, "seed": 3},
        "data": {
            "name": "folder",
            "path": str(tmp_path / "server"),
            "shape": [1, 6, 6],
            "classes": ["cat", "dog"],
            "mean": [0.5],
            "std": [0.25],
            "client_test": 0.25,
        },
        "public": {"source": "noise", "size": 32},
        "engine": {"name": "inprocess"},
        "sites": {
            "hospital-a": {"data": str(tmp_path / "a"), "model": "mlp"},
            "hospital-b": {"data": str(tmp_path / "b.parquet"), "model": "mlp"},
            "clinic.c": {"data": "own.py:scans", "model": "mcmahan-cnn", "test": 0.5},
        },
    }


METHODS = {
    "fedavg": {"name": "fedavg", "local": {"epochs": 1, "batch": 4}},
    "scaffold": {"name": "scaffold", "local": {"epochs": 1, "batch": 4}},
    "feddf": {"name": "feddf", "local": {"epochs": 1, "batch": 4}, "fusion": {"steps": 3, "batch": 8}},
    "dsfl": {"name": "dsfl", "local": {"epochs": 1, "batch": 4}},
    "decentralised": {"name": "decentralised", "local": {"epochs": 1, "batch": 4}, "distill": {"epochs": 1}},
}


class Elsewhere:
    """An engine whose sites are each made by themselves, as a deployment has them: no data is shared."""

    def __init__(self, hosts, roster, states):
        self.hosts, self.roster, self.states = hosts, roster, states

    def start(self, calls):
        return lambda: (serve(c, self.hosts[c.client], self.states, Placement()) for c in calls)

    def close(self):
        pass


def only(tables, name):
    """The site's own file: of the sites only itself, and the server's data is not there."""
    data = {**tables["data"], "path": "/nowhere"}
    return {**tables, "data": data, "sites": {name: tables["sites"][name]}}


def blind(tables):
    """The server's file: it says nothing of the sites' data."""
    sites = {k: {"model": site["model"]} for k, site in tables["sites"].items()}
    return {**tables, "sites": sites}


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddf", "dsfl", "decentralised"])
def test_a_run_over_sites_that_know_only_themselves_ends_as_the_simulation_of_all(hospital, tmp_path, method):
    if method in ("fedavg", "scaffold"):  # of one architecture
        hospital["sites"]["clinic.c"]["model"] = "mlp"
    if method == "decentralised":  # every site makes the round's samples from the round's seed
        hospital["public"]["fresh"] = True
    tables = {**hospital, "method": METHODS[method]}
    with code_allowed(tmp_path):
        simulated = loop.run(load_config(tables), tmp_path / "simulated").summary
        hosts = {k: site_host(load_config(only(tables, k)), k) for k in tables["sites"]}
        config = load_config(blind(tables))
    scenario = server_of_sites(config, {k: host.hello() for k, host in hosts.items()})
    reach = functools.partial(Elsewhere, hosts, scenario.roster)
    result = simulate(scenario, config.method, tmp_path / "deployed", config.run, config.federation, reach=reach)
    assert result.digest == simulated["digest"]
    assert list(scenario.roster) == ["clinic.c", "hospital-a", "hospital-b"]


def test_a_site_is_the_same_whoever_else_is_there(hospital, tmp_path):
    """Both the samples and the split: nothing of a site depends on the others."""
    with code_allowed(tmp_path):
        alone = site_host(load_config({**only(hospital, "hospital-a"), "method": METHODS["fedavg"]}), "hospital-a")
        hospital["sites"].pop("hospital-b")
        config = load_config({**hospital, "method": METHODS["feddf"]})
        among = scenario_of(config).client("hospital-a", 1, {})
    itself = alone.client("hospital-a", 1, {}, Placement())
    assert torch.equal(among.train.inputs, itself.train.inputs)
    assert torch.equal(among.test.labels, itself.test.labels)
    assert len(itself.test) == 3  # a quarter of 12
    assert all(torch.equal(a, b) for a, b in zip(among.model().parameters(), itself.model().parameters(), strict=True))


def test_names_of_sites_appear_in_what_a_run_leaves(hospital, tmp_path):
    tables = {**hospital, "method": {"name": "mnfl"}}
    for site in tables["sites"].values():
        site["model"] = "mlp"
    with code_allowed(tmp_path):
        loop.run(load_config(tables), tmp_path / "run")
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["sites"].keys() == hospital["sites"].keys()
    said = str(lines_of(tmp_path / "run")[-1])
    assert "hospital-a" in said
    assert "clinic.c" in said
    assert "hospital-b" in (tmp_path / "run/partition.json").read_text()


def test_a_configuration_with_sites_is_read_again_as_it_was_written(hospital, tmp_path):
    with code_allowed(tmp_path):
        config = load_config({**hospital, "method": METHODS["feddf"]})
        assert load_config(tomllib.loads(to_toml(config))) == config
    assert config.sites["clinic.c"].data == f"{tmp_path}/own.py:scans"
    assert config.models.clients == ["mcmahan-cnn", "mlp", "mlp"]  # in the order of the sites' names


def test_python_gives_sites_as_data_and_model(tmp_path):
    g = torch.Generator().manual_seed(0)

    def samples(n):
        return torch.randn(n, 8, generator=g), torch.arange(n) % 3

    shared = nn.Sequential(nn.Linear(8, 3))
    sites = {"b": (samples(9), shared), "a": (samples(6), shared), "c": (from_tensors(samples(5), samples(4)), shared)}
    scenario = Scenario(from_tensors(samples(3), samples(30), classes=3), sites=sites, client_test=1 / 3)
    assert {k: info.num_examples for k, info in scenario.roster.items()} == {"a": 4, "b": 6, "c": 5}
    assert len(scenario.client("c", 0, {}).test) == 4  # the split that it brought
    assert scenario.public is None
    assert len(scenario.server.all_train) == 15
    result = simulate(scenario, FedAvg(Local(epochs=1, batch=4)), tmp_path / "run", RunConfig(rounds=1))
    assert result.models["sequential"].architecture == "sequential"


# ---- sources ----------------------------------------------------------------------------------------


def test_a_csv_file_is_read_by_the_names_of_its_columns(tmp_path):
    file = table(tmp_path / "a.csv", [(61, 0.5, "malignant"), (40, 1.5, "benign"), (33, 2.5, "benign")])
    all_columns = read_site("a", SiteConfig(data=file), FORM, 0.0, 0).train
    assert all_columns.inputs.tolist() == [[61.0, 0.5], [40.0, 1.5], [33.0, 2.5]]
    assert all_columns.labels.tolist() == [1, 0, 0]
    swapped = read_site("a", SiteConfig(data=file, columns=["size", "age"]), FORM, 0.0, 0).train
    assert swapped.inputs[0].tolist() == [0.5, 61.0]


def test_json_lines_are_read_like_other_tables(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"age": 61, "size": 0.5, "label": "malignant"}\n{"age": 40, "size": 1.5, "label": 0.0}\n')
    held = read_site("a", SiteConfig(data=str(file)), FORM, 0.0, 0).train
    assert (held.inputs.tolist(), held.labels.tolist()) == ([[61.0, 0.5], [40.0, 1.5]], [1, 0])


def test_a_folder_need_not_have_all_classes_and_may_have_a_test_split(tmp_path):
    photos(tmp_path / "a/train", 1, classes=("dog",))
    photos(tmp_path / "a/test", 2, classes=("cat", "dog"))
    form = Spec("own", (3, 4, 4), 2, (0.0,), (1.0,), class_names=("cat", "dog"))
    held = read_site("a", SiteConfig(data=str(tmp_path / "a")), form, 0.5, 0)
    assert held.train.labels.unique().tolist() == [1]
    assert tuple(held.train.inputs.shape) == (6, 3, 4, 4)
    assert len(held.test) == 12


def test_the_split_follows_from_the_seed_and_the_name_of_the_site():
    data = (torch.arange(40.0).reshape(20, 2), torch.arange(20) % 2)
    first = hold("a", data, FORM, 0.3, 0)
    assert (len(first.train), len(first.test)) == (14, 6)
    assert sorted([*first.train.inputs[:, 0].tolist(), *first.test.inputs[:, 0].tolist()]) == list(range(0, 40, 2))
    assert torch.equal(hold("a", data, FORM, 0.3, 0).test.inputs, first.test.inputs)
    assert not torch.equal(hold("b", data, FORM, 0.3, 0).test.inputs, first.test.inputs)
    assert not torch.equal(hold("a", data, FORM, 0.3, 1).test.inputs, first.test.inputs)


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partition": {"clients": 3}}, r"\[partition\] with \[sites\]"),
        ({"public": {"source": "held-out"}}, 'public.source = "held-out": no samples are taken out'),
        ({"models": {"clients": ["lenet5"]}}, "models.clients = .* each names its own model"),
        ({"sites": {"A b": {"model": "mlp"}}}, "only lower-case letters"),
        ({"sites": {"a": {"modle": "mlp"}}}, "sites.a.modle"),
        ({"sites": {"a": "x"}}, "this is a table"),
        ({"sites": {"a": {"model": "mpl"}}}, "sites.a.model = 'mpl' is not known; did you mean"),
    ],
)
def test_what_cannot_be_said_beside_sites_is_refused(hospital, change, said):
    hospital["sites"].pop("clinic.c")
    with pytest.raises(ConfigError, match=said):
        load_config({**hospital, "method": METHODS["fedavg"], **change})


def test_pixels_without_given_constants_are_refused(hospital, tmp_path):
    del hospital["data"]["mean"], hospital["data"]["std"]
    with code_allowed(tmp_path), pytest.raises(ConfigError, match=r"data.mean and data.std, because no site"):
        site_host(load_config({**hospital, "method": METHODS["feddf"]}), "hospital-a")


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        ([(1, 2, "odd")], [], "the class 'odd' is not one of data.classes"),
        ([(1, 2, 5)], [], "labels run from 5 to 5"),
        ([(1, "x", 0)], [], "column 'size' holds something else than numbers"),
        ([(1, 2, 0)], ["weight"], "has no column 'weight'"),
        ([(1, 2, 0)], ["age"], "samples of shape"),
        ([], [], "no rows below the header"),
        ([(1, 2)], [], "line 2 has 2 columns, expected 3"),
        ([(1, "nan", 0)], [], "not finite"),
    ],
)
def test_tables_that_do_not_fit_are_refused_by_name(tmp_path, rows, columns, said):
    file = table(tmp_path / "a.csv", rows)
    with pytest.raises(DataError, match=said):
        read_site("a", SiteConfig(data=file, columns=columns), FORM, 0.0, 0)


@pytest.mark.parametrize(
    ("data", "said"),
    [(None, "sites.a.data is missing"), ("/no/such", "no such file or folder"), (__file__, "kind of file is not read")],
)
def test_a_source_that_is_none_is_refused(data, said):
    with pytest.raises(ConfigError, match=said):
        read_site("a", SiteConfig(data=data), FORM, 0.0, 0)


def test_sites_set_up_for_another_run_are_named(hospital, tmp_path):
    with code_allowed(tmp_path):
        config = load_config({**hospital, "method": METHODS["feddf"]})
        hellos = {k: site_host(config, k).hello() for k in config.sites}
    for field, value in [("run_seed", 4), ("architecture", "vgg9"), ("public", "0" * 64), ("layout", "1" * 64)]:
        wrong = {**hellos, "hospital-b": dataclasses.replace(hellos["hospital-b"], **{field: value})}
        with pytest.raises(ConfigError, match=f"site hospital-b: {field} is"):
            server_of_sites(config, wrong)
    with pytest.raises(ConfigError, match=r"site clinic\.c has not said hello"):
        server_of_sites(config, {k: h for k, h in hellos.items() if k != "clinic.c"})
    check_hellos(hellos, hellos)


def test_two_models_of_one_name_are_refused():
    data = from_tensors((torch.randn(4, 2), torch.arange(4) % 2), (torch.randn(4, 2), torch.arange(4) % 2))
    own = (torch.randn(4, 2), torch.arange(4) % 2)
    with pytest.raises(ConfigError, match="rename one of them"):
        Scenario(data, sites={"a": (own, nn.Linear(2, 2)), "b": (own, nn.Linear(2, 2))})
    with pytest.raises(ConfigError, match="held-out"):
        Scenario(data, public=PublicConfig(), sites={"a": (own, nn.Linear(2, 2))})
