"""The two ends of the scale: every client alone, and all data in one place."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ..federation import Federation, per_client
from ..method import Info, Model, register
from ..parts.local import Diverged, Local, Score, evaluate, fit, weights_of
from ..server import Server
from ..task import Client, task
from ..wire import Weights
from .shared import models_of, outcome_of


@task("train_alone")
def train_alone(client: Client, local: Local) -> None:
    """Go on training the client's own model; it stays on the client."""
    model = client.model(client.state.get("model"))
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    client.state["model"] = weights_of(model)


@task("score_own")
def score_own(client: Client) -> Score:
    """The client's own model on its own test samples; nothing of a client that has none yet."""
    return scored(client, client.state.get("model"))


@task("score_own_or_received")
def score_own_or_received(client: Client, weights: Weights) -> Score:
    """The same where there is a common model: a client that has none of its own yet would be given that."""
    return scored(client, client.state.get("model", weights))


def scored(client: Client, weights: Weights | None) -> Score:
    """A model on the client's test samples; None: no model, and no sample counts."""
    if weights is None:
        return Score(0, 0, 0.0)
    return evaluate(client.model(weights), client.test.inputs, client.test.labels)


def common_model(x: dict[str, Weights], fed: Federation) -> dict[str, Any]:
    """The payload of `score_own_or_received`: for each client the common model of its architecture."""
    return {"weights": per_client(lambda k: x[fed.architecture(k)])}


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

        def train(P: str) -> Weights | Diverged:
            model, seed = server.model(P, state.weights[P]), fed.seed("centralised", P)
            done = outcome_of(lambda: fit(model, data.inputs, data.labels, self.local, seed))
            return done if isinstance(done, Diverged) else weights_of(model)

        weights, names = dict(state.weights), list(state.weights)
        trained = server.parallel([partial(train, P) for P in names], [fed.seed("dropout", P) for P in names])
        for P, found in zip(names, trained, strict=True):
            if isinstance(found, Diverged):
                server.event("server_diverged", architecture=P, steps=found.steps, reason=str(found))
            else:
                weights[P] = found
        return self.State(weights)

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)
