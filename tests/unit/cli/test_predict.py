"""`solera predict`: every kind of input, the right constants, the right model."""

import csv
import io
import json
import re
import shlex
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner, Result

import solera as library
from solera.cli.info_commands import SELF_TEST
from solera.cli.main import app
from solera.core.errors import DataError, RunError
from solera.data import load, tokenize
from solera.data.dataset import Spec
from solera.data.unlabelled import read_samples
from solera.models import build
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.loop import scenario_of, simulate
from solera.use.predict import _own_test_set, predict, prepared
from solera.use.trained import open_run

TINY = SELF_TEST | {"engine": {"name": "inprocess"}}


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with two models."""
    home = tmp_path_factory.mktemp("run") / "r"
    loop.run(load_config(TINY, ['models.clients=["mlp", "tiny-cnn"]']), home)
    return home


@pytest.fixture(scope="module")
def joint(tmp_path_factory) -> Path:
    """A run whose result is an ensemble."""
    home = tmp_path_factory.mktemp("joint") / "r"
    loop.run(load_config(TINY, ["method.name=fedensemble", "method.K=2"]), home)
    return home


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return load("fashion-mnist", test_size=20).test.inputs.numpy()


def expected(run: Path, images: np.ndarray, name: str = "mlp") -> torch.Tensor:
    """The model's answer by hand: three lines of plain PyTorch, and the published constants."""
    model = build(name, classes=10, shape=(1, 28, 28)).eval()
    model.load_state_dict(load_file(run / "models" / f"{name}.safetensors"))
    return model((torch.from_numpy(images) / 255 - 0.2860) / 0.3530).softmax(-1)


# ---- inputs -----------------------------------------------------------------------------------------


def test_an_array(run, images, tmp_path):
    np.save(tmp_path / "x.npy", images)
    result = solera("predict", run, tmp_path / "x.npy", "--model", "mlp")
    assert result.exit_code == 0, result.output
    said, want = rows(result.stdout), expected(run, images)
    assert [r["input"] for r in said] == [str(i) for i in range(20)]
    assert [int(r["class"]) for r in said] == want.argmax(-1).tolist()
    assert [float(r["probability"]) for r in said] == pytest.approx(want.max(-1).values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, 0],  # [n, H, W]
        lambda x: x.transpose(0, 2, 3, 1),  # [n, H, W, C]
        lambda x: x.astype(np.float32) / 255,
        lambda x: x.astype(np.float64) / 255,
        lambda x: x.astype(np.int64),
        lambda x: np.asfortranarray(x),
        lambda x: x.astype(">i4"),
    ],
)
def test_arrays_in_other_forms_are_the_same_samples(run, images, tmp_path, change):
    np.save(tmp_path / "x.npy", change(images))
    found = predict(open_run(run), tmp_path / "x.npy", "mlp")
    assert torch.allclose(found.probabilities, expected(run, images), atol=1e-6)


def test_a_single_sample(run, images, tmp_path):
    np.save(tmp_path / "x.npy", images[3])
    found = predict(open_run(run), tmp_path / "x.npy", "mlp")
    assert torch.allclose(found.probabilities, expected(run, images[3:4]), atol=1e-6)


def test_an_archive_of_arrays(run, images, tmp_path):
    np.savez_compressed(tmp_path / "x.npz", y=np.arange(20), images=images)
    found = predict(open_run(run), tmp_path / "x.npz", "mlp")
    assert torch.allclose(found.probabilities, expected(run, images), atol=1e-6)


