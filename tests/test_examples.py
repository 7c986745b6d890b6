"""The examples run, and do what they say."""

import pathlib
import runpy

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


def test_own_models_and_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    accuracy = runpy.run_path(str(EXAMPLES / "own_models_and_data.py"))["main"]()
    assert set(accuracy) == {"small", "deep", "smooth"}
    assert min(accuracy.values()) > 0.45
    assert (tmp_path / "runs/own/feddf/summary.json").is_file()
    assert "FedDF" in capsys.readouterr().out


def test_own_method(capsys):
    from solera.method import METHODS

    try:
        runpy.run_path(str(EXAMPLES / "own_method.py"))["main"]()
    finally:
        METHODS.pop("slowavg", None)
    assert "same bits on every engine" in capsys.readouterr().out
