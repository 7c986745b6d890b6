"""Commands that use a run's models: `solera predict` and `solera export`."""

import csv
import io
import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from ..core.errors import ConfigError, RunError
from ..runs.compare import plain_cell
from .console import Json, TrustCode, emit, reported

if TYPE_CHECKING:
    from ..use.predict import Predictions

Trained = Annotated[Path, Argument(metavar="RUN", help="The run directory.")]
Form = Literal["safetensors", "torchscript", "torch-export", "onnx", "tensorboard", "mlflow"]


@reported
def predict(
    directory: Trained,
    source: Annotated[
        Path | None,
        Argument(
            metavar="[INPUT]",
            help="A .npy, .npz or .parquet file, texts (.txt, .csv, .tsv, .jsonl), an image or a folder of images. "
            "Default: the run's own test set.",
        ),
    ] = None,
    model: Annotated[str | None, Option(help="Which model. Default: the server's own or the only one.")] = None,
    ensemble: Annotated[bool, Option("--ensemble", help="Use the ensemble that the run has saved.")] = False,
    out: Annotated[
        Path | None, Option("--out", "-o", help="A .csv or .json file to write instead of printing.")
    ] = None,
    probabilities: Annotated[
        bool, Option("--probabilities", help="Also give the probabilities of all classes.")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Classify new samples with a run's models: class and probability of each. Inputs are normalised as in the run.

    Example: [bold]solera predict runs/toy-feddf-s0 --model lenet5 -o predictions.csv[/bold]
    """
    from ..use.predict import predict as classify
    from ..use.trained import open_run

    if out is not None and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"--out {out}: expected a .csv or .json file")
    found = classify(open_run(directory, trust_code), source, model, ensemble)
    facts = {"model": found.by, "accuracy": found.accuracy, "predictions": list(found.rows(probabilities))}
    if out is None:
        emit(facts, json, lambda: typer.echo(_csv(found, probabilities), nl=False))
    else:
        text = json_.dumps(facts, indent=2) if out.suffix == ".json" else _csv(found, probabilities)
        try:
            out.write_text(text, "utf-8")
        except OSError as e:
            raise RunError(f"{out} cannot be written: {e.strerror}") from None
    if found.accuracy is not None and not (json and out is None):
        typer.echo(f"{found.by}: {100 * found.accuracy:.1f}% of {len(found.names)} correct", err=True)


def _csv(found: "Predictions", every: bool) -> str:
    out = io.StringIO()
    rows = list(found.rows(every))
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    names = [key for key in ("input", "name", "text") if key in rows[0]]  # a file name must not become a formula
    writer.writerows(row | {key: plain_cell(row[key]) for key in names} for row in rows)
    return out.getvalue()


@reported
def export(
    directory: Trained,
    form: Annotated[Form, Option("--format", "-f", help="What to write.")] = "safetensors",
    out: Annotated[Path | None, Option("--out", "-o", help="Folder to write into. Default: RUN/export/FORMAT.")] = None,
    model: Annotated[list[str] | None, Option(help="Which model. Default: all. Repeatable.")] = None,
    ensemble: Annotated[
        bool, Option("--ensemble", help="Export the members of the ensemble that the run has saved.")
    ] = False,
    uri: Annotated[
        str | None, Option(help="mlflow: tracking URI, such as sqlite:///mlflow.db or http://localhost:5000.")
    ] = None,
    experiment: Annotated[str, Option(help="mlflow: the experiment's name.")] = "solera",
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Write a run's models (safetensors, torchscript, torch-export, onnx) or its measurements (tensorboard, mlflow).

    Example: [bold]solera export runs/toy-feddf-s0 --format torch-export -o exported[/bold]
    """
    if form == "tensorboard" or form == "mlflow":
        if model or ensemble:
            raise ConfigError(f"--format {form} exports measurements, not models: leave out --model and --ensemble")
        where = _measurements(directory, form, out, uri, experiment)
        emit({"format": form, "out": where}, json, lambda: f"written to {where}")
        return
    if uri is not None:
        raise ConfigError(f"--uri is for --format mlflow, not {form}")
    from ..use.export import export as write
    from ..use.trained import open_run

    if model and ensemble:
        raise ConfigError("--model and --ensemble cannot be used together")
    trained = open_run(directory, trust_code)
    if ensemble:
        trained.ensemble()  # raises if there is none
        names = [name for name, _ in trained.members]
    else:
        names = [trained.choose(name) for name in dict.fromkeys(model)] if model else trained.names
    if not names:
        trained.choose(None)
    folder = out or directory / "export" / form
    manifest: dict[str, Any] = write(trained, form, folder, names)
    lines = [f"{folder / entry['file']}: {entry['architecture']}" for entry in manifest["models"]]
    lines.append(f"{folder / 'manifest.json'}: input, normalisation, classes")
    emit({"out": str(folder), **manifest}, json, lambda: "\n".join(lines))


def _measurements(directory: Path, form: str, out: Path | None, uri: str | None, experiment: str) -> str:
    """Write a run's measurements for another program. Returns where they are."""
    from ..runs.callbacks import name_of
    from ..runs.read import read_run
    from ..runs.tracking import Mlflow, TensorBoard, TrackConfig, Tracker

    run = read_run(directory)
    if not run.rounds:
        raise RunError(f"{directory} has no rounds to export")
    ended = (directory / "metrics.jsonl").stat().st_mtime
    tracker: Tracker
    if form == "mlflow":
        if uri is None:
            raise ConfigError("--format mlflow needs --uri, such as --uri sqlite:///mlflow.db")
        config = TrackConfig(mlflow=uri, mlflow_experiment=experiment).absolute()
        tracker, where = Mlflow(config.mlflow or uri, experiment, ended), f"{uri}, experiment {experiment}"
    else:
        folder = out or directory / "tensorboard"
        config = TrackConfig(tensorboard=True)
        tracker, where = TensorBoard(folder, ended), str(folder)
    config.require()
    try:
        tracker.begin({"out": str(run.path)}, run.rounds)
        tracker.end({} if run.finished else None)
    except Exception as e:  # from another library: a database, a server, a disk
        raise RunError(f"{name_of(tracker)}: {type(e).__name__}: {str(e)[:300]}") from e
    return where
