"""Data-free distillation on the server (FedGen, FedFTG): train a generator with the clients' models, and models on
generated samples. The losses are in parts.generators."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from ..core.settings import Hint, NonNegative, NonNegativeInt, PositiveInt, settings
from ..core.tensors import device_of
from ..place.placement import steps_to_take
from .distill import divergence
from .fitting import logits_of, make_optimizer
from .generators import (
    Conditional,
    class_ensemble,
    disagreement,
    diversity,
    draw,
    ensemble_loss,
    weighted_cross_entropy,
)
from .losses import Losses, backward
from .norms import train_mode
from .optimizers import Optimizer
from .teachers import entropy

AtLeastTwo = Annotated[int, Ge(2), Hint("the diversity term compares two samples")]

# ---- FedGen: latents that the clients' heads classify correctly --------------------------------------


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
    losses = Losses(device_of(G), lambda loss: True)  # no loss ends it
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


# ---- FedFTG: inputs about which clients and global model disagree -----------------------------------


@settings
class FineTune:
    """The generator of inputs, and how it and the global models are trained in turn."""

    steps: NonNegativeInt = 10  # alternations between generator and global models; 0: FedAvg
    batch: AtLeastTwo = 50  # generated inputs per alternation
    noise: PositiveInt = 100  # length of the noise
    features: PositiveInt = 32  # width of the generator's layers
    generator_steps: NonNegativeInt = 1  # per alternation, for each client's model
    generator_lr: NonNegative = 0.01  # of Adam
    student_steps: NonNegativeInt = 5  # per alternation
    student_lr: NonNegative = 0.01  # of SGD
    decay: NonNegative = 0.998  # student_lr is multiplied by this every round
    fidelity: NonNegative = 1.0  # lambda_cls: weight of the clients' models predicting the label
    hardness: NonNegative = 1.0  # weight of the disagreement between clients' models and global model
    diversity: NonNegative = 1.0  # lambda_dis: weight of the term that makes outputs depend on the noise
    student_norm: Literal["frozen", "train"] = "frozen"  # BatchNorm statistics of the global model


def hard_sample_loss(
    x: Tensor, y: Tensor, teacher: nn.Module, students: Sequence[nn.Module], shares: Tensor, cfg: FineTune
) -> Tensor:
    """The generator's loss for one client's model: it should predict the labels, and global models should disagree.

    Cross-entropy minus disagreement, each sample weighted by the client's share of its label. Several global models
    have equal weights.
    """
    logits = teacher(x)
    apart = torch.stack([disagreement(logits, student(x), shares) for student in students]).mean()
    return cfg.fidelity * weighted_cross_entropy(logits, y, shares) - cfg.hardness * apart


def fine_tune(
    G: Conditional,
    students: Sequence[nn.Module],
    teachers: Sequence[nn.Module],
    alpha: Tensor,
    prior: Tensor,
    cfg: FineTune,
    lr: float,
    rng: torch.Generator,
) -> list[float | None]:
    """Train generator and students (the global models) in place, alternating; returns each student's last loss, if any.

    The teachers, the clients' models, are frozen and in evaluation mode: their BatchNorm statistics never change.
    `alpha` [teachers, classes] are their shares of the labels. Labels are sampled with the probabilities `prior`.
    """
    G.requires_grad_(True)
    for model in (*teachers, *students):
        model.eval()
    for teacher in teachers:
        teacher.requires_grad_(False)
    G_parameters, alpha = list(G.parameters()), alpha.to(device_of(G))
    G_optimizer = make_optimizer("adam", G_parameters, cfg.generator_lr, 0.0, 0.0)
    optimizers = [make_optimizer("sgd", list(student.parameters()), lr, 0.0, 0.0) for student in students]
    last: list[Tensor | None] = [None] * len(students)
    for _ in range(steps_to_take(cfg.steps)):
        noise, y = draw(prior, cfg.batch, G.noise, rng, device_of(G))
        G.train()
        for _ in range(cfg.generator_steps):
            for teacher, alpha_k in zip(teachers, alpha, strict=True):
                x = G(noise, y)
                loss = hard_sample_loss(x, y, teacher, students, alpha_k[y], cfg)
                loss = loss + cfg.diversity * diversity(noise, x) / len(teachers)
                backward(loss, G_optimizer, G_parameters)
                G_optimizer.step()
        G.eval()
        with torch.no_grad():
            x = G(noise, y)
        targets = class_ensemble(torch.stack([logits_of(teacher, x) for teacher in teachers]), y, alpha)
        for i, student in enumerate(students):
            last[i] = _towards(targets, student, x, optimizers[i], cfg)
    return [None if loss is None else loss.item() for loss in last]


def _towards(targets: Tensor, student: nn.Module, x: Tensor, optimizer: Optimizer, cfg: FineTune) -> Tensor | None:
    """One alternation of a student: steps towards the ensemble; returns the divergence before the last step."""
    train_mode(student, frozen=cfg.student_norm == "frozen")
    loss = None
    for _ in range(cfg.student_steps):
        loss = divergence(student(x), targets, entropy(targets))
        backward(loss, optimizer)
        optimizer.step()
    optimizer.zero_grad()
    student.eval()
    return None if loss is None else loss.detach()
