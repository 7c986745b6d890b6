"""The study behind docs/availability.md."""

import itertools
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import overlap  # noqa: E402
from solera.methods.framework.cohort import Cohort  # noqa: E402
from timetable_by_hand import schedule  # noqa: E402


def recorded():
    rows = json.loads((ROOT / "benchmarks" / "results" / "overlap.json").read_text("utf-8"))["rows"]
    return {(r["case"], r["method"], r["server_min"]): r for r in rows}


def test_the_numbers_of_the_page_and_its_figure_are_those_that_were_recorded():
    page = (ROOT / "docs" / "availability.md").read_text("utf-8")
    found = recorded()
    for case in overlap.CASES:
        for label in overlap.METHODS:
            rows = [found[case, label, m] for m in overlap.SERVER_MIN]
            cells = [f"{r['hours']:.1f}" + (f" ± {r['sd']:.1f}" if r["sd"] else "") for r in rows]
            assert f"| {case} | {label} | {' | '.join(cells)} |" in page
    assert (ROOT / "docs" / "img" / "overlap.svg").read_text("utf-8") == overlap.draw(list(found.values()))


def test_the_record_is_what_the_timetable_says(monkeypatch):
    """Ten rounds of the paper's two cases, worked out by hand for every speed of the server; one is run again."""
    cohorts, start = [], Cohort.start
    monkeypatch.setattr(Cohort, "start", lambda self, *rest: cohorts.append(self.S) or start(self, *rest))
    method, case = overlap.METHODS["FedEED, overlapping"], overlap.CASES["once an hour (Figure 4)"]
    again, found = overlap.hours(method, case, 20, 0), recorded()
    groups = [[S[k][1] for k in sorted(S)] for S in cohorts[::2]]  # two exchanges a round; drawn by the seed alone
    for (name, kind), (label, pipeline), minutes in itertools.product(
        (("always there (Figure 3)", "always"), ("once an hour (Figure 4)", "uniform")),
        (("FedEED, rounds in turn", "off"), ("FedEED, overlapping", "strict")),
        overlap.SERVER_MIN,
    ):
        spans = schedule(groups, 600.0, 60.0 * minutes, pipeline, kind, 3600.0)
        assert found[name, label, minutes]["hours"] == pytest.approx(max(s.end for s in spans) / 3600, abs=0.01)
    assert found["once an hour (Figure 4)", "FedEED, overlapping", 20]["hours"] == pytest.approx(again, abs=1e-6)
