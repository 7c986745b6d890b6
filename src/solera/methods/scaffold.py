"""SCAFFOLD (Karimireddy et al., ICML 2020), Algorithm 1: clients correct their drift with control variates.

Client k keeps c_k, an estimate of its own gradient; the server keeps c, their mean over all clients. Each local step
goes along g - c_k + c. Different architectures are separate federations that share nothing.

`scaffold-up` sends the model alone up: the server derives the change of c_k, so it sees single clients, but a quarter
less travels. That is exact only in real numbers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from ..core.federation import Federation, per_client
from ..core.settings import Positive, Problem
from ..core.task import Client, task
from ..core.tensors import Weights, beside, weights_of
from ..core.wire import like
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.aggregate import RunningMean
from ..train.fitting import Local, fit, gradient_of, planned_steps, sum_of_rates
from ..train.norms import has_batchnorm, parameter_names
from .steps.training import by_architecture, models_of

Option = Literal["I", "II"]


@dataclass(frozen=True)
class Delta:
    """The change by local training: of the model (parameters and buffers) and of the client's control variate."""

    weights: Weights = like("weights")
    control: Weights = like("control")


@dataclass(frozen=True)
class Move:
    """The change of the model by local training; the server derives the rest."""

    weights: Weights = like("weights")


@task("controlled_update")
def controlled_update(client: Client, weights: Weights, control: Weights, local: Local, option: Option) -> Delta:
    """Train with the corrected gradient; send the changes of the model and of the control variate."""
    dy, dc = train(client, weights, control, local, option)
    return Delta(dy, dc)  # line 13


@task("controlled_move")
def controlled_move(client: Client, weights: Weights, control: Weights, local: Local) -> Move:
    """The same with option II, sending only the change of the model."""
    dy, _ = train(client, weights, control, local, "II")
    return Move(dy)


def train(client: Client, x: Weights, c: Weights, local: Local, option: Option) -> tuple[Weights, Weights]:
    """The client's side, lines 7-14; option II divides by the sum of the step sizes, which is K eta_l."""
    data = client.train
    c_k = client.state.get("control") or {n: torch.zeros_like(t) for n, t in c.items()}
    model = client.model(x)  # line 7
    own, common = beside(model, c_k), beside(model, c)
    correct = lambda n, g: g - own[n] + common[n]  # noqa: E731
    done = fit(model, data.inputs, data.labels, local, client.seed, correct=correct)  # lines 8-11
    y = weights_of(model)
    if done.lr_sum == 0:  # no step: nothing was learned about the gradient
        new = c_k
    elif option == "I":
        new = gradient_of(client.model(x), data.inputs, data.labels, local.batch, client.seed)  # line 12 (i)
    else:
        new = {n: c_k[n] - c[n] + (x[n] - y[n]) / done.lr_sum for n in c}  # line 12 (ii)
    client.state["control"] = new  # line 14
    return {n: y[n] - x[n] for n in x}, {n: new[n] - c_k[n] for n in c}


