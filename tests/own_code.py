"""A file of somebody's own, which leaves a trace when it is imported: a method, models, a data set and an engine."""

from pathlib import Path
from typing import Any

import tomli_w

SOURCE = '''
import pathlib

import torch
from torch import nn

import solera
from solera.engines import InProcess
from solera.methods import FedAvg
from solera.core.settings import settings

with open(pathlib.Path(__file__).with_name("imported"), "a") as trace:
    trace.write("x")


@settings
class Mine(FedAvg):
    extra: int = 1


def make_small(classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))


class Wide(nn.Module):
    def __init__(self, classes, shape, width=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.net(x)


def points():
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(5))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return solera.from_tensors((x[:180], y[:180]), (x[180:], y[180:]), classes=3)


@settings
class Counting:
    """One client after another."""

    workers: int = 1
    threads: int = 1
    greeting: str = ""

    def open(self, host, states):
        return InProcess(host, states, self.workers)


NOTHING = 3
'''
TABLES: dict[str, Any] = {
    "run": {"rounds": 2},
    "data": {"name": "own.py:points"},
    "partition": {"kind": "iid", "clients": 4},
    "public": {"source": "none"},
    "models": {"clients": ["own.py:make_small", "own.py:Wide"]},
    "method": {"name": "own.py:Mine", "extra": 3, "local": {"epochs": 1}},
    "engine": {"name": "own.py:Counting", "greeting": "hello"},
}


def write_own(folder: Path) -> Path:
    """own.py and own.toml in a folder; the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(SOURCE)
    (folder / "own.toml").write_text(tomli_w.dumps(TABLES))
    return folder / "own.toml"


def imports(folder: Path) -> int:
    """How often own.py in this folder was imported."""
    trace = folder / "imported"
    return len(trace.read_text()) if trace.exists() else 0
