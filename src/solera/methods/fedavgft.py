"""FedAvg with local fine-tuning (Yu, Bagdasaryan and Shmatikov, 2020): at the end every client adapts the common model.

Two of the paper's variants are supported as well: training the head alone ("freeze-base"), and knowledge distillation
from the common model. Fine-tuning does not change the common model.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from ..core.federation import Federation
from ..core.settings import NonNegative
from ..method import About, Traits, register
from ..scenario.server import Server
from .steps.personal import FineTuned, Tuning
from .steps.training import Averaging, local_update


@register("fedavgft")
@dataclass(frozen=True)
class FedAvgFT(FineTuned, Averaging):
    """Averaging with personal fine-tuning at the end."""

    freeze_base: bool = False  # fine-tune the head alone
    kd: NonNegative = 0.0  # in fine-tuning, weight of KL(common model || own) between predictions

    about: ClassVar[About] = About(
        title="FedAvg with local fine-tuning",
        paper="Yu et al., 2020",
        wire="model down, model up; at the end once more down",
        state="at the end, its fine-tuned model",
        privacy="fine-tuning sends nothing up",
    )

    @dataclass(frozen=True)
    class State(Averaging.State):
        tuned: bool = False  # whether the clients hold fine-tuned copies of these

    def traits(self) -> Traits:
        return Traits(split="split" if self.freeze_base else "none", replies="means", personal=True, products=True)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x = state.weights
        mean = self.mean(local_update, x, fed.sample(), fed, mu=0.0)
        return self.State(x | {A: mean[A].weights for A in mean})

    @property
    def tuning(self) -> Tuning:
        return replace(super().tuning, freeze_base=self.freeze_base, kd=self.kd)
