"""`solera export`: every format gives the model's own answers; the manifest says how to ask."""

import hashlib
import importlib.util
import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from made_runs import make_run
from solera.cli.info_commands import SELF_TEST
from solera.cli.main import app
from solera.models import build
from solera.runs import loop
from solera.runs.config import load_config
from solera.use.predict import predict
from solera.use.trained import open_run

TINY = SELF_TEST | {"engine": {"name": "inprocess"}}
NAMES = ["mlp", "tiny-cnn"]


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("run") / "r"
    loop.run(load_config(TINY, ['models.clients=["mlp", "tiny-cnn"]', "models.head=shared", "models.norm=group"]), home)
    return home


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def exported(run: Path, form: str, out: Path, *more: Any) -> dict[str, Any]:
    result = solera("export", run, "--format", form, "-o", out, "--json", *more)
    assert result.exit_code == 0, result.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert json.loads(result.stdout) == {"out": str(out), **manifest}
    for entry in manifest["models"]:
        assert hashlib.sha256((out / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    return manifest


def test_the_manifest(run, tmp_path):
    manifest = exported(run, "safetensors", tmp_path)
    assert [m["name"] for m in manifest["models"]] == NAMES
    assert manifest["input"]["shape"] == ["batch", 1, 28, 28]
    assert (manifest["input"]["mean"], manifest["input"]["std"]) == ([0.286], [0.353])
    assert manifest["output"] == {"name": "logits", "shape": ["batch", 10]}
    assert (manifest["labels"], manifest["data"], manifest["method"]) == (list(range(10)), "fashion-mnist", "feddf")


def test_safetensors(run, tmp_path, inputs):
    exported(run, "safetensors", tmp_path)
    model = build("tiny-cnn", classes=10, shape=(1, 28, 28), norm="group", head="shared").eval()
    model.load_state_dict(load_file(tmp_path / "tiny-cnn.safetensors"))
    assert torch.equal(model(inputs), open_run(run).model("tiny-cnn")(inputs))


@pytest.mark.parametrize("rows", [1, 5])
def test_torchscript(run, tmp_path, inputs, rows):
    exported(run, "torchscript", tmp_path)
    for name in NAMES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of TorchScript
            said = torch.jit.load(tmp_path / f"{name}.pt")(inputs[:rows])
        assert torch.allclose(said, open_run(run).model(name)(inputs[:rows]), atol=1e-6)


def test_torch_export(run, tmp_path, inputs):
    exported(run, "torch-export", tmp_path)
    for name in NAMES:
        program = torch.export.load(tmp_path / f"{name}.pt2").module()
        for rows in (1, 5):
            assert torch.allclose(program(inputs[:rows]), open_run(run).model(name)(inputs[:rows]), atol=1e-6)


def test_onnx(run, tmp_path, inputs):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    exported(run, "onnx", tmp_path)
    for name in NAMES:
        graph = onnx.load(tmp_path / f"{name}.onnx")
        onnx.checker.check_model(graph)
        for rows in (1, 5):
            (said,) = reference.ReferenceEvaluator(graph).run(["logits"], {"input": inputs[:rows].numpy()})
            assert torch.allclose(torch.from_numpy(said), open_run(run).model(name)(inputs[:rows]), atol=1e-4)


def test_models_of_text_take_token_ids(tmp_path):
    """A run directory by hand: what a run on text would leave."""
    model = build("text-bag", 2, (8,), vocabulary=50).eval()
    home = make_run(tmp_path / "r", models__clients=["text-bag"])
    (home / "models").mkdir()
    takes = json.dumps({"shape": [8], "mean": [], "std": [], "vocabulary": 50})
    facts = {"architecture": "text-bag", "classes": "2", "input": takes}
    save_file(model.state_dict(), home / "models/text-bag.safetensors", metadata=facts)
    manifest = exported(home, "torch-export", tmp_path / "x")
    assert (manifest["input"]["dtype"], manifest["input"]["vocabulary"]) == ("int64", 50)
    tokens = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(0))
    program = torch.export.load(tmp_path / "x/text-bag.pt2").module()
    assert torch.allclose(program(tokens), model(tokens), atol=1e-6)
    np.save(tmp_path / "x.npy", tokens.numpy())
    found = predict(open_run(home), tmp_path / "x.npy")
    assert torch.allclose(found.probabilities, model(tokens).softmax(-1), atol=1e-6)


class OneSize(torch.nn.Module):
    """A model whose answer depends on how many samples it was traced with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(28 * 28, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.weight * len(x)


@pytest.mark.parametrize("form", ["torchscript", "torch-export", "onnx"])
def test_a_model_that_cannot_be_exported_is_no_wrong_file(run, tmp_path, monkeypatch, form):
    monkeypatch.setattr("solera.use.trained.Trained.model", lambda self, name: OneSize())
    result = solera("export", run, "--format", form, "--model", "mlp", "-o", tmp_path / "x")
    assert result.exit_code == 4
    assert f"mlp (mlp) cannot be exported as {form}" in result.stderr
    assert not list((tmp_path / "x").glob("mlp*"))


def test_without_the_extra_the_way_out_is_told(run, tmp_path, monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "onnx" else known(name, *a))
    result = solera("export", run, "--format", "onnx", "-o", tmp_path / "x")
    assert result.exit_code == 2
    assert "pip install 'solera[onnx]'" in result.stderr
    assert not (tmp_path / "x").exists()


def test_one_model_and_the_default_folder(run):
    result = solera("export", run, "--model", "mlp")
    assert result.exit_code == 0
    assert [p.name for p in sorted((run / "export/safetensors").iterdir())] == ["manifest.json", "mlp.safetensors"]


def test_the_members_of_an_ensemble(tmp_path):
    loop.run(load_config(TINY, ["method.name=fedensemble", "method.K=2"]), tmp_path / "r")
    manifest = exported(tmp_path / "r", "safetensors", tmp_path / "x", "--ensemble")
    assert [m["name"] for m in manifest["models"]] == ["ensemble-0", "ensemble-1"]
    assert all(m["share"] > 0 for m in manifest["models"])
    assert manifest["ensemble_rule"] == load_config(tmp_path / "r/config.toml").method.rule


def test_the_example_of_the_help(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"\s+", " ", solera("export", "--help").stdout)
    example = shlex.split(re.search(r"Example: (solera export .*? exported)", text)[1])
    loop.run(load_config(TINY), tmp_path / example[2])
    assert solera(*example[1:]).exit_code == 0
    assert (tmp_path / "exported/mlp.pt2").is_file()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--model", "lenet5"], 2, "has no such model"),
        (["--ensemble"], 4, "has no saved ensemble"),
        (["--ensemble", "--model", "mlp"], 2, "cannot be used together"),
        (["--format", "gguf"], 2, "gguf"),
        (["--uri", "x"], 2, "--uri is for --format mlflow"),
        (["--format", "mlflow"], 2, "needs --uri"),
        (["--format", "mlflow", "--uri", "mlruns"], 2, "no longer writes into plain folders"),
        (["--format", "tensorboard", "--model", "mlp"], 2, "measurements, not models"),
    ],
)
def test_what_is_refused(run, args, code, words):
    result = solera("export", run, *args)
    assert result.exit_code == code
    assert words in result.stderr


def test_a_folder_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").touch()
    result = solera("export", run, "-o", tmp_path / "file")
    assert result.exit_code == 4
    assert "cannot be written" in result.stderr
