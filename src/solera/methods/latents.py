"""The client's half of FedGen (Zhu, Hong, Zhou, ICML 2021): train on private samples and on generated latents."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parts.distill import divergence
from ..parts.generators import Conditional, draw, latent_generator_of
from ..parts.local import Local, fit, weights_of
from ..parts.objectives import Objective
from ..parts.teachers import soft_targets
from ..task import Client, task
from ..wire import Weights
from .label_counts import CountedUpdate, label_counts


@task("train_with_generator")
def train_with_generator(
    client: Client,
    weights: Weights,
    generator: Weights,
    prior: Tensor,
    local: Local,
    generated_weight: float,
    agreement_weight: float,
    early_stop: int,
) -> CountedUpdate:
    """Train a copy of the received model on private samples and, for `early_stop` epochs, on generated latents."""
    model, data = client.model(weights), client.train
    epochs = early_stop if bool(prior.any()) and (generated_weight or agreement_weight) else 0
    first, rest = phases(local, epochs, len(data))
    G = latent_generator_of(generator, client.classes).requires_grad_(False)
    objective = with_latents(G, prior, local.batch, generated_weight, agreement_weight, client.rng("latents"))
    fit(model, data.inputs, data.labels, first, client.seed, objective)
    fit(model, data.inputs, data.labels, rest, client.seed)
    return CountedUpdate(label_counts(client), weights_of(model))


def with_latents(
    G: Conditional, prior: Tensor, batch: int, generated_weight: float, agreement_weight: float, rng: torch.Generator
) -> Objective:
    """Cross-entropy, plus alpha times that of generated latents of labels y ~ p(y), plus beta times the divergence
    from what the head says about latents of the samples' own labels (the authors' code)."""

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        logits, head = model(inputs), model.get_submodule("head")
        total = F.cross_entropy(logits, labels)
        if generated_weight:
            noise, y = draw(prior, batch, G.noise, rng)
            total = total + generated_weight * F.cross_entropy(head(G(noise, y)), y)
        if agreement_weight:
            noise = torch.randn(len(labels), G.noise, generator=rng)
            targets = soft_targets(head(G(noise, labels)).detach())
            total = total + agreement_weight * divergence(logits, *targets)
        return total

    return loss


def phases(local: Local, epochs: int, n: int) -> tuple[Local, Local]:
    """Local training on n samples in two parts: the first `epochs` epochs, and what comes after them."""
    if local.steps is None:
        first = min(local.epochs, epochs)
        return replace(local, epochs=first), replace(local, epochs=local.epochs - first)
    first = min(local.steps, epochs * -(-n // local.batch))
    return replace(local, steps=first), replace(local, steps=local.steps - first)
