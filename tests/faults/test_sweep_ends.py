"""A sweep that is stopped or killed takes its runs with it, also in the middle of a long distillation."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w

LONG = {
    "run": {"rounds": 1},
    "data": {"name": "fashion-mnist", "train_size": 200, "test_size": 50},
    "partition": {"clients": 4, "alpha": 100.0},
    "public": {"source": "held-out", "size": 40},
    "models": {"clients": ["mlp", "lenet5"]},
    "method": {"name": "feddf", "local": {"epochs": 1}, "fusion": {"steps": 100_000, "batch": 32}},
    "engine": {"name": "processes", "workers": 2},  # two students side by side, in threads of the server
    "sweep": {"seeds": [0, 1]},
}
NOW_S = 4.0  # "within about two seconds", on a machine that has other things to do


def wait_for(there: Callable[[], object], most_s: float = 120.0) -> None:
    end = time.monotonic() + most_s
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process is there and no corpse that nobody has collected yet."""
    with contextlib.suppress(OSError):
        return stat(pid)[0] not in "ZX"
    return False


def stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def seconds_of(pid: int) -> float:
    """How long a process itself has computed. What comes before the distillation takes a run less than two."""
    with contextlib.suppress(OSError):
        return int(stat(pid)[11]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(stat(int(entry.name))[1]) == pid:
                found.append(int(entry.name))
    return found


def below(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    return {child for own in children_of(pid) for child in (own, *below(own))}


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def distilling(request, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A sweep whose runs are in a distillation of minutes."""
    file = tmp_path / "s.toml"
    file.write_text(tomli_w.dumps(LONG))
    command = [sys.executable, "-m", "solera.cli.main", "sweep", str(file), "--out", str(tmp_path / "out")]
    sweep = subprocess.Popen(
        [*command, "--workers", str(request.param)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for seed in range(request.param):
            wait_for(lambda seed=seed: (tmp_path / f"out/feddf/s{seed}/partition.json").is_file())
        wait_for(lambda: sum(seconds_of(run) >= 2 for run in children_of(sweep.pid)) >= request.param)
        yield sweep
    finally:
        for pid in [*below(sweep.pid), sweep.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        sweep.communicate()


def test_sigterm_ends_it_at_once(distilling):
    family = below(distilling.pid)
    assert family
    began = time.monotonic()
    distilling.send_signal(signal.SIGTERM)
    _, said = distilling.communicate(timeout=60)
    assert time.monotonic() - began < NOW_S
    assert distilling.returncode == 143
    assert "stopped by SIGTERM; the same command continues the sweep" in said
    wait_for(lambda: not any(map(alive, family)), NOW_S)


def test_kill_nine_takes_its_runs_with_it(distilling):
    family = below(distilling.pid)
    assert family
    distilling.kill()
    wait_for(lambda: not any(map(alive, family)), NOW_S)
