"""`solera tune`: which trials a search makes, what scores them, and what it writes."""

import json

import pytest
from typer.testing import CliRunner

from solera.cli.main import app
from solera.core.errors import ConfigError
from solera.lab import tune as tuning_
from solera.lab.tune import Found, Search, Tuning, check_tuning, extended, read_tuned, trial_config, tune
from solera.runs.config import load_config
from solera.scenario.scenario import Scenario

SMALL = (
    "run.rounds=1", "data.train_size=200", "data.test_size=60", "data.validation=0.2", "partition.clients=2",
    "public.size=20", 'models.clients=["mlp"]', "method.local.epochs=1", "engine.name=inprocess",
    "federation.fraction=1.0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "edge", "new"),
    [
        ([0.001, 0.01, 0.1, 1.0], 1, 10.0),
        ([0.001, 0.01, 0.1, 1.0], -1, 0.0001),
        ([0.1, 0.2, 0.3, 0.4], 1, 0.5),
        ([0.1, 0.2, 0.3, 0.4], -1, 0.0),
        ([5, 10, 20], 1, 40),
        ([0.0, 0.5], -1, -0.5),
        ([1.5, 1, 0.5, 0.1, 0.05, 0.01], -1, 0.002),
    ],
)
def test_a_grid_is_extended_as_it_is_spaced(values, edge, new):
    assert extended(values, edge) == pytest.approx(new, abs=1e-12)


def searched(monkeypatch, tmp_path, score, over, more=(), **kwargs):
    """A search whose trials are not run: `score(settings)` is their result."""
    runs = []

    def perform(planned, out, workers, tell, new):
        runs.extend(run.name for run in new)

    monkeypatch.setattr(tuning_, "run_planned", perform)
    monkeypatch.setattr(tuning_, "check_fits", lambda runs: None)
    searches = (Search("first", {"method.name": "fedprox"}, over), *more)
    t = Tuning("toy", searches, SMALL, **kwargs)
    by_name = {}

    def score_of(homes):
        return score(by_name[str(homes[0])])

    original = tuning_._runs

    def remember(t_, search, point):
        found = original(t_, search, point)
        for run in found:
            by_name[str(tmp_path / run.name)] = run.settings
        return found

    monkeypatch.setattr(tuning_, "_runs", remember)
    monkeypatch.setattr(tuning_, "_score", score_of)
    return tune(t, tmp_path), runs


def test_an_optimum_inside_ends_the_search(monkeypatch, tmp_path):
    (found,), _ = searched(monkeypatch, tmp_path, lambda s: -abs(s["method.mu"] - 0.1), {"method.mu": [0.01, 0.1, 1.0]})
    assert [dict(p)["method.mu"] for p in found.trials] == [0.01, 0.1, 1.0]
    assert dict(found.best) == {"method.mu": 0.1}


