"""What a run had taken by the end of each round."""

from made_runs import line, make_run
from solera.runs.read import read_run
from solera.runs.results import Point, Result, lines_of


def test_a_point_counts_bytes_numbers_and_hours_of_both_ways(tmp_path):
    rounds = [
        line(t, {"mlp": 0.5}, floats={"down": 5, "up": 2}, simulated={"end_s": 1800.0 * (t + 1)}) for t in range(3)
    ]
    found = lines_of(read_run(make_run(tmp_path / "a", rounds=rounds)))
    points = [Point(0, 150, 0.5, 7, 0.5), Point(1, 300, 0.5, 14, 1.0), Point(2, 450, 0.5, 21, 1.5)]
    assert found == {Result("model", "mlp"): points}
