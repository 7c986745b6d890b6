"""Methods whose clients exchange predictions on public samples instead of weights: the tasks, and the server's half.

Every party holds the same public samples. Down go the indices of a round's samples and the digest of the whole set,
up goes what the client's model says about them, down again what it should have said. The model itself stays on the
client, under "model" in its state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...errors import DataError
from ...federation import Federation, Replies
from ...parts.distill import divergence
from ...parts.local import Diverged, Local, Score, evaluate, fit, logits_of
from ...parts.objectives import Objective, towards
from ...parts.teachers import entropy
from ...randomness import seed_from
from ...server import Server
from ...task import Client, task
from ...tensors import Inputs, weights_of
from ...wire import like, sized

StudentNorm = Literal["train", "frozen"]
SUMS_TO_ONE = 1e-3  # how far from 1 the sum of probabilities may be


@dataclass(frozen=True)
class Drawn:
    """The public samples of a round, by index, and the digest of the set they are drawn from."""

    indices: Tensor
    digest: str


def undecided(probs: Tensor, examples: int) -> Tensor:
    """Predictions of a model that has learned nothing."""
    return torch.full_like(probs, 1 / probs.shape[-1])


@dataclass(frozen=True)
class Predictions:
    """Class probabilities of public samples, a row for each."""

    probs: Tensor = sized("drawn.indices", "classes", fill=undecided)


@dataclass(frozen=True)
class Assessed:
    """Predictions of public samples, and how good the model that made them is at home."""

    loss: float  # mean cross-entropy over the client's private samples, L_n of MNFL's objective (4); 0 without any
    test: Score  # on the client's own test split
    probs: Tensor = sized("drawn.indices", "classes", fill=undecided)


@dataclass(frozen=True)
class Reassessed:
    """The same after the model was taught."""

    loss: float
    test: Score
    probs: Tensor = like("targets", fill=undecided)


@dataclass(frozen=True)
class Probabilities:
    """The same where only a mean of all clients is wanted: whatever is wrong must show on arrival."""

    probs: Tensor = sized("indices", "classes", fill=undecided)

    def __post_init__(self) -> None:
        if not are_probabilities(self.probs):
            raise ValueError("predictions that are no probabilities")


@dataclass(frozen=True)
class Scores:
    """Logits of public samples, a row for each: the scores before any softmax. For a mean of all clients."""

    logits: Tensor = sized("indices", "classes")


@dataclass(frozen=True)
class Done:
    """Nothing but that it is done. A dataclass, so that a task which sends nothing back can be part of a mean too."""


def are_probabilities(probs: Tensor) -> bool:
    """Whether every row is a probability vector."""
    return not bool((probs < 0).any()) and not bool(((probs.sum(-1) - 1).abs() > SUMS_TO_ONE).any())


# ---- the client's half ------------------------------------------------------------------------------


@task("train_and_predict")
def train_and_predict(
    client: Client, local: Local, only_new: bool, drawn: Drawn, classes: int, temperature: float
) -> Predictions:
    """Train on private data (with `only_new`, just a client that has no model yet), then predict public samples."""
    _, probs = _trained_answer(client, local, only_new, drawn, temperature)
    return Predictions(probs)


@task("train_and_assess")
def train_and_assess(
    client: Client, local: Local, only_new: bool, drawn: Drawn, classes: int, temperature: float
) -> Assessed:
    """The same, and say how good the model is before it is taught."""
    model, probs = _trained_answer(client, local, only_new, drawn, temperature)
    return Assessed(*_assessed(client, model), probs)


@task("train_and_answer")
def train_and_answer(client: Client, local: Local, indices: Tensor, digest: str, classes: int) -> Probabilities:
    """Train on private data, then say how likely each class is for each of the public samples."""
    model, inputs = _train(client, local, Drawn(indices, digest))
    return Probabilities(_predict(model, inputs, 1.0))


@task("train_and_score")
def train_and_score(client: Client, local: Local, indices: Tensor, digest: str, classes: int) -> Scores:
    """Train on private data, then score the public samples."""
    model, inputs = _train(client, local, Drawn(indices, digest))
    return Scores(scores_of(model, inputs))


@task("distil_locally")
def distil_locally(
    client: Client, targets: Tensor, distil: Local, temperature: float, student_norm: StudentNorm
) -> Done:
    """Fit the client's model to the targets of the samples it has just predicted."""
    distil_own(client, targets, distil, towards_targets(temperature, student_norm))
    return Done()


@task("distil_and_predict")
def distil_and_predict(
    client: Client, targets: Tensor, distil: Local, temperature: float, student_norm: StudentNorm
) -> Reassessed:
    """The same, and predict them again."""
    model, inputs = distil_own(client, targets, distil, towards_targets(temperature, student_norm))
    return Reassessed(*_assessed(client, model), _predict(model, inputs, temperature))


@task("distil_and_train")
def distil_and_train(
    client: Client, targets: Tensor, distil: Local, temperature: float, student_norm: StudentNorm, local: Local
) -> Score:
    """The same, and train on private data afterwards; how good it was before that, on the client's own test split."""
    model, _ = distil_own(client, targets, distil, towards_targets(temperature, student_norm))
    taught = evaluate(model, client.test.inputs, client.test.labels)
    train_after(client, model, local)
    return taught


def public_inputs(client: Client, drawn: Drawn) -> Tensor:
    """The samples drawn, ready for a model; refused where the client holds another set than the server."""
    if client.public is None:
        raise DataError(f"{client.id} holds no public data; this method needs the same set at every client")
    if client.public.digest != drawn.digest:
        raise DataError(
            f"{client.id} holds other public data (sha256 {client.public.digest[:12]}...) than the server "
            f"({drawn.digest[:12]}...): give every party the same set"
        )
    return client.public[drawn.indices.long()]


