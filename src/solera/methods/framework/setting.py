"""What makes a dataclass of a paper's letters a named setting of the framework."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

from ...federation import Federation
from ...method import Info, Model
from ...parts.distill import Distill
from ...server import Server
from .loop import Framework


def section_6() -> Distill:
    """The server's training in FedEED's section 6.1, but for the steps (5,000 in the paper). T^2 is our reading."""
    return Distill(
        batch=256,
        optimizer="sgd",
        lr=0.1,
        schedule="constant",
        temperature=4.0,
        t_squared=True,
        clip=None,
        patience=None,
    )


class Setting(ABC):
    """A setting gives its `framework`; all work is the framework's, and so are the refusals."""

    info: ClassVar[Info]

    @property
    @abstractmethod
    def framework(self) -> Framework:
        """The three slots, filled."""

    def __post_init__(self) -> None:
        _ = self.framework  # what it refuses, it refuses now

    def describe(self) -> Info:
        said = self.framework.describe()
        privacy = said.privacy.partition(" (")[0]  # which slot it is for is no news in a setting
        return replace(self.info, public=said.public, state=said.state, privacy=privacy)

    def check(self, server: Server) -> None:
        self.framework.check(server)

    def init(self, fed: Federation, server: Server) -> Any:
        return self.framework.init(fed, server)

    def round(self, state: Any, fed: Federation, server: Server) -> Any:
        return self.framework.round(state, fed, server)

    def finish(self, state: Any, fed: Federation, server: Server) -> Any:
        return self.framework.finish(state, fed, server)

    def models(self, state: Any) -> dict[str, Model]:
        return self.framework.models(state)

    @property
    def ensemble_rule(self) -> str:
        return self.framework.ensemble_rule

    def ensemble_models(self, state: Any) -> list[tuple[Model, float]]:
        return self.framework.ensemble_models(state)