def test_a_folder_of_images(run, images, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    for i in range(3):
        Image.fromarray(images[i, 0]).save(tmp_path / f"{i}.png")
    Image.fromarray(images[3, 0]).convert("RGB").save(tmp_path / "3.png")  # colour becomes gray
    (tmp_path / "more").mkdir()
    Image.fromarray(images[4, 0]).resize((56, 56), 0).save(tmp_path / "more/4.PNG")  # another size, and a subfolder
    (tmp_path / "notes.txt").write_text("not an image")
    found = predict(open_run(run), tmp_path, "mlp")
    assert found.names == ["0.png", "1.png", "2.png", "3.png", "more/4.PNG"]
    assert torch.allclose(found.probabilities[:4], expected(run, images[:4]), atol=1e-2)
    assert torch.allclose(found.probabilities[4:], expected(run, images[4:5]), atol=0.2)


def test_one_image(run, images, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    Image.fromarray(images[0, 0]).save(tmp_path / "shirt.png")
    assert predict(open_run(run), tmp_path / "shirt.png", "mlp").names == ["shirt.png"]


@pytest.mark.parametrize("as_folder", [False, True])
def test_parquet(run, images, tmp_path, as_folder):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    Image = pytest.importorskip("PIL.Image")
    cells = []
    for i in range(4):
        out = io.BytesIO()
        Image.fromarray(images[i, 0]).save(out, "png")
        cells.append({"bytes": out.getvalue(), "path": None})
    pq.write_table(pa.table({"image": cells}), tmp_path / "x.parquet")
    found = predict(open_run(run), tmp_path if as_folder else tmp_path / "x.parquet", "mlp")
    assert torch.allclose(found.probabilities, expected(run, images[:4]), atol=1e-6)


def test_the_run_s_own_test_set_gives_the_accuracy_of_the_run(run):
    result = solera("predict", run, "--model", "tiny-cnn", "--json")
    found = json.loads(result.stdout)
    summary = json.loads((run / "summary.json").read_text())
    assert found["accuracy"] == pytest.approx(summary["models"]["tiny-cnn"]["accuracy"])
    assert len(found["predictions"]) == 50
    assert set(found["predictions"][0]) == {"input", "class", "probability", "label"}


TABLE = "".join(f"text {i},{i % 2},u{i % 7 % 4}\n" for i in range(60))  # three users with 17 texts, one with 9
TEXTS = {"name": "texts", "path": "table.csv", "length": 4}
BLOB = "".join(f"{i % 3 + i % 7 / 9},{i % 5 / 4},{'ab'[i % 2]}\n" for i in range(40))
SITES = {"a": {"data": "blob.csv", "model": "mlp"}, "b": {"data": "blob.csv", "model": "mlp"}}
JUDGED = {  # the tables of a run, and how many test samples it has
    "split": ({"data": {"train_size": 100, "test_size": 50, "split": [0.6, 0.1, 0.3]}}, 45),
    "test users": ({"data": TEXTS | {"test_users": 0.34, "user_min": 10}}, 17),
    "no test split": ({"data": TEXTS | {"test_size": 12}}, 12),
    "sites": (
        {
            "data": {"name": "table", "path": "blob.csv", "shape": [2], "classes": ["a", "b"]},
            "sites": SITES, "public": {"source": "none"},
        },
        40,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", JUDGED)
def test_the_own_test_set_is_what_the_run_was_judged_on(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("text,label,user\n" + TABLE)
    (tmp_path / "blob.csv").write_text("x,y,label\n" + BLOB)
    tables, total = JUDGED[case]
    model = "text-bag" if tables["data"].get("name") == "texts" else "mlp"
    tables = {"models": {"clients": [model]}, "partition": {"kind": "iid", "clients": 2}} | tables
    tables = {k: v for k, v in tables.items() if "sites" not in tables or k not in ("models", "partition")}
    tables |= {"run": {"rounds": 1, "seed": 3}, "engine": {"name": "inprocess"}}
    tables["method"] = {"name": "fedavg", "local": {"epochs": 1, "lr": 0.1}}
    config = load_config(tables)
    summary = loop.run(config, tmp_path / "r").summary
    found = predict(open_run(tmp_path / "r"), None)
    assert found.accuracy == pytest.approx(summary["models"][model]["accuracy"])
    assert len(found.names) == total
    test = scenario_of(config).dataset.test
    assert torch.equal(found.labels, test.labels)
    _, samples, _ = _own_test_set(open_run(tmp_path / "r"))
    assert torch.equal(samples, test.inputs)


def test_text(tmp_path):
    (tmp_path / "x.txt").write_text("a good film\na bad film\n")
    names, tokens = read_samples(tmp_path / "x.txt", (16,), lambda texts: tokenize(texts, 16))
    assert (names, tuple(tokens.shape), tokens.dtype) == (["0", "1"], (2, 16), torch.int64)
    assert torch.equal(prepared(Spec("own", (16,), 2, vocabulary=1 << 20), tokens, "x"), tokens)
    with pytest.raises(DataError, match="token ids"):
        prepared(Spec("own", (16,), 2, vocabulary=100), torch.zeros(2, 16), "x")
    with pytest.raises(DataError, match=r"vocabulary of 5"):
        prepared(Spec("own", (16,), 2, vocabulary=5), torch.full((2, 16), 7), "x")


def test_vectors_of_whole_numbers_are_no_tokens():
    assert prepared(Spec("own", (2,), 3), torch.tensor([[1, 2]]), "x").dtype == torch.float32


# ---- outputs ----------------------------------------------------------------------------------------


def test_files(run, tmp_path):
    solera("predict", run, "--model", "mlp", "-o", tmp_path / "p.csv", "--probabilities")
    said = rows((tmp_path / "p.csv").read_text())
    assert len(said) == 50
    assert sum(float(said[0][f"p{c}"]) for c in range(10)) == pytest.approx(1, abs=1e-4)
    result = solera("predict", run, "--model", "mlp", "-o", tmp_path / "p.json")
    assert (result.stdout, "% of 50 correct" in result.stderr) == ("", True)
    assert json.loads((tmp_path / "p.json").read_text())["model"] == "mlp"
    assert solera("predict", run, "--model", "mlp", "-o", tmp_path / "p.xls").exit_code == 2
    assert solera("predict", run, "--model", "mlp", "-o", tmp_path / "no/p.csv").exit_code == 4


def test_file_names_are_no_formulas(run, images, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    (tmp_path / "in").mkdir()
    Image.fromarray(images[0, 0]).save(tmp_path / "in/=1+1,x.png")
    assert rows(solera("predict", run, tmp_path / "in", "--model", "mlp").stdout)[0]["input"] == "'=1+1,x.png"


def test_the_example_of_the_help(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"\s+", " ", solera("predict", "--help").stdout)
    example = shlex.split(re.search(r"Example: (solera predict .*?\.csv)", text)[1])
    (tmp_path / "runs").mkdir()
    loop.run(load_config(TINY, ['models.clients=["lenet5"]']), tmp_path / example[2])
    assert solera(*example[1:]).exit_code == 0
    assert (tmp_path / "predictions.csv").read_text().startswith("input,class,probability,label\n0,")


# ---- which model ------------------------------------------------------------------------------------


def test_the_ensemble_is_joined_as_the_method_joins_it(joint, images, tmp_path):
    np.save(tmp_path / "x.npy", images)
    trained = open_run(joint)
    assert [name for name, _ in trained.members] == ["ensemble-0", "ensemble-1"]
    assert trained.rule == load_config(joint / "config.toml").method.rule
    found = predict(trained, tmp_path / "x.npy", ensemble=True)
    assert found.by == "ensemble"
    members = []
    for i in range(2):
        model = build("mlp", 10, (1, 28, 28)).eval()
        model.load_state_dict(load_file(joint / f"models/ensemble-{i}.safetensors"))
        members.append(model((torch.from_numpy(images) / 255 - 0.2860) / 0.3530))
    shares = [share for _, share in trained.members]
    if trained.rule == "avg_logits":
        want = sum(s * z for s, z in zip(shares, members, strict=True)).div(sum(shares)).softmax(-1)
    else:
        assert trained.rule == "avg_probs"
        want = sum(s * z.softmax(-1) for s, z in zip(shares, members, strict=True)).div(sum(shares))
    assert torch.allclose(found.probabilities, want, atol=1e-6)


def test_the_members_of_an_ensemble_are_no_models_of_their_own(joint):
    assert open_run(joint).names == ["mlp", "mlp.1"]
    assert predict(open_run(joint), None, "mlp.1").by == "mlp.1"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], 2, "has several models: choose one with --model: mlp, tiny-cnn"),
        (["--model", "lenet5"], 2, "has no such model; it has mlp, tiny-cnn"),
        (["--ensemble"], 4, "has no saved ensemble"),
        (["--ensemble", "--model", "mlp"], 2, "cannot be used together"),
        (["nothing.npy", "--model", "mlp"], 3, "there is no such file or folder"),
    ],
)
def test_what_is_refused(run, args, code, words):
    result = solera("predict", run, *args)
    assert result.exit_code == code
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def objects() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return out.getvalue()


def array(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def archive(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, content in members.items():
            z.writestr(f"{name}.npy", content)
    return out.getvalue()


BAD = {
    "objects.npy": (objects(), "array of numbers"),  # a pickle inside: never loaded
    "objects.npz": (archive(x=objects()), "array of numbers"),
    "damaged.npy": (b"\x93NUMPY junk", "cannot be read"),
    "damaged.npz": (b"junk", "is not a .npz file"),
    "empty.npz": (archive(), "holds no array"),
    "two.npz": (archive(a=array(np.zeros(3)), b=array(np.zeros(3))), "holds a, b; name the array"),
    "text.npy": (array(np.array(["a"])), "expected an array of numbers"),
    "shape.npy": (array(np.zeros((2, 3, 8, 8))), "samples have shape (3, 8, 8); the models take (1, 28, 28)"),
    "none.npy": (array(np.zeros((0, 1, 28, 28))), "there are no samples"),
    "nan.npy": (array(np.full((2, 1, 28, 28), np.nan)), "not finite"),
    "scale.npy": (array(np.full((2, 1, 28, 28), 200.0)), "give bytes 0..255, or floats from 0 to 1"),
    "broken.png": (b"junk", "cannot be decoded: its format is unknown"),
    "broken.parquet": (b"junk", "cannot be read as parquet"),
    "words.txt": (b"hello", "holds text"),
    "table.xlsx": (b"junk", ".xlsx cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_that_cannot_be_read(run, tmp_path, name):
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(words)):
        predict(open_run(run), tmp_path / name, "mlp")


def test_a_folder_without_images(run, tmp_path):
    with pytest.raises(DataError, match="there are no images in it"):
        predict(open_run(run), tmp_path, "mlp")


# ---- runs that have no models -----------------------------------------------------------------------


def test_a_run_that_is_not_finished(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="not finished; continue it with `solera resume"):
        open_run(tmp_path)


def test_a_method_of_personal_models(tmp_path):
    loop.run(load_config(TINY, ["method.name=local", "data.client_test=0.2"]), tmp_path / "r")
    with pytest.raises(RunError, match="with 'local' every client has its own"):
        open_run(tmp_path / "r")


@pytest.mark.parametrize("name", ["mlp", "ensemble-0"])
def test_damaged_files(run, tmp_path, name):
    (tmp_path / "models").mkdir()
    for file in ("config.toml", "run.json", "summary.json", "metrics.jsonl"):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    (tmp_path / f"models/{name}.safetensors").write_bytes(b"junk")
    with pytest.raises(RunError, match="is damaged"):
        open_run(tmp_path)


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_own_modules_load_with_plain_pytorch_and_are_refused_with_that_advice(tmp_path):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=g), torch.arange(60) % 3
    data = library.from_tensors((x, y), (x, y), classes=3)
    iid = library.PartitionConfig(kind="iid", clients=2)
    scenario = library.Scenario(data, {"mine": Mine}, iid, library.PublicConfig(source="none"))
    result = simulate(scenario, library.methods.FedAvg(), tmp_path / "r", library.RunConfig(rounds=1))
    with pytest.raises(RunError, match=r"started from Python.*load_state_dict\(safetensors.torch.load_file"):
        open_run(tmp_path / "r")
    model = Mine()
    model.load_state_dict(load_file(tmp_path / "r/models/mine.safetensors"))
    accuracy = float((model(x).argmax(-1) == y).float().mean())
    assert accuracy == pytest.approx(result.summary["models"]["mine"]["accuracy"])


def test_classes_that_have_names_are_called_by_them(tmp_path, images):
    from PIL import Image

    for name in ("cat", "=dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i, image in enumerate(images[:10]):
            Image.fromarray(image[0]).save(tmp_path / "photos" / name / f"{i}.png")
    settings = ["data.name=folder", f"data.path={tmp_path / 'photos'}", "data.test_size=4", "public.size=4"]
    loop.run(load_config(TINY, [*settings, 'data.train_size="none"']), tmp_path / "run")
    found = solera("predict", tmp_path / "run")
    assert {row["name"] for row in rows(found.stdout)} <= {"'=dog", "cat"}
    assert "of 4 correct" in found.stderr
    assert open_run(tmp_path / "run").spec.class_names == ("=dog", "cat")
    manifest = json.loads(solera("export", tmp_path / "run", "--json").stdout)
    assert manifest["labels"] == ["=dog", "cat"]
