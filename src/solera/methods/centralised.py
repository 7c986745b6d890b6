"""Centralised training: one model of each architecture, trained on the data of all clients. An upper bound."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from ..core.federation import Federation
from ..core.tensors import Weights, weights_of
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.fitting import Diverged, Local, fit
from .steps.fusion import outcome_of
from .steps.training import models_of


@register("centralised")
@dataclass(frozen=True)
class Centralised(Method):
    """Training on the data of all clients together: an upper bound for federated methods."""

    local: Local = field(default_factory=Local)  # training in one round, on all data

    about: ClassVar[About] = About(
        title="Centralised training",
        paper="baseline",
        wire="nothing (in a simulation, the server holds all data)",
        state="nothing",
        models="each architecture is trained on all data",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]

    def traits(self) -> Traits:
        return Traits(replies="data", next_token=True, may_name_server=True)

    def remarks(self, server: Server) -> Iterator[str]:
        yield "centralised trains on all clients' data in one place: a reference, not federated learning"

    def init(self, fed: Federation, server: Server) -> State:
        large = [server.large] if server.large else []
        return self.State({A: server.init(A) for A in [*server.architectures, *large]})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        data = server.all_train

        def train(A: str) -> Weights | Diverged:
            model, seed = server.model(A, state.weights[A]), fed.seed("centralised", A)
            done = outcome_of(lambda: fit(model, data.inputs, data.labels, self.local, seed))
            return done if isinstance(done, Diverged) else weights_of(model)

        weights, names = dict(state.weights), list(state.weights)
        trained = server.parallel([partial(train, A) for A in names], [fed.seed("dropout", A) for A in names])
        server.worked(len(names) * self.local.visits(len(data.labels)))
        for A, found in zip(names, trained, strict=True):
            if isinstance(found, Diverged):
                server.event("server_diverged", architecture=A, steps=found.steps, reason=str(found))
            else:
                weights[A] = found
        return self.State(weights)

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)
