"""Local trainers, the first slot of the framework: how a group of clients trains one global model.

A trainer defines the task that clients run and its payload, and makes the group's new global model from the mean of
their replies. It sees means only, unless their average is a robust one. Every group may have a kind of its
own (`kinds`): the paper has K local trainers.
FedAvg, FedProx and FedAvgM are those of fedavg.py, SCAFFOLD is that of scaffold.py with option II; a test checks that a
single group gives the same bits.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

import torch

from ...core.federation import per_client
from ...core.randomness import seed_from
from ...core.settings import BelowOne, NonNegative, NonNegativeInt, Positive, Problem, settings
from ...core.task import Client, Task, task
from ...core.tensors import Weights
from ...train.aggregate import momentum_step, weighted_mean
from ...train.fitting import Local
from ..scaffold import Delta, train
from ..steps.screen import Combined
from ..steps.training import local_update

Group = tuple[str, int]  # (architecture, k): a global model and the clients that train it
Models = dict[Group, Weights]
R = TypeVar("R")


def flat(nested: dict[str, list[Weights]]) -> Models:
    """Models by group, from a state's lists by architecture."""
    return {(A, k): x for A, own in nested.items() for k, x in enumerate(own)}


def nest(models: Models) -> dict[str, list[Weights]]:
    """The inverse of `flat`."""
    nested: dict[str, list[Weights]] = {}
    for g in sorted(models):
        nested.setdefault(g[0], []).append(models[g])
    return nested


class Seeds:
    """The seeds of round t, also when its work is done later: those of `Federation.seed` in that round."""

    def __init__(self, run_seed: int, t: int):
        self.run_seed, self.t = run_seed, t

    def __call__(self, *key: Any) -> int:
        return seed_from(self.run_seed, self.t, *key)


@task("grouped_update")
def grouped_update(client: Client, weights: Weights, control: Weights, local: Local, variate: str) -> Delta:
    """SCAFFOLD's local training with the client's control variate named `variate`: one for each group, or shared."""
    kept = client.state.get(variate)
    inner = replace(client, state={"control": kept} if kept else {})
    dy, dc = train(inner, weights, control, local, "II")
    client.state[variate] = inner.state["control"]
    return Delta(dy, dc)


Kind = Literal["fedavg", "fedprox", "fedavgm", "scaffold"]


@settings
class LocalTrainer:
    """The built-in trainers, by name. An object of your own with the same methods can replace this one."""

    kind: Kind = "fedavg"
    average: Literal["default", Combined] = "default"  # default: by examples; scaffold: equal weights
    mu: NonNegative = 0.001  # fedprox: mu/2 ||w - w_t||^2
    momentum: BelowOne = 0.3  # fedavgm: beta
    shared_c: bool = False  # scaffold: one control variate for all groups of an architecture, not one for each
    kinds: tuple[Kind, ...] | None = None  # one for each of the K groups, instead of the same kind for all
    byzantine: NonNegativeInt = 1  # f: Byzantine clients of a group that trimmed_mean, krum and bulyan tolerate
    update_clip: Positive | None = None  # largest norm of a client's update, in multiples of its architecture's median

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.needs_client_models and "scaffold" in (self.kinds or [self.kind]):
            yield "kind = 'scaffold': its control variates have no average that bears lying clients, and no clipping"
        if self.kinds is not None and self.shared_c:
            yield "shared_c = true: groups of different kinds have no control variate to share; leave out kinds"

    def of(self, g: Group) -> "LocalTrainer":
        """The trainer of group g."""
        return self if self.kinds is None else replace(self, kind=self.kinds[g[1]], kinds=None)

    def misfits(self, local: Local) -> Iterator[str]:
        """Settings of local training that the trainer does not support."""
        if "scaffold" in (self.kinds or [self.kind]) and (local.momentum or local.optimizer != "sgd"):
            yield "method.local_trainer.kind = 'scaffold' needs plain SGD: set method.local.momentum = 0"

    @property
    def robust(self) -> bool:
        """Whether the group's average is a robust rule, not a mean."""
        return self.average not in ("default", "weighted", "uniform")

    @property
    def needs_client_models(self) -> bool:
        return self.robust or self.update_clip is not None

    @property
    def client_state(self) -> str:
        """A description of what a client keeps between rounds."""
        if "scaffold" not in (self.kinds or [self.kind]):
            return "nothing"
        return "its control variate" if self.shared_c else "a control variate for each group it was in"

    @property
    def uniform(self) -> bool:
        return self.average == "uniform" or (self.average == "default" and self.kind == "scaffold")

    @property
    def once(self) -> tuple[str, ...]:
        """The fields of a reply in which clients have equal weights, so that c stays the mean of all c_k."""
        return ("control",) if self.kind == "scaffold" else ()

    def owner(self, g: Group) -> Group:
        """The group whose server memory group g uses: its own, or the first group's for all."""
        return (g[0], 0) if self.kind == "scaffold" and self.shared_c else g

    def memory(self, g: Group, weights: Weights, parameters: Sequence[str]) -> Weights:
        """The initial server memory of a global model: a velocity, or the control variate c."""
        if self.kind in ("fedavg", "fedprox") or self.owner(g) != g:
            return {}
        return {n: torch.zeros_like(weights[n]) for n in parameters}

    def request(self, group: dict[str, Group], w: Models, memory: Models, local: Local) -> tuple[Task, dict[str, Any]]:
        """The task and its payload for the clients in `group`: each receives the model of its group."""
        payload: dict[str, Any] = {"weights": per_client(lambda k: w[group[k]]), "local": local}
        if self.kind == "scaffold":
            payload["control"] = per_client(lambda k: memory[self.owner(group[k])])
            names = {g: "control" if self.shared_c else f"control.{g[1]}" for g in group.values()}
            return grouped_update, payload | {"variate": per_client(lambda k: names[group[k]])}
        return local_update, payload | {"mu": self.mu if self.kind == "fedprox" else 0.0}

    def client_model(self, sent: Weights, reply: Any) -> Weights:
        """A client's model after training, from its reply."""
        return {n: t + reply.weights[n] for n, t in sent.items()} if self.kind == "scaffold" else reply.weights

    def update(self, sent: Weights, memory: Weights, mean: Any, share: float) -> tuple[Weights, Weights]:
        """The group's new global model and memory; `share` is the share of all clients that the mean is over."""
        if self.kind == "fedavgm":
            return momentum_step(sent, mean.weights, memory, self.momentum)
        if self.kind == "scaffold":
            c = {n: t + share * mean.control[n] for n, t in memory.items()}  # c <- c + (1/N) sum of dc
            return {n: t + mean.weights[n] for n, t in sent.items()}, c
        return mean.weights, memory


def mean_reply(replies: Sequence[R], n: Sequence[float], once: Collection[str]) -> R:
    """The weighted mean of individual replies, with the same bits as `fed.mean`."""
    names = [f.name for f in fields(replies[0])]  # type: ignore[arg-type]
    each = [1.0] * len(n)
    return type(replies[0])(
        **{f: weighted_mean([getattr(r, f) for r in replies], each if f in once else n) for f in names}
    )
