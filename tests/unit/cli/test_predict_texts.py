"""`solera predict` on files of texts."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from encoders import write_encoder
from solera.cli.main import app
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.read import read_run

NAMES = ("bad", "good")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("texts")
    words = (("awful", "poor"), ("great", "fine"))
    rows = [{"body": f"a {words[i % 2][i // 2 % 2]} film", "mood": NAMES[i % 2]} for i in range(60)]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": "texts", "path": str(home), "text_column": "body", "label_column": "mood", "length": 8}
    tables = {
        "run": {"rounds": 1},
        "data": data | {"test_size": 10},
        "partition": {"kind": "iid", "clients": 2},
        "models": {"clients": ["text-bag"]},
        "method": {"name": "fedavg", "local": {"epochs": 5, "lr": 1.0, "batch": 8}},
    }
    loop.run(load_config(tables), home / "run")
    return home / "run"


def solera(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


FILES = {
    "new.txt": "a great film\nan awful film\n",
    "new.csv": "id,body\n1,a great film\n2,an awful film\n",
    "new.jsonl": '{"body": "a great film"}\n{"body": "an awful film"}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_class_with_its_name_and_probability_for_every_text(run, tmp_path, name):
    (tmp_path / name).write_text(FILES[name])
    found = solera("predict", run, tmp_path / name, "--probabilities")
    assert found.exit_code == 0, found.output
    rows = list(csv.DictReader(io.StringIO(found.stdout)))
    assert [(row["input"], row["text"], row["name"]) for row in rows] == [
        ("0", "a great film", "good"),
        ("1", "an awful film", "bad"),
    ]
    for row in rows:
        assert float(row["p0"]) + float(row["p1"]) == pytest.approx(1, abs=1e-5)
        assert float(row["probability"]) == max(float(row["p0"]), float(row["p1"])) > 0.5


def test_parquet_with_the_run_s_column(run, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="reading parquet needs pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a great film"], "text": ["an awful film"]}), tmp_path / "new.parquet")
    found = json.loads(solera("predict", run, tmp_path / "new.parquet", "--json").stdout)
    assert [row["name"] for row in found["predictions"]] == ["good"]


def test_the_run_s_own_test_set_is_read_with_its_columns(run):
    found = json.loads(solera("predict", run, "--json").stdout)
    summary = json.loads((run / "summary.json").read_text())
    assert found["accuracy"] == pytest.approx(summary["models"]["text-bag"]["accuracy"])


def test_an_encoder_without_a_pooler_predicts_as_in_its_run(run, tmp_path):
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    file = write_encoder(tmp_path / "encoder") / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.startswith("pooler")}, file, {"format": "pt"})
    tables = read_run(run).config | {"models": {"clients": [f"hf:{tmp_path}/encoder"]}}
    tables["method"] = {"name": "fedavg", "local": {"epochs": 1, "lr": 0.1, "batch": 8}}
    summary = loop.run(load_config(tables), tmp_path / "run").summary
    file.unlink()  # only the run's own weights count from now on
    found = json.loads(solera("predict", tmp_path / "run", "--json").stdout)
    assert found["accuracy"] == pytest.approx(summary["models"]["encoder"]["accuracy"])
    assert "features" in json.loads((tmp_path / "run" / "run.json").read_text())["experiment"]["weights"]["encoder"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", "id,words\n1,a film\n", "has no column 'body'; it has id, words"),
        ("x.txt", "a film\n\n", "1 of 2 texts are empty, the first in row 1"),
        ("x.txt", "", "there are no texts in it"),
        ("x.jsonl", "what\n", "line 1 is not JSON"),
    ],
)
def test_what_cannot_be_read(run, tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    found = solera("predict", run, tmp_path / name)
    assert found.exit_code != 0
    assert told in found.output
