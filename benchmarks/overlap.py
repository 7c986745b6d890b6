"""What overlap is worth in simulated hours: FedEED's Figures 3 and 4 against the speed of the server.

    python benchmarks/overlap.py --out benchmarks/results/overlap.json --figure docs/img/overlap.svg

Simulated hours follow from bytes and from samples trained on, not from the models, so small models on the toy data are
enough. A client trains for ten minutes; the server's distillation takes 1 to 60 minutes. Docs: docs/availability.md.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from solera.core.accounting import Availability
from solera.core.federation import FederationConfig
from solera.method import Method
from solera.methods import FedDF, FedEED
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.testing import toy, wide
from solera.train.distill import Distill
from solera.train.fitting import Local

ROUNDS, SEEDS = 10, (0, 1, 2)
CLIENT_MIN, SERVER_MIN = 10.0, (1, 5, 10, 20, 40, 60)  # minutes of a training, and of a distillation
LOCAL, FUSION = Local(steps=10, batch=2), Distill(steps=8, batch=16)  # 20 and 128 samples
METHODS: dict[str, Method] = {
    "FedDF": FedDF(LOCAL, FUSION, report_ensemble=False),
    "FedEED, rounds in turn": FedEED(LOCAL, FUSION, K=4, report_ensemble=False),
    "FedEED, overlapping": FedEED(LOCAL, FUSION, K=4, report_ensemble=False, pipeline=True),
}
COLOURS = ("#777777", "#b0552c", "#1f6f8b")
SPREAD = (0.5, 0.75, 1.0, 1.5, 2.5)  # of the clients' speeds, in the last case
CASES: dict[str, dict[str, Any]] = {
    "always there (Figure 3)": {"clients": 4},
    "once an hour (Figure 4)": {"clients": 4, "period_s": 3600.0},
    "20 clients, 8 a round": {"clients": 20, "period_s": 3600.0, "fraction": 0.4, "speeds": SPREAD, "dropout": 0.05},
}


def hours(method: Method, case: dict[str, Any], server_min: float, seed: int, rounds: int = ROUNDS) -> float:
    """Simulated hours of a run."""
    clock = Availability(
        speed=[20 / (60 * CLIENT_MIN) * s for s in case.get("speeds", (1.0,))],
        server_speed=128 / (60 * server_min),
        down_mbit=[1e9],
        up_mbit=[1e9],
        period_s=case.get("period_s"),
        dropout=case.get("dropout", 0.0),
    )
    federation = FederationConfig(fraction=case.get("fraction", 1.0), availability=clock)
    world = toy({"wide": wide}, clients=case["clients"], seed=seed, samples=600)
    with tempfile.TemporaryDirectory() as out:
        done = simulate(
            world, method, Path(out) / "run", RunConfig(seed=seed, rounds=rounds, eval_every=rounds), federation
        )
    return float(done.summary["simulated_hours"])


def measure() -> list[dict[str, Any]]:
    """All cases, methods and speeds of the server; where chance has a part, over three seeds."""
    rows = []
    for name, case in CASES.items():
        seeds = SEEDS if case.get("fraction") else SEEDS[:1]
        for label, method in METHODS.items():
            for minutes in SERVER_MIN:
                found = [hours(method, case, minutes, seed) for seed in seeds]
                spread = statistics.stdev(found) if len(found) > 1 else 0.0
                rows.append(
                    {
                        "case": name,
                        "method": label,
                        "server_min": minutes,
                        "hours": statistics.fmean(found),
                        "sd": spread,
                    }
                )
                print(f"{name}: {label}, server {minutes} min: {rows[-1]['hours']:.2f} h", flush=True)
    return rows


def draw(rows: list[dict[str, Any]]) -> str:
    """One panel for each case: hours of ten rounds by minutes of a distillation."""
    width, height, left, top, bottom = 300, 220, 40, 34, 42
    most = max(r["hours"] for r in rows)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(CASES)} {height + 26}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width * len(CASES)}" height="{height + 26}" fill="white"/>',
    ]
    w, h = width - left - 16, height - top - bottom
    for i, case in enumerate(CASES):
        x0 = i * width + left
        out.append(f'<text x="{x0}" y="20" font-weight="bold">{case}</text>')
        for share in (0, 0.25, 0.5, 0.75, 1):
            y = top + h * (1 - share)
            out.append(f'<line x1="{x0}" x2="{x0 + w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{share * most:.0f} h</text>')
        for label, colour in zip(METHODS, COLOURS, strict=True):
            own = [r for r in rows if r["case"] == case and r["method"] == label]
            at = " ".join(
                f"{x0 + w * r['server_min'] / SERVER_MIN[-1]:.1f},{top + h * (1 - r['hours'] / most):.1f}" for r in own
            )
            dash = ' stroke-dasharray="5 4"' if label == "FedDF" else ""
            out.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{x0}" y="{height - 22}" fill="#555">server: 0 min</text>')
        out.append(f'<text x="{x0 + w}" y="{height - 22}" text-anchor="end" fill="#555">60 min a round</text>')
    for i, (label, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
        x = left + 200 * i
        out.append(
            f'<line x1="{x}" x2="{x + 24}" y1="{height + 8}" y2="{height + 8}" stroke="{colour}" stroke-width="2"/>'
        )
        out.append(f'<text x="{x + 30}" y="{height + 12}">{label}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    if args.out:
        args.out.write_text(json.dumps({"rounds": ROUNDS, "client_min": CLIENT_MIN, "rows": rows}, indent=1) + "\n")
    if args.figure:
        args.figure.write_text(draw(rows))


if __name__ == "__main__":
    main()
