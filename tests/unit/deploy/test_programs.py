"""Programs that are kept running, their environment, and logs."""

import json
import logging
import os
import signal
import sys
import threading
import time

import pytest

from solera.core.errors import PORTABLE, ConfigError, SoleraError
from solera.deploy import programs
from solera.deploy.journal import Journal, lines_from, read_lines, write_line
from solera.deploy.programs import (
    Program,
    Reason,
    Supervisor,
    check_exposure,
    environment,
    is_loopback,
    reachable,
    split,
    wait_for_port,
)


def test_flowers_programs_see_no_telemetry_no_installation_and_a_home_of_their_own(tmp_path):
    env = environment(tmp_path)
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert env["FLWR_HOME"] == str(tmp_path / "state" / "flwr")
    first = env["PATH"].split(os.pathsep)[0]
    assert sorted(os.listdir(first)) == [
        "flwr-agentapp", "flwr-clientapp", "flwr-connector", "flwr-model", "flwr-serverapp", "flwr-simulation",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["server.toml", "site.toml"])
def test_programs_of_a_portable_deployment_have_its_environment(tmp_path, file, monkeypatch):
    for name in PORTABLE:
        monkeypatch.delenv(name, raising=False)
    assert not PORTABLE.items() <= environment(tmp_path).items()
    (tmp_path / file).write_text("[engine]\nportable = true\n")
    assert PORTABLE.items() <= environment(tmp_path).items()


def program(tmp_path, code, **options):
    return Program("it", [sys.executable, "-c", code], dict(os.environ), tmp_path / "it.log", **options)


def watched(p, until=lambda said: False):
    """Watch a program, as from the main thread, until it has said enough or a minute has passed."""
    supervisor, over = Supervisor(), threading.Event()

    def look():
        end = time.monotonic() + 60
        while not (p.log.exists() and until(p.log.read_text())) and time.monotonic() < end:
            if over.wait(0.02):
                return
        supervisor._stop(15, None)

    with supervisor:
        thread = threading.Thread(target=look)
        thread.start()
        try:
            supervisor.start(p)
            supervisor.watch()
        finally:
            over.set()
            thread.join()


@pytest.fixture(autouse=True)
def signals():
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_program_that_ends_is_started_again_and_all_end_together(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "PAUSES_S", (0.0,))
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(0.3 if not os.path.exists('mark') else 60)"
    p = program(tmp_path, code)
    watched(p, lambda said: said.count("\n") >= 2)
    pids = [int(line) for line in (tmp_path / "it.log").read_text().split()]
    assert len(pids) >= 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_starting_again_cannot_mend_ends_it_with_the_reason(tmp_path):
    refused = Reason("no such key", "the key is refused", final=True)
    p = program(tmp_path, "print('no such key'); raise SystemExit(1)", reasons=[refused])
    with pytest.raises(SoleraError, match=r"it ended: the key is refused"):
        watched(p)


def test_what_time_can_mend_is_named_and_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(programs, "PAUSES_S", (0.0,))
    p = program(tmp_path, "print('expired'); raise SystemExit(1)", reasons=[Reason("expired", "it has expired")])
    watched(p, lambda said: said.count("expired") >= 2)
    assert "it ended: it has expired; it starts again in 0 s" in caplog.text
    assert (tmp_path / "it.log").read_text().count("expired") >= 2


def test_the_reason_is_not_one_of_an_earlier_start(tmp_path):
    (tmp_path / "it.log").write_text("no such key\n")
    p = program(tmp_path, "print('other')", reasons=[Reason("no such key", "the key is refused", final=True)])
    p.start()
    p.process.wait()
    assert p.reason() is None
    assert p.tail() == "other"


def test_a_program_that_never_listens_is_named(tmp_path):
    p = program(tmp_path, "raise SystemExit('address in use')")
    p.start()
    with pytest.raises(SoleraError, match=r"it ended at once, with code 1: address in use"):
        wait_for_port("127.0.0.1:9", p)


@pytest.mark.parametrize("address", ["", "8000", "host:", ":80", "host:0", "host:99999", "host:8o"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split(address)


def test_addresses():
    assert split("[::1]:80") == ("::1", 80)
    assert reachable("0.0.0.0:80") == "127.0.0.1:80"
    assert reachable("10.1.2.3:80") == "10.1.2.3:80"
    assert all(is_loopback(f"{h}:1") for h in ("127.0.0.1", "127.9.9.9", "localhost", "[::1]"))
    assert not any(is_loopback(f"{h}:1") for h in ("0.0.0.0", "10.0.0.1", "[::]", "127.example.org", "fl.example.org"))


def test_an_address_that_others_reach_needs_a_word_on_what_keeps_them_away(caplog):
    for address in ("10.0.0.5:8000", "0.0.0.0:8000", "fl.example.org:8000"):
        with pytest.raises(ConfigError, match=r"no login.*--behind-firewall") as e:
            check_exposure(address)
        assert address in str(e.value)
        assert "\n" not in str(e.value)
        check_exposure(address, behind_firewall=True)
        check_exposure(address, proxy="fl.example.org:443")
        assert f"{address} can be reached from other machines" in caplog.text
        assert "only the proxy fl.example.org:443 can" in caplog.text
    caplog.clear()
    check_exposure("127.0.0.1:8000")
    assert not caplog.text


def test_a_log_has_one_json_object_a_line_with_the_time(tmp_path):
    log, handler = logging.getLogger("solera.test"), Journal(tmp_path / "log" / "a.jsonl", site="hospital-a")
    log.addHandler(handler)
    try:
        log.warning("one\ntwo %s", "{")
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("it failed")
    finally:
        log.removeHandler(handler)
    first, second = [json.loads(line) for line in (tmp_path / "log" / "a.jsonl").read_text().splitlines()]
    assert (first["says"], first["level"], first["site"]) == ("one\ntwo {", "warning", "hospital-a")
    assert time.strptime(first["time"][:19], "%Y-%m-%dT%H:%M:%S")
    assert first["time"].endswith("Z")
    assert second["error"] == "ValueError: why"
    assert (tmp_path / "log" / "a.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_torn_line_is_left_out(tmp_path):
    write_line(tmp_path / "a", {"n": 1})
    with (tmp_path / "a").open("a") as f:
        f.write('{"n": 2\n[3]\n')
    assert [line["n"] for line in read_lines(tmp_path / "a", 10)] == [1]
    assert read_lines(tmp_path / "nothing", 10) == []


def test_a_log_is_followed_from_a_place_on_and_whole_lines_only(tmp_path):
    write_line(tmp_path / "a", {"n": 1})
    lines, place = lines_from(tmp_path / "a", 0)
    assert [line["n"] for line in lines] == [1]
    with (tmp_path / "a").open("a") as f:
        f.write('{"n": 2')
    assert lines_from(tmp_path / "a", place) == ([], place)
    with (tmp_path / "a").open("a") as f:
        f.write("}\n")
    assert [line["n"] for line in lines_from(tmp_path / "a", place)[0]] == [2]
    assert lines_from(tmp_path / "nothing", 7) == ([], 7)
