"""FedGEMS (Cheng, Wu, Xiao, Liu, Liu, 2021): a larger server model by selective knowledge fusion.

Server and clients hold the same labelled public samples. The server's large model predicts each of them. If it is
correct, it learns from the label, and its logits go into a pool. If it is wrong, it also learns from its own pooled
logits, if it was correct before, and otherwise from the clients that are correct; clients predict only these samples.
The server's logits then teach the clients, whose models are never sent. With selective = false this is FedGEM, which
learns from the plain mean of all clients' logits on all samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.federation import Federation
from ..core.randomness import seed_from
from ..core.settings import Share
from ..core.task import Client, PublicRows, task
from ..core.tensors import Weights, rows_of, weights_of
from ..method import About, Model, Traits, register
from ..place.placement import finest
from ..scenario.server import Server
from ..train.fitting import Diverged, Fitted, Local, Objective, fit, logits_of
from ..train.teachers import entropy, soft_targets
from .steps.fusion import outcome_of, side_by_side
from .steps.personal import OnClients
from .steps.predictions import Drawn, OnPublic, ask, draw, label_problems, public_inputs, public_problems
from .steps.training import Own, models_of


def towards(labels: Tensor, teacher: Tensor, share: Tensor) -> Objective:
    """`selective_loss` as a function of (model, inputs, their positions). Row i of each tensor belongs to sample i."""
    rows = rows_of(labels, *soft_targets(teacher), share)

    def objective(model: nn.Module, inputs: Tensor, i: Tensor) -> Tensor:
        return selective_loss(model(inputs), *rows(i))

    return objective


@task("learn_from_server")
def learn_from_server(
    client: Client, drawn: Drawn, logits: PublicRows, epsilon: float, distil: OnPublic, local: Local
) -> None:
    """Train on public samples, towards their labels and the server's logits, then on private data."""
    inputs, labels = public_inputs(client, drawn), client.public.labels[drawn.indices.long()]
    client.state.pop("drawn", None)  # the samples it predicted: they are not needed any more
    model = client.model(client.state.get("model"))
    share = torch.full((len(labels),), epsilon)
    fit(model, inputs, torch.arange(len(labels)), distil, client.seed, towards(labels, logits, share))
    fit(model, client.train.inputs, client.train.labels, local, seed_from(client.seed, "train"))
    client.state["model"] = weights_of(model)


