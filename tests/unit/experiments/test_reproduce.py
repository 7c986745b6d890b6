"""`solera reproduce`: scales, plan, the numbers of cells, and the command."""

import importlib.resources
import json
import math
import tomllib

import pytest
from typer.testing import CliRunner

from solera.cli.main import app
from solera.core.errors import ConfigError
from solera.lab.papers import load_paper, read_paper
from solera.lab.reproduce import as_markdown, collect, effort, estimated, items, missing, needs, plan_table, work_of
from solera.lab.scales import RULES, scaled, scaled_round, shrunk, told
from solera.lab.sweep import run_planned
from solera.runs.config import load_config, to_toml, without_stand_ins
from solera.runs.read import read_run
from timetable_by_hand import schedule as by_hand

SAMPLE = importlib.resources.files("solera") / "data" / "embedded"  # at full scale a path counts, not the name
PAPER = {
    "paper": "feddf",
    "item": "Table 99",
    "title": "a small table",
    "column": [{"name": "a"}, {"name": "b", "set": {"partition": {"alpha": 1.0}}}],
    "row": [
        {"name": "FedDF", "printed": ["80 ± 1", "-"]},
        {"name": "the same", "measure": "mlp"},
        {"name": "FedAvg", "set": {"method": {"name": "fedavg"}}, "at": 1, "printed": ["70", "71"]},
        {"name": "no", "skip": "it cannot be run", "printed": ["1", "2"]},
    ],
}
SMALL = [
    "run.rounds=2", "data.train_size=300", "data.test_size=60", "partition.clients=4", "public.size=60",
    "method.local.epochs=1", "method.fusion.steps=4", "method.fusion.batch=20",
]  # fmt: skip


def small(**changes):
    """A table on the recipe `toy`, cut down so that a run takes a second."""
    tables = json.loads(json.dumps(PAPER)) | changes
    for column in tables["column"]:
        config = load_config("toy", SMALL)
        cut = {"run": {"rounds": config.run.rounds}, "partition": {"clients": 4}, "public": {"size": 60}}
        cut |= {"data": {"train_size": 300, "test_size": 60, "path": str(SAMPLE)}, "models": {"clients": ["mlp"]}}
        cut |= {"method": {"local": {"epochs": 1}}}
        for name, table in cut.items():
            given = column.setdefault("set", {}).setdefault(name, {})
            given |= table | given
    tables["row"][0].setdefault("set", {"method": {"fusion": {"steps": 4, "batch": 20}}})
    tables["row"][1].setdefault("set", {"method": {"fusion": {"steps": 4, "batch": 20}}})
    return read_paper(tables, "toy")


# ---- scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "value", "new"),
    [
        ((10, 3), 100, 10),
        ((10, 3), 20, 3),
        ((10, 3), 2, 2),  # never does it grow
        ((1, 1, 200), 5000, 200),
        ((1, 0, 0.1), 0.8, 0.1),
        ((20,), 40, 2),
    ],
)
def test_a_rule_divides_and_keeps_within_bounds(rule, value, new):
    assert shrunk(value, *rule) == new
    assert type(shrunk(value, *rule)) is type(value)


def test_full_is_the_papers_setting():
    config = load_config("feddf/table2")
    assert scaled(config, "full").config == config


def test_tiny_needs_nothing_but_the_package_and_says_what_stands_for_what():
    found = scaled(load_config("feddf/table2"), "tiny")
    config = found.config
    assert (config.data.name, config.data.path, config.public.source) == ("fashion-mnist", None, "held-out")
    assert config.models.clients == ["tiny-cnn"]
    assert found.stand_ins["resnet8"] == "tiny-cnn"
    assert "cifar10" in found.stand_ins
    assert "public cifar100" in found.stand_ins
    assert found.changes["method.local.epochs"] == (40, 2)
    assert f"run.rounds: 100 -> {config.run.rounds}" in told(found.changes)


def test_different_models_stay_different():
    config = load_config("mnfl/table1")
    assert len(set(config.models.clients)) == 4
    assert len(set(scaled(config, "tiny").config.models.clients)) == 4


