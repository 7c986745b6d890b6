"""Local training: every client trains alone. A baseline."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.federation import Federation
from ..method import About, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local
from .steps.personal import OnClients, train_alone


@register("local")
@dataclass(frozen=True)
class LocalOnly(OnClients):
    """No collaboration: each client trains by itself. A useful method is better than this."""

    local: Local = field(default_factory=Local)

    about: ClassVar[About] = About("Local training only", "baseline", "nothing", "its model")

    def traits(self) -> Traits:
        return Traits(replies="none", personal=True, next_token=True)

    def round(self, state: OnClients.State, fed: Federation, server: Server) -> OnClients.State:
        fed.map(train_alone, fed.sample(), local=self.local)
        return self.State(state.rounds + 1)
