"""Groups of runs as rows of numbers."""

import math

from made_runs import line, make_run
from solera.runs.compare import Spread, latex_text, plain_cell, printed, rows_of
from solera.runs.groups import group_runs
from solera.runs.read import read_run


def test_mean_and_standard_deviation():
    assert Spread.of([0.5]) == Spread(0.5, None, 1)
    assert Spread.of([]) is None
    found = Spread.of([1.0, None, 2.0, 3.0])
    assert (found.mean, found.runs) == (2.0, 3)
    assert math.isclose(found.std, 1.0)  # of a sample: n - 1


def test_rows(tmp_path):
    runs = [
        read_run(make_run(tmp_path / "a", [0.2, 0.6, 0.4], run__seed=0)),
        read_run(make_run(tmp_path / "b", [0.2, 0.4, 0.6], run__seed=1)),
        read_run(make_run(tmp_path / "c", [0.1, 0.1, 0.2], run__seed=2)),
    ]
    (row,) = rows_of(group_runs(runs), 0.6)
    assert row.measured == "mlp"
    assert math.isclose(row.last.mean, 0.4)
    assert math.isclose(row.last.std, 0.2)
    assert math.isclose(row.best.mean, (0.6 + 0.6 + 0.2) / 3)
    assert (row.rounds_to_target.mean, row.bytes_to_target.mean, row.reached) == (2.5, 375.0, 2)
    assert (row.down.mean, row.up.mean, row.seconds.mean, row.failures.mean) == (300, 150, 6.0, 0)


def test_the_worst_decile_belongs_to_the_own_models(tmp_path):
    rounds = [line(0, {"mlp": 0.3}, personal={"mean": 0.7, "std": 0.1, "worst_decile": 0.2, "clients": 4})]
    rows = rows_of(group_runs([read_run(make_run(tmp_path / "a", rounds=rounds))]))
    assert [(r.measured, r.worst_decile and r.worst_decile.mean) for r in rows] == [("mlp", None), ("own models", 0.2)]


def test_text_for_latex_and_spreadsheets():
    assert latex_text("a_b & 50% {x} ± 1\\") == r"a\_b \& 50\% \{x\} $\pm$ 1\textbackslash{}"
    cells = ("=1+1", "@x", "-0.5", "+z", "ok", None)
    assert [plain_cell(t) for t in cells] == ["'=1+1", "'@x", "-0.5", "'+z", "ok", ""]


def test_numbers_and_simulated_hours_to_a_target(tmp_path):
    def rounds(hours):
        return [
            line(
                t, {"mlp": a}, floats={"down": 30, "up": 20}, simulated={"end_s": 3600 * hours * (t + 1), "server_s": 1}
            )
            for t, a in enumerate([0.2, 0.5, 0.6])
        ]

    runs = [read_run(make_run(tmp_path / str(h), rounds=rounds(h), run__seed=h)) for h in (1, 3)]
    rows = rows_of(group_runs(runs), 0.5)
    assert (rows[0].floats_to_target.mean, rows[0].hours_to_target.mean, rows[0].hours.mean) == (100, 4, 6)
    (table,) = printed(rows, 0.5)
    cells = dict(zip(table.heads, table.cells[0], strict=True))
    assert (cells["numbers to 50%"], cells["hours to 50%"], cells["simulated hours"]) == ("100", "4", "6")
    (plain,) = printed(rows_of(group_runs([read_run(make_run(tmp_path / "plain"))]), 0.4), 0.4)
    assert not {"numbers to 40%", "simulated hours"} & set(plain.heads)
