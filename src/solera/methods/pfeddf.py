"""Variants of FedDF that are other algorithms.

pFedDF (footnote 2 of MNFL): at the end every client fine-tunes its architecture's model on its own data. FedDF from the
previous student (Table 5): distillation starts from the student of the round before and not from the average.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from ..core.federation import Replies
from ..core.tensors import Weights
from ..method import About, Traits, register
from ..train.teachers import Frozen
from .feddf import FedDF
from .steps.personal import FineTuned
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
class PFedDF(FineTuned, FedDF):
    """FedDF with personal fine-tuning at the end."""

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
