"""Training and evaluating one model on data one party holds. Nothing here knows about federations."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import AT_ONCE
from ..core.randomness import seed_from
from ..core.settings import BelowOne, NonNegative, NonNegativeInt, Positive, PositiveInt, Problem, settings
from ..core.stopping import check_stop
from ..core.tensors import CPU, Inputs, Weights, batches, device_of, draw, is_fresh, sent, take
from ..place.placement import HALF, finest, full_precision, steps_to_take, tricks_of
from .losses import Adam, Losses, Optimizer, Sgd, backward
from .norms import evaluating, has_batchnorm, train_mode

# ---- Objectives of training on a client's own data: functions of (model, inputs, labels) ---------


Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the batch."""
    return log_loss(model(inputs), labels)


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits [..., classes] against labels [...]: one label for each sample, or for each token of
    a sample."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def proximal(mu: float, received: dict[str, Tensor], objective: Objective = cross_entropy) -> Objective:
    """`objective` plus mu/2 ||y - x||^2, with x the weights the client `received` (FedProx).

    The term covers parameters, not buffers. With mu = 0 this is exactly `objective`.
    """
    if mu < 0:
        raise ValueError(f"mu (the proximal factor) must not be negative, not {mu}")
    return objective if mu == 0 else Proximal(mu, received, objective)


@dataclass(frozen=True, eq=False)
class Proximal:
    """The objective that `proximal` returns."""

    mu: float
    received: dict[str, Tensor]
    objective: Objective

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        pairs = ((p, self.received[name]) for name, p in model.named_parameters() if p.requires_grad)
        squares = [(p - x).square().sum() for p, x in pairs]
        return self.objective(model, inputs, labels) + self.mu / 2 * torch.stack(squares).sum()


def towards(loss: Callable[[Tensor, Tensor], Tensor], frozen: bool = False) -> Objective:
    """`loss(logits, targets)`, for samples with a row of targets instead of a label.

    With `frozen`, BatchNorm layers use their running statistics.
    """

    def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        if frozen:
            train_mode(model, frozen=True)
        return loss(model(inputs), targets)

    return objective


Correct = Callable[[str, Tensor], Tensor]

TOO_LARGE = 1e3  # a training with a loss above this has diverged
TOKENS_ASKED = 64  # samples in one forward pass of a language model, whose answers take memory for every token
BLOCK = 64  # minibatches that are gathered into one permuted copy


@settings
class Local:
    """The training of a client: E epochs (or a number of steps) of minibatch SGD or Adam on its own data."""

    epochs: NonNegativeInt = 5
    steps: NonNegativeInt | None = None  # instead of epochs
    batch: PositiveInt = 64
    lr: NonNegative = 0.1
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip: Positive | None = None  # largest norm of the gradient
    schedule: Literal["constant", "cosine", "multistep"] = "constant"  # of lr, within one training; see `rate_at`

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        yield from momentum_problems(self.optimizer, self.momentum)

    def visits(self, rows: int) -> int:
        """The number of samples that a training on `rows` samples sees, each as often as it comes."""
        return self.epochs * rows if self.steps is None else self.steps * min(self.batch, rows)


class Diverged(ValueError):
    """A training diverged: its loss, weights or answers are unusable. Its client is dropped from the exchange."""

    def __init__(self, what: str, steps: int = 0):
        super().__init__(f"training diverged: {what}")
        self.steps = steps  # taken before


@dataclass(frozen=True)
class Fitted:
    """The outcome of a training: steps taken, the sum of their step sizes, and their mean loss."""

    steps: int
    lr_sum: float
    loss: float  # nan if no step was taken


