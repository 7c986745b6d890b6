"""MNFL for clients of one architecture: it mixes parameters instead of predictions (section 5.2.1).

The appendix that defines this version is not available; docs/methods/mnflparam.md describes our interpretation.
Client n trains from its own mixture sum_m c_mn w^m, which the server keeps. The collaborative loss is the squared
distance between mixture and trained model. With c = 1/N this is FedAvg with a uniform average. Sim-pFL and TopK-pFL, as
the paper's list of contributions describes them, compute c from the cosine of the clients' parameters instead.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.federation import Federation, per_client
from ..core.settings import PositiveInt
from ..core.task import Client, task
from ..core.tensors import Weights, weights_of
from ..core.wire import like
from ..method import About, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local, evaluate, fit
from ..train.norms import parameter_names
from ..train.similarity import SMALLEST, Coefficients, Loss, Reduction, by_cosine, by_rank, gram_matrix, learn, mixtures
from .steps.coefficients import block, note, note_objective, shares, uniform_matrix, with_block, with_columns
from .steps.personal import OnClients


@dataclass(frozen=True)
class Trained:
    """A client's own model after local training, and its loss on the client's private samples."""

    weights: Weights = like("weights")
    loss: float = 0.0


@task("personal_update")
def personal_update(client: Client, weights: Weights, local: Local) -> Trained:
    """Train the received model, keep the result as the client's own, and send it."""
    model = client.model(weights)
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    client.state["model"] = trained = weights_of(model)
    return Trained(trained, evaluate(model, client.train.inputs, client.train.labels).loss)


@register("mnflparam")
@dataclass(frozen=True)
class MNFLParameters(OnClients):
    """Personal models of one architecture that are mixed by learned coefficients."""

    local: Local = field(default_factory=lambda: Local(epochs=20, batch=128, lr=0.005))  # E, eta_1
    coefficients: Coefficients = field(default_factory=Coefficients)  # eta_3, lambda, rho
    order: Literal["paper", "code"] = "paper"  # mix with the old coefficients, or with the newly learned ones
    c_reduction: Reduction = "sum"  # of the loss over parameters; with mean, c hardly changes at the paper's rate
    rule: Literal["learned", "sim", "topk"] = "learned"  # sim, topk: by the cosine of parameters, for comparison
    k: PositiveInt = 5  # topk: whose models a client gets the mean of, its own included

    about: ClassVar[About] = About(
        title="MNFL, parameter version",
        paper="Beikmohammadi et al.; Zhang et al., NeurIPS 2021",
        wire="model down, model up",
        state="its model",
    )

    @dataclass(frozen=True)
    class State:
        c: Tensor  # row m: giver, column n: receiver
        start: dict[str, Weights]  # where each client starts next; without an entry: from the initial model

    def traits(self) -> Traits:
        return Traits(architectures="one", personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(uniform_matrix(fed), {})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        c, start = state.c, state.start
        initial = server.init(server.architectures[0])
        sent = per_client(lambda k: start.get(k, initial))
        replies = fed.map(personal_update, fed.sample(), weights=sent, local=self.local)
        w = {k: r.weights for k, r in replies.items()}
        if self.rule != "learned":
            return self.similar(state, w, fed, server)
        S, old, loss, share = list(w), c, self.collaborative(list(w.values()), server), shares(list(w), fed)
        c = with_block(c, S, learn(block(c, S, fed), loss.slope, share, len(c), self.coefficients), fed)  # eq. (7)
        mixed = mixtures(block(old if self.order == "paper" else c, S, fed), list(w.values()))  # sum_m c_mn w^m
        note(c, fed, server)
        private = sum(float(d) * r.loss for d, r in zip(share, replies.values(), strict=True))
        note_objective(block(c, S, fed), loss, share, private, self.coefficients, fed, server)  # eq. (4)
        return self.State(c, start | dict(zip(S, mixed, strict=True)))

    def similar(self, state: State, w: dict[str, Weights], fed: Federation, server: Server) -> State:
        """Mixtures by the cosine between the clients' parameters: of all clients, or of the k nearest."""
        S, cosine = list(w), gram_cosines(gram_matrix(list(w.values()), self.parameters(server)))
        weights = by_cosine(cosine) if self.rule == "sim" else by_rank(cosine, self.k)
        c = with_columns(state.c, S, weights, fed)
        note(c, fed, server)
        return self.State(c, state.start | dict(zip(S, mixtures(weights, list(w.values())), strict=True)))

    def parameters(self, server: Server) -> list[str]:
        """The names of the parameters: buffers are mixed, but do not count."""
        return list(parameter_names(server.template(server.architectures[0])))

    def collaborative(self, w: list[Weights], server: Server) -> Loss:
        """||sum_m c_mn w^m - w^n||^2 / 2, or the same per parameter."""
        names = self.parameters(server)
        parameters = sum(w[0][n].numel() for n in names)
        return gram_loss(gram_matrix(w, names), 1 if self.c_reduction == "sum" else parameters)


def gram_loss(gram: Tensor, size: int = 1) -> Loss:
    """||sum_m w_mn x_m - x_n||^2 / (2 size), from the inner products <x_m, x_n> alone."""

    def value(weights: Tensor) -> Tensor:
        off = weights - torch.eye(len(gram), dtype=gram.dtype)
        return (off * (gram @ off)).sum(0) / (2 * size)

    return Loss(value, lambda weights: (gram @ weights - gram) / size)


def gram_cosines(gram: Tensor) -> Tensor:
    """Cosine between every two clients' models, from their inner products; rounded as in `cosines`."""
    norm = gram.double().diagonal().sqrt().clamp_min(SMALLEST)
    return (gram.double() / norm[:, None] / norm).round(decimals=12)
