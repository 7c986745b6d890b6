"""The process that is kept ready at a site: a copy of it is, in every respect, the program that Flower meant."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from helpers import ask_standby as start
from helpers import wait
from solera.deploy.gate import write_programs
from solera.deploy.handover import SOCKET

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
PROGRAM = """
import os, sys, time, pathlib
from solera.deploy import standby

def program(name):
    print(name, sys.argv[1:], os.getcwd(), os.environ["MINE"], sys.stdin.read(), flush=True)
    what = sys.argv[1]
    if what == "sleep":
        pathlib.Path("pid").write_text(str(os.getpid()))
        time.sleep(60)
    if what == "raise":
        raise ValueError("why")
    if what == "say":
        sys.exit("no such key")
    if what == "die":
        os.kill(os.getpid(), 9)
    sys.exit(int(what))

standby.behind_the_gate = program
standby.Standby(pathlib.Path(sys.argv[1])).serve_forever()
"""


@pytest.fixture
def ready(tmp_path):
    folder = tmp_path / ("deep" * 20) / "bin"  # longer than the path of a socket may be
    write_programs(folder, standby=True)
    p = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)])
    try:
        wait(lambda: listens(folder))
        yield folder, p
    finally:
        p.kill()
        p.wait()


def listens(folder):
    with contextlib.chdir(folder), contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as s:
        return s.connect(SOCKET) is None


def test_a_copy_has_the_arguments_folder_environment_and_streams_of_the_program(ready, tmp_path):
    folder, _ = ready
    p = start(folder, tmp_path, "7", "--token", "x")
    out, _ = p.communicate("the token")
    assert out == f"flwr-clientapp ['7', '--token', 'x'] {tmp_path} yes the token\n"
    assert p.returncode == 7


@pytest.mark.parametrize(
    ("what", "code", "said"), [("0", 0, ""), ("raise", 1, "ValueError: why"), ("say", 1, "no such key"), ("die", 1, "")]
)
def test_it_ends_as_the_program_would_and_the_next_one_is_served(ready, tmp_path, what, code, said):
    folder, _ = ready
    for _ in range(2):
        p = start(folder, tmp_path, what)
        out, _ = p.communicate("")
        assert p.returncode == code
        assert said in out


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("who", ["program", "standby"])
def test_a_copy_does_not_outlive_who_asked_for_it_nor_the_standby(ready, tmp_path, who):
    folder, standby = ready
    p = start(folder, tmp_path, "sleep")
    p.stdin.close()
    wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    (p if who == "program" else standby).send_signal(signal.SIGKILL)
    wait(lambda: gone(pid))
    p.stdout.close()
    assert p.wait(10) == (-9 if who == "program" else 1)


def test_nonsense_is_refused_and_the_next_one_is_served(ready, tmp_path, monkeypatch):
    folder, _ = ready
    monkeypatch.chdir(folder)
    for content in (b"", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[", b"\x00\x00\x00\x01x"):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(SOCKET)
            s.sendall(content)
            s.shutdown(socket.SHUT_WR)
            assert s.recv(1) == b""
    p = start(folder, tmp_path, "3")
    p.communicate("")
    assert p.returncode == 3


def test_nobody_else_can_ask(ready):
    folder, _ = ready
    assert (folder / SOCKET).stat().st_mode & 0o077 == 0
