"""The two ends of the scale: every client alone, and all data in one place."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..federation import Federation
from ..method import Info, Model, register
from ..parts.local import Local
from ..server import Server
from .common.personal import score_own, train_alone


@register("local")
@dataclass(frozen=True)
class LocalOnly:
    """No collaboration: what each client reaches by itself. A method should beat this to be worth its messages."""

    local: Local = field(default_factory=Local)

    info: ClassVar[Info] = Info(
        title="Local training only",
        paper="baseline",
        models="any mix",
        wire="nothing",
        public="none",
        state="its model",
        privacy="nothing leaves the client",
    )
    personal: ClassVar = score_own

    @dataclass(frozen=True)
    class State:
        rounds: int  # everything else is on the clients

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(0)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        fed.map(train_alone, fed.sample(), local=self.local)
        return self.State(state.rounds + 1)

    def models(self, state: State) -> dict[str, Model]:
        return {}
