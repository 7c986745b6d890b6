"""A run's measurements for TensorBoard and MLflow, which are optional extras: during the run, or afterwards. A resumed
run does not write anything twice."""

import dataclasses
import importlib.util
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..core import __version__
from ..core.errors import ConfigError
from ..core.files import read_file
from ..core.settings import Problem, settings
from .callbacks import Callback
from .read import Run, read_run
from .record import OWN, WAYS, RoundRecord
from .words import flat, show

OURS = ".solera"  # suffix of our event files: no others are ever removed
BATCH = 100  # values in one request to MLflow
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")  # of MLflow tracking URIs
LONGEST = 500  # characters of a parameter's value


@settings
class TrackConfig:
    """Destinations of a run's measurements besides its own directory."""

    tensorboard: bool = False  # write event files into the folder tensorboard/ of the run directory
    mlflow: str | None = None  # the tracking URI, such as "sqlite:///mlflow.db" or "http://localhost:5000"
    mlflow_experiment: str = "solera"  # the experiment's name there

    def problems(self) -> Iterator[Problem]:
        """Problems of the address or the name."""
        if self.mlflow is not None:
            yield from _uri_problems(self.mlflow)
        if not self.mlflow_experiment.strip():
            yield "mlflow_experiment = '': a name is needed"

    def require(self) -> None:
        """Raise ConfigError if a needed package is not installed. Called before any work."""
        if self.tensorboard:
            _need("tensorboard", "tensorboard", "track.tensorboard = true")
        if self.mlflow is not None:
            _need("mlflow", "mlflow", f"track.mlflow = {self.mlflow!r}")

    def outside(self) -> str:
        """A text that says what is sent outside the run directory; empty: nothing."""
        if self.mlflow is None:
            return ""
        kind, _, file = self.mlflow.partition(":///")
        where = f"the file {file}" if kind == "sqlite" else self.mlflow
        return f"all settings, results and the path of the run directory go to {where} (track.mlflow)"

    def callbacks(self) -> "list[Callback]":
        """The trackers that are switched on."""
        mlflow = [] if self.mlflow is None else [Mlflow(self.mlflow, self.mlflow_experiment)]
        return [*([TensorBoard()] if self.tensorboard else []), *mlflow]

    def absolute(self) -> "TrackConfig":
        """With the absolute path of a database file, so that the run can be resumed from any folder."""
        if self.mlflow is None or not re.match(r"sqlite:///[^/]", self.mlflow):
            return self
        file = os.path.abspath(os.path.expanduser(self.mlflow.removeprefix("sqlite:///")))
        return dataclasses.replace(self, mlflow=f"sqlite:///{file}")


def _uri_problems(uri: str) -> Iterator[Problem]:
    parts = urlsplit(uri)
    usual = "a database, such as 'sqlite:///mlflow.db', or a server, such as 'http://localhost:5000'"
    if uri != "databricks" and (not re.match(r"[a-z][a-z0-9+.-]*://", uri) or parts.scheme == "file"):
        yield f"mlflow = {uri!r}: MLflow no longer writes into plain folders; give {usual}"
    elif uri != "databricks" and parts.scheme.partition("+")[0] not in SCHEMES:
        yield f"mlflow = {uri!r}: MLflow has no tracking over {parts.scheme}; give {usual}"
    if parts.password:
        yield (
            "mlflow contains a password, which would be stored in config.toml; leave it out and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
        )