def finite(answers: Tensor) -> Tensor:
    """A trained model's answers; an error if these are not finite, so that the client keeps the model it had."""
    if not bool(torch.isfinite(answers).all()):
        raise Diverged("predictions that are not finite; lower the learning rate or set clip")
    return answers


def scores_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """The logits of the samples, as they may leave the client."""
    return finite(logits_of(model, inputs).float())


def remember(client: Client, model: nn.Module, drawn: Drawn) -> None:
    """Keep the model, and the samples it was asked about, so that their indices travel once."""
    client.state["model"] = weights_of(model)
    client.state["drawn"] = {"indices": drawn.indices}


def asked_inputs(client: Client) -> Tensor:
    """The samples the client was last asked about; that is forgotten with this."""
    return client.public[client.state.pop("drawn")["indices"].long()]


def distil_own(client: Client, targets: Tensor, distil: Local, objective: Objective) -> tuple[nn.Module, Tensor]:
    """Fit the client's model to targets of the samples it was last asked about: the model, and these."""
    inputs = asked_inputs(client)
    model = client.model(client.state["model"])
    fit(model, inputs, targets, distil, client.seed, objective)
    client.state["model"] = weights_of(model)
    return model, inputs


def train_after(client: Client, model: nn.Module, local: Local) -> None:
    """Train on private data, as the last thing of a task that has used the client's seed before."""
    fit(model, client.train.inputs, client.train.labels, local, seed_from(client.seed, "train"))
    client.state["model"] = weights_of(model)


def towards_targets(temperature: float = 1.0, student_norm: StudentNorm = "train") -> Objective:
    """KL(targets || softmax(logits / T)), mean over the batch. At T = 1 its gradient is that of cross-entropy with
    soft labels, from which it differs by the entropy of the targets."""
    return towards(lambda z, p: divergence(z, p, entropy(p), temperature), frozen=student_norm == "frozen")


def _trained_answer(
    client: Client, local: Local, only_new: bool, drawn: Drawn, temperature: float
) -> tuple[nn.Module, Tensor]:
    inputs = public_inputs(client, drawn)  # before any work
    own = client.state.get("model")
    model = client.model(own)
    if own is None or not only_new:
        fit(model, client.train.inputs, client.train.labels, local, client.seed)
    probs = _predict(model, inputs, temperature)
    remember(client, model, drawn)
    return model, probs


def _assessed(client: Client, model: nn.Module) -> tuple[float, Score]:
    private = evaluate(model, client.train.inputs, client.train.labels)
    return private.loss, evaluate(model, client.test.inputs, client.test.labels)


def _train(client: Client, local: Local, drawn: Drawn) -> tuple[nn.Module, Tensor]:
    inputs = public_inputs(client, drawn)  # before any work
    model = client.model(client.state.get("model"))
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    remember(client, model, drawn)
    return model, inputs


def _predict(model: nn.Module, inputs: Tensor, temperature: float) -> Tensor:
    return finite((logits_of(model, inputs) / temperature).softmax(-1).float())


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
    how = _question(indices, temperature, local, server, only_new)
    return usable(fed.map(train_and_predict, clients, **how), fed)


def ask_and_assess(
    clients: Sequence[str],
    indices: Tensor,
    temperature: float,
    local: Local,
    fed: Federation,
    server: Server,
    only_new: bool = False,
) -> tuple[list[str], Tensor, Replies]:
    """The same, and what else they said (see Assessed)."""
    replies = fed.map(train_and_assess, clients, **_question(indices, temperature, local, server, only_new))
    return *usable(replies, fed), replies


def _question(indices: Tensor, temperature: float, local: Local, server: Server, only_new: bool) -> dict[str, Any]:
    drawn = Drawn(indices.int(), server.public.digest)
    how: dict[str, Any] = {"local": local, "only_new": only_new, "temperature": temperature}
    return {"drawn": drawn, "classes": server.num_classes, **how}


def question(indices: Tensor, server: Server) -> dict[str, Any]:
    """What a client is told when it is asked about public samples for a mean: which, and how large the answer is."""
    return {"indices": indices.int(), "digest": server.public.digest, "classes": server.num_classes}


def answered(S: Sequence[str], fed: Federation) -> list[str]:
    """Those of clients S whose answers are in the mean."""
    return [k for k in S if k in fed.answered]


def usable(replies: Replies, fed: Federation) -> tuple[list[str], Tensor]:
    """Who sent a probability vector for each sample, and these [clients, samples, classes]; the others are rejected."""
    for k in [k for k, reply in replies.items() if not are_probabilities(reply.probs)]:
        fed.reject(replies, k, "predictions that are no probabilities")
    return list(replies), torch.stack([reply.probs for reply in replies.values()])


def public_problems(name: str, size: int | None, server: Server) -> Iterator[str]:
    """Public data on which predictions cannot be exchanged."""
    if server.public.fresh:
        yield f"{name}: all clients must see the same public samples: leave out public.fresh"
    if size is not None and not 0 <= size <= len(server.public):
        yield f"{name}: public_size = {size}, but there are {len(server.public)} public samples"
    _ = server.public.digest  # computed once and kept: before workers are forked, not by each of them


def label_problems(name: str, server: Server, way_out: str) -> Iterator[str]:
    """Public labels for which the models have no output."""
    labels = server.public.labels
    if labels is not None and int(labels.max()) >= server.num_classes:
        yield (
            f"{name}: public labels go up to {int(labels.max())}, but the models have {server.num_classes} outputs, "
            f"which public and private labels share: choose public.classes, or {way_out}"
        )
