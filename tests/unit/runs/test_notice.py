"""What a run says of itself when it goes wrong with finite numbers: guessing, and what grows without bound."""

import io
import json
import math

import pytest
import torch

from solera import RunConfig, simulate
from solera.core.task import Data
from solera.data import PartitionConfig
from solera.methods.fedavg import FedAvg
from solera.methods.scaffold import Scaffold
from solera.report.figures import report_data
from solera.report.loading import read_all
from solera.runs.callbacks import Notices
from solera.runs.display import PlainDisplay
from solera.runs.record import RoundRecord
from solera.testing import toy, wide
from solera.train.fitting import Local

BALANCED = [100] * 10


AT_ONCE = (
    "Diverged: training diverged: a loss of 8000 at step 1; no weight has changed yet: look at the model it began with "
    "(a poisoned average?) and the samples, not lr (local.py:1)"
)


def a_round(accuracy=None, loss=1.0, norm=None, **more):
    models = {} if accuracy is None else {"models": {"net": {"accuracy": accuracy, "loss": loss}}}
    events = [] if norm is None else [{"kind": "variates", "architecture": "net", "norm": norm}]
    return RoundRecord.from_line(json.dumps({"round": 0, **models, "events": events, **more}))


def events(notices, record):
    notices.round(record)
    return notices.noted


def kinds(rounds, labels=BALANCED):
    notices = Notices(labels)
    return [[e["kind"] for e in events(notices, m)] for m in rounds]


def test_a_fall_to_guessing_is_said_once_when_it_happens():
    accuracies = [0.1, 0.45, 0.3, 0.11, 0.1, 0.5, 0.1]
    assert kinds(map(a_round, accuracies)) == [[], [], [], ["collapsed"], [], [], ["collapsed"]]
    notices = Notices(BALANCED)
    notices.begin({}, [a_round(0.45)])
    (event,) = events(notices, a_round(0.1))
    assert event["name"] == "net"
    assert "net fell from 45.0% to 10.0%" in event["reason"]


def test_with_few_samples_who_may_have_been_lucky_does_not_collapse():
    few = [12, 8]  # guessing is right in 60%, with luck (two standard deviations of 20 draws) in 82%
    assert kinds(map(a_round, [0.7, 0.7, 0.6, 0.8]), few) == [[]] * 4
    assert kinds(map(a_round, [0.85, 0.7]), few) == [[], ["collapsed"]]


def test_who_never_learned_does_not_collapse():
    assert kinds(map(a_round, [0.1, 0.2, 0.25, 0.1])) == [[]] * 4


def test_guessing_is_the_share_of_the_most_frequent_class():
    assert kinds(map(a_round, [0.95, 0.8]), [800, 200]) == [[], ["collapsed"]]
    assert kinds(map(a_round, [0.95, 0.6]), [500, 500]) == [[], []]


def test_personal_models_collapse_too():
    rounds = [a_round(personal={"mean": m, "clients": 3}) for m in (0.9, 0.1)]
    assert kinds(rounds) == [[], ["collapsed"]]
    assert kinds([a_round(personal={"clients": 0})]) == [[]]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0, 0.3, 2.9, 3.4, 50.0, 0.4, 9.0], [0, 0, 0, 1, 0, 0, 1]),
        ([0.01, 0.2, 1.0], [0, 0, 0]),  # a hundredfold, and no worse than guessing
        ([2.0, math.nan], [0, 1]),
        ([2.0, None], [0, 1]),
        ([math.inf], [1]),
    ],
)
def test_a_loss_that_grows_tenfold_beyond_guessing_is_said(losses, expected):
    said = kinds(a_round(0.5, loss) for loss in losses)
    assert said == [["loss_grows"] if yes else [] for yes in expected]


def test_what_is_said_can_be_written_down():
    for loss in (math.nan, math.inf):
        (event,) = events(Notices(BALANCED), a_round(0.5, loss))
        json.dumps(event, allow_nan=False)


