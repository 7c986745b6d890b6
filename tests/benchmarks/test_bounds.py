"""The study behind docs/bounds.md."""

import json
import pathlib
import sys

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
