"""Local trainers, the first slot of the framework: how a group of clients trains one global model.

A trainer says which task clients run and with what payload, and turns the mean of their replies into the group's new
global model. It sees means only. FedAvg, FedProx and FedAvgM are those of fedavg.py, SCAFFOLD that of scaffold.py with
option II; a test holds a single group to them, bit for bit.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch

from ...federation import per_client
from ...parts.aggregate import momentum_step, weighted_mean
from ...parts.local import Local
from ...randomness import seed_from
from ...settings import BelowOne, NonNegative, settings
from ...task import Client, Task, task
from ...tensors import Weights
from ..common.training import local_update
from ..scaffold import Delta, train

Group = tuple[str, int]  # (architecture, k): a global model and the clients who train it
Models = dict[Group, Weights]
R = TypeVar("R")


def flat(nested: dict[str, list[Weights]]) -> Models:
    """Models by group, from the lists by architecture that a state holds."""
    return {(A, k): x for A, own in nested.items() for k, x in enumerate(own)}


def nest(models: Models) -> dict[str, list[Weights]]:
    """The other way round."""
    nested: dict[str, list[Weights]] = {}
    for g in sorted(models):
        nested.setdefault(g[0], []).append(models[g])
    return nested


class Seeds:
    """The seeds of round t, whenever its work is done: those of `Federation.seed` in that round."""

    def __init__(self, run_seed: int, t: int):
        self.run_seed, self.t = run_seed, t

    def __call__(self, *key: Any) -> int:
        return seed_from(self.run_seed, self.t, *key)


@task("grouped_update")
def grouped_update(client: Client, weights: Weights, control: Weights, local: Local, variate: str) -> Delta:
    """SCAFFOLD's local training with the client's control variate called `variate`: one for each group, or shared."""
    kept = client.state.get(variate)
    inner = replace(client, state={"control": kept} if kept else {})
    dy, dc = train(inner, weights, control, local, "II")
    client.state[variate] = inner.state["control"]
    return Delta(dy, dc)


@settings
class LocalTrainer:
    """The trainers there are by name. An object of your own with the same methods can take this one's place."""

    kind: Literal["fedavg", "fedprox", "fedavgm", "scaffold"] = "fedavg"
    average: Literal["default", "weighted", "uniform"] = "default"  # by examples; scaffold: every client the same
    mu: NonNegative = 0.001  # fedprox: mu/2 ||w - w_t||^2
    momentum: BelowOne = 0.3  # fedavgm: beta
    shared_c: bool = False  # scaffold: one control variate for all groups of an architecture, not one for each

    needs_client_models: ClassVar[bool] = False

    def misfits(self, local: Local) -> Iterator[str]:
        """Local training that the trainer is not made for."""
        if self.kind == "scaffold" and (local.momentum or local.optimizer != "sgd"):
            yield "method.local_trainer.kind = 'scaffold' needs plain SGD: set method.local.momentum = 0"

    @property
    def client_state(self) -> str:
        """What a client keeps between rounds, in words."""
        if self.kind != "scaffold":
            return "nothing"
        return "its control variate" if self.shared_c else "a control variate for each group it was in"

    @property
    def uniform(self) -> bool:
        return self.average == "uniform" or (self.average == "default" and self.kind == "scaffold")

    @property
    def once(self) -> tuple[str, ...]:
        """The fields of a reply in which every client counts once, so that c stays the mean of all c_k."""
        return ("control",) if self.kind == "scaffold" else ()

    def owner(self, g: Group) -> Group:
        """Whose memory on the server group g uses: its own, or the first group's for all."""
        return (g[0], 0) if self.kind == "scaffold" and self.shared_c else g

    def memory(self, g: Group, weights: Weights, parameters: Sequence[str]) -> Weights:
        """What the server keeps beside a global model, at the start: a velocity, or the control variate c."""
        if self.kind in ("fedavg", "fedprox") or self.owner(g) != g:
            return {}
        return {n: torch.zeros_like(weights[n]) for n in parameters}

    def request(self, group: dict[str, Group], w: Models, memory: Models, local: Local) -> tuple[Task, dict[str, Any]]:
        """The task and its payload for the clients in `group`: each gets the model of its group."""
        payload: dict[str, Any] = {"weights": per_client(lambda k: w[group[k]]), "local": local}
        if self.kind == "scaffold":
            payload["control"] = per_client(lambda k: memory[self.owner(group[k])])
            names = {g: "control" if self.shared_c else f"control.{g[1]}" for g in group.values()}
            return grouped_update, payload | {"variate": per_client(lambda k: names[group[k]])}
        return local_update, payload | {"mu": self.mu if self.kind == "fedprox" else 0.0}

    def client_model(self, sent: Weights, reply: Any) -> Weights:
        """A client's model after training, from its reply alone."""
        return {n: t + reply.weights[n] for n, t in sent.items()} if self.kind == "scaffold" else reply.weights

    def update(self, sent: Weights, memory: Weights, mean: Any, share: float) -> tuple[Weights, Weights]:
        """The group's new global model and memory; `share` is how many of all clients the mean is of, each once."""
        if self.kind == "fedavgm":
            return momentum_step(sent, mean.weights, memory, self.momentum)
        if self.kind == "scaffold":
            c = {n: t + share * mean.control[n] for n, t in memory.items()}  # c <- c + (1/N) sum of dc
            return {n: t + mean.weights[n] for n, t in sent.items()}, c
        return mean.weights, memory


def mean_reply(replies: Sequence[R], n: Sequence[float], once: Collection[str]) -> R:
    """The weighted mean of replies that came one by one: the bits of `fed.mean`."""
    names = [f.name for f in fields(replies[0])]  # type: ignore[arg-type]
    each = [1.0] * len(n)
    return type(replies[0])(
        **{f: weighted_mean([getattr(r, f) for r in replies], each if f in once else n) for f in names}
    )
