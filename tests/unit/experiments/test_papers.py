"""The [paper] table of a recipe: cells, and mistakes in it."""

import copy

import pytest

from solera.core.errors import ConfigError
from solera.lab.papers import load_paper, paper_names, read_paper
from solera.runs.config import load_config

TABLE = {
    "paper": "feddf",
    "item": "Table 9",
    "title": "a table",
    "column": [{"name": "a"}, {"name": "b", "at": 5, "set": {"partition": {"alpha": 0.1}, "run": {"rounds": 7}}}],
    "row": [
        {"name": "first", "printed": ["1.5 ± 0.2", "-"]},
        {"name": "second", "set": {"run": {"rounds": 9}}, "measure": "ensemble", "skip": "no reason"},
    ],
}


def changed(**new):
    return copy.deepcopy(TABLE) | new


def test_a_cell_has_the_settings_of_its_column_and_then_of_its_row():
    cells = {(c.row, c.column): c for c in read_paper(TABLE, "x").cells()}
    assert list(cells) == [("first", "a"), ("first", "b"), ("second", "a"), ("second", "b")]
    assert cells["first", "a"].set == {}
    assert cells["first", "b"].set == {"partition.alpha": 0.1, "run.rounds": 7}
    assert cells["second", "b"].set == {"partition.alpha": 0.1, "run.rounds": 9}
    assert [c.printed for c in cells.values()] == ["1.5 ± 0.2", "-", "-", "-"]
    assert [c.at for c in cells.values()] == ["last", 5, "last", 5]
    assert [c.measure for c in cells.values()] == ["main", "main", "ensemble", "ensemble"]
    assert [c.skip for c in cells.values()] == ["", "", "no reason", "no reason"]


def test_a_column_may_say_something_of_single_rows():
    table = changed()
    table["column"][1]["rows"] = {"second": {"run": {"rounds": 3}, "method": {"mu": 0.5}}}
    cells = {(c.row, c.column): c for c in read_paper(table, "x").cells()}
    assert cells["second", "b"].set == {"partition.alpha": 0.1, "run.rounds": 3, "method.mu": 0.5}
    assert cells["second", "a"].set == {"run.rounds": 9}
    assert cells["first", "b"].set == {"partition.alpha": 0.1, "run.rounds": 7}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (5, "expected a table"),
        (changed(paper="fedavg"), "paper: paper = \"fedavg\": expected one of 'feddf', 'fedet', 'fedeed', 'mnfl'"),
        (changed(item="Tab 2"), "paper: item = Tab 2"),
        (changed(value="speed"), 'paper: value = "speed"'),
        (changed(value="rounds"), "set paper.target"),
        (changed(tite="x"), "there is no such setting; did you mean 'title'?"),
        (changed(title=5), "title = 5: expected a string"),
        (changed(at="first"), "expected one of 'last', 'best' or an integer"),
        (changed(row=[]), "paper: row: at least one"),
        (changed(row=[{"name": "a"}, {"name": "a"}]), "each with a name of its own"),
        (changed(row=[{"name": "a", "printed": ["1"]}]), "paper: row 'a': 1 printed numbers for 2 columns"),
        (changed(row=[{"name": "a", "printed": ["1", "2 +- 1"]}]), "printed '2 +- 1'"),
        (changed(row=[{"name": "a", "tune": {"method": {"mu": [1]}}}]), "tune.method.mu = 1: expected a list"),
        (changed(tiny={"sets": {}}), "paper.tiny: sets = {}: there is no such setting"),
        (
            changed(column=[{"name": "a", "rows": {"third": {}}}, {"name": "b"}]),
            "column 'a': rows: third is none of first, second",
        ),
        (changed(row=[{"name": "a"}, {"name": "b", "tuned_as": "a"}]), "row 'b': tuned_as: a is none of "),
        ({k: v for k, v in TABLE.items() if k != "row"}, "x: paper: row: at least one"),
    ],
)
def test_a_mistake_is_named(table, told):
    with pytest.raises(ConfigError) as error:
        read_paper(table, "x")
    assert told in str(error.value)


def test_a_recipe_without_the_table_is_refused():
    with pytest.raises(ConfigError, match="toy reproduces no table or figure"):
        load_paper("toy")


def test_a_run_ignores_the_table(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[method]\nname = "fedavg"\n[paper]\nanything = 5\n')
    assert load_config(file).run.rounds == 10
    file.write_text('paper = 5\n[method]\nname = "fedavg"\n')
    with pytest.raises(ConfigError, match="paper"):
        load_config(file)


def test_feddf_has_the_rate_that_was_found_for_fedavg():
    """Table 1: "FedDF uses the optimal learning rate from FedAvg"."""
    rows = {r.name: r for r in load_paper("feddf/table1").rows}
    for epochs in (20, 40):
        assert rows[f"FedDF, {epochs} epochs"].tuned_as == f"FedAvg, {epochs} epochs"
        assert set(rows[f"FedAvg, {epochs} epochs"].tune) == {"method.local.lr"}


def test_the_papers_table_2():
    cells = {(c.row, c.column): c for c in load_paper("feddf/table2").cells()}
    assert "feddf/table2" in paper_names()
    assert cells["FedProx, GN", "CIFAR-100, α = 0.1"].printed == "35.74 ± 1.00"
    assert cells["FedProx, GN", "CIFAR-100, α = 0.1"].tune["method.mu"] == [0.001, 0.01, 0.1, 1.0]
