"""A tiny federation whose clients hold the public samples too, for methods that exchange predictions."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch

from solera.core.calls import Call, Reply
from solera.core.task import Data
from solera.core.wire import Packed
from solera.train.fitting import evaluate
from toys import Conv, Samples, World, images, kept_by, mlp

SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
CLIENTS = [f"c{i}" for i in range(5)]
PUBLIC = 40


class Known(Samples):
    """Public samples that can be compared by their digest, with labels or without."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor | None = None):
        super().__init__(inputs)
        self.labels = labels

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inputs.numpy().tobytes()).hexdigest()


class Exchange(World):
    """A world of such clients; `held[k]` is what a client holds where it differs from the server's set."""

    def __init__(self, *args, public: Known, **options):
        super().__init__(*args, public=public.inputs, **options)
        self.server.public = public
        self.held: dict[str, Known | None] = {}

    def client(self, k, seed, state, place=None):
        client = super().client(k, seed, state)
        client.public = self.held.get(k, self.server.public)
        return client

    def kept(self, k: str) -> dict[str, dict[str, torch.Tensor]]:
        """All that client k keeps now."""
        return kept_by(self.fed, k)

    def model(self, k: str) -> dict[str, torch.Tensor]:
        """The weights client k holds now."""
        return self.kept(k)["model"]


def mixed(tmp, sizes=SIZES, labelled=False, **options) -> Exchange:
    """Five clients of different sizes, two architectures (one with BatchNorm), 40 public samples of four classes."""
    builders = {"c": lambda: Conv(0), "m": lambda: mlp(1)}
    parties = [(P, Data(*images(n, n))) for n, P in zip(sizes, KINDS, strict=True)]
    x, y = images(PUBLIC, seed=9)
    return Exchange(tmp, builders, parties, public=Known(x, y if labelled else None), **options)


def halves(tmp, **options) -> Exchange:
    """Four clients, of which two know classes 0 and 1 and two the others, and 100 public samples of all classes."""
    x, y = images(400, seed=1)
    known = [(y // 2) == half for half in (0, 1)]
    parties = [("m", Data(x[own][i::2], y[own][i::2])) for own in known for i in (0, 1)]
    public = Known(images(100, seed=3)[0])
    return Exchange(tmp, {"m": lambda: mlp(1)}, parties, public=public, **options)


def accuracies(world: Exchange) -> list[float]:
    """How each client's own model does on samples of all classes."""
    x, y = images(300, seed=8)
    models = [world.server.model(world.fed.architecture(k), world.model(k)) for k in world.fed.clients]
    return [evaluate(model, x, y).accuracy for model in models]


def spoil(world: Exchange, client: str, task: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have one client lie from now on: `change` is applied to the tensor of its reply to `task`."""
    engine = world.fed.engine
    original = engine.start

    def start(calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        collect, told = original(calls), {c.client: c.task for c in calls}

        def replies() -> Iterator[Reply]:
            for r in collect():
                if r.client == client and told[client].endswith(task) and r.error is None:
                    (name,) = r.message.tree
                    r = dataclasses.replace(r, message=Packed({name: change(r.message.tensors[0])}))
                yield r

        return replies

    engine.start = start


def watch(world: Exchange, task: str) -> list[tuple[str, list[torch.Tensor]]]:
    """What is sent to whom with `task`, from now on."""
    told: list[tuple[str, list[torch.Tensor]]] = []
    engine = world.fed.engine
    original = engine.start

    def start(calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        told.extend((c.client, c.message.tensors) for c in calls if c.task.endswith(task))
        return original(calls)

    engine.start = start
    return told
