"""The theorems of FedDF and Fed-ET in a toy where every term is known: how large they are, and how often they fail.

    python benchmarks/bounds.py --out benchmarks/results/bounds.json

Ten clients on a line, each with samples in an interval of its own; hypotheses are thresholds. Every draw trains them
all and compares the true risk of their ensemble with both bounds. Docs: docs/bounds.md.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from solera.lab.bounds import Line, feddf_bound, fedet_bound, fit_threshold, hoeffding

DELTA = 0.05
CLIENTS = 10
SIZES = (5, 20, 100, 1000, 10_000)
SETTINGS = {"alike": (0.0, 0.1), "apart": (0.06, 0.1), "noise only": (0.0, 0.5)}  # distance of starts, label noise


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
