"""TensorBoard and MLflow: what is written, that nothing is written twice, and that a run never stops for them."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from made_runs import line, make_run
from solera.cli.info_commands import SELF_TEST
from solera.cli.main import app
from solera.core.errors import ConfigError
from solera.runs import loop
from solera.runs import tracking as export
from solera.runs.callbacks import Callback
from solera.runs.config import load_config, to_toml
from solera.runs.read import read_run
from solera.runs.record import RoundRecord
from solera.runs.tracking import TrackConfig, Tracker, scalars

TINY = SELF_TEST | {"engine": {"name": "inprocess"}, "run": {"rounds": 3, "name": "tiny"}}


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


class Listening(Callback):
    """Remembers warnings, and stops a run after some rounds if asked to."""

    def __init__(self, stop_after: int | None = None):
        self.warnings: list[str] = []
        self.stop_after, self.seen = stop_after, 0

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def saved(self, record: Any) -> None:
        self.seen += 1
        if self.seen == self.stop_after:
            raise KeyboardInterrupt


def in_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard itself reads: tag -> step -> value; a step that is there twice fails."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        found[tag] = {e.step: e.value for e in events}
        assert len(found[tag]) == len(events), f"{tag} has a step twice"
        times = [e.wall_time for e in events]
        assert times == sorted(times)
    return found


def in_mlflow(uri: str, experiment: str = "solera") -> list[dict[str, Any]]:
    """Every run of an experiment: status, params, and key -> [(step, value)]."""
    pytest.importorskip("mlflow")
    client = export._mlflow_client(uri)
    known = client.get_experiment_by_name(experiment)
    found = []
    for run in client.search_runs([known.experiment_id]):
        history = {
            k: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)] for k in run.data.metrics
        }
        facts = {"status": run.info.status, "params": run.data.params, "metrics": history, "tags": run.data.tags}
        found.append(facts)
    return found


def accuracies(home: Path) -> dict[int, float]:
    return {r.round: r.accuracies()["mlp"] for r in read_run(home).rounds}


# ---- names ------------------------------------------------------------------------------------------


def test_the_numbers_of_a_round():
    personal = {"mean": 0.7, "std": 0.1, "worst_decile": 0.2, "clients": 4}
    ensembles = {"the <teachers>": {"accuracy": 0.6, "loss": 2.0}}
    lost = {"client": "c0", "task": "t", "reason": "r"}
    text = json.dumps(line(0, {"mlp": 0.5}, personal=personal, ensembles=ensembles, failures=[lost]))
    found = scalars(RoundRecord.from_line(text))
    assert found == {
        "accuracy/mlp": 0.5, "loss/mlp": 1.0, "accuracy/ensemble the _teachers_": 0.6,
        "loss/ensemble the _teachers_": 2.0, "own models/mean": 0.7, "own models/std": 0.1,
        "own models/worst_decile": 0.2, "bytes/down": 100, "bytes/up": 50, "seconds/total": 2.0,
        "clients/answered": 4, "clients/lost replies": 1,
    }  # fmt: skip


# ---- as a run goes on -------------------------------------------------------------------------------


def test_tensorboard_gets_every_round_once_also_after_a_stop(tmp_path):
    pytest.importorskip("tensorboard")
    config, home = load_config(TINY, ["track.tensorboard=true"]), tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        loop.run(config, home, callbacks=[Listening(stop_after=2)])
    (home / "tensorboard/events.out.tfevents.1.theirs").write_bytes(b"")  # somebody else's is left alone
    listening = Listening()
    loop.resume(home, callbacks=[listening])
    found = in_tensorboard(home / "tensorboard")
    assert found["accuracy/mlp"] == pytest.approx(accuracies(home), abs=1e-6)
    assert set(found["bytes/up"]) == {0, 1, 2}
    assert listening.warnings == []
    assert (home / "tensorboard/events.out.tfevents.1.theirs").exists()
    loop.resume(home)  # a finished run: nothing changes
    assert in_tensorboard(home / "tensorboard") == found


def test_mlflow_gets_every_round_once_also_after_a_stop(tmp_path):
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/m.db"
    config, home = load_config(TINY, [f"track.mlflow={uri}", "track.mlflow_experiment=mine"]), tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        loop.run(config, home, callbacks=[Listening(stop_after=2)])
    (run,) = in_mlflow(uri, "mine")
    assert run["status"] == "KILLED"
    listening = Listening()
    loop.resume(home, callbacks=[listening])
    (told,) = listening.warnings
    assert told.endswith(f"go to the file {tmp_path}/m.db (track.mlflow)")
    (run,) = in_mlflow(uri, "mine")
    assert run["status"] == "FINISHED"
    assert run["metrics"]["accuracy/mlp"] == list(accuracies(home).items())
    assert run["params"]["method.name"] == "feddf"
    assert run["params"]["partition.clients"] == "2"
    assert run["tags"]["solera.out"] == str(home)
    assert solera("export", home, "--format", "mlflow", "--uri", uri, "--experiment", "mine").exit_code == 0
    assert len(in_mlflow(uri, "mine")) == 1  # the same run, and nothing twice
    assert in_mlflow(uri, "mine")[0]["metrics"] == run["metrics"]


def test_tracking_changes_no_result(tmp_path):
    pytest.importorskip("tensorboard")
    plain = loop.run(load_config(TINY), tmp_path / "a").summary
    assert loop.run(load_config(TINY, ["track.tensorboard=true"]), tmp_path / "b").digest == plain["digest"]


class Broken(Tracker):
    def __init__(self, fails_in: str) -> None:
        super().__init__()
        self.fails_in = fails_in

    def open(self, home: Path) -> None:
        self._perhaps("open")

    def store(self, record: Any, when: float) -> None:
        self._perhaps("store")

    def end(self, summary: Any) -> None:
        self._perhaps("end")

    def _perhaps(self, what: str) -> None:
        if self.fails_in == what:
            raise OSError("no space\nleft")


@pytest.mark.parametrize("what", ["open", "store", "end"])
def test_a_failing_tracker_is_a_warning_and_no_more(tmp_path, monkeypatch, what):
    monkeypatch.setattr(export, "TensorBoard", lambda: Broken(what))
    monkeypatch.setattr(TrackConfig, "require", lambda self: None)
    listening = Listening()
    summary = loop.run(load_config(TINY, ["track.tensorboard=true"]), tmp_path / "r", callbacks=[listening]).summary
    assert summary["finished"]
    assert listening.warnings == ["Broken is off for the rest of this run: OSError: no space left"]


def test_a_server_that_is_not_there_does_not_stop_a_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    listening = Listening()
    config = load_config(TINY, ["track.mlflow=http://127.0.0.1:9", "run.rounds=1"])
    assert loop.run(config, tmp_path / "r", callbacks=[listening]).summary["finished"]
    told, warning = listening.warnings
    assert told.startswith("all settings, results and the path of the run directory go to http://127.0.0.1:9")
    assert warning.startswith("MLflow is off for the rest of this run")


# ---- after the fact ---------------------------------------------------------------------------------


def test_tensorboard_after_the_fact_twice_is_as_once(tmp_path):
    pytest.importorskip("tensorboard")
    home = make_run(tmp_path / "r", [0.25, 0.5, 0.75])
    for _ in range(2):
        assert solera("export", home, "--format", "tensorboard").exit_code == 0
    assert in_tensorboard(home / "tensorboard")["accuracy/mlp"] == {0: 0.25, 1: 0.5, 2: 0.75}
    result = solera("export", home, "--format", "tensorboard", "-o", tmp_path / "there", "--json")
    assert json.loads(result.stdout) == {"format": "tensorboard", "out": str(tmp_path / "there")}
    assert in_tensorboard(tmp_path / "there")["bytes/down"] == {0: 100, 1: 100, 2: 100}


def test_an_unfinished_run_is_no_finished_one_in_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    home, uri = make_run(tmp_path / "r", [0.25], finished=False), f"sqlite:///{tmp_path}/m.db"
    assert solera("export", home, "--format", "mlflow", "--uri", uri).exit_code == 0
    (run,) = in_mlflow(uri)
    assert (run["status"], run["metrics"]["accuracy/mlp"]) == ("KILLED", [(0, 0.25)])


def test_a_run_without_rounds(tmp_path):
    home = make_run(tmp_path / "r", finished=False)
    (home / "metrics.jsonl").write_text("")
    result = solera("export", home, "--format", "tensorboard")
    assert result.exit_code == 4
    assert "has no rounds" in result.stderr


# ---- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("track.mlflow=mlruns", "no longer writes into plain folders"),
        ("track.mlflow=file:///tmp/x", "no longer writes into plain folders"),
        ("track.mlflow=http://me:secret@host", "contains a password"),
        ("track.mlflow_experiment=' '", "a name is needed"),
        ("track.tensorboard=1", "true or false"),
        ("track.wandb=true", "there is no such setting"),
    ],
)
def test_impossible_settings(setting, words):
    with pytest.raises(ConfigError, match=words) as error:
        load_config(TINY, [setting])
    assert "secret" not in str(error.value)


def test_a_data_base_file_is_found_wherever_the_run_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(TINY, ["track.mlflow=sqlite:///m.db"])
    assert config.track.mlflow == f"sqlite:///{tmp_path}/m.db"
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml", trusted=True) == config


def test_the_table_in_the_documentation_is_one():
    page = (Path(__file__).parents[3] / "docs/export.md").read_text("utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = load_config(TINY | tomllib.loads(text))
    assert config.track.tensorboard
    assert config.track.mlflow.endswith("/mlflow.db")


@pytest.mark.parametrize(
    ("setting", "extra"), [("tensorboard=true", "tensorboard"), ("mlflow=sqlite:///m.db", "mlflow")]
)
def test_a_missing_extra_is_told_before_any_work(tmp_path, monkeypatch, setting, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None)
    with pytest.raises(ConfigError, match=rf"pip install 'solera\[{extra}\]'"):
        loop.run(load_config(TINY, [f"track.{setting}"]), tmp_path / "r")
    assert not (tmp_path / "r").exists()
