"""The work that the benchmark gives to other frameworks: the data, the model and the training loop, in plain torch.

A program here is started as `python with_NAME.py FOLDER`, by `make bench`. The folder holds the settings,
the samples (client k has the k-th run of them), the weights to start from and `pace.py`, the conversation with the
benchmark. Every program trains the same model on the same samples for the same number of steps; what differs is the
framework around it.
"""

import functools
import json
import pathlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODELS = {
    "mcmahan-cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    ),
    "lenet5": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    ),
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    ),
}


class Work:
    """What is in the folder."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder)
        settings: dict[str, Any] = json.loads((self.folder / "settings.json").read_text())
        self.name, self.clients, self.samples = settings["model"], settings["clients"], settings["samples"]
        self.cohort, self.batch, self.lr = settings["cohort"], settings["batch"], settings["lr"]
        self.rounds, self.workers, self.threads = settings["rounds"], settings["workers"], settings["threads"]
        self.mean, self.std = settings["mean"], settings["std"]
        self.device = settings["device"]  # of training; the frameworks that are given another than "cpu" know it
        self._inputs = np.load(self.folder / "inputs.npy", mmap_mode="r")
        self._labels = np.load(self.folder / "labels.npy", mmap_mode="r")

    def model(self) -> nn.Module:
        """The model as every framework starts with it."""
        model = MODELS[self.name]()
        start = np.load(self.folder / "start.npz")
        with torch.no_grad():
            for parameter, name in zip(model.parameters(), start.files, strict=True):
                if tuple(parameter.shape) != start[name].shape:
                    raise SystemExit(f"{self.name}: {name} is {start[name].shape} there, {tuple(parameter.shape)} here")
                parameter.copy_(torch.from_numpy(start[name]))
        return model

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """The samples of client k, ready for the model."""
        mine = slice(k * self.samples, (k + 1) * self.samples)
        return self._prepared(self._inputs[mine]), torch.from_numpy(np.array(self._labels[mine]))

    def accuracy(self, model: nn.Module) -> float:
        """On the test samples."""
        inputs = self._prepared(np.load(self.folder / "test_inputs.npy"))
        labels = torch.from_numpy(np.load(self.folder / "test_labels.npy"))
        model.eval()
        with torch.no_grad():
            return (model(inputs).argmax(-1) == labels).double().mean().item()

    def train(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> int:
        """One epoch of local training, for frameworks that leave it to their user; the number of steps."""
        model.to(self.device)
        inputs, labels = inputs.to(self.device), labels.to(self.device)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), self.lr)
        order, steps = torch.randperm(len(labels)).to(self.device), 0
        for x, y in zip(inputs[order].split(self.batch), labels[order].split(self.batch), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
        model.cpu()
        return steps

    def _prepared(self, stored: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(stored)).float().div_(255).sub_(self.mean).div_(self.std)


@functools.cache
def work_of(folder: str) -> Work:
    """The same, read once in each process."""
    return Work(folder)
