"""Federations that differ in who takes part, for any method: the same clients drawn twice, absent, empty, reordered.

A client trains on all its samples at once, without dropout, so what it learns does not depend on its name, its place or
its seed. Two federations that mean the same thing then end in the same models but for rounding.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from public_toys import Exchange, Known
from solera.core.task import Data
from solera.method import Method, find_method
from solera.methods.framework.ensemble_trainers import Clients
from solera.methods.framework.global_trainers import Basic
from solera.methods.framework.local_trainers import ScaffoldTrainer
from solera.methods.steps.screen import Screen
from solera.testing import toys
from toys import kept_by

KINDS, SIZES = "wddww", (5, 8, 6, 9, 7)
CENTRES = torch.tensor([[2.0, 0, 0, 0, 0, 0, 0, 0], [0, 2.0, 0, 0, 0, 0, 0, 0], [0, 0, 2.0, 0, 0, 0, 0, 0]])

# Of a generator: a bias before BatchNorm has no gradient but rounding errors, of which Adam makes full steps.
WITHOUT_GRADIENT = ("net.0.bias", "net.1.running_mean")


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples of three classes in eight dimensions."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return CENTRES[y] + torch.randn(n, 8, generator=g), y


OWN = {(kind, n): Data(*points(n, n)) for kind, n in zip(KINDS, SIZES, strict=True)}
PARTIES = list(OWN)  # (kind, size): the size also tells the clients apart
PUBLIC, HELD_OUT = points(24, 91), Data(*points(30, 92))


def still(model: nn.Module) -> nn.Module:
    """The same model without dropout."""
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


def whole(method: Method) -> Method:
    """The same method with plain SGD on whole data sets, so that nothing depends on the order of the samples."""
    changes: dict[str, Any] = {}
    sgd = {"batch": 64, "optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "every": 1, "patience": 1}
    for f in dataclasses.fields(method):
        value = getattr(method, f.name)
        if not dataclasses.is_dataclass(value) or isinstance(value, type) or not hasattr(value, "batch"):
            continue
        names = {g.name for g in dataclasses.fields(value)}
        if "epochs" not in names and "optimizer" not in names:  # generators and the like keep their own training
            changes[f.name] = dataclasses.replace(value, steps=min(value.steps, 2))
            continue
        long = {"steps": 2} if getattr(value, "steps", None) is not None else {"epochs": 2}
        changes[f.name] = dataclasses.replace(value, **{k: v for k, v in (sgd | long).items() if k in names})
    return dataclasses.replace(method, **changes)


def settings(name: str, **changed: Any) -> Method:
    """A method by name with such settings."""
    return dataclasses.replace(whole(find_method(name)()), **changed)


BASIC = {"K": 1, "global_trainer": Basic()}
WEIGHTED = BASIC | {"ensemble_trainer": Clients(weighted=True)}  # FedDF, but for its teachers' weights
SCAFFOLD = BASIC | {"local_trainer": ScaffoldTrainer()}
UNIFORM = BASIC | {
    "ensemble_trainer": Clients(),
    "screen": Screen("uniform"),
}


class Federated(Exchange):
    """A federation of `parties`, of the models the method needs; the server knows nothing but what is given."""

    def __init__(self, tmp: Any, method: Method, parties: Sequence[tuple[str, int]] = PARTIES, **options: Any):
        traits = method.traits()
        split = traits.split in ("split", "shared features", "shared head")
        builders = {"w": toys.split_wide if split else toys.wide, "d": toys.split_deep if split else toys.deep}
        if traits.split == "chain":
            builders["d"] = toys.stacked
        if not traits.batchnorm:
            builders["d"] = toys.deep_group
        if traits.architectures == "one":
            parties = [("w", n) for _, n in parties]
        used = sorted({kind for kind, _ in parties})
        known = {n: data for (_, n), data in OWN.items()} | {0: Data(*points(0, 0))}
        super().__init__(
            tmp,
            {kind: lambda kind=kind: still(builders[kind]()) for kind in used},
            [(kind, known[n]) for kind, n in parties],
            public=Known(*PUBLIC),
            classes=3,
            shape=(8,),
            **options,
        )
        self.method, self.parties = method, list(parties)
        if traits.server_model in ("larger", "own"):
            self.server.builders["large"], self.server.large = lambda: still(toys.large()), "large"

    def play(self, rounds: int, *drawn: Sequence[str]) -> "Federated":
        """So many rounds from the start; `drawn` are the clients of each, with repetitions (default: all clients)."""
        if drawn:
            cohorts = iter(drawn)
            self.draw(lambda: next(cohorts), everybody=all(set(names) == set(self.fed.clients) for names in drawn))
        self.states = self.run(self.method, rounds)
        return self

    def draw(self, cohort: Callable[[], Sequence[str]], everybody: bool = False) -> None:
        """From now on these clients are drawn; some methods ask whether everybody always is."""

        def sample() -> list[str]:
            self.fed.copies = Counter(cohort())
            return sorted(self.fed.copies)

        self.fed.sample = sample  # type: ignore[method-assign]
        self.fed.config = dataclasses.replace(self.fed.config, fraction=1.0 if everybody else 0.6)

    def round(self, *drawn: str) -> Any:
        """One more round, of these clients."""
        self.draw(lambda: drawn)
        self.fed.begin(len(self.states) - 1)
        self.server.begin()
        self.states.append(self.method.round(self.states[-1], self.fed, self.server))
        return self.states[-1]

    def models(self) -> dict[str, dict[str, Tensor]]:
        """The models of the server, and all else it keeps that is not of single clients: generators, variates, ..."""
        models, state = self.method.models(self.states[-1]), self.states[-1]
        kept = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "c"}  # between clients
        return {name: model.weights for name, model in models.items()} | dict(self._tensors("", kept))

    def _tensors(self, name: str, kept: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
        if isinstance(kept, Tensor):
            yield name, {"": kept}
        elif isinstance(kept, dict | list):
            for key, value in kept.items() if isinstance(kept, dict) else enumerate(kept):
                if key not in self.data and key not in WITHOUT_GRADIENT:
                    yield from self._tensors(f"{name}/{key}", value)

    def own_models(self) -> dict[int, dict[str, Tensor]]:
        """The models that clients keep, or that the server keeps for each, by the clients' sizes."""
        size = {k: self.parties[i][1] for i, k in enumerate(self.fed.clients)}
        kept = {size[k]: kept_by(self.fed, k).get("model") for k in self.fed.clients if k in self.fed.ledger}
        for table in (getattr(self.states[-1], name, None) for name in ("models", "start")):
            if isinstance(table, dict) and set(table) <= set(size):
                kept |= {size[k]: weights for k, weights in table.items()}
        return {n: weights for n, weights in kept.items() if weights is not None}


def apart(a: dict[Any, dict[str, Tensor]], b: dict[Any, dict[str, Tensor]]) -> float:
    """The largest difference between two tables of models, which must be of the same models."""
    assert a.keys() == b.keys()
    pairs = [(weights[n], b[name][n]) for name, weights in a.items() for n in weights]
    return max((float((s.double() - t.double()).abs().max()) for s, t in pairs if s.is_floating_point()), default=0.0)
