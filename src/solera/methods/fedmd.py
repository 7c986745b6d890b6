"""FedMD (Li and Wang, 2019): models of any architecture learn from the mean of their scores on public samples.

Transfer learning first: a client trains a model on the labelled public set, then on its own samples. Each round all
clients score some public samples; the mean of the scores is the consensus. Every client fits its model to the consensus
("digest") and then trains on its own data ("revisit"). Scores are logits, before any softmax.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.federation import Federation
from ..core.randomness import seed_from
from ..core.task import Client, PublicRows, task
from ..method import About, Traits, register
from ..scenario.server import Server
from ..train.distill import kd_loss
from ..train.fitting import Local, fit, towards
from .steps.fusion import logits_problems
from .steps.personal import OnClients
from .steps.predictions import (
    Done,
    Drawn,
    OnPublic,
    Scores,
    StudentNorm,
    answered,
    distil_own,
    draw,
    label_problems,
    public_inputs,
    public_problems,
    question,
    remember,
    scores_of,
    train_after,
)

Distance = Literal["l1", "kl"]
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"l1": F.l1_loss, "kl": kd_loss}  # from the consensus


@task("prepare_and_score")
def prepare_and_score(
    client: Client, pretrain: OnPublic, private: Local, indices: PublicRows, digest: str, classes: int
) -> Scores:
    """Score public samples; a client without a model first trains one, on labelled public samples and on its own."""
    drawn = Drawn(indices, digest)
    inputs = public_inputs(client, drawn)  # first: it may be refused
    own, labels = client.state.get("model"), client.public.labels
    model = client.model(own)
    if own is None and labels is not None:
        everything = client.public[torch.arange(len(labels))]
        fit(model, everything, labels, pretrain, seed_from(client.seed, "pretrain"))
    if own is None:
        fit(model, client.train.inputs, client.train.labels, private, client.seed)
    scores = scores_of(model, inputs)
    remember(client, model, drawn)
    return Scores(scores)


@task("digest_and_revisit")
def digest_and_revisit(
    client: Client, consensus: PublicRows, digest: OnPublic, loss: Distance, student_norm: StudentNorm, revisit: Local
) -> Done:
    """Fit the client's model to the consensus on the samples it has just scored, then to its own data."""
    objective = towards(DISTANCES[loss], frozen=student_norm == "frozen")
    model, _ = distil_own(client, consensus, digest, objective)
    train_after(client, model, revisit)
    return Done()


def adam(epochs: int, batch: int) -> Local:
    """The authors use Adam with learning rate 0.001 everywhere."""
    return Local(epochs=epochs, batch=batch, lr=1e-3, optimizer="adam")


@register("fedmd")
@dataclass(frozen=True)
class FedMD(OnClients):
    """Personal models that learn from the mean of all clients' scores on public samples."""

    pretrain: Local = field(default_factory=lambda: adam(20, 128))  # of a new client, on labelled public samples
    private: Local = field(default_factory=lambda: adam(25, 32))  # of a new client, on its own samples
    digest: Local = field(default_factory=lambda: adam(1, 256))  # on a round's public samples, towards the consensus
    revisit: Local = field(default_factory=lambda: adam(4, 5))  # on its own samples, each round
    loss: Distance = "l1"  # of digest: mean absolute difference of the logits, or KL of their softmax
    student_norm: StudentNorm = "train"  # BatchNorm statistics during digest

    about: ClassVar[About] = About("FedMD", "Li and Wang, 2019", "indices down, scores up, consensus down", "its model")

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", public_labels="used", replies="means", personal=True)

    def round(self, state: OnClients.State, fed: Federation, server: Server) -> OnClients.State:
        x, S = draw(None, fed, server), fed.sample()
        start: dict[str, Any] = {"pretrain": self.transfer(fed, server), "private": self.private}
        mean = fed.mean(prepare_and_score, S, uniform=True, **start, **question(x, server))  # communicate, aggregate
        how: dict[str, Any] = {"digest": self.digest, "revisit": self.revisit, "loss": self.loss}
        how |= {"consensus": mean.logits, "student_norm": self.student_norm}
        fed.mean(digest_and_revisit, answered(S, fed), uniform=True, **how)  # distribute, digest, revisit
        return self.State(state.rounds + 1)

    def transfer(self, fed: Federation | None, server: Server) -> Local:
        """A new client's training on public samples; none without public labels, which an event reports once."""
        if server.public.labels is not None:
            return self.pretrain
        if fed is not None and fed.round == 0 and self.pretrain != replace(self.pretrain, epochs=0, steps=None):
            server.event("pretraining_skipped", reason="the public samples have no labels: set public.labels = true")
        return replace(self.pretrain, epochs=0, steps=None)

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("fedmd", None, server)
        yield from logits_problems("fedmd", server)
        yield from label_problems("fedmd", server, "set public.labels = false")

    def remarks(self, server: Server) -> Iterator[str]:
        if self.transfer(None, server) != self.pretrain:
            yield "FedMD leaves out its pretraining: the public samples have no labels; set public.labels = true"
