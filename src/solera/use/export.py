"""Export of trained models for other programs: safetensors, TorchScript, torch.export, ONNX, and a manifest."""

import hashlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from ..core import __version__
from ..core.errors import ConfigError, RunError
from ..core.files import read_file
from ..core.plugins import label
from ..data.dataset import Spec
from ..place.placement import numerics
from .trained import Trained

Format = Literal["safetensors", "torchscript", "torch-export", "onnx"]
ENDING: dict[str, str] = {"safetensors": ".safetensors", "torchscript": ".pt", "torch-export": ".pt2", "onnx": ".onnx"}


@numerics()
def export(trained: Trained, form: Format, out: Path, names: list[str]) -> dict[str, Any]:
    """Write models in a format for other programs, and `manifest.json`, which says how to use them."""
    if form == "onnx":
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"--format onnx needs the package {package}: pip install 'solera[onnx]'")
    models = {name: trained.model(name) for name in names}  # build all before anything is written
    try:
        out.mkdir(parents=True, exist_ok=True)
        listed, shares = [], dict(trained.members)
        for name, model in models.items():
            file, A = out / f"{name}{ENDING[form]}", trained.architectures[name]
            _write(form, model, trained, name, file)
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            share = {"share": shares[name]} if name in shares else {}
            listed.append({"name": name, "file": file.name, "sha256": sha256, "architecture": A, **share})
        manifest = _manifest(trained, form, listed)
        (out / "manifest.json").write_text(json.dumps(manifest, indent=2))
    except OSError as e:
        raise RunError(f"{out} cannot be written: {e.strerror}") from None
    return manifest


def _manifest(trained: Trained, form: str, models: list[dict[str, Any]]) -> dict[str, Any]:
    takes = trained.spec
    return {
        "solera": __version__,
        "torch": torch.__version__,
        "format": form,
        "run": trained.run.name,
        "method": trained.run.method,
        "data": label(str(trained.run.settings.get("data.name", "own data"))),
        "input": {
            "name": "input",
            "shape": ["batch", *takes.shape],
            "dtype": "int64" if takes.vocabulary else "float32",
            "mean": list(takes.mean),
            "std": list(takes.std),
            "normalise": "(x / 255 - mean) / std for bytes x" if takes.mean else "nothing",
            **({"vocabulary": takes.vocabulary} if takes.vocabulary else {}),
        },
        "output": {"name": "logits", "shape": ["batch", takes.outputs]},
        "labels": list(takes.class_names or range(takes.outputs)),
        "models": models,
        **({"ensemble_rule": trained.rule} if any("share" in m for m in models) else {}),
    }


def _write(form: Format, model: nn.Module, trained: Trained, name: str, file: Path) -> None:
    if form == "safetensors":
        if trained.architectures[name] in trained.bases:  # the run's file has the trained matrices only
            card = {"architecture": trained.architectures[name], "solera": __version__, "lora": "merged"}
            safetensors.torch.save_file({n: t.clone() for n, t in model.state_dict().items()}, file, card)
        else:
            file.write_bytes(read_file(trained.file(name), None))
        return
    with _quiet():
        try:
            if form == "torchscript":
                torch.jit.save(_traced(model, trained.spec), file)
                return
            # Two samples: with one, an exporter treats the batch size as a constant.
            batch = ({0: torch.export.Dim("batch")},)
            program = torch.export.export(model, (_example(trained.spec, 2),), dynamic_shapes=batch)
            if form == "torch-export":
                torch.export.save(program, file)
            else:
                torch.onnx.export(
                    program, (), file, input_names=["input"], output_names=["logits"], external_data=False,
                    verbose=False,
                )  # fmt: skip
        except OSError:
            raise
        except Exception as e:  # the exporter does not support the model
            why = " ".join(str(e).split())[:200]
            raise RunError(f"{name} ({trained.architectures[name]}) cannot be exported as {form}: {why}") from e


def _traced(model: nn.Module, takes: Spec) -> Any:
    """A trace of the model. It is made with one batch size, and checked with another."""
    traced = torch.jit.trace(model, (_example(takes, 2),))
    other = _example(takes, 3)
    if not torch.allclose(traced(other), model(other), atol=1e-5):
        raise ValueError("its output depends on the batch size of the trace")
    return traced


def _example(takes: Spec, rows: int) -> Tensor:
    shape, g = (rows, *takes.shape), torch.Generator().manual_seed(0)
    return torch.randint(takes.vocabulary, shape, generator=g) if takes.vocabulary else torch.rand(shape, generator=g)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's messages about optional packages and about the deprecation of TorchScript."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
