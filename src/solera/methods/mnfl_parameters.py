"""MNFL where all clients have the same architecture: parameters instead of predictions are mixed (section 5.2.1).

The appendix that defines this version is not part of the text; docs/methods/mnflparam.md says how it is read here.
Client n starts from its own mixture sum_m c_mn w^m, which the server keeps, and trains; the collaborative loss is the
squared distance between mixture and trained model, per parameter. With c = 1/N it is FedAvg with a uniform average.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from ..federation import Federation, per_client
from ..method import Info, Model, register
from ..parts.local import Local, fit, weights_of
from ..parts.norms import parameter_names
from ..parts.similarity import Coefficients, gram_matrix, gram_slope, learn, mixtures
from ..server import Server
from ..task import Client, task
from ..wire import Weights
from .baselines import score_own
from .coefficients import block, note, shares, uniform_matrix, with_block
from .local_update import Update


@task("personal_update")
def personal_update(client: Client, weights: Weights, local: Local) -> Update:
    """Train the received model, keep the result as the client's own, and send it."""
    model = client.model(weights)
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    client.state["model"] = trained = weights_of(model)
    return Update(trained)


@register("mnflparam")
@dataclass(frozen=True)
class MNFLParameters:
    """Personal models of one architecture that are mixed by learned coefficients."""

    local: Local = field(default_factory=lambda: Local(epochs=20, batch=128, lr=0.005))  # E, eta_1
    coefficients: Coefficients = field(default_factory=Coefficients)  # eta_3, lambda, rho
    order: Literal["paper", "code"] = "paper"  # mix with the old coefficients, or learn them first

    info: ClassVar[Info] = Info(
        title="MNFL, parameter version",
        paper="Beikmohammadi et al.; Zhang et al., NeurIPS 2021",
        models="one architecture",
        wire="model down, model up",
        public="none",
        state="its model",
        privacy="individual replies",
    )
    personal: ClassVar = score_own

    @dataclass(frozen=True)
    class State:
        c: Tensor  # row m: giver, column n: receiver
        start: dict[str, Weights]  # from which each client trains next; those who never took part: the initial model

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(uniform_matrix(fed), {})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        c, start = state.c, state.start
        initial = server.init(server.architectures[0])
        sent = per_client(lambda k: start.get(k, initial))
        w = {k: r.weights for k, r in fed.map(personal_update, fed.sample(), weights=sent, local=self.local).items()}
        S, old = list(w), c
        c = with_block(c, S, self.learned(block(c, S, fed), w, fed, server), fed)  # eq. (7)
        mixed = mixtures(block(old if self.order == "paper" else c, S, fed), list(w.values()))  # sum_m c_mn w^m
        note(c, fed, server)
        return self.State(c, start | dict(zip(S, mixed, strict=True)))

    def learned(self, c: Tensor, w: dict[str, Weights], fed: Federation, server: Server) -> Tensor:
        """Eq. (7) with the loss ||sum_m c_mn w^m - w^n||^2 / 2p: buffers are mixed, but do not count in it."""
        names = parameter_names(server.template(server.architectures[0]))
        models = list(w.values())
        p = sum(models[0][n].numel() for n in names)
        slope = partial(gram_slope, gram_matrix(models, names), p)
        return learn(c, slope, shares(list(w), fed), len(fed.clients), self.coefficients)

    def models(self, state: State) -> dict[str, Model]:
        return {}
