"""Tasks for the tests of the Ray engine, in a module that its workers can import."""

import dataclasses
import os
import signal
import time

import torch
from torch import Tensor

from solera.core.task import Client, task
from solera.core.tensors import Weights
from solera.core.wire import at_most, like


@dataclasses.dataclass(frozen=True)
class Numbers:
    t: Tensor = at_most(8, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Back:
    weights: Weights = like("weights")


@task("ray_tasks.who")
def who(client: Client, seconds: float) -> Numbers:
    """The process it runs in, and torch's threads there."""
    time.sleep(seconds)
    return Numbers(torch.tensor([os.getpid(), torch.get_num_threads()]))


@task("ray_tasks.die_if_second")
def die_if_second(client: Client) -> Numbers:
    if client.id == "c01":
        os.kill(os.getpid(), signal.SIGKILL)
    return Numbers(torch.tensor([int(client.id[1:])]))


@task("ray_tasks.nap_if_first")
def nap_if_first(client: Client, seconds: float) -> Numbers:
    time.sleep(seconds if client.id == "c00" else 0)
    client.state["done"] = {"x": torch.ones(1)}
    return Numbers(torch.ones(1, dtype=torch.int64))


@task("ray_tasks.count")
def count(client: Client) -> Numbers:
    """How often this client was asked: it keeps the number."""
    n = client.state.get("n", {"n": torch.zeros(1, dtype=torch.int64)})["n"] + 1
    client.state["n"] = {"n": n}
    return Numbers(n)


@task("ray_tasks.back")
def back(client: Client, weights: Weights) -> Back:
    return Back({name: w + 1 for name, w in weights.items()})
