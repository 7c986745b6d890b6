"""Both means of clients' own models, from the scores to what people read."""

import json

import pytest
from typer.testing import CliRunner

from solera.cli.main import app
from solera.parts.local import Score
from solera.runner.measure import _spread


def test_in_the_mean_clients_count_the_same_and_weighted_samples_do():
    found = _spread([Score(1, 2, 0.0), Score(9, 10, 0.0), Score(60, 100, 0.0)])
    assert found["mean"] == pytest.approx((0.5 + 0.9 + 0.6) / 3)
    assert found["weighted_mean"] == pytest.approx(70 / 112)
    assert found["weighted_mean"] == pytest.approx((70 / 3) / (112 / 3))  # what two means over the clients tell
    assert _spread([]) == {"clients": 0}


def test_a_run_tells_both_everywhere(tmp_path):
    def solera(*args: str) -> str:
        result = CliRunner().invoke(app, list(args), catch_exceptions=False, prog_name="solera")
        assert result.exit_code == 0, result.output
        return result.stdout

    home = tmp_path / "run"
    small = ("run.rounds=1", "data.train_size=200", "data.test_size=50", "partition.clients=4", "data.client_test=0.3")
    sets = [part for s in ("method.name=local", "public.size=20", *small) for part in ("--set", s)]
    told = solera("run", "toy", *sets, "--out", str(home), "--quiet")
    personal = json.loads((home / "summary.json").read_text())["personal"]
    assert json.loads((home / "metrics.jsonl").read_text())["personal"] == personal
    weighted = f"{100 * personal['weighted_mean']:.1f}"
    assert f"{weighted}% weighted by test samples" in told
    assert f"{weighted}% weighted by test samples" in solera("show", str(home))
    assert "weighted %" in solera("compare", str(home))
    (row,) = json.loads(solera("compare", str(home), "--json"))["rows"]
    assert row["last"]["mean"] == personal["mean"]
    assert row["last_weighted"]["mean"] == personal["weighted_mean"]
    solera("report", str(home), "-o", str(tmp_path / "r.html"))
    assert '"kind":"weighted","name":"own models, weighted by samples"' in (tmp_path / "r.html").read_text()
