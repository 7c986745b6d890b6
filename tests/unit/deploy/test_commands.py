"""Following a run and a connection through logs, and what the server remembers of its sites."""

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import threading
import time

import pytest
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from solera.cli.main import app
from solera.core.errors import ConfigError, RunError
from solera.deploy import commands, flower_inside
from solera.deploy.commands import REASONS, Submitted, _Connection, registered, wait_for
from solera.deploy.flower_inside import Node
from solera.deploy.journal import write_line
from solera.deploy.keys import make_node_key
from solera.deploy.programs import Program


@pytest.fixture
def statuses(monkeypatch):
    """What Flower says of the run, one after another."""
    said = ["running", "finished:completed"]
    monkeypatch.setattr(commands, "LOOK_S", 0.01)
    monkeypatch.setattr(flower_inside, "run_status", lambda env, run: said.pop(0) if len(said) > 1 else said[0])
    return said


def test_a_run_is_followed_through_the_servers_log(tmp_path, statuses):
    log = tmp_path / "log" / "server.jsonl"
    write_line(log, {"run": "first", "says": "of an earlier submission", "ended": True})
    run = Submitted("first", 1, tmp_path, log.stat().st_size)
    write_line(log, {"run": "first", "says": "round 0"})
    write_line(log, {"run": "other", "says": "of another run", "ended": True})
    threading.Timer(0.3, lambda: write_line(log, {"run": "first", "says": "the end", "ended": True})).start()
    heard = []
    assert wait_for(tmp_path, run, 60, heard.append) == "finished:completed"
    assert [text.split(" ", 1)[1] for text in heard] == ["round 0", "the end"]


def test_a_site_whose_key_is_not_admitted_is_told_every_reason():
    """Flower has one code for a key that it does not know, one that another node shows and one that was struck off."""
    (means,) = (r.means for r in REASONS if r.prints == flower_inside.NOT_ACTIVATED)
    assert "node.pub was not among its keys" in means
    assert "another node is there with a copy of the key" in means
    assert "taken off the list" in means


def test_a_run_that_says_nothing_is_asked_for_now_and_then(tmp_path, statuses, monkeypatch):
    """Its program may have been killed."""
    monkeypatch.setattr(commands, "ASK_S", 0.1)
    statuses[:] = ["running", "running", "finished:failed"]
    assert wait_for(tmp_path, Submitted("first", 1, tmp_path, 0), 60) == "finished:failed"


def test_patience_has_an_end(tmp_path, statuses):
    with pytest.raises(RunError, match=r"has not ended after 0\.1 s; it goes on"):
        wait_for(tmp_path, Submitted("first", 1, tmp_path, 0), 0.1)


