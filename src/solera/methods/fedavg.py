"""Averaging of client models: FedAvg, FedProx and FedAvgM.

FedAvg: McMahan et al., AISTATS 2017, Algorithm 1. FedProx: Li et al., MLSys 2020, Algorithm 2. FedAvgM: Hsu et al.,
2019, as FedDF states it in its appendix C.2.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..core.federation import Federation, per_client
from ..core.settings import BelowOne, NonNegative, Share
from ..core.tensors import Weights
from ..method import About, Traits, register
from ..scenario.server import Server
from ..train.aggregate import momentum_step
from ..train.fitting import Local
from ..train.norms import parameter_names
from .steps.training import Averaging, local_update


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Averaging):
    """Federated averaging."""

    about: ClassVar[About] = About("FedAvg", "McMahan et al., AISTATS 2017", "model down, model up", "nothing")

    def traits(self) -> Traits:
        return Traits(replies="means", next_token=True, products=True)

    def round(self, state: Averaging.State, fed: Federation, server: Server) -> Averaging.State:
        x = state.weights
        S = fed.sample()  # S_t <- random set of m clients
        mean = self.mean(local_update, x, S, fed, mu=0.0)  # w_{t+1} <- sum_k n_k/n w^k_{t+1}
        return self.State(x | {A: mean[A].weights for A in mean})


@register("fedprox")
@dataclass(frozen=True)
class FedProx(Averaging):
    """FedAvg with a proximal term in the clients' objective. Stragglers may train for fewer epochs."""

    mu: NonNegative = 0.01  # mu/2 ||w - w_t||^2
    straggler_fraction: Share = 0.0  # of the cohort; stragglers train one epoch or more, but not all epochs

    about: ClassVar[About] = replace(FedAvg.about, title="FedProx", paper="Li et al., MLSys 2020")

    def traits(self) -> Traits:
        return Traits(replies="means", next_token=True, products=True)

    def round(self, state: Averaging.State, fed: Federation, server: Server) -> Averaging.State:
        x = state.weights
        S = fed.sample()
        work = self.work(S, fed)
        mean = self.mean(local_update, x, S, fed, local=per_client(work.__getitem__), mu=self.mu)
        return self.State(x | {A: mean[A].weights for A in mean})

    def work(self, S: list[str], fed: Federation) -> dict[str, Local]:
        """The local training of each client in this round: stragglers get a random part of the epochs (or steps)."""
        count = int(self.straggler_fraction * len(S) + 0.5)
        slow = {S[i] for i in torch.randperm(len(S), generator=fed.rng)[:count].tolist()}
        unit = "epochs" if self.local.steps is None else "steps"
        full = getattr(self.local, unit)

        def part() -> Local:
            done = int(torch.randint(1, max(full, 2), (), generator=fed.rng))
            return replace(self.local, **{unit: min(done, full)})

        return {k: part() if k in slow else self.local for k in S}


@register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(Averaging):
    """FedAvg with momentum on the server."""

    momentum: BelowOne = 0.3  # beta

    about: ClassVar[About] = replace(FedAvg.about, title="FedAvgM", paper="Hsu et al., 2019")

    @dataclass(frozen=True)
    class State(Averaging.State):
        velocity: dict[str, Weights]  # v, for parameters only

    def traits(self) -> Traits:
        return Traits(replies="means", next_token=True, products=self.momentum == 0)

    def init(self, fed: Federation, server: Server) -> State:
        x = {A: server.init(A) for A in server.architectures}
        v = {A: {n: torch.zeros_like(x[A][n]) for n in parameter_names(server.template(A))} for A in x}
        return self.State(x, v)

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x, v = dict(state.weights), dict(state.velocity)
        mean = self.mean(local_update, x, fed.sample(), fed, mu=0.0)
        for A in mean:
            x[A], v[A] = momentum_step(x[A], mean[A].weights, v[A], self.momentum)  # v <- beta v + dx; x <- x - v
        return self.State(x, v)
