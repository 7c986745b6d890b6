"""`deploy/flower_inside.py` beside the flwr that is installed: whatever it rests on is there, under that name."""

import importlib
import importlib.metadata
import inspect
import pathlib
import re
import sqlite3
import subprocess
import sys
import tomllib

import pytest
import tomli_w

from solera.core.errors import ConfigError, SoleraError
from solera.deploy import flower_inside, gate
from solera.deploy.flower_inside import check_version, nodes_in
from solera.deploy.keys import fingerprint, make_node_key
from solera.deploy.templates import APP

ROOT = pathlib.Path(__file__).resolve().parents[3]
LINK_OPTIONS = ("flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink")
NODE_OPTIONS = ("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode")
EXEC_OPTIONS = ("flwr.supercore.cli.flower_superexec", "_parse_args")


def test_the_extra_allows_the_versions_that_were_tried_and_no_others():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flower"]
    lower, upper = re.search(r"flwr>=1\.(\d+),<1\.(\d+)", " ".join(extra)).groups()
    assert tuple(f"1.{n}" for n in range(int(lower), int(upper))) == flower_inside.TRIED


def test_the_installed_flwr_was_tried():
    check_version()


@pytest.mark.parametrize("version", ["1.40.0", "1.43.0", "1.43.0.dev20261101", "2.0", "14.1"])
def test_a_version_that_was_not_tried_is_refused_in_one_line_with_the_way_out(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError) as e:
        check_version()
    assert version in str(e.value)
    assert "pip install 'flwr>=1.41,<1.43'" in str(e.value)
    assert "\n" not in str(e.value)
    with pytest.raises(SystemExit, match=re.escape(version)):  # and no program of an app starts behind the gate
        gate.main("flwr-clientapp")


@pytest.mark.parametrize("version", ["1.41.0", "1.42.0", "1.42.3"])
def test_a_version_that_was_tried_is_taken(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    check_version()


def test_error_codes_mean_what_they_are_said_to_mean():
    from flwr.common.constant import ErrorCode

    assert flower_inside.TOO_LATE == ErrorCode.MESSAGE_UNAVAILABLE
    assert flower_inside.GONE == ErrorCode.NODE_UNAVAILABLE
    named = {ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "loaded", ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "raised",
             ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "lost", ErrorCode.INVALID_FAB: "refuses the app",
             ErrorCode.CLIENT_APP_CRASHED: "died"}  # fmt: skip
    assert set(named) == set(flower_inside.CODES)
    assert all(word in flower_inside.CODES[code] for code, word in named.items())


def test_every_program_that_flower_would_start_for_a_task_is_behind_the_gate():
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    assert set(TASK_TYPE_TO_COMMAND.values()) == {*flower_inside.GATED, *flower_inside.UNUSED}


@pytest.mark.parametrize("program", sorted(flower_inside.GATED))
def test_the_module_behind_the_gate_unpacks_apps_by_the_guarded_function_and_by_nothing_else(program):
    where, cli, entry = flower_inside.GATED[program]
    module = importlib.import_module(where)
    assert module.install_from_fab is importlib.import_module("flwr.cli.install").install_from_fab
    source = inspect.getsource(module)
    assert len(re.findall(r"install_from_fab\(fab\.content\b", source)) == 1
    assert not re.findall(r"zipfile|unpack_archive|extractall", source)
    assert callable(getattr(importlib.import_module(cli), entry))
    scripts = {e.name: e.value for e in importlib.metadata.entry_points(group="console_scripts")}
    assert scripts[program] == f"{cli}:{entry}"


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("which", ["superlink", "superexec", "supernode"])
def test_programs_understand_their_commands(which, insecure, tmp_path):
    place = {
        "superlink": (LINK_OPTIONS, lambda: flower_inside.superlink(
            tmp_path, "127.0.0.1", 8000, tmp_path / "db", insecure)),
        "superexec": (EXEC_OPTIONS, lambda: flower_inside.superexec(tmp_path, "127.0.0.1:8000", insecure)),
        "supernode": (NODE_OPTIONS, lambda: flower_inside.supernode(tmp_path, "127.0.0.1:8000", 9000, insecure)),
    }  # fmt: skip
    (module, parser), command = place[which]
    words = command()
    assert pathlib.Path(words[0]).name == f"flower-{which}"
    given = getattr(importlib.import_module(module), parser)().parse_args(words[1:])
    assert given.insecure is insecure
    if which == "superlink":
        assert (given.host, given.port, given.isolation) == ("127.0.0.1", 8000, "process")
        assert given.enable_supernode_auth is not insecure
        assert given.superexec_auth_secret_file == str(tmp_path / "secret")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("flwr.supernode.start_client_internal", '"SuperNode ID: %s"'),
        ("flwr.supercore.retry.http_retry", '"Connection attempt failed, retrying in'),
    ],
)
def test_a_node_prints_what_is_looked_for(module, text):
    assert text in inspect.getsource(importlib.import_module(module))
    assert flower_inside.CONNECTED in text or flower_inside.TRYING in text


