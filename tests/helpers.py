"""Small things several tests use."""

import os
import subprocess
import time

import torch
from torch import nn

from solera.core.task import Client, Data
from solera.engines import Roster


class Site:
    """Clients without any data set: n examples each, one linear model."""

    def __init__(self, sizes=(4, 3, 2, 1), architectures=("p", "q")):
        names = sorted(architectures)
        of = torch.arange(len(sizes)) % len(names)
        self.template = nn.Linear(2, 2)
        self.roster = Roster(torch.tensor(sizes), names, of)

    def client(self, k, seed, state, place=None):
        n = self.roster[k].num_examples
        data = Data(torch.zeros(n, 2), torch.zeros(n, dtype=torch.int64))
        return Client(k, self.roster[k].architecture, data, data, None, 2, seed, state, self.template)


def wait(true, seconds=30):
    """Until `true()` is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def ask_standby(folder, cwd, *words, **more):
    """The program in `folder` that hands over to the standby there."""
    more.setdefault("env", {**os.environ, "MINE": "yes"})
    return subprocess.Popen(
        [folder / "flwr-clientapp", *words], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, **more,
    )  # fmt: skip
