"""Decentralised FedDF (Lin, Kong, Stich, Jaggi, NeurIPS 2020, section 3, discussion): peers synchronise logits.

The paper names it in one sentence, to protect clients from a party that collects models, and leaves it to future work:
"decentralized model fusion through synchronizing locally inferred logits e.g. on random public data", which "can be
generated locally from identical generators with a controlled random state". There is no model but the peers' own, and
none of them is sent. Each round the peers agree on a seed. Every peer trains on its own samples, makes the round's
public samples from that seed, infers their logits and shares these. All get the mean logits (AVGLOGITS) and distil them
into their own models, which may be of any architecture.

From the paper: the shared logits, the generated samples, AVGLOGITS and its KL. Our choices: a peer trains first and
distils after; the mean is over the round's peers and includes a peer's own logits; and the server carries messages and
adds them up, like an all-reduce among the peers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ..core.federation import Federation
from ..core.settings import Positive
from ..core.task import Client, PublicRows, task
from ..core.tensors import draw, weights_of
from ..core.wire import sized
from ..method import About, Traits, register
from ..scenario.server import Server
from ..train.fitting import Local, fit
from ..train.teachers import soft_targets
from .steps.fusion import logits_problems
from .steps.personal import OnClients
from .steps.predictions import Done, OnPublic, StudentNorm, answered, check_public, scores_of, towards_targets


@dataclass(frozen=True)
class Inferred:
    """A peer's logits of the samples that follow from a seed, one row per sample."""

    logits: Tensor = sized("size", "classes")


@task("train_and_infer")
def train_and_infer(client: Client, local: Local, seed: int, size: int, digest: str, classes: int) -> Inferred:
    """Train on private data, make `size` public samples from `seed`, and infer their logits."""
    check_public(client, digest)  # before any work
    model = client.model(client.state.get("model"))
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    logits = scores_of(model, made_from(seed, size, client.public))
    client.state["model"] = weights_of(model)
    return Inferred(logits)


@task("distil_inferred")
def distil_inferred(
    client: Client, logits: PublicRows, seed: int, distil: OnPublic, temperature: float, student_norm: StudentNorm
) -> Done:
    """Make the same samples again, and fit the peer's own model to their mean logits."""
    inputs = made_from(seed, len(logits), client.public)
    probs, _ = soft_targets(logits, temperature)
    model = client.model(client.state["model"])
    fit(model, inputs, probs, distil, client.seed, towards_targets(temperature, student_norm))
    client.state["model"] = weights_of(model)
    return Done()


def made_from(seed: int, size: int, public: Any) -> Tensor:
    """The public samples of a round. Every peer can make them from the seed: by a generator or noise (public.fresh:
    new samples each round), or by choosing `size` of the samples that it holds."""
    return draw(public, public.round_indices(size, seed), seed)


@register("decentralised")
@dataclass(frozen=True)
class Decentralised(OnClients):
    """Peers without a server model. They synchronise logits of samples that each makes from the same seed."""

    local: Local = field(default_factory=Local)  # on private samples
    distill: Local = field(
        default_factory=lambda: Local(epochs=5, batch=128, lr=1e-3, optimizer="adam", schedule="cosine", clip=5.0)
    )  # on the round's public samples; FedDF's optimiser
    temperature: Positive = 1.0  # T, of teacher and student alike
    student_norm: StudentNorm = "train"  # BatchNorm statistics during distillation

    about: ClassVar[About] = About(
        title="Decentralised FedDF",
        paper="Lin et al., NeurIPS 2020, section 3",
        wire="a seed down, logits up, mean logits down",
        state="its model",
    )

    def traits(self) -> Traits:
        return Traits(across="knowledge", public="everywhere", replies="means", personal=True)

    def round(self, state: OnClients.State, fed: Federation, server: Server) -> OnClients.State:
        S, seed = fed.sample(), fed.seed("public")
        size = len(server.public) if server.per_round is None else server.per_round
        same: dict[str, Any] = {"seed": seed, "size": size, "digest": server.public.digest}
        mean = fed.mean(train_and_infer, S, uniform=True, local=self.local, classes=server.num_classes, **same)
        how: dict[str, Any] = {"temperature": self.temperature, "student_norm": self.student_norm}
        told = {"logits": mean.logits, "seed": seed, "distil": self.distill}
        fed.mean(distil_inferred, answered(S, fed), **told, **how)  # AVGLOGITS, at every peer
        return self.State(state.rounds + 1)

    def fits(self, server: Server) -> Iterator[str]:
        if server.lent is not None:
            yield "decentralised: peers make the public samples themselves: leave out public.where = 'server'"
        yield from logits_problems("decentralised", server)
        _ = server.public.digest  # computed and cached before workers are forked, not in each worker
