"""Kinds of result, the main result that all cases share, and what a comparison warns of."""

from pathlib import Path
from typing import Any

import pytest

from made_runs import line, make_run
from solera.methods.heterofl import HeteroFL
from solera.methods.ifca import IFCA
from solera.runs.compare import rows_of
from solera.runs.groups import group_runs
from solera.runs.measure import kinds
from solera.runs.read import read_run, read_runs
from solera.runs.results import Comparison, Result, compared_results, lines_of, unlike
from solera.scenario.server import Server

THREE = {"lenet5": 0.4, "mlp": 0.5, "tiny-cnn": 0.6}


def ensemble(accuracy: float, name: str = "teachers") -> dict[str, Any]:
    return {"ensembles": {name: {"accuracy": accuracy, "loss": 1.0}}}


def own(mean: float, **more: float) -> dict[str, Any]:
    return {"personal": {"mean": mean, "std": 0.1, "worst_decile": 0.2, "clients": 4, **more}}


def case(home: Path, method: str, models: dict[str, float], **more: Any) -> Path:
    """A run of one round with these accuracies; `more` are fields of the round, and settings as `table__key`."""
    settings = {k: v for k, v in more.items() if "__" in k}
    fields = {k: v for k, v in more.items() if "__" not in k}
    clients = {"models__clients": [n for n in models if n != settings.get("models__server")] or ["mlp"]}
    server = settings.get("models__server")
    if server and server not in settings.get("models__clients", ()):
        fields.setdefault("kinds", {server: "server"})
    rounds = [line(0, models, **fields)]
    return make_run(home / method, rounds=rounds, method__name=method, run__rounds=1, **(clients | settings))


def compared(home: Path) -> Comparison:
    return compared_results(group_runs(read_runs([home])))


def warnings(home: Path) -> str:
    return "\n".join(unlike(compared(home)))


# ---- kinds ------------------------------------------------------------------------------------------


def kinds_of(home: Path) -> dict[str, str]:
    return {r.name: r.kind for r in lines_of(read_run(home))}


def test_clusters_members_and_narrow_models_are_no_models_for_everybody(tmp_path):
    found = kinds(IFCA().models(IFCA.State({"mlp": [{}, {}], "lenet5": [{}, {}]})), Server({}, [], 0, 2))
    home = case(tmp_path, "ifca", dict.fromkeys(found, 0.5), kinds=found)
    assert kinds_of(home) == dict.fromkeys(("mlp", "mlp.1", "lenet5", "lenet5.1"), "part")
    shapes = {"mlp": {"1": {}, "0.5": {}, "0.0625": {}}}
    state = HeteroFL.State(
        weights={"mlp": {}}, shapes=shapes, statistics={"mlp": {r: {} for r in shapes["mlp"]}}, rows={}
    )
    models = HeteroFL().models(state)
    found = kinds(models, Server({}, [], 0, 2))
    home = case(tmp_path, "heterofl", dict.fromkeys(models, 0.5), kinds=found)
    assert kinds_of(home) == {"mlp": "model", "mlp-0.5": "part", "mlp-0.0625": "part"}


def test_architectures_that_only_look_like_parts_are_models(tmp_path):
    names = ["net", "net.1", "net-0.5", "fedet-cnn", "v2.1"]
    home = case(tmp_path, "fedavg", dict.fromkeys(names, 0.5))
    assert kinds_of(home) == dict.fromkeys(names, "model")


def test_the_servers_own_model_is_one_that_no_client_has(tmp_path):
    home = case(tmp_path, "large", {"big": 0.7, "mlp": 0.5}, models__server="big")
    assert kinds_of(home) == {"big": "server", "mlp": "model"}
    home = case(tmp_path, "dsfl", {"mlp": 0.5}, models__server="mlp", models__clients=["mlp"])
    assert kinds_of(home) == {"mlp": "model"}


# ---- the main result --------------------------------------------------------------------------------


