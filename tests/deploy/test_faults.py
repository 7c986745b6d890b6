"""What goes wrong on a real network, and what becomes of the run: a SuperLink and three SuperNodes with TLS and
authentication, in processes of their own. SCAFFOLD, whose clients keep state: what was lost would show in the digest.

`make deploy-faults`; a quarter of an hour, most of which is Flower's time until it notices that somebody has gone.
SOLERA_FAULTS names a file that the outcomes are written to.
"""

import json
import os
import pathlib
import signal
import time

import pytest

from deployments import MOODY, Deployment, config_of, solera, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCAFFOLD = 'name = "scaffold"\n[method.local]\nepochs = 1\nbatch = 16\nlr = 0.05'
PLAIN = config_of(SCAFFOLD, rounds=2)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("faults"), PLAIN, MOODY) as d:
        d.start_server()
        d.start_sites()
        d.expected = d.simulated()
        yield d


@pytest.fixture(scope="module")
def outcomes():
    rows = []
    yield rows
    if (file := os.environ.get("SOLERA_FAULTS")) and rows:
        pathlib.Path(file).write_text(json.dumps({"command": "make deploy-faults", "faults": rows}, indent=1) + "\n")


@pytest.fixture
def report(network, outcomes, request):
    """Note what became of a run: rounds lost, its digest, who failed and why, and how long the rounds took."""

    def note(name, digest, since=None):
        row = {
            "fault": request.node.name.removeprefix("test_").replace("_", " "),
            "rounds_lost": 2 - network.rounds(name),
            "digest_equal": digest == network.expected,
            "failures": [f"{f['client']}: {f['reason']}" for f in network.failures(name)],
            "seconds_of_rounds": [round(s, 1) for s in network.seconds(name)],
        }
        if since is not None:
            row["seconds_from_the_fault_to_the_end"] = round(since, 1)
        outcomes.append(row)
        return row

    return note


def with_settings(engine="", federation=""):
    config = config_of(SCAFFOLD, rounds=2, federation=federation)
    for line in engine.splitlines():
        key = line.partition(" =")[0]
        kept = [had for had in config.splitlines() if not had.startswith(f"{key} =")]
        config = "\n".join(kept).replace("[engine]", f"[engine]\n{line}")
    return config


def running(network, name, config="server.toml"):
    """Submit a run and come back when it has begun."""
    network.submit(name, config)


def test_a_task_raises(network, report):
    network.mood("north", "raise")
    digest = network.finish("raises")
    row = report("raises", digest)
    assert row["failures"] == [
        "north: RuntimeError: the scanner is broken (own.py:" + row["failures"][0].rpartition(":")[2]
    ]
    assert row["rounds_lost"] == 0


def test_a_tasks_process_dies(network, report):
    network.mood("north", "die")
    digest = network.finish("dies")
    row = report("dies", digest)
    assert len(row["failures"]) == 1
    assert row["failures"][0].startswith("north: its process died")
    assert row["rounds_lost"] == 0


def test_a_task_is_too_slow(network, report):
    """It is interrupted at its deadline, and says so itself."""
    network.reconfigure("slow", with_settings(federation="deadline_s = 8"))
    network.mood("north", "sleep")
    digest = network.finish("slow", "slow.toml")
    row = report("slow", digest)
    assert row["failures"] == [row["failures"][0]]
    assert row["failures"][0].startswith("north: TimeoutError: no reply within the deadline of 8 s")
    assert row["rounds_lost"] == 0


def test_a_task_never_answers(network, report):
    """It does not react to its deadline. Flower's time runs out, and the site is left alone until it is free again."""
    network.reconfigure("hangs", with_settings("grace_s = 20", "deadline_s = 8"))
    network.mood("north", "hang")
    digest = network.finish("hangs", "hangs.toml")
    row = report("hangs", digest)
    assert row["failures"][0] in (
        "north: no reply within the deadline of 8 s",
        "north: its process died: ",
    ) or row["failures"][0].startswith("north: its process died")
    assert row["rounds_lost"] == 0


