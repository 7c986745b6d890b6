"""The papers' generalisation statements as numbers: FedDF's Theorem 5.1, Fed-ET's Theorem 1, MNFL's Theorem 4.1.

    python benchmarks/bounds.py --out benchmarks/results/bounds.json

A bound is returned term by term. Losses lie in [0, 1]; a total of 1 or more says nothing (`Bound.vacuous`). As a
program: the first two in a toy where every term is known. Ten clients on a line have samples in an interval of their
own each; hypotheses are thresholds. Every draw trains them all and compares the true risk of their ensemble with both
bounds. Docs: docs/bounds.md.
"""

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

DELTA = 0.05
CLIENTS = 10
SIZES = (5, 20, 100, 1000, 10_000)
SETTINGS = {"alike": (0.0, 0.1), "apart": (0.06, 0.1), "noise only": (0.0, 0.5)}  # distance of starts, label noise


@dataclasses.dataclass(frozen=True)
class Bound:
    """An upper bound on a risk, term by term."""

    empirical: float  # risks on the training samples
    deviation: float  # Hoeffding's term, of few samples
    divergence: float  # half the distances between the clients' distributions and the target
    joint: float  # the risk that the best hypothesis has on both

    @property
    def total(self) -> float:
        """The bound."""
        return self.empirical + self.deviation + self.divergence + self.joint

    @property
    def vacuous(self) -> bool:
        """Whether it says nothing about a loss in [0, 1]."""
        return self.total >= 1


def feddf_bound(empirical: float, divergences: Sequence[float], joint: Sequence[float], m: int, delta: float) -> Bound:
    """FedDF's Theorem 5.1 (D.1 in the appendix): the risk of the uniform ensemble of K clients' models.

    `empirical` is the risk, on all K * m training samples, of the model trained on all of them. `divergences` are
    d_HdH(D_k, D), from 0 to 2, `joint` the lambda_k; `m` is the number of samples of each client.
    """
    K = len(divergences)
    _check(delta, [m] * K, divergences, joint)
    return Bound(empirical, hoeffding(m, delta / K), sum(divergences) / (2 * K), sum(joint) / K)


def fedet_bound(
    weights: Sequence[float],
    risks: Sequence[float],
    sizes: Sequence[int],
    divergences: Sequence[float],
    joint: Sequence[float],
    delta: float,
    as_proved: bool = False,
) -> Bound:
    """Fed-ET's Theorem 1, eq. (13): the risk of the ensemble with these weights.

    `risks` are the clients' risks on their own training samples, `sizes` their numbers of samples. The theorem has
    sqrt(log(1 / delta)) in place of the sqrt(log(2 / delta) / 2) of its proof, which is no more for delta <= 1/2 only;
    neither allows for the K inequalities that must hold together. `as_proved` gives the term of a proof that does:
    log(2 K / delta) / 2.
    """
    _check(delta, sizes, divergences, joint)
    if not math.isclose(sum(weights), 1, abs_tol=1e-6) or min(weights) < 0:
        raise ValueError(f"weights = {list(weights)}: they must be at least 0 and sum to 1")
    K = len(weights)
    factor = math.log(2 * K / delta) / 2 if as_proved else math.log(1 / delta)
    deviation = math.sqrt(factor) * sum(a / math.sqrt(n) for a, n in zip(weights, sizes, strict=True))

    def weighted(values: Sequence[float]) -> float:
        return sum(a * v for a, v in zip(weights, values, strict=True))

    return Bound(weighted(risks), deviation, weighted(divergences) / 2, weighted(joint))


def hoeffding(m: int, delta: float) -> float:
    """How far the mean of m independent losses in [0, 1] may be from its expectation, with probability 1 - delta.

    It holds for a hypothesis that was chosen without these samples.
    """
    return math.sqrt(math.log(2 / delta) / (2 * m))


def _check(delta: float, sizes: Sequence[int], divergences: Sequence[float], joint: Sequence[float]) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must lie between 0 and 1")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"numbers of samples {list(sizes)}: every client needs at least one")
    if not len(sizes) == len(divergences) == len(joint):
        raise ValueError(
            f"{len(sizes)} sizes, {len(divergences)} divergences, {len(joint)} joint risks: one per client"
        )
    if min(divergences) < 0 or max(divergences) > 2:
        raise ValueError(f"divergences {list(divergences)}: must lie between 0 and 2")