def test_the_quickstart_compares_the_models_that_both_have(tmp_path):
    case(tmp_path, "fedavg", THREE)
    better = {n: a + 0.1 for n, a in THREE.items()}
    case(tmp_path, "fusionlarge", {"big": 0.9, **better}, models__server="big", **ensemble(0.8))
    found = compared(tmp_path)
    assert found.shared == Result("mean", "mean of lenet5, mlp, tiny-cnn")
    assert found.main == [found.shared] * 2
    last = {(r.group.method, r.kind): r.last.mean for r in rows_of(found.groups) if r.kind != "model"}
    assert last == {
        ("fedavg", "mean"): pytest.approx(0.5),
        ("fusionlarge", "mean"): pytest.approx(0.6),
        ("fusionlarge", "server"): 0.9,
        ("fusionlarge", "ensemble"): 0.8,
    }


def test_a_mean_is_over_the_architectures_that_all_cases_have(tmp_path):
    case(tmp_path, "a", THREE)
    case(tmp_path, "b", {"mlp": 0.7, "tiny-cnn": 0.9, "vgg9": 0.1})
    found = compared(tmp_path)
    assert found.shared == Result("mean", "mean of mlp, tiny-cnn")
    means = [r.last.mean for r in rows_of(found.groups) if r.kind == "mean"]
    assert means == pytest.approx([0.55, 0.8])
    assert "mean of mlp, tiny-cnn, which all cases have; it leaves out lenet5 (a); vgg9 (b)" in warnings(tmp_path)


def test_one_architecture_in_common_is_compared_by_itself(tmp_path):
    case(tmp_path, "mixed", THREE)
    case(tmp_path, "same", {"mlp": 0.7})
    assert compared(tmp_path).shared == Result("model", "mlp")


def test_no_architecture_in_common_is_no_main_result(tmp_path):
    case(tmp_path, "a", {"lenet5": 0.4})
    case(tmp_path, "b", {"mlp": 0.7})
    found = compared(tmp_path)
    assert found.shared is None
    assert "no main result that all cases have: lenet5 (a); mlp (b)" in warnings(tmp_path)


def test_fed_ensemble_is_its_ensemble_and_ifca_what_its_clients_choose(tmp_path):
    several = {"mlp": 0.2, "mlp.1": 0.3}
    parts = {"kinds": dict.fromkeys(several, "part")}
    case(tmp_path, "fedensemble", several, **parts, **ensemble(0.6, "ensemble"))
    case(tmp_path, "ifca", several, **parts, **own(0.7))
    case(tmp_path, "fedavg", {"mlp": 0.5})
    found = compared(tmp_path)
    assert found.shared is None
    assert dict(zip([g.method for g in found.groups], found.main, strict=True)) == {
        "fedavg": Result("model", "mlp"),
        "fedensemble": Result("ensemble", "ensemble"),
        "ifca": Result("own", "own models"),
    }
    said = warnings(tmp_path)
    assert "mlp (fedavg); ensemble ensemble (fedensemble); own models (ifca); these accuracies are not comp" in said
    assert "do not compare these accuracies" in said


def test_personal_methods_share_their_personal_result(tmp_path):
    case(tmp_path, "ditto", {"mlp": 0.4}, **own(0.8))
    case(tmp_path, "mnfl", {}, **own(0.9))
    assert compared(tmp_path).shared == Result("own", "own models")
    case(tmp_path, "fedavg", {"mlp": 0.4})
    assert compared(tmp_path).shared is None


def test_servers_models_are_compared_whatever_they_are_and_a_difference_is_told(tmp_path):
    case(tmp_path, "fedet", {"big": 0.7, "mlp": 0.5}, models__server="big")
    case(tmp_path, "fusionlarge", {"huge": 0.8, "mlp": 0.5}, models__server="huge")
    assert [r.name for r in compared(tmp_path).main] == ["big", "huge"]
    assert "different models.server: big (fedet); huge (fusionlarge)" in warnings(tmp_path)


def test_a_case_that_only_begins_takes_the_main_result_from_nobody(tmp_path):
    case(tmp_path, "a", THREE)
    case(tmp_path, "b", THREE)
    make_run(tmp_path / "c", rounds=[{"round": 0}], finished=False, method__name="c", run__rounds=1)
    found = compared(tmp_path)
    assert found.shared == Result("mean", "mean of lenet5, mlp, tiny-cnn")
    assert found.main[-1] is None


# ---- warnings ---------------------------------------------------------------------------------------


