"""How skewed the four Dirichlet partitions are at each alpha: the table of docs/data.md.

    python benchmarks/partitions.py --write docs/data.md       # a few seconds

45,000 balanced labels are divided among 20 clients. Effective classes of a client are exp(entropy) of its class shares.
"""

import argparse
import pathlib
import statistics

import torch

from grid import put
from solera.data import PartitionConfig, class_counts, partition
from solera.data.partition import Variant

VARIANTS: tuple[Variant, ...] = ("equal", "block", "class", "client")
ALPHAS = (100.0, 1.0, 0.1)
SEEDS = range(5)


def shares_of(classes: int, variant: Variant, alpha: float, seed: int) -> torch.Tensor:
    """The class shares of each client: [20, classes]."""
    labels = torch.arange(45_000) % classes
    parts = partition(PartitionConfig(variant=variant, alpha=alpha), labels, classes, seed)
    counts = class_counts(parts, labels, classes).double()
    return counts / counts.sum(1, keepdim=True)


def effective(shares: torch.Tensor) -> float:
    """Effective classes, mean over clients."""
    return torch.special.entr(shares).sum(1).exp().mean().item()


def main() -> None:
    """Print the table, and write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=pathlib.Path)
    args = parser.parse_args()
    cells = [(classes, alpha) for classes in (10, 100) for alpha in ALPHAS]
    lines = ["| `variant` | " + " | ".join(f"{c} classes, alpha {a:g}" for c, a in cells) + " |"]
    lines += ["|---" * (len(cells) + 1) + "|"]
    for v in VARIANTS:
        found = [statistics.fmean(effective(shares_of(c, v, a, s)) for s in SEEDS) for c, a in cells]
        lines.append(f"| `{v}` | " + " | ".join(f"{n:.1f}" for n in found) + " |")
    print(text := "\n".join(lines))
    if args.write:
        put(args.write, "partitions", f"{text}\n")


if __name__ == "__main__":
    main()
