"""FedAvg with local fine-tuning (Yu, Bagdasaryan and Shmatikov, 2020): at the end every client adapts the common model.

Beside plain fine-tuning there are two of the paper's variants: training the head alone ("freeze-base"), and a penalty
for answering unlike the common model (knowledge distillation from it). The common model itself stays as it is.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..federation import Federation
from ..method import About, Exchange, Method, Model, Traits, register
from ..parts.local import Local
from ..server import Server
from ..settings import NonNegative, NonNegativeInt
from ..tensors import Weights
from .common.averaging import Average, average_round, models_of
from .common.personal import Tuning, fine_tune, score_tuned, tuning_payload


@register("fedavgft")
@dataclass(frozen=True)
class FedAvgFT(Method):
    """Averaging, and models that are made personal at the end."""

    local: Local = field(default_factory=Local)
    average: Average = "weighted"
    tune_epochs: NonNegativeInt = 5  # of fine-tuning, otherwise as local training; 0: the common model as it is
    freeze_base: bool = False  # fine-tune the head alone
    kd: NonNegative = 0.0  # in fine-tuning, weight of KL(common model || own), a distance of answers

    about: ClassVar[About] = About(
        title="FedAvg with local fine-tuning",
        paper="Yu et al., 2020",
        wire="model down, model up; at the end once more down",
        state="at the end, its fine-tuned model",
        privacy="fine-tuning sends nothing up",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # architecture -> weights
        tuned: bool  # the clients hold fine-tuned copies of these

    def traits(self) -> Traits:
        return Traits(split="split" if self.freeze_base else "none", replies="means", personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({A: server.init(A) for A in server.architectures}, False)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x = state.weights
        mean = average_round(x, fed.sample(), fed, self.average, self.local)
        return self.State(x | {A: mean[A].weights for A in mean}, False)

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        """Every client gets its architecture's model, whether it was in the last cohort or not."""
        fed.map(fine_tune, list(fed.clients), **self.sent(state, fed))
        return self.State(state.weights, True)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_tuned, {**self.sent(state, fed), "tuned": state.tuned})

    def sent(self, state: State, fed: Federation) -> dict[str, Any]:
        local = replace(self.local, epochs=self.tune_epochs, steps=None)
        return tuning_payload(state.weights, Tuning(local, self.freeze_base, self.kd), fed)

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)
