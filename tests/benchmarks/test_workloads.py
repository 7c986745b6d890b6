"""The workloads do what they say, in sizes of seconds; the pages and the programs of others fit them."""

import importlib.util
import json
import pathlib

import pytest
import torch

from bench import machine, made_up, page, peers, plain, workloads
from bench.workloads import Fleet, find
from solera.core.errors import ConfigError
from solera.models import build
from solera.train.fitting import evaluate

ROOT = pathlib.Path(__file__).resolve().parents[2]
MNIST = (1, 28, 28)


class Steady:
    """A conversation with nobody: so many laps, and what was said."""

    def __init__(self, laps):
        self.left, self.laps, self.said = laps, [], {}

    def ready(self):
        pass

    def go(self):
        self.left -= 1
        return self.left >= 0

    def lap(self, less=0.0, **facts):
        self.laps.append(facts)

    def end(self, **facts):
        self.said = facts


def run(case, side, laps=2):
    pace = Steady(laps)
    case.sides[side](pace, laps)
    torch.set_num_threads(1)
    assert len(pace.laps) == laps
    return pace.said


def test_names():
    everything = find([], "full")
    assert len({c.name for c in everything}) == len(everything)
    wanted = {"fedavg-cnn", "fedavg-small", "resnet8-cifar", "engines", "distil-10", "distil-30", "fedet-round",
              "mnfl-round", "fedeed-overlap", "cohort", "population", "start-up"}  # fmt: skip
    assert {c.workload for c in everything} == wanted
    assert {c.name for c in find([], "quick")} == set(workloads.QUICK)
    assert [c.name for c in find(["fedavg-small"], "full")] == ["fedavg-small/lenet5", "fedavg-small/mlp"]
    with pytest.raises(ConfigError, match="there are fedavg-cnn"):
        find(["fedavg"], "full")


def test_the_sizes_are_those_of_the_page():
    (cnn,) = find(["fedavg-cnn"], "full")
    assert cnn.fleet == Fleet("mcmahan-cnn", MNIST, 100, 600, 10, 32)
    assert cnn.fleet.steps == 10 * 19
    assert cnn.flops() / 6000 / 1e6 == pytest.approx(72, rel=0.15)  # MFLOP a sample


def test_fedavg_sides_do_the_same_steps():
    (case,) = find(["fedavg-small/mlp"], "tiny")
    steps = {side: run(case, side)["steps"] for side in case.sides}
    assert set(steps.values()) == {2 * 2 * 2}


def test_cached_and_recomputed_distillation_end_with_the_same_bits():
    (case,) = find(["distil-10/lenet5-3"], "tiny")
    said = {side: run(case, side, 1) for side in case.sides}
    assert said["ours"] == said["recomputed"]
    assert case.same_digest


@pytest.mark.parametrize("name", ["fedet-round", "mnfl-round/4"])
def test_rounds_on_one_core_and_on_all_end_with_the_same_bits(name):
    (case,) = find([name], "tiny")
    assert run(case, "ours", 1)["digest"] == run(case, "serial", 1)["digest"]


def test_engines_end_with_the_same_bits():
    (case,) = find(["engines/lenet5"], "tiny")
    assert len({run(case, side, 1)["digest"] for side in case.sides}) == 1


def test_overlap_changes_no_bit_of_the_result():
    (case,) = find(["fedeed-overlap"], "tiny")
    assert run(case, "ours", 2)["digest"] == run(case, "sequential", 2)["digest"]


@pytest.mark.parametrize("name", ["cohort", "population"])
def test_growth(name):
    (case,) = find([name], "tiny")
    assert case.units is not None
    for side in case.sides:
        run(case, side, 1)


# ---- the pieces --------------------------------------------------------------------------------------


def test_the_made_up_images_can_be_learned():
    scenario = Fleet("lenet5", MNIST, 4, 300, 4).scenario()
    model = scenario.server.model("lenet5", scenario.server.init("lenet5"))
    data = workloads._client_data(Fleet("lenet5", MNIST, 4, 300, 4), scenario)
    torch.manual_seed(0)
    for _ in range(3):
        plain.fedavg_round(model, [data(k) for k in range(4)], 32, 0.1)
    assert evaluate(model, scenario.test.inputs, scenario.test.labels).accuracy > 0.5


def test_the_plain_round_is_the_mean_of_the_clients():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    data = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    assert plain.fedavg_round(model, [data, data], batch=4, lr=0.1) == 2
    loss = torch.nn.functional.cross_entropy(
        data[0] @ before[0].requires_grad_().T + before[1].requires_grad_(), data[1]
    )
    slopes = torch.autograd.grad(loss, before)
    for p, old, slope in zip(model.parameters(), before, slopes, strict=True):
        torch.testing.assert_close(p.detach(), (old - 0.1 * slope).detach())


def test_operations_are_counted():
    linear = torch.nn.Linear(100, 10, bias=False)
    x = torch.rand(4, 100)
    assert machine.answering_flops(linear, x) == 2 * 100 * 10
    assert machine.training_flops(linear, x, 10) == 2 * 2 * 100 * 10  # forward, and the slope of the weights


