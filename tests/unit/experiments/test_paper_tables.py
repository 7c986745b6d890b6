"""The tables and figures of the papers: every cell is a valid configuration, every method starts as a run would, and
baselines have settings of their own."""

import ast
import dataclasses
import functools
import tomllib

import pytest

from solera.lab.papers import NOT_PRINTED, load_paper, paper_names
from solera.lab.reproduce import plan_table
from solera.lab.sweep import overrides_of
from solera.runs.config import load_config, merged, to_toml
from solera.runs.rehearsal import rehearse_config
from solera.runs.words import flat
from solera.train.fitting import Local

FEDEED = {  # section 6: "distillation: 5000 steps, temperature 4 (FedDF and FedEED)"
    "method.fusion.batch": 256,
    "method.fusion.optimizer": "sgd",
    "method.fusion.lr": 0.1,
    "method.fusion.schedule": "constant",
    "method.fusion.temperature": 4.0,
}
OWN = {  # paper whose table it is, method -> what its row has to say, from the method's own paper where ours is silent
    ("fedet", "feddf"): {
        "method.fusion.steps": 10_000,
        "method.fusion.batch": 128,
        "method.fusion.optimizer": "adam",
        "method.fusion.lr": 1e-3,
        "method.fusion.schedule": "cosine",
        "method.fusion.temperature": 1.0,
    },
    ("fedet", "dsfl"): {"method.temperature": 0.1, "method.local.epochs": 5, "method.distill.epochs": 5},
    ("fedet", "moon"): {
        "method.tau": 0.5,
        "method.local.lr": 0.01,
        "method.local.momentum": 0.9,
        "method.local.weight_decay": 1e-5,
        "models.head": "projection",
    },
    ("fedet", "fedgkt"): {"method.partial": "on_the_fly", "method.server_model": "vgg19", "data.client_test": "common"},
    ("fedeed", "fedprox"): {"method.mu": 0.001},
    ("mnfl", "pfeddf"): {"method.fusion.steps": 12, "method.fusion.batch": 256},
    ("mnfl", "fedmd"): {
        "method.loss": "l1",
        "method.private.epochs": 20,
        "method.revisit.epochs": 20,
        "method.revisit.batch": 128,
        "method.digest.epochs": 1,
        "method.digest.batch": 256,
    },
    ("mnfl", "topkpfl"): {"method.k": 5},
    ("feddf", "fedma"): {"method.local.epochs": 5, "method.local.momentum": 0.0, "method.local.weight_decay": 0.0},
    ("feddf", "fedavg"): {"method.average": "uniform"},
    ("feddf", "fedprox"): {"method.average": "uniform"},
    ("feddf", "fedavgm"): {"method.average": "uniform"},
}


OURS = {"MNFL, uniform weights"}  # rows that no paper has
OTHERS = ("run.", "data.", "partition.", "public.", "models.", "federation.")  # tables besides [method]


def settings(config):
    return {k: v for k, v in flat(tomllib.loads(to_toml(config))).items() if v != "none"}


@functools.cache
def planned(name):
    """The table at the smallest scale, which is made from the cells of the full one."""
    return plan_table(load_paper(name), "tiny", 1)


LEFT = "left out"  # settings of the recipe that the cell's method does not read


def left_out(config):
    return [note.partition(" did not carry over")[0] for note in config.notes]


@functools.cache
def cells(name):
    """Every cell that can be run, with its method and its settings at full scale."""
    recipe, found = merged(name), []
    for cell in load_paper(name).cells():
        if not cell.skip:
            config = load_config(recipe, overrides_of(cell.set))
            found.append((cell, config.method, settings(config) | {LEFT: left_out(config)}))
    return found


def first_of_each_method():
    """Of each paper the first cell with a method, and the first of every table."""
    seen, found = set(), []
    for name in paper_names():
        paper = load_paper(name)
        for at, cell in enumerate(paper.cells() if paper.trains else ()):
            key = (paper.paper, cell.set.get("method.name", name))
            if not cell.skip and key not in seen:
                seen.add(key)
                found.append((name, at))
    return found


@pytest.mark.parametrize("name", paper_names())
def test_every_cell_is_a_valid_configuration(name):
    paper, table = load_paper(name), planned(name)
    runs = {run.name for run in table.runs}
    for cell in table.cells:
        assert cell.reason or not paper.trains or set(cell.runs) <= runs
    assert len({to_toml(run.config) for run in table.runs}) == len(table.runs)  # nothing is run twice
    assert plan_table(paper, "small", 1, rows=[paper.rows[0].name]).scale == "small"


@pytest.mark.parametrize(("name", "at"), first_of_each_method())
def test_a_run_would_start(name, at):
    """A rehearsal: messages, models and sizes of a run, without training."""
    config = planned(name).cells[at].config
    if config is not None:
        short = dataclasses.replace(config, run=dataclasses.replace(config.run, rounds=1))
        assert len(rehearse_config(short).rounds) == 1