def test_every_change_of_a_scale_is_told():
    config = load_config("fedet/laptop")
    for scale in ("small", "tiny"):
        found = scaled(config, scale)
        before, after = (tomllib.loads(to_toml(without_stand_ins(c))) for c in (config, found.config))
        flat = rep_flat(before), rep_flat(after)
        assert found.changes.keys() == {k for k in {**flat[0], **flat[1]} if flat[0].get(k) != flat[1].get(k)}


def rep_flat(tree, path=""):
    out = {}
    for k, v in tree.items():
        out |= rep_flat(v, f"{path}{k}.") if isinstance(v, dict) else {f"{path}{k}": v}
    return out


def test_rounds_of_a_column_are_scaled_with_the_run():
    assert [scaled_round(at, 100, 10) for at in (5, 10, 50, 100)] == [1, 1, 5, 10]


def test_fewer_public_classes_stay_fewer():
    found = []
    for count in (10, 20, 50, 100, 300):
        config = load_config("feddf/fig6a", [f"public.classes=imagenet-without-cifar100:{count}"])
        found.append(len(scaled(config, "tiny").config.public.classes))
    assert found == [1, 2, 5, 10, 10]  # a tenth, as the classes of the task are


def test_at_full_scale_the_sample_of_the_package_is_not_enough(monkeypatch):
    monkeypatch.setenv("SOLERA_DATA", "/somewhere")
    config = load_config("mnfl/table1")
    assert config.data.path is None
    assert scaled(config, "full").config.data.path == "/somewhere/fashion-mnist"
    assert scaled(config, "tiny").config.data.path is None
    given = load_config("mnfl/table1", ["data.path=/elsewhere"])
    assert scaled(given, "full").config.data.path == "/elsewhere"


# ---- the estimate -----------------------------------------------------------------------------------


def test_steps_are_counted_as_a_run_takes_them():
    config = load_config(
        "quickstart/feddf",
        ["data.train_size=1000", "data.test_size=256", "public.size=200", "partition.clients=4", "run.rounds=3",
         "federation.fraction=0.5", "method.local.epochs=2", "method.local.batch=50", "method.fusion.steps=7",
         "method.fusion.batch=20", 'models.clients=["mlp"]'],
    )  # fmt: skip
    steps = {(w.batch, w.training): count for count, w in work_of(config)[0]}
    # 800 samples of 4 clients: 200 each, 4 batches of 50, two epochs, 2 clients, 3 rounds
    assert steps[50, True] == 2 * 4 * 2 * 3
    assert steps[20, True] == 7 * 3
    assert steps[20, False] == 2 * 3 * min(200, 7 * 20) / 20  # what the two teachers are asked
    assert steps[128, False] == 3 * 256 / 128


def test_the_estimate_is_steps_times_seconds(monkeypatch):
    monkeypatch.setattr("solera.lab.reproduce._seconds_of_step", lambda what: 0.5 if what.training else 0.0)
    config = load_config("toy", ['models.clients=["mlp"]', "method.fusion.steps=0"])
    found = estimated([to_toml(config)])
    trained = sum(count for count, what in work_of(config)[0] if what.training)
    assert found == {"seconds": [0.5 * trained], "unknown": [], "steps": [["mlp", 32, 0.5]]}
    assert trained == 5 * 4 * 2 * math.ceil(1600 / 8 / 32)  # rounds, cohort, epochs, batches


# ---- the plan ---------------------------------------------------------------------------------------


def test_cells_with_equal_settings_are_one_run():
    table = plan_table(small(), "full", 2)
    assert [c.runs for c in table.cells[:2]] == [c.runs for c in table.cells[2:4]]
    assert len(table.runs) == 2 * 4
    assert {r.config.run.seed for r in table.runs} == {0, 1}
    assert table.cells[6].reason == "it cannot be run"
    assert table.cells[6].runs == ()


def test_rows_can_be_chosen_and_the_others_say_so():
    table = plan_table(small(), "full", 1, rows=["avg"])
    assert {c.cell.row for c in table.cells if c.runs} == {"FedAvg"}
    assert table.cells[0].reason == "not asked for"
    with pytest.raises(ConfigError, match="has no row 'nothing'; there are: FedDF; the same; FedAvg; no"):
        plan_table(small(), "full", 1, rows=["nothing"])


