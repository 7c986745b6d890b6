"""The lock of a run directory: what may look, what may enter, and who keeps it."""

import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from solera.core.errors import RunError
from solera.report.loading import in_use, read_all
from solera.runs.directory import RunDirectory

ENTER = """
import sys
from solera.runs.directory import RunDirectory
from solera.core.errors import RunError
try:
    RunDirectory(sys.argv[1], "0", resume=True)
except RunError as e:
    sys.exit(str(e))
"""


def enter_from_another_process(path):
    return subprocess.run([sys.executable, "-c", ENTER, str(path)], capture_output=True, text=True)


def test_reading_a_run_from_the_process_that_makes_it_keeps_the_lock(tmp_path):
    home = RunDirectory(tmp_path / "run", "0", experiment={"run.seed": 0})
    for _ in range(2):  # whoever closed a handle of the file used to take the lock along
        assert in_use(home.path)
        assert [record.status for record in read_all([home.path])] == ["running"]
    refused = enter_from_another_process(home.path)
    assert refused.returncode == 1
    assert f"in use by another run (process {os.getpid()})" in refused.stderr
    home.close()
    assert not in_use(home.path)
    assert [record.status for record in read_all([home.path])] == ["stopped"]
    assert enter_from_another_process(home.path).returncode == 0


def test_a_second_run_of_the_same_process_is_refused_and_the_first_keeps_its_lock(tmp_path):
    home = RunDirectory(tmp_path / "run", "0")
    with pytest.raises(RunError, match=r"in use by another run \(process \d+, this one\)"):
        RunDirectory(tmp_path / "run", "0", resume=True)
    assert in_use(home.path)
    home.close()


def test_a_child_that_outlives_the_run_does_not_keep_the_directory(tmp_path):
    """A forked child shares the handle; after `kill -9` of the parent its lock would stay."""
    code = (
        "import os, signal, sys, time\n"
        "from solera.runs.directory import RunDirectory\n"
        "home = RunDirectory(sys.argv[1], '0')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as run:
        child = int(run.stdout.readline())
        run.wait()
        try:
            end = time.monotonic() + 60
            while in_use(tmp_path / "run") and time.monotonic() < end:  # the child may not have got as far
                time.sleep(0.01)
            assert not in_use(tmp_path / "run")
        finally:
            os.kill(child, 9)


def test_whoever_looks_for_a_moment_does_not_keep_a_run_out(tmp_path):

    RunDirectory(tmp_path / "run", "0").close()
    looking = os.open(tmp_path / "run" / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [looking]).start()
    RunDirectory(tmp_path / "run", "0", resume=True).close()