def test_a_crew_works_at_once_and_goes_home():
    def make():
        torch.rand(2)
        return lambda: None

    crew = machine.Crew([make, make])
    assert crew() < 5
    crew.close()


def test_partition_and_images_agree():
    inputs, labels = made_up.images(50, (3, 9, 9))
    assert inputs.shape == (50, 3, 9, 9)
    assert inputs.dtype == torch.uint8
    assert labels.max() < made_up.CLASSES
    assert made_up.equal_parts(50, 5).indices(2).tolist() == list(range(20, 30))


# ---- other frameworks --------------------------------------------------------------------------------


def load_work():
    spec = importlib.util.spec_from_file_location("peers_work", ROOT / "benchmarks/peers/work.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mcmahan-cnn", "lenet5", "mlp"])
def test_others_get_the_same_model_and_the_same_samples(name, tmp_path):
    fleet = Fleet(name, MNIST, 3, 20, 2)
    peers.hand_out(fleet, tmp_path, rounds=2)
    work = load_work().Work(str(tmp_path))
    scenario = fleet.scenario()
    ours = scenario.server.model(name, scenario.server.init(name))
    client = scenario.client(scenario.roster.id(1), 0, {})
    inputs, labels = work.client(1)
    torch.testing.assert_close(inputs, client.train.inputs)
    assert labels.equal(client.train.labels)
    theirs = work.model().eval()
    torch.testing.assert_close(theirs(inputs), ours(inputs))
    assert work.train(theirs, inputs, labels) * fleet.cohort == fleet.steps
    assert (tmp_path / "pace.py").is_file()


def test_which_frameworks():
    assert peers.chosen("none") == []
    assert peers.chosen("all") == ["flower", "pfl", "fedlab"]
    assert peers.chosen("pfl, flower") == ["pfl", "flower"]
    with pytest.raises(ConfigError, match="'flwr'"):
        peers.chosen("flwr")


def test_every_framework_has_its_program():
    for peer in peers.PEERS.values():
        compile((ROOT / "benchmarks/peers" / peer.program).read_text(), peer.program, "exec")


def test_what_cannot_be_installed_is_told(tmp_path, monkeypatch):
    nowhere = peers.Peer("Nowhere", ("no-such-package-anywhere==9.9",), "with_nowhere.py")
    monkeypatch.setitem(peers.PEERS, "nowhere", nowhere)
    monkeypatch.setattr(peers.sys, "executable", str(tmp_path / "no-python"))
    reason = peers.install("nowhere", tmp_path)
    assert isinstance(reason, str)
    assert reason.startswith("it cannot be installed")
    assert peers.start_of("nowhere", tmp_path, reason, tmp_path) == reason
    assert "run the benchmark in the repository" in peers.start_of("nowhere", tmp_path, tmp_path, tmp_path)


# ---- the page ----------------------------------------------------------------------------------------


@pytest.fixture
def found():
    seconds = {"median": 1.0, "q1": 0.9, "q3": 1.1}
    side = {"seconds": seconds, "first_lap_s": 2.0, "startup_s": 3.0, "memory_mb": 400.0, "server_memory_mb": 300.0}
    return {
        "scale": "quick",
        "date": "2026-01-01",
        "solera": "0",
        "machine": {"torch": "2", "python": "3", "cores": 2, "cpu": "x", "memory_gb": 8},
        "cases": [
            {
                "case": "fedavg-cnn",
                "growth": False,
                "sides": {"ours": side | {"accuracy": 0.5}, "flower": {"not_measured": "not measured: a | b"}},
                "ratios": {"plain": seconds},
                "total_ratios": {"plain": 1.5},
                "peak_share": {"median": 0.62, "q1": 0.6, "q3": 0.7},
                "framework_share": {"median": 0.04, "q1": 0.0, "q3": 0.1},
                "checks": {"equal steps": "ok"},
            }
        ],
    }


def test_the_page_of_the_repository_has_a_place_for_both_tables(found, tmp_path):
    copy = tmp_path / "performance.md"
    copy.write_text((ROOT / "docs/performance.md").read_text())
    page.write(found, copy)
    once = copy.read_text()
    page.write(found, copy)
    assert copy.read_text() == once  # what was there is replaced
    assert "| fedavg-cnn | plain | 1.00 (0.90–1.10) | 1.50 | 62 % | 4 % | ok |" in once
    assert "| fedavg-cnn | Flower simulation 1.41 | not measured: a \\| b |" in once
    assert "| fedavg-cnn | ours | 1.000 (0.900–1.100) | 2.00 | 3.0 | 400 | 300 | 0.500 |" in once


def test_a_page_without_marks_is_refused(found, tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ConfigError, match="ratios: begin"):
        page.write(found, tmp_path / "page.md")


def test_results_can_be_written_as_json(found):
    assert json.loads(json.dumps(found))["cases"][0]["case"] == "fedavg-cnn"


def test_the_models_of_the_others_are_those_of_the_zoo():
    theirs = load_work().MODELS
    for name, make in theirs.items():
        shapes = [tuple(p.shape) for p in build(name, 10, MNIST).parameters()]
        assert [tuple(p.shape) for p in make().parameters()] == shapes