@register("fedgems")
@dataclass(frozen=True)
class FedGEMS(OnClients):
    """A large server model that learns from the clients that are correct where it is wrong."""

    local: Local = field(default_factory=lambda: Local(epochs=5, batch=64, lr=0.05))  # clients, on private data
    distill: Local = field(default_factory=lambda: Local(epochs=1, batch=64, lr=0.05))  # clients, on public samples
    server: Local = field(default_factory=lambda: Local(epochs=5, batch=64, lr=1e-3, optimizer="adam"))  # the server
    epsilon: Share = 0.75  # weight of the labels; the rest is the weight of the logits
    selective: bool = True  # false: FedGEM, all samples and the plain mean of all clients

    about: ClassVar[About] = About(
        title="FedGEMS",
        paper="Cheng et al., 2021",
        wire="predictions up of samples the server gets wrong, logits of all public samples down",
        state="its model",
    )

    @dataclass(frozen=True)
    class State:
        large: Own
        pool: Tensor  # [public samples, classes]: logits of the large model when it last predicted the sample correctly
        pooled: Tensor  # [public samples]: whether it ever did

    def traits(self) -> Traits:
        return Traits(
            across="knowledge",
            public="everywhere",
            public_labels="needed",
            server_model="larger",
            personal=True,
            bytes_vary="clients predict the samples that the server's model gets wrong" if self.selective else "",
        )

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("fedgems", None, server)
        yield from label_problems("fedgems", server, "another public.source")

    def init(self, fed: Federation, server: Server) -> State:
        n = len(server.public)
        large = Own(str(server.large), server.init(str(server.large)))
        return self.State(large, torch.zeros(n, server.num_classes), torch.zeros(n, dtype=torch.bool))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        d, S = draw(None, fed, server), fed.sample()
        x, y = server.public[d], server.public.labels[d]
        model = server.model(state.large.architecture, state.large.weights)
        z = logits_of(model, x).cpu()  # beside the labels and the pool
        right = z.argmax(-1) == y
        pool, pooled = state.pool.clone(), state.pooled.clone()
        if self.selective:
            pool[d[right]], pooled[d[right]] = z[right], True
        ask_for = ~pooled[d]  # wrong now, and never correct before; FedGEM has no pool and asks for all

        teacher, taught = pool[d], pooled[d] & ~right
        S, teacher[ask_for], taught[ask_for] = self.ensemble(S, d[ask_for], y[ask_for], fed, server)
        share = torch.where(taught, self.epsilon, 1.0)  # no teacher: the label alone
        large = self.trained(state.large, x, towards(y, teacher, share), fed, server)
        counts = {"right": int(right.sum()), "asked": int(ask_for.sum()), "taught": int(taught.sum())}
        server.event("selected", samples=len(d), **counts)

        logits = logits_of(server.model(large.architecture, large.weights), x)
        drawn = Drawn(d.int(), server.public.digest)
        how: dict[str, Any] = {"epsilon": self.epsilon, "distil": self.distill, "local": self.local}
        fed.map(learn_from_server, S, drawn=drawn, logits=logits, **how)
        return self.State(large, pool, pooled)

    def ensemble(
        self, S: list[str], indices: Tensor, labels: Tensor, fed: Federation, server: Server
    ) -> tuple[list[str], Tensor, Tensor]:
        """The clients that replied, their fused logits for these samples, and which samples any client got right."""
        if len(indices) == 0:
            return S, torch.empty(0, server.num_classes), torch.empty(0, dtype=torch.bool)
        S, p, _ = ask(S, indices, 1.0, self.local, fed, server, only_new=True)
        p = p.repeat_interleave(torch.tensor([fed.copies.get(k, 1) for k in S]), 0)  # S is a multiset
        weights = reliable_weights(p, labels) if self.selective else torch.full(p.shape[:2], 1 / len(p))
        return S, fused_logits(p, weights), weights.sum(0) > 0

    def trained(self, before: Own, inputs: Tensor, objective: Objective, fed: Federation, server: Server) -> Own:
        """The large model after the server's epochs; unchanged if they diverged."""

        def job() -> tuple[Fitted | Diverged, Weights]:  # everything inside the job: it may run twice
            model = server.model(before.architecture, before.weights)
            train = partial(fit, model, inputs, torch.arange(len(inputs)), self.server, fed.seed("server"), objective)
            return outcome_of(train), weights_of(model)

        ((done, weights),) = side_by_side(fed.seed, server, [job])  # one job, for its own random numbers
        server.worked(self.server.visits(len(inputs)))
        if isinstance(done, Diverged):
            server.event("server_diverged", steps=done.steps, reason=str(done))
            return before
        server.event("server_trained", steps=done.steps, loss=done.loss if done.steps else None)
        return Own(before.architecture, weights)

    def models(self, state: State) -> dict[str, Model]:
        return models_of({state.large.architecture: state.large.weights})


# ---- selective knowledge fusion ----------------------------------------------------------------------


SUREST = 1e-6  # smallest entropy: the weight of a certain client stays finite


def reliable_weights(probs: Tensor, labels: Tensor) -> Tensor:
    """The weight of each client for each sample, [clients, samples], from predictions [clients, samples, classes].

    softmax(1 / entropy) over the clients whose most likely class is the label; 0 for all others. A sample that no
    client gets right has only zeros.
    """
    probs = finest(probs)
    right = probs.argmax(-1) == labels
    score = (1 / entropy(probs).clamp_min(SUREST)).masked_fill(~right, -torch.inf)
    return score.softmax(0).masked_fill(~right, 0.0)  # a softmax over no client is NaN, and masked


def fused_logits(probs: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights_j l_j over clients, [samples, classes], with l_j = log probs_j.

    These are logits minus one constant per client and sample, which does not change the softmax of the sum if the
    weights of the sample sum to 1. Probabilities of 0 count as the smallest positive float.
    """
    logs = finest(probs.clamp_min(torch.finfo(probs.dtype).tiny)).log()
    return (finest(weights)[..., None] * logs).sum(0).to(probs.dtype)


def selective_loss(logits: Tensor, labels: Tensor, targets: Tensor, surprise: Tensor, share: Tensor) -> Tensor:
    """share CE(logits, labels) + (1 - share) KL(targets || softmax(logits)), mean over the batch.

    `surprise` is the entropy of `targets` and `share` the weight of cross-entropy, one number per sample each.
    """
    cross = F.cross_entropy(logits, labels, reduction="none")
    kl = logits.logsumexp(-1) - (targets * logits).sum(-1) - surprise
    return (share * cross + (1 - share) * kl).mean()