def test_a_site_says_whether_it_reaches_the_server(tmp_path, caplog):
    caplog.set_level("INFO", "solera")
    node = Program("supernode", [], {}, tmp_path / "node.log")
    look = _Connection(node, "10.0.0.5:8000").look
    look()
    (tmp_path / "node.log").write_text("WARNING: Connection attempt failed, retrying\n" * 3)
    look()
    look()
    with (tmp_path / "node.log").open("a") as f:
        f.write("INFO: SuperNode ID: 17\nINFO: half a li")
    look()
    look()
    assert [r.getMessage() for r in caplog.records] == [
        "no answer from the server at 10.0.0.5:8000: trying again (is it up, and is TLS on there?)",
        "connected to the server at 10.0.0.5:8000",
    ]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server's folder with the keys of two sites, and a list of nodes in the place of the SuperLink's."""
    for folder in ("keys", "state"):
        (tmp_path / folder).mkdir()
    for k in ("a", "b"):
        new_key(tmp_path, k)
    nodes = []

    def register(env, key):
        public = serialization.load_ssh_public_key(key.read_bytes())
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        assert pem not in [n.key for n in nodes], "Flower takes no key twice"
        nodes.append(Node(str(11 + len(nodes)), pem, "registered", None))

    monkeypatch.setattr(flower_inside, "nodes_in", lambda database: list(nodes))
    monkeypatch.setattr(flower_inside, "register", register)
    monkeypatch.setattr(flower_inside, "unregister", lambda env, node: strike(nodes, node))
    return tmp_path, nodes


def new_key(folder, name):
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    make_node_key(made, name)
    shutil.move(made / "node.pub", folder / "keys" / f"{name}.pub")


def strike(nodes, which):
    """Take a node off the list, as anybody at the control interface can."""
    i = [n.id for n in nodes].index(which)
    nodes[i] = dataclasses.replace(nodes[i], status="unregistered", struck_at="2026-11-19 10:00:00")


def test_each_key_is_registered_once(server):
    folder, nodes = server
    commands._Roll(folder).call({})
    commands._Roll(folder).call({})
    assert sorted(registered(folder)) == ["a", "b"]
    assert [n.status for n in nodes] == ["registered"] * 2


def test_a_key_in_keys_decides_who_is_on_the_list(server, caplog):
    """A site that got a new key, a site that was removed, and a stranger who registered at the control interface."""
    folder, nodes = server
    commands._Roll(folder).call({})
    before = registered(folder)
    new_key(folder, "b")
    (folder / "keys" / "a.pub").unlink()
    new_key(folder, "stranger")
    flower_inside.register({}, folder / "keys" / "stranger.pub")
    (folder / "keys" / "stranger.pub").unlink()
    nodes.append(Node("14", b"no key", "registered", None))
    caplog.clear()
    commands._Roll(folder).call({})
    now = registered(folder)
    assert set(now) == {"b"}
    assert now["b"].status == "registered"
    assert now["b"].key != before["b"].key
    assert {n.id for n in nodes if n.status == "unregistered"} == {"11", "12", "13", "14"}
    assert caplog.text.count("is taken off the list: its key is not, or no longer, in keys") == 4


def test_a_site_that_was_locked_out_is_named_at_the_start_with_the_way_out(server, caplog):
    folder, nodes = server
    commands._Roll(folder).call({})
    strike(nodes, registered(folder)["b"].id)
    caplog.clear()
    roll = commands._Roll(folder)
    roll.call({})
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1, "and nothing says that it is registered"
    assert said[0].startswith("b is locked out: its key was taken off the list")
    assert "2026-11-19 10:00:00" in said[0]
    assert "solera deploy rekey" in said[0]
    assert registered(folder)["b"].status == "unregistered", "its name stays"


def test_a_site_that_is_locked_out_while_the_server_runs_is_named_once(server, caplog, monkeypatch):
    folder, nodes = server
    monkeypatch.setattr(commands, "ROLL_S", 0.0)
    roll = commands._Roll(folder)
    roll.call({})
    roll.look()
    assert "locked out" not in caplog.text
    strike(nodes, registered(folder)["a"].id)
    for _ in range(3):
        roll.look()
    assert caplog.text.count("a is locked out") == 1


def test_a_file_in_keys_that_is_no_key_is_named_and_does_not_end_a_server_that_runs(server, caplog, monkeypatch):
    folder, _ = server
    monkeypatch.setattr(commands, "ROLL_S", 0.0)
    roll = commands._Roll(folder)
    roll.call({})
    (folder / "keys" / "c.pub").write_text("no key\n")
    with pytest.raises(ConfigError, match=r"c\.pub is not the public key of a site"):
        commands._Roll(folder).call({})
    roll.look()
    assert "c.pub is not the public key of a site" in caplog.text


def test_status_has_the_sites_by_name_also_those_that_are_locked_out(server, monkeypatch):
    folder, nodes = server
    (folder / "deploy.toml").write_text('role = "server"\naddress = "127.0.0.1:8000"\n')
    commands._Roll(folder).call({})
    new_key(folder, "a")
    commands._Roll(folder).call({})
    strike(nodes, registered(folder)["b"].id)
    told = [{"node-id": n.id, "status": n.status} for n in nodes]
    monkeypatch.setattr(flower_inside, "runs_and_nodes", lambda env: ([], told))
    found = commands.status(folder)
    assert found["reachable"] is True
    assert {(n["site"], n["status"]) for n in found["nodes"]} == {("a", "registered"), ("b", "unregistered")}
    monkeypatch.setattr(flower_inside, "runs_and_nodes", lambda env: ([], None))
    assert commands.status(folder)["reachable"] is False


def test_a_new_key_for_a_site_is_made_there_and_what_is_left_to_do_is_said(tmp_path):
    (tmp_path / "deploy.toml").write_text('role = "site"\nname = "north"\naddress = "127.0.0.1:8000"\n')
    make_node_key(tmp_path, "north")
    old = {name: (tmp_path / name).read_bytes() for name in ("node.key", "node.pub")}
    done = CliRunner().invoke(app, ["deploy", "rekey", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for name, content in old.items():
        assert (tmp_path / f"{name}.old").read_bytes() == content
        assert (tmp_path / name).read_bytes() != content
    assert (tmp_path / "node.key").stat().st_mode & 0o777 == 0o600
    private = serialization.load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    assert (tmp_path / "node.pub").read_bytes() == public + b" north\n"
    said = done.output.replace("\n", " ")
    assert f"{tmp_path}/node.pub" in said
    assert "keys/north.pub" in said
    assert "restart `solera deploy server`" in " ".join(said.split())
    if shutil.which("ssh-keygen"):
        own = subprocess.run(["ssh-keygen", "-lf", tmp_path / "node.pub"], capture_output=True, text=True).stdout
        assert own.split()[1] in said
    assert CliRunner().invoke(app, ["deploy", "rekey", str(tmp_path)]).exit_code == 0, "it can be done again"


def test_a_server_has_no_key_of_a_site(tmp_path):
    (tmp_path / "deploy.toml").write_text('role = "server"\naddress = "127.0.0.1:8000"\n')
    with pytest.raises(ConfigError, match="the folder of a 'server', not of a site"):
        commands.rekey(tmp_path)


def test_a_server_that_others_reach_does_not_start_without_a_word_on_it(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(commands, "_check_certificate", lambda folder: started.append(folder) or 1 / 0)
    where = tmp_path / "deploy.toml"
    where.write_text('role = "server"\naddress = "10.0.0.5:8000"\n')
    with pytest.raises(ConfigError, match=r"10\.0\.0\.5:8000.*no login"):
        commands.serve(tmp_path)
    assert started == []
    for said, options in (("", {"behind_firewall": True}), ("behind_firewall = true", {}), ('proxy = "a:1"', {})):
        where.write_text(f'role = "server"\naddress = "10.0.0.5:8000"\n{said}\n')
        with pytest.raises(ZeroDivisionError):
            commands.serve(tmp_path, **options)


@pytest.mark.parametrize("start", [commands.serve, commands.attend])
def test_with_a_flwr_that_was_not_tried_nothing_starts(start, tmp_path, monkeypatch):
    role = "server" if start is commands.serve else "site"
    (tmp_path / "deploy.toml").write_text(f'role = "{role}"\nname = "x"\naddress = "127.0.0.1:8000"\n')
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.43.0")
    with pytest.raises(ConfigError, match=r"flwr 1\.43\.0"):
        start(tmp_path)
    assert os.listdir(tmp_path) == ["deploy.toml"]


def test_logs_are_in_order_of_time(tmp_path):
    (tmp_path / "deploy.toml").write_text("")
    for i, name in enumerate(["site", "asked", "site"]):
        write_line(tmp_path / "log" / f"{name}.jsonl", {"n": i})
        time.sleep(0.005)
    assert [(line["log"], line["n"]) for line in commands.logs(tmp_path, 10)] == [
        ("site", 0), ("asked", 1), ("site", 2),
    ]  # fmt: skip
    assert [line["n"] for line in commands.logs(tmp_path, 2)] == [1, 2]
    assert json.loads((tmp_path / "log" / "asked.jsonl").read_text())["time"].endswith("Z")