@pytest.mark.parametrize("name", paper_names())
def test_a_cell_differs_from_its_recipe_in_nothing_but_what_it_says(name):
    """A baseline keeps the federation and the local training, and nothing that was chosen for another method."""
    base = settings(load_config(name))
    for cell, method, ours in cells(name):
        if ours["method.name"] == base["method.name"]:
            kept = ("",)
        elif isinstance(getattr(method, "local", None), Local):
            kept = ("method.local.", *OTHERS)
        else:  # it trains in a way of its own
            kept = OTHERS
        changed = {k for k in {**base, **ours} if k.startswith(kept) and base.get(k) != ours.get(k)} - {LEFT}
        told = (*(key.removesuffix(".kind") for key in cell.set), *ours[LEFT])  # another kind has other settings
        assert {k for k in changed if not any(k == t or k.startswith(f"{t}.") for t in told)} == set()


@pytest.mark.parametrize("name", paper_names())
def test_baselines_have_their_own_settings(name):
    for cell, _, ours in cells(name):
        wanted = OWN.get((name.partition("/")[0], cell.set.get("method.name")), {})
        assert {k: ours.get(k) for k in wanted} == wanted, cell.row


@pytest.mark.parametrize("name", [n for n in paper_names() if n.startswith("fedeed/")])
def test_feddf_is_distilled_as_fedeeds_paper_does(name):
    for cell, _, ours in cells(name):
        first = cell.row == "FedDF (Adam, drop-worst, early stop)"  # Table 9: FedDF as it was
        if cell.set.get("method.name") == "feddf" and not first:
            assert {k: ours[k] for k in FEDEED} == FEDEED


@pytest.mark.parametrize("name", ["mnfl/table1", "mnfl/fig1"])
def test_mnfl_has_one_rate_for_each_data_set(name):
    """Section 5.1: "the learning rate is set to 0.01 for EMNIST and Fashion MNIST, and 0.02 for CIFAR-10"."""
    for cell, _, ours in cells(name):
        rates = {v for k, v in ours.items() if k.startswith("method.") and k.endswith(".lr")}
        assert rates == {0.02 if cell.column.startswith("CIFAR-10") else 0.01}, (cell.row, cell.column)


def test_what_is_called_fedmd_is_fedmd():
    for name in paper_names():
        for cell, _, ours in cells(name):
            assert (cell.row == "FedMD") == (ours["method.name"] == "fedmd"), (name, cell.row)


def test_moon_has_the_mu_of_its_own_paper_for_each_data_set():
    """Li, He and Song, section 4.1: the best mu is 5 for CIFAR-10 and 1 for CIFAR-100."""
    found = {}
    for name in paper_names():
        for _, _, ours in cells(name):
            if ours["method.name"] == "moon":
                found.setdefault(ours["data.name"], set()).add(ours["method.mu"])
    assert found == {"cifar10": {5.0}, "cifar100": {1.0}}


def test_table_3_of_feddf_has_one_vgg():
    """Appendix C.2: "9-layer VGG (same as the one used in [74])", for all methods."""
    assert {tuple(ours["models.clients"]) for _, _, ours in cells("feddf/table3")} == {("vgg9-fedma",)}


def test_fedet_searches_over_the_grids_of_its_appendix():
    for name, sizes in (("cifar10", (5, 4, 3, 3)), ("cifar100", (5, 4, 3, 3)), ("sent140", (3, 3, 3, 3))):
        (grid,) = {repr(c.tune) for c, _, _ in cells(f"fedet/table2-{name}") if c.row == "Fed-ET"}
        assert tuple(len(v) for v in ast.literal_eval(grid).values()) == sizes
    assert ast.literal_eval(grid)["method.fusion.lr"] == [0.1, 0.01, 0.001]


def test_values_that_a_paper_does_not_state_can_be_searched_for():
    """FedDF (appendix C.2) and Fed-ET (appendix C) tuned their baselines; MNFL does not say."""
    grids = {
        "fedprox": {"method.mu"},
        "fedavgm": {"method.momentum"},
        "scaffold": {"method.local.lr"},
        "moon": {"method.local.lr", "method.mu"},
        "dsfl": {"method.distill.lr"},
        "fedgkt": {"method.local.lr", "method.server.lr"},
    }
    images = (n for n in paper_names() if n.startswith(("feddf/", "fedet/")) and not n.endswith("sent140"))
    for name in images:  # for texts the clients' values are stated
        for cell in load_paper(name).cells():
            wanted = grids.get(cell.set.get("method.name", ""), set())
            if name == "feddf/table2" and "GN" in cell.row:  # "(i.e. the number of groups in GN)"
                wanted = wanted | {"models.options.resnet8.groups"}
            assert wanted <= cell.tune.keys(), (name, cell.row)


def test_tables_have_the_papers_numbers():
    for name in paper_names():
        paper = load_paper(name)
        if paper.item.startswith("Table"):
            assert {c.row for c in paper.cells() if c.printed == NOT_PRINTED} <= OURS, name


def test_what_counts_until_a_target_is_evaluated_every_round():
    for name in paper_names():
        paper = load_paper(name)
        if paper.value in ("rounds", "parameters", "bytes") or paper.at == "best":
            assert {ours["run.eval_every"] for _, _, ours in cells(name)} == {1}


def test_table_1_reaches_beyond_the_largest_number_of_the_paper():
    assert min(ours["run.rounds"] for c, _, ours in cells("feddf/table1") if not c.row.startswith("FedDF")) >= 546
