"""The model of one of the three hospitals: its own PyTorch code, which never travels."""

from torch import nn


def slim() -> nn.Module:
    """A small network of 28x28 grey images in ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip
