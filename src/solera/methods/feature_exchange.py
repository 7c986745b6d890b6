"""Methods whose clients send features of their training samples instead of weights: the tasks, and the server's checks.

A sample is known by its position in the client's training data: row i of every message belongs to sample i, whatever
the order in which samples are trained on. The client's model stays with it, under "model" in its state.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from ..federation import Federation, Replies
from ..parts.feature_server import check_shape, extract, taught, tower_with
from ..parts.local import Local, Score, evaluate, fit, logits_of, weights_of
from ..parts.teachers import soft_targets
from ..server import Server
from ..task import Client, task
from ..wire import ConfigError, DataError, Weights
from .baselines import scored
from .predictions import finite


@dataclass(frozen=True)
class Features:
    """What a layer of the client's model makes of its training samples."""

    features: Tensor

    def __post_init__(self) -> None:
        _check_rows(self.features)


@dataclass(frozen=True)
class Extracted:
    """The same, and the model's logits and the label of each sample."""

    features: Tensor
    logits: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        _check_rows(self.features)
        _check_rows(self.logits)
        if self.labels.dtype != torch.int32:
            raise ValueError(f"labels are int32, not {self.labels.dtype}")


def _check_rows(rows: Tensor) -> None:
    if rows.ndim < 2 or rows.dtype != torch.float32:
        raise ValueError(f"a row of float32 for each sample is wanted, not {tuple(rows.shape)} {rows.dtype}")


# ---- the client's half ------------------------------------------------------------------------------


@task("extract_features")
def extract_features(client: Client, layer: str) -> Features:
    """The features of the model as the client kept it."""
    return Features(_extracted(client, client.model(client.state.get("model")), layer)[0])


@task("train_and_extract")
def train_and_extract(
    client: Client, local: Local, teacher: Tensor, alpha: float, temperature: float, layer: str
) -> Extracted:
    """Train on the labels and on the server's logits of each sample (no row: on the labels alone), then extract."""
    inputs, labels = client.train.inputs, client.train.labels
    if len(teacher) not in (0, len(labels)):
        raise DataError(f"{client.id} has {len(labels)} samples and was sent the logits of {len(teacher)}")
    model = client.model(client.state.get("model"))
    objective = taught(labels, teacher if len(teacher) else None, alpha, temperature)
    fit(model, inputs, torch.arange(len(labels)), local, client.seed, objective)
    features, logits = _extracted(client, model, layer)
    client.state["model"] = weights_of(model)
    return Extracted(features, logits, labels.int())


def _extracted(client: Client, model: nn.Module, layer: str) -> tuple[Tensor, Tensor]:
    features, logits = extract(model, client.train.inputs, layer)
    return finite(features), finite(logits)


@task("score_with_tower")
def score_with_tower(client: Client, weights: Weights, hidden: int, layers: int, layer: str, alone: bool) -> Score:
    """The client's extractor and the server's tower on the client's test samples; `alone`: its own small model.

    A client that was never asked has no extractor: no sample of its counts.
    """
    inputs, labels = client.test.inputs, client.test.labels
    if alone or len(labels) == 0 or "model" not in client.state:
        return scored(client, client.state.get("model"))
    model = client.model(client.state["model"])
    features, _ = extract(model, inputs, layer)
    top = tower_with(weights, features.shape[1:], client.classes, hidden, layers)
    return evaluate(top, features, labels)


# ---- the server's half ------------------------------------------------------------------------------


def feature_shape(name: str, layer: str, server: Server) -> tuple[int, ...]:
    """The shape of the features that `layer` gives in every client architecture; a ConfigError if there are several."""
    if server.shape is None:
        raise ConfigError(f"{name}: the server must know the shape of an input: give it (Server(shape=...))")
    blank = torch.zeros(1, *server.shape, dtype=torch.int64 if server.tokens else torch.float32)
    shapes = {}
    for P in server.architectures:
        model = server.model(P, server.init(P))
        layers = [n for n, _ in model.named_modules() if n]
        if layer not in layers:
            near = get_close_matches(layer, layers, 1) or layers[:1]
            raise ConfigError(f"{name}: features = {layer!r} is no layer of {P!r}; it has, for example, {near[0]!r}")
        try:
            shapes[P] = tuple(extract(model, blank, layer)[0].shape[1:])
            check_shape(shapes[P])
        except ValueError as e:
            raise ConfigError(f"{name}: features = {layer!r} in {P!r}: {e}; choose another layer") from None
    if len(set(shapes.values())) > 1:
        raise ConfigError(
            f"{name}: all clients' features must have one shape, but {layer!r} gives "
            + ", ".join(f"{shape} in {P!r}" for P, shape in shapes.items())
            + ": set features = 'representation' and models.head = 'shared'"
        )
    return shapes[server.architectures[0]]


def usable(
    replies: Replies, shape: tuple[int, ...], top: nn.Module, temperature: float, fed: Federation, server: Server
) -> dict[str, Any]:
    """The replies with a row of features of this `shape` for each of the client's samples; the others are rejected.

    Where the logits and labels are sent too, there must be as many, and they must be of the task's classes. Numbers may
    be finite and still too large to compute with: then the loss of `top`, the server's tower, would not be.
    """
    fine = {}
    for k, reply in list(replies.items()):
        reason = _wrong(reply, fed.num_examples(k), shape, server.num_classes) or _too_large(reply, top, temperature)
        if reason:
            fed.reject(replies, k, reason)
        else:
            fine[k] = reply
    return fine


def _wrong(reply: Features | Extracted, samples: int, shape: tuple[int, ...], classes: int) -> str | None:
    if reply.features.shape != (samples, *shape):
        return f"features {tuple(reply.features.shape)}, expected were {(samples, *shape)}"
    if isinstance(reply, Features):
        return None
    if reply.logits.shape != (samples, classes):
        return f"logits {tuple(reply.logits.shape)}, expected were {(samples, classes)}"
    if reply.labels.shape != (samples,) or not bool(((reply.labels >= 0) & (reply.labels < classes)).all()):
        return f"labels that are not {samples} of the classes 0 to {classes - 1}"
    return None


def _too_large(reply: Features | Extracted, top: nn.Module, temperature: float) -> str | None:
    if not bool(torch.isfinite(logits_of(top, reply.features)).all()):
        return "features to which the tower's answer is not finite"
    if isinstance(reply, Extracted):
        # Of C classes no entropy is above log C; where rounding makes it so, the softmax is not one either.
        most = math.log(reply.logits.shape[1]) + 1
        if not bool((soft_targets(reply.logits, temperature)[1].abs() <= most).all()):
            return "logits too large for a softmax"
    return None
