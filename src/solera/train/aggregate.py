"""Averages of model weights, over the uploads of one round.

Sums are float64, in the order the uploads are added. The same uploads in the same order therefore give the same bits:
a running average equals one computed from a list.

LoRA's matrices A and B stand for their product: the mean of A times the mean of B is not the mean of B A. Pairs named
`PRODUCT` (`models.lora`, average = "product") are averaged as products, in every average of models, and come back as a
pair of the same rank.
"""

from collections.abc import Mapping, Sequence

import torch

from ..core.tensors import Weights

PRODUCT = "product"  # LoRA's name of a pair that is averaged so
ENDS = tuple(f".lora_{m}.{PRODUCT}.weight" for m in "AB")
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # A and B by the name without its end, for shapes and types


def pairs_of(weights: Mapping[str, torch.Tensor]) -> Pairs:
    """The pairs of `weights` that are averaged as products; usually none."""
    bodies = [name.removesuffix(ENDS[0]) for name in weights if name.endswith(ENDS[0])]
    return {body: (weights[body + ENDS[0]], weights[body + ENDS[1]]) for body in bodies}


def multiplied(weights: Weights) -> Weights:
    """The weights with each such A replaced by B A, in float64, and without B."""
    found = dict(weights)
    for body, (A, B) in pairs_of(weights).items():
        found |= {body + ENDS[0]: B.double().flatten(1) @ A.double().flatten(1), body + ENDS[1]: B[:0]}
    return found


def factored(average: Weights, like: Pairs) -> Weights:
    """The inverse: each product becomes the nearest pair with the rank of those in `like` (Eckart and Young).

    With the singular value decomposition U S V^T, B is U S and A is V^T. Beyond the product's own rank B is zero and A
    is not, as before any training, so that training can continue.
    """
    found = dict(average)
    for body, (A, B) in like.items():
        product = average[body + ENDS[0]].double()
        new_A, new_B = torch.zeros_like(A, dtype=torch.float64), torch.zeros_like(B, dtype=torch.float64)
        if torch.isfinite(product).all():
            U, S, Vh = torch.linalg.svd(product, full_matrices=False)
            r = min(len(A), len(S))
            new_A.flatten(1)[:r] = Vh[:r]
            new_B.flatten(1)[:, :r] = U[:, :r] * S[:r]
        else:  # the dtype that a mean of these uploads would have
            new_A, new_B = new_A + torch.nan, new_B + torch.nan
        found |= {body + ENDS[0]: new_A.to(A.dtype), body + ENDS[1]: new_B.to(B.dtype)}
    return found


class RunningMean:
    """The weighted mean of model weights, one upload at a time, so that no upload has to be kept.

    Floating-point tensors, batch-norm statistics included, are averaged. Integer tensors (counters such as
    `num_batches_tracked`) have no meaningful mean: their maximum is kept.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._sums: Weights = {}
        self._terms: Weights = {}  # reused buffer for one upload's term
        self._dtypes: dict[str, torch.dtype] = {}
        self._pairs: Pairs = {}

    def add(self, weights: Weights, n: float) -> None:
        """Add one upload with weight `n` (usually its number of examples); weight 0 changes nothing."""
        if not 0 <= n < float("inf"):
            raise ValueError(f"a weight in a mean must be finite and not negative, not {n}")
        if n == 0:
            return
        if self.total == 0:
            self._pairs = pairs_of(weights)
        weights = multiplied(weights)
        if self.total == 0:
            self._sums = {
                name: torch.zeros_like(t, dtype=torch.float64) if t.is_floating_point() else t.clone()
                for name, t in weights.items()
            }
            self._terms = {name: torch.empty_like(t) for name, t in self._sums.items() if t.is_floating_point()}
            self._dtypes = {name: t.dtype for name, t in weights.items()}
        self._check(weights)
        for name, t in weights.items():
            if t.is_floating_point():
                # Two roundings, never a fused multiply-add: the bits must not depend on the CPU's vector unit.
                self._sums[name].add_(self._terms[name].copy_(t).mul_(n))
            else:
                torch.maximum(self._sums[name], t, out=self._sums[name])
        self.total += n

    def result(self) -> Weights:
        """The mean so far, each tensor in its original dtype; ValueError if nothing was added."""
        if self.total == 0:
            raise ValueError("the mean of no uploads is not defined")
        mean = {
            name: (t / self.total).to(self._dtypes[name]) if t.is_floating_point() else t.clone()
            for name, t in self._sums.items()
        }
        return factored(mean, self._pairs)

    def _check(self, weights: Weights) -> None:
        if weights.keys() != self._sums.keys():
            different = sorted(weights.keys() ^ self._sums.keys())
            raise ValueError(f"cannot average models that differ in their tensors: {', '.join(different)}")
        for name, t in weights.items():
            if t.shape != self._sums[name].shape:
                shapes = f"{tuple(t.shape)} and {tuple(self._sums[name].shape)}"
                raise ValueError(f"cannot average {name!r}: shapes {shapes} differ")


def weighted_mean(uploads: Sequence[Weights], n: Sequence[float]) -> Weights:
    """sum_k n_k w_k / sum_k n_k over the uploads, in the order given."""
    mean = RunningMean()
    for weights, n_k in zip(uploads, n, strict=True):
        mean.add(weights, n_k)
    return mean.result()


def uniform_mean(uploads: Sequence[Weights]) -> Weights:
    """The mean of the uploads with equal weights."""
    return weighted_mean(uploads, [1.0] * len(uploads))


def momentum_step(sent: Weights, average: Weights, velocity: Weights, beta: float) -> tuple[Weights, Weights]:
    """Server momentum (FedAvgM): Delta = sent - average; v <- beta v + Delta; x <- sent - v. Returns x and v.

    Only the tensors named in `velocity` (the parameters) have momentum. The others, such as BatchNorm statistics, are
    those of the average. Computed in float64, so that beta = 0 gives exactly the average.
    """
    x, v = dict(average), {}
    for name, old in velocity.items():
        start = sent[name].double()
        moved = old.double() * beta + (start - average[name].double())
        x[name] = (start - moved).to(average[name].dtype)
        v[name] = moved.to(old.dtype)
    return x, v


def by_row(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value for each row, shaped to broadcast with `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))