# ---- MNFL ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The best mixture of clients' predictions for one client, and what it is worth."""

    coefficients: Tensor  # of the simplex [clients]
    loss: float  # of the mixture
    own: float  # of the client's own model


def best_mixture(probs: Tensor, labels: Tensor, n: int, steps: int = 2000) -> Mixture:
    """MNFL's Theorem 4.1 for client `n`: coefficients with which the mixture is no worse than its own model.

    `probs` [clients, samples, classes] are all clients' predictions on samples of client n, with `labels`. The loss is
    the cross-entropy, whose best coefficients can be found: it is convex in them, and every step of expectation
    maximisation lowers it. The theorem only says that such coefficients exist; the own model alone is such a choice.
    """
    given = probs.double()[:, torch.arange(len(labels)), labels].clamp_min(1e-300)  # p_m(y_i | x_i)
    c = torch.full((len(given),), 1 / len(given), dtype=torch.float64)
    for _ in range(steps):
        c = c * (given / (c @ given)).mean(1)
    loss, own = -(c @ given).log().mean().item(), -given[n].log().mean().item()
    if own <= loss:  # the corner of the simplex, which the steps only approach
        c, loss = torch.eye(len(given), dtype=torch.float64)[n], own
    return Mixture(c, loss, own)


# ---- the divergence from samples ------------------------------------------------------------------------


def proxy_a_distance(a: Tensor, b: Tensor, seed: int = 0, ridge: float = 1e-3) -> float:
    """2 (1 - 2 error) of a linear classifier that tells two sets of samples apart: 0 if it guesses, 2 if it is right.

    It is trained on one half of the samples and judged on the other. This stands for the divergence of the theorems,
    which is a supremum over all hypotheses: it can be larger or smaller than that.
    """
    size = min(len(a), len(b))
    if size < 4:
        raise ValueError(f"{len(a)} and {len(b)} samples: at least 4 of each are needed")
    g = torch.Generator().manual_seed(seed)
    rows = [x.reshape(len(x), -1).double()[torch.randperm(len(x), generator=g)[:size]] for x in (a, b)]
    half = size // 2
    train, test = (torch.cat([r[:half] for r in rows]), torch.cat([r[half:] for r in rows]))
    sides = [torch.tensor([1.0] * n + [-1.0] * n, dtype=torch.float64) for n in (half, size - half)]
    mean, std = train.mean(0), train.std(0).clamp_min(1e-12)
    train, test = ((x - mean) / std for x in (train, test))
    gram = train.T @ train + ridge * len(train) * torch.eye(train.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, train.T @ sides[0])
    error = ((test @ weights).sign() != sides[1]).double().mean().item()
    return max(0.0, 2 * (1 - 2 * error))


