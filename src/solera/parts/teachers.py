"""Teachers: what an ensemble of frozen models says about public samples.

Every rule for combining models ends in the same pair per sample: a probability vector p and an entropy h, such that
the student's loss is (cross-entropy of p against the student) - h, with softmax at temperature T on both sides:

    avg_logits   p = softmax(mean of logits / T)      h = H(p)             FedDF's AVGLOGITS
    avg_probs    p = mean of softmax(logits / T)      h = H(p)
    avg_losses   p = mean of softmax(logits / T)      h = mean of H(p_k)   the mean of the teachers' KL losses
    confidence   p = mean of softmax(logits / T),     h = H(p)             Fed-ET's consensus: who is sure of a
                     weighted by its variance                              sample counts more (see parts.consensus)

and so that no single model can own the ensemble (see parts.robust):

    clipped_logits        as avg_logits, the logits of a model scaled down where they are larger than the median model's
    standardised_logits   as avg_logits, the logits of every model scaled to one spread, the median model's
    median_probs          p = median of softmax(logits / T) class by class, scaled to sum to 1

avg_probs and avg_losses have the same gradient and differ in the value of the loss: the mean of KL(p_k || q) is
KL(p || q) plus a number the student cannot change.

What this costs in memory: `frozen` models are weights until they are asked, and then take turns in one module; their
answers are written where they are kept (`Rows`), in float32 or float16, in memory or on disk.
"""

import math
import mmap
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..tensors import Inputs, Weights, is_fresh, take
from .consensus import confidence
from .local import logits_of
from .robust import clip_logits, median_probs, standardise_logits

Rule = Literal[
    "avg_logits", "avg_probs", "avg_losses", "confidence", "clipped_logits", "standardised_logits", "median_probs"
]
Build = Callable[[str, Weights], nn.Module]  # (architecture, weights) -> a module of its own
COMPARING = {"clipped_logits": clip_logits, "standardised_logits": standardise_logits}
Targets = tuple[Tensor, ...]
Teacher = Callable[[Tensor], Targets]
Run = Callable[[list[Callable[[], Any]]], list[Any]]

BATCH = 512  # samples that a teacher is asked about at once
BLOCK = 2**20  # bytes written to a new file at once


