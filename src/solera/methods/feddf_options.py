"""What FedDF can do beside its algorithm: teachers drawn around the clients' models, and uploads held in check."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..federation import Federation, Replies
from ..parts.norms import parameter_names
from ..parts.posterior import swag
from ..parts.robust import clip_updates
from ..parts.teachers import Frozen, frozen
from ..server import Server
from ..tensors import Weights
from .common.fusion import logits_problems, with_statistics
from .common.training import Update

NORM_SAMPLES = 2048  # public samples that give a drawn model its BatchNorm statistics


@dataclass(frozen=True)
class Swag:
    """Teachers drawn from a normal distribution around the clients' models (FedDF's Table 7, FedDistill)."""

    samples: int = 0  # how many are drawn each round; 0: none
    scale: float = 0.5  # of the covariance; 0.5 gives SWAG's own factors
    include_clients: bool = True  # the clients' models teach as well

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples = {self.samples}: at least 0 is needed (0: no teachers are drawn)")
        if not 0 <= self.scale < float("inf"):
            raise ValueError(f"scale = {self.scale}: must not be negative")
        if self.samples == 0 and (self.scale, self.include_clients) != (0.5, True):
            raise ValueError("samples = 0 draws no teacher: set it, or leave out the other settings")


def drawn_around(
    teachers: dict[str, Frozen], cfg: Swag, d: Tensor, fed: Federation, server: Server, report: str | None
) -> dict[str, Frozen]:
    """The teachers, all of one architecture, with models drawn around them beside them or in their place.

    Nobody has trained these, so their BatchNorm statistics are taken anew from public samples. `report` is the rule by
    which all of them are measured together.
    """
    (P,) = server.architectures
    order = torch.randperm(len(d), generator=torch.Generator().manual_seed(fed.seed("norm")))
    inputs = server.public[d[order[:NORM_SAMPLES]]]
    uploads, names = [m.weights for m in teachers.values()], parameter_names(server.template(P))
    drawn = swag(uploads, names, cfg.samples, fed.seed("swag"), cfg.scale)
    if len(inputs) > 1:
        drawn = [with_statistics(P, weights, inputs, server) for weights in drawn]
    joined = {k: m.weights for k, m in teachers.items()} if cfg.include_clients else {}
    joined |= {f"swag-{i}": weights for i, weights in enumerate(drawn)}
    members = [(P, weights) for weights in joined.values()]
    if report:
        server.report_ensemble("swag", members, report)
    return dict(zip(joined, frozen(members, server.model), strict=True))


def clipped(x: Replies, M: dict[str, Weights], factor: float, fed: Federation, server: Server) -> Replies:
    """The uploads, none further from what was sent than `factor` times the median of its architecture's clients."""
    for P in server.architectures:
        own = [k for k in x if fed.architecture(k) == P]
        names = parameter_names(server.template(P))
        for k, weights in zip(own, clip_updates([x[k].weights for k in own], M[P], factor, names), strict=True):
            if weights is not x[k].weights:
                server.event("update_clipped", client=k)
                x[k] = Update(weights)
    return x


def feddf_problems(feddf: Any, server: Server) -> Iterator[str]:
    """Settings that would fail, or do nothing, in the middle of a run."""
    steps, swag, top = feddf.fusion.steps, feddf.swag, feddf.low_entropy_top
    if feddf.mu < 0:
        yield f"feddf: mu = {feddf.mu} must not be negative"
    if not 0 <= feddf.drop_threshold <= server.num_classes:
        yield f"feddf: drop_threshold = {feddf.drop_threshold} must be in [0, {server.num_classes}]"
    if feddf.drop_outliers and not feddf.drop_worst:
        yield "feddf: drop_outliers = true has no effect without drop_worst = true"
    if server.validation is None and (feddf.drop_worst or feddf.fusion.keep_init_if_better):
        yield "feddf: drop_worst and fusion.keep_init_if_better need a validation set on the server"
    if feddf.update_clip is not None and not 0 < feddf.update_clip < float("inf"):
        yield f"feddf: update_clip = {feddf.update_clip} must be positive: multiples of the median update"
    if steps == 0 and (swag.samples or top is not None):
        yield "feddf: swag and low_entropy_top concern distillation: they need fusion.steps above 0"
    if swag.samples and len(server.architectures) > 1:
        yield (
            f"feddf: swag.samples = {swag.samples} draws around models of one architecture, but the clients have "
            f"{', '.join(server.architectures)}: leave it out, or name one architecture in models.clients"
        )
    if steps == 0:
        return
    if top is not None:
        most = len(server.public) if server.per_round is None else server.per_round
        if not 1 <= top <= most:
            yield f"feddf: low_entropy_top = {top}: a round has {most} public samples; keep 1 to {most}"
        if server.public.fresh:
            yield (
                "feddf: low_entropy_top chooses samples by what the teachers say of them, but these change with every "
                "draw: use public.augment = 'off' or 'once', or a cached generator"
            )
    yield from logits_problems("feddf", server)