@dataclass(frozen=True)
class Score:
    """The correct answers of a model on labelled samples. In language models, every token counts as one answer."""

    correct: int
    total: int
    loss: float  # mean cross-entropy

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers, between 0 and 1 (0 without samples)."""
        return self.correct / self.total if self.total else 0.0


def fit(
    model: nn.Module,
    inputs: Inputs,
    labels: Tensor,
    cfg: Local,
    seed: int,
    objective: Objective = cross_entropy,
    correct: Correct | None = None,
) -> Fitted:
    """Train `model` in place; it is left in evaluation mode.

    `objective(model, x, y)` is the loss to minimise. `correct(name, gradient)` may amend a parameter's gradient
    after clipping, just before the step (SCAFFOLD). The order of minibatches depends on `seed` alone, and so does what
    each step draws of samples that are fresh.
    Raises `Diverged` at a loss that is not a number or above 1,000, and where the weights end up not finite: the
    weights of `model` are then useless.
    """
    device = device_of(model, labels.device)  # copy samples to the device once for all steps
    inputs, labels = sent(inputs, device) if isinstance(inputs, Tensor) else inputs, sent(labels, device)
    batch = min(cfg.batch, len(labels))
    normalised = has_batchnorm(model)
    # A batch of one has no variance: such batches are skipped, unless there are no others.
    train_mode(model, frozen=batch == 1)
    smallest = 2 if normalised and batch > 1 else 1
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(cfg.optimizer, parameters, cfg.lr, cfg.momentum, cfg.weight_decay)
    losses = Losses(device, lambda loss: loss <= TOO_LARGE)
    planned = planned_steps(cfg, len(labels), normalised)

    for x, y in minibatches(inputs, labels, cfg, seed):
        if len(y) < smallest:
            continue
        loss = objective(model, x, y)
        if not losses.add(loss):
            raise _diverged(losses, cfg)
        optimizer.lr = rate_at(cfg, losses.steps - 1, planned)
        backward(loss, optimizer)
        if cfg.clip is not None:
            nn.utils.clip_grad_norm_(parameters, cfg.clip)
        if correct is not None:
            for name, p in model.named_parameters():
                if p.grad is not None:
                    p.grad = correct(name, p.grad)
        optimizer.step()
    optimizer.zero_grad()
    model.eval()
    steps = losses.steps
    fine, finite, mean = losses.end(model.state_dict())
    if not fine:
        raise _diverged(losses, cfg)
    if not finite:
        raise Diverged(f"weights that are not finite after {steps} steps; lower lr ({cfg.lr:g}) or set clip", steps)
    return Fitted(steps, sum_of_rates(cfg, steps, planned), mean)


def _diverged(losses: Losses, cfg: Local) -> Diverged:
    """The error for a loss that is too large. On an accelerator, its value and its step are unknown."""
    way_out = f"lower lr ({cfg.lr:g}) or set clip"
    if losses.every == 1:
        way_out = way_out if losses.steps else AT_ONCE
        return Diverged(f"a loss of {losses.worst:g} at step {losses.steps + 1}; {way_out}", losses.steps)
    return Diverged(f"a loss above {TOO_LARGE:g} within the first {losses.steps} steps; {way_out}", losses.steps)


def rate_at(cfg: Local, step: int, steps: int) -> float:
    """The learning rate of a step (counted from 0) of a training of `steps` steps: every training begins with cfg.lr.

    cosine: lr/2 (1 + cos(pi step / steps)), towards 0. multistep: a tenth from half of the steps on, a hundredth from
    three quarters on.
    """
    if cfg.schedule == "cosine":
        return cosine(cfg.lr, step, steps)
    if cfg.schedule == "multistep":
        return cfg.lr * 0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps))
    return cfg.lr


def sum_of_rates(cfg: Local, taken: int, steps: int) -> float:
    """The sum of the learning rates of the first `taken` of `steps` steps."""
    if cfg.schedule == "constant":
        return taken * cfg.lr
    return sum(rate_at(cfg, step, steps) for step in range(taken))


def cosine(lr: float, step: int, steps: int) -> float:
    """Cosine annealing from lr at step 0 to 0 at step `steps`."""
    return lr / 2 * (1 + math.cos(math.pi * step / steps))


def gradient_of(model: nn.Module, inputs: Inputs, labels: Tensor, batch: int, seed: int = 0) -> Weights:
    """The gradient of the mean cross-entropy over all samples, for every parameter; `model` is changed.

    Computed in training mode, as in `fit`: batch by batch if the model has BatchNorm. `seed` determines the draw of
    fresh samples. Always in full precision.
    """
    device = device_of(model, labels.device)
    inputs, labels = sent(inputs, device) if isinstance(inputs, Tensor) else inputs, sent(labels, device)
    smallest = 2 if has_batchnorm(model) and min(batch, len(labels)) > 1 else 1
    train_mode(model, frozen=min(batch, len(labels)) == 1)
    model.zero_grad()
    for i, rows in enumerate(torch.arange(len(labels)).split(batch)):
        x, y = draw(inputs, rows, _draw_seed(seed, i)), take(labels, rows)
        if len(y) >= smallest:
            with full_precision(device):
                (cross_entropy(model, x, y) * (len(y) / len(labels))).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def minibatches(inputs: Inputs, labels: Tensor, cfg: Local, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The minibatches of one training: shuffled epochs, each ending with the samples that are left over."""
    generator = torch.Generator().manual_seed(seed)
    n, step = len(labels), 0
    per_epoch = -(-n // cfg.batch)
    left = steps_to_take(cfg.epochs * per_epoch if cfg.steps is None else cfg.steps)
    while left > 0 and n > 0:
        visited = torch.randperm(n, generator=generator)[: left * cfg.batch]
        # Slices of a permuted copy are faster than indexing every batch; a block at a time bounds the copy.
        for block in visited.split(cfg.batch if is_fresh(inputs) else BLOCK * cfg.batch):
            taken = draw(inputs, block, _draw_seed(seed, step))
            yield from zip(taken.split(cfg.batch), take(labels, block).split(cfg.batch), strict=True)
            step += 1
        left -= per_epoch


def _draw_seed(seed: int, step: int) -> int:
    return seed_from(seed, "draw", step)


def planned_steps(cfg: Local, n: int, normalised: bool) -> int:
    """The number of steps of `fit` on n samples; `normalised`: with BatchNorm, so that single samples are skipped."""
    if n == 0:
        return 0
    per_epoch = -(-n // cfg.batch)
    total = cfg.epochs * per_epoch if cfg.steps is None else cfg.steps
    skipped = normalised and min(cfg.batch, n) > 1 and n % cfg.batch == 1  # the last one of each whole epoch
    return total - total // per_epoch if skipped else total


def logits_of(model: nn.Module, inputs: Inputs, batch: int | None = None) -> Tensor:
    """The answers of `model` to `inputs`, in evaluation mode and without gradients; its mode is restored.

    A forward pass has `batch` samples; by default as many as suit the device.

    The answer to a sample has the same bits whatever other samples are in the batch. (Known exceptions on x86: a
    layer with fewer than 16 outputs and a number of inputs that 4 does not divide, and MKL's COMPATIBLE kernels; the
    last bit can then depend on the position in the batch or on its size.)
    """
    device = device_of(model, inputs.device if isinstance(inputs, Tensor) else CPU)
    tricks = tricks_of(device)
    with evaluating(model):
        size = batch or tricks.asked
        while True:
            try:
                asked = [_answer(model, sent(x, device), tricks.least_rows) for x in batches(inputs, size)]
                break
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size //= 2  # rows do not depend on each other
        answers = torch.cat(asked)
        return answers.float() if answers.dtype in HALF.values() else answers


def _answer(model: nn.Module, inputs: Tensor, least_rows: int) -> Tensor:
    check_stop()
    missing = least_rows - len(inputs)
    if missing <= 0 or len(inputs) == 0:
        return model(inputs)
    # Rows do not depend on each other in evaluation mode, so copies of the last one keep the bits of the others.
    return model(torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])]))[: len(inputs)]


