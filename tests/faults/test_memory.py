"""Memory does not grow with the number of rounds."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import logging, os, pathlib, sys
from solera.method import find_method
from solera.testing import run_toy, small
from solera.runs.callbacks import Callback
import solera.testing as testing
from solera.runs.config import EngineConfig, RunConfig
from solera.core.federation import FederationConfig
from solera.runs.loop import simulate
logging.disable(logging.CRITICAL)

class Meter(Callback):
    def saved(self, record):
        pages = int(open("/proc/self/statm").read().split()[1])
        print(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), flush=True)

name, out, engine = sys.argv[1:]
method = small(find_method(name)())
import torch.nn as nn
big = lambda: nn.Sequential(nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 3))
simulate(testing.toy(models={"big": big}), method, pathlib.Path(out), RunConfig(rounds=50),
    FederationConfig(fraction=0.75), EngineConfig(name=engine, workers=2), callbacks=[Meter()])
"""


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("fedavg", "inprocess"),
        pytest.param("scaffold", "processes", marks=pytest.mark.rest),
        pytest.param("feddf", "threads", marks=pytest.mark.rest),
    ],
)
def test_memory_and_file_handles_are_flat_over_fifty_rounds(name, engine, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(tmp_path / "run"), engine],
        capture_output=True, text=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) == 50, done.stderr
    early, late = lines[9], lines[49]
    assert late[0] - early[0] < 40 * 2**19, f"{(late[0] - early[0]) / 2**20:.1f} MiB in 40 rounds"  # 0.5 MiB a round
    assert late[1] == early[1], "file handles grow"
