"""The tables and figures of the papers: every cell is a valid configuration, at every scale, and starts as a run would;
baselines have settings of their own."""

import dataclasses
import tomllib

import pytest

from solera.config import load_config, to_toml
from solera.experiments.papers import NOT_PRINTED, load_paper, paper_names
from solera.experiments.reproduce import plan_table, without_runs
from solera.experiments.scales import scaled
from solera.experiments.sweep import overrides_of
from solera.method import name_of
from solera.runner.dry import rehearse_config
from solera.runs.keys import flat

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
    ("fedet", "dsfl"): {
        "method.temperature": 0.1,
        "method.local.epochs": 5,
        "method.local.batch": 100,
        "method.distill.epochs": 5,
        "method.distill.batch": 100,
        "method.distill.lr": 0.1,
    },
    ("fedet", "moon"): {
        "method.tau": 0.5,
        "method.local.lr": 0.01,
        "method.local.momentum": 0.9,
        "method.local.weight_decay": 1e-5,
        "models.head": "projection",
    },
    ("fedet", "fedgkt"): {"method.partial": "on_the_fly", "method.server_model": "vgg19", "data.client_test": "common"},
    ("fedeed", "feddf"): {},  # Table 9 begins with FedDF's own; see below
    ("fedeed", "fedprox"): {"method.mu": 0.001},
    ("mnfl", "pfeddf"): {"method.fusion.steps": 12, "method.fusion.batch": 256, "method.fusion.lr": 0.01},
    ("mnfl", "topkpfl"): {"method.k": 5},
    ("feddf", "fedma"): {"method.local.epochs": 5, "method.local.momentum": 0.0, "method.local.weight_decay": 0.0},
    ("feddf", "fedavg"): {"method.average": "uniform"},
    ("feddf", "fedprox"): {"method.average": "uniform"},
    ("feddf", "fedavgm"): {"method.average": "uniform"},
}


def settings(config):
    return flat(tomllib.loads(to_toml(config)))


@pytest.mark.parametrize("name", paper_names())
def test_every_cell_is_a_valid_configuration_at_every_scale(name):
    paper = load_paper(name)
    for scale in ("small", "tiny"):  # made from those of the full scale
        table = plan_table(paper, scale, 1)
        runs = {run.name for run in table.runs}
        for planned in table.cells:
            assert planned.reason or without_runs(paper) or set(planned.runs) <= runs
        assert len({to_toml(run.config) for run in table.runs}) == len(table.runs)  # nothing is run twice


@pytest.mark.parametrize("name", paper_names())
def test_every_method_of_a_table_starts_as_a_run_would(name):
    """A rehearsal: messages, models and sizes of a run, without training."""
    paper = load_paper(name)
    firsts = {}
    for planned in plan_table(paper, "tiny", 1).cells:
        if planned.config is not None:
            firsts.setdefault(name_of(planned.config.method), planned.config)
    for config in firsts.values() if not without_runs(paper) else ():
        short = dataclasses.replace(config, run=dataclasses.replace(config.run, rounds=1))
        assert len(rehearse_config(short).rounds) == 1


@pytest.mark.parametrize("name", paper_names())
def test_a_cell_differs_from_its_recipe_in_nothing_but_what_it_says(name):
    """A baseline keeps the federation and the local training, and nothing that was chosen for another method."""
    paper = load_paper(name)
    base = settings(load_config(name))
    for cell in paper.cells():
        if cell.skip:
            continue
        config = load_config(name, overrides_of(cell.set))
        ours = settings(config)
        same = name_of(config.method) == base["method.name"]
        kept = [k for k in {**base, **ours} if same or not k.startswith("method.") or k.startswith("method.local.")]
        changed = {k for k in kept if base.get(k) != ours.get(k)}
        assert {k for k in changed if not any(k == s or k.startswith(f"{s}.") for s in cell.set)} <= FOLLOWS


FOLLOWS = {"method.name"}


@pytest.mark.parametrize("name", paper_names())
def test_baselines_have_their_own_settings(name):
    paper = load_paper(name)
    own = load_config(name).method
    for cell in paper.cells():
        if cell.skip or "method.name" not in cell.set or cell.set["method.name"] == name_of(own):
            continue
        wanted = OWN.get((paper.paper, cell.set["method.name"]), {})
        ours = settings(load_config(name, overrides_of(cell.set)))
        assert {k: ours.get(k) for k in wanted} == wanted, cell.row


@pytest.mark.parametrize("name", [n for n in paper_names() if n.startswith("fedeed/") and n != "fedeed/fig2"])
def test_feddf_is_distilled_as_fedeeds_paper_does(name):
    for cell in load_paper(name).cells():
        first = cell.row == "FedDF (Adam, drop-worst, early stop)"  # Table 9: FedDF as it was
        if cell.set.get("method.name") == "feddf" and not first:
            ours = settings(load_config(name, overrides_of(cell.set)))
            assert {k: ours[k] for k in FEDEED} == FEDEED


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
    for name in (n for n in paper_names() if n.startswith(("feddf/", "fedet/"))):
        for cell in load_paper(name).cells():
            wanted = grids.get(cell.set.get("method.name", ""), set())
            assert wanted <= cell.tune.keys(), (name, cell.row)


def test_tables_have_the_papers_numbers():
    for name in paper_names():
        paper = load_paper(name)
        if paper.item.startswith("Table"):
            assert all(c.printed != NOT_PRINTED for c in paper.cells()), name


def test_what_counts_until_a_target_is_evaluated_every_round():
    for name in paper_names():
        paper = load_paper(name)
        for cell in paper.cells():
            if not cell.skip and (paper.value in ("rounds", "parameters", "bytes") or cell.at == "best"):
                config = load_config(name, overrides_of(cell.set))
                assert config.run.eval_every == 1
                assert scaled(config, "small").config.run.eval_every == 1


def test_table_1_reaches_beyond_the_largest_number_of_the_paper():
    rounds = {
        c.row: load_config("feddf/table1", overrides_of(c.set)).run.rounds for c in load_paper("feddf/table1").cells()
    }
    assert min(rounds[row] for row in rounds if not row.startswith("FedDF")) >= 546
