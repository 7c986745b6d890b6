"""Runs as a tidy table."""

import importlib.util
import json
import sys

import pytest

import solera
from made_runs import line, make_run
from solera.runs.read import Row, rows
from solera.runs.record import OWN

PANDAS = importlib.util.find_spec("pandas") is not None


@pytest.fixture
def sweep(tmp_path):
    """A case of a sweep with two seeds, and a run that belongs to no case."""
    own = {"mean": 0.75, "clients": 4}
    for seed in (0, 1):
        rounds = [line(t, {"mlp": 0.25 * (t + 1)}, personal=own, floats={"down": 9, "up": 8}) for t in range(2)]
        make_run(tmp_path / f"case/s{seed}", rounds=rounds, run__seed=seed)
    make_run(tmp_path / "other", [0.5], run__seed=7, method__name="fedavg")
    entries = [{"out": f"case/s{seed}", "case": "skewed"} for seed in (0, 1)]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": entries}))
    return tmp_path


def test_every_number_is_a_row(sweep):
    found = list(rows(sweep))
    first = (str(sweep / "case/s0"), "skewed", 0)
    assert [r for r in found if r[:3] == first and r.round == 1] == [
        Row(*first, 1, "model", "mlp", "accuracy", 0.5),
        Row(*first, 1, "model", "mlp", "loss", 1.0),
        Row(*first, 1, "own", OWN, "mean", 0.75),
        Row(*first, 1, "own", OWN, "clients", 4),
        Row(*first, 1, "traffic", "down", "bytes", 100),
        Row(*first, 1, "traffic", "down", "floats", 9),
        Row(*first, 1, "traffic", "down", "integers", 0),
        Row(*first, 1, "traffic", "up", "bytes", 50),
        Row(*first, 1, "traffic", "up", "floats", 8),
        Row(*first, 1, "traffic", "up", "integers", 0),
        Row(*first, 1, "seconds", "total", "seconds", 2.0),
    ]
    assert {(r.case, r.seed) for r in found} == {("skewed", 0), ("skewed", 1), ("fedavg", 7)}


def test_one_directory_or_several(sweep):
    assert list(rows(str(sweep / "other"))) == list(rows([sweep / "other"]))
    assert len(list(rows([sweep / "other", sweep / "case/s1"]))) > len(list(rows(sweep / "other")))


@pytest.mark.skipif(not PANDAS, reason="pandas is not installed (solera[frame])")
def test_the_frame_is_tidy(sweep):
    found = solera.frame(sweep)
    assert list(found.columns) == list(Row._fields)
    assert len(found) == len(list(rows(sweep)))
    best = found.query("kind == 'model' and metric == 'accuracy'").groupby(["case", "seed"])["value"].max()
    assert best.to_dict() == {("skewed", 0): 0.5, ("skewed", 1): 0.5, ("fedavg", 7): 0.5}
    assert str(found["seed"].dtype) == "Int64"


def test_without_pandas_the_extra_is_named(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(solera.ConfigError, match=r"pip install 'solera\[frame\]'"):
        solera.frame(sweep)
