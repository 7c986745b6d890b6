"""What a run has trained, in use: its models rebuilt, new samples classified, models handed to other programs.

A model's file says what its input is (shape, normalisation); how it is built is in the run's config.toml. A run that
was started from Python with modules of one's own has none: its files are loaded into those modules by whoever has
them.
"""

import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..data import from_tensors, load
from ..data.unlabelled import read_samples
from ..devices import numerics
from ..errors import ConfigError, DataError, RunError
from ..files import check_file, read_file
from ..models import MODELS, build
from ..parts.local import logits_of
from ..parts.teachers import Ensemble
from ..runs.read import Run, read_run
from ..version import __version__

Format = Literal["safetensors", "torchscript", "torch-export", "onnx"]
ENDING: dict[str, str] = {"safetensors": ".safetensors", "torchscript": ".pt", "torch-export": ".pt2", "onnx": ".onnx"}
MEMBER = re.compile(r"ensemble-(\d+)")
CHUNK = 512  # samples prepared and asked about at a time


@dataclasses.dataclass(frozen=True)
class Input:
    """What the models of a run take."""

    shape: tuple[int, ...]
    mean: tuple[float, ...]  # per channel, on the scale [0, 1]; empty: nothing is normalised
    std: tuple[float, ...]
    vocabulary: int  # of text: the number of token ids; otherwise 0

    def prepare(self, samples: Tensor, classes: int, what: str) -> Tensor:
        """Samples as they are stored (bytes 0..255, or floats) as a model takes them."""
        if self.vocabulary and samples.dtype.is_floating_point:
            raise DataError(f"{what}: {samples.dtype} where token ids, whole numbers, are wanted")
        if not self.vocabulary and len(self.shape) == 1:
            samples = samples.float()  # whole numbers would be taken for token ids
        if self.mean and samples.dtype.is_floating_point and float(samples.max()) > 1.5:
            raise DataError(f"{what}: values up to {float(samples.max()):g}; give bytes 0..255, or floats from 0 to 1")
        nothing = torch.zeros(len(samples), dtype=torch.int64)
        known = from_tensors(
            (samples, nothing), (samples, nothing), classes, what, self.mean, self.std, None, self.vocabulary or None
        )
        return known.prepare(known.test.inputs)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The models that a finished run has left."""

    run: Run
    classes: int
    input: Input
    architectures: dict[str, str]  # name of the model -> its architecture
    members: list[tuple[str, float]]  # of the saved ensemble: name and share
    rule: str  # how these are joined
    class_names: tuple[str, ...] = ()  # where they are known

    @property
    def names(self) -> list[str]:
        """The models, without the members of the ensemble."""
        return [name for name in self.architectures if not MEMBER.fullmatch(name)]

    def choose(self, name: str | None) -> str:
        """The model called `name`; without one, the server's own, or the only one."""
        if name is not None:
            if name not in self.architectures:
                there = ", ".join(self.architectures)
                raise ConfigError(f"--model {name}: {self.run.path} has no such model; it has {there}")
            return name
        if not self.names:
            raise RunError(f"{self.run.path} has no global model: {_stay_with_clients(self.run)}")
        own = self.run.settings.get("models.server")
        if own in self.names:
            return own
        if len(self.names) > 1:
            raise ConfigError(f"{self.run.path} has several models: choose one with --model: {', '.join(self.names)}")
        return self.names[0]

    @numerics()
    def model(self, name: str) -> nn.Module:
        """The model, rebuilt and in evaluation mode."""
        kind, options = self.architectures[name], self.run.config.get("models", {})
        if kind not in MODELS:
            raise RunError(
                f"{self.run.path}: architecture {kind!r} is not in the zoo; {_load_it_yourself(self.run.path, name)}"
            )
        text = {"vocabulary": self.input.vocabulary} if self.input.vocabulary else {}
        model = build(
            kind, self.classes, self.input.shape, options.get("norm", "batch"), options.get("head", "plain"), **text
        )
        try:
            check_file(self.file(name))
            model.load_state_dict(safetensors.torch.load_file(self.file(name)))
        except (RuntimeError, OSError, safetensors.SafetensorError) as e:
            raise RunError(f"{self.file(name)} does not fit {kind!r}: {' '.join(str(e).split())[:200]}") from None
        model.eval()
        return model

    def file(self, name: str) -> Path:
        return self.run.path / "models" / f"{name}.safetensors"

    def ensemble(self) -> Ensemble:
        """The saved ensemble."""
        if not self.members:
            raise RunError(
                f"{self.run.path} has no saved ensemble: method {self.run.method!r} does not leave one (methods whose "
                "result is an ensemble do, such as fedensemble)"
            )
        models = [self.model(name) for name, _ in self.members]
        return Ensemble(models, self.rule, [share for _, share in self.members])  # type: ignore[arg-type]


