"""The gate: no app but Solera's own gets past it."""

import io
import os
import subprocess
import sys
import zipfile

import pytest

from solera.deploy import gate
from solera.deploy.gate import AppRefused, check_app, guarded, write_programs
from solera.deploy.templates import APP


def bundle(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, text in files.items():
            z.writestr(name, text)
    return out.getvalue()


def test_the_app_of_a_deployment_passes():
    check_app(bundle({"pyproject.toml": APP, ".info/CONTENT": "hashes"}))


def test_flower_packs_it_to_something_that_passes(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    (tmp_path / "pyproject.toml").write_text(APP)
    check_app(build_fab_from_disk(tmp_path))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"pyproject.toml": APP, "evil.py": "import os"}, "files of its own (evil.py)"),
        ({"pyproject.toml": APP, "solera/deploy/clientapp.py": "app = 1"}, "files of its own"),
        ({"pyproject.toml": APP.replace("solera.deploy.clientapp", "antigravity")}, "the app names"),
        ({"pyproject.toml": APP.replace('clientapp = "solera', 'other = "solera')}, "the app names"),
        ({"pyproject.toml": "[tool"}, "not an app"),
        ({"pyproject.toml": "[tool]\nflwr = 1"}, "not an app"),
        ({"pyproject.toml": "#" * (1 << 17)}, "too large"),
        ({"pyproject.toml": APP, ".info/../evil.py": ""}, "files of its own (.info/../evil.py)"),
        ({"pyproject.toml": APP, ".info/evil.py": ""}, "files of its own (.info/evil.py)"),
        ({".info/CONTENT": ""}, "files of its own (none)"),
        ({}, "files of its own (none)"),
    ],
)
def test_any_other_app_is_refused(files, said):
    with pytest.raises(AppRefused) as e:
        check_app(bundle(files))
    assert said in str(e.value)


@pytest.mark.parametrize("content", [b"", b"PK", bundle({"pyproject.toml": APP})[:-30]])
def test_what_is_no_bundle_is_refused(content):
    with pytest.raises(AppRefused, match="not an app"):
        check_app(content)


def test_nothing_is_unpacked_that_was_not_checked():
    unpacked = []
    install = guarded(lambda content, **options: unpacked.append(content))
    with pytest.raises(AppRefused):
        install(bundle({"evil.py": ""}), skip_prompt=True)
    with pytest.raises(AppRefused):
        install("/some/file")
    install(bundle({"pyproject.toml": APP}), skip_prompt=True)
    assert len(unpacked) == 1


@pytest.mark.parametrize("program", sorted(gate.GATED))
def test_the_gate_is_in_front_of_flowers_program(program, monkeypatch):
    import importlib

    where, cli, entry = gate.GATED[program]
    module, called = importlib.import_module(where), []
    monkeypatch.setattr(module, gate.INSTALL, lambda content, **k: None)
    monkeypatch.setattr(importlib.import_module(cli), entry, lambda: called.append(program))
    gate.main(program)
    assert called == [program]
    with pytest.raises(AppRefused):
        getattr(module, gate.INSTALL)(bundle({"evil.py": ""}))


def test_without_the_function_that_it_guards_it_does_not_start(monkeypatch):
    import importlib

    where, cli, entry = gate.GATED["flwr-clientapp"]
    monkeypatch.delattr(importlib.import_module(where), gate.INSTALL)
    monkeypatch.setattr(importlib.import_module(cli), entry, lambda: pytest.fail("it started"))
    with pytest.raises(SystemExit, match="apps cannot be checked"):
        gate.main("flwr-clientapp")


@pytest.mark.parametrize("program", sorted(gate.UNUSED))
def test_no_other_program_of_flower_is_started_for_an_app(program, tmp_path, monkeypatch):
    """An app of another kind (an agent, a simulation) would be unpacked and run by a program of its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    write_programs(tmp_path)
    done = subprocess.run([tmp_path / program, "--token", "x"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"solera: a deployment has no use for {program}: refused\n"


def test_the_programs_run_this_python(tmp_path):
    write_programs(tmp_path / "bin")
    for name in (*gate.GATED, *gate.UNUSED):
        file = tmp_path / "bin" / name
        assert file.read_text().startswith(f"#!{sys.executable}\n")
        assert file.stat().st_mode & 0o777 == 0o700
