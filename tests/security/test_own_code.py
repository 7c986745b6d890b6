"""A path in a configuration is code: who imports it, who never does, and whose run directories are trusted.

Every command runs in a process of its own: what one has imported, another would find.
"""

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import tomli_w

import fresh
from own_code import SOURCE, TABLES, imports, write_own
from solera.core.errors import RunError
from solera.core.plugins import code_allowed
from solera.report.page import Source
from solera.runs import loop
from solera.runs.read import read_run
from solera.runs.trust import code_of_run, key_file, prove

ROOT = Path(__file__).resolve().parents[2]


TALK = """
import json, sys
from typer.testing import CliRunner
from solera.cli.main import app
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, words, prog_name="solera")
    print(json.dumps([result.exit_code, result.output]))
"""


def solera(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One command, in a process of its own."""
    return python("-m", "solera.cli.main", *args, cwd=cwd, **env)


def solera_each(*commands: list[str], cwd: Path) -> list[tuple[int, str]]:
    """Several commands in one process that is new: (exit code, output) of each."""
    done = python("-c", TALK, json.dumps(commands), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def python(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, **env}
    return fresh.run(*args, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a method, models, a data set and an engine from a file, and a stopped one beside it."""
    folder = tmp_path_factory.mktemp("own")
    toml = write_own(folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")  # files are beside the TOML, not where the command is given
    done = solera("run", toml, "--out", folder / "run", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert imports(folder) == 1
    return folder / "run"


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    """A copy of own.py's folder with its run, whose paths lead to the copy, as if begun there by this user."""
    copy = tmp_path / "copy"
    shutil.copytree(home.parent, copy)
    (copy / "imported").unlink()
    for name in ("config.toml", "run.json"):
        file = copy / "run" / name
        file.write_text(file.read_text().replace(str(home.parent), str(copy)))
    facts = json.loads((copy / "run" / "run.json").read_text())
    facts["proof"] = prove(facts["code"])
    (copy / "run" / "run.json").write_text(json.dumps(facts))
    return copy


def test_the_run_says_what_it_imported(home):
    facts = json.loads((home / "run.json").read_text())
    own = home.parent / "own.py"
    assert set(facts["code"]) == {f"{own}:{n}" for n in ("Mine", "make_small", "Wide", "points", "Counting")}
    assert len({*facts["code"].values()}) == 1
    assert facts["proof"] == prove(facts["code"])
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600
    assert key_file().stat().st_size == 32
    assert sorted(p.stem for p in (home / "models").iterdir()) == ["make_small", "wide"]


def test_a_run_without_code_makes_no_key(tmp_path):
    tables = {"method": {"name": "fedavg", "local": {"epochs": 1}}, "run": {"rounds": 1}, "data": {"name": "toy-2d"}}
    tables |= {"models": {"clients": ["mlp"]}, "partition": {"kind": "iid"}}
    (tmp_path / "plain.toml").write_text(tomli_w.dumps(tables))
    done = solera("run", "plain.toml", "--out", "run", cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "state").exists()
    assert not {"code", "proof"} & set(json.loads((tmp_path / "run/run.json").read_text()))


# ---- who never imports ------------------------------------------------------------------------------


READERS = (
    "show RUN",
    "show RUN --json",
    "report RUN -o OUT/report.html",
    "compare RUN RUN/../again",
    "compare RUN --csv",
    "export RUN --format tensorboard -o OUT/board",
    "ls methods",
    "ls models",
    "ls data",
    "ls engines",
    "ls recipes",
    "doctor",
)


@pytest.mark.parametrize("whose", ["mine", "somebody else's"])
def test_readers_import_nothing(whose, folder, tmp_path):
    if whose != "mine":
        forged(folder, "another key")
    shutil.copytree(folder / "run", folder / "again")
    commands = [c.replace("RUN", str(folder / "run")).replace("OUT", str(tmp_path)).split() for c in READERS]
    for words, (code, said) in zip(commands, solera_each(*commands, cwd=folder), strict=True):
        assert code == 0, (words, said)
        assert words[0] not in ("show", "compare") or "own.py:Mine" in said, (words, said)
    assert imports(folder) == 0


def test_watching_imports_nothing(folder):
    assert "own.py:Mine" in json.dumps(Source([folder / "run"]).data())
    assert imports(folder) == 0


def test_a_reader_that_asked_for_a_configuration_would_be_refused(folder):
    """None of them does. If one did, it would be told, and nothing would be imported."""
    code = "import solera, sys; solera.load_config(sys.argv[1])"
    done = python("-c", code, folder / "own.toml", cwd=folder)
    assert "names code. Only commands that run something" in done.stderr
    assert imports(folder) == 0


# ---- one's own runs ---------------------------------------------------------------------------------


def test_ones_own_run_is_used_and_continued_from_anywhere(folder, home, tmp_path):
    done = solera("predict", folder / "run", "--model", "wide", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 61
    done = solera("export", folder / "run", "--format", "torchscript", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "make_small.pt").is_file()
    config = folder / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))  # no change of code: still one's own
    done = solera("resume", folder / "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 3
    assert imports(folder) == 3
    assert not (folder / "__pycache__").exists()


def test_a_sweep_imports_what_its_file_names(folder, tmp_path):
    tables = TABLES | {"sweep": {"seeds": [0, 1], "grid": {"method.extra": [1, 2]}}}
    (folder / "sweep.toml").write_text(tomli_w.dumps(tables))
    for workers in (1, 2):
        out = tmp_path / str(workers)
        done = solera("sweep", folder / "sweep.toml", "--out", out, "--workers", workers, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        digests = [read_run(out / f"extra={e}" / "s0").summary["digest"] for e in (1, 2)]
        assert digests[0] == digests[1]
    again = solera("sweep", folder / "sweep.toml", "--out", tmp_path / "1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    (folder / "base.toml").write_text(tomli_w.dumps(TABLES))
    (tmp_path / "based.toml").write_text(tomli_w.dumps({"base": str(folder / "base.toml"), "sweep": {"seeds": [0]}}))
    done = solera("sweep", "based.toml", "--dry-run", cwd=tmp_path)  # own.py is beside the base
    assert done.returncode == 0, done.stderr


def test_a_sweep_does_not_import_what_is_in_the_folder_of_its_runs(folder, tmp_path):
    plain = {**TABLES, "method": {"name": "fedavg"}, "models": {"clients": ["mlp"]}, "data": {"name": "toy-2d"}}
    del plain["engine"]
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps({**plain, "sweep": {"seeds": [0]}}))
    shutil.copytree(folder / "run", tmp_path / "out" / "fedavg" / "s0")
    done = solera("sweep", "sweep.toml", "--out", "out", cwd=tmp_path)
    assert done.returncode == 4
    assert "was started with" in done.stderr
    assert imports(folder) == 0


# ---- run directories from elsewhere -----------------------------------------------------------------

USES = (["resume", "RUN"], ["predict", "RUN", "--model", "wide"], ["export", "RUN", "-f", "torchscript", "-o", "out"])


def forged(folder: Path, how: str) -> str:
    """Make the run somebody else's; what is said of it."""
    file = folder / "run" / "run.json"
    facts = json.loads(file.read_text())
    if how == "no proof":
        del facts["proof"]
        said = "its run.json has no proof"
    elif how == "another key":
        facts["proof"] = "ab" * 32
        said = "the proof in its run.json was not made with your key"
    elif how == "other code under the proof":
        facts["code"] |= dict.fromkeys(facts["code"], "0" * 64)
        said = "the proof in its run.json was not made with your key"
    else:  # a path that the proof does not know
        other = folder / "other.py"
        other.write_text(SOURCE)
        config = folder / "run" / "config.toml"
        config.write_text(config.read_text().replace("own.py:", "other.py:"))
        said = "it was started without"
    file.write_text(json.dumps(facts))
    return said


@pytest.mark.parametrize("how", ["no proof", "another key", "other code under the proof", "another path"])
def test_a_run_from_elsewhere_is_refused(how, folder, tmp_path):
    said = forged(folder, how)
    commands = [[str(folder / "run") if w == "RUN" else w for w in use] for use in USES]
    path = f"{folder}/{'other' if how == 'another path' else 'own'}.py"
    for words, (code, told) in zip(commands, solera_each(*commands, cwd=tmp_path), strict=True):
        assert code == 4, (words, told)
        for word in (said, f"method.name = '{path}:Mine'", "--trust-code"):
            assert word in told, words
    assert imports(folder) == 0


@pytest.mark.parametrize("use", USES, ids=lambda u: u[0])
def test_a_run_from_elsewhere_is_used_once_it_is_trusted(use, folder, tmp_path):
    forged(folder, "no proof")
    done = solera(*(folder / "run" if w == "RUN" else w for w in use), "--trust-code", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert imports(folder) == 1


def test_the_rule_from_python(folder):
    forged(folder, "no proof")
    with pytest.raises(RunError, match=r"--trust-code \(in Python, trust_code=True\)"):
        loop.resume(folder / "run")
    with pytest.raises(RunError, match="names code"), code_of_run(folder / "run"):
        pytest.fail("it was allowed")
    with code_of_run(folder / "run", trust_code=True):
        pass
    assert imports(folder) == 0


def test_a_key_that_others_can_read_proves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    facts = json.loads((folder / "run/run.json").read_text())
    facts["proof"] = prove(facts["code"])
    (folder / "run/run.json").write_text(json.dumps(facts))
    with code_of_run(folder / "run"):
        pass
    key_file().chmod(0o644)
    with pytest.raises(RunError, match="other users have access to it"), code_of_run(folder / "run"):
        pytest.fail("it was allowed")
    key_file().unlink()
    with pytest.raises(RunError, match="No such file"), code_of_run(folder / "run"):
        pytest.fail("it was allowed")


def test_without_a_place_for_the_key_the_run_goes_on(tmp_path):
    toml = write_own(tmp_path)
    (tmp_path / "file").write_text("")
    done = solera("run", toml, "--out", "run", cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert "will need --trust-code" in done.stdout
    assert json.loads((tmp_path / "run/run.json").read_text())["proof"] is None


# ---- code that changes ------------------------------------------------------------------------------


def test_changed_code_is_not_continued_and_said_when_it_is_used(folder, tmp_path):
    own = folder / "own.py"
    own.write_text(SOURCE + "\n# a comment\n")
    done = solera("resume", folder / "run", cwd=tmp_path)
    assert done.returncode == 4
    for word in ("own.py:", "is not the code that", "restore the code", "another --out"):
        assert word in done.stderr
    assert imports(folder) == 0
    done = solera("predict", folder / "run", "--model", "wide", cwd=tmp_path)
    assert done.returncode == 0
    assert "own.py:Wide has changed since the run was started" in done.stderr
    assert "own.py:points has changed since the run was started" in done.stderr
    done = solera("export", folder / "run", "-f", "torchscript", "-o", "out", cwd=tmp_path)
    assert "own.py:make_small has changed" in done.stderr
    own.unlink()
    done = solera("resume", folder / "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "own.py: No such file" in done.stderr


def test_a_module_that_changes_is_noticed(folder, tmp_path):
    """Of a module the file is known once it is imported."""
    (folder / "own.toml").write_text((folder / "own.toml").read_text().replace("own.py:", "own:"))
    done = solera("run", "own.toml", "--out", tmp_path / "run", cwd=folder, PYTHONPATH=f"{ROOT / 'src'}:{folder}")
    assert done.returncode == 0, done.stderr
    assert set(json.loads((tmp_path / "run/run.json").read_text())["code"]) >= {"own:Mine", "own:Wide"}
    (folder / "own.py").write_text(SOURCE + "\n# a comment\n")
    done = solera("resume", tmp_path / "run", cwd=tmp_path, PYTHONPATH=f"{ROOT / 'src'}:{folder}")
    assert done.returncode == 4
    assert "'own:Mine' is not the code that" in done.stderr


def test_own_code_in_worker_processes(folder, home, tmp_path):
    """Paths are resolved before workers are forked."""
    words = ["run", folder / "own.toml", "--engine", "processes", "--workers", 2, "--out", tmp_path / "run"]
    done = solera(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "engine.greeting did not carry over" in done.stdout
    assert read_run(tmp_path / "run").summary["digest"] == read_run(home).summary["digest"]
    assert imports(folder) == 1


def test_an_engine_may_change(folder, tmp_path):
    """It changes no bits; and a run needs no permission for code that it does not name any more."""
    (folder / "engine.py").write_text(SOURCE)
    config = folder / "run" / "config.toml"
    config.write_text(config.read_text().replace("own.py:Counting", "engine.py:Counting"))
    done = solera("resume", folder / "run", "--trust-code", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = config.read_text()
    config.write_text(text[: text.index("[engine]")] + text[text.index("[track]") :])
    done = solera("resume", folder / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_a_message_or_a_checkpoint_says_is_never_a_path(folder):
    """`load` is called by registries alone, and these by configurations."""
    callers = [
        str(path.relative_to(ROOT / "src/solera"))
        for path in (ROOT / "src/solera").rglob("*.py")
        if "import_module(" in path.read_text() or "spec_from_file_location(" in path.read_text()
    ]
    # Those beside plugins import names that stand in their own source: exports, Flower's programs, an extra's packages.
    # Ray is the exception: a cluster is trusted and carries the run's code (SECURITY.md), by its modules' names.
    own = ["__init__.py", "deploy/gate.py", "deploy/standby.py", "models/hub.py", "models/lora.py", "core/plugins.py"]
    assert sorted(callers) == sorted([*own, "engines/ray.py"])
    assert "for name in LOAD:" in (ROOT / "src/solera/deploy/standby.py").read_text()
    assert "GATED[program]" in (ROOT / "src/solera/deploy/gate.py").read_text()
    lora = (ROOT / "src/solera/models/lora.py").read_text()
    assert set(re.findall(r"import_module\(([^)]+)\)", lora)) == {'"peft"', '"peft.tuners.lora"'}
    text = "".join((ROOT / "src/solera/models" / file).read_text() for file in ("hf.py", "hub.py"))
    packages = {'"transformers"', '"huggingface_hub"', 'f"huggingface_hub.{part}"'}
    assert set(re.findall(r"(?<!def )imported\(([^,]+),", text)) == packages
    for package in ("core/wire.py", "core/task.py", "core/federation.py", "engines/serve.py", "engines/processes.py"):
        assert "plugins" not in (ROOT / "src/solera" / package).read_text()
    with code_allowed(folder):  # even where code is allowed
        read_run(folder / "run")
    assert imports(folder) == 0
