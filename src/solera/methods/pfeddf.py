"""pFedDF (footnote 2 of MNFL): FedDF, and at the end every client fine-tunes its architecture on its own data."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from ..federation import Federation
from ..method import About, Exchange, Method, Model, Traits, register
from ..parts.distill import Distill
from ..parts.local import Local
from ..parts.lowbit import LowBit
from ..parts.teachers import Rule
from ..server import Server
from ..settings import NonNegativeInt
from ..tensors import Weights
from .common.personal import Tuning, fine_tune, score_tuned, tuning_payload
from .common.swag import Swag
from .feddf import FedDF


@register("pfeddf")
@dataclass(frozen=True)
class PFedDF(Method):
    """FedDF with models that are made personal at the end."""

    tune_epochs: NonNegativeInt = 5  # of fine-tuning, otherwise as local training; 0: the architectures as they are

    local: Local = field(default_factory=Local)  # from here on as in feddf
    fusion: Distill = field(default_factory=Distill)
    mu: float = 0.0  # proximal term in the clients' objective, as in FedProx
    average: Literal["weighted", "uniform", "median"] = (
        "weighted"  # of the clients' models; teachers always count the same
    )
    student_init: Literal["from_average", "from_previous"] = "from_average"  # where distillation starts
    ensemble: Rule = "avg_logits"  # how the teachers are combined
    drop_worst: bool = False  # clients that guess on the validation set are neither averaged nor teachers
    drop_threshold: float = 1.2  # in multiples of chance
    drop_outliers: bool = False  # and if there are none, those far below the others
    distill_absent: bool = False  # also distil architectures that had no client this round
    report_ensemble: bool = True  # measure the teachers' joint prediction each round (costs a pass of each)
    quantise: LowBit = field(default_factory=LowBit)  # of the clients' weights on the way up
    swag: Swag = field(default_factory=Swag)  # teachers drawn around the clients' models
    low_entropy_top: int | None = None  # distil on so many public samples of a round: those the teachers are surest of
    update_clip: float | None = None  # longest update of a client, in multiples of its architecture's median

    about: ClassVar[About] = About(
        title="pFedDF",
        paper="comparison method of MNFL, on Lin et al., NeurIPS 2020",
        wire="model down, model up; at the end once more down",
        state="at the end, its fine-tuned model",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # M: architecture -> weights
        tuned: bool  # the clients hold fine-tuned copies of these

    def traits(self) -> Traits:
        return replace(self.feddf.traits(), personal=True)

    @property
    def feddf(self) -> FedDF:
        """FedDF with the same settings."""
        return FedDF(**{f.name: getattr(self, f.name) for f in fields(FedDF)})

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(self.feddf.init(fed, server).weights, False)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        return self.State(self.feddf.round(FedDF.State(state.weights), fed, server).weights, False)

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        """Every client gets its architecture, whether it was in the last cohort or not."""
        fed.map(fine_tune, list(fed.clients), **self.sent(state, fed))
        return self.State(state.weights, True)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_tuned, {**self.sent(state, fed), "tuned": state.tuned})

    def sent(self, state: State, fed: Federation) -> dict[str, Any]:
        tuning = Tuning(replace(self.local, epochs=self.tune_epochs, steps=None))
        return tuning_payload(state.weights, tuning, fed)

    def fits(self, server: Server) -> Iterable[str]:
        return self.feddf.fits(server)

    def models(self, state: State) -> dict[str, Model]:
        return self.feddf.models(FedDF.State(state.weights))
