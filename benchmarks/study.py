"""A small, honest study: the methods side by side, three seeds, two degrees of skew, equal rounds, with bytes.

    python benchmarks/study.py                                  # embedded Fashion-MNIST only
    python benchmarks/study.py --cifar10 DIR --cifar100 DIR     # and CIFAR-10, distilled on CIFAR-100 (parquet folders)
    python benchmarks/study.py ... --write docs/results.md      # put the tables into the results page

Call it again to go on after a stop: finished runs are not repeated. Every run uses one core, two run at a time.
What is measured: the mean over the last three rounds (single rounds swing with who takes part), over seeds with its
standard deviation; bytes are those of all rounds, both ways, as encoded.
"""

import argparse
import json
import os
import pathlib
import statistics
from typing import Any

from grid import Tables, last_accuracy, merged, put, run_grid, spread

SEEDS, ALPHAS = (0, 1, 2), (0.1, 1.0)
LOCAL: Tables = {"epochs": 4, "batch": 32, "lr": 0.05}
ADAM: Tables = {"steps": 100, "batch": 64}
BASE: Tables = {
    "run": {"rounds": 10},
    "partition": {"kind": "dirichlet", "variant": "block", "clients": 20},
    "models": {"clients": ["lenet5"]},
    "federation": {"fraction": 0.4},
}
MIXED: Tables = {"models": {"clients": ["mlp", "lenet5", "tiny-cnn"]}}


def method(name: str, local: Tables | None = LOCAL, **settings: Any) -> Tables:
    return {"method": {"name": name, **({"local": local} if local else {}), **settings}}


def fedeed(R: int) -> Tables:
    return method("fedeed", K=4, R=R, fusion={"steps": 100, "batch": 64, "optimiser": "adam", "lr": 0.001})


# One model for all: every client trains lenet5. Fed-ET's clients differ and its server model is its own.
GLOBAL: dict[str, tuple[str, str, Tables]] = {
    "fedavg": ("FedAvg", "lenet5", method("fedavg")),
    "fedprox": ("FedProx (mu 0.01)", "lenet5", method("fedprox", mu=0.01)),
    "scaffold": ("SCAFFOLD", "lenet5", method("scaffold")),
    "feddf": ("FedDF", "lenet5", method("feddf", fusion=ADAM)),
    "fedeed-r1": ("FedEED (K 4, R 1)", "lenet5", fedeed(1)),
    "fedeed-r2": ("FedEED (K 4, R 2)", "lenet5", fedeed(2)),
    "fedeed-r4": ("FedEED (K 4, R 4)", "lenet5", fedeed(4)),
    "fedet": (
        "Fed-ET (clients mlp, lenet5, tiny-cnn; server fedet-cnn)",
        "fedet-cnn",
        merged(
            MIXED,
            {"models": {"server": "fedet-cnn", "head": "shared"}, "federation": {"sampling": "size"}},
            method("fedet", local={**LOCAL, "steps": "none"}),
        ),
    ),
}

# A model for each client, three architectures, judged on the client's own test split.
PERSONAL_LOCAL: Tables = {"epochs": 2, "batch": 32, "lr": 0.05}
DISTIL: Tables = {"epochs": 1, "batch": 64, "lr": 0.05}


def personal(name: str, **settings: Any) -> Tables:
    taught = {"distil": DISTIL, "public_size": 500, "temperature": 1.0} if name != "local" else {}
    return merged(
        MIXED,
        {"data": {"client_test": 0.25}, "federation": {"fraction": 1.0}},
        method(name, local=PERSONAL_LOCAL, **{**taught, **settings}),
    )


PERSONAL: dict[str, tuple[str, Tables]] = {
    "local": ("local training only", personal("local")),
    "uniform": ("uniform averaging (FedMD-style)", personal("mnfl", rule="uniform")),
    "simpfl": ("Sim-pFL", personal("simpfl")),
    "topkpfl": ("TopK-pFL", personal("topkpfl")),
    "mnfl": ("MNFL", personal("mnfl")),
}


def data_sets(cifar10: str | None, cifar100: str | None) -> dict[str, Tables]:
    found: dict[str, Tables] = {
        "fashion-mnist": {
            "data": {"name": "fashion-mnist", "train_size": 6000, "test_size": 1000},
            "public": {"source": "held-out", "size": 1500},
        }
    }
    if cifar10 and cifar100:
        found["cifar10"] = {
            "data": {"name": "cifar10", "path": cifar10, "train_size": 6000, "test_size": 1000},
            "public": {"source": "dataset", "name": "cifar100", "path": cifar100, "size": 1500},
        }
    return found


