"""Teachers sampled around the clients' models (FedDF's Table 7, FedDistill) from SWAG's normal distribution."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.federation import Federation
from ...core.settings import NonNegative, NonNegativeInt, Problem, settings
from ...scenario.server import Server
from ...train.norms import parameter_names
from ...train.posterior import swag
from ...train.teachers import Build, Frozen, frozen
from .fusion import copies_of, with_statistics

NORM_SAMPLES = 2048  # public samples for the BatchNorm statistics of a sampled model


@settings
class Swag:
    """Teachers sampled from a normal distribution around the clients' models (FedDF's Table 7, FedDistill)."""

    samples: NonNegativeInt = 0  # number of sampled teachers each round; 0: none
    scale: NonNegative = 0.5  # of the covariance; 0.5 is SWAG's factor
    include_clients: bool = True  # the clients' models teach as well

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.samples == 0 and (self.scale, self.include_clients) != (0.5, True):
            yield "samples = 0 samples no teacher: set it, or leave out the other settings"


def drawn_around(
    teachers: dict[str, Frozen],
    cfg: Swag,
    d: Tensor,
    fed: Federation,
    server: Server,
    report: str | None,
    build: Build | None = None,
) -> dict[str, Frozen]:
    """The teachers, all of one architecture, together with or replaced by models sampled around them.

    The sampled models are untrained, so their BatchNorm statistics are estimated from public samples. `report` is the
    rule by which the ensemble of all of them is evaluated; `build` makes modules that answer as the clients' do.
    """
    if cfg.samples == 0:
        return teachers
    (A,) = server.architectures
    order = torch.randperm(len(d), generator=torch.Generator().manual_seed(fed.seed("norm")))
    inputs = server.public[d[order[:NORM_SAMPLES]]]
    uploads = [m.weights for k, m in teachers.items() for _ in range(fed.copies.get(k, 1))]
    names = parameter_names(server.template(A))
    drawn = swag(uploads, names, cfg.samples, fed.seed("swag"), cfg.scale)
    if len(inputs) > 1:
        drawn = [with_statistics(A, weights, inputs, server) for weights in drawn]
    joined = {k: m.weights for k, m in teachers.items()} if cfg.include_clients else {}
    joined |= {f"swag-{i}": weights for i, weights in enumerate(drawn)}
    members = [(A, weights) for weights in joined.values()]
    if report:
        server.report_ensemble("swag", members, report, copies_of(joined, fed), build=build)
    return dict(zip(joined, frozen(members, build or server.model), strict=True))


def swag_problems(name: str, cfg: Swag, server: Server) -> Iterator[str]:
    """Models of different shapes, around which no model can be sampled."""
    if cfg.samples and len(server.architectures) > 1:
        yield (
            f"{name}: swag.samples = {cfg.samples} samples around models of one architecture, but the clients have "
            f"{', '.join(server.architectures)}: leave it out, or name one architecture in models.clients"
        )
