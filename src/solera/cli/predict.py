"""`solera predict`: a run's models on new samples."""

import csv
import io
import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runs.compare import plain_cell
from .errors import Debug, Json, TrustCode, reported
from .output import print_json

if TYPE_CHECKING:
    from ..use.predict import Predictions


@reported
def predict(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[INPUT]",
            help="A .npy, .npz or .parquet file, texts (.txt, .csv, .tsv, .jsonl), an image or a folder of images. "
            "Default: the run's own test set.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which model. Default: the server's own or the only one.")] = (None),
    ensemble: Annotated[bool, typer.Option("--ensemble", help="Use the ensemble that the run has saved.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .csv or .json file to write instead of printing.")
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also give the probabilities of all classes.")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Classify new samples with a run's models: class and probability of each. Inputs are normalised as in the run.

    Example: [bold]solera predict runs/toy-feddf-s0 --model lenet5 -o predictions.csv[/bold]
    """
    from ..core.errors import ConfigError, RunError
    from ..use.predict import predict as classify
    from ..use.trained import open_run

    if out is not None and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"--out {out}: expected a .csv or .json file")
    found = classify(open_run(directory, trust_code), source, model, ensemble)
    as_json = json if out is None else out.suffix == ".json"
    if out is None:
        if as_json:
            print_json(_facts(found, probabilities))
        else:
            typer.echo(_csv(found, probabilities), nl=False)
    else:
        try:
            text = json_.dumps(_facts(found, probabilities), indent=2) if as_json else _csv(found, probabilities)
            out.write_text(text, "utf-8")
        except OSError as e:
            raise RunError(f"{out} cannot be written: {e.strerror}") from None
    if found.accuracy is not None and not (json and out is None):
        typer.echo(f"{found.by}: {100 * found.accuracy:.1f}% of {len(found.names)} correct", err=True)


def _facts(found: "Predictions", every: bool) -> dict[str, object]:
    return {"model": found.by, "accuracy": found.accuracy, "predictions": list(found.rows(every))}


def _csv(found: "Predictions", every: bool) -> str:
    out = io.StringIO()
    rows = list(found.rows(every))
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    names = [key for key in ("input", "name", "text") if key in rows[0]]  # a file name must not become a formula
    writer.writerows(row | {key: plain_cell(row[key]) for key in names} for row in rows)
    return out.getvalue()
