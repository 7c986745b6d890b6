"""Distillation: fit a student to a teacher's predictions for unlabelled samples."""

import threading
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.settings import BelowOne, NonNegative, NonNegativeInt, Positive, PositiveInt, Problem, settings
from ..core.tensors import Inputs, device_of, draw, is_finite, is_fresh, sent, take, weights_of
from ..place.placement import steps_to_take
from .aggregate import RunningMean
from .fitting import cosine, make_optimizer, momentum_problems
from .losses import Losses, backward, finite_loss
from .norms import evaluating, reestimate, train_mode
from .teachers import Cache, Rows, Run, Targets, Teacher, read_rows, soft_targets

Loss = Callable[..., Tensor]  # (student's logits, *targets) -> scalar
Validate = Callable[[nn.Module], float]  # -> accuracy

NORM_SAMPLES = 2048  # public samples for the BatchNorm statistics of averaged weights


@settings
class Distill:
    """The distillation of a student. The defaults are FedDF's, except the number of steps (10,000 in the paper)."""

    steps: NonNegativeInt = 500
    batch: PositiveInt = 128
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: NonNegative = 1e-3
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0
    schedule: Literal["cosine", "constant"] = "cosine"
    temperature: Positive = 1.0
    t_squared: bool = False  # multiply the loss by T^2
    clip: Positive | None = 5.0  # largest norm of the gradient
    every: PositiveInt = 100  # steps between evaluations on the validation set, if there is one
    patience: PositiveInt | None = 1000  # stop this many steps after the best evaluation; None: never
    student_norm: Literal["train", "frozen"] = "train"  # BatchNorm statistics of the student
    keep_init_if_better: bool = False  # keep the initial student if none is as good on the validation set
    swa_every: PositiveInt | None = None  # stochastic weight averaging (SWA): average the weights every this many steps
    swa_start: NonNegativeInt = 0  # first step of SWA; if training ends before it, the last weights count
    cache_dtype: Literal["float32", "float16"] = "float32"  # of the teachers' cached predictions; float16 has 3 digits
    cache_on_disk: bool = False  # cache teachers' predictions in a temporary file (TMPDIR), not in memory

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        yield from momentum_problems(self.optimizer, self.momentum)

    TRAINS_ON: ClassVar = "public"  # see core.task.Trains

    def visits(self, rows: int) -> int:
        """The number of samples that a distillation on `rows` public samples sees, each as often as it comes."""
        return self.steps * min(self.batch, rows)


@settings
class Distilled:
    """The outcome of a distillation. `best_step` is the step whose weights the student has now (0: initial weights)."""

    steps: int
    best_step: int
    diverged: bool
    loss: float | None  # mean over the last steps (at most `every`); None if no step was taken
    accuracy: float | None  # on the validation set, at `best_step`; None without evaluation


def divergence(
    logits: Tensor, probs: Tensor, entropy: Tensor, temperature: float = 1.0, t_squared: bool = False
) -> Tensor:
    """Mean over the batch of (cross-entropy of `probs` against softmax(logits / T)) - entropy, times T^2 if requested.

    This is KL(probs || student) if `entropy` is that of `probs`. The gradient per sample is (q - p) / T. With logsumexp
    instead of log_softmax it is exactly zero where student and teacher agree exactly. (Adam turns rounding errors into
    full steps.)
    """
    scaled = logits / temperature
    loss = (scaled.logsumexp(-1) - (probs * scaled).sum(-1) - entropy).mean()
    return loss * temperature**2 if t_squared else loss


def kd_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, t_squared: bool = False) -> Tensor:
    """KL(softmax(teacher / T) || softmax(student / T)) of logits, mean over the batch, times T^2 if requested."""
    return divergence(student, *soft_targets(teacher, temperature), temperature, t_squared)


