"""What Solera is compared with where there is no other program: code of a few lines that does the same work."""

import copy
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from solera.train.losses import Sgd

from .machine import Crew, Job

Client = tuple[Tensor, Tensor]  # prepared inputs and labels
TRIAL_STEPS = 10


def fedavg_round(model: nn.Module, clients: Sequence[Client], batch: int, lr: float) -> int:
    """Federated averaging as one writes it first: one client after another, a DataLoader, torch's optimizer.

    The model is replaced by the mean of what the clients make of it; the number of steps is returned.
    """
    steps, total = 0, sum(len(labels) for _, labels in clients)
    mean: dict[str, Tensor] = {}
    for inputs, labels in clients:
        local = copy.deepcopy(model)
        local.train()
        optimizer = torch.optim.SGD(local.parameters(), lr)
        for x, y in DataLoader(TensorDataset(inputs, labels), batch, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()
            optimizer.step()
            steps += 1
        for name, t in local.state_dict().items():
            part = t * (len(labels) / total)
            mean[name] = mean[name] + part if name in mean else part
    model.load_state_dict(mean)
    return steps


def bare_steps(model: nn.Module, clients: Sequence[Client], batch: int, lr: float, workers: int) -> Crew:
    """Nothing but forward, backward and update, for the minibatches of all clients, spread over processes.

    No data is gathered, no model copied, sent, checked or averaged. Each process tries both memory layouts first and
    keeps the faster one.
    """

    def maker(share: Sequence[Client]) -> Callable[[], Job]:
        def make() -> Job:
            ready = [list(zip(x.split(batch), y.split(batch), strict=True)) for x, y in share]
            jobs = [_job(copy.deepcopy(model), ready, lr, layout) for layout in _layouts(model)]
            trials = []
            for job in jobs:
                job(TRIAL_STEPS)
                began = time.perf_counter()
                job(TRIAL_STEPS)
                trials.append(time.perf_counter() - began)
            best = jobs[trials.index(min(trials))]
            return lambda: best(None)

        return make

    return Crew([maker(clients[i::workers]) for i in range(workers)])


def _layouts(model: nn.Module) -> list[torch.memory_format]:
    images = any(isinstance(m, nn.Conv2d) for m in model.modules())
    return [torch.contiguous_format, torch.channels_last] if images else [torch.contiguous_format]


def _job(
    model: nn.Module, clients: list[list[Client]], lr: float, layout: torch.memory_format
) -> Callable[[int | None], None]:
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    model.train()
    laid_out = [[(x.to(memory_format=layout), y) for x, y in batches] for batches in clients]
    parameters = [p for p in model.parameters() if p.requires_grad]

    def job(limit: int | None) -> None:
        done = 0
        for batches in laid_out:
            optimizer = Sgd(parameters, lr)
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if done == limit:
                    return

    return job
