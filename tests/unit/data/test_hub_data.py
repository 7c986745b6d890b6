"""Data sets by hub id, from a stand-in of the hub on loopback."""

import io
import json

import pytest
import tomli_w

import fresh
from hubs import loopback_hub

pytest.importorskip("datasets", reason="needs the extra hub")
pa = pytest.importorskip("pyarrow", reason="needs the extra hub")

LOAD = """
import json, sys
from solera.data import load
from solera.core.errors import DataError
for options in json.loads(sys.argv[1]):
    try:
        data = load(**options)
        print(json.dumps([len(data.train), len(data.test), data.class_names, data.user_names, data.texts.train[:2]]))
    except DataError as e:
        print(json.dumps(str(e)))
"""
NAMED = {"name": "me/texts", "text_column": "body", "label_column": "mood", "user_column": "who", "length": 4}
ROWS = [{"body": f"text {i}", "more": f"reply {i}", "mood": i % 2, "who": f"u{i % 4}"} for i in range(40)]


def parquet(rows):
    """A file as the hub has it, with the names of its classes."""
    import pyarrow.parquet as pq

    text = {"dtype": "string", "_type": "Value"}
    features = {"body": text, "more": text, "mood": {"names": ["bad", "good"], "_type": "ClassLabel"}, "who": text}
    table = pa.Table.from_pylist(rows)
    file = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), file)
    return file.getvalue()


@pytest.fixture
def hub():
    with loopback_hub() as made:
        splits = {"train": ROWS, "test": ROWS[:10]}
        files = {f"data/{split}-00000-of-00001.parquet": parquet(rows) for split, rows in splits.items()}
        made.put("me/texts", {**files, "README.md": b"#", "weights.bin": b"a pickle"}, kind="datasets")
        made.put("me/code", {"code.py": b"open('ran', 'w')", "README.md": b"#"}, kind="datasets")
        yield made


def loaded(env, cwd, *options):
    done = fresh.run("-c", LOAD, json.dumps(options), env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_columns_by_name_and_what_is_refused(hub, tmp_path):
    env = hub.env(tmp_path, HF_TOKEN="hf_secret")
    pair = {**NAMED, "pair_column": "more"}
    absent, code, column = {"name": "me/nothing"}, {"name": "me/code"}, {**NAMED, "text_column": "boby"}
    found, noise = loaded(env, tmp_path, NAMED, pair, column, absent, code)
    whole = [40, 10, ["bad", "good"], ["u0", "u1", "u2", "u3"]]
    assert found[0] == [*whole, ["text 0", "text 1"]]
    assert found[1] == [*whole, [["text 0", "reply 0"], ["text 1", "reply 1"]]]
    assert found[2] == "me/texts, train: has no column 'boby'; it has body, more, mood, who"
    assert "fetching me/nothing from the Hugging Face hub failed" in found[3]
    assert "fetching me/code from the Hugging Face hub failed" in found[4]
    assert not (tmp_path / "ran").exists()
    assert "secret" not in noise + str(found)
    assert not any(path.endswith(".bin") for _, path in hub.asked)
    fetched = [path for method, path in hub.asked if method == "GET" and path.endswith(".parquet")]
    assert len(fetched) == len(set(fetched)) == 2

    hub.asked.clear()
    assert loaded({**env, "HF_HUB_OFFLINE": "1"}, tmp_path, NAMED)[0] == found[:1]
    assert hub.asked == []


def test_a_run_on_a_data_set_of_the_hub(hub, tmp_path):
    tables = {
        "run": {"rounds": 1},
        "data": NAMED,
        "partition": {"kind": "iid", "clients": 2},
        "models": {"clients": ["text-bag"]},
        "method": {"name": "fedavg", "local": {"steps": 1, "batch": 8, "lr": 0.05}},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    run = ("-m", "solera.cli.main", "run", "run.toml", "--out", "run", "--json")
    done = fresh.run(*run, env=hub.env(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["experiment"]["data"]["name"] == "me/texts"
