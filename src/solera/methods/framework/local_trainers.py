"""Local trainers, the first slot of the framework: how a group of clients trains one global model.

A trainer defines the task that clients run and its payload, and makes the group's new global model from the mean of
their replies. FedAvg, FedProx and FedAvgM are those of fedavg.py, SCAFFOLD is that of scaffold.py with option II; a
test checks that a single group gives the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

import torch

from ...core.federation import Federation, Replies, per_client
from ...core.settings import BelowOne, NonNegative, Problem, Slot, settings
from ...core.task import Client, Task, task
from ...core.tensors import Weights
from ...scenario.server import Server
from ...train.aggregate import momentum_step, weighted_mean
from ...train.fitting import Local
from ..scaffold import Delta, train
from ..steps.screen import Screen
from ..steps.training import Update, local_update
from .grouping import Group, Models


@task("grouped_update")
def grouped_update(client: Client, weights: Weights, control: Weights, local: Local, variate: str) -> Delta:
    """SCAFFOLD's local training with the client's control variate named `variate`: one for each group, or shared."""
    kept = client.state.get(variate)
    inner = replace(client, state={"control": kept} if kept else {})
    dy, dc = train(inner, weights, control, local, "II")
    client.state[variate] = inner.state["control"]
    return Delta(dy, dc)


@settings
class LocalTrainer(Slot):
    """FedAvg: clients train the model of their group, and their mean is the group's new one."""

    kind: str = field(default="fedavg", init=False)

    RENAMED: ClassVar = {
        "average": "method.screen.average (of scaffold: weighted)",
        "byzantine": "method.screen.max_byzantine",
        "update_clip": "method.screen.update_clip",
        "kinds": "method.local_trainer.parts, with kind = 'per-group'",
    }
    client_state: ClassVar[str] = "nothing"  # what a client keeps between rounds, as text
    products: ClassVar[bool] = True  # averages are of whole models: not of changes, and without momentum
    sends_models: ClassVar[bool] = True  # replies have whole models, which a screen can compare
    once: ClassVar[tuple[str, ...]] = ()  # the fields of a reply in which clients count the same

    def of(self, g: Group) -> "LocalTrainer":
        """The trainer of group g."""
        return self

    def misfits(self, local: Local) -> Iterator[str]:
        """Settings of local training that the trainer does not support."""
        yield from ()

    def uniform(self, screen: Screen) -> bool:
        """True if clients have equal weights in the group's mean instead of weights by examples."""
        return screen.average == "uniform"

    def owner(self, g: Group) -> Group:
        """The group whose server memory group g uses."""
        return g

    def memory(self, g: Group, weights: Weights, parameters: Sequence[str]) -> Weights:
        """The initial server memory of a global model."""
        return {}

    def request(self, group: dict[str, Group], w: Models, memory: Models, local: Local) -> tuple[Task, dict[str, Any]]:
        """The task and its payload for the clients in `group`: each receives the model of its group."""
        return local_update, {"weights": per_client(lambda k: w[group[k]]), "local": local, "mu": 0.0}

    def client_model(self, sent: Weights, reply: Any) -> Weights:
        """A client's model after training, from its reply."""
        return reply.weights

    def mean(self, replies: Mapping[str, Any], x: Replies, screen: Screen, fed: Federation, server: Server) -> Any:
        """The mean reply of a group's clients; x has the models of all clients, as screened."""
        return Update(screen.average_of(x, list(replies), fed, server))

    def update(self, sent: Weights, memory: Weights, mean: Any, share: float) -> tuple[Weights, Weights]:
        """The group's new global model and memory; `share` is the share of all clients that the mean is over."""
        return mean.weights, memory


@settings
class FedProxTrainer(LocalTrainer):
    """FedProx: the clients' objective has a proximal term."""

    kind: str = field(default="fedprox", init=False)
    mu: NonNegative = 0.001  # mu/2 ||w - w_t||^2

    def request(self, group: dict[str, Group], w: Models, memory: Models, local: Local) -> tuple[Task, dict[str, Any]]:
        asked, payload = super().request(group, w, memory, local)
        return asked, payload | {"mu": self.mu}