def _load_it_yourself(path: Path, name: str) -> str:
    return (
        "build your module and load its weights yourself: "
        f"module.load_state_dict(safetensors.torch.load_file({str(path / 'models' / f'{name}.safetensors')!r}))"
    )


def _stay_with_clients(run: Run) -> str:
    return f"with {run.method!r} every client has its own, and these stay with the clients"


def open_run(path: str | os.PathLike[str]) -> Trained:
    """The models of the run in a directory."""
    run = read_run(path)
    files = sorted((run.path / "models").glob("*.safetensors"), key=lambda f: _order(f.stem))
    if not files and not run.finished:
        raise RunError(f"{path} has no models yet: the run is not finished; go on with `solera resume {path}`")
    if not files:
        raise RunError(f"{path} has no global model: {_stay_with_clients(run)}")
    if not (run.path / "config.toml").is_file():
        raise RunError(f"{path} was started from Python (no config.toml): {_load_it_yourself(run.path, files[0].stem)}")
    facts = {file.stem: _facts(file) for file in files}
    first = next(iter(facts.values()))
    try:
        takes = json.loads(first["input"])
        given = Input(tuple(takes["shape"]), tuple(takes["mean"]), tuple(takes["std"]), takes["vocabulary"])
        architectures = {name: f["architecture"] for name, f in facts.items()}
        members = [(name, float(f["share"])) for name, f in facts.items() if MEMBER.fullmatch(name)]
        rule = next((f["rule"] for f in facts.values() if "rule" in f), "avg_logits")
        classes, called = int(first["classes"]), tuple(map(str, json.loads(first.get("class_names", "[]"))))
        if len(called) not in (0, classes):
            raise ValueError(f"{len(called)} names for {classes} classes")
        return Trained(run, classes, given, architectures, members, rule, called)
    except (KeyError, ValueError, TypeError) as e:
        raise RunError(
            f"{files[0]} does not say what it is ({e}): it was written by another version of solera"
        ) from None


def _order(name: str) -> tuple[bool, int, str]:
    """Models by name, then the members of the ensemble by number."""
    member = MEMBER.fullmatch(name)
    return bool(member), int(member[1]) if member else 0, name


def _facts(file: Path) -> dict[str, str]:
    try:
        check_file(file)
        with safetensors.safe_open(file, "pt") as opened:
            return opened.metadata() or {}
    except (OSError, safetensors.SafetensorError) as e:
        raise RunError(f"{file} is damaged: {e}") from None


# ---- predicting -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model says of some samples."""

    by: str  # the model, or "ensemble"
    names: list[str]
    probabilities: Tensor  # [samples, classes]
    labels: Tensor | None  # the truth, where it is known
    class_names: tuple[str, ...] = ()  # where they are known

    @property
    def classes(self) -> Tensor:
        """The likeliest class of every sample; ties go to the lowest."""
        return self.probabilities.argmax(-1)

    @property
    def accuracy(self) -> float | None:
        if self.labels is None:
            return None
        return float((self.classes == self.labels).double().mean())

    def rows(self, every: bool = False) -> Iterator[dict[str, Any]]:
        """One row a sample: its name, its class (with its name, if it has one) and the probability of that; with
        `every`, those of all classes."""
        for i, (name, k) in enumerate(zip(self.names, self.classes.tolist(), strict=True)):
            row: dict[str, Any] = {"input": name, "class": k}
            row |= {"name": self.class_names[k]} if self.class_names else {}
            row["probability"] = round(float(self.probabilities[i, k]), 6)
            if self.labels is not None:
                row["label"] = int(self.labels[i])
            if every:
                row |= {f"p{c}": round(p, 6) for c, p in enumerate(self.probabilities[i].tolist())}
            yield row


@numerics()
def predict(trained: Trained, source: Path | None, model: str | None = None, ensemble: bool = False) -> Predictions:
    """Classify the samples in `source`; without one, the run's own test set."""
    if ensemble and model is not None:
        raise ConfigError("--model and --ensemble exclude each other")
    if ensemble:
        joined = trained.ensemble()
        by, ask = "ensemble", lambda x: joined(x)[0]
    else:
        by = trained.choose(model)
        module = trained.model(by)
        ask = lambda x: logits_of(module, x).softmax(-1)  # noqa: E731
    labels = None
    if source is None:
        names, samples, labels = _own_test_set(trained)
    else:
        names, samples = read_samples(source, trained.input.shape, bool(trained.input.vocabulary))
    what = str(source or "the test set")
    with torch.no_grad():
        said = [ask(trained.input.prepare(part, trained.classes, what)) for part in samples.split(CHUNK)]
    return Predictions(by, names, torch.cat(said), labels, trained.class_names)


