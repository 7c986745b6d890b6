"""Accuracies of a run over its rounds."""

from made_runs import line, make_run
from solera.runs.read import read_run
from solera.runs.series import Point, Target, series, to_target


def test_a_series_counts_the_bytes_of_both_ways(tmp_path):
    run = read_run(make_run(tmp_path / "a", [0.3, 0.5, 0.4]))
    assert series(run) == {"mlp": [Point(0, 150, 0.3), Point(1, 300, 0.5), Point(2, 450, 0.4)]}


def test_the_target_is_when_it_was_first_reached(tmp_path):
    run = read_run(make_run(tmp_path / "a", [0.3, 0.5, 0.4]))
    assert to_target(run, 0.3, "mlp") == Target(1, 150)
    assert to_target(run, 0.4, "mlp") == Target(2, 300)
    assert to_target(run, 0.5, "mlp") == Target(2, 300)
    assert to_target(run, 0.51, "mlp") is None
    assert to_target(run, 0.1, "no such model") is None


def test_ensembles_and_own_models_are_series_too(tmp_path):
    rounds = [
        line(0, {"mlp": 0.2}, ensembles={"teachers": {"accuracy": 0.6, "loss": 1.0}}),
        line(1, {"mlp": 0.3}, personal={"mean": 0.7, "std": 0.1, "worst_decile": 0.2, "clients": 4}),
    ]
    found = series(read_run(make_run(tmp_path / "a", rounds=rounds)))
    assert [p.accuracy for p in found["ensemble teachers"]] == [0.6]
    assert [p.accuracy for p in found["own models"]] == [0.7]


def test_numbers_and_hours_are_counted_up(tmp_path):
    rounds = [
        line(t, {"mlp": 0.1 * t}, floats={"down": 5, "up": 2}, simulated={"end_s": 1800.0 * (t + 1)}) for t in range(3)
    ]
    run = read_run(make_run(tmp_path / "a", rounds=rounds))
    assert to_target(run, 0.2, "mlp") == Target(3, 450, 21, 1.5)
