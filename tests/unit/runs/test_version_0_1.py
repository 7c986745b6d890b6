"""Run directories of version 0.1 stay readable: by show, report, compare, export and as rows."""

import json
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

import solera
from run_directories import lines_of, write_run
from solera.cli.main import app
from solera.runs.directory import RunDirectory
from solera.runs.frame import rows
from solera.runs.read import read_run

# As version 0.1 wrote them. Its first runs had no `integers`, `averages`, `cpu_s` or `weighted_mean` either.
FIRST = {
    "round": 0,
    "bytes": {"down": {"solera.methods.fedavg.local_update": 100}, "up": {"solera.methods.fedavg.local_update": 40}},
    "floats": {"down": 25, "up": 10},
    "cohort": 4,
    "models": {"mlp": {"accuracy": 0.25, "loss": 2.0}},
    "ensembles": {},
    "personal": {"mean": 0.5, "std": 0.1, "worst_decile": 0.3, "clients": 4},
    "seconds": {"clients": 1.0, "server": 0.5, "evaluate": 0.2, "commit": 0.0, "total": 1.7},
    "failures": [],
    "events": [{"kind": "distilled", "architecture": "mlp", "steps": 3}],
}
SECOND = {
    **FIRST,
    "round": 1,
    "integers": {"down": 0, "up": 3},
    "models": {"mlp": {"accuracy": 0.5, "loss": float("nan")}},
    "averages": {"mlp": {"accuracy": 0.375, "loss": 1.0}},
    "personal_accuracies": {"c00": 0.5, "c01": 0.75},
    "cpu_s": 0.75,
    "failures": [{"client": "c02", "task": "local_update", "reason": "no reply"}],
}


@pytest.fixture
def old(tmp_path) -> Path:
    """A finished run of version 0.1, format 1."""
    home = tmp_path / "old"
    home.mkdir()
    config = {
        "run": {"seed": 3, "rounds": 2, "name": "old"},
        "data": {"name": "fashion-mnist"},
        "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.1},
        "models": {"clients": ["mlp"]},
        "federation": {"fraction": 1.0},
        "method": {"name": "fedavg", "local": {"lr": 0.1, "optimiser": "sgd"}},  # its spelling then
    }
    (home / "config.toml").write_text(tomli_w.dumps(config))
    (home / "run.json").write_text(json.dumps({"format": 1, "solera": "0.1.0", "experiment": None, "command": None}))
    (home / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in (FIRST, SECOND)))
    summary = {"format": 1, "solera": "0.1.0", "method": "fedavg", "rounds": 2, "digest": "ab" * 32, "environment": {}}
    (home / "summary.json").write_text(json.dumps(summary))
    return home


def command(*args: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], prog_name="solera")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show(old):
    found = json.loads(command("show", old, "--json"))
    assert found["missing"] == []
    assert found["models"]["mlp"] | {"loss": None} == {
        "accuracy": 0.5, "loss": None, "round": 1, "best_accuracy": 0.5, "best_round": 1,
    }  # fmt: skip
    assert found["bytes"] == {"down": 200, "up": 80}
    assert found["personal"] == FIRST["personal"]
    assert found["failures"] == {"c02": 1}
    assert "2 of 2" in command("show", old)


def test_compare(old, tmp_path):
    write_run(tmp_path / "other", method="feddf", rounds=2)
    found = json.loads(command("compare", old, tmp_path / "other", "--json"))
    last = {row["measured"]: row["last"]["mean"] for row in found["rows"] if row["method"] == "fedavg"}
    assert last == {"mlp": 0.5, "own models": 0.5}


def test_report(old, tmp_path):
    command("report", old, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert '"kind":"average","name":"mlp"' in page
    assert '["c00",0.5]' in page


def test_export(old, tmp_path):
    pytest.importorskip("tensorboard")
    command("export", old, "--format", "tensorboard", "-o", tmp_path / "board")
    assert list((tmp_path / "board").glob("*tfevents*"))


def test_rows(old):
    found = {(r.round, r.kind, r.name, r.metric): r.value for r in rows(old)}
    assert found[0, "model", "mlp", "accuracy"] == 0.25
    assert found[1, "average", "mlp", "accuracy"] == 0.375
    assert found[1, "client", "c01", "accuracy"] == 0.75
    assert found[0, "traffic", "up", "integers"] == 0
    assert found[1, "traffic", "up", "integers"] == 3
    assert found[0, "seconds", "total", "seconds"] == 1.7
    assert {(r.case, r.seed) for r in rows(old)} == {("fedavg", 3)}


def test_frame(old):
    pytest.importorskip("pandas", reason="pandas is not installed (solera[frame])")
    assert len(solera.frame(old)) == len(list(rows(old)))


def test_nothing_is_lost_in_the_record(old):
    again = [json.loads(r.to_line()) for r in read_run(old).rounds]
    for line, before in zip(again, lines_of(old), strict=True):
        assert json.dumps({k: line[k] for k in before}) == json.dumps(before)


def test_it_is_not_continued_and_the_version_that_can_is_named(old):
    with pytest.raises(solera.RunError, match=r"format 1 by solera 0\.1\.0; this is solera .*solera==0\.1\.0"):
        RunDirectory(old, solera.__version__, resume=True)