def _own_test_set(trained: Trained) -> tuple[list[str], Tensor, Tensor]:
    data, settings = trained.run.config.get("data", {}), trained.run.settings
    known = load(
        data.get("name", ""), data.get("path"), data.get("train_size"), data.get("test_size"),
        int(settings.get("run.seed", 0)), image_size=data.get("image_size"),
    )  # fmt: skip
    return [str(i) for i in range(len(known.test))], known.test.inputs, known.test.labels


# ---- exporting --------------------------------------------------------------------------------------


@numerics()
def export(trained: Trained, form: Format, out: Path, names: list[str]) -> dict[str, Any]:
    """Write models in a format of other programs, and `manifest.json`, which says how to use them."""
    if form == "onnx":
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"--format onnx needs the package {package}: pip install 'solera[onnx]'")
    models = {name: trained.model(name) for name in names}  # all of them can be built, or nothing is written
    try:
        out.mkdir(parents=True, exist_ok=True)
        listed = []
        for name, model in models.items():
            file = out / f"{name}{ENDING[form]}"
            _write(form, model, trained, name, file)
            listed.append(
                {
                    "name": name,
                    "file": file.name,
                    "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
                    "architecture": trained.architectures[name],
                    **({"share": dict(trained.members)[name]} if name in dict(trained.members) else {}),
                }
            )
        manifest = _manifest(trained, form, listed)
        (out / "manifest.json").write_text(json.dumps(manifest, indent=2))
    except OSError as e:
        raise RunError(f"{out} cannot be written: {e.strerror}") from None
    return manifest


def _manifest(trained: Trained, form: str, models: list[dict[str, Any]]) -> dict[str, Any]:
    takes = trained.input
    return {
        "solera": __version__,
        "torch": torch.__version__,
        "format": form,
        "run": trained.run.name,
        "method": trained.run.method,
        "data": trained.run.settings.get("data.name"),
        "input": {
            "name": "input",
            "shape": ["batch", *takes.shape],
            "dtype": "int64" if takes.vocabulary else "float32",
            "mean": list(takes.mean),
            "std": list(takes.std),
            "normalise": "(x / 255 - mean) / std for bytes x" if takes.mean else "nothing",
            **({"vocabulary": takes.vocabulary} if takes.vocabulary else {}),
        },
        "output": {"name": "logits", "shape": ["batch", trained.classes]},
        "labels": list(trained.class_names or range(trained.classes)),
        "models": models,
        **({"ensemble_rule": trained.rule} if any("share" in m for m in models) else {}),
    }


def _write(form: Format, model: nn.Module, trained: Trained, name: str, file: Path) -> None:
    if form == "safetensors":
        file.write_bytes(read_file(trained.file(name), None))
        return
    with _quiet():
        try:
            if form == "torchscript":
                torch.jit.save(_traced(model, trained.input), file)
                return
            # Two samples: with one, an exporter takes the size of the batch for a constant.
            batch = ({0: torch.export.Dim("batch")},)
            program = torch.export.export(model, (_example(trained.input, 2),), dynamic_shapes=batch)
            if form == "torch-export":
                torch.export.save(program, file)
            else:
                torch.onnx.export(
                    program, (), file, input_names=["input"], output_names=["logits"], external_data=False,
                    verbose=False,
                )  # fmt: skip
        except OSError:
            raise
        except Exception as e:  # an exporter's: of a model that its language cannot express
            why = " ".join(str(e).split())[:200]
            raise RunError(f"{name} ({trained.architectures[name]}) cannot be exported as {form}: {why}") from e


def _traced(model: nn.Module, takes: Input) -> Any:
    """A trace is made with one size of batch; it must be right for others too."""
    traced = torch.jit.trace(model, (_example(takes, 2),))
    other = _example(takes, 3)
    if not torch.allclose(traced(other), model(other), atol=1e-5):
        raise ValueError("its answers depend on the size of the batch it was traced with")
    return traced


def _example(takes: Input, rows: int) -> Tensor:
    shape, g = (rows, *takes.shape), torch.Generator().manual_seed(0)
    return torch.randint(takes.vocabulary, shape, generator=g) if takes.vocabulary else torch.rand(shape, generator=g)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch tells of packages that it would also know how to export, and that TorchScript is deprecated."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
