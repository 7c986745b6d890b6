"""Methods whose clients exchange predictions on public samples instead of weights: the tasks, and the server's part.

Every party holds the same public samples. The server sends the indices of a round's samples and the digest of the whole
set. The clients send their predictions. The server then sends the targets. The model itself stays on the client, under
"model" in its state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from ...core.errors import DataError
from ...core.federation import Federation, Replies
from ...core.randomness import seed_from
from ...core.task import Client, PublicRows, Task, Trains, task
from ...core.tensors import Inputs, weights_of
from ...core.wire import like, sized
from ...scenario.server import Server
from ...train.distill import divergence
from ...train.fitting import Diverged, Local, Objective, Score, evaluate, fit, logits_of, towards
from ...train.teachers import entropy

StudentNorm = Literal["train", "frozen"]
SUMS_TO_ONE = 1e-3  # tolerated distance of the sum of probabilities from 1

OnPublic = Annotated[Local, Trains(on="public")]


@dataclass(frozen=True)
class Drawn:
    """The public samples of a round, by index, and the digest of the whole set."""

    indices: PublicRows
    digest: str


def undecided(probs: Tensor, examples: int) -> Tensor:
    """Predictions of an untrained model."""
    return torch.full_like(probs, 1 / probs.shape[-1])


@dataclass(frozen=True)
class Predictions:
    """Class probabilities of public samples, one row per sample."""

    probs: Tensor = sized("drawn.indices", "classes", fill=undecided)


@dataclass(frozen=True)
class Assessed:
    """Predictions of public samples, and the model's loss and score on the client's own data."""

    loss: float  # mean cross-entropy on the client's private samples, L_n of MNFL's objective (4); 0 without samples
    test: Score  # on the client's own test split
    probs: Tensor = sized("drawn.indices", "classes", fill=undecided)


@dataclass(frozen=True)
class Reassessed:
    """The same after distillation."""

    loss: float
    test: Score
    probs: Tensor = like("targets", fill=undecided)


@dataclass(frozen=True)
class Probabilities:
    """The same for a mean over clients: each reply is validated when it arrives."""

    probs: Tensor = sized("indices", "classes", fill=undecided)

    def __post_init__(self) -> None:
        if not are_probabilities(self.probs):
            raise ValueError("predictions that are not probabilities")


@dataclass(frozen=True)
class Scores:
    """Logits of public samples, one row per sample, before any softmax. For a mean over clients."""

    logits: Tensor = sized("indices", "classes")


@dataclass(frozen=True)
class Done:
    """An empty reply. A dataclass, so that a task without results can be used in `mean` too."""


def are_probabilities(probs: Tensor) -> bool:
    """True if every row is a probability vector."""
    return not bool((probs < 0).any()) and not bool(((probs.sum(-1) - 1).abs() > SUMS_TO_ONE).any())


# ---- the client's part ------------------------------------------------------------------------------


@task("train_and_predict")
def train_and_predict(
    client: Client, local: Local, only_new: bool, drawn: Drawn, classes: int, temperature: float
) -> Predictions:
    """Train on private data (with `only_new`, only if the client has no model yet), then predict public samples."""
    _, probs = _answered(client, local, drawn, only_new, temperature)
    return Predictions(probs)


@task("train_and_assess")
def train_and_assess(
    client: Client, local: Local, only_new: bool, drawn: Drawn, classes: int, temperature: float
) -> Assessed:
    """The same, and evaluate the model before distillation."""
    model, probs = _answered(client, local, drawn, only_new, temperature)
    return Assessed(*_assessed(client, model), probs)


@task("train_and_answer")
def train_and_answer(client: Client, local: Local, indices: PublicRows, digest: str, classes: int) -> Probabilities:
    """Train on private data, then predict class probabilities of the public samples."""
    return Probabilities(_answered(client, local, Drawn(indices, digest), False, 1.0)[1])


@task("train_and_score")
def train_and_score(client: Client, local: Local, indices: PublicRows, digest: str, classes: int) -> Scores:
    """Train on private data, then predict logits of the public samples."""
    drawn = Drawn(indices, digest)
    model, inputs = _trained(client, local, drawn)
    remember(client, model, drawn)
    return Scores(scores_of(model, inputs))


@task("distil_locally")
def distil_locally(
    client: Client, targets: PublicRows, distil: OnPublic, temperature: float, student_norm: StudentNorm
) -> Done:
    """Fit the client's model to the targets of the samples it has just predicted."""
    distil_own(client, targets, distil, towards_targets(temperature, student_norm))
    return Done()