def _need(package: str, extra: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'solera[{extra}]'")


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round, with their names in TensorBoard and MLflow."""
    words = {"model": "", "ensemble": "ensemble ", "average": "average "}
    found = {f"{s.metric}/{words[s.kind]}{s.name}": s.value for s in record.scores if s.kind in words}
    found |= {f"{OWN}/{metric}": value for metric, value in record.own.items() if metric != "clients"}
    found |= {f"bytes/{way}": record.traffic.sent(way) for way in WAYS}
    found |= {f"{name}/{key}": value for name, numbers in record.callbacks.items() for key, value in numbers.items()}
    found |= {f"seconds/{phase}": s for phase, s in record.seconds.items()}
    found["clients/answered"] = record.cohort
    found["clients/lost replies"] = len(record.failures)
    return {re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII): float(value) for name, value in found.items()}


class Tracker(Callback):
    """Stores the rounds of a run in another program. `ended`: when the last recorded round ended; default: now."""

    optional = True

    def __init__(self, ended: float | None = None):
        self.clock = ended

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
        before = list(before)
        self.open(Path(facts["out"]))
        self.clock = (self.clock or time.time()) - sum(_seconds(record) for record in before)
        for record in before:
            self.saved(record)

    def saved(self, record: RoundRecord) -> None:
        assert self.clock is not None
        self.clock += _seconds(record)
        self.store(record, self.clock)

    def open(self, home: Path) -> None:
        """Start or continue the stored record of the run in this directory."""
        raise NotImplementedError

    def store(self, record: RoundRecord, when: float) -> None:
        """Store a round that ended at the time `when`."""
        raise NotImplementedError


def _seconds(record: RoundRecord) -> float:
    return record.seconds.get("total", 0.0)


class TensorBoard(Tracker):
    """Event files in `folder` (default: tensorboard/ of the run directory). A resumed run writes a new file and removes
    the old one, so that no step occurs twice."""

    def __init__(self, folder: Path | None = None, ended: float | None = None):
        super().__init__(ended)
        self.folder = folder
        self._file: Any = None

    def open(self, home: Path) -> None:
        folder = self.folder or home / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"*tfevents*{OURS}"):
            old.unlink()
        # Written here, because TensorBoard's own writer starts a thread, and a run that forks must not have one.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}{OURS}"
        self._file = open(folder / name, "wb")  # noqa: SIM115 (closed by end)
        self._write(time.time(), file_version="brain.Event:2")

    def store(self, record: RoundRecord, when: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars(record).items()]
        self._write(when, step=record.round, summary=Summary(value=values))
        self._file.flush()

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, when: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._file).write(Event(wall_time=when, **content).SerializeToString())


class Mlflow(Tracker):
    """A run in an MLflow experiment. `mlflow.json` in the run directory has its id, so that it can be continued."""

    name = "MLflow"

    def __init__(self, uri: str, experiment: str, ended: float | None = None):
        super().__init__(ended)
        self.uri, self.experiment = uri, experiment
        self._client: Any = None
        self._id = ""
        self._known: set[int] = set()  # rounds that are already stored

    def open(self, home: Path) -> None:
        self._client = _mlflow_client(self.uri)
        self._id = self._continued(home) or self._new(read_run(home))
        self._client.update_run(self._id, status="RUNNING")
        self._known = {m.step for m in self._client.get_metric_history(self._id, "seconds/total")}

    def store(self, record: RoundRecord, when: float) -> None:
        if record.round in self._known:
            return
        from mlflow.entities import Metric

        stamp = int(1000 * when)
        values = [Metric(name, value, stamp, record.round) for name, value in scalars(record).items()]
        for i in range(0, len(values), BATCH):  # includes "seconds/total", which marks a round as stored
            self._client.log_batch(self._id, metrics=values[i : i + BATCH])
        self._known.add(record.round)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if self._id:
            self._client.set_terminated(self._id, "KILLED" if summary is None else "FINISHED")

    def _continued(self, home: Path) -> str | None:
        from mlflow.exceptions import MlflowException

        try:
            noted = json.loads(read_file(home / "mlflow.json"))
            if noted["uri"] != self.uri:
                return None
            return self._client.get_run(noted["run_id"]).info.run_id
        except (OSError, ValueError, KeyError, TypeError, MlflowException):
            return None  # never tracked, or deleted

    def _new(self, run: Run) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self.experiment)
        tags = {"solera.out": str(run.path.resolve()), "solera.version": __version__}
        made = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(key, show(value)[:LONGEST]) for key, value in flat(run.config).items()]
        for i in range(0, len(params), BATCH):
            self._client.log_batch(made, params=params[i : i + BATCH])
        draft = run.path / "mlflow.json.draft"
        draft.write_text(json.dumps({"uri": self.uri, "experiment": self.experiment, "run_id": made}))
        draft.replace(run.path / "mlflow.json")
        return made


def _mlflow_client(uri: str) -> Any:
    # Set before the import: send data only to the given server, and give up soon if it does not answer, because the
    # run waits for it.
    for key, value in (
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
    ):
        os.environ.setdefault(key, value)
    from mlflow.tracking import MlflowClient

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)
