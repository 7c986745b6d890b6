"""Nothing that arrives can run code or leave the run directory."""

import ast
import hashlib
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import solera
from helpers import Site
from solera.core.errors import ConfigError
from solera.core.task import TASKS
from solera.core.wire import WireError, decode, encode
from solera.engines import ClientInfo, ClientStates, InProcess, Roster, StateError, Version
from solera.runs.directory import RunDirectory

SRC = pathlib.Path(solera.__file__).parent
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def test_no_source_file_can_run_what_it_reads():
    found = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name.split(".")[0] for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            bad = FORBIDDEN & set(names)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load", "__import__"):
                    bad = bad | {called}
                if any(k.arg in ("allow_pickle", "weights_only", "shell") for k in node.keywords):
                    bad = bad | {ast.unparse(node)}
            found += [f"{path.relative_to(SRC)}:{getattr(node, 'lineno', 0)}: {b}" for b in bad]
    assert found == []


class Canary:
    """Unpickling this would leave a trace."""

    def __reduce__(self):
        return (os.mkdir, ("canary-was-here",))


def test_a_canary_sent_by_every_route_stays_silent(tmp_path, monkeypatch):
    import io
    import pickle

    monkeypatch.chdir(tmp_path)
    song = pickle.dumps(Canary())
    zipped = io.BytesIO()
    torch.save({"w": Canary()}, zipped)
    for blob in (song, zipped.getvalue()):
        with pytest.raises(WireError):
            decode(blob, dict[str, torch.Tensor])
        states = ClientStates(tmp_path / "states")
        version = states.save("c00", 1, {"a": {"b": torch.ones(1)}})
        forged = Version(2, hashlib.sha256(blob).hexdigest())
        for named in (version, forged):
            states.path("c00", named).write_bytes(blob)
            with pytest.raises(StateError):
                states.load("c00", named)
        home = RunDirectory(tmp_path / "run", "0", resume=(tmp_path / "run").exists())
        home.commit(0, {"a": torch.ones(1)}, {})
        (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
        checkpoint.write_bytes(blob)
        assert home.latest(dict[str, torch.Tensor])[0] == 0
        home.close()
    with pytest.raises(WireError):
        encode(Canary())
    assert not (tmp_path / "canary-was-here").exists()


NAMES = [
    "../evil",
    "/etc/passwd",
    "a/../../b",
    "..",
    ".",
    "",
    "a\0b",
    "x" * 300,
    "a\nb",
    "с00",
    "C00",
    "a b",
    "~root",
    "-rf",
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_names_from_outside_stay_inside(name, tmp_path):
    with pytest.raises(ConfigError):
        Roster.of({name: ClientInfo("p", 1)})
    states = ClientStates(tmp_path / "inner" / "states")
    with pytest.raises(ConfigError):
        states.save(name, 0, {"a": {"b": torch.ones(1)}})
    home = RunDirectory(tmp_path / "inner" / "run", "0")
    with pytest.raises(ConfigError):
        home.write_model(name, {"w": torch.ones(1)}, {})
    home.close()
    assert {p.name for p in tmp_path.iterdir()} == {"inner"}
    assert {p.name for p in (tmp_path / "inner").iterdir()} <= {"states", "run"}


def test_a_call_can_name_registered_tasks_only(tmp_path):
    from solera.core.wire import Packed
    from solera.engines import Call

    engine = InProcess(Site(), ClientStates(tmp_path))
    for name in ("os.system", "builtins.eval", "solera.cli.main", "__import__"):
        (reply,) = engine.start([Call("c00", name, 0, 0, 0, Packed({}))])()
        assert reply.error is not None
        assert "unknown task" in reply.error
    assert not any(name.startswith(("os.", "builtins.")) for name in TASKS)


def test_what_a_client_process_imports(tmp_path):
    """Importing the library pulls in no unpickler of its own making: only what torch itself brings."""
    code = "import torch, sys; before = set(sys.modules); import solera; print(*sorted(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"dill", "cloudpickle", "joblib", "shelve", "marshal"} & set(found)
