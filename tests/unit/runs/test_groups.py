"""Runs grouped over seeds, and what tells the groups apart."""

import json

from made_runs import make_run
from solera.runs.groups import between_methods, cautions, distinguishing, group_runs
from solera.runs.read import read_run


def test_seeds_are_grouped_and_methods_apart(tmp_path):
    homes = [
        make_run(tmp_path / f"{m}{s}", run__seed=s, method__name=m, run__name=f"n{s}", engine__workers=s)
        for m in ("feddf", "fedavg")
        for s in (0, 1, 2)
    ]
    groups = group_runs([read_run(h) for h in homes])
    assert [(g.method, len(g.runs), g.settings) for g in groups] == [("feddf", 3, {}), ("fedavg", 3, {})]
    assert cautions(groups) == []


def test_only_what_differs_is_a_setting_of_a_group(tmp_path):
    homes = [make_run(tmp_path / f"a{a}", partition__alpha=a) for a in (0.1, 1.0)]
    groups = group_runs([read_run(h) for h in homes])
    assert [g.settings for g in groups] == [{"partition.alpha": 0.1}, {"partition.alpha": 1.0}]
    assert [g.label for g in groups] == ["feddf alpha=0.1", "feddf alpha=1"]
    assert any("different partition.alpha: 0.1 (1 run), 1 (1 run)" in c for c in cautions(groups))


def test_what_differs_between_methods_only_is_no_column(tmp_path):
    runs = [
        read_run(make_run(tmp_path / "a", method__name="fedavg", method__local={"lr": 0.05})),
        read_run(make_run(tmp_path / "b", method__name="fedprox", method__local={"lr": 0.1}, method__mu=0.1)),
        read_run(make_run(tmp_path / "c", method__name="fedprox", method__local={"lr": 0.1}, method__mu=1.0)),
    ]
    assert distinguishing(runs) == ["method.mu"]
    assert between_methods(runs) == {"method.local.lr": {"fedavg": 0.05, "fedprox": 0.1}}
    assert [g.settings for g in group_runs(runs)] == [{"method.mu": None}, {"method.mu": 0.1}, {"method.mu": 1.0}]


def test_grouping_by_chosen_keys_pools_the_rest_and_says_so(tmp_path):
    runs = [read_run(make_run(tmp_path / f"a{a}{s}", partition__alpha=a, run__seed=s)) for a in (1, 2) for s in (0, 1)]
    (group,) = group_runs(runs, ["method.name"])
    assert len(group.runs) == 4
    said = cautions([group])
    assert any("pooled over runs that differ in partition.alpha" in c for c in said)
    assert any("several runs of seed 0" in c for c in said)


def test_what_cannot_be_compared_is_told(tmp_path):
    runs = [
        read_run(make_run(tmp_path / "a")),
        read_run(make_run(tmp_path / "b", data__name="cifar10")),
        read_run(make_run(tmp_path / "c", run__rounds=9, finished=False)),
    ]
    said = "\n".join(cautions(group_runs(runs)))
    assert "different data sets: fashion-mnist (2 runs), cifar10 (1 run); their accuracies are not comparable" in said
    assert "different run.rounds: 3 (2 runs), 9 (1 run)" in said
    assert "not finished" in said
    assert "(3 of 9)" in said


def test_machines_with_different_fingerprints(tmp_path):
    """A run that moved counts on both; one of an older version, or a damaged one, says nothing."""

    def run(name, machines):
        home = make_run(tmp_path / name, run__seed=len(name))
        (home / "run.json").write_text(json.dumps({"format": 1, "solera": "0.1.0", "fingerprints": machines}))
        return read_run(home)

    assert cautions(group_runs([run("a", ["aa"]), run("bb", ["aa"]), run("ccc", None), run("dddd", [7])])) == []
    (told,) = cautions(group_runs([run("eeeee", ["aa"]), run("ffffff", ["aa", "bb"])]))
    assert told.startswith("machines with different fingerprints: aa (2 runs), bb (1 run)")


def test_other_pretrained_weights_under_the_same_name(tmp_path):
    """A name of the hub may mean another commit tomorrow; what is damaged in run.json says nothing."""

    def run(name, origins):
        home = make_run(tmp_path / name, run__seed=len(name))
        told = {"format": 1, "solera": "0.1.0", "experiment": {"weights": origins}}
        (home / "run.json").write_text(json.dumps(told))
        return read_run(home)

    same = {"tiny": {"model": "hf:me/tiny", "weights": "pretrained", "digest": "aa"}, "lstm": 3}
    other = {"tiny": {**same["tiny"], "digest": "bb"}}
    random = {"tiny": {"model": "hf:me/tiny", "weights": "random"}}
    assert cautions(group_runs([run("a", same), run("bb", same), run("ccc", random), run("dddd", 7)])) == []
    (told,) = cautions(group_runs([run("eeeee", same), run("ffffff", other)]))
    assert told == "different weights of hf:me/tiny: aa (1 run), bb (1 run); their accuracies are not comparable"