# ---- a toy in which everything is known -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """Clients on a line, each with samples uniform in an interval; the target is the mean of the clients.

    A label is 1 right of `border`, and wrong with probability `noise`. A hypothesis is a threshold. So two hypotheses
    differ on an interval, and the divergence is twice the largest difference between the probabilities of an interval.
    """

    starts: tuple[float, ...]
    width: float
    border: float
    noise: float

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1 / 2:  # above, the best threshold is not the border, and `joint` would be another
            raise ValueError(f"noise = {self.noise}: must lie between 0 and 1/2")

    def cdf(self, k: int, x: Tensor) -> Tensor:
        """Of client k's inputs."""
        return ((x - self.starts[k]) / self.width).clamp(0, 1)

    def target_cdf(self, x: Tensor) -> Tensor:
        """Of the target's inputs."""
        return torch.stack([self.cdf(k, x) for k in range(len(self.starts))]).mean(0)

    def divergence(self, k: int) -> float:
        """d_HdH(D_k, D). The difference of the two distribution functions is linear between the intervals' ends."""
        ends = torch.tensor(sorted({s for a in self.starts for s in (a, a + self.width)}), dtype=torch.float64)
        gap = self.cdf(k, ends) - self.target_cdf(ends)
        return 2 * (max(gap.max().item(), 0.0) - min(gap.min().item(), 0.0))

    @property
    def joint(self) -> float:
        """The risk of the true border on a client and on the target together: the noise, twice."""
        return 2 * self.noise

    def risk(self, threshold: Tensor, k: int | None = None) -> Tensor:
        """The risk of thresholds on client k; None: on the target."""
        cdf = self.target_cdf if k is None else (lambda x: self.cdf(k, x))
        between = (cdf(threshold) - cdf(torch.tensor(self.border, dtype=torch.float64))).abs()
        return self.noise + (1 - 2 * self.noise) * between

    def draw(self, k: int, m: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        """m samples of client k: inputs, and labels 0 or 1."""
        x = self.starts[k] + self.width * torch.rand(m, generator=g, dtype=torch.float64)
        flipped = torch.rand(m, generator=g) < self.noise
        return x, (x > self.border) ^ flipped


def fit_threshold(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The threshold with the fewest mistakes on these samples (the leftmost of several), and its empirical risk. A
    label is predicted as 1 right of it, so equal samples are on one side of every threshold."""
    order = x.argsort()
    x, y = x[order], y[order].long()
    ones, zeros = y.cumsum(0), (1 - y).cumsum(0)
    zero = torch.zeros(1, dtype=torch.long)
    wrong = torch.cat([zero, ones]) + (zeros[-1] - torch.cat([zero, zeros]))  # ones left of it, zeros right of it
    between = torch.ones(len(x) + 1, dtype=torch.bool)
    between[1:-1] = x[1:] > x[:-1]
    best = int(wrong.masked_fill(~between, len(x) + 1).argmin())
    at = x[0] - 1 if best == 0 else x[-1] + 1 if best == len(x) else (x[best - 1] + x[best]) / 2
    if 0 < best < len(x) and at == x[best]:  # neighbours among the floating-point numbers have no middle
        at = x[best - 1]
    return float(at), wrong[best].item() / len(x)


# ---- how large the bounds are, and how often they fail ---------------------------------------------


def measure(name: str, m: int, draws: int) -> dict[str, float | str]:
    """The terms and the violations of one setting."""
    gap, noise = SETTINGS[name]
    line = Line(tuple(gap * k for k in range(CLIENTS)), 0.4, 0.2 + gap * (CLIENTS - 1) / 2, noise)
    distance = [line.divergence(k) for k in range(CLIENTS)]
    g = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        drawn = [line.draw(k, m, g) for k in range(CLIENTS)]
        fits = [fit_threshold(x, y) for x, y in drawn]
        _, pooled = fit_threshold(torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn]))
        thresholds = torch.tensor([at for at, _ in fits], dtype=torch.float64)
        risk = line.risk(thresholds).mean().item()  # with the absolute loss, the ensemble's is the mean of the risks
        feddf = feddf_bound(pooled, distance, [line.joint] * CLIENTS, m, DELTA)
        even = [1 / CLIENTS] * CLIENTS
        risks = [r for _, r in fits]
        fedet = fedet_bound(even, risks, [m] * CLIENTS, distance, [line.joint] * CLIENTS, DELTA)
        own = [line.risk(thresholds[k], k).item() for k in range(CLIENTS)]
        broken = [own[k] > risks[k] + hoeffding(m, DELTA) for k in range(CLIENTS)]  # Fed-ET's Lemma 2
        values = {"risk": risk, "step_broken": statistics.fmean(broken), "some_broken": any(broken)}
        for paper, bound in (("feddf", feddf), ("fedet", fedet)):
            values |= {paper: bound.total, f"{paper}_broken": risk > bound.total}
            values |= {f"{paper}_{term}": value for term, value in vars(bound).items()}
        for key, value in values.items():
            found.setdefault(key, []).append(float(value))
    return {"setting": name, "m": m, "draws": draws} | {key: statistics.fmean(v) for key, v in found.items()}


def main() -> None:
    """Measure all settings and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in SETTINGS:
        for m in SIZES:
            row = measure(name, m, args.draws)
            rows.append(row)
            print(
                f"{name:>10}, m = {m:>6}: risk {row['risk']:.3f}, FedDF {row['feddf']:.3f}, Fed-ET {row['fedet']:.3f}; "
                f"broken: bounds {row['feddf_broken']:.3f} {row['fedet_broken']:.3f}, a client's step "
                f"{row['step_broken']:.3f}, some client's {row['some_broken']:.3f}",
                flush=True,
            )
            if args.out:
                args.out.write_text(json.dumps({"delta": DELTA, "clients": CLIENTS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
