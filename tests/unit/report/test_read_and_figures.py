"""From run directories to the numbers of the figures: whole ones, half-written ones, and ones that lie."""

import array
import base64
import json

import pytest

from run_directories import write_run
from solera.core.errors import RunError
from solera.report import figures
from solera.report.figures import coefficients, confusion, finite, report_data, similar_order, thinned
from solera.report.loading import Matrix, read_all


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def data_of(*paths, target=None):
    data = report_data(read_all(paths), target)
    json.dumps(data, allow_nan=False)  # whatever was read, a browser can parse it
    return data


# ---- a whole run ------------------------------------------------------------------------------------


def test_every_figure_of_a_whole_run_has_its_numbers(run):
    data = data_of(run)
    (group,) = data["groups"]
    empty = [k for k in ("personal", "coefficients", "timeline", "teachers", "confusion", "seconds") if not group[k]]
    assert empty == []
    assert data["partitions"][group["partition"]]["clients"] == 8
    assert data["notes"] == []
    kinds = {(line["kind"], line["name"]) for line in group["lines"]}
    assert kinds == {
        ("model", "lenet5"), ("model", "mlp"), ("mean", "mean of lenet5, mlp"), ("ensemble", "teachers"),
        ("own", "own models"), ("average", "lenet5"), ("average", "mlp"),
    }  # fmt: skip
    (told,) = data["runs"]
    assert told["command"] == "solera run toy --seed 0 --set method.name=feddf"
    assert told["failures"] == [[4, "c000", "local_update", "no reply"], [9, "c000", "local_update", "no reply"]]
    assert told["events"] == [
        [3, "client_rejected", "client c007, drop_worst"], [10, "client_rejected", "client c007, drop_worst"]
    ]  # fmt: skip
    assert ["partition.alpha", "0.1"] in told["settings"]


def test_seeds_are_one_line_with_a_band(tmp_path):
    for seed, level in enumerate((0.6, 0.8, 0.7)):
        write_run(tmp_path / f"s{seed}", seed=seed, level=level)
    (group,) = data_of(tmp_path)["groups"]
    line = next(line for line in group["lines"] if line["name"] == "lenet5" and line["kind"] == "model")
    assert line["runs"] == [3] * 10
    assert line["round"] == list(range(1, 11))
    assert line["bytes"] == [490_000 * t for t in range(1, 11)]
    assert all(low < mean < high for low, mean, high in zip(line["low"], line["mean"], line["high"], strict=True))
    last = [json.loads(p.read_text().splitlines()[-1]) for p in sorted(tmp_path.glob("*/metrics.jsonl"))]
    values = [m["models"]["lenet5"]["accuracy"] for m in last]
    assert line["last"][0] == pytest.approx(sum(values) / 3, abs=1e-5)
    assert line["low"][-1] == pytest.approx(min(values), abs=1e-5)


def test_methods_are_cases_and_equal_partitions_are_told_once(tmp_path):
    for method in ("fedavg", "feddf"):
        write_run(tmp_path / method, method=method)
    same = (tmp_path / "fedavg" / "partition.json").read_bytes()
    (tmp_path / "feddf" / "partition.json").write_bytes(same)
    data = data_of(tmp_path)
    assert [g["label"] for g in data["groups"]] == ["fedavg", "feddf"]
    assert [g["partition"] for g in data["groups"]] == [0, 0]
    assert len(data["partitions"]) == 1
    assert data["title"] == "fedavg, feddf compared"


# ---- targets ----------------------------------------------------------------------------------------


