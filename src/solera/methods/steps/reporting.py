"""Reports of fusion methods about their teachers: the ensemble's accuracy and the teachers' agreement."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.federation import Federation, Replies
from ...core.tensors import Weights
from ...scenario.server import Joint, Server
from ...train.consensus import Weighting, agreement, confidence_weights, probabilities
from ...train.fitting import logits_of
from ...train.teachers import Build, Rule
from .fusion import side_by_side
from .teaching import Lesson

NOTED_SAMPLES = 128  # public samples on which the teachers are compared
NOTED_TEACHERS = 200


def report_teachers(
    models: Mapping[str, nn.Module],
    x: Replies,
    rule: Rule,
    d: Tensor,
    fed: Federation,
    server: Server,
    teacher: Joint | None = None,
    build: Build | None = None,
) -> None:
    """Evaluate the ensemble of the teachers, and record how far they agree on the public samples d.

    `teacher` is a user's own equation instead of the rule; `build` makes modules that predict like the clients'.
    """
    members = [(fed.architecture(k), x[k].weights) for k in models]
    copies = [float(fed.copies.get(k, 1)) for k in models]
    server.report_ensemble("teachers", members, rule, copies, names=list(models), teacher=teacher, build=build)
    note_teachers(models, d, fed, server)


def report_fusion(method: Any, plain: Any, teachers: Mapping[str, nn.Module], x: Replies, at: Lesson) -> None:
    """`report_teachers`, if the method reports; with the method's own `teacher` if it overrides that of `plain`."""
    if at.reports:
        replaced = None if type(method).teacher is plain.teacher else method.teacher
        report_teachers(teachers, x, at.rule, at.d, at.fed, at.server, replaced, at.build)


def report_averages(x_0: dict[str, Weights], at: Lesson) -> dict[str, Weights]:
    """The averages x_0, unchanged. If the method reports, they are also evaluated before distillation."""
    for A in x_0 if at.reports and at.fusion.steps else ():
        at.server.report_average(A, x_0[A])
    return x_0


def note_teachers(
    models: Mapping[str, nn.Module],
    d: Tensor,
    fed: Federation,
    server: Server,
    weights: Weighting = confidence_weights,
) -> None:
    """Write each teacher's confidence and how often it dissents into the round's metrics, for some of the samples d."""
    count = -(-NOTED_SAMPLES // (server.positions or 1))  # of language models: every token is a prediction
    some = d[:: max(1, len(d) // count)][:count]
    if len(some):
        inputs = server.public[some]
        logits = side_by_side(fed.seed, server, [partial(logits_of, model, inputs) for model in models.values()])
        copies = torch.tensor([fed.copies.get(k, 1) for k in models])
        found = agreement(probabilities(torch.stack(logits).flatten(1, -2)), copies, weights)
        server.event(
            "teachers",
            clients=list(models)[:NOTED_TEACHERS],
            confidence=[round(a, 4) for a in found.confidence[:NOTED_TEACHERS].tolist()],
            agrees=[round(a, 4) for a in found.agrees[:NOTED_TEACHERS].tolist()],
            dissenting=round(found.dissenting, 4),
            unanimous=round(found.unanimous, 4),
            samples=len(some),
        )