def test_a_site_is_started_again_with_the_same_key(network, report):
    begun = network.mood("north", "sleep")
    network.submit("again")
    until(begun, 240)
    network.stop("north")
    left = time.monotonic()
    network.start_sites("north")
    digest = network.wait_for_end("again")
    row = report("again", digest, time.monotonic() - left)
    assert row["failures"] == []
    assert row["digest_equal"]


def test_a_node_is_killed(network, report):
    begun = network.mood("north", "sleep")
    network.submit("killed")
    until(begun, 240)
    os.killpg(network.pid_of("north", "supernode"), signal.SIGKILL)  # what looks after it starts another one
    left = time.monotonic()
    digest = network.wait_for_end("killed")
    row = report("killed", digest, time.monotonic() - left)
    assert row["failures"] == []
    assert row["digest_equal"]


def test_a_site_joins_late(network, report):
    network.stop("west")
    before = len(network.log("server"))
    network.submit("late")
    until(lambda: "west is not connected: waiting for it" in network.said("server", before), 240)
    network.start_sites("west")
    left = time.monotonic()
    digest = network.wait_for_end("late")
    row = report("late", digest, time.monotonic() - left)
    assert row["digest_equal"]


@pytest.mark.parametrize("absent", ["wait", "skip"])
def test_a_site_leaves_for_good(network, report, absent):
    name = f"gone-{absent}"
    network.reconfigure(name, with_settings(f'wait_s = 30\nabsent = "{absent}"'))
    begun = network.mood("west", "sleep")
    try:
        network.submit(name, f"{name}.toml")
        until(begun, 240)
        network.stop("west")
        left = time.monotonic()
        digest = network.wait_for_end(name)
        row = report(name, digest, time.monotonic() - left)
    finally:
        network.start_sites("west")
    assert row["rounds_lost"] == 0
    assert {f.partition(":")[0] for f in row["failures"]} == {"west"}
    said = {"wait": "is not connected, 30 s long (engine.wait_s)", "skip": "is not connected; skipped"}[absent]
    assert said in row["failures"][-1]


def test_the_superlink_is_killed(network, report):
    begun = network.mood("east", "sleep")
    network.reconfigure("link", with_settings(federation="deadline_s = 60"))
    network.submit("link", "link.toml")
    until(begun, 240)
    os.killpg(network.pid_of("server", "superlink"), signal.SIGKILL)
    left = time.monotonic()
    digest = network.wait_for_end("link")
    row = report("link", digest, time.monotonic() - left)
    assert row["rounds_lost"] == 0
    assert all(f.startswith("east: ") for f in row["failures"]), "the task that sleeps; nobody else is lost"


def test_the_superlink_is_killed_between_two_tasks(network, report):
    before = len(network.log("server"))
    network.submit("link2")
    until(lambda: "sites have answered" in network.said("server", before), 300)
    os.killpg(network.pid_of("server", "superlink"), signal.SIGKILL)
    left = time.monotonic()
    digest = network.wait_for_end("link2")
    row = report("link2", digest, time.monotonic() - left)
    assert row["digest_equal"]


def test_the_servers_program_is_killed_and_the_run_resumed(network, report):
    network.submit("resumed")
    until(lambda: network.rounds("resumed") >= 1, 300)
    os.kill(
        next(line["pid"] for line in reversed(network.log("server")) if line.get("run") == "resumed"), signal.SIGKILL
    )
    left = time.monotonic()
    digest = network.finish("resumed")
    row = report("resumed", digest, time.monotonic() - left)
    assert row["digest_equal"]


def test_the_whole_server_is_killed_and_the_run_resumed(network, report):
    network.submit("restarted")
    until(lambda: network.rounds("restarted") >= 1, 300)
    network.stop("server", signal.SIGKILL)
    left = time.monotonic()
    network.start_server()
    digest = network.finish("restarted")
    row = report("restarted", digest, time.monotonic() - left)
    assert row["digest_equal"]
    assert "west" in solera("deploy", "status", network.server)