@settings
class FedAvgMTrainer(LocalTrainer):
    """FedAvgM: the group's model moves with momentum."""

    kind: str = field(default="fedavgm", init=False)
    momentum: BelowOne = 0.3  # beta

    products = False

    def memory(self, g: Group, weights: Weights, parameters: Sequence[str]) -> Weights:
        return {n: torch.zeros_like(weights[n]) for n in parameters}  # the velocity

    def update(self, sent: Weights, memory: Weights, mean: Any, share: float) -> tuple[Weights, Weights]:
        return momentum_step(sent, mean.weights, memory, self.momentum)


@settings
class ScaffoldTrainer(LocalTrainer):
    """SCAFFOLD: clients correct their drift with control variates, which the server keeps as well."""

    kind: str = field(default="scaffold", init=False)
    shared_c: bool = False  # one control variate for all groups of an architecture, not one for each
    weighted: bool = False  # weigh the clients' models by examples; the paper does not

    products = sends_models = False
    once = ("control",)  # so that c stays the mean of all c_k

    @property
    def client_state(self) -> str:  # type: ignore[override]
        return "its control variate" if self.shared_c else "a control variate for each group it was in"

    def misfits(self, local: Local) -> Iterator[str]:
        if local.momentum or local.optimizer != "sgd":
            yield "method.local_trainer.kind = 'scaffold' needs plain SGD: set method.local.momentum = 0"

    def uniform(self, screen: Screen) -> bool:
        return not self.weighted

    def owner(self, g: Group) -> Group:
        return (g[0], 0) if self.shared_c else g

    def memory(self, g: Group, weights: Weights, parameters: Sequence[str]) -> Weights:
        return {n: torch.zeros_like(weights[n]) for n in parameters} if self.owner(g) == g else {}  # c

    def request(self, group: dict[str, Group], w: Models, memory: Models, local: Local) -> tuple[Task, dict[str, Any]]:
        names = {g: "control" if self.shared_c else f"control.{g[1]}" for g in group.values()}
        return grouped_update, {
            "weights": per_client(lambda k: w[group[k]]),
            "local": local,
            "control": per_client(lambda k: memory[self.owner(group[k])]),
            "variate": per_client(lambda k: names[group[k]]),
        }

    def client_model(self, sent: Weights, reply: Any) -> Weights:
        return {n: t + reply.weights[n] for n, t in sent.items()}

    def mean(self, replies: Mapping[str, Any], x: Replies, screen: Screen, fed: Federation, server: Server) -> Delta:
        n = [float(fed.copies.get(k, 1) * (fed.num_examples(k) if self.weighted else 1)) for k in replies]
        dc = weighted_mean([r.control for r in replies.values()], [1.0] * len(n))
        return Delta(weighted_mean([r.weights for r in replies.values()], n), dc)

    def update(self, sent: Weights, memory: Weights, mean: Any, share: float) -> tuple[Weights, Weights]:
        c = {n: t + share * mean.control[n] for n, t in memory.items()}  # c <- c + (1/N) sum of dc
        return {n: t + mean.weights[n] for n, t in sent.items()}, c


@settings
class PerGroup(LocalTrainer):
    """A trainer of its own for each of the K groups: the paper has K local trainers."""

    kind: str = field(default="per-group", init=False)
    parts: tuple[LocalTrainer, ...] = ()  # one for each group, in order

    @property
    def client_state(self) -> str:  # type: ignore[override]
        return next((p.client_state for p in self.parts if p.client_state != "nothing"), "nothing")

    @property
    def products(self) -> bool:  # type: ignore[override]
        return all(part.products for part in self.parts)

    @property
    def sends_models(self) -> bool:  # type: ignore[override]
        return all(part.sends_models for part in self.parts)

    def problems(self) -> Iterator[Problem]:
        if any(getattr(part, "shared_c", False) for part in self.parts):
            yield "parts: groups of different kinds have no control variate to share; leave out shared_c"

    def of(self, g: Group) -> LocalTrainer:
        return self.parts[g[1]]

    def misfits(self, local: Local) -> Iterator[str]:
        for part in self.parts:
            yield from part.misfits(local)