@task("distil_and_predict")
def distil_and_predict(
    client: Client, targets: PublicRows, distil: OnPublic, temperature: float, student_norm: StudentNorm
) -> Reassessed:
    """The same, and predict them again."""
    model, inputs = distil_own(client, targets, distil, towards_targets(temperature, student_norm))
    return Reassessed(*_assessed(client, model), _predict(model, inputs, temperature))


@task("distil_and_train")
def distil_and_train(
    client: Client, targets: PublicRows, distil: OnPublic, temperature: float, student_norm: StudentNorm, local: Local
) -> Score:
    """The same, then train on private data; returns the score on the client's own test split before that training."""
    model, _ = distil_own(client, targets, distil, towards_targets(temperature, student_norm))
    taught = evaluate(model, client.test.inputs, client.test.labels)
    train_after(client, model, local)
    return taught


def public_inputs(client: Client, drawn: Drawn) -> Tensor:
    """The inputs of the samples `drawn`; refused if the client's public set differs from the server's."""
    check_public(client, drawn.digest)
    return client.public[drawn.indices.long()]


def check_public(client: Client, digest: str) -> None:
    """Refuse to work if the client's public set is not the one with this digest."""
    if client.public is None:
        raise DataError(f"{client.id} holds no public data; this method needs the same set at every client")
    if client.public.digest != digest:
        raise DataError(
            f"{client.id} holds other public data (sha256 {client.public.digest[:12]}...) than the server "
            f"({digest[:12]}...): give every party the same set"
        )


def finite(answers: Tensor) -> Tensor:
    """A trained model's predictions; an error if they are not finite, so that the client keeps its old model."""
    if not bool(torch.isfinite(answers).all()):
        raise Diverged("predictions that are not finite; lower the learning rate or set clip")
    return answers


def scores_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """The logits of the samples, checked to be finite before they are sent."""
    return finite(logits_of(model, inputs).float())


def remember(client: Client, model: nn.Module, drawn: Drawn) -> None:
    """Keep the model and the indices of the predicted samples, so that they are sent only once."""
    client.state["model"] = weights_of(model)
    client.state["drawn"] = {"indices": drawn.indices}


def asked_inputs(client: Client) -> Tensor:
    """The inputs that the client predicted last; their indices are removed from its state."""
    return client.public[client.state.pop("drawn")["indices"].long()]


def distil_own(client: Client, targets: Tensor, distil: Local, objective: Objective) -> tuple[nn.Module, Tensor]:
    """Fit the client's model to targets of the samples it predicted last; returns the model and the samples."""
    inputs = asked_inputs(client)
    model = client.model(client.state["model"])
    fit(model, inputs, targets, distil, client.seed, objective)
    client.state["model"] = weights_of(model)
    return model, inputs


def train_after(client: Client, model: nn.Module, local: Local) -> None:
    """Train on private data at the end of a task, with a seed other than the client's, which the task has used."""
    fit(model, client.train.inputs, client.train.labels, local, seed_from(client.seed, "train"))
    client.state["model"] = weights_of(model)


def towards_targets(temperature: float = 1.0, student_norm: StudentNorm = "train") -> Objective:
    """KL(targets || softmax(logits / T)), mean over the batch. At T = 1 its gradient is that of cross-entropy with
    soft labels, from which it differs by the entropy of the targets."""
    return towards(lambda z, p: divergence(z, p, entropy(p), temperature), frozen=student_norm == "frozen")


