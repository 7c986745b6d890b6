"""What makes a dataclass of a paper's letters a named setting of the framework."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from ...federation import Federation
from ...method import About, Method, Model, Traits
from ...server import EnsembleReport, Server
from .loop import Framework


class Setting(Method):
    """A setting gives its `framework`; all work is the framework's, and so are the refusals."""

    of_paper: ClassVar[About]  # what it says of itself, but for what a client keeps, which follows the settings
    State = Framework.State

    @property
    @abstractmethod
    def framework(self) -> Framework:
        """The three slots, filled."""

    def __post_init__(self) -> None:
        _ = self.framework  # what it refuses, it refuses now

    @property
    def about(self) -> About:
        return replace(self.of_paper, state=self.framework.about.state)

    def traits(self) -> Traits:
        return self.framework.traits()

    def fits(self, server: Server) -> Iterable[str]:
        return self.framework.fits(server)

    def init(self, fed: Federation, server: Server) -> Any:
        return self.framework.init(fed, server)

    def round(self, state: Any, fed: Federation, server: Server) -> Any:
        return self.framework.round(state, fed, server)

    def finish(self, state: Any, fed: Federation, server: Server) -> Any:
        return self.framework.finish(state, fed, server)

    def models(self, state: Any) -> dict[str, Model]:
        return self.framework.models(state)

    def ensemble_of(self, state: Any) -> EnsembleReport | None:
        return self.framework.ensemble_of(state)
