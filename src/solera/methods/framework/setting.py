"""The base class of methods that are named settings of the framework."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from ...core.federation import Federation
from ...core.settings import Problem, SettingsError
from ...method import About, Method, Model, Traits
from ...scenario.server import EnsembleReport, Server
from ...train.distill import Distill
from .algorithm import Framework


def section_6() -> Distill:
    """The server's training in FedEED's section 6.1, except the steps (paper: 5,000). T^2 is our interpretation."""
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


class Setting(Method):
    """A setting defines its `framework`, which does all the work and all checks."""

    of_paper: ClassVar[About]  # its description, except for what a client keeps, which depends on the settings
    State = Framework.State

    @property
    @abstractmethod
    def framework(self) -> Framework:
        """The framework with its three slots filled."""

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other: what the framework refuses, with this setting's names of the keys."""
        try:
            _ = self.framework
        except SettingsError as e:
            yield from e.problems

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
