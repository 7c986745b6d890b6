"""FedFTG (Zhang, Shen, Ding, Tao, Duan, CVPR 2022): fine-tuning the global model by data-free knowledge distillation.

After FedAvg, the server generates inputs from noise and labels. The generator is trained for inputs that a client's
model classifies as the label, but on which that model and the global model disagree ("hard samples"). The global model
is then distilled from the clients' models on them. A client's weight for a label is its share of the label's samples,
both in the generator's loss and in the ensemble.

With several architectures, the average of each is distilled from all clients' models on the same generated inputs. The
disagreement is then the mean over the architectures. With no fine-tuning steps this is FedAvg.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.federation import Federation, per_client
from ..core.randomness import repeatable
from ..core.settings import NonNegative, NonNegativeInt, PositiveInt, settings
from ..core.tensors import Weights, device_of, is_finite, weights_of
from ..method import About, Traits, register
from ..place.placement import steps_to_take
from ..scenario.server import Server
from ..train.distill import divergence
from ..train.fitting import Diverged, logits_of, make_optimizer
from ..train.generators import (
    AtLeastTwo,
    Conditional,
    ImageDecoder,
    diversity,
    draw,
    hidden_layer,
    label_prior,
    label_weights,
    restored,
    weighted_cross_entropy,
)
from ..train.losses import Optimizer, backward
from ..train.norms import train_mode
from ..train.teachers import entropy
from .steps.fusion import finite_models, side_by_side
from .steps.training import Averaging, averages_of, by_architecture, train_and_count, usable_counts


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


@register("fedftg")
@dataclass(frozen=True)
class FedFTG(Averaging):
    """FedAvg; then the global model is distilled from the clients' models on generated hard samples."""

    tune: FineTune = field(default_factory=FineTune)

    about: ClassVar[About] = About(
        "FedFTG", "Zhang et al., CVPR 2022", "model down, model up, label counts up once", "nothing"
    )

    @dataclass(frozen=True)
    class State(Averaging.State):
        generator: Weights
        counts: dict[str, Tensor]  # client -> its samples of each label, as reported in its first round

    def traits(self) -> Traits:
        return Traits(across="knowledge", products=True)

    def init(self, fed: Federation, server: Server) -> State:
        generator: Weights = {}
        if self.tune.steps:
            generator = weights_of(repeatable(fed.seed("generator"), partial(self.generator, server)))
        return self.State({A: server.init(A) for A in server.architectures}, generator, {})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        w, known = state.weights, state.counts
        S = fed.sample()
        sent = per_client(by_architecture(w, fed))
        unknown = per_client(lambda k: server.num_classes if self.tune.steps > 0 and k not in known else None)
        x = fed.map(train_and_count, S, weights=sent, local=self.local, classes=unknown)
        if self.tune.steps == 0:
            return self.State(w | averages_of(self.average, x, list(x), fed), state.generator, known)
        counts = usable_counts(x, known, fed, server)
        teachers = finite_models(x, self.probe(state, fed, server), fed, server, "generated samples")
        w_0 = averages_of(self.average, x, list(teachers), fed)
        n = torch.stack([counts[k] * fed.copies.get(k, 1) for k in teachers])
        tune = partial(self.fine_tune, w_0, list(teachers.values()), n, state.generator, fed, server)
        ((tuned, generator, losses),) = side_by_side(fed.seed, server, [tune])  # one job: dropout draws random numbers
        server.worked(self.tune.steps * self.tune.batch * len(w_0))
        if losses is None:
            server.event("distill_diverged", steps=self.tune.steps)
        for A, loss in (losses or {}).items():
            server.event("distilled", architecture=A, steps=self.tune.steps, loss=loss)
        return self.State(w | tuned, generator, known | {k: counts[k] for k in teachers})

    def fine_tune(
        self,
        w_0: dict[str, Weights],
        teachers: list[nn.Module],
        counts: Tensor,
        generator: Weights,
        fed: Federation,
        server: Server,
    ) -> tuple[dict[str, Weights], Weights, dict[str, float | None] | None]:
        """Train generator and global models in turn, against each other; also returns the models' last losses. If the
        training diverged, everything is unchanged and there are no losses."""
        rng = torch.Generator().manual_seed(fed.seed("inputs"))
        G = server.bring(restored(partial(self.generator, server), generator))
        students = {A: server.model(A, w) for A, w in w_0.items()}
        lr = self.tune.student_lr * self.tune.decay**fed.round
        alpha, prior = label_weights(counts).float(), label_prior(counts).float()
        try:
            losses = fine_tune(G, list(students.values()), teachers, alpha, prior, self.tune, lr, rng)
        except Diverged:
            return w_0, generator, None
        tuned, weights = {A: weights_of(m) for A, m in students.items()}, weights_of(G)
        if not all(map(is_finite, [weights, *tuned.values()])):
            return w_0, generator, None
        return tuned, weights, dict(zip(students, losses, strict=True))

    def probe(self, state: State, fed: Federation, server: Server) -> Tensor:
        """Some generated inputs, to check that the logits of an uploaded model are finite."""
        C, rng = server.num_classes, torch.Generator().manual_seed(fed.seed("probe"))
        G = server.bring(restored(partial(self.generator, server), state.generator))
        with torch.no_grad():
            return G(*draw(torch.full((C,), 1 / C), self.tune.batch, G.noise, rng, device_of(G)))

    def generator(self, server: Server) -> Conditional:
        """A new generator of inputs."""
        assert server.shape is not None  # checked by `fits`
        return input_generator(server.shape, self.tune.noise, server.num_classes, self.tune.features)

    def fits(self, server: Server) -> Iterator[str]:
        if self.tune.steps == 0:
            return
        if server.tokens:
            yield "fedftg generates images or vectors, but the inputs here are tokens: use fedgen"
        elif server.shape is None or len(server.shape) not in (1, 3):
            yield f"fedftg generates images [C, H, W] or vectors [F], but an input here is {server.shape}"


def input_generator(shape: tuple[int, ...], noise: int, classes: int, features: int) -> Conditional:
    """FedFTG's generator: images [C, H, W] or vectors [F], the inputs of a model.

    Normalised inputs have a mean of about 0 and a variance of about 1, for images per channel. A last BatchNorm
    without parameters gives generated inputs the same. Without it, the generator could increase the disagreement by
    simply making its outputs larger.
    """
    if len(shape) == 3:
        image = (shape[0], shape[1], shape[2])
        decoder = ImageDecoder(image, noise + classes, features)
        return Conditional(nn.Sequential(decoder, nn.BatchNorm2d(shape[0], affine=False)), noise, classes)
    if len(shape) != 1:
        raise ValueError(f"inputs of shape {shape}: only images [C, H, W] and vectors [F] can be generated")
    (width,) = shape
    layers = [*hidden_layer(noise + classes, 4 * features), nn.Linear(4 * features, width), nn.Tanh()]
    return Conditional(nn.Sequential(*layers, nn.BatchNorm1d(width, affine=False)), noise, classes)


def disagreement(one: Tensor, other: Tensor, shares: Tensor) -> Tensor:
    """Mean over the samples of `share` times the mean absolute difference of the logits (FedFTG's hard samples)."""
    return (shares * (one - other).abs().mean(-1)).mean()


def class_ensemble(logits: Tensor, labels: Tensor, alpha: Tensor) -> Tensor:
    """sum_k alpha_k^y softmax(logits_k) of logits [teachers, samples, classes]: FedFTG's class-level ensemble."""
    return (alpha[:, labels, None] * logits.softmax(-1)).sum(0)
