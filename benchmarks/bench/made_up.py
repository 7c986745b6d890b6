"""Data that needs no download: noise over coarse patterns, one for each class, that any model can learn."""

import torch
from torch import Tensor

from solera.data import Dataset, Partition, from_tensors

CLASSES = 10
PATCH = 4  # pixels a side that a pattern keeps constant: what pooling and strides leave visible
LIGHT, NOISE = 128, 128  # brightest values of the pattern and of the noise above it


def images(count: int, shape: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """uint8 [count, C, H, W] and labels in a random order."""
    g = torch.Generator().manual_seed(seed)
    channels, height, width = shape
    pattern = torch.Generator().manual_seed(1)  # the same for training and test
    coarse = torch.randint(0, LIGHT, (CLASSES, channels, -(-height // PATCH), -(-width // PATCH)), generator=pattern)
    fine = coarse.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)[:, :, :height, :width].to(torch.uint8)
    labels = torch.randint(0, CLASSES, (count,), generator=g)
    inputs = torch.randint(0, NOISE, (count, *shape), generator=g, dtype=torch.uint8)
    return inputs.add_(fine[labels]), labels


def image_set(train: int, test: int, shape: tuple[int, int, int]) -> Dataset:
    """Training and test images of one shape."""
    return from_tensors(images(train, shape), images(test, shape, seed=1), CLASSES, name="made-up")


def vectors(count: int, features: int = 8) -> Dataset:
    """Points around ten centres: as little data as a sample can be."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, features, generator=g)
    labels = torch.arange(count) % CLASSES
    inputs = torch.randn(count, features, generator=g).mul_(0.5).add_(centres[labels])
    return from_tensors((inputs, labels), (inputs[:1000], labels[:1000]), CLASSES, name="made-up")


def equal_parts(samples: int, clients: int) -> Partition:
    """Client k holds the k-th run of samples."""
    cuts = torch.arange(clients + 1) * (samples // clients)
    return Partition(torch.arange(int(cuts[-1])), cuts)
