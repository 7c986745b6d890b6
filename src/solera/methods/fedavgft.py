"""FedAvg with local fine-tuning (Yu, Bagdasaryan and Shmatikov, 2020): at the end every client adapts the common model.

Two of the paper's variants are supported as well: training the head alone ("freeze-base"), and knowledge distillation
from the common model. Fine-tuning does not change the common model.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..core.federation import Federation
from ..core.settings import NonNegative, NonNegativeInt
from ..method import About, Exchange, Traits, register
from ..scenario.server import Server
from .steps.averaging import Averaging
from .steps.personal import Tuning, fine_tune, score_tuned, tuning_payload
from .steps.training import local_update


@register("fedavgft")
@dataclass(frozen=True)
class FedAvgFT(Averaging):
    """Averaging with personal fine-tuning at the end."""

    tune_epochs: NonNegativeInt = 5  # epochs of fine-tuning, otherwise as local training; 0: keep the common model
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

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        """Send every client the model of its architecture, also clients outside the last cohort."""
        fed.map(fine_tune, list(fed.clients), **self.sent(state, fed))
        return self.State(state.weights, True)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_tuned, {**self.sent(state, fed), "tuned": state.tuned})

    def sent(self, state: State, fed: Federation) -> dict[str, Any]:
        local = replace(self.local, epochs=self.tune_epochs, steps=None)
        return tuning_payload(state.weights, Tuning(local, self.freeze_base, self.kd), fed)
