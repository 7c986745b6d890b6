"""Defences against malicious clients, for methods that see individual models: large updates, models near chance."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, Protocol

from torch import nn

from ...core.federation import Federation, Replies
from ...core.tensors import Weights
from ...scenario.server import Server
from ...train.byzantine import chosen, squared_distances
from ...train.fitting import evaluate
from ...train.norms import parameter_names
from ...train.robust import clip_updates
from ...train.teachers import Frozen, drop_worst
from .averaging import borne
from .fusion import side_by_side
from .training import Update


class Defended(Protocol):
    """The settings of a method with these defences."""

    @property
    def drop_worst(self) -> bool: ...
    @property
    def drop_threshold(self) -> float: ...
    @property
    def drop_outliers(self) -> bool: ...
    @property
    def update_clip(self) -> float | None: ...


def clipped(
    x: Replies, sent: Callable[[str], Weights], factor: float | None, fed: Federation, server: Server
) -> Replies:
    """The uploads, with each update's norm clipped to `factor` times the median of its architecture's clients.

    An update is what has changed since the model that the client was sent.
    """
    if factor is None:
        return x
    for A in server.architectures:
        own = [k for k in x if fed.architecture(k) == A]
        names = parameter_names(server.template(A))
        fine = clip_updates([x[k].weights for k in own], [sent(k) for k in own], factor, names)
        for k, weights in zip(own, fine, strict=True):
            if weights is not x[k].weights:
                server.event("update_clipped", client=k)
                x[k] = Update(weights)
    return x


def without_worst(
    models: dict[str, Frozen], x: Replies, cfg: Defended, fed: Federation, server: Server
) -> dict[str, Frozen]:
    """The models better than chance on the server's validation set; the clients of the others are rejected."""
    held_out = server.validation
    if not cfg.drop_worst or held_out is None:
        return models
    jobs = [partial(evaluate, model, held_out.inputs, held_out.labels) for model in models.values()]
    scores = [score.accuracy for score in side_by_side(fed.seed, server, jobs)]
    kept = drop_worst(scores, server.num_classes, cfg.drop_threshold, cfg.drop_outliers)
    for i, k in enumerate(models):
        if i not in kept:
            fed.reject(x, k, f"drop_worst: an accuracy of {scores[i]:.4f} on the validation samples")
    return {k: model for i, (k, model) in enumerate(models.items()) if i in kept}


def teachers_of(
    how: Literal["all", "krum", "multi_krum", "bulyan"],
    models: dict[str, Frozen],
    liars: int,
    fed: Federation,
    server: Server,
) -> dict[str, Frozen]:
    """The clients whose models teach: all, or in each architecture those that the rule chooses (train/byzantine.py).

    Who is not chosen still counts in the average, which has a rule of its own.
    """
    if how == "all":
        return models
    taught = set()
    for A in server.architectures:
        S = [k for k in models if fed.architecture(k) == A]
        if S:
            names = parameter_names(server.template(A))
            distances = squared_distances([models[k].weights for k in S], names)
            taught |= {S[i] for i in chosen(how, distances, borne(how, liars, S, fed, server))}
    for k in models.keys() - taught:
        server.event("teacher_left_out", client=k, rule=how)
    return {k: model for k, model in models.items() if k in taught}


def accuracy_votes(
    models: Mapping[str, nn.Module], copies: list[float], fed: Federation, server: Server
) -> list[float]:
    """The teachers' weights: each one's accuracy on the server's validation set, as often as it was sampled.

    If all are at 0 they count the same.
    """
    held_out = server.validation
    assert held_out is not None  # `fits` has seen to it
    jobs = [partial(evaluate, model, held_out.inputs, held_out.labels) for model in models.values()]
    votes = [s.accuracy * n for s, n in zip(side_by_side(fed.seed, server, jobs), copies, strict=True)]
    return votes if sum(votes) else copies


def defences_problems(name: str, cfg: Defended, server: Server) -> Iterator[str]:
    """Settings that would fail during a run, or have no effect."""
    if cfg.drop_threshold > server.num_classes:
        yield f"{name}: drop_threshold = {cfg.drop_threshold}: {server.num_classes} times chance is an accuracy of 1"
    if cfg.drop_worst and server.validation is None:
        yield f"{name}: drop_worst needs a validation set on the server: set data.validation"