def visits(n: int, steps: int, batch: int, seed: int) -> Tensor:
    """The samples of each step, out of n: [steps, min(batch, n)], pass after pass, each shuffled anew.

    If a pass ends within a minibatch, the next pass fills it with its first samples that are not in it yet: no
    minibatch has a sample twice, and every pass has each sample once. With n <= batch a step sees all n.
    """
    if n < 1:
        raise ValueError("there is no public sample to distil on")
    batch, steps = min(batch, n), steps_to_take(steps)
    generator = torch.Generator().manual_seed(seed)
    passes: list[Tensor] = []
    for done in range(0, max(steps * batch, 1), n):
        order = torch.randperm(n, generator=generator)
        if begun := done % batch:  # this many samples of the minibatch come from the pass before
            free = ~torch.isin(order, passes[-1][-begun:])
            first = free & (free.cumsum(0) <= batch - begun)
            order = torch.cat([order[first], order[~first]])
        passes.append(order)
    return torch.cat(passes)[: steps * batch].view(steps, batch)


def cached(teacher: Teacher, public: Inputs, indices: Tensor, cfg: Distill, run: Run | None = None) -> Cache:
    """The predictions of `teacher` for the samples `indices`, computed once; `cfg` defines how they are stored."""
    return Cache.of(teacher, public, indices, run, half=cfg.cache_dtype == "float16", on_disk=cfg.cache_on_disk)


class Memo:
    """A teacher of several students on fresh samples, drawn at each step: it predicts once per step for all students.

    Students with the same seed and the same samples see the same draws. The first student to reach a step computes the
    predictions, so none are computed for steps that no student reaches. `cfg` defines how they are stored.
    """

    def __init__(self, teacher: Teacher, indices: Tensor, cfg: Distill, seed: int):
        self.teacher, self.seed = teacher, seed
        self.walk = indices[visits(len(indices), cfg.steps, cfg.batch, seed)]
        self._rows = Rows(self.walk.numel(), cfg.cache_dtype == "float16", cfg.cache_on_disk)
        self._asked = [False] * cfg.steps
        self._locks = [threading.Lock() for _ in range(cfg.steps)]

    def at(self, step: int, inputs: Tensor) -> Targets:
        """The targets of the mini-batch of a step (counted from 1), which is `inputs`."""
        i, batch = step - 1, len(inputs)
        with self._locks[i]:  # the second student waits for the predictions
            if not self._asked[i]:
                self._rows.write(i * batch, self.teacher(inputs))
                self._asked[i] = True
        return read_rows(self._rows.targets, torch.arange(i * batch, step * batch))


