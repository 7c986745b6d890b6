"""Personal models: fine-tuning of a received model, and evaluation on the client's own test samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.federation import Federation, per_client
from ...core.settings import NonNegativeInt
from ...core.task import Client, task
from ...core.tensors import Inputs, Weights, copy_of, weights_of
from ...method import Exchange, Method, Model
from ...scenario.server import Server
from ...train.distill import divergence
from ...train.fitting import Local, Objective, Score, evaluate, fit, logits_of, minibatches
from ...train.norms import has_batchnorm
from ...train.teachers import Targets, by_position, represented, soft_targets

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Tuning:
    """The fine-tuning of a received model."""

    local: Local
    freeze_base: bool = False  # train only the head of a split model
    kd: float = 0.0  # weight of KL(received model || own), added to the cross-entropy


@task("fine_tune")
def fine_tune(client: Client, weights: Weights, tuning: Tuning) -> None:
    """Train the received model on the client's own data and keep it; nothing is sent back."""
    client.state["model"] = weights_of(_tuned(client, weights, tuning))


@task("score_tuned")
def score_tuned(client: Client, weights: Weights, tuning: Tuning, tuned: bool) -> Score:
    """Score the fine-tuned model on the client's test samples; before the end, a temporary copy is fine-tuned."""
    own = client.state.get("model") if tuned else None
    model = _tuned(client, weights, tuning) if own is None else client.model(own)
    return evaluate(model, client.test.inputs, client.test.labels)


@dataclass(frozen=True)
class FineTuned(Method):
    """A method at whose end every client fine-tunes the model of its architecture on its own data.

    Its state has `weights`, and `tuned`: whether the clients hold fine-tuned copies of these.
    """

    tune_epochs: NonNegativeInt = 5  # epochs of fine-tuning, otherwise as local training; 0: keep the common model

    @property
    def tuning(self) -> Tuning:
        """The fine-tuning of the received model."""
        return Tuning(replace(self.local, epochs=self.tune_epochs, steps=None))  # type: ignore[attr-defined]

    def finish(self, state: Any, fed: Federation, server: Server) -> Any:
        """Send every client the model of its architecture, also clients outside the last cohort."""
        fed.map(fine_tune, list(fed.clients), **tuning_payload(state.weights, self.tuning, fed))
        return replace(state, tuned=True)

    def personal(self, state: Any, fed: Federation) -> Exchange:
        return Exchange(score_tuned, {**tuning_payload(state.weights, self.tuning, fed), "tuned": state.tuned})


def tuning_payload(x: dict[str, Weights], tuning: Tuning, fed: Federation) -> dict[str, Any]:
    """The payload of the two tasks: for each client the model of its architecture."""
    return {"weights": per_client(lambda k: x[fed.architecture(k)]), "tuning": tuning}


def _tuned(client: Client, weights: Weights, tuning: Tuning) -> nn.Module:
    model: Any = client.model(weights)
    model.eval()
    inputs, labels = client.train.inputs, client.train.labels
    if len(labels) == 0:
        return model
    trained = model
    if tuning.freeze_base:  # the frozen body's output never changes: compute it once
        inputs, trained = represented(model, inputs), model.head
    if tuning.kd == 0:
        fit(trained, inputs, labels, tuning.local, client.seed)
    else:
        received = copy_of(trained)
        said = by_position(lambda x: soft_targets(logits_of(received, x)), inputs)
        objective = _anchored(labels, said, tuning.kd)
        fit(trained, inputs, torch.arange(len(labels)), tuning.local, client.seed, objective)
    return model


def _anchored(labels: Tensor, received: Callable[[Tensor, Tensor], Targets], kd: float) -> Objective:
    """Cross-entropy plus kd KL(softmax(received) || softmax(own)), of (model, inputs, their positions in the data)."""

    def objective(model: nn.Module, inputs: Tensor, positions: Tensor) -> Tensor:
        logits = model(inputs)
        probs, entropy = received(inputs, positions)
        distance = divergence(logits, probs, entropy)
        return F.cross_entropy(logits, labels[positions]) + kd * distance

    return objective


def scored(client: Client, weights: Weights | None) -> Score:
    """Score a model on the client's test samples; without a model no sample counts."""
    if weights is None:
        return Score(0, 0, 0.0)
    return evaluate(client.model(weights), client.test.inputs, client.test.labels)


@task("score_own")
def score_own(client: Client) -> Score:
    """Score the client's own model on its own test samples; no samples if it has no model yet."""
    return scored(client, client.state.get("model"))


@dataclass(frozen=True)
class OnClients(Method):
    """A method whose models stay on the clients, and so does all other state, unless it has a `State` of its own."""

    @dataclass(frozen=True)
    class State:
        rounds: int

    def init(self, fed: Federation, server: Server) -> Any:
        return self.State(0)

    def personal(self, state: Any, fed: Federation) -> Exchange | None:
        return Exchange(score_own)

    def models(self, state: Any) -> dict[str, Model]:
        return {}


@task("score_own_or_received")
def score_own_or_received(client: Client, weights: Weights) -> Score:
    """The same, but a client without its own model scores the received common model."""
    return scored(client, client.state.get("model", weights))


@task("train_alone")
def train_alone(client: Client, local: Local) -> None:
    """Continue to train the client's own model; it stays on the client."""
    model = client.model(client.state.get("model"))
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    client.state["model"] = weights_of(model)


def common_model(x: dict[str, Weights], fed: Federation) -> dict[str, Any]:
    """The payload of `score_own_or_received`: for each client the common model of its architecture."""
    return {"weights": per_client(lambda k: x[fed.architecture(k)])}


@task("score_received")
def score_received(client: Client, weights: Weights | None) -> Score:
    """Score the received model on the client's own test samples; None, for a client never sampled, counts no sample."""
    return scored(client, weights)


def batches(model: nn.Module, inputs: Inputs, labels: Tensor, cfg: Local, seed: int) -> Batches:
    """The minibatches `fit` trains on: with BatchNorm, those of one sample are skipped unless there is no other."""
    smallest = 2 if has_batchnorm(model) and min(cfg.batch, len(labels)) > 1 else 1
    return (b for b in minibatches(inputs, labels, cfg, seed) if len(b[1]) >= smallest)