def cases(sets: dict[str, Tables]) -> dict[str, Tables]:
    """Every run of the study by name."""

    def seeds(data: str, alpha: float, name: str, settings: Tables) -> dict[str, Tables]:
        same = merged(BASE, sets[data], settings, {"partition": {"alpha": alpha}})
        return {f"{data}/a{alpha}/{name}/s{seed}": merged(same, {"run": {"seed": seed}}) for seed in SEEDS}

    methods = [(n, c[-1]) for n, c in GLOBAL.items()] + [(f"p-{n}", c[-1]) for n, c in PERSONAL.items()]
    found: dict[str, Tables] = {}
    for data in sets:
        for alpha in ALPHAS:
            for name, settings in methods:
                found |= seeds(data, alpha, name, settings)
    return found


def tables(sets: dict[str, Tables], found: dict[str, dict[str, Any]], out: pathlib.Path) -> str:
    """The tables in Markdown."""
    lines: list[str] = []

    def runs(data: str, alpha: float, name: str) -> list[str]:
        return [f"{data}/a{alpha}/{name}/s{seed}" for seed in SEEDS]

    def done(names: list[str]) -> bool:
        return all(n in found for n in names)

    def megabytes(names: list[str]) -> str:
        return f"{statistics.fmean(sum(found[n]['bytes'].values()) for n in names) / 1e6:.1f}"

    def ensemble(names: list[str]) -> str:
        best = [found[n]["ensembles"] for n in names]
        return spread([next(iter(e.values()))["accuracy"] for e in best]) if all(best) else "–"

    for data in sets:
        lines += [f"### {data}: one model for all", ""]
        lines += [
            "| method | accuracy, alpha 0.1 | its ensemble | accuracy, alpha 1 | its ensemble | MB both ways |",
            "|---|---|---|---|---|---|",
        ]
        for name, (title, model, _) in GLOBAL.items():
            row = [title]
            for alpha in ALPHAS:
                names = runs(data, alpha, name)
                accuracies = [last_accuracy(out / n, model) for n in names] if done(names) else []
                row += [spread(accuracies), ensemble(names)] if accuracies else ["not run"] * 2
            names = runs(data, 0.1, name)
            lines.append("| " + " | ".join([*row, megabytes(names) if done(names) else "not run"]) + " |")
        lines += ["", f"### {data}: a model for each client", ""]
        lines += [
            "| method | mean over clients, alpha 0.1 | weighted by samples | worst decile | mean over clients, alpha 1 "
            "| weighted by samples | worst decile | MB both ways |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, (title, _) in PERSONAL.items():
            row = [title]
            for alpha in ALPHAS:
                names = runs(data, alpha, f"p-{name}")
                scores = [found[n]["personal"] for n in names] if done(names) else []
                keys = ("mean", "weighted_mean", "worst_decile")
                told = [spread([s[k] for s in scores]) if all(k in s for s in scores) else "–" for k in keys]
                row += told if scores else ["not run"] * 3
            names = runs(data, 0.1, f"p-{name}")
            lines.append("| " + " | ".join([*row, megabytes(names) if done(names) else "not run"]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", help="folder with CIFAR-10")
    parser.add_argument("--cifar100", help="folder with CIFAR-100: public data for CIFAR-10")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/study"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, help="fewer rounds, to see whether everything runs")
    parser.add_argument("--finished", action="store_true", help="run nothing: the tables of what is there")
    parser.add_argument("--write", type=pathlib.Path, help="a page with the two study marks: the tables go between")
    args = parser.parse_args()
    sets = data_sets(args.cifar10, args.cifar100)
    grid = cases(sets)
    if args.rounds:
        grid = {n: merged(t, {"run": {"rounds": args.rounds}}) for n, t in grid.items()}
    if args.finished:
        homes = {n: args.out / n / "summary.json" for n in grid}
        found = {n: json.loads(home.read_text()) for n, home in homes.items() if home.is_file()}
    else:
        found = run_grid(grid, args.out, args.workers)
    text = tables(sets, found, args.out)
    print(text)
    if args.write:
        put(args.write, "study", text)


if __name__ == "__main__":
    main()