def distill(
    student: nn.Module,
    public: Inputs,
    teacher: Teacher | Cache | Memo,
    cfg: Distill,
    seed: int,
    *,
    indices: Tensor | None = None,
    loss: Loss | None = None,
    validate: Validate | None = None,
) -> Distilled:
    """Train `student` in place on the public samples `indices` (all, unless given); it ends in evaluation mode.

    `teacher` is a Cache (looked up by sample), a Memo (by step) or a function of a batch of inputs. Each returns the
    targets of `loss(logits, *targets)`: (probabilities, entropy) for the built-in KL loss. `validate(student)` is the
    accuracy for early stopping: the student then ends with the best weights (strictly better, evaluated every `every`
    steps and at the last one), otherwise with the last. With `cfg.keep_init_if_better` it ends with its initial weights
    if these are strictly better than all of them; patience counts from the first evaluation in either case.
    If a loss or weights are not finite, distillation stops and the student gets its best finite weights, or its initial
    ones.
    With weight averaging (`cfg.swa_every`) there is no early stopping: the student ends with the averaged weights, and
    its BatchNorm statistics are estimated anew from public samples.
    Samples that are drawn anew at each step (`public.fresh`) need a teacher that predicts at each step: a function, or
    a Memo of it for several students.
    """
    if cfg.keep_init_if_better and validate is None:
        raise ValueError("keep_init_if_better compares accuracies: it needs a validation set")
    if is_fresh(public) and isinstance(teacher, Cache):
        raise ValueError("samples are drawn anew at each step: stored targets do not match them")
    loss = loss or (lambda z, p, h: divergence(z, p, h, cfg.temperature, cfg.t_squared))
    chosen = torch.arange(len(public)) if indices is None else indices
    walk = chosen[visits(len(chosen), cfg.steps, cfg.batch, seed)]
    if isinstance(teacher, Memo) and (teacher.seed != seed or not torch.equal(teacher.walk, walk)):
        raise ValueError(f"a memo for seed {teacher.seed} has no predictions for other samples or draws (seed {seed})")
    parameters, device = [p for p in student.parameters() if p.requires_grad], device_of(student)
    optimizer = make_optimizer(cfg.optimizer, parameters, cfg.lr, cfg.momentum, cfg.weight_decay)
    best, mean = _Best(student, validate), RunningMean()
    untrained, start = best.judge() if cfg.keep_init_if_better else None, best.weights
    frozen = cfg.student_norm == "frozen" or walk.shape[1] == 1  # a batch of one has no variance for BatchNorm
    train_mode(student, frozen)

    step, diverged = 0, False
    losses = Losses(device, finite_loss, kept=cfg.every)
    for step, i in enumerate(walk, 1):
        x = sent(draw(public, i, seed + step), device)
        targets = [sent(t, device) for t in _targets(teacher, step, i, x)]
        value = loss(student(x), *targets)
        if diverged := not losses.add(value):
            break
        backward(value, optimizer)
        if cfg.clip is not None:
            nn.utils.clip_grad_norm_(parameters, cfg.clip)
        if cfg.schedule == "cosine":
            optimizer.lr = cosine(cfg.lr, step - 1, cfg.steps)
        optimizer.step()
        if cfg.swa_every is not None:
            if step > cfg.swa_start and (step - cfg.swa_start) % cfg.swa_every == 0:
                weights = weights_of(student)
                if diverged := not is_finite(weights):
                    break
                mean.add(weights, 1)
        elif step == cfg.steps or (validate is not None and step % cfg.every == 0):
            if diverged := not (losses.look() and best.look(step)):
                break
            if cfg.patience is not None and step - best.step >= cfg.patience:
                break
    optimizer.zero_grad()
    diverged = diverged or not losses.look()
    if mean.total:
        student.load_state_dict(mean.result())
        if not frozen:
            reestimate(student, take(public, walk.flatten()[: min(len(chosen), NORM_SAMPLES)]))
    if cfg.swa_every is not None and step and (mean.total or not diverged):
        diverged = not best.look(step) or diverged
    if untrained is not None and (best.accuracy is None or untrained > best.accuracy):  # a tie keeps the trained one
        best.step, best.weights, best.accuracy = 0, start, untrained
    student.load_state_dict(best.weights)
    student.eval()
    return Distilled(step, best.step, diverged, losses.recent, best.accuracy)


class _Best:
    """The best weights of a student so far; without validation, the latest ones."""

    def __init__(self, student: nn.Module, validate: Validate | None):
        self.student, self.validate = student, validate
        self.step, self.weights = 0, weights_of(student)
        self.accuracy: float | None = None

    def look(self, step: int) -> bool:
        """Compare the student's current weights; False if they are not finite."""
        weights = weights_of(self.student)
        if not is_finite(weights):
            return False
        accuracy = self.judge()
        if accuracy is None or self.accuracy is None or accuracy > self.accuracy:
            self.step, self.weights, self.accuracy = step, weights, accuracy
        return True

    def judge(self) -> float | None:
        """The student's current accuracy; None without validation."""
        if self.validate is None:
            return None
        with evaluating(self.student):
            return self.validate(self.student)


def _targets(teacher: Teacher | Cache | Memo, step: int, indices: Tensor, inputs: Tensor) -> Targets:
    if isinstance(teacher, Cache):
        return teacher[indices]
    return teacher.at(step, inputs) if isinstance(teacher, Memo) else teacher(inputs)
