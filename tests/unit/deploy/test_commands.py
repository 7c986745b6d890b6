"""Following a run and a connection through logs, and what the server remembers of its sites."""

import json
import threading
import time

import pytest

from solera.deploy import commands
from solera.deploy.commands import REASONS, Submitted, _Connection, register, registered, wait_for
from solera.deploy.journal import write_line
from solera.deploy.programs import Program
from solera.errors import RunError, SoleraError


@pytest.fixture
def statuses(monkeypatch):
    """What Flower says of the run, one after another."""
    said = ["running", "finished:completed"]
    monkeypatch.setattr(commands, "LOOK_S", 0.01)
    monkeypatch.setattr(commands, "run_status", lambda env, run: said.pop(0) if len(said) > 1 else said[0])
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


def test_a_site_whose_key_is_not_admitted_is_told_both_reasons():
    """Flower has one code for a key that it does not know and one that another node shows."""
    (means,) = (r.means for r in REASONS if r.prints == "[code: 2004]")
    assert "does not know this site's key" in means
    assert "a node with the same key is connected (a copy of this folder)" in means


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
    """A server's folder with two keys, and the answers that Flower's command gives."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "state").mkdir()
    for k in ("a", "b"):
        (tmp_path / "keys" / f"{k}.pub").write_text(f"key of {k}\n")
    answers = {"a": '{"success": true, "node-id": "11"}', "b": 'note\n{"success": true, "node-id": "12"}'}
    asked = []

    def flwr(words, env, check):
        k = words[2].rpartition("/")[2].removesuffix(".pub")
        asked.append(k)
        return answers[k]

    monkeypatch.setattr(commands, "flwr", flwr)
    return tmp_path, answers, asked


def test_each_key_is_registered_once(server):
    folder, _, asked = server
    register(folder, {})
    register(folder, {})
    assert sorted(asked) == ["a", "b"]
    assert {k: about["node"] for k, about in registered(folder).items()} == {"a": "11", "b": "12"}
    (folder / "keys" / "b.pub").write_text("another key of b\n")
    register(folder, {})
    assert sorted(asked) == ["a", "b", "b"]


def test_a_key_that_cannot_be_registered_is_named(server):
    folder, answers, _ = server
    answers["b"] = '{"success": false, "error-message": "no such curve"}'
    with pytest.raises(SoleraError, match=r"the key of b cannot be registered: .*no such curve"):
        register(folder, {})


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
