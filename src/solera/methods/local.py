"""Local training: every client trains alone. A baseline."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.federation import Federation
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local
from .steps.personal import score_own, train_alone


@register("local")
@dataclass(frozen=True)
class LocalOnly(Method):
    """No collaboration: each client trains by itself. A useful method is better than this."""

    local: Local = field(default_factory=Local)

    about: ClassVar[About] = About(
        title="Local training only",
        paper="baseline",
        wire="nothing",
        state="its model",
    )

    @dataclass(frozen=True)
    class State:
        rounds: int  # all other state is on the clients

    def traits(self) -> Traits:
        return Traits(replies="none", personal=True, next_token=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(0)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        fed.map(train_alone, fed.sample(), local=self.local)
        return self.State(state.rounds + 1)

    def personal(self, state: State, fed: Federation) -> Exchange:
        return Exchange(score_own)

    def models(self, state: State) -> dict[str, Model]:
        return {}
