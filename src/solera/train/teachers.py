"""Teachers: the predictions of an ensemble of frozen models for public samples.

Every rule for combining models ends in the same pair per sample: a probability vector p and an entropy h, such that
the student's loss is (cross-entropy of p against the student) - h, with softmax at temperature T on both sides:

    avg_logits   p = softmax(mean of logits / T)      h = H(p)             FedDF's AVGLOGITS
    avg_probs    p = mean of softmax(logits / T)      h = H(p)
    avg_losses   p = mean of softmax(logits / T)      h = mean of H(p_k)   the mean of the teachers' KL losses
    confidence   p = mean of softmax(logits / T),     h = H(p)             Fed-ET's consensus, weighted by
                     weighted by its variance                              confidence (see train.consensus)

and rules in which no single model can dominate the ensemble (see train.robust):

    clipped_logits        as avg_logits, the logits of a model scaled down where they are larger than the median model's
    standardised_logits   as avg_logits, the logits of every model scaled to one spread, the median model's
    median_probs          p = median of softmax(logits / T) class by class, scaled to sum to 1

avg_probs and avg_losses have the same gradient and differ in the value of the loss: the mean of KL(p_k || q) is
KL(p || q) plus a number the student cannot change.

Memory: `frozen` models are stored as weights and share one module, into which weights are loaded for a prediction. The
predictions are written directly to their storage (`Rows`), in float32 or float16, in memory or on disk.
"""

import math
import mmap
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from ..core.tensors import CPU, Inputs, Views, Weights, beside, device_of, draw, is_fresh, sent, take
from ..place.placement import finest, room_for
from .consensus import confidence
from .fitting import logits_of
from .robust import clip_logits, median_probs, standardise_logits

Rule = Literal[
    "avg_logits", "avg_probs", "avg_losses", "confidence", "clipped_logits", "standardised_logits", "median_probs"
]
Build = Callable[[str, Weights], nn.Module]  # (architecture, weights) -> a module of its own
COMPARING = {"clipped_logits": clip_logits, "standardised_logits": standardise_logits}
Targets = tuple[Tensor, ...]
Teacher = Callable[[Tensor], Targets]
Run = Callable[[list[Callable[[], Any]]], list[Any]]

BATCH = 512  # samples in one forward pass of a teacher
BLOCK = 2**20  # bytes written to a new file at a time


