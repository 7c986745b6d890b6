"""`python -m bench`: what it prints and when it fails; measuring itself is replaced."""

import json

import pytest
import typer
from typer.testing import CliRunner

import bench.__main__ as command
import bench.programme

SPREAD = {"median": 2.0, "q1": 1.9, "q3": 2.1}
SIDE = {"seconds": SPREAD, "first_lap_s": 2.0, "startup_s": 3.0, "memory_mb": 400.0, "server_memory_mb": 300.0}


def run(*args):
    app = typer.Typer()
    app.command()(command.bench)
    return CliRunner().invoke(app, list(args), prog_name="bench")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What the next measurement will find."""
    monkeypatch.chdir(tmp_path)
    facts = {
        "format": 1, "solera": "0", "scale": "quick", "date": "2026-01-01",
        "machine": {"torch": "2", "python": "3", "cores": 2, "cpu": "x", "memory_gb": 8},
        "cases": [{"case": "fedavg-cnn", "growth": False, "sides": {"ours": SIDE}, "ratios": {"plain": dict(SPREAD)},
                   "checks": {"equal steps": "ok"}}],
    }  # fmt: skip

    def measure(*args):
        args[-1](facts)
        return facts

    monkeypatch.setattr(bench.programme, "measure", measure)
    monkeypatch.setattr(bench.programme, "nothing_yet", lambda scale: {**facts, "cases": []})
    return facts


def test_the_list():
    lines = run("--list").stdout.splitlines()
    assert any(line.startswith("fedavg-cnn: ") for line in lines)
    assert len(run("--list", "--quick").stdout.splitlines()) == 5
    assert json.loads(run("distil-30", "--list", "--json").stdout)[0]["case"].startswith("distil-30")


def test_unknown_names():
    result = run("fedavg-huge")
    assert result.exit_code == 2
    assert "'fedavg-huge'" in result.stderr
    assert run("--peers", "flwr").exit_code == 2


def test_the_table_and_the_json(measured, tmp_path):
    result = run("--quick", "--out", "bench.json")
    assert result.exit_code == 0
    assert "2.00 (1.90–2.10)" in result.stdout
    assert json.loads((tmp_path / "bench.json").read_text()) == measured


def test_a_measurement_is_made_in_parts(measured, tmp_path):
    first = measured["cases"][0]
    assert run("--quick", "--out", "bench.json").exit_code == 0
    measured["cases"] = [{**first, "case": "resnet8-cifar/bn"}, {**first, "case": "fedavg-small/mlp"}]
    assert run("--quick", "--out", "bench.json").exit_code == 0
    held = json.loads((tmp_path / "bench.json").read_text())
    assert [c["case"] for c in held["cases"]] == ["fedavg-cnn", "fedavg-small/mlp", "resnet8-cifar/bn"]
    (tmp_path / "page.md").write_text(
        "<!-- ratios: begin -->\n<!-- ratios: end -->\n<!-- sides: begin -->\n<!-- sides: end -->\n"
    )
    measured["cases"] = [{**first, "ratios": {"plain": {"median": 3.0, "q1": 3.0, "q3": 3.0}}}]
    assert run("--quick", "--out", "bench.json", "--write", "page.md").exit_code == 0
    assert "fedavg-small/mlp" in (tmp_path / "page.md").read_text()
    assert "3.00" in (tmp_path / "page.md").read_text()


def test_measurements_of_other_machines_are_not_mixed(measured, tmp_path):
    assert run("--quick", "--out", "bench.json").exit_code == 0
    measured["machine"] = {**measured["machine"], "cores": 4}
    result = run("--quick", "--out", "bench.json")
    assert result.exit_code == 2
    assert "machine" in result.stderr
    (tmp_path / "bench.json").write_text("[]")
    assert "no measurement" in run("--quick", "--out", "bench.json").stderr


def test_the_guard(measured):
    assert run("--quick", "--against", "recorded.json").exit_code == 2  # nothing is recorded
    assert run("--quick", "--record", "recorded.json").exit_code == 0
    assert run("--quick", "--against", "recorded.json").exit_code == 0
    measured["cases"][0]["ratios"]["plain"] = {"median": 1.5, "q1": 1.4, "q3": 1.6}
    result = run("--quick", "--against", "recorded.json")
    assert result.exit_code == 1
    assert (
        "fell by more than a fifth: fedavg-cnn against plain: 1.5 [1.4, 1.6], recorded 2 [1.9, 2.1] (-25 %)"
        in result.stderr
    )


def test_a_check_that_fails_fails_the_benchmark(measured):
    measured["cases"][0]["checks"]["equal steps"] = "differ: 1, 2"
    result = run("--quick")
    assert result.exit_code == 1
    assert "equal steps: differ" in result.stderr
