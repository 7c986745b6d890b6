"""Six clients in two camps that contradict each other: no single model can suit both, personal ones can."""

import pathlib
from typing import Any

from solera.core.task import Data
from solera.core.tensors import Weights
from solera.train.fitting import evaluate
from toys import World, images, mlp

CAMPS = (["c0", "c2", "c4"], ["c1", "c3", "c5"])


def labelled(camp: int, n: int, seed: int) -> Data:
    """Images of four classes; the second camp calls every class by the name of the next."""
    x, y = images(n, seed=seed)
    return Data(x, (y + camp) % 4)


def camps(tmp: pathlib.Path, samples: int = 40, **options: Any) -> World:
    parties = [("m", labelled(i % 2, samples, seed=i)) for i in range(6)]
    return World(tmp, {"m": lambda: mlp(1)}, parties, **options)


def accuracy(world: World, k: str, weights: Weights) -> float:
    """Of a model, on new samples of client k's camp."""
    new = labelled(int(k[1]) % 2, 200, seed=99)
    return evaluate(world.server.model("m", weights), new.inputs, new.labels).accuracy


def numbers(weights: Weights) -> tuple[int, int]:
    """How many floats and integers a model is."""
    floats = sum(t.numel() for t in weights.values() if t.is_floating_point())
    return floats, sum(t.numel() for t in weights.values()) - floats
