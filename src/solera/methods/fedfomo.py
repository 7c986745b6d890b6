"""FedFomo (Zhang et al., ICLR 2021): every client mixes other clients' models that lower its own loss.

The server forwards individual uploads to the clients that gained from them before. A client weighs each model by how
much it lowers the loss on held-out samples, relative to its distance, and trains the mixture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from ..core.federation import Federation, per_client
from ..core.randomness import seed_from
from ..core.settings import PositiveInt, Share
from ..core.task import Client, Data, task
from ..core.tensors import Weights, subset, take, weights_of
from ..core.wire import like, sized
from ..method import About, Traits, register
from ..scenario.server import Server
from ..train.aggregate import weighted_mean
from ..train.fitting import Local, evaluate, fit
from ..train.norms import parameter_names
from .steps.personal import OnClients


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The client's model, and the gain from each of the models it received."""

    weights: Weights = like("weights")
    gains: Tensor = sized("offered")


@task("mix_and_train")
def mix_and_train(
    client: Client,
    weights: Weights,
    others: list[Weights],
    offered: int,
    local: Local,
    validation: float,
    split_seed: int,
) -> Trained:
    """Move from the model before the last training towards the better of the received models and the own one; train.

    The first `offered` of [weights, *others] are other clients' models; with 0, `weights` only defines the shape.
    """
    train, kept = split(client, validation, split_seed)
    first = client.model()
    theta = client.state.get("start") or weights_of(first)
    own = [client.state["model"]] if "model" in client.state else []
    candidates = own + [weights, *others][:offered]
    losses = [evaluate(client.model(w), kept.inputs, kept.labels).loss for w in [theta, *candidates]]
    distances = [distance(w, theta, parameter_names(first)) for w in candidates]
    gains = gains_of(losses[0], losses[1:], distances)
    theta = step_towards(theta, candidates, gains)
    model = client.model(theta)
    fit(model, train.inputs, train.labels, local, client.seed)
    trained = weights_of(model)
    client.state["start"], client.state["model"] = theta, trained
    return Trained(weights=trained, gains=gains[len(own) :].float())


def split(client: Client, validation: float, seed: int) -> tuple[Data, Data]:
    """Split the client's training samples in two: for training, and for validation. The same in every round."""
    data, n = client.train, len(client.train)
    if n < 2:
        return data, data
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed_from(seed, client.id)))
    held = min(max(1, int(validation * n + 0.5)), n - 1)
    train, kept = order[held:].sort().values, order[:held].sort().values
    parts = [Data(subset(data.inputs, rows), take(data.labels, rows)) for rows in (train, kept)]
    return parts[0], parts[1]


Part = Annotated[float, Gt(0), Lt(1)]


@register("fedfomo")
@dataclass(frozen=True)
class FedFomo(OnClients):
    """Personal models. Each client mixes the models that lower its own loss."""

    local: Local = field(default_factory=lambda: Local(epochs=5, batch=50, lr=0.1))  # E
    lr_decay: Share = 0.99  # factor on local.lr, each round
    M: PositiveInt = 5  # how many other clients' models a client receives
    epsilon: Share = 0.3  # probability that one of them is chosen at random, not by affinity
    epsilon_decay: Share = 0.05  # subtracted from epsilon each round, down to 0
    validation: Part = 0.2  # share of a client's training samples held out to compare models

    about: ClassVar[About] = About(
        title="FedFomo",
        paper="Zhang et al., ICLR 2021",
        wire="M other clients' models down, model and M numbers up",
        state="its model, before and after its last training",
        privacy="and clients receive other clients' models",
    )

    @dataclass(frozen=True)
    class State:
        models: dict[str, Weights]  # client -> the last model it sent
        affinity: dict[str, dict[str, float]]  # P: receiver -> giver -> sum of gains; missing: 0

    def traits(self) -> Traits:
        return Traits(personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({}, {})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        S = fed.sample()
        givers = {k: self.choose(k, state, fed) for k in S}
        initial = {A: server.init(A) for A in server.architectures}
        sent = {k: [state.models[m] for m in givers[k]] or [initial[fed.architecture(k)]] for k in S}
        replies = fed.map(
            mix_and_train,
            S,
            weights=per_client(lambda k: sent[k][0]),
            others=per_client(lambda k: sent[k][1:]),
            offered=per_client(lambda k: len(givers[k])),
            local=replace(self.local, lr=self.local.lr * self.lr_decay**fed.round),
            validation=self.validation,
            split_seed=seed_from(fed.run_seed, "validation split"),
        )
        affinity = dict(state.affinity)
        for k, reply in replies.items():
            row = affinity.get(k, {})
            affinity[k] = row | {m: row.get(m, 0.0) + g for m, g in zip(givers[k], reply.gains.tolist(), strict=True)}
        return self.State(state.models | {k: reply.weights for k, reply in replies.items()}, affinity)

    def choose(self, k: str, state: State, fed: Federation) -> list[str]:
        """The clients whose models client k receives: those with the highest affinity, and some at random."""
        known = [m for m in fed.clients if m in state.models and m != k and fed.architecture(m) == fed.architecture(k)]
        scores = [state.affinity.get(k, {}).get(m, 0.0) for m in known]
        generator = torch.Generator().manual_seed(fed.seed("givers", k))
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * fed.round)
        return [known[i] for i in epsilon_greedy(scores, self.M, epsilon, generator)]


# ---- first-order model mixing ------------------------------------------------------------------------


LIMIT = 1e6  # upper bound of a gain: an infinite loss would make sums infinite


def gains_of(loss: float, losses: Sequence[float], distances: Sequence[float]) -> Tensor:
    """(L(theta) - L(theta_m)) / ||theta_m - theta|| of every candidate m: how much a step towards it lowers the loss.

    A candidate at distance 0 has gain 0; one with a NaN loss has the lowest gain.
    """
    saved = (loss - torch.tensor(losses, dtype=torch.float64)).nan_to_num(-LIMIT)
    distance = torch.tensor(distances, dtype=torch.float64).nan_to_num(torch.inf)
    return torch.where(distance > 0, saved / distance, 0.0).clamp(-LIMIT, LIMIT)


def step_towards(theta: Weights, candidates: Sequence[Weights], gains: Tensor) -> Weights:
    """theta + sum_m w_m (theta_m - theta), where w_m are the positive gains divided by their sum; if none, theta.

    As the w_m sum to 1 this is sum_m w_m theta_m: buffers and counters are those of a weighted mean.
    """
    positive = gains.clamp_min(0)
    if not bool((positive > 0).any()):
        return theta
    return weighted_mean(candidates, (positive / positive.max()).tolist())


def distance(a: Weights, b: Weights, names: Sequence[str]) -> float:
    """||a - b|| over the tensors `names`."""
    return sum((a[n].double() - b[n].double()).square().sum().item() for n in names) ** 0.5


def epsilon_greedy(scores: Sequence[float], m: int, epsilon: float, generator: torch.Generator) -> list[int]:
    """m different positions (or all): each time the best remaining one, or with probability epsilon a random one.

    Ties are broken at random.
    """
    n = len(scores)
    random_order = torch.randperm(n, generator=generator).tolist()
    best_order = sorted(torch.randperm(n, generator=generator).tolist(), key=lambda i: -scores[i])
    chosen: list[int] = []
    for explore in (torch.rand(min(m, n), generator=generator) < epsilon).tolist():
        order = random_order if explore else best_order
        chosen.append(next(i for i in order if i not in chosen))
    return chosen
