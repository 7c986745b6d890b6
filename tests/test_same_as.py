"""`make same-as`: differences are noticed, and the cases can be made."""

import importlib.util
import json
import pathlib
import tomllib

import pytest

FILE = pathlib.Path(__file__).parent.parent / "scripts" / "same_as.py"
spec = importlib.util.spec_from_file_location("same_as", FILE)
same_as = importlib.util.module_from_spec(spec)
spec.loader.exec_module(same_as)

METHODS = [  # a listing as `solera ls methods --json` gives it
    {
        "name": "fedavg",
        "settings": {"method.local.epochs": 5, "method.local.steps": None, "method.average": "weighted"},
    },
    {
        "name": "feddf",
        "settings": {
            "method.local.epochs": 5,
            "method.local.steps": None,
            "method.fusion.steps": 500,
            "method.mu": 0.0,
            "method.quantise.bits": 32,
            "method.report_ensemble": True,
        },
    },
]


def record(loss: float = 0.5, digest: str = "ab", code: int = 0) -> dict:
    run = {"metrics.jsonl": [{"round": 0, "bytes": {"up": {"x": 8}}, "loss": loss}], "run.json": {"digest": digest}}
    return {"steps": {"run case.toml": {"exit": code}}, "runs": {"out": run}, "cpu": 1.0, "spelling": 0}


def told() -> dict:
    return tomllib.loads(same_as.CASES.read_text())


def test_equal_records_are_the_same():
    assert same_as.compare({"plain x": record()}, {"plain x": {**record(), "cpu": 7.0}}, []) == [
        ("plain x", "same", None)
    ]


@pytest.mark.parametrize(
    ("change", "key", "was", "is_now"),
    [
        ({"digest": "ac"}, "runs.out.run.json.digest", "ab", "ac"),
        ({"loss": 0.5000000001}, "runs.out.metrics.jsonl.0.loss", 0.5, 0.5000000001),
        ({"code": 3}, "steps.run case.toml.exit", 0, 3),
    ],
)
def test_a_change_is_noticed_and_named(change, key, was, is_now):
    assert same_as.compare({"plain x": record(**change)}, {"plain x": record()}, []) == [
        ("plain x", "different", (key, was, is_now, 1))
    ]


def test_a_type_an_order_and_a_missing_case_are_noticed():
    assert [k for k, *_ in same_as.differences({"a": 1, "b": [1]}, {"b": [1.0], "a": True})] == ["(order)", "a", "b.0"]
    found = same_as.compare({"a": record()}, {"b": record()}, [])
    assert [verdict for _, verdict, _ in found] == ["only here", "only there"]


def test_a_meant_change_is_told_and_covers_nothing_else():
    meant = [{"case": "plain *", "key": "*.digest", "reason": "why"}]
    ((_, verdict, reason),) = same_as.compare({"plain x": record(digest="ac")}, {"plain x": record()}, meant)
    assert (verdict, reason) == ("meant", "why")
    ((_, verdict, about),) = same_as.compare({"plain x": record(0.4, "ac")}, {"plain x": record()}, meant)
    assert (verdict, about[0]) == ("different", "runs.out.metrics.jsonl.0.loss")
    ((_, verdict, _),) = same_as.compare({"mixed x": record(digest="ac")}, {"mixed x": record()}, meant)
    assert verdict == "different"


def test_the_table_counts_by_kind_and_shows_the_first_difference():
    text = same_as.told_table(
        same_as.compare(
            {"plain x": record(), "plain y": record(0.4)}, dict.fromkeys(["plain x", "plain y"], record()), []
        ),
        5,
    )
    assert text.split("\n")[1].split() == ["plain", "1", "1", "-", "-", "-"]
    assert "    runs.out.metrics.jsonl.0.loss: 0.5 -> 0.4" in text.split("\n")


