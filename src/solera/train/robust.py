"""Defences against malicious clients: no single client may dominate the ensemble or the average.

A reply can be finite, have the right shape and still be malicious: a last layer of zeros with a bias of 10,000 for one
class dominates the mean of the logits and the mean of the weights. These functions bound the influence of any one
client. They do not help against a majority. A median needs at least three clients: a median of two is their mean.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..core.tensors import Weights
from ..place.placement import finest_type
from .aggregate import factored, multiplied, pairs_of

# ---- medians ----------------------------------------------------------------------------------------


def weighted_median(values: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The median over the first dimension, where entry i counts `weights[i]` times; at exactly half, the mean of both.

    With equal weights this is the ordinary median: for an even number, the mean of the two in the middle.
    """
    if weights is not None and (len(weights) != len(values) or min(weights) < 0 or sum(weights) <= 0):
        raise ValueError(f"{len(values)} values need as many weights, none negative: {list(weights)}")
    if weights is None or len(set(weights)) == 1:
        ordered = values.sort(0).values
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
    ordered, order = values.sort(0)
    share = torch.tensor(weights, dtype=finest_type(order.device), device=order.device)[order].cumsum(0)
    half = share[-1:] / 2
    low = (share < half).sum(0, keepdim=True)  # the first entry whose cumulative share reaches half ...
    high = (share <= half).sum(0, keepdim=True)  # ... and the first that exceeds it
    return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2)[0]


def coordinate_median(uploads: Sequence[Weights], weights: Sequence[float] | None = None) -> Weights:
    """The coordinate-wise median of the uploads, instead of their mean; for whole models or only their heads.

    Integer tensors (counters) have no meaningful median: their maximum is kept, as in a mean.
    """
    if not uploads:
        raise ValueError("the median of no uploads is not defined")
    if any(u.keys() != uploads[0].keys() for u in uploads):
        raise ValueError("cannot take the median of models that differ in their tensors")
    return by_number(uploads, lambda values: weighted_median(values, weights))


def by_number(uploads: Sequence[Weights], one: Callable[[Tensor], Tensor]) -> Weights:
    """A model whose floating-point numbers are `one` of those of the uploads, which it gets along the first dimension.

    Of LoRA, it takes the products (`aggregate.multiplied`). Of integer tensors the maximum is kept.
    """
    whole, out = [multiplied(u) for u in uploads], {}
    for name, first in whole[0].items():
        values = torch.stack([u[name] for u in whole])
        out[name] = one(values).to(first.dtype) if first.is_floating_point() else values.amax(0)
    return factored(out, pairs_of(uploads[0]))


# ---- norms of updates -------------------------------------------------------------------------------


def update_norm(upload: Weights, start: Weights, names: Iterable[str]) -> float:
    """The Euclidean norm of an upload's change from `start`, over the tensors `names`."""
    squares = [(upload[n].double() - start[n].double()).square().sum() for n in names]
    return torch.stack(squares).sum().sqrt().item() if squares else 0.0


def clip_update(upload: Weights, start: Weights, bound: float, names: Iterable[str]) -> Weights:
    """The upload with the change of its tensors `names` from `start` clipped to the norm `bound`.

    An upload within the bound is returned unchanged.
    """
    names = list(names)
    norm = update_norm(upload, start, names)
    if norm <= bound:
        return upload
    moved = {n: start[n].double() + (upload[n].double() - start[n].double()) * (bound / norm) for n in names}
    return upload | {n: t.to(upload[n].dtype) for n, t in moved.items()}


def clip_updates(
    uploads: Sequence[Weights], start: Weights | Sequence[Weights], factor: float, parameters: Iterable[str]
) -> list[Weights]:
    """Clip every update to `factor` times the median norm, on which one client has little influence.

    `start` are the weights that all started from, or those that each of them did. `parameters` and the other
    floating-point tensors (BatchNorm statistics) are measured and clipped separately: statistics change on a different
    scale.
    """
    if not factor > 0:
        raise ValueError(f"an update is clipped to a positive multiple of the median norm, not to {factor}")
    wanted, starts = set(parameters), [start] * len(uploads) if isinstance(start, dict) else list(start)
    floats = [n for n, t in uploads[0].items() if t.is_floating_point()] if uploads else []
    clipped = list(uploads)
    for names in ([n for n in floats if n in wanted], [n for n in floats if n not in wanted]):
        if names:
            pairs = zip(uploads, starts, strict=True)
            lengths = torch.tensor([update_norm(u, own, names) for u, own in pairs], dtype=torch.float64)
            bound = factor * weighted_median(lengths).item()
            clipped = [clip_update(u, own, bound, names) for u, own in zip(clipped, starts, strict=True)]
    return clipped


# ---- teachers' predictions --------------------------------------------------------------------------


def clip_logits(logits: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The centred logits [teachers, samples, classes], scaled down per sample to at most the median teacher's size.

    The size of a teacher's logits is the largest absolute value. If it is too large, all its logits are scaled down:
    clipping single logits would change their order. Small logits are not scaled up.
    """
    centred = logits - logits.mean(-1, keepdim=True)
    largest = centred.abs().amax(-1, keepdim=True)
    bound = weighted_median(largest, weights)
    return centred * torch.where(largest > bound, bound / largest, 1)


def standardise_logits(logits: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The logits [teachers, samples, classes], for each sample scaled to one spread: the median of the teachers'.

    So all teachers have the same influence, also unsure ones, and the ensemble has the confidence of a typical teacher.
    A teacher with equal logits has no spread; its logits become 0.
    """
    centred = logits - logits.mean(-1, keepdim=True)
    spread = centred.square().mean(-1, keepdim=True).sqrt()
    return centred / torch.where(spread == 0, 1, spread) * weighted_median(spread, weights)


def median_probs(probs: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The median over the teachers of each class's probability [teachers, samples, classes], scaled to sum to 1.

    If all medians are 0 there is nothing to scale, and the mean is used.
    """
    middle = weighted_median(probs, weights)
    total = middle.sum(-1, keepdim=True)
    n = probs.new_ones(len(probs)) if weights is None else probs.new_tensor(weights)
    mean = (probs * n.reshape(-1, 1, 1)).sum(0) / n.sum()
    return torch.where(total > 0, middle / total, mean)