def _trained(client: Client, local: Local, drawn: Drawn, only_new: bool = False) -> tuple[nn.Module, Tensor]:
    """The client's model after training, which it keeps, and the inputs of the samples `drawn`."""
    inputs = public_inputs(client, drawn)  # before any work
    own = client.state.get("model")
    model = client.model(own)
    if own is None or not only_new:
        fit(model, client.train.inputs, client.train.labels, local, client.seed)
    return model, inputs


def _answered(
    client: Client, local: Local, drawn: Drawn, only_new: bool, temperature: float
) -> tuple[nn.Module, Tensor]:
    model, inputs = _trained(client, local, drawn, only_new)
    probs = _predict(model, inputs, temperature)
    remember(client, model, drawn)
    return model, probs


def _assessed(client: Client, model: nn.Module) -> tuple[float, Score]:
    private = evaluate(model, client.train.inputs, client.train.labels)
    return private.loss, evaluate(model, client.test.inputs, client.test.labels)


def _predict(model: nn.Module, inputs: Tensor, temperature: float) -> Tensor:
    return finite((logits_of(model, inputs) / temperature).softmax(-1).float())


# ---- the server's part ------------------------------------------------------------------------------


def draw(size: int | None, fed: Federation, server: Server) -> Tensor:
    """The public samples of this round: `size` of them, or public.per_round."""
    if size == 0:
        return torch.empty(0, dtype=torch.int64)
    return server.public.round_indices(server.per_round if size is None else size, fed.seed("public"))


def participants(fed: Federation) -> list[str]:
    """The cohort. With full participation it includes clients without examples: they can learn from the others."""
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
    task: Task = train_and_predict,
) -> tuple[list[str], Tensor, Replies]:
    """Clients train and predict; the clients with valid predictions, the predictions, and the whole replies."""
    drawn = Drawn(indices.int(), server.public.digest)
    how: dict[str, Any] = {"local": local, "only_new": only_new, "temperature": temperature}
    replies = fed.map(task, clients, drawn=drawn, classes=server.num_classes, **how)
    return *usable(replies, fed), replies


def question(indices: Tensor, server: Server) -> dict[str, Any]:
    """The payload of a prediction task used in a mean: the samples, and the size of the reply."""
    return {"indices": indices.int(), "digest": server.public.digest, "classes": server.num_classes}


def answered(S: Sequence[str], fed: Federation) -> list[str]:
    """The clients of S whose replies are in the mean."""
    return [k for k in S if k in fed.answered]


def usable(replies: Replies, fed: Federation) -> tuple[list[str], Tensor]:
    """The clients with valid probability vectors, and these [clients, samples, classes]; the others are rejected."""
    for k in [k for k, reply in replies.items() if not are_probabilities(reply.probs)]:
        fed.reject(replies, k, "predictions that are not probabilities")
    return list(replies), torch.stack([reply.probs for reply in replies.values()])


def public_problems(name: str, size: int | None, server: Server) -> Iterator[str]:
    """Report reasons why this public data does not allow an exchange of predictions."""
    if server.public.fresh:
        yield f"{name}: all clients must see the same public samples: leave out public.fresh"
    if size is not None and not 0 <= size <= len(server.public):
        yield f"method.public_size = {size}, but there are {len(server.public)} public samples"
    _ = server.public.digest  # computed and cached before workers are forked, not in each worker


def label_problems(name: str, server: Server, way_out: str) -> Iterator[str]:
    """Report public labels without an output in the models."""
    labels = server.public.labels
    if labels is not None and int(labels.max()) >= server.num_classes:
        yield (
            f"{name}: public labels go up to {int(labels.max())}, but the models have {server.num_classes} outputs, "
            f"which public and private labels share: choose public.classes, or {way_out}"
        )