def test_settings_that_a_search_found_replace_those_of_the_row():
    table = plan_table(small(), "full", 1, {"FedAvg": {"method.local.lr": 0.7}})
    rates = {c.cell.row: c.config.method.local.lr for c in table.cells if c.config}
    assert rates == {"FedDF": 0.05, "the same": 0.05, "FedAvg": 0.7}


def test_a_row_may_have_what_was_found_for_another_one():
    rows = [{"name": "FedDF", "tuned_as": "FedAvg"}, {"name": "FedAvg", "tune": {"method": {"local": {"lr": [1, 2]}}}}]
    rows[1]["set"] = {"method": {"name": "fedavg"}}
    table = plan_table(
        small(row=[*rows, {"name": "x"}, {"name": "y"}]), "full", 1, {"FedAvg": {"method.local.lr": 0.7}}
    )
    rates = {c.cell.row: c.config.method.local.lr for c in table.cells if c.config}
    assert rates == {"FedDF": 0.7, "FedAvg": 0.7, "x": 0.05, "y": 0.05}


def test_what_is_needed_follows_from_the_cells():
    assert needs(load_paper("feddf/table2")) == ["cifar10", "public cifar100", "cifar100", "public imagenet32"]
    assert needs(load_paper("feddf/table2"), "tiny") == ["fashion-mnist"]


def test_names():
    assert "feddf/table2" in items("feddf")
    assert set(items("feddf")) <= set(items("all"))
    with pytest.raises(ConfigError, match="reproduces no table"):
        items("toy")


# ---- running ----------------------------------------------------------------------------------------


def test_a_table_runs_resumes_and_shows_both_numbers(tmp_path):
    table = plan_table(small(), "full", 1)
    assert missing(table, tmp_path) == {}
    assert effort([(table, tmp_path)]).runs == [4]
    told = []
    assert run_planned(table.runs, tmp_path, tell=lambda p: told.append(p.news)).done == 4
    filled = {(f.row, f.column): f for f in collect(table, tmp_path)}
    record = tmp_path / filled["FedDF", "a"].runs[0] / "metrics.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert filled["FedDF", "a"].values == (100 * lines[-1]["models"]["mlp"]["accuracy"],)
    assert filled["the same", "a"].values == filled["FedDF", "a"].values
    first = tmp_path / filled["FedAvg", "b"].runs[0] / "metrics.jsonl"
    line = json.loads(first.read_text().splitlines()[0])
    assert filled["FedAvg", "b"].values == (100 * line["models"]["mlp"]["accuracy"],)  # at = 1
    text = as_markdown(table, list(filled.values()))
    assert f"| FedDF | {filled['FedDF', 'a'].ours} (80 ± 1) | {filled['FedDF', 'b'].ours} | run |" in text
    assert "| no | [a] (1) | [a] (2) | not run |" in text
    assert "- [a] not run: it cannot be run" in text
    assert run_planned(table.runs, tmp_path).skipped == 4  # nothing is run again
    assert effort([(table, tmp_path)]).runs == [0]


def test_a_row_made_of_a_sample_of_the_data_is_not_the_papers(tmp_path):
    """The package's sample is in the place of the data set, at full scale: only the run can know."""
    tables = small()
    for column in tables.columns:
        column.set.update({"data.train_size": "none", "data.test_size": "none"})
    table = plan_table(tables, "full", 1, rows=["FedAvg"], columns=["a"])
    run_planned(table.runs, tmp_path)
    filled = {(f.row, f.column): f for f in collect(table, tmp_path)}
    found = filled["FedAvg", "a"]
    assert found.values
    assert found.verdict == "not run"
    assert found.stand_ins["data.train_size"] == (60_000, 10_000)
    text = as_markdown(table, list(filled.values()))
    assert "- The paper's row is not run where settings, data or models are not the paper's" in text
    told = "data.train_size = 10000 (the paper's: 60000); data.test_size = 2000 (the paper's: 10000)"
    assert f"- Stand-ins: {told}" in text