def test_variates_that_grow_tenfold_are_said():
    assert kinds(a_round(norm=x) for x in (1.0, 2.0, 9.9, 10.1, 20.0)) == [[], [], [], ["variates_grow"], []]


def test_rounds_that_were_not_measured_say_nothing():
    assert kinds([a_round(0.6), a_round(), a_round(0.1)]) == [[], [], ["collapsed"]]


def test_a_run_says_it_in_its_line_in_its_metrics_and_in_the_report_and_a_resumed_one_says_the_same(tmp_path):
    """SCAFFOLD at a rate far too large for it."""
    method = Scaffold(Local(epochs=3, batch=8, lr=2.0))
    split = PartitionConfig(clients=8, alpha=0.1)
    lines, events = {}, {}
    for name, stops in (("whole", (6,)), ("resumed", (2, 4, 6))):
        text = io.StringIO()
        for rounds in stops:
            how = {"resume": True, "callbacks": [PlainDisplay(file=text)]}
            simulate(toy({"net": wide}, partition=split), method, tmp_path / name, RunConfig(rounds=rounds), **how)
        lines[name] = text.getvalue()
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        events[name] = [e for m in rows for e in m["events"] if "reason" in e]
    assert events["whole"] == events["resumed"]
    assert "variates_grow" in {e["kind"] for e in events["whole"]}
    assert "variates_grow: net" in lines["whole"]
    assert "warning: round" in lines["whole"]
    (run,) = report_data(read_all([tmp_path / "whole"]))["runs"]
    listed = [kind for _, kind, _ in run["events"]]
    assert "variates" not in listed
    assert listed[0] in {"variates_grow", "collapsed", "loss_grows"}


# ---- a poisoned model ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_once", "later", "cohort", "said"),
    [(3, 0, 0, True), (2, 0, 2, True), (2, 0, 3, False), (1, 0, 0, False), (0, 4, 0, False), (2, 3, 0, True)],
)
def test_when_half_of_a_cohort_diverges_at_its_first_step(at_once, later, cohort, said):
    reasons = [AT_ONCE] * at_once + ["Diverged: a loss of 2000 at step 7; lower lr (0.1) or set clip"] * later
    failures = [{"client": f"c{i}", "task": "local_update", "reason": reason} for i, reason in enumerate(reasons)]
    found = events(Notices(BALANCED), a_round(cohort=cohort, failures=failures))
    assert [e["kind"] for e in found] == (["diverged_at_once"] if said else [])
    if said:
        words = f"{at_once} clients diverged at step 1 and {cohort} did not: was the model that was sent poisoned?"
        assert words in found[0]["reason"]


def biased(model):
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([1e6, 0.0, 0.0]))
    return model


def test_a_poisoned_average_is_named_in_a_run_and_not_the_learning_rate(tmp_path):
    """One of eight clients answers with a huge bias; with the mean of that the others cannot even begin."""
    scenario = toy({"wide": wide})
    honest, liar = scenario.client, next(iter(scenario.roster))

    def client(k, *args, **options):
        made = honest(k, *args, **options)
        if k == liar:
            plain, made.train = made.model, Data(made.train.inputs[:0], made.train.labels[:0])
            made.model = lambda weights=None: biased(plain(weights))
        return made

    scenario.client = client
    text = io.StringIO()
    method = FedAvg(Local(epochs=1, batch=16))
    simulate(scenario, method, tmp_path, RunConfig(rounds=2), engine="inprocess", callbacks=[PlainDisplay(file=text)])
    rounds = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [[e["reason"] for e in r["events"] if e["kind"] == "diverged_at_once"] for r in rounds]
    others = len(scenario.roster) - 1
    words = f"{others} clients diverged at step 1 and 1 did not: was the model that was sent poisoned?"
    assert found == [[], [f"{words} See docs/robustness.md"]]
    assert words in text.getvalue()
    assert [("lower lr" in f["reason"], "poisoned average?" in f["reason"]) for f in rounds[1]["failures"]] == [
        (False, True)
    ] * others