@register("scaffold")
@dataclass(frozen=True)
class Scaffold(Method):
    """Averaging with control variates against client drift."""

    local: Local = field(default_factory=Local)
    option: Option = "II"  # update of a client's control variate: I, its gradient at x; II, from its steps
    server_lr: Positive = 1.0  # eta_g
    weighted: bool = False  # weigh the clients' models by examples; the paper does not
    allow_momentum: bool = False  # option II assumes plain SGD: c_k is then not a mean of gradients

    BESIDE: ClassVar = {"derive_dc": "another method: method.name = 'scaffold-up'"}
    about: ClassVar[About] = About(
        "SCAFFOLD", "Karimireddy et al., ICML 2020", "model and control variate down and up", "its control variate"
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # x
        control: dict[str, Weights]  # c, of parameters only
        clients: dict[str, int]  # N

    def traits(self) -> Traits:
        return Traits(replies="means", next_token=True)

    def problems(self) -> Iterator[Problem]:
        if (self.local.momentum or self.local.optimizer != "sgd") and not self.allow_momentum:
            yield "local needs plain SGD (momentum 0); set allow_momentum = true to try anyway"

    def init(self, fed: Federation, server: Server) -> State:
        x = {A: server.init(A) for A in server.architectures}
        c = {A: {n: torch.zeros_like(x[A][n]) for n in parameter_names(server.template(A))} for A in x}
        N = Counter(client.architecture for client in fed.clients.values() if client.num_examples)
        return self.State(x, c, {A: N[A] for A in x})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x, c, N = dict(state.weights), dict(state.control), state.clients
        S = fed.sample()  # line 4
        sent = {"weights": per_client(by_architecture(x, fed)), "control": per_client(by_architecture(c, fed))}
        mean = self.mean(S, sent, c, fed, server)  # line 16
        heard = Counter(fed.architecture(k) for k in S if k in fed.answered)
        for A, d in mean.items():
            share = heard[A] / N[A]
            step = {n: self.server_lr * t if n in c[A] else t for n, t in d.weights.items()}  # buffers: the mean
            x[A] = {n: t + step[n] for n, t in x[A].items()}  # line 17
            c[A] = {n: t + share * d.control[n] for n, t in c[A].items()}  # line 17
            server.event("variates", architecture=A, norm=norm(c[A]))
        return self.State(x, c, N)

    def mean(
        self, S: list[str], sent: dict[str, Any], c: dict[str, Weights], fed: Federation, server: Server
    ) -> dict[str, Delta]:
        """Clients S train; the mean change of each architecture. Control variates count once each, also where models
        are weighted, so that c stays the mean of all c_k."""
        how: dict[str, Any] = {"by": fed.architecture, "uniform": not self.weighted, "once": ("control",)}
        return fed.mean(controlled_update, S, **how, option=self.option, local=self.local, **sent)

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)


@register("scaffold-up")
@dataclass(frozen=True)
class ScaffoldUp(Scaffold):
    """SCAFFOLD whose clients send the model alone: the server derives the change of their control variates."""

    about: ClassVar[About] = replace(
        Scaffold.about, title="SCAFFOLD, model alone up", wire="model and control variate down, model up"
    )

    def traits(self) -> Traits:
        return replace(super().traits(), replies="individual")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.option == "I":
            yield "option = 'I': the server can derive the change with option = 'II' only"

    def mean(
        self, S: list[str], sent: dict[str, Any], c: dict[str, Weights], fed: Federation, server: Server
    ) -> dict[str, Delta]:
        """Line 16 from the moves alone: c_k+ - c_k = -c - dy / (K eta_l), and 0 for a client that took no step.

        K follows from the examples a client registered with, so that no client can claim another.
        """
        normalised = {A: has_batchnorm(server.template(A)) for A in c}
        sums: dict[str, tuple[RunningMean, RunningMean]] = {}
        for k, move in fed.map(controlled_move, S, local=self.local, **sent).items():
            A, n = fed.architecture(k), fed.num_examples(k)
            steps = planned_steps(self.local, n, normalised[A])
            lr_sum = sum_of_rates(self.local, steps, steps)
            dc = {a: -t - move.weights[a] / lr_sum if lr_sum else torch.zeros_like(t) for a, t in c[A].items()}
            dy_mean, dc_mean = sums.setdefault(A, (RunningMean(), RunningMean()))
            dy_mean.add(move.weights, fed.copies.get(k, 1) * (n if self.weighted else 1))
            dc_mean.add(dc, 1)
        return {A: Delta(dy.result(), dc.result()) for A, (dy, dc) in sorted(sums.items())}


def norm(variate: Weights) -> float:
    """The length of a control variate, which estimates a gradient."""
    return sum(float(t.double().square().sum()) for t in variate.values()) ** 0.5
