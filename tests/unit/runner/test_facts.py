"""What a run records for its report: complete, capped, and without a trace in its results."""

import json

import pytest
import torch

from run_directories import lines_of
from solera.data import PublicConfig, from_tensors, load
from solera.data.partition import Partition
from solera.report.figures import report_data
from solera.report.loading import read_all
from solera.runs import facts as detail
from solera.runs import loop
from solera.runs.config import load_config
from solera.scenario.scenario import Scenario

SMALL = ["run.rounds=1", "engine.name=inprocess", "data.train_size=400", "data.test_size=60", "public.size=60"]
SMALL += ["method.local.epochs=1", "method.fusion.steps=4"]


@pytest.fixture(scope="module")
def feddf(tmp_path_factory):
    out = tmp_path_factory.mktemp("feddf") / "run"
    loop.run(load_config("toy", SMALL), out, command="solera run toy --out 'x y'")
    return out


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    out = tmp_path_factory.mktemp("plane") / "run"
    loop.run(load_config("toy2d", ["engine.name=inprocess"]), out)
    return out


def read(path):
    return json.loads(path.read_text())


# ---- in the run directory ---------------------------------------------------------------------------


def test_the_command_is_kept(feddf):
    assert read(feddf / "run.json")["command"] == "solera run toy --out 'x y'"


def test_the_partition_adds_up(feddf):
    facts = read(feddf / "partition.json")
    assert facts["clients"] == len(facts["shown"]) == 8
    assert facts["samples"] == sum(sum(c["counts"]) for c in facts["shown"]) == 340
    assert {c["model"] for c in facts["shown"]} == {"mlp", "lenet5"}
    sizes = [sum(c["counts"]) for c in facts["shown"]]
    assert (facts["sizes"]["min"], facts["sizes"]["max"]) == (min(sizes), max(sizes))


def test_the_confusion_agrees_with_the_accuracy(feddf):
    (metrics,) = lines_of(feddf)
    facts = read(feddf / "confusion.json")
    assert facts["total"] == [6] * 10
    for group in ("models", "ensembles"):
        assert facts[group].keys() == metrics[group].keys()
        for name, item in facts[group].items():
            assert [sum(row) for row in item["matrix"]] == facts["total"]
            assert item["right"] == [item["matrix"][c][c] for c in range(10)]
            assert sum(item["right"]) / 60 == pytest.approx(metrics[group][name]["accuracy"])


def test_the_average_before_distillation_is_measured(feddf, tmp_path):
    (metrics,) = lines_of(feddf)
    assert metrics["averages"].keys() == {"mlp", "lenet5"}
    settings = [*SMALL[:-1], "method.name=fedavg"]
    loop.run(load_config("toy", settings), tmp_path / "run")
    (averaged,) = lines_of(tmp_path / "run")
    assert metrics["averages"] == averaged["models"]  # the first round of FedAvg is exactly that
    assert "averages" not in averaged


def test_teachers_are_compared(feddf):
    (metrics,) = lines_of(feddf)
    (event,) = [e for e in metrics["events"] if e["kind"] == "teachers"]
    assert len(event["clients"]) == len(event["confidence"]) == len(event["agrees"]) == 4
    assert sum(event["confidence"]) == pytest.approx(1, abs=1e-3)
    assert 0 <= event["dissenting"] <= 1
    assert event["samples"] == 60


def test_personal_accuracies_give_the_mean(tmp_path):
    settings = [
        "method.name=mnfl",
        "data.client_test=0.2",
        *SMALL[:5],
        "method.local.epochs=1",
        "federation.fraction=1.0",
    ]
    loop.run(load_config("toy", settings), tmp_path / "run")
    (metrics,) = lines_of(tmp_path / "run")
    each = metrics["personal_accuracies"]
    assert len(each) == metrics["personal"]["clients"] == 8
    assert sum(each.values()) / 8 == pytest.approx(metrics["personal"]["mean"], abs=1e-4)
    (group,) = report_data(read_all([tmp_path / "run"]))["groups"]
    assert len(group["personal"]["clients"]) == 8


# ---- points of a plane ------------------------------------------------------------------------------


def test_the_toy_data_are_the_same_every_time_and_lie_in_the_square_of_the_paper():
    one, two = load("toy-2d"), load("toy-2d", seed=5)
    assert torch.equal(one.train.inputs, two.train.inputs)
    assert one.train.inputs.shape == (600, 2)
    assert one.train.labels.bincount().tolist() == [200, 200, 200]
    assert not torch.equal(one.train.inputs, one.test.inputs)
    assert one.train.inputs.abs().max() < 3.2
    assert load("toy-2d", train_size=30).train.labels.bincount().tolist() == [10, 10, 10]


def test_regions_of_clients_average_ensemble_and_student(plane):
    facts = read(plane / "regions.json")
    assert [(p["kind"], p["name"]) for p in facts["panels"]] == [
        ("client", "c00"), ("client", "c01"), ("average", "mlp"), ("ensemble", "teachers"), ("model", "mlp"),
    ]  # fmt: skip
    for panel in facts["panels"]:
        assert len(panel["percent"]) == facts["size"] ** 2
        assert all(98 <= sum(p) <= 102 for p in panel["percent"])
    assert len(facts["public"]) == 60
    assert all(abs(v) < 3.2 for p in facts["public"] for v in p)
    (group,) = report_data(read_all([plane]))["groups"]
    assert len(group["regions"]["panels"]) == 5


def test_the_recipe_shows_what_it_says(plane):
    """Averaging blurs, the ensemble does not, and the student keeps what the ensemble knows."""
    (metrics,) = lines_of(plane)
    average, student = metrics["averages"]["mlp"]["accuracy"], metrics["models"]["mlp"]["accuracy"]
    assert average < 0.86 < student
    assert metrics["ensembles"]["teachers"]["accuracy"] > student - 0.02


def test_images_have_no_regions(feddf):
    assert not (feddf / "regions.json").exists()


# ---- at any size ------------------------------------------------------------------------------------


def test_a_million_clients_leave_a_small_file():
    labels = torch.arange(1_000_000) % 10
    data = from_tensors((torch.zeros(1_000_000, 2), labels), (torch.zeros(10, 2), torch.arange(10)))
    each = Partition(torch.arange(1_000_000), torch.arange(1_000_001))
    facts = detail.partition_facts(Scenario(data, ["mlp"], each, PublicConfig("none")))
    assert facts["clients"] == 1_000_000
    assert len(facts["shown"]) == detail.CLIENTS
    assert len(json.dumps(facts)) < 50_000


def test_many_classes_are_not_a_matrix(monkeypatch, tmp_path):
    monkeypatch.setattr(detail, "CLASSES", 5)
    loop.run(load_config("toy", SMALL), tmp_path / "run")
    facts = read(tmp_path / "run" / "confusion.json")
    assert all("matrix" not in item and len(item["right"]) == 10 for item in facts["models"].values())
    (item, *_) = report_data(read_all([tmp_path / "run"]))["groups"][0]["confusion"]["items"]
    assert item["matrix"] is None


def test_recording_changes_no_result(tmp_path, monkeypatch):
    config = load_config("toy", SMALL)
    recorded = loop.run(config, tmp_path / "a").summary
    for name in ("partition_facts", "confusion_facts"):
        monkeypatch.setattr(detail, name, lambda *args: {})
    monkeypatch.setattr("solera.methods.steps.reporting.note_teachers", lambda *args: None)
    monkeypatch.setattr("solera.scenario.server.Server.report_average", lambda *args: None)
    assert loop.run(config, tmp_path / "b").digest == recorded["digest"]