def test_a_row_is_run_in_part_if_some_of_its_cells_are(tmp_path):
    table = plan_table(small(), "full", 1, rows=["FedAvg"], columns=["a"])
    run_planned(table.runs, tmp_path)
    filled = collect(table, tmp_path)
    assert [f.verdict for f in filled if f.row == "FedAvg"] == ["run", "not run"]
    assert f"| FedAvg | {filled[4].ours} (70) | [a] (71) | 1 of 2 run |" in as_markdown(table, filled)
    assert not any("The paper's row is not run" in line for line in as_markdown(table, filled).splitlines())


@pytest.mark.parametrize("scale", ["small", "tiny"])
@pytest.mark.parametrize("name", ["feddf/table2", "fedet/table2-sent140", "mnfl/table1", "feddf/fig3-sst2"])
def test_no_cell_of_a_smaller_scale_can_count_as_the_papers(name, scale):
    assert RULES[scale]
    planned = [c for c in plan_table(load_paper(name), scale).cells if c.config is not None]
    assert planned
    assert all(c.changed for c in planned)
    assert not any(c.changed for c in plan_table(load_paper(name), "full").cells)


def test_rounds_numbers_and_bytes_to_a_target(tmp_path):
    found = {}
    for value in ("rounds", "parameters", "bytes"):
        table = plan_table(small(value=value, target=0.0), "full", 1, rows=["FedAvg"], columns=["a"])
        run_planned(table.runs, tmp_path)
        found[value] = next(f.values for f in collect(table, tmp_path) if f.values)[0]
    run = tmp_path / table.runs[0].name / "metrics.jsonl"
    line = json.loads(run.read_text().splitlines()[0])
    assert found["rounds"] == 1
    assert found["parameters"] == line["floats"]["down"] + line["floats"]["up"]
    assert found["bytes"] == sum(sum(tasks.values()) for tasks in line["bytes"].values())
    table = plan_table(small(value="rounds", target=1.0), "full", 1, rows=["FedAvg"], columns=["a"])
    reason = next(f.reason for f in collect(table, tmp_path) if f.row == "FedAvg" and f.column == "a")
    assert reason.startswith("100 % not reached in 2 rounds (best ")


def test_averages_before_distillation_and_bytes_by_content(tmp_path):
    rows = [{"name": "before", "measure": "average"}, {"name": "after"}]
    table = plan_table(small(row=rows, column=[{"name": "a"}]), "full", 1)
    run_planned(table.runs, tmp_path)
    before, after = (f.values[0] for f in collect(table, tmp_path))
    line = json.loads((tmp_path / table.runs[0].name / "metrics.jsonl").read_text().splitlines()[-1])
    assert before == 100 * line["averages"]["mlp"]["accuracy"]
    assert after == 100 * line["models"]["mlp"]["accuracy"]
    rows = [{"name": "before", "measure": "parameters"}, {"name": "after"}]  # the same runs
    table = plan_table(small(value="megabytes", row=rows, column=[{"name": "a"}]), "full", 1)
    weights, whole = (f.values[0] for f in collect(table, tmp_path))
    assert weights == 2 * 2 * 2 * 199_210 * 4 / 1e6  # rounds, ways, clients, parameters, bytes
    assert weights < whole < 1.05 * weights


def test_a_scale_may_have_a_target_within_its_reach():
    table = plan_table(small(value="rounds", target=0.8, tiny={"target": 0.2}), "tiny", 1)
    assert {c.cell.target for c in table.cells if c.config} == {0.2}
    assert {c.cell.target for c in plan_table(small(value="rounds", target=0.8), "tiny", 1).cells} == {0.8}


def test_missing_data_is_one_line_and_the_rest_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOLERA_DATA", raising=False)
    tables = json.loads(json.dumps(PAPER))
    tables["column"][1]["set"] = {"data": {"name": "cifar10", "path": str(tmp_path / "nowhere")}}
    paper = small(**tables)
    table = plan_table(paper, "full", 1)
    reasons = missing(table, tmp_path / "out")
    assert len(set(reasons.values())) == 1
    assert "is not a folder" in next(iter(reasons.values()))
    assert "CIFAR binary files" in next(iter(reasons.values()))
    left = table.without(reasons)
    assert {r.config.data.name for r in left.runs} == {"fashion-mnist"}
    assert [c.runs == () for c in left.cells if c.cell.column == "b"] == [True] * 4