def evaluate(model: nn.Module, inputs: Inputs, labels: Tensor, batch: int | None = None) -> Score:
    """Count the correct answers of `model`; ties go to the lowest class."""
    if len(labels) == 0:
        return Score(0, 0, 0.0)
    if labels.ndim > 1:
        return score_tokens(lambda x: logits_of(model, x).log_softmax(-1), inputs, labels)
    logits = logits_of(model, inputs, batch)
    labels = labels.to(logits.device)
    right = int((logits.argmax(-1) == labels).sum())
    return Score(right, len(labels), F.cross_entropy(logits, labels).item())


def score_tokens(said: Callable[[Tensor], Tensor], inputs: Inputs, labels: Tensor) -> Score:
    """The score of log-probabilities `said(inputs)` [n, length, classes] for a label at every position.

    Computed for a few samples at a time, because answers have tokens times classes numbers.
    """
    right, total = 0, 0.0
    for rows in torch.arange(len(labels), device=labels.device).split(TOKENS_ASKED):
        logs = said(take(inputs, rows))
        y = labels[rows].to(logs.device)
        right += int((logs.argmax(-1) == y).sum())
        total -= finest(logs.gather(-1, y[..., None])).sum().item()
    return Score(right, labels.numel(), total / labels.numel())


# ---- settings shared by every kind of training ------------------------------------------------------


def make_optimizer(
    kind: str, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
) -> Optimizer:
    """A new optimizer, without momentum from another training."""
    return Adam(parameters, lr, weight_decay) if kind == "adam" else Sgd(parameters, lr, momentum, weight_decay)


def momentum_problems(optimizer: str, momentum: float) -> Iterator[Problem]:
    """Report a momentum that is set for Adam, which has its own."""
    if momentum and optimizer == "adam":
        yield f"momentum = {momentum}: momentum belongs to sgd; adam has its own: leave momentum at 0"
