"""Methods whose clients exchange predictions on public samples instead of weights: the tasks, and the server's half.

Every party holds the same public samples. Down go the indices of a round's samples and the digest of the whole set,
up goes what the client's model says about them, down again what it should have said. The model itself stays on the
client, under "model" in its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..federation import Federation, QuorumNotMet, Replies
from ..parts.distill import divergence
from ..parts.local import Fitted, Local, fit, is_finite, logits_of, weights_of
from ..parts.norms import train_mode
from ..parts.objectives import Objective
from ..parts.teachers import entropy
from ..randomness import seed_from
from ..server import Server
from ..task import Client, task
from ..wire import ConfigError, DataError, SoleraError

StudentNorm = Literal["train", "frozen"]


@dataclass(frozen=True)
class Drawn:
    """The public samples of a round, by index, and the digest of the set they are drawn from."""

    indices: Tensor
    digest: str


@dataclass(frozen=True)
class Predictions:
    """Class probabilities of public samples, a row for each."""

    probs: Tensor

    def __post_init__(self) -> None:
        if self.probs.ndim != 2 or self.probs.dtype != torch.float32:
            raise ValueError(f"predictions are rows of float32, not {tuple(self.probs.shape)} {self.probs.dtype}")


# ---- the client's half ------------------------------------------------------------------------------


@task
def train_and_predict(client: Client, local: Local, only_new: bool, drawn: Drawn, temperature: float) -> Predictions:
    """Train on private data (with `only_new`, just a client that has no model yet), then predict public samples."""
    inputs = _public_inputs(client, drawn)  # before any work
    own = client.state.get("model")
    model = client.model(own)
    if own is None or not only_new:
        done = fit(model, client.train.inputs, client.train.labels, local, client.seed)
        if done.stopped:
            raise SoleraError(
                "local training blew up (a loss above 1,000 or not a number); the model before it is kept"
            )
    probs = _predict(model, inputs, temperature)
    client.state["model"] = weights_of(model)
    client.state["drawn"] = {"indices": drawn.indices}  # so that they travel once
    return Predictions(probs)


@task
def distil_locally(
    client: Client, targets: Tensor, distil: Local, temperature: float, student_norm: StudentNorm
) -> None:
    """Fit the client's model to the targets of the samples it has just predicted."""
    _distil(client, targets, distil, temperature, student_norm)


@task
def distil_and_predict(
    client: Client, targets: Tensor, distil: Local, temperature: float, student_norm: StudentNorm
) -> Predictions:
    """The same, and predict them again."""
    model, inputs = _distil(client, targets, distil, temperature, student_norm)
    return Predictions(_predict(model, inputs, temperature))


@task
def distil_and_train(
    client: Client, targets: Tensor, distil: Local, temperature: float, student_norm: StudentNorm, local: Local
) -> None:
    """The same, and train on private data afterwards."""
    model, _ = _distil(client, targets, distil, temperature, student_norm)
    _keep(client, model, fit(model, client.train.inputs, client.train.labels, local, seed_from(client.seed, "train")))


def _public_inputs(client: Client, drawn: Drawn) -> Tensor:
    if client.public is None:
        raise DataError(f"{client.id} holds no public data; this method needs the same set at every client")
    if client.public.digest != drawn.digest:
        raise DataError(
            f"{client.id} holds other public data (sha256 {client.public.digest[:12]}...) than the server "
            f"({drawn.digest[:12]}...): give every party the same set"
        )
    return client.public[drawn.indices.long()]


def _predict(model: nn.Module, inputs: Tensor, temperature: float) -> Tensor:
    probs = (logits_of(model, inputs) / temperature).softmax(-1).float()
    if not bool(torch.isfinite(probs).all()):
        raise SoleraError("training ended in a model whose predictions are not finite; the one before it is kept")
    return probs


def _distil(
    client: Client, targets: Tensor, distil: Local, temperature: float, student_norm: StudentNorm
) -> tuple[nn.Module, Tensor]:
    inputs = client.public[client.state.pop("drawn")["indices"].long()]
    model = client.model(client.state["model"])
    done = fit(model, inputs, targets, distil, client.seed, _towards_targets(temperature, student_norm))
    return _keep(client, model, done), inputs


def _towards_targets(temperature: float, student_norm: StudentNorm) -> Objective:
    """KL(targets || softmax(logits / T)), mean over the batch."""

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        if student_norm == "frozen":
            train_mode(model, frozen=True)
        return divergence(model(inputs), targets, entropy(targets), temperature)

    return loss


def _keep(client: Client, model: nn.Module, done: Fitted) -> nn.Module:
    """The client's model is now this one, unless it has blown up: a model of its own would never recover."""
    weights = weights_of(model)
    if done.stopped or not is_finite(weights):
        return client.model(client.state["model"]).eval()
    client.state["model"] = weights
    return model


# ---- the server's half ------------------------------------------------------------------------------


def draw(size: int | None, fed: Federation, server: Server) -> Tensor:
    """The public samples of this round: `size` of them, or as many as public.per_round says."""
    if size == 0:
        return torch.empty(0, dtype=torch.int64)
    return server.public.round_indices(server.per_round if size is None else size, fed.seed("public"))


def participants(fed: Federation) -> list[str]:
    """The cohort. Where everybody takes part, so do clients without examples: they can learn from the others."""
    everybody = fed.config.fraction == 1 and not fed.config.replacement
    return list(fed.clients) if everybody else fed.sample()


def ask(
    clients: Sequence[str],
    indices: Tensor,
    temperature: float,
    local: Local,
    fed: Federation,
    server: Server,
    only_new: bool = False,
) -> tuple[list[str], Tensor]:
    """Have clients train and predict: those with usable predictions, and the predictions."""
    drawn = Drawn(indices.int(), server.public.digest)
    how = {"local": local, "only_new": only_new, "drawn": drawn, "temperature": temperature}
    return usable(fed.map(train_and_predict, clients, **how), len(indices), fed, server)


def usable(replies: Replies, samples: int, fed: Federation, server: Server) -> tuple[list[str], Tensor]:
    """Who sent a probability vector for each sample, and these [clients, samples, classes]; the others are noted."""
    fine = {}
    for k, reply in replies.items():
        probs = reply.probs
        if probs.shape != (samples, server.num_classes):
            reason = f"predictions {tuple(probs.shape)}, asked were {(samples, server.num_classes)}"
        elif bool((probs < 0).any()) or bool(((probs.sum(-1) - 1).abs() > 1e-3).any()):
            reason = "predictions that are no probabilities"
        else:
            fine[k] = probs
            continue
        server.event("client_rejected", client=k, reason=reason)
    if len(fine) < fed.config.min_replies:
        raise QuorumNotMet(f"round {fed.round}: {len(fine)} of {len(replies)} clients sent usable predictions")
    return list(fine), torch.stack(list(fine.values()))


def check_public(name: str, size: int | None, server: Server) -> None:
    """Refuse public data on which predictions cannot be exchanged."""
    if server.public is None:
        raise ConfigError(f"{name} exchanges predictions on public samples: set public.source")
    if server.public.fresh:
        raise ConfigError(f"{name}: all clients must see the same public samples; public.augment = 'draw' is not that")
    if size is not None and not 0 <= size <= len(server.public):
        raise ConfigError(f"{name}: public_size = {size}, but there are {len(server.public)} public samples")
    _ = server.public.digest  # computed once and kept: before workers are forked, not by each of them


def check_temperature(name: str, temperature: float) -> None:
    """Refuse what no softmax can be divided by."""
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"{name}: temperature = {temperature} must be positive")
