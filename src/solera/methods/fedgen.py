"""FedGen (Zhu, Hong, Zhou, ICML 2021): data-free knowledge distillation for heterogeneous federated learning.

The server trains a small generator of latents, the inputs of a head. It uses the last layers of the clients' models
(here: their heads) and the clients' label counts. The generator is sent to the clients, whose models also learn to
classify generated latents. So a client learns about labels that it does not hold, without any data.

Clients of one architecture are averaged as in FedAvg. With several architectures the heads, which all have the same
shape, are averaged over all clients ("share only the predictor"): all share one latent space and one generator.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.federation import Federation, Replies, per_client
from ..core.randomness import repeatable
from ..core.settings import NonNegative, NonNegativeInt, Share
from ..core.task import Client, task
from ..core.tensors import Weights, device_of, is_finite, sent, weights_of
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.data_free import LatentGenerator, teach_latents
from ..train.distill import divergence
from ..train.fitting import Diverged, Local, fit, logits_of
from ..train.generators import Conditional, draw, label_prior, label_weights, latent_generator, latent_generator_of
from ..train.norms import evaluating
from ..train.objectives import Objective
from ..train.teachers import soft_targets
from .steps.averaging import average_of, models_of
from .steps.counts import CountedUpdate, label_counts, usable_counts
from .steps.heads import head_of
from .steps.training import Update


@task("train_with_generator")
def train_with_generator(
    client: Client,
    weights: Weights,
    generator: Weights,
    prior: Tensor,
    classes: int,
    local: Local,
    generated_weight: float,
    agreement_weight: float,
    early_stop: int,
) -> CountedUpdate:
    """Train a copy of the received model on private samples and, for `early_stop` epochs, on generated latents."""
    model, data = client.model(weights), client.train
    epochs = early_stop if bool(prior.any()) and (generated_weight or agreement_weight) else 0
    first, rest = phases(local, epochs, len(data))
    G = client.bring(latent_generator_of(generator, client.classes)).requires_grad_(False)
    objective = with_latents(G, prior, local.batch, generated_weight, agreement_weight, client.rng("latents"))
    fit(model, data.inputs, data.labels, first, client.seed, objective)
    fit(model, data.inputs, data.labels, rest, client.seed)
    return CountedUpdate(label_counts(client), weights_of(model))


def with_latents(
    G: Conditional, prior: Tensor, batch: int, generated_weight: float, agreement_weight: float, rng: torch.Generator
) -> Objective:
    """Cross-entropy, plus alpha times that of generated latents of labels y ~ p(y), plus beta times the divergence
    from the head's predictions for latents of the samples' own labels (as in the authors' code)."""

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        logits, head = model(inputs), model.get_submodule("head")
        total = F.cross_entropy(logits, labels)
        if generated_weight:
            noise, y = draw(prior, batch, G.noise, rng, labels.device)
            total = total + generated_weight * F.cross_entropy(head(G(noise, y)), y)
        if agreement_weight:
            noise = sent(torch.randn(len(labels), G.noise, generator=rng), labels.device)
            targets = soft_targets(head(G(noise, labels)).detach())
            total = total + agreement_weight * divergence(logits, *targets)
        return total

    return loss


def phases(local: Local, epochs: int, n: int) -> tuple[Local, Local]:
    """Local training on n samples in two parts: the first `epochs` epochs, and the rest."""
    if local.steps is None:
        first = min(local.epochs, epochs)
        return replace(local, epochs=first), replace(local, epochs=local.epochs - first)
    first = min(local.steps, epochs * -(-n // local.batch))
    return replace(local, steps=first), replace(local, steps=local.steps - first)


@register("fedgen")
@dataclass(frozen=True)
class FedGen(Method):
    """FedAvg with a generator of latents that transfers knowledge between clients."""

    local: Local = field(default_factory=lambda: Local(batch=32, lr=0.01))
    average: Literal["weighted", "uniform"] = "weighted"
    generator: LatentGenerator = field(default_factory=LatentGenerator)
    generated_weight: NonNegative | None = None  # alpha: weight of generated latents; none: 0.1 / local.lr, at most 10
    agreement_weight: NonNegative = 0.0  # beta: weight of the divergence from predictions for latents of the same label
    decay: Share = 0.98  # both weights are multiplied by this every round
    early_stop: NonNegativeInt = 20  # number of local epochs with generated latents; later epochs use none
    labels: Literal["counts", "uniform"] = "counts"  # p(y): in proportion to the clients' label counts, or uniform
    share_head: bool = True  # several architectures: one head for all, not one for each

    about: ClassVar[About] = About(
        title="FedGen",
        paper="Zhu et al., ICML 2021",
        wire="model, generator and label prior down, model and label counts up",
        state="nothing",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # theta: architecture -> weights
        generator: Weights  # w
        prior: Tensor  # p(y); all 0 until the generator was trained

    def traits(self) -> Traits:
        return Traits(across="knowledge", split="shared head", products=True)

    @property
    def alpha(self) -> float:
        """The weight of generated latents: as set, or 10 at the authors' learning rate of 0.01, less at larger ones.

        The head learns from generated latents with steps of alpha times local.lr. If these are far larger than the
        authors' 0.1, units of a shared head die (always output 0) for the weaker architectures.
        """
        if self.generated_weight is not None:
            return self.generated_weight
        return min(10.0, 0.1 / self.local.lr) if self.local.lr else 0.0

    def init(self, fed: Federation, server: Server) -> State:
        theta = {A: server.init(A) for A in server.architectures}
        if self.share_head:
            theta = {A: w | head_of(theta[server.architectures[0]]) for A, w in theta.items()}
        sizes = latent_size(server), self.generator.noise, server.num_classes, self.generator.hidden
        G = repeatable(fed.seed("generator"), partial(latent_generator, *sizes))
        return self.State(theta, weights_of(G), torch.zeros(server.num_classes))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        theta, decay = state.weights, self.decay**fed.round
        S = fed.sample()
        x = fed.map(
            train_with_generator,
            S,
            weights=per_client(lambda k: theta[fed.architecture(k)]),
            generator=state.generator,
            prior=state.prior,
            classes=server.num_classes,
            local=self.local,
            generated_weight=self.alpha * decay,
            agreement_weight=self.agreement_weight * decay,
            early_stop=self.early_stop,
        )
        counts = usable_counts(x, {}, fed, server)
        heads = self.heads(x, counts, state, fed, server)
        for A in server.architectures:
            S_A = [k for k in heads if fed.architecture(k) == A]
            if S_A:
                theta = theta | {A: average_of(self.average, x, S_A, fed)}
        if self.share_head:
            sent = Replies((k, Update(head_of(x[k].weights))) for k in heads)
            h = average_of(self.average, sent, list(heads), fed)
            theta = {A: w | h for A, w in theta.items()}  # also architectures without a client
        c = torch.stack([counts[k] * fed.copies.get(k, 1) for k in heads])
        generator, prior = self.teach(state, list(heads.values()), c, fed, server)
        return self.State(theta, generator, prior)

    def teach(
        self, state: State, heads: list[nn.Module], counts: Tensor, fed: Federation, server: Server
    ) -> tuple[Weights, Tensor]:
        """Train the generator of latents so that the heads, weighted by their share of a label, predict that label."""
        rng = torch.Generator().manual_seed(fed.seed("latents"))
        G = server.bring(latent_generator_of(state.generator, server.num_classes))
        prior = label_prior(counts, self.labels).float()
        diverged, loss = False, None
        try:
            loss = teach_latents(G, heads, label_weights(counts).float(), prior, self.generator, rng)
        except Diverged:
            diverged = True
        server.worked(self.generator.steps * self.generator.batch)
        weights = weights_of(G)
        if diverged or not is_finite(weights):
            server.event("generator_diverged", steps=self.generator.steps)
            return state.generator, state.prior
        server.event("generator", steps=self.generator.steps, loss=loss)
        return weights, prior

    def heads(
        self, x: Replies, counts: dict[str, Tensor], state: State, fed: Federation, server: Server
    ) -> dict[str, nn.Module]:
        """The heads of clients with valid counts whose logits on generated latents are finite."""
        rng = torch.Generator().manual_seed(fed.seed("probe"))
        everything = torch.full((server.num_classes,), 1 / server.num_classes)
        with torch.no_grad():
            G = server.bring(latent_generator_of(state.generator, server.num_classes))
            z = G(*draw(everything, self.generator.batch, G.noise, rng, device_of(G)))
        heads = {}
        for k in counts:
            head = server.model(fed.architecture(k), x[k].weights).get_submodule("head")
            if bool(torch.isfinite(logits_of(head, z)).all()):
                heads[k] = head
            else:
                fed.reject(x, k, "non-finite logits on generated latents")
        return heads

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)


def latent_size(server: Server) -> int:
    """The size of a head's input, from a forward pass on blank inputs."""
    if server.shape is None:
        raise ConfigError("fedgen: the server does not know the shape of an input: pass shape=... to Server")
    model: Any = server.template(server.architectures[0])
    with evaluating(model):
        z = model.represent(torch.zeros(2, *server.shape, dtype=torch.int64 if server.tokens else torch.float32))
    if z.ndim != 2:
        raise ConfigError(f"fedgen generates latents that are vectors; those of this model are {tuple(z.shape[1:])}")
    return z.shape[1]
