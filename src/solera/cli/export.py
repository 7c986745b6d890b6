"""`solera export`: a run's models and measurements for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from .errors import Debug, Json, TrustCode, reported
from .output import print_json

if TYPE_CHECKING:
    from ..use.export import Format

Form = Literal["safetensors", "torchscript", "torch-export", "onnx", "tensorboard", "mlflow"]


@reported
def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    form: Annotated[Form, typer.Option("--format", "-f", help="What to write.")] = "safetensors",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write into. Default: RUN/export/FORMAT.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Which model. Default: all. Repeatable.")] = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Export the members of the ensemble that the run has saved.")
    ] = False,
    uri: Annotated[
        str | None, typer.Option(help="mlflow: tracking URI, such as sqlite:///mlflow.db or http://localhost:5000.")
    ] = None,
    experiment: Annotated[str, typer.Option(help="mlflow: the experiment's name.")] = "solera",
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's models (safetensors, torchscript, torch-export, onnx) or its measurements (tensorboard, mlflow).

    Example: [bold]solera export runs/toy-feddf-s0 --format torch-export -o exported[/bold]
    """
    from ..core.errors import ConfigError

    if form in ("tensorboard", "mlflow"):
        if model or ensemble:
            raise ConfigError(f"--format {form} exports measurements, not models: leave out --model and --ensemble")
        where = _measurements(directory, form, out, uri, experiment)
        if json:
            print_json({"format": form, "out": where})
        else:
            typer.echo(f"written to {where}")
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
    manifest = write(trained, cast("Format", form), folder, names)
    if json:
        print_json({"out": str(folder), **manifest})
    else:
        for entry in manifest["models"]:
            typer.echo(f"{folder / entry['file']}: {entry['architecture']}")
        typer.echo(f"{folder / 'manifest.json'}: input, normalisation, classes")


def _measurements(directory: Path, form: str, out: Path | None, uri: str | None, experiment: str) -> str:
    from ..core.errors import ConfigError, RunError
    from ..runs.callback import name_of
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
