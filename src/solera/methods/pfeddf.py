"""Variants of FedDF that are other algorithms.

pFedDF (footnote 2 of MNFL): at the end every client fine-tunes its architecture's model on its own data. FedDF from the
previous student (Table 5): distillation starts from the student of the round before and not from the average.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..core.federation import Federation, Replies
from ..core.settings import NonNegativeInt
from ..core.tensors import Weights
from ..method import About, Exchange, Traits, register
from ..scenario.server import Server
from ..train.teachers import Frozen
from .feddf import FedDF
from .steps.personal import Tuning, fine_tune, score_tuned, tuning_payload
from .steps.teaching import Lesson


@register("feddf-previous")
@dataclass(frozen=True)
class FedDFPrevious(FedDF):
    """FedDF whose students start from those of the round before."""

    distill_absent: bool = False  # also distil architectures that had no client this round

    about: ClassVar[About] = replace(FedDF.about, title="FedDF from the previous student")

    def start(self, x: Replies, members: dict[str, Frozen], M: dict[str, Weights], at: Lesson) -> dict[str, Weights]:
        there = {at.fed.architecture(k) for k in members}
        return {A: M[A] for A in at.server.architectures if A in there or self.distill_absent}


@register("pfeddf")
@dataclass(frozen=True)
class PFedDF(FedDF):
    """FedDF with personal fine-tuning at the end."""

    tune_epochs: NonNegativeInt = 5  # epochs of fine-tuning, otherwise as local training; 0: keep the common model

    about: ClassVar[About] = About(
        title="pFedDF",
        paper="comparison method of MNFL, on Lin et al., NeurIPS 2020",
        wire="model down, model up; at the end once more down",
        state="at the end, its fine-tuned model",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # M: architecture -> weights
        tuned: bool = False  # whether the clients hold fine-tuned copies of these

    def traits(self) -> Traits:
        return replace(super().traits(), personal=True)

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        """Send every client the model of its architecture, also clients outside the last cohort."""
        fed.map(fine_tune, list(fed.clients), **self.sent(state, fed))
        return self.State(state.weights, True)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_tuned, {**self.sent(state, fed), "tuned": state.tuned})

    def sent(self, state: State, fed: Federation) -> dict[str, Any]:
        tuning = Tuning(replace(self.local, epochs=self.tune_epochs, steps=None))
        return tuning_payload(state.weights, tuning, fed)
