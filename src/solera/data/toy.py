"""Two-dimensional points in three classes, to plot what models learn (as in FedDF's Figure 1)."""

import math

import torch

from .readers import Split

BEGIN, END = 0.1, 1.0  # of an arm, as distance from the centre
TURN = 4.0  # how far an arm turns, in radians
SPREAD = 0.07  # the width of an arm
SIZE = 2.4  # scale: almost all points are between -3 and 3


def toy_2d(rows: tuple[int, int], classes: int) -> dict[str, Split]:
    """Training and test points: spiral arms from the centre, one for each class. Always the same points."""
    return {split: _arms(n, classes, seed) for seed, (split, n) in enumerate(zip(("train", "test"), rows, strict=True))}


def _arms(n: int, classes: int, seed: int) -> Split:
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    along = torch.rand(n, generator=g)
    angle = 2 * math.pi * labels / classes + TURN * along
    centre = torch.stack([angle.cos(), angle.sin()], 1) * (BEGIN + (END - BEGIN) * along)[:, None]
    points = SIZE * (centre + SPREAD * torch.randn(n, 2, generator=g))
    return Split(labels.numpy(), lambda rows: points[torch.from_numpy(rows)])