def soft_targets(logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """softmax(logits / T) and its entropy.

    Computed with the operations of the student's loss (see distill.divergence), so that a student with the logits of
    its teacher has a loss and a gradient of exactly zero.
    """
    scaled = logits / temperature
    log_sum = scaled.logsumexp(-1)
    probs = (scaled - log_sum[..., None]).exp()
    return probs, log_sum - (probs * scaled).sum(-1)


def entropy(probs: Tensor) -> Tensor:
    """-sum p log p of every row, with 0 log 0 = 0."""
    return -torch.xlogy(probs, probs).sum(-1)


class Frozen(nn.Module):
    """A model stored as weights, which uses a shared module only during a forward pass. Made by `frozen`.

    It predicts in evaluation mode, and its weights are never changed. As the module is not exposed, models can be
    called in any order and by several threads at once. A gradient for the inputs must be computed before another model
    is called (torch refuses it afterwards).
    """

    def __init__(self, architecture: str, weights: Weights, shared: "_SharedModules"):
        super().__init__()
        self.architecture, self.weights, self._shared = architecture, weights, shared
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        model = self._shared.loaded(self.architecture, self.weights)
        return model(sent(inputs, device_of(model)))

    def state_dict(self, *_: Any, **__: Any) -> Weights:  # type: ignore[override]
        """The weights themselves, not a copy."""
        return dict(self.weights)


def frozen(members: Iterable[tuple[str, Weights]], build: Build) -> list[Frozen]:
    """Models (architecture, weights) that share modules: one module per architecture and thread.

    `build` makes a module with given weights. If there is one already, the next model's weights are loaded into it.
    """
    shared = _SharedModules(build)
    return [Frozen(architecture, weights, shared) for architecture, weights in members]


class _SharedModules(threading.local):
    """The modules that frozen models share. Local to a thread: no other thread can load weights into one in use."""

    def __init__(self, build: Build):
        self.build = build
        self.modules: dict[Any, nn.Module] = {}
        self.holds: dict[Any, Weights] = {}  # the weights loaded into each of them
        self.near: dict[int, tuple[Weights, Weights]] = {}  # by identity: weights, and their copy on the device

    def loaded(self, architecture: str, weights: Weights) -> nn.Module:
        """The module with these weights, until the next ones are loaded."""
        kind = architecture, *(t.shape for t in weights.values())  # some methods change the widths of an architecture
        if kind not in self.modules:
            self.modules[kind] = model = self.build(architecture, weights)
            model.eval()
            model.requires_grad_(False)
        elif self.holds[kind] is not weights:
            self.modules[kind].load_state_dict(self._beside(self.modules[kind], weights))
        self.holds[kind] = weights
        return self.modules[kind]

    def _beside(self, model: nn.Module, weights: Weights) -> Weights:
        """The weights on the device of `model`, where they stay if they fit: each model predicts many times."""
        device = device_of(model)
        if device == CPU:
            return weights
        if id(weights) not in self.near:
            if room_for(device, sum(t.nbytes for t in weights.values())) != device:
                return weights
            self.near[id(weights)] = weights, beside(model, weights)
        return self.near[id(weights)][1]


class Ensemble:
    """Several frozen models as one teacher: inputs -> (probabilities, entropy).

    The models may differ in architecture. They stay in evaluation mode, so their BatchNorm statistics never change and
    a prediction never depends on the rest of the batch.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        rule: Rule = "avg_logits",
        weights: Sequence[float] | None = None,
        temperature: float = 1.0,
    ):
        if not models:
            raise ValueError("an ensemble needs at least one model")
        if weights is not None and (len(weights) != len(models) or min(weights) < 0 or sum(weights) <= 0):
            raise ValueError(f"{len(models)} models need as many weights, none negative: {list(weights)}")
        self.models = list(models)
        for model in self.models:
            model.eval()
            model.requires_grad_(False)
        self.rule = rule
        self.weights = [1.0] * len(models) if weights is None else list(weights)
        self.temperature = temperature

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The targets of a batch. Sums are float64, in the order of the models: an ensemble of equal models predicts
        exactly what each of them does."""
        if self.rule in COMPARING or self.rule == "median_probs":
            return self._compared(torch.stack([logits_of(model, inputs) for model in self.models]))
        total: list[Tensor] = []
        for model, a in zip(self.models, self.weights, strict=True):
            said = self._said(logits_of(model, inputs))
            terms = [finest(t) * a for t in said]
            total = [s.add_(t) for s, t in zip(total, terms, strict=True)] if total else terms
        if self.rule == "confidence":  # if no model has any confidence, the weights are equal
            probs, sure, weighted = total
            mean = [torch.where(sure > 0, weighted / sure, probs / sum(self.weights)).to(said[0].dtype)]
        else:
            mean = [(s / sum(self.weights)).to(said[0].dtype) for s in total]
        if self.rule == "avg_logits":
            return soft_targets(mean[0], self.temperature)
        return mean[0], mean[1] if self.rule == "avg_losses" else entropy(mean[0])

    def _said(self, logits: Tensor) -> list[Tensor]:
        if self.rule == "avg_logits":
            return [logits]
        probs, h = soft_targets(logits, self.temperature)
        if self.rule == "confidence":
            sure = confidence(finest(probs))[..., None]
            return [probs, sure, sure * probs]
        return [probs, h]

    def _compared(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The rules that compare the predictions [models, samples, ..., classes] of all models."""
        shape = logits.shape[1:]
        logits = logits.flatten(1, -2)  # of language models: every token is a sample
        probs, h = self._of_all(logits)
        return probs.reshape(shape), h.reshape(shape[:-1])

    def _of_all(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.rule == "median_probs":
            probs = torch.stack([soft_targets(z, self.temperature)[0] for z in logits])
            middle = median_probs(finest(probs), self.weights).to(logits.dtype)
            return middle, entropy(middle)
        level = COMPARING[self.rule](finest(logits), self.weights)
        share = level.new_tensor(self.weights).reshape(-1, 1, 1) / sum(self.weights)
        return soft_targets((level * share).sum(0).to(logits.dtype), self.temperature)


class Rows:
    """Targets of `count` samples, row by row. Each row is written in place as it arrives: there is no second copy.

    `half` stores values per class (probabilities) in float16, and returns them as float32. The error of a probability
    is then at most 2^-11 of it, and at most 2^-25 below 2^-14. Values per sample, such as labels and entropies, are
    stored exactly. `on_disk` stores everything in unnamed files, which are deleted with this object; the operating
    system caches them in memory as it can.
    """

    def __init__(self, count: int, half: bool = False, on_disk: bool = False):
        self.count, self.half, self.on_disk = count, half, on_disk
        self.targets: Targets = ()
        self._lock = threading.Lock()

    def write(self, start: int, targets: Targets) -> None:
        """Write the targets of some samples, from row `start` on."""
        with self._lock:  # the first prediction defines the shape of a row
            self.targets = self.targets or tuple(map(self._allocate, targets))
        for kept, t in zip(self.targets, targets, strict=True):
            kept[start : start + len(t)] = sent(t, kept.device)

    def _allocate(self, like: Tensor) -> Tensor:
        shape = (self.count, *like.shape[1:])
        dtype = torch.float16 if self.half and like.is_floating_point() and like.ndim > 1 else like.dtype
        if self.on_disk and math.prod(shape):
            return _on_disk(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=room_for(like.device, math.prod(shape) * dtype.itemsize))


def read_rows(targets: Targets, rows: Tensor) -> Targets:
    """A copy of some rows of stored targets; float16 as float32."""
    return tuple(_row(t, sent(rows, t.device)) for t in targets)


def _row(stored: Tensor, rows: Tensor) -> Tensor:
    return stored[rows].float() if stored.dtype == torch.float16 else stored[rows]


def _on_disk(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in an unnamed file, mapped into memory; the file is deleted with the tensor."""
    size = math.prod(shape) * dtype.itemsize
    try:
        with tempfile.TemporaryFile() as file:
            # Written, not only reserved: a full disk is an error here, but would kill the process in the mapping.
            for start in range(0, size, BLOCK):
                file.write(bytes(min(BLOCK, size - start)))
            file.flush()
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as e:
        raise OSError(
            e.errno,
            f"{tempfile.gettempdir()} has no space for teachers' predictions, {size / 2**20:.1f} MiB ({e.strerror}): "
            "set TMPDIR to a directory with more space, or leave out fusion.cache_on_disk",
        ) from e
    return torch.frombuffer(mapped, dtype=dtype).view(shape)


class Cache:
    """Targets of public samples, computed once and looked up by the index of the sample."""

    def __init__(self, targets: Sequence[Tensor], indices: Tensor | None = None, size: int | None = None):
        """`targets[...][r]` belong to sample `indices[r]` of `size` samples (to sample r, without indices)."""
        self.targets = tuple(targets)
        rows = torch.arange(len(self.targets[0]))
        self._row = rows if indices is None else torch.full((size or int(indices.max()) + 1,), -1)
        if indices is not None:
            self._row[indices] = rows
        self._table: Tensor | None = None

    @classmethod
    def of(
        cls,
        teacher: Teacher,
        samples: Inputs,
        indices: Tensor,
        run: Run | None = None,
        batch: int = BATCH,
        half: bool = False,
        on_disk: bool = False,
    ) -> "Cache":
        """Compute the predictions of `teacher` once for each of the samples `indices`, in large batches.

        Batches are independent: `run` may compute them in parallel. Memory holds the targets (see Rows for `half` and
        `on_disk`) and, per worker, one teacher's predictions for one batch (all teachers' predictions, for the rules
        that compare them).
        """
        run = run or (lambda functions: [f() for f in functions])
        rows = Rows(len(indices), half, on_disk)
        run([partial(_ask, teacher, samples, i, rows, n * batch) for n, i in enumerate(indices.split(batch))])
        return cls(rows.targets, indices, len(samples))

    def beside(self, table: Tensor) -> "Cache":
        """The same targets, each with the row of `table` that has the index of the sample: its label."""
        both = Cache(self.targets)
        both._row, both._table = self._row, table
        return both

    def __getitem__(self, indices: Tensor) -> Targets:
        rows = self._row[indices]
        if bool((rows < 0).any()):
            raise IndexError("no stored targets for some of these public samples")
        found = read_rows(self.targets, rows)
        return found if self._table is None else (*found, self._table[indices])


def by_position(teacher: Callable[[Inputs], Targets], inputs: Inputs) -> Callable[[Tensor, Tensor], Targets]:
    """The predictions of a frozen `teacher`, as a function of a minibatch of `inputs` and its positions in them.

    They are computed once for every sample. If samples are fresh, they are computed for each minibatch, because a
    sample differs between draws.
    """
    if is_fresh(inputs):
        return lambda drawn, _: teacher(drawn)
    targets = teacher(inputs)
    return lambda _, positions: read_rows(targets, positions)


def lowest_entropy(targets: Cache, indices: Tensor, count: int) -> Tensor:
    """The `count` of the samples `indices` with the lowest entropy of the teacher, in the order given."""
    entropies = torch.cat([entropy(targets[i][0]) for i in indices.split(BATCH)])
    kept = entropies.sort(stable=True).indices[:count]
    return indices[kept.sort().values]


def _ask(teacher: Teacher, samples: Inputs, indices: Tensor, rows: Rows, start: int) -> None:
    rows.write(start, teacher(take(samples, indices)))


def drop_worst(accuracies: Sequence[float], classes: int, threshold: float = 1.2, outlier: bool = False) -> list[int]:
    """Positions of the teachers to keep: those better than guessing (FedDF's "drop-worst").

    Drops accuracies (between 0 and 1) below `threshold` times chance, 1/classes. With `outlier`, if there are none,
    drops those more than 1.5 standard deviations below the mean of all but the best. Always keeps at least the best.
    """
    if not accuracies:
        return []
    if not 0 <= threshold <= classes:
        raise ValueError(f"threshold (in multiples of chance) must be in [0, {classes}], not {threshold}")
    best = max(range(len(accuracies)), key=lambda i: accuracies[i])
    kept = [i for i, a in enumerate(accuracies) if a >= threshold / classes]
    if outlier and len(kept) == len(accuracies) > 1:
        others = [a for i, a in enumerate(accuracies) if i != best]
        least = fmean(others) - 1.5 * pstdev(others)
        kept = [i for i, a in enumerate(accuracies) if a >= least]
    return kept or [best]


# ---- Representations: the output of a split model before its head, and MOON's objective on them --


class Split(Protocol):
    """A model in two steps: head(represent(x))."""

    head: Callable[[Tensor], Tensor]

    def represent(self, x: Tensor) -> Tensor: ...


class _Encoder(nn.Module):
    """A split model without its head."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return cast(Split, self.model).represent(x)


def representations_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """The representations of `inputs`, in evaluation mode and without gradients; `model` does not change."""
    return logits_of(_Encoder(model), inputs)


def represented(model: nn.Module, inputs: Inputs) -> Inputs:
    """The same as samples to train a head on: fresh samples are represented when they are drawn."""
    if not is_fresh(inputs):
        return representations_of(model, inputs)
    return Views(
        len(inputs),
        lambda rows: representations_of(model, take(inputs, rows)),
        lambda rows, seed: representations_of(model, draw(inputs, rows, seed)),
    )