def test_equal_cases_are_warned_of_nothing(tmp_path):
    for method in ("a", "b"):
        case(tmp_path, method, THREE, data__client_test=0.2, public__source="held-out", public__size=100)
    assert warnings(tmp_path) == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data__client_test": 0.2}, "different data.client_test: 0 (a); 0.2 (b); a client's test split is"),
        ({"data__validation": 0.1}, "different data.validation: 0 (a); 0.1 (b); the server's validation set"),
        ({"public__source": "held-out", "public__size": 50}, "public data: nothing held out (a); 50 held out (b)"),
        ({"run__seed": 7}, "different seeds: seed 0 (a); seed 7 (b)"),
    ],
)
def test_unlike_data_and_seeds_are_told(tmp_path, settings, said):
    case(tmp_path, "a", THREE)
    case(tmp_path, "b", THREE, **settings)
    assert said in warnings(tmp_path)


def test_who_had_more_to_train_on_is_told_in_samples(tmp_path):
    homes = [case(tmp_path, "fedavg", THREE), case(tmp_path, "mnfl", {}, data__client_test=0.2, **own(0.9))]
    for home, samples in zip(homes, (1000, 800), strict=True):
        (home / "partition.json").write_text(f'{{"samples": {samples}}}')
    assert "had more training data (1000 samples against 800): use the same in all cases" in warnings(tmp_path)


def test_samples_that_no_setting_explains_are_told_unless_they_differ_by_rounding(tmp_path):
    homes = [case(tmp_path, "a", THREE), case(tmp_path, "b", THREE)]
    for more, told in ((1001, False), (1200, True)):
        for home, samples in zip(homes, (1000, more), strict=True):
            (home / "partition.json").write_text(f'{{"samples": {samples}}}')
        assert ("different numbers of clients' training samples: 1000 (a); 1200 (b)" in warnings(tmp_path)) == told


@pytest.mark.parametrize("content", ["", "[]", '{"samples": -1}', '{"samples": "many"}', '{"samples": true}'])
def test_a_damaged_count_of_samples_counts_for_nothing(tmp_path, content):
    home = case(tmp_path, "a", THREE)
    (home / "partition.json").write_text(content)
    assert read_run(home).samples is None


def test_measuring_and_traffic_that_differ_are_told(tmp_path):
    case(tmp_path, "a", THREE, run__eval_every=1)
    sent = {"bytes": {"down": {"train": 900}, "up": {"train": 100}}}
    case(tmp_path, "b", THREE, run__eval_every=5, **sent)
    said = warnings(tmp_path)
    assert "different run.eval_every: 1 (a); 5 (b)" in said
    assert "different traffic: from 150 B (a) to 1.0 kB (b)" in said


def test_a_method_that_sends_nothing_is_no_budget_to_compare_with(tmp_path):
    case(tmp_path, "local", {}, bytes={"down": {}, "up": {}}, **own(0.9))
    case(tmp_path, "mnfl", {}, **own(0.9))
    assert "traffic" not in warnings(tmp_path)


def test_own_models_of_other_clients_are_told(tmp_path):
    case(tmp_path, "a", {}, run__eval_clients=100, **own(0.9))
    case(tmp_path, "b", {}, run__eval_clients=5, **own(0.9))
    assert "different run.eval_clients: 100 (a); 5 (b)" in warnings(tmp_path)


def test_seeds_that_are_the_comparison_are_not_warned_of(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"s{seed}", run__seed=seed)
    groups = group_runs(read_runs([tmp_path]), ["method.name", "run.seed"])
    assert unlike(compared_results(groups)) == []


# ---- both personal means ----------------------------------------------------------------------------


def test_both_means_of_own_models_are_in_their_row(tmp_path):
    case(tmp_path, "mnfl", {}, **own(0.744, weighted_mean=0.793))
    (row,) = rows_of(group_runs(read_runs([tmp_path])))
    assert (row.kind, row.last.mean, row.last_weighted.mean) == ("own", 0.744, 0.793)


def test_runs_of_older_versions_have_no_weighted_mean_and_mix_with_none(tmp_path):
    for seed, more in ((0, {"weighted_mean": 0.9}), (1, {})):
        make_run(tmp_path / f"s{seed}", rounds=[line(0, {}, **own(0.7, **more))], run__seed=seed, run__rounds=1)
    (row,) = rows_of(group_runs(read_runs([tmp_path])))
    assert row.last.mean == pytest.approx(0.7)
    assert row.last_weighted is None
