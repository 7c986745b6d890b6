"""pFedDF (footnote 2 of MNFL): FedDF; at the end every client fine-tunes its architecture's model on its own data."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from ..core.federation import Federation
from ..core.settings import Liars, NonNegativeInt
from ..core.tensors import Weights
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.lowbit import LowBit
from ..train.teachers import Rule
from .feddf import FedDF
from .steps.averaging import Buffers, Combined
from .steps.memory import Memory
from .steps.personal import Tuning, fine_tune, score_tuned, tuning_payload
from .steps.swag import Swag


@register("pfeddf")
@dataclass(frozen=True)
class PFedDF(Method):
    """FedDF with personal fine-tuning at the end."""

    tune_epochs: NonNegativeInt = 5  # epochs of fine-tuning, otherwise as local training; 0: keep the common model

    local: Local = field(default_factory=Local)  # from here on as in feddf
    fusion: Distill = field(default_factory=Distill)
    mu: float = 0.0  # proximal term in the clients' objective, as in FedProx
    average: Combined = "weighted"  # of the clients' models; the last four bear lying clients
    average_buffers: Buffers = "mean"  # BatchNorm's running statistics: averaged too, or those of the last client
    student_init: Literal["from_average", "from_previous"] = "from_average"  # where distillation starts
    ensemble: Rule = "avg_logits"  # how the teachers are combined
    teachers: Literal["all", "krum", "multi_krum", "bulyan"] = "all"  # whose models teach, in each architecture
    teacher_weights: Literal["equal", "accuracy"] = "equal"  # accuracy: on the validation set
    memory: Memory = field(default_factory=Memory)  # students of earlier rounds as teachers
    byzantine: Liars = 1  # how many lying clients of an architecture krum and the like bear
    drop_worst: bool = False  # clients near chance on the validation set are neither averaged nor teachers
    drop_threshold: float = 1.2  # in multiples of chance
    drop_outliers: bool = False  # if no client is near chance, drop those far below the others
    distill_absent: bool = False  # also distil architectures that had no client this round
    report_ensemble: bool = True  # evaluate the ensemble of the teachers each round (one pass per teacher)
    quantise: LowBit = field(default_factory=LowBit)  # low-bit client weights, in training and upload
    swag: Swag = field(default_factory=Swag)  # teachers sampled around the clients' models
    low_entropy_top: int | None = None  # distil only on this many public samples: those with the lowest entropy
    update_clip: float | None = None  # largest norm of a client's update, in multiples of its architecture's median

    about: ClassVar[About] = About(
        title="pFedDF",
        paper="comparison method of MNFL, on Lin et al., NeurIPS 2020",
        wire="model down, model up; at the end once more down",
        state="at the end, its fine-tuned model",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # M: architecture -> weights
        tuned: bool  # whether the clients hold fine-tuned copies of these

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
        """Send every client the model of its architecture, also clients outside the last cohort."""
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
