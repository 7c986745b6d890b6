"""FedGen (Zhu, Hong, Zhou, ICML 2021): data-free knowledge distillation for heterogeneous federated learning.

The server trains a small generator of latents, the inputs of a head. It uses the last layers of the clients' models
(here: their heads) and the clients' label counts. The generator is sent to the clients, whose models also learn to
classify generated latents. So a client learns about labels that it does not hold, without any data.

Clients of one architecture are averaged as in FedAvg. With several architectures the heads, which all have the same
shape, are averaged over all clients ("share only the predictor"): all share one latent space and one generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.federation import Federation, Replies, per_client
from ..core.randomness import repeatable
from ..core.settings import NonNegative, NonNegativeInt, PositiveInt, Share, settings
from ..core.task import Client, task
from ..core.tensors import Weights, device_of, is_finite, sent, weights_of
from ..method import About, Traits, register
from ..place.placement import steps_to_take
from ..scenario.server import Server
from ..train.distill import divergence
from ..train.fitting import Diverged, Local, Objective, fit, logits_of, make_optimizer
from ..train.generators import (
    AtLeastTwo,
    Conditional,
    diversity,
    draw,
    hidden_layer,
    label_prior,
    label_weights,
    restored,
    weighted_cross_entropy,
)
from ..train.losses import Losses, backward
from ..train.norms import evaluating
from ..train.teachers import soft_targets
from .steps.training import (
    Averaging,
    CountedUpdate,
    Update,
    average_of,
    averages_of,
    by_architecture,
    head_of,
    label_counts,
    usable_counts,
)


@settings
class LatentGenerator:
    """The generator of latents, and how the server trains it each round."""

    noise: PositiveInt = 32  # length of the noise
    hidden: PositiveInt = 256  # width of the hidden layer
    steps: NonNegativeInt = 50  # on the server, each round
    batch: AtLeastTwo = 32  # latents in a step
    lr: NonNegative = 3e-4  # of Adam
    weight_decay: NonNegative = 1e-2  # of Adam
    diversity: NonNegative = 1.0  # eta: weight of the term that makes outputs depend on the noise
    ensemble: Literal["avg_logits", "avg_losses"] = "avg_logits"  # average before or after the cross-entropy


def teach_latents(
    G: Conditional,
    heads: Sequence[nn.Module],
    alpha: Tensor,
    prior: Tensor,
    cfg: LatentGenerator,
    rng: torch.Generator,
) -> float | None:
    """Train `G` in place so that the heads, weighted by `alpha`, predict a latent's label; the mean loss, if any.

    The heads are frozen. Labels are sampled with the probabilities `prior`.
    """
    G.train()
    G.requires_grad_(True)
    for head in heads:
        head.eval()
        head.requires_grad_(False)
    optimizer = make_optimizer("adam", list(G.parameters()), cfg.lr, 0.0, cfg.weight_decay)
    alpha = alpha.to(device_of(G))
    losses = Losses(device_of(G), lambda loss: True)  # no loss ends the training
    for _ in range(steps_to_take(cfg.steps)):
        noise, y = draw(prior, cfg.batch, G.noise, rng, device_of(G))
        z = G(noise, y)
        logits = torch.stack([head(z) for head in heads])
        loss = ensemble_loss(logits, y, alpha, cfg.ensemble) + cfg.diversity * diversity(noise, z)
        backward(loss, optimizer)
        optimizer.step()
        losses.add(loss)
    G.eval()
    return losses.mean if losses.steps else None


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
class FedGen(Averaging):
    """FedAvg with a generator of latents that transfers knowledge between clients."""

    local: Local = field(default_factory=lambda: Local(batch=32, lr=0.01))
    generator: LatentGenerator = field(default_factory=LatentGenerator)
    generated_weight: NonNegative | None = None  # alpha: weight of generated latents; none: 0.1 / local.lr, at most 10
    agreement_weight: NonNegative = 0.0  # beta: weight of the divergence from predictions for latents of the same label
    decay: Share = 0.98  # both weights are multiplied by this every round
    early_stop: NonNegativeInt = 20  # number of local epochs with generated latents; later epochs use none
    labels: Literal["counts", "uniform"] = "counts"  # p(y): in proportion to the clients' label counts, or uniform
    share_head: bool = True  # several architectures: one head for all, not one for each

    about: ClassVar[About] = About(
        "FedGen", "Zhu et al., ICML 2021", "model, generator and label prior down, model and label counts up", "nothing"
    )

    @dataclass(frozen=True)
    class State(Averaging.State):  # weights: theta
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
            weights=per_client(by_architecture(theta, fed)),
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
        theta = theta | averages_of(self.average, x, list(heads), fed)
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


def latent_generator(latent: int, noise: int, classes: int, hidden: int) -> Conditional:
    """FedGen's generator: one hidden layer, and latents of `latent` numbers."""
    net = nn.Sequential(*hidden_layer(noise + classes, hidden), nn.Linear(hidden, latent))
    return Conditional(net, noise, classes)


def latent_generator_of(weights: Weights, classes: int) -> Conditional:
    """The latent generator with these weights; its sizes follow from the weights."""
    (hidden, inputs), (latent, _) = weights["net.0.weight"].shape, weights["net.3.weight"].shape
    return restored(lambda: latent_generator(latent, inputs - classes, classes, hidden), weights)


def ensemble_loss(logits: Tensor, labels: Tensor, alpha: Tensor, rule: Literal["avg_logits", "avg_losses"]) -> Tensor:
    """The ensemble's loss for predicting the labels of generated samples: FedGen's term for the generator.

    `logits` are [clients, samples, classes], `alpha` [clients, classes]. avg_logits: cross-entropy of
    sum_k alpha_k^y logits_k (the paper); avg_losses: sum_k alpha_k^y times client k's cross-entropy (its code).
    """
    shares = alpha[:, labels]
    if rule == "avg_logits":
        return F.cross_entropy((shares[..., None] * logits).sum(0), labels)
    return torch.stack([weighted_cross_entropy(z, labels, a) for z, a in zip(logits, shares, strict=True)]).sum()
