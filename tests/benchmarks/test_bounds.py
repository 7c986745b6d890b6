"""The study behind docs/bounds.md."""

import json
import math
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bounds import measure  # noqa: E402


def test_the_numbers_of_the_page_are_those_that_were_recorded():
    page = (ROOT / "docs" / "bounds.md").read_text("utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "bounds.json").read_text("utf-8"))["rows"]
    assert len(rows) == 15
    for row in rows:
        assert f"| {row['m']:,} | {row['risk']:.3f} | {row['feddf']:.3f}" in page


def test_a_few_draws_agree_with_the_record():
    found = measure("alike", 20, 20)
    assert found["feddf_broken"] == found["fedet_broken"] == 0
    assert 0.1 <= found["risk"] < found["fedet"]
    assert abs(found["feddf_deviation"] - 0.387) < 0.001  # sqrt(log(20 / 0.05) / 40)


def test_the_recorded_terms_are_those_of_the_theorems():
    """Worked out again without the package: by the formulas, and the divergence by trying all intervals of a grid."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "bounds.json").read_text("utf-8"))["rows"]
    at = np.linspace(-0.05, 1.0, 1051)  # the ends of all intervals lie on it
    for gap, noise, name in ((0.0, 0.1, "alike"), (0.06, 0.1, "apart"), (0.0, 0.5, "noise only")):
        shares = np.array([np.clip((at - gap * k) / 0.4, 0, 1) for k in range(10)])
        differences = shares - shares.mean(0)
        distance = [np.abs(d[:, None] - d[None, :]).max() for d in differences]  # half of d_HdH
        for row in (r for r in rows if r["setting"] == name):
            expected = {
                "feddf_deviation": math.sqrt(math.log(2 * 10 / 0.05) / (2 * row["m"])),
                "fedet_deviation": math.sqrt(math.log(1 / 0.05) / row["m"]),
                "feddf_divergence": np.mean(distance),
                "fedet_divergence": np.mean(distance),
                "feddf_joint": 2 * noise,
                "fedet_joint": 2 * noise,
            }
            assert {key: row[key] for key in expected} == pytest.approx(expected, abs=1e-9)
            for paper in ("feddf", "fedet"):
                terms = [row[f"{paper}_{term}"] for term in ("empirical", "deviation", "divergence", "joint")]
                assert row[paper] == pytest.approx(sum(terms), abs=1e-9)
