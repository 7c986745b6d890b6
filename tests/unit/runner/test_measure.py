"""What is measured of a round: scores, both means of clients' own models, traffic, and whether a run is of any use."""

import dataclasses
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from solera.cli.main import app
from solera.core.accounting import KINDS
from solera.core.task import Data
from solera.method import About, Method, Model, find_method
from solera.runs.measure import _spread, first_if_all_void, measure, not_finite, traffic, why_unusable
from solera.runs.record import RoundRecord, Traffic, read_records
from solera.scenario.server import Server
from solera.testing import run_toy, small
from solera.train.fitting import Score


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


# ---- the scores of a round --------------------------------------------------------------------------


class OneRight(nn.Module):
    """Takes every sample for class 0, with the logits (2, 0, 0)."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([2.0, 0.0, 0.0]))

    def forward(self, x):
        return self.logits.expand(len(x), 3)


@dataclasses.dataclass(frozen=True)
class Reports(Method):
    """Has the models it is given, and no own models of clients."""

    about = About("", "", "", "")
    init = round = None

    def models(self, state):
        return state


def test_models_ensembles_and_averages_are_judged_by_accuracy_and_cross_entropy():
    server = Server({"one": OneRight}, ["one"], 0, 3)
    test = Data(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))
    sure = {"logits": torch.tensor([100.0, 0.0, 0.0])}
    server.report_ensemble("both", [("one", server.init("one")), ("one", server.init("one"))])
    server.report_average("one", {"logits": torch.tensor([0.0, 2.0, 0.0])})
    found = measure(
        Reports(), {"m": Model("one", server.init("one")), "sure": Model("one", sure)}, None, server, test, 0
    )
    # of logits (2, 0, 0): log(e^2 + 2) - 2 for the first class, log(e^2 + 2) for another
    log = math.log(math.exp(2) + 2)
    loss = {
        "m": (3 * (log - 2) + log) / 4,
        "sure": 25.0,
        "both": (3 * (log - 2) + log) / 4,
        "one": (3 * log + log - 2) / 4,
    }
    accuracy = {"m": 0.75, "sure": 0.75, "both": 0.75, "one": 0.25}
    assert [s[:3] for s in found] == [
        (kind, name, metric)
        for kind, name in (("model", "m"), ("model", "sure"), ("ensemble", "both"), ("average", "one"))
        for metric in ("accuracy", "loss")
    ] + [("diversity", "both", metric) for metric in ("disagreement", "kl", "pairs")]
    *judged, disagreement, kl, pairs = found
    assert (disagreement.value, kl.value, pairs.value) == (0, 0, 1)  # twice the same model
    for s in judged:
        assert s.value == pytest.approx((accuracy if s.metric == "accuracy" else loss)[s.name], abs=1e-5)


def test_a_personal_method_has_rows_for_all_own_models_and_for_each_client(tmp_path):
    result = run_toy(small(find_method("mnfl")()), tmp_path, rounds=1)
    (record,) = read_records(tmp_path, [])
    each = [s["accuracy"] for s in record.of("client").values()]
    assert record.own["clients"] == len(each) > 1
    assert record.own["mean"] == pytest.approx(sum(each) / len(each), abs=1e-4)
    assert list(record.of("stage")) == ["after_training", "after_distilling"]
    assert record.of("stage")["after_distilling"] == record.own == result.summary["personal"]


def test_traffic_is_counted_by_way_and_task():
    sent = {
        "train": SimpleNamespace(bytes=10, floats=2, integers=1, content=Counter(parameters=8)),
        "ask": SimpleNamespace(bytes=5, floats=1, integers=0, content=Counter(predictions=4)),
    }
    found = traffic(SimpleNamespace(down=sent, up={}))
    content = {"down": {"data": 0, "parameters": 8, "predictions": 4}, "up": dict.fromkeys(KINDS, 0)}
    expected = {"down": {"train": 10, "ask": 5}, "up": {}}, {"down": 3, "up": 0}, {"down": 1, "up": 0}
    assert found == Traffic(*expected, content)


# ---- of any use -------------------------------------------------------------------------------------


def test_whether_a_run_is_of_any_use():
    fine, bad = {"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.1, "loss": float("nan")}
    void = {"kind": "round_empty", "reason": "why"}

    def record(**line):
        return RoundRecord.from_line(json.dumps({"round": 0, **line}))

    last = record(models={"a": bad}, ensembles={"b": bad})
    failed = record(failures=[{"client": "c3", "task": "t", "reason": "blew up"}])
    assert not_finite(last) == ["a", "b"]
    assert why_unusable([failed, last]) == (
        "at the end the loss of a, b is not finite; the first client to fail was c3: blew up"
    )
    assert why_unusable([last, record(models={"a": bad}, ensembles={"b": fine})]) is None
    assert why_unusable([record()]) is None
    assert why_unusable([record(personal={"mean": 0.5, "clients": 2})]) is None  # judged by accuracy
    assert first_if_all_void([record(events=[void])] * 2) == "why"
    assert first_if_all_void([record(events=[void]), record()]) is None
    assert first_if_all_void([]) is None