def test_sizes_and_partitions_need_no_run(tmp_path):
    paper = small(value="size", measure="mlp", row=[{"name": "x", "measure": "mlp"}, {"name": "y", "measure": "vgg19"}])
    table = plan_table(paper, "full")
    assert table.runs == ()
    x, _, y, _ = collect(table, tmp_path)
    assert x.values == (0.19921,)  # 784*200 + 200 + 200*200 + 200 + 200*10 + 10
    assert y.reason == "no architecture is called 'vgg19'; known here: mlp"
    table = plan_table(small(value="partition", row=[{"name": "x"}, {"name": "y"}]), "full")
    values = [f.values[0] for f in collect(table, tmp_path)]
    assert all(1 <= v <= 10 for v in values)
    assert values[1] > values[0]  # alpha = 1 gives a client more classes than 0.5


def test_a_partition_of_a_part_of_the_data_is_not_the_papers(tmp_path):
    """Figures of partitions train nothing; the samples of the package are a part of Fashion-MNIST."""
    tables = small(value="partition", row=[{"name": "x"}, {"name": "y"}])
    for column in tables.columns:
        column.set.update({"data.train_size": "none", "data.test_size": "none"})
    table = plan_table(tables, "full")
    filled = collect(table, tmp_path)
    assert all(f.values and f.verdict == "not run" for f in filled)
    assert filled[0].stand_ins["data.train_size"] == [60_000, 10_000]
    assert "- The paper's row is not run where" in as_markdown(table, filled)
    whole = small(value="partition", row=[{"name": "x"}, {"name": "y"}])  # a size that the setting itself has
    assert {f.verdict for f in collect(plan_table(whole, "full"), tmp_path)} == {"run"}


# ---- the command ------------------------------------------------------------------------------------


def solera(*args):
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


def test_the_list(tmp_path):
    found = json.loads(solera("reproduce", "--list", "--json").stdout)
    entry = next(e for e in found if e["name"] == "feddf/table2")
    assert entry["needs"] == ["cifar10", "public cifar100", "cifar100", "public imagenet32"]
    assert "feddf/table2" in solera("reproduce", "--list").stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "name a table or a figure"),
        (("feddf/table99",), "did you mean"),
        (("toy",), "toy reproduces no table or figure"),
        (("feddf/table2", "--row", "nothing"), "has no row 'nothing'"),
        (("feddf/table2", "--tuned", "nowhere"), "there is no tuned.json in it"),
    ],
)
def test_mistakes(args, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = solera("reproduce", *args)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["toy2d", "mnfl/fig3"])
def test_a_tiny_recipe_runs_to_the_end(name, tmp_path):
    """`make reproduce-tiny` runs all of them."""
    result = solera("reproduce", name, "--scale", "tiny", "--out", tmp_path, "--summary", tmp_path / "all.json")
    assert result.exit_code == 0
    cells = json.loads((tmp_path / "tiny" / name / "table.json").read_text())["cells"]
    assert all(c["values"] for c in cells)
    rows = json.loads((tmp_path / "all.json").read_text())[name]["rows"]
    assert rows.keys() == {c["row"] for c in cells}


@pytest.mark.parametrize(("name", "available"), [("fedeed/fig3", "always"), ("fedeed/fig4", "uniform")])
def test_the_figures_of_overlap_show_it_as_worked_out_by_hand(name, available, tmp_path):
    """FedEED's A.7: always available, no difference; once an hour, overlapping rounds are shorter."""
    for scale, rows, held_out in (("full", 50_000, 0), ("small", 10_000, 0), ("tiny", 500, 100)):
        for cell in plan_table(load_paper(name), scale, 1).cells:
            clock, fusion = cell.config.federation.availability, cell.config.method.fusion
            assert cell.config.data.train_size in (rows, None)
            assert (rows - held_out) / 4 / clock.speed[0] == pytest.approx(600, rel=0.01)  # a client, one epoch
            assert fusion.steps * fusion.batch / clock.server_speed == pytest.approx(600, rel=0.01)
    table = plan_table(load_paper(name), "tiny", 1)
    run_planned(table.runs, tmp_path)
    rounds, groups = table.runs[0].config.run.rounds, {"FedDF": [0, 0, 0, 0]}
    hours = {}
    for cell in collect(table, tmp_path):
        how = "strict" if cell.row == "FedEED, overlapping" else "off"
        spans = by_hand([groups.get(cell.row, [0, 1, 2, 3])] * rounds, 600, 600, how, available, 3600)
        assert cell.values[0] == pytest.approx(spans[-1].end / 3600, rel=0.01)
        hours[cell.row] = cell.values[0]
    alike, overlapping = hours["FedEED, rounds in turn"], hours["FedEED, overlapping"]
    assert hours["FedDF"] == pytest.approx(alike, rel=0.01)
    assert overlapping == pytest.approx(alike, rel=0.01) if available == "always" else overlapping < 0.95 * alike