def hand_made(path, accuracies, seed):
    """A run of one model with these accuracies, which sends 100 bytes a round."""
    write_run(path, seed=seed, rounds=len(accuracies))
    lines = [
        {"round": t, "models": {"m": {"accuracy": a, "loss": 1.0}}, "bytes": {"down": {"x": 60}, "up": {"x": 40}}}
        for t, a in enumerate(accuracies)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_rounds_and_bytes_to_a_target(tmp_path):
    hand_made(tmp_path / "a", [0.1, 0.4, 0.3, 0.6], seed=0)
    hand_made(tmp_path / "b", [0.1, 0.2, 0.4, 0.5], seed=1)
    targets = data_of(tmp_path, target=0.4)["targets"]
    assert targets["values"][targets["shown"]] == 0.4
    (row,) = targets["rows"]
    at = dict(zip(targets["values"], row["at"], strict=True))
    assert at[0.4] == [2, 2, [2.5, 0.70711], [250, 70.71068]]  # rounds 2 and 3: the first time counts
    assert at[0.6] == [1, 2, [4], [400]]
    assert at[0.65] == [0, 2, None, None]


def test_the_target_shown_is_one_that_half_of_the_cases_reach(tmp_path):
    for method, level in (("a", 0.42), ("b", 0.58), ("c", 0.71)):
        hand_made(tmp_path / method, [0.1, level], seed=0)
        config = (tmp_path / method / "config.toml").read_text().replace('"feddf"', f'"{method}"')
        (tmp_path / method / "config.toml").write_text(config)
    targets = data_of(tmp_path)["targets"]
    assert targets["values"][targets["shown"]] == 0.55


def test_the_main_result_is_the_servers_own_model_if_all_cases_have_one(tmp_path):
    write_run(tmp_path / "one", personal=False)
    (group,) = data_of(tmp_path)["groups"]
    assert group["main"] == ["mean", "mean of lenet5, mlp"]
    lines = tmp_path / "one" / "metrics.jsonl"
    rows = [json.loads(line) | {"kinds": {"lenet5": "server"}} for line in lines.read_text().splitlines()]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = data_of(tmp_path)["groups"]
    assert group["main"] == ["server", "lenet5"]
    write_run(tmp_path / "two", method="fedavg", personal=False)
    data = data_of(tmp_path)
    assert data["main_shared"]
    assert [g["main"] for g in data["groups"]] == [["model", "mlp"]] * 2  # lenet5 is a client's there: mlp is alike


# ---- what is missing --------------------------------------------------------------------------------


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty holds no run"):
        read_all([tmp_path / "empty"])
    with pytest.raises(RunError, match="nowhere is not a folder"):
        read_all([tmp_path / "nowhere"])


def test_a_run_that_has_only_begun_gives_a_report_that_says_so(tmp_path):
    write_run(tmp_path / "run", finished=False)
    for name in ("metrics.jsonl", "partition.json"):
        (tmp_path / "run" / name).unlink()
    data = data_of(tmp_path / "run")
    assert any("no round is finished" in note for note in data["notes"])
    assert any("partition.json does not exist" in note for note in data["notes"])
    assert data["groups"][0]["lines"] == []


def test_a_line_cut_short_costs_that_round_only(run):
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"round": 10, "mod')
    data = data_of(run)
    assert data["runs"][0]["done"] == 10
    assert any("1 line that cannot be read" in note for note in data["notes"])


def test_directories_of_older_versions_give_the_figures_they_can(run):
    for name in ("partition.json", "confusion.json"):
        (run / name).unlink()
    old = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        m = json.loads(line)
        for key in ("averages", "personal_accuracies"):
            del m[key]
        m["events"] = [e for e in m["events"] if e["kind"] not in ("teachers", "timeline")]
        old.append(json.dumps(m) + "\n")
    (run / "metrics.jsonl").write_text("".join(old))
    data = data_of(run)
    (group,) = data["groups"]
    assert group["partition"] is group["confusion"] is group["teachers"] is group["timeline"] is None
    assert group["personal"]["clients"] == []
    assert len(group["personal"]["worst"]) == 10
    assert sum("the run is of an older version" in note for note in data["notes"]) == 2


@pytest.mark.parametrize("name", ["partition.json", "confusion.json", "regions.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"classes": -1}', '{"classes": "<b>"}', "null", '{"classes": 1e999}', "[" * 100_000]
)
def test_a_damaged_file_costs_its_figure_only(run, name, content):
    (run / name).write_text(content)
    data = data_of(run)
    assert any(f"{name} is damaged" in note for note in data["notes"])
    assert data["groups"][0]["lines"]


def test_a_matrix_of_the_wrong_size_is_not_drawn(run):
    facts = json.loads((run / "confusion.json").read_text())
    facts["models"]["mlp"]["matrix"].pop()
    (run / "confusion.json").write_text(json.dumps(facts))
    assert data_of(run)["groups"][0]["confusion"] is None


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "coefficients", "clients": ["a"], "matrix": [[1, 2]]},
        {"kind": "coefficients", "clients": ["a"]},
        {"kind": "teachers", "clients": "a", "confidence": None},
        {"kind": "timeline", "start": "now", "end": None},
        {"kind": None},
        {},
    ],
)
def test_events_that_are_not_what_they_seem_are_left_out(tmp_path, event):
    write_run(tmp_path / "run", coefficients=False)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for m in lines:
        m["events"] = [event]
    path.write_text("".join(json.dumps(m) + "\n" for m in lines))
    (group,) = data_of(tmp_path / "run")["groups"]
    assert group["coefficients"] is group["teachers"] is group["timeline"] is None


