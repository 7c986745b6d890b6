"""Defences against single clients: an overconfident liar must not own the ensemble, nor the average.

A reply can be finite, have the right shape and still be a lie: a last layer of zeros with a bias of 10,000 for one
class makes the mean of the logits, and the mean of the weights, that one client's. What is here bounds the share of
any one of them. None of it helps against a majority, and a median of two is their mean: it takes three.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..tensors import Weights

FILTERED = 1024  # samples filtered at a time


# ---- medians ----------------------------------------------------------------------------------------


def weighted_median(values: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The median over the first dimension, where entry i counts `weights[i]` times; half way, the mean of both sides.

    With equal weights this is the ordinary median: of an even number, the mean of the two in the middle.
    """
    if weights is not None and (len(weights) != len(values) or min(weights) < 0 or sum(weights) <= 0):
        raise ValueError(f"{len(values)} values need as many weights, none negative: {list(weights)}")
    if weights is None or len(set(weights)) == 1:
        ordered = values.sort(0).values
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
    ordered, order = values.sort(0)
    share = torch.tensor(weights, dtype=torch.float64)[order].cumsum(0)
    half = share[-1:] / 2
    low = (share < half).sum(0, keepdim=True)  # the first whose share, with all below it, reaches the half ...
    high = (share <= half).sum(0, keepdim=True)  # ... and the first that goes beyond it
    return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2)[0]


def coordinate_median(uploads: Sequence[Weights], weights: Sequence[float] | None = None) -> Weights:
    """The median of the uploads, number by number: in place of their mean, for whole models or only their heads.

    Integer tensors (counters) have no meaningful median: their maximum is kept, as in a mean.
    """
    if not uploads:
        raise ValueError("the median of no uploads is not defined")
    if any(u.keys() != uploads[0].keys() for u in uploads):
        raise ValueError("cannot take the median of models that differ in their tensors")
    out = {}
    for name, first in uploads[0].items():
        values = torch.stack([u[name] for u in uploads])
        out[name] = weighted_median(values, weights) if first.is_floating_point() else values.amax(0)
    return out


# ---- norms of updates -------------------------------------------------------------------------------


def update_norm(upload: Weights, start: Weights, names: Iterable[str]) -> float:
    """How far the tensors `names` of an upload have moved from where they started (Euclidean)."""
    squares = [(upload[n].double() - start[n].double()).square().sum() for n in names]
    return torch.stack(squares).sum().sqrt().item() if squares else 0.0


def clip_update(upload: Weights, start: Weights, bound: float, names: Iterable[str]) -> Weights:
    """The upload with the move of its tensors `names` from `start` cut to the length `bound`, in the same direction.

    An upload within the bound is returned as it is.
    """
    names = list(names)
    norm = update_norm(upload, start, names)
    if norm <= bound:
        return upload
    moved = {n: start[n].double() + (upload[n].double() - start[n].double()) * (bound / norm) for n in names}
    return upload | {n: t.to(upload[n].dtype) for n, t in moved.items()}


def clip_updates(uploads: Sequence[Weights], start: Weights, factor: float, parameters: Iterable[str]) -> list[Weights]:
    """Cut every upload to `factor` times the median length of all of them, which one client cannot move.

    `parameters` and the other floating-point tensors (BatchNorm statistics) are measured and cut each for themselves:
    the statistics move on a scale of their own.
    """
    if not factor > 0:
        raise ValueError(f"an update is cut to a positive multiple of the median length, not to {factor}")
    wanted = set(parameters)
    floats = [n for n, t in start.items() if t.is_floating_point()]
    clipped = list(uploads)
    for names in ([n for n in floats if n in wanted], [n for n in floats if n not in wanted]):
        lengths = torch.tensor([update_norm(u, start, names) for u in uploads], dtype=torch.float64)
        if len(uploads) and names:
            bound = factor * weighted_median(lengths).item()
            clipped = [clip_update(u, start, bound, names) for u in clipped]
    return clipped


# ---- teachers' answers ------------------------------------------------------------------------------


def clip_logits(logits: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The logits [teachers, samples, classes] about their mean, none larger for a sample than the median teacher's.

    How large a teacher's logits are is the size of its largest. Where they are too large all of them are scaled down:
    cutting them off one by one would change their order. A teacher that is not sure stays so.
    """
    centred = logits - logits.mean(-1, keepdim=True)
    largest = centred.abs().amax(-1, keepdim=True)
    bound = weighted_median(largest, weights)
    return centred * torch.where(largest > bound, bound / largest, 1)


def standardise_logits(logits: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The logits [teachers, samples, classes], all of one spread for a sample: the median of the teachers' own.

    So all speak equally loud, also those that are not sure, and the ensemble is as sure as its teachers usually are.
    A teacher that gives all classes the same has no spread and says 0.
    """
    centred = logits - logits.mean(-1, keepdim=True)
    spread = centred.square().mean(-1, keepdim=True).sqrt()
    return centred / torch.where(spread == 0, 1, spread) * weighted_median(spread, weights)


def median_probs(probs: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The median over the teachers of each class's probability [teachers, samples, classes], made to sum to 1.

    Where every class is ruled out by most of the teachers nothing is left to scale; there the mean is taken.
    """
    middle = weighted_median(probs, weights)
    total = middle.sum(-1, keepdim=True)
    n = torch.ones(len(probs), dtype=probs.dtype) if weights is None else torch.tensor(weights, dtype=probs.dtype)
    mean = (probs * n.reshape(-1, 1, 1)).sum(0) / n.sum()
    return torch.where(total > 0, middle / total, mean)


def filtered_mean(answers: Tensor, epsilon: float, passes: int = 2) -> Tensor:
    """The mean over teachers of `answers` [teachers, samples, classes] without those that stand out, sample by sample.

    In each pass the answers to a sample are centred, and those furthest out along the direction in which they differ
    most (the top right-singular vector) are left out: the share `epsilon` of all teachers, spread over the passes.
    Ties keep the first. A filter in the manner of Diakonikolas et al., made deterministic, as used for Cronus.
    """
    if not 0 <= epsilon < 0.5:
        raise ValueError(f"epsilon (the share of teachers that may lie) must be in [0, 0.5), not {epsilon}")
    dropped = math.floor(epsilon * len(answers) / passes + 0.5)
    parts = [_filtered(part.double().transpose(0, 1), dropped, passes) for part in answers.split(FILTERED, 1)]
    return torch.cat(parts).to(answers.dtype)


def _filtered(kept: Tensor, dropped: int, passes: int) -> Tensor:
    """The mean of what is left of `kept` [samples, teachers, classes] when `dropped` are left out in each pass."""
    for _ in range(passes):
        left = kept.shape[1] - dropped
        if dropped == 0 or left < 1:
            break
        centred = kept - kept.mean(1, keepdim=True)
        direction = torch.linalg.svd(centred, full_matrices=False).Vh[:, :1]
        distance = (centred * direction).sum(-1).abs().round(decimals=9)  # two are equally far from their mean: a tie
        inner = distance.sort(dim=1, stable=True).indices[:, :left].sort(1).values
        kept = kept.gather(1, inner[..., None].expand(-1, -1, kept.shape[-1]))
    return kept.mean(1)
