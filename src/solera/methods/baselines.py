"""The two ends of the scale: every client alone, and all data in one place."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from ..federation import Federation
from ..method import Info, Model, register
from ..parts.local import Local, Score, evaluate, fit, is_finite, weights_of
from ..server import Server
from ..task import Client, task
from ..wire import Weights
from .shared import models_of


@task("train_alone")
def train_alone(client: Client, local: Local) -> None:
    """Go on training the client's own model; it stays on the client."""
    model = client.model(client.state.get("model"))
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    weights = weights_of(model)
    if is_finite(weights):  # a model that has blown up would never recover
        client.state["model"] = weights


@task("score_own")
def score_own(client: Client) -> Score:
    """The client's own model on its own test samples."""
    return evaluate(client.model(client.state.get("model")), client.test.inputs, client.test.labels)


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


@register("centralised")
@dataclass(frozen=True)
class Centralised:
    """All clients' data in one place: the upper bound that a federation gives up for privacy."""

    local: Local = field(default_factory=Local)  # a round is that much training on all data

    info: ClassVar[Info] = Info(
        title="Centralised training",
        paper="baseline",
        models="any mix; each architecture is trained on all data",
        wire="nothing (in a simulation, the server holds all data)",
        public="none",
        state="nothing",
        privacy="none: the data itself leaves the clients",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]

    def init(self, fed: Federation, server: Server) -> State:
        large = [server.large] if server.large else []
        return self.State({P: server.init(P) for P in [*server.architectures, *large]})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        data = server.all_train

        def train(P: str) -> Weights:
            model = server.model(P, state.weights[P])
            fit(model, data.inputs, data.labels, self.local, fed.seed("centralised", P))
            weights = weights_of(model)
            return weights if is_finite(weights) else state.weights[P]

        names = list(state.weights)
        trained = server.parallel([partial(train, P) for P in names], [fed.seed("dropout", P) for P in names])
        return self.State(dict(zip(names, trained, strict=True)))

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)