def test_numbers_that_json_cannot_say_become_gaps(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 1.0', '"loss": NaN').replace('"std": 0.12', '"std": Infinity'))
    assert data_of(run)["groups"][0]["lines"]
    assert finite({"a": [float("nan"), 1.0, (float("inf"),)]}) == {"a": [None, 1.0, [None]]}


def test_mixed_data_sets_are_told_and_kept_apart(tmp_path):
    write_run(tmp_path / "a", data="mnist")
    write_run(tmp_path / "b", data="cifar10")
    data = data_of(tmp_path)
    assert any("different data sets: mnist (1 run), cifar10 (1 run)" in note for note in data["notes"])
    assert [g["label"] for g in data["groups"]] == ["feddf data.name=mnist", "feddf data.name=cifar10"]


def test_a_run_in_progress_is_not_called_unfinished(run, monkeypatch):
    (run / "summary.json").unlink()
    monkeypatch.setattr("solera.report.loading.in_use", lambda path: True)
    data = data_of(run)
    assert data["runs"][0]["status"] == "running"
    assert data["notes"] == []


def test_that_a_run_is_not_finished_is_told_once(run):
    (run / "summary.json").unlink()
    assert len([note for note in data_of(run)["notes"] if "not finished" in note]) == 1


def test_of_damaged_settings_only_the_damage_is_told(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    (tmp_path / "b" / "config.toml").write_bytes(bytes(range(256)))
    (tmp_path / "b" / "partition.json").write_bytes(bytes(range(256)))
    data = data_of(tmp_path)
    assert not any(note.startswith("different") for note in data["notes"])
    assert any(note.startswith("config.toml cannot be read") for note in data["notes"])
    assert any("partition.json is damaged (unexpected content)" in note for note in data["notes"])
    assert [r["again"] is None for r in data["runs"]] == [False, True]


def test_settings_that_go_together_are_told_once(tmp_path):
    for name in ("mnist", "cifar10"):
        for alpha in (0.1, 1.0):
            config = write_run(tmp_path / f"{name}-{alpha}", data=name) / "config.toml"
            text = config.read_text().replace("alpha = 0.1", f"alpha = {alpha}")
            config.write_text(text.replace(f'name = "{name}"', f'name = "{name}"\npath = "files/{name}"'))
    labels = [g["label"] for g in data_of(tmp_path)["groups"]]
    assert labels == [f"feddf data.name={n} alpha={a}" for n in ("cifar10", "mnist") for a in ("0.1", "1")]


def test_the_runs_of_a_sweep_have_the_names_of_their_cases(tmp_path):
    for case, method in (("averaging", "fedavg"), ("distilling", "feddf")):
        write_run(tmp_path / case / "s0", method=method)
    runs = [{"case": case, "out": f"{case}/s0"} for case in ("averaging", "distilling")]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
    assert [g["label"] for g in data_of(tmp_path)["groups"]] == ["fedavg case=averaging", "feddf case=distilling"]


def test_the_subtitle_tells_only_what_all_cases_share(tmp_path):
    write_run(tmp_path / "a", model="lenet5")
    write_run(tmp_path / "b", model="tiny-cnn")
    assert data_of(tmp_path)["subtitle"] == "2 runs · fashion-mnist · 8 clients, dirichlet alpha 0.1"
    assert data_of(tmp_path / "a")["subtitle"].endswith("alpha 0.1 · lenet5, mlp")


def test_a_model_for_all_and_clients_own_models_are_not_compared_silently(tmp_path):
    only_own(write_run(tmp_path / "own", method="mnfl"))
    write_run(tmp_path / "all", method="fedavg", personal=False)
    data = data_of(tmp_path)
    assert any(
        "no main result that all cases have: mean of lenet5, mlp (fedavg); own models (mnfl)" in note
        for note in data["notes"]
    )
    assert not data["main_shared"]
    assert [g["main"][0] for g in data["groups"]] == ["mean", "own"]
    assert data_of(tmp_path / "own")["notes"] == data_of(tmp_path / "all")["notes"] == []


def only_own(run):
    """Take from a run everything that was measured but the clients' own models."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for m in lines:
        m |= {"models": {}, "ensembles": {}, "averages": {}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))


def test_facts_of_events_are_short(run):
    chosen = {"kind": "clusters", "chosen": {"a": 1, "b": 0, "c": 1}}
    attention = {"kind": "attention", "sigma": 10.0, "matrix": [[0.5] * 20] * 20}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["events"] = [chosen, attention]
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    clusters, matrix, *_ = data_of(run)["runs"][0]["events"]
    assert clusters == [1, "clusters", "chosen 0: b; 1: a c"]
    assert matrix == [1, "attention", "sigma 10, matrix (20 entries)"]


# ---- sizes ------------------------------------------------------------------------------------------


def test_long_lines_are_thinned_and_keep_their_end():
    assert thinned(list(range(10)), 20) == list(range(10))
    kept = thinned(list(range(1000)), 300)
    assert len(kept) == 300
    assert kept[-1] == 999
    assert kept == sorted(set(kept))


def test_coefficients_take_a_byte_each_and_no_more_than_there_is_room_for():
    names = [f"c{i}" for i in range(200)]
    matrices = [Matrix(t, names, array.array("f", [1 / 200] * 40_000)) for t in range(30)]
    found = coefficients(matrices, cells=100_000)
    assert len(found["clients"]) == figures.CLIENTS
    assert found["left_out"] == 80
    assert len(found["frames"]) == 100_000 // figures.CLIENTS**2
    assert found["round"][-1] == 30
    assert found["givers"][-1] == pytest.approx([200, 200, 200], abs=0.01)
    assert all(len(f) == -(-(figures.CLIENTS**2) // 3) * 4 for f in found["frames"])


def test_coefficients_use_the_whole_scale():
    matrix = array.array("f", [0.25, 0.75, 0.5, 0.5])  # none is near zero: their differences are what matters
    found = coefficients([Matrix(0, ["a", "b"], matrix)], 100)
    assert (found["low"], found["top"]) == (0.25, 0.75)
    assert sorted(base64.b64decode(found["frames"][0])) == [0, 128, 128, 255]


def test_how_many_givers_count():
    matrix = array.array("f", [1.0, 0.5, 0.0, 0.5])  # the first receiver learns from one, the second from both
    found = coefficients([Matrix(0, ["a", "b"], matrix)], 100)
    assert found["givers"] == [[1.0, 1.5, 2.0]]


def test_confusions_of_seeds_add_up():
    item = {"kind": "model", "name": "m", "right": [2, 1], "matrix": [[2, 0], [1, 1]]}
    one = {"round": 3, "total": [2, 2], "items": [item]}
    found = confusion([one, one])
    assert found["round"] == 4
    assert found["items"][0]["matrix"] == [[4, 0], [2, 2]]
    assert found["items"][0]["total"] == [4, 4]


# ---- the order of the clients -----------------------------------------------------------------------


def test_alike_clients_become_neighbours():
    group = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    similarity = [[1.0 if a == b else 0.1 for b in group] for a in group]
    order = similar_order(similarity)
    assert sorted(order) == list(range(9))
    assert [len({group[i] for i in order[k : k + 3]}) for k in (0, 3, 6)] == [1, 1, 1]


def test_a_chain_is_laid_out_as_a_chain():
    shuffled = [4, 0, 3, 1, 5, 2]
    similarity = [[-abs(a - b) for b in shuffled] for a in shuffled]
    places = [shuffled[i] for i in similar_order(similarity)]
    assert places in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0])


def test_the_order_of_few():
    assert similar_order([]) == []
    assert similar_order([[1.0]]) == [0]
    assert similar_order([[1.0, 0.0], [0.0, 1.0]]) == [0, 1]


def test_what_lora_keeps_off_the_wire(run):
    facts = {
        "lenet5": {"base": "ab", "sent": 100, "whole": 1000, "clients": 6},
        "mlp": {"sent": 50, "whole": 400, "clients": 2},
    }
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["content"] = {"down": {"parameters": 700}, "up": {"parameters": 700}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.json").write_text(json.dumps(summary | {"lora": facts}))
    (group,) = report_data(read_all([run]))["groups"]
    assert group["adapters"]["rows"] == [["lenet5", 100, 1000, 6], ["mlp", 50, 400, 2]]
    assert group["adapters"]["saved"] == len(lines) * 1400 * (6 * 1000 + 2 * 400 - 700) / 700  # 700: 6 * 100 + 2 * 50
    for damaged in ({}, [], {"mlp": 3}, {"mlp": {"sent": "x"}}):
        (run / "summary.json").write_text(json.dumps(summary | {"lora": damaged}))
        assert report_data(read_all([run]))["groups"][0]["adapters"] is None
