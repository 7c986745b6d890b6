"""Small things that several methods need on the server's side."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...federation import Federation, Replies
from ...parts.consensus import agreement
from ...parts.distill import Validate
from ...parts.local import Diverged, Fitted, evaluate, logits_of
from ...parts.norms import reestimate
from ...parts.teachers import Frozen, frozen
from ...server import Server
from ...task import Data
from ...tensors import Weights, weights_of

NOTED_SAMPLES = 128  # public samples on which the teachers are compared, for the report
NOTED_TEACHERS = 200


def side_by_side(fed: Federation, server: Server, jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run independent jobs in the server's threads; results in order."""
    return server.parallel(jobs, [fed.seed("job", i) for i in range(len(jobs))])


def outcome_of(train: Callable[[], Fitted]) -> Fitted | Diverged:
    """How a training of the server's own went: what it did, or that it blew up. (A client that does is dropped.)"""
    try:
        return train()
    except Diverged as e:
        return e


def accuracy_on(data: Data | None) -> Validate | None:
    """The accuracy of a model on `data`, as a function; None without data."""
    return None if data is None else lambda model: evaluate(model, data.inputs, data.labels).accuracy


def finite_models(
    x: Replies, probe: Tensor, fed: Federation, server: Server, probed: str = "public samples"
) -> dict[str, Frozen]:
    """The uploaded models whose logits on `probe` are finite numbers; the others are rejected."""
    uploads = [(fed.architecture(k), x[k].weights) for k in x]
    models = dict(zip(x, frozen(uploads, server.model), strict=True))
    fine = side_by_side(fed, server, [partial(answers_finitely, model, probe) for model in models.values()])
    for k, ok in zip(list(models), fine, strict=True):
        if not ok:
            fed.reject(x, k, f"non-finite logits on {probed}")
            del models[k]
    return models


def answers_finitely(model: nn.Module, inputs: Tensor) -> bool:
    """Whether the logits of `model` are finite numbers for all of `inputs`."""
    return len(inputs) == 0 or bool(torch.isfinite(logits_of(model, inputs)).all())


def with_statistics(P: str, weights: Weights, inputs: Tensor, server: Server) -> Weights:
    """A model nobody has trained with BatchNorm statistics of its own, taken from `inputs`."""
    model = server.model(P, weights)
    reestimate(model, inputs)
    return weights_of(model)


def note_teachers(models: Mapping[str, nn.Module], d: Tensor, fed: Federation, server: Server) -> None:
    """Write into the round's metrics how sure each teacher is and how often it dissents, on some of the samples d."""
    some = d[:: max(1, len(d) // NOTED_SAMPLES)][:NOTED_SAMPLES]
    if len(some):
        inputs = server.public[some]
        logits = side_by_side(fed, server, [partial(logits_of, model, inputs) for model in models.values()])
        copies = torch.tensor([fed.copies.get(k, 1) for k in models])
        found = agreement(torch.stack(logits).double().softmax(-1), copies)
        server.event(
            "teachers",
            clients=list(models)[:NOTED_TEACHERS],
            confidence=[round(a, 4) for a in found.confidence[:NOTED_TEACHERS].tolist()],
            agrees=[round(a, 4) for a in found.agrees[:NOTED_TEACHERS].tolist()],
            dissenting=round(found.dissenting, 4),
            unanimous=round(found.unanimous, 4),
            samples=len(some),
        )


def logits_problems(name: str, server: Server) -> Iterator[str]:
    """Architectures that do not answer to a public sample with one logit for each class."""
    for P in server.architectures:
        shape = tuple(logits_of(server.model(P, server.init(P)), server.public[torch.tensor([0])]).shape)
        if shape != (1, server.num_classes):
            yield f"{name}: {P!r} gives logits {shape} for one sample, not (1, {server.num_classes})"