def test_the_cases_parse_and_every_setting_of_a_method_is_tried():
    plan = same_as.Plan(told(), METHODS)
    refusal = "method.average = \"no-such-value\": expected one of 'weighted', 'uniform', 'median'"
    cases = {c["name"]: c for c in plan.cases({"probe fedavg method.average": refusal}, ["toy"])}
    assert len(cases) == len(plan.cases({"probe fedavg method.average": refusal}, ["toy"])), "two cases with one name"
    assert [c["name"] for c in plan.probes()] == [
        "probe fedavg method.local.steps",
        "probe fedavg method.average",
    ]
    for kind in ("plain", "mixed", "dry", "workers", "resumed", "augmented", "sites"):
        assert f"{kind} feddf" in cases
    assert cases["resumed feddf"]["kill"] == 2
    assert cases["option feddf method.report_ensemble=false"]["settings"]["method.report_ensemble"] is False
    assert {n for n in cases if n.startswith("option fedavg method.average")} == {
        'option fedavg method.average="uniform"',
        'option fedavg method.average="median"',
    }
    assert cases["option feddf method.mu=0.5"]["settings"]["method.mu"] == 0.5
    assert "option feddf method.local bundle 0" in cases
    assert cases["recipe toy"]["steps"] == [["run", "toy", "--dry-run", "--json"]]
    for one in cases.values():  # what is written is read back
        if one["settings"] is not None:
            assert same_as.flat(tomllib.loads(same_as.toml(one["settings"]))) == one["settings"]


def test_an_old_spelling_becomes_the_new_one():
    rules = [
        {"old": "method.quantise.*", "new": "method.upload.*", "with": {"method": {"upload": {"kind": "low-bit"}}}},
        {"old": "method.mu", "new": "method.pull", "of": ["fedprox"]},
    ]
    settings = {"method.name": "feddf", "method.mu": 1.0, "method.quantise.bits": 3}
    new = {"method.name": "feddf", "method.mu": 1.0, "method.upload.bits": 3, "method.upload.kind": "low-bit"}
    assert same_as.respelled(settings, rules) == new
    assert same_as.respelled({"method.name": "fedprox", "method.mu": 1.0}, rules)["method.pull"] == 1.0


def test_an_entry_of_a_meant_change_has_a_reason():
    for entry in tomllib.loads(same_as.MEANT.read_text()).get("meant", []):
        assert entry["reason"]
        assert set(entry) <= {"case", "key", "reason"}
        assert {"case", "key"} & set(entry)


def test_records_hold_no_times_and_no_paths(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"round": 0, "seconds": {"total": 1.5}, "events": [{"kind": "timeline", "start": 0.1}]}\n'
    )
    (tmp_path / "run.json").write_text(json.dumps({"out": f"{tmp_path}/out", "solera": "0.2", "took": "ends (6.4 s)"}))
    found = same_as.run_record(tmp_path, {str(tmp_path): "WORK"})
    assert found == {
        "metrics.jsonl": [{"round": 0, "events": [{"kind": "timeline"}]}],
        "run.json": {"out": "WORK/out", "took": "ends (TIME)"},
    }


def test_the_first_spelling_that_is_accepted_is_recorded(tmp_path):
    """With a program that refuses all but the second spelling, as the command line does."""

    def program() -> None:
        settings = tomllib.loads(pathlib.Path("case.toml").read_text())
        if "old" in settings:
            raise SystemExit(2)
        print('{"is": 1}')

    one = {"settings": {"old": 1}, "spellings": [{"new": 1}], "files": {}, "steps": [["run"]]}
    found = same_as.record_case(program, one, tmp_path / "work", tmp_path)
    assert found["spelling"] == 1
    assert found["steps"]["run"] == {"exit": 0, "output": {"is": 1}}
    found = same_as.record_case(program, {**one, "spellings": []}, tmp_path / "work", tmp_path)
    assert (found["spelling"], found["steps"]["run"]["exit"]) == (0, 2)


def test_a_run_is_killed_when_it_goes_on_after_so_many_lines(tmp_path):
    def program() -> None:
        out = pathlib.Path("out")
        out.mkdir()
        for _ in range(5):
            with (out / "metrics.jsonl").open("a") as f:
                f.write("{}\n")

    assert same_as.command(program, [], tmp_path, kill=2)[0] == -9
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "{}\n{}\n"