def test_refusals_have_the_codes_that_are_looked_for():
    from flwr.supercore.error import ApiErrorCode

    assert f"[code: {int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)}]" == flower_inside.NOT_ACTIVATED
    assert f"[code: {int(ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED)}]" == flower_inside.NO_KEYS_HERE


def test_switches_are_read_by_flower():
    sources = "".join(
        p.read_text() for p in pathlib.Path(importlib.import_module("flwr").__file__).parent.rglob("*.py")
    )
    assert all(f'"{name}"' in sources for name in (*flower_inside.SAFE, flower_inside.HOME))


def test_the_command_finds_the_server_in_its_home(tmp_path):
    text = tomli_w.dumps(flower_inside.connection("127.0.0.1:1", tmp_path / "ca.crt"))
    (tmp_path / "config.toml").write_text(text)
    code = (
        "from flwr.cli.flower_config import read_superlink_connection as read\n"
        f"c = read({flower_inside.CONNECTION!r}); print(c.address, c.root_certificates, bool(c.insecure))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**flower_inside.SAFE, "FLWR_HOME": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["127.0.0.1:1", str(tmp_path / "ca.crt"), "False"], done.stderr


def superlink_state(database):
    """The state of a SuperLink, as flwr itself keeps it."""
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    return LinkStateFactory(str(database), NoOpFederationManager(), ObjectStoreFactory(str(database))).state()


def test_the_list_of_nodes_is_read_from_the_database_as_flower_writes_it(tmp_path):
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.constant import NodeStatus
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    database = tmp_path / "superlink.db"
    assert nodes_in(database) == []
    state, keys, ids = superlink_state(database), [], []
    for i in range(12):  # numbers of 64 bits: about half of them have the highest bit
        folder = tmp_path / str(i)
        folder.mkdir()
        make_node_key(folder, "x")
        keys.append((folder / "node.pub").read_bytes())
        ids.append(state.create_node("me", "me", public_key_to_bytes(load_ssh_public_key(keys[-1])), 0))
    state.activate_node(ids[0], 30.0)
    state.delete_node("me", ids[1])
    found = nodes_in(database)
    assert {n.id for n in found} == {str(i) for i in ids}
    assert {n.id: fingerprint(n.key, "") for n in found} == {
        str(i): fingerprint(k, "") for i, k in zip(ids, keys, strict=True)
    }
    status = {n.id: n.status for n in found}
    assert status[str(ids[0])] == NodeStatus.ONLINE
    assert status[str(ids[1])] == NodeStatus.UNREGISTERED == flower_inside.UNREGISTERED
    assert {n.id for n in found if n.struck_at} == {str(ids[1])}
    assert status[str(ids[2])] == NodeStatus.REGISTERED


def test_a_database_of_another_form_is_named(tmp_path):
    with sqlite3.connect(tmp_path / "superlink.db") as db:
        db.execute("CREATE TABLE node (name TEXT)")
    with pytest.raises(SoleraError, match=r"superlink\.db: the list of nodes cannot be read: no such column"):
        nodes_in(tmp_path / "superlink.db")


def test_the_json_of_a_command_is_found_among_its_other_words(tmp_path, monkeypatch):
    program = tmp_path / "flwr"
    program.write_text('#!/bin/sh\necho "note {not json}"\necho "{\\"success\\": true, \\"words\\": \\"$*\\"}"\n')
    program.chmod(0o700)
    monkeypatch.setattr(flower_inside, "program", lambda name: str(program))
    said, text = flower_inside.flwr({}, "list", "solera")
    assert said == {"success": True, "words": "list solera --format json"}
    assert text.startswith("note {not json}")


@pytest.mark.parametrize("what", ["register", "unregister", "start_run"])
def test_what_the_command_does_not_do_is_said_with_its_own_words(what, monkeypatch):
    monkeypatch.setattr(
        flower_inside,
        "flwr",
        lambda env, *words: ({"success": False}, '{"success": false,\n"error-message": "no such"}'),
    )
    ask = {
        "register": lambda: flower_inside.register({}, pathlib.Path("keys/b.pub")),
        "unregister": lambda: flower_inside.unregister({}, "17"),
        "start_run": lambda: flower_inside.start_run({}, pathlib.Path("app"), {"run": "x"}),
    }
    named = {"register": "b.pub cannot", "unregister": "node 17 cannot", "start_run": "does not take the run"}
    with pytest.raises(SoleraError, match=rf'{named[what]}.*"no such"'):
        ask[what]()


def test_an_apps_components_are_those_that_the_gate_lets_in():
    assert tomllib.loads(APP)["tool"]["flwr"]["app"]["components"] == gate.COMPONENTS