def test_the_command_runs_a_row_and_continues(tmp_path):
    command = ("reproduce", "feddf/table2", "--scale", "tiny", "--row", "FedAvg, GN", "--out", tmp_path)
    result = solera(*command)
    assert result.exit_code == 0
    assert "2 runs into" in result.stdout
    assert "on one core (measured steps: tiny-cnn at batch 16" in result.stdout
    facts = json.loads((tmp_path / "tiny/feddf/table2/table.json").read_text())
    cells = {(c["row"], c["column"]): c for c in facts["cells"]}
    assert 0 < cells["FedAvg, GN", "CIFAR-10, α = 1"]["values"][0] <= 100
    assert cells["FedDF, BN", "CIFAR-10, α = 1"]["reason"] == "not asked for"
    assert facts["stand_ins"]["resnet8"] == "tiny-cnn"
    assert {c["verdict"] for c in facts["cells"]} == {"not run"}  # those with a number, too
    assert "not run" in result.stdout.partition("FedAvg, GN")[2].partition("FedAvg, BN")[0]
    run = read_run(tmp_path / "tiny/feddf/table2" / cells["FedAvg, GN", "CIFAR-10, α = 1"]["runs"][0])
    assert run.stand_ins["data.name"] == ("cifar10", "fashion-mnist")
    assert run.stand_ins["models.clients"] == (["resnet8"], ["tiny-cnn"])
    assert json.loads(solera(*command, "--json").stdout)[0]["cells"] == facts["cells"]


def test_models_of_a_scale_replace_those_of_every_row(tmp_path, monkeypatch):
    """Sent140 with random weights: FedAvg keeps the large model on its clients."""
    monkeypatch.chdir(tmp_path)
    table = plan_table(load_paper("fedet/table2-sent140"), "small")
    clients = {c.cell.row: c.config.models.clients for c in table.cells if c.config}
    assert clients["FedAvg"] == clients["FedProx"] == clients["SCAFFOLD"] == ["bert-mini"]
    assert clients["FedDF"] == clients["Fed-ET"] == ["bert-tiny", "lstm"]
    assert {c.config.models.server for c in table.cells if c.config} == {"bert-mini", None}  # baselines have none
    assert table.stand_ins["hf:prajjwal1/bert-mini"] == "bert-mini"
    assert needs(load_paper("fedet/table2-sent140"), "small") == ["sentiment140"]
    assert "weights hf:prajjwal1/bert-tiny" in needs(load_paper("fedet/table2-sent140"), "full")
    fedet = next(c.config for c in table.cells if c.cell.row == "Fed-ET")
    assert fedet.data.train_size is None  # how many rows the users with 100 tweets have is not known before


def test_sent140_that_is_not_here_is_one_line_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("SOLERA_DATA", raising=False)
    result = solera("reproduce", "fedet/table2-sent140", "--scale", "small", "--dry-run")
    (line,) = [line for line in result.stderr.splitlines() if "cannot be run" in line]
    assert "into $SOLERA_DATA/sentiment140 or ./data/sentiment140, or name their folder with --set data.path=" in line
    result = solera("run", "fedet/table2-sent140")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "--set data.path=FOLDER" in result.stderr


def test_missing_data_is_told_and_ends_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("SOLERA_DATA", raising=False)
    result = solera("reproduce", "feddf/table2", "--dry-run")
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "cannot be run" in line]
    assert len(lines) == 2  # cifar10, cifar100
    assert lines[0].startswith(
        "cannot be run: feddf/table2 (10 of 20 cells): cifar10: not found; looked for the folders"
    )
    assert "[a] (76.01 ± 1.53)" in result.stdout