def test_an_optimum_at_an_edge_extends_the_grid_until_it_is_inside(monkeypatch, tmp_path):
    (found,), _ = searched(monkeypatch, tmp_path, lambda s: -abs(s["method.mu"] - 100), {"method.mu": [0.01, 0.1, 1.0]})
    assert [dict(p)["method.mu"] for p in found.trials] == [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
    assert dict(found.best) == {"method.mu": 100.0}


def test_only_the_setting_at_its_edge_is_extended(monkeypatch, tmp_path):
    over = {"method.mu": [0.01, 0.1, 1.0], "method.local.lr": [0.1, 0.2]}
    score = lambda s: -abs(s["method.mu"] - 0.1) - abs(s["method.local.lr"] - 0.4)  # noqa: E731
    (found,), _ = searched(monkeypatch, tmp_path, score, over)
    assert len(found.trials) == 6 + 2
    assert dict(found.best) == {"method.mu": 0.1, "method.local.lr": 0.4}
    assert [dict(p) for p in list(found.trials)[6:]] == [
        {"method.mu": 0.1, "method.local.lr": 0.4},
        {"method.mu": 0.1, "method.local.lr": 0.8},
    ]


def test_a_search_ends_where_values_become_invalid_and_says_so(monkeypatch, tmp_path):
    more = (Search("second", {"method.name": "fedavgm"}, {"method.momentum": [0.7, 0.8, 0.9]}),)
    score = lambda s: s.get("method.momentum", -abs(s.get("method.mu", 0) - 0.1))  # noqa: E731
    found, _ = searched(monkeypatch, tmp_path, score, {"method.mu": [0.01, 0.1, 1.0]}, more)
    assert dict(found[1].best) == {"method.momentum": 0.9}
    assert found[1].notes == ["method.momentum = 0.9 is best and at the edge of what was tried; 1 is not a valid value"]


def test_extensions_have_an_end(monkeypatch, tmp_path):
    (found,), _ = searched(monkeypatch, tmp_path, lambda s: s["method.mu"], {"method.mu": [0.1, 1.0]})
    assert len(found.trials) == 2 + tuning_.MOST_EXTENSIONS
    assert "6 values beyond the grid were tried" in found.notes[0]


def test_every_method_gets_as_many_trials(monkeypatch, tmp_path):
    more = (Search("second", {"method.name": "fedavgm"}, {"method.momentum": [0.1, 0.2, 0.3]}),)
    score = lambda s: -abs(s.get("method.mu", 0) - 100) - abs(s.get("method.momentum", 0) - 0.2)  # noqa: E731
    found, _ = searched(monkeypatch, tmp_path, score, {"method.mu": [0.01, 0.1, 1.0]}, more)
    assert [len(f.trials) for f in found] == [6, 6]
    # between 0.1, 0.2 and 0.3, then nearer to the best: geometric means, three digits
    assert [dict(p)["method.momentum"] for p in found[1].trials] == [0.1, 0.2, 0.3, 0.141, 0.245, 0.168]
    assert found[1].notes == []


def test_a_random_search_draws_the_same_again(monkeypatch, tmp_path):
    score = lambda s: -abs(s["method.mu"] - 0.1)  # noqa: E731
    over = {"method.mu": [0.001, 10.0]}
    (a,), _ = searched(monkeypatch, tmp_path, score, over, draws=8)
    monkeypatch.undo()
    (b,), _ = searched(monkeypatch, tmp_path, score, over, draws=8)
    assert a.trials == b.trials
    assert len(a.trials) >= 8
    assert all(0.001 <= dict(p)["method.mu"] <= 10 for p in list(a.trials)[:8])


def test_a_trial_that_failed_is_never_best():
    found = Found(Search("x", {}, {"a": [1, 2]}), {(("a", 1),): None, (("a", 2),): 0.1})
    assert found.best == (("a", 2),)


# ---- what scores a trial ----------------------------------------------------------------------------


def test_a_trial_is_scored_on_the_servers_validation_set():
    t = Tuning("toy", (), (*SMALL, "run.stop.target=0.9", "run.stop.split=test"))
    config = trial_config(t, Search("x", {"method.name": "fedavg"}, {}), (("method.local.lr", 0.5),))
    assert (config.run.stop.split, config.run.stop.patience, config.run.stop.target) == ("validation", 1, None)
    assert config.method.local.lr == 0.5


def test_without_a_validation_set_it_is_refused():
    t = Tuning("toy", (Search("FedAvg", {"method.name": "fedavg"}, {"method.local.lr": [0.1, 1.0]}),))
    with pytest.raises(ConfigError, match=r"FedAvg: data.validation = 0: .* add --set data.validation=0.1"):
        check_tuning(t)


def test_own_models_are_scored_on_samples_that_are_neither_trained_on_nor_tested():
    t = Tuning("ditto/laptop", ())
    config = trial_config(t, Search("x", {}, {}), ())
    assert config.data.client_validation == 0.2
    plain = load_config("ditto/laptop")
    rows = []
    for c in (plain, config):
        s = Scenario(c.data, c.models, c.partition, c.public, seed=0, workers=1)
        rows.append([(set(s._train.indices(i).tolist()), set(s._test.indices(i).tolist())) for i in range(12)])
    for (train, test), (less, scored) in zip(*rows, strict=True):
        assert less | scored == train
        assert not less & scored
        assert not scored & test
        assert scored


# ---- the command ------------------------------------------------------------------------------------


def solera(*args):
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


def test_the_command_searches_writes_a_recipe_and_continues(tmp_path):
    sets = [w for s in SMALL for w in ("--set", s)]
    command = ["tune", "toy", "--method", "fedavg", "--over", "method.local.lr=0.0001,0.05", "--out", tmp_path, *sets]
    result = solera(*command, "--json")
    assert result.exit_code == 0
    (search,) = json.loads(result.stdout)["searches"]
    tried = {t["settings"]["method.local.lr"]: t["score"] for t in search["trials"]}
    assert len(tried) >= 3  # the better one was at an edge
    best = max((lr for lr, score in tried.items() if score is not None), key=tried.get)  # a large one may diverge
    assert search["best"] == {"method.local.lr": best}
    home = tmp_path / f"fedavg/local.lr={best:g}/s0"
    line = json.loads((home / "metrics.jsonl").read_text().splitlines()[-1])
    assert tried[best] == line["validation"]["mlp"]["accuracy"]
    winner = load_config(tmp_path / "fedavg.toml")
    assert winner.method.local.lr == best
    assert not winner.run.stop.active
    assert read_tuned(tmp_path, "toy") == {"fedavg": {"method.local.lr": best}}
    with pytest.raises(ConfigError, match="this search was over toy, not feddf/table2"):
        read_tuned(tmp_path, "feddf/table2")
    before = (home / "metrics.jsonl").stat().st_mtime_ns
    assert "best" in solera(*command).stdout
    assert (home / "metrics.jsonl").stat().st_mtime_ns == before  # nothing is run again


def test_rows_of_a_paper_are_searched_over_their_own_values():
    rows = {s.name: s.over for s in tuning_.searches_of_paper("feddf/table2", [], None)}
    groups = {"models.options.resnet8.groups": [2, 4, 8, 16]}
    assert rows == {
        "FedAvg, GN": groups,
        "FedProx, GN": {"method.mu": [0.001, 0.01, 0.1, 1.0], **groups},
        "FedAvgM, GN": {"method.momentum": [0.1, 0.2, 0.3, 0.4], **groups},
    }


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("toy",), "toy reproduces no table"),
        (("toy", "--over", "method.local.lr"), "expected KEY=V1,V2"),
        (("toy", "--over", "method.local.lr=0.1"), "at least two different values"),
        (("toy", "--over", "method.local.lr=0.1,0.1"), "at least two different values"),
        (("toy", "--over", "method.local.lr=0.1,1"), "data.validation = 0"),
        (("toy", "--over", "method.local.rate=0.1,1"), "method.local.rate"),
        (("toy", "--method", "fedavg"), "--method needs --over"),
        (("feddf/table2", "--row", "nothing"), "no row to tune is named nothing"),
        (("feddf/table2", "--column", "nothing"), "has no column 'nothing'"),
        (("toy", "--over", "method.local.optimizer=sgd,adam", "--random", "4"), "are not numbers"),
    ],
)
def test_mistakes(args, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = solera("tune", *args)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # before any work
