"""Training a generator on models instead of data, and models on what it generates: the server's work in FedGen and
FedFTG. The losses are in parts.generators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .distill import divergence
from .generators import (
    Conditional,
    class_ensemble,
    disagreement,
    diversity,
    draw,
    ensemble_loss,
    weighted_cross_entropy,
)
from .local import check_number, logits_of, make_optimiser
from .norms import train_mode
from .optimisers import Optimiser
from .teachers import entropy

# ---- FedGen: latents that the heads of all clients recognise ----------------------------------------


@dataclass(frozen=True)
class LatentGenerator:
    """The generator of latents, and how the server trains it each round."""

    noise: int = 32  # length of the noise
    hidden: int = 256  # width of the hidden layer
    steps: int = 50  # on the server, each round
    batch: int = 32  # latents in a step
    lr: float = 3e-4  # of Adam
    weight_decay: float = 1e-2  # of Adam
    diversity: float = 1.0  # eta: the more, the less the generator may ignore its noise
    ensemble: Literal["avg_logits", "avg_losses"] = "avg_logits"  # of the heads: before or after the cross-entropy

    def __post_init__(self) -> None:
        least = {"noise": 1, "hidden": 1, "steps": 0, "batch": 2, "lr": 0, "weight_decay": 0, "diversity": 0}
        for name, value in least.items():
            check_number(name, getattr(self, name), value)


def teach_latents(
    G: Conditional,
    heads: Sequence[nn.Module],
    alpha: Tensor,
    prior: Tensor,
    cfg: LatentGenerator,
    rng: torch.Generator,
) -> float | None:
    """Train `G` in place until the heads, weighted by `alpha`, see in a latent its label; the mean loss, if any.

    The heads are frozen. Labels are drawn with the probabilities `prior`, so those of probability 0 never.
    """
    G.train()
    G.requires_grad_(True)
    for head in heads:
        head.eval()
        head.requires_grad_(False)
    optimiser = make_optimiser("adam", list(G.parameters()), cfg.lr, 0.0, cfg.weight_decay)
    total = 0.0
    for _ in range(cfg.steps):
        noise, y = draw(prior, cfg.batch, G.noise, rng)
        z = G(noise, y)
        logits = torch.stack([head(z) for head in heads])
        loss = ensemble_loss(logits, y, alpha, cfg.ensemble) + cfg.diversity * diversity(noise, z)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item()
    G.eval()
    return total / cfg.steps if cfg.steps else None


# ---- FedFTG: inputs about which clients and global model disagree -----------------------------------


@dataclass(frozen=True)
class FineTune:
    """The generator of inputs, and how it and the global models are trained in turn."""

    steps: int = 10  # times that generator and global models take turns; 0: FedAvg
    batch: int = 50  # generated inputs in a turn
    noise: int = 100  # length of the noise
    features: int = 32  # how wide the generator's layers are
    generator_steps: int = 1  # a turn, for each client's model
    generator_lr: float = 0.01  # of Adam
    student_steps: int = 5  # a turn
    student_lr: float = 0.01  # of SGD
    decay: float = 0.998  # student_lr is multiplied by it every round
    fidelity: float = 1.0  # lambda_cls: clients' models are to see the label
    hardness: float = 1.0  # clients' models and global model are to disagree
    diversity: float = 1.0  # lambda_dis: the more, the less the generator may ignore its noise
    student_norm: Literal["frozen", "train"] = "frozen"  # BatchNorm statistics of the global model

    def __post_init__(self) -> None:
        least = {"steps": 0, "batch": 2, "noise": 1, "features": 1, "generator_steps": 0, "generator_lr": 0}
        least |= {"student_steps": 0, "student_lr": 0, "decay": 0, "fidelity": 0, "hardness": 0, "diversity": 0}
        for name, value in least.items():
            check_number(name, getattr(self, name), value)


def hard_sample_loss(
    x: Tensor, y: Tensor, teacher: nn.Module, students: Sequence[nn.Module], shares: Tensor, cfg: FineTune
) -> Tensor:
    """What a client's model makes of generated inputs: it is to see their labels, and no global model with it.

    Cross-entropy minus disagreement, each sample weighted by the client's share of its label; several global models
    count the same.
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
    """Train generator and students (the global models) in place and in turn; each student's last loss, if any.

    The teachers, the clients' models, are frozen and in evaluation mode: their BatchNorm statistics never change.
    `alpha` [teachers, classes] are their shares of the labels, which are drawn with the probabilities `prior`.
    """
    G.requires_grad_(True)
    for model in (*teachers, *students):
        model.eval()
    for teacher in teachers:
        teacher.requires_grad_(False)
    G_parameters = list(G.parameters())
    G_optimiser = make_optimiser("adam", G_parameters, cfg.generator_lr, 0.0, 0.0)
    optimisers = [make_optimiser("sgd", list(student.parameters()), lr, 0.0, 0.0) for student in students]
    losses: list[float | None] = [None] * len(students)
    for _ in range(cfg.steps):
        noise, y = draw(prior, cfg.batch, G.noise, rng)
        G.train()
        for _ in range(cfg.generator_steps):
            for teacher, alpha_k in zip(teachers, alpha, strict=True):
                x = G(noise, y)
                loss = hard_sample_loss(x, y, teacher, students, alpha_k[y], cfg)
                loss = loss + cfg.diversity * diversity(noise, x) / len(teachers)
                G_optimiser.zero_grad()
                loss.backward(inputs=G_parameters)
                G_optimiser.step()
        G.eval()
        with torch.no_grad():
            x = G(noise, y)
        targets = class_ensemble(torch.stack([logits_of(teacher, x) for teacher in teachers]), y, alpha)
        for i, student in enumerate(students):
            losses[i] = _towards(targets, student, x, optimisers[i], cfg)
    return losses


def _towards(targets: Tensor, student: nn.Module, x: Tensor, optimiser: Optimiser, cfg: FineTune) -> float | None:
    """A turn of a student: steps towards the ensemble; its divergence from it before the last of them."""
    train_mode(student, frozen=cfg.student_norm == "frozen")
    value = None
    for _ in range(cfg.student_steps):
        loss = divergence(student(x), targets, entropy(targets))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        value = loss.item()
    optimiser.zero_grad()
    student.eval()
    return value