def soft_targets(logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """softmax(logits / T) and its entropy.

    Computed with the operations of the student's loss (see distill.divergence), so that a student that answers
    exactly like its teacher has a loss and a gradient of exactly zero.
    """
    scaled = logits / temperature
    log_sum = scaled.logsumexp(-1)
    probs = (scaled - log_sum[:, None]).exp()
    return probs, log_sum - (probs * scaled).sum(-1)


def entropy(probs: Tensor) -> Tensor:
    """-sum p log p of every row, with 0 log 0 = 0."""
    return -torch.xlogy(probs, probs).sum(-1)


class Frozen(nn.Module):
    """A model that is given by its weights and takes up a module only while it answers. Made by `frozen`.

    It answers in evaluation mode and its weights are never written to. As no module is handed out, models can be asked
    in any order and by several threads at once. A gradient for the inputs must be taken before another model is asked
    (torch refuses it afterwards).
    """

    def __init__(self, architecture: str, weights: Weights, turns: "_Turns"):
        super().__init__()
        self.architecture, self.weights, self._turns = architecture, weights, turns
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self._turns.loaded(self.architecture, self.weights)(inputs)

    def state_dict(self, *_: Any, **__: Any) -> Weights:  # type: ignore[override]
        """The weights themselves, not a copy."""
        return dict(self.weights)


def frozen(members: Iterable[tuple[str, Weights]], build: Build) -> list[Frozen]:
    """Models (architecture, weights) that take turns: each thread that asks them has one module an architecture.

    `build` makes a module with given weights; where there is one already, the next model's weights are loaded into it.
    """
    turns = _Turns(build)
    return [Frozen(architecture, weights, turns) for architecture, weights in members]


class _Turns(threading.local):
    """The modules in which models take turns. Being local to a thread, none is loaded anew while another uses it."""

    def __init__(self, build: Build):
        self.build = build
        self.modules: dict[Any, nn.Module] = {}
        self.holds: dict[Any, Weights] = {}  # what each of them has loaded

    def loaded(self, architecture: str, weights: Weights) -> nn.Module:
        """The module with these weights, until the next ones are loaded."""
        kind = architecture, *(t.shape for t in weights.values())  # some methods change the widths of an architecture
        if kind not in self.modules:
            self.modules[kind] = model = self.build(architecture, weights)
            model.eval()
            model.requires_grad_(False)
        elif self.holds[kind] is not weights:
            self.modules[kind].load_state_dict(weights)
        self.holds[kind] = weights
        return self.modules[kind]


class Ensemble:
    """Several frozen models as one teacher: inputs -> (probabilities, entropy).

    The models may differ in architecture. They are put in evaluation mode and stay in it, so their BatchNorm
    statistics never change and an answer never depends on the rest of the batch.
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
        """The targets of a batch. Sums run in float64, in the order of the models: equal models give their own
        answer back exactly."""
        if self.rule in COMPARING or self.rule == "median_probs":
            return self._compared(torch.stack([logits_of(model, inputs) for model in self.models]))
        total: list[Tensor] = []
        for model, a in zip(self.models, self.weights, strict=True):
            said = self._said(logits_of(model, inputs))
            terms = [t.double().mul_(a) for t in said]
            total = [s.add_(t) for s, t in zip(total, terms, strict=True)] if total else terms
        if self.rule == "confidence":  # where nobody is sure of anything, all count the same
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
            sure = confidence(probs.double())[:, None]
            return [probs, sure, sure * probs]
        return [probs, h]

    def _compared(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The rules for which the models' answers [models, samples, classes] must be seen side by side."""
        if self.rule == "median_probs":
            probs = torch.stack([soft_targets(z, self.temperature)[0] for z in logits])
            middle = median_probs(probs.double(), self.weights).to(logits.dtype)
            return middle, entropy(middle)
        level = COMPARING[self.rule](logits.double(), self.weights)
        share = torch.tensor(self.weights, dtype=torch.float64).reshape(-1, 1, 1) / sum(self.weights)
        return soft_targets((level * share).sum(0).to(logits.dtype), self.temperature)


class Rows:
    """Targets of so many samples, row by row. Each row is written to its place as it comes: there is no second copy.

    `half` keeps the numbers there are for each class, probabilities, in float16, and gives them back as float32. A
    probability is then off by at most 2^-11 of itself, and by at most 2^-25 below 2^-14; labels, entropies and all
    other numbers that a sample has one of are as they were. `on_disk` keeps everything in files that have no name and
    are gone when this is: memory holds what the operating system finds room for.
    """

    def __init__(self, count: int, half: bool = False, on_disk: bool = False):
        self.count, self.half, self.on_disk = count, half, on_disk
        self.targets: Targets = ()
        self._lock = threading.Lock()

    def write(self, start: int, targets: Targets) -> None:
        """Put down the targets of some samples, from row `start` on."""
        with self._lock:  # the first answer tells how many numbers a row has
            self.targets = self.targets or tuple(map(self._room, targets))
        for kept, t in zip(self.targets, targets, strict=True):
            kept[start : start + len(t)] = t

    def _room(self, like: Tensor) -> Tensor:
        shape = (self.count, *like.shape[1:])
        dtype = torch.float16 if self.half and like.is_floating_point() and like.ndim > 1 else like.dtype
        return _on_disk(shape, dtype) if self.on_disk and math.prod(shape) else torch.empty(shape, dtype=dtype)


def read_rows(targets: Targets, rows: Tensor) -> Targets:
    """A copy of some rows of what is kept; halves as float32."""
    return tuple(t[rows].float() if t.dtype == torch.float16 else t[rows] for t in targets)


def _on_disk(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a file without a name, mapped into memory; the file is gone when the tensor is."""
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
            f"{tempfile.gettempdir()} has no room for the teachers' answers, {size / 2**20:.1f} MiB ({e.strerror}): "
            "set TMPDIR to a directory with more, or leave out fusion.cache_on_disk",
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
        """Ask `teacher` once about each of the samples `indices`, in large batches.

        Batches are independent: `run` may work on them side by side. At no time is more kept than the targets (see
        Rows for `half` and `on_disk`) and one teacher's answers to one batch per worker (all teachers' answers, for
        the rules that compare them).
        """
        run = run or (lambda functions: [f() for f in functions])
        rows = Rows(len(indices), half, on_disk)
        run([partial(_ask, teacher, samples, i, rows, n * batch) for n, i in enumerate(indices.split(batch))])
        return cls(rows.targets, indices, len(samples))

    def __getitem__(self, indices: Tensor) -> Targets:
        rows = self._row[indices]
        if bool((rows < 0).any()):
            raise IndexError("targets asked for public samples the teacher was never shown")
        return read_rows(self.targets, rows)


def by_position(teacher: Callable[[Inputs], Targets], inputs: Inputs) -> Callable[[Tensor, Tensor], Targets]:
    """What a frozen `teacher` says about a minibatch of `inputs`: a function of it and of its positions in `inputs`.

    The teacher is asked once about every sample. Where samples are drawn anew it is asked about each minibatch, because
    what it says about a sample does not hold for the next draw.
    """
    if is_fresh(inputs):
        return lambda drawn, _: teacher(drawn)
    targets = teacher(inputs)
    return lambda _, positions: read_rows(targets, positions)


def lowest_entropy(targets: Cache, indices: Tensor, count: int) -> Tensor:
    """The `count` of the samples `indices` of whose class the teacher is surest, in the order given."""
    entropies = torch.cat([entropy(targets[i][0]) for i in indices.split(BATCH)])
    kept = entropies.sort(stable=True).indices[:count]
    return indices[kept.sort().values]


def _ask(teacher: Teacher, samples: Inputs, indices: Tensor, rows: Rows, start: int) -> None:
    rows.write(start, teacher(take(samples, indices)))


def drop_worst(accuracies: Sequence[float], classes: int, threshold: float = 1.2, outlier: bool = False) -> list[int]:
    """Positions of the teachers to keep: those better than guessing (FedDF's "drop-worst").

    Dropped are accuracies (between 0 and 1) below `threshold` times chance, 1/classes. With `outlier`, if nobody
    falls below that, those more than 1.5 standard deviations below the mean of all but the best go. If nobody
    would be left, the best one stays.
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
