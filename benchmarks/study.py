"""A small comparison of the methods: three seeds, two degrees of skew, equal rounds, with bytes.

    python benchmarks/study.py                                  # embedded Fashion-MNIST only
    python benchmarks/study.py --part personal                  # a model for each client, in MNFL's two cases
    python benchmarks/study.py --cifar10 DIR --cifar100 DIR     # and CIFAR-10, distilled on CIFAR-100 (parquet folders)
    python benchmarks/study.py ... --write docs/results.md      # put the tables into the results page

Call it again to continue after a stop: finished runs are not repeated. Every run uses one core, and two run in
parallel. Accuracies are means over the last three rounds (single rounds vary with the sampled clients), then over seeds
with the standard deviation. Bytes are those of all rounds, in both directions, as encoded.
"""

import argparse
import json
import os
import pathlib
import statistics
from typing import Any

from grid import Tables, last_accuracy, merged, put, run_grid, spread
from solera.runs.read import read_run

SEEDS, ALPHAS = (0, 1, 2), (0.1, 1.0)
LOCAL: Tables = {"epochs": 4, "batch": 32, "lr": 0.05}
ADAM: Tables = {"steps": 100, "batch": 64}
BASE: Tables = {
    "run": {"rounds": 10},
    "partition": {"kind": "dirichlet", "variant": "equal", "clients": 20},
    "models": {"clients": ["lenet5"]},
    "federation": {"fraction": 0.4},
}
MIXED: Tables = {"models": {"clients": ["mlp", "lenet5", "tiny-cnn"]}}


def method(name: str, local: Tables | None = LOCAL, **settings: Any) -> Tables:
    return {"method": {"name": name, **({"local": local} if local else {}), **settings}}


def fedeed(R: int) -> Tables:
    return method("fedeed", K=4, R=R, fusion={"steps": 100, "batch": 64, "optimizer": "adam", "lr": 0.001})


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

# A model for each client, four architectures, scored on the client's own test split: MNFL's two cases (section 5.1).
CASES: dict[str, tuple[str, Tables]] = {
    "two-classes": ("two classes at each client", {"kind": "classes", "classes_per_client": 2}),
    # 4: the smallest whole number with which all classes are at each client, in all three seeds
    "all-classes": (
        "all classes at each client, in unequal numbers",
        {"kind": "dirichlet", "variant": "class", "alpha": 4.0},
    ),
}
PERSONAL_LOCAL: Tables = {"epochs": 2, "batch": 32, "lr": 0.05}
DISTIL: Tables = {"epochs": 1, "batch": 64, "lr": 0.05}


def personal(name: str, **settings: Any) -> Tables:
    taught = {"distill": DISTIL, "public_size": 500, "temperature": 1.0} if name != "local" else {}
    return {
        "run": {"rounds": 8},
        "data": {"client_test": 0.25},
        "models": {"clients": ["mlp", "lenet5", "tiny-cnn", "fedet-cnn"]},
        **method(name, local=PERSONAL_LOCAL, **{**taught, **settings}),
    }


PERSONAL: dict[str, tuple[str, Tables]] = {
    "local": ("local training only", personal("local")),
    "uniform": ("uniform averaging (FedMD-style)", personal("mnfl", rule="uniform")),
    "simpfl": ("Sim-pFL", personal("simpfl")),
    "topkpfl": ("TopK-pFL", personal("topkpfl")),
    "mnfl": ("MNFL", personal("mnfl")),
}


MATRICES = {
    "learned": "learned",
    "own": "everybody alone (e_n)",
    "uniform": "uniform (1/N)",
    "optimal": "the best there are",
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


def global_cases(sets: dict[str, Tables]) -> dict[str, Tables]:
    """Every run with one model for all, by name."""
    found: dict[str, Tables] = {}
    for data in sets:
        for alpha in ALPHAS:
            for name, (_, _, settings) in GLOBAL.items():
                same = merged(BASE, sets[data], settings, {"partition": {"alpha": alpha}})
                found |= {f"{data}/a{alpha}/{name}/s{seed}": merged(same, {"run": {"seed": seed}}) for seed in SEEDS}
    return found


def personal_cases(sets: dict[str, Tables]) -> dict[str, Tables]:
    """Every run with a model for each client, by name. Ordered by seed, so that a part of them is also a comparison."""
    found: dict[str, Tables] = {}
    for data in sets:
        for seed in SEEDS:
            for case, (_, partition) in CASES.items():
                for name, (_, settings) in PERSONAL.items():
                    tables = merged(sets[data], {"partition": {"clients": 20, **partition}}, settings)
                    found[f"{data}/{case}/{name}/s{seed}"] = merged(tables, {"run": {"seed": seed}})
    return found


def megabytes(runs: list[dict[str, Any]]) -> str:
    return f"{statistics.fmean(sum(run['bytes'].values()) for run in runs) / 1e6:.1f}"


def global_tables(sets: dict[str, Tables], found: dict[str, dict[str, Any]], out: pathlib.Path) -> str:
    """Their tables in Markdown."""
    lines: list[str] = []

    def runs(data: str, alpha: float, name: str) -> list[str]:
        return [f"{data}/a{alpha}/{name}/s{seed}" for seed in SEEDS]

    def done(names: list[str]) -> bool:
        return all(n in found for n in names)

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
            row.append(megabytes([found[n] for n in names]) if done(names) else "not run")
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def personal_tables(sets: dict[str, Tables], found: dict[str, dict[str, Any]], out: pathlib.Path) -> str:
    """The same for a model for each client. If seeds are missing, a row says how many there are."""
    lines: list[str] = []
    for data in sets:
        for case, (words, _) in CASES.items():
            lines += [f"### {data}: {words}", ""]
            lines += [
                "| method | after distilling | worst decile | after training | worst decile | MB both ways |",
                "|---|---|---|---|---|---|",
            ]
            for name, (title, _) in PERSONAL.items():
                names = [f"{data}/{case}/{name}/s{seed}" for seed in SEEDS]
                runs = [found[n] for n in names if n in found]
                row = [title if len(runs) == len(SEEDS) else f"{title} ({len(runs)} of {len(SEEDS)} seeds)"]
                for stage in ("after_distilling", "after_training"):
                    scores = [_stage(run, stage) for run in runs]
                    for what in ("mean", "worst_decile"):
                        row.append(spread([s[what] for s in scores]) if scores and all(scores) else "–")
                lines.append("| " + " | ".join([*row, megabytes(runs) if runs else "–"]) + " |")
            homes = [out / f"{data}/{case}/mnfl/s{seed}" for seed in SEEDS]
            lines += ["", *_objective_table([home for home in homes if (home / "summary.json").is_file()]), ""]
    return "\n".join(lines)


def _stage(run: dict[str, Any], stage: str) -> dict[str, Any]:
    """Accuracies of the clients' models at that stage of the last round; without distillation, after training."""
    return run.get("personal_stages", {"after_training": run["personal"]}).get(stage, {})


def _objective_table(homes: list[pathlib.Path]) -> list[str]:
    """The loss and the objective of the coefficients in MNFL's runs, after the first and the last round."""
    if not homes:
        return []
    lines = [
        "| MNFL's coefficients | "
        + " | ".join(f"{w}, round {r}" for r in ("1", "last") for w in ("loss", "objective"))
        + " |",
        "|---|---|---|---|---|",
    ]
    noted = [
        [next(e for e in r.events if e["kind"] == "objective") for r in (rounds[0], rounds[-1])]
        for rounds in (read_run(home).rounds for home in homes)
    ]
    for name, words in MATRICES.items():
        row = [
            f"{statistics.fmean(run[i][what][name] for run in noted):.2f}"
            for i in (0, 1)
            for what in ("ensemble_loss", "ensemble_objective")
        ]
        lines.append("| " + " | ".join([words, *row]) + " |")
    return lines


PARTS = {
    "global": ("study", global_cases, global_tables),
    "personal": ("personal", personal_cases, personal_tables),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", help="folder with CIFAR-10")
    parser.add_argument("--cifar100", help="folder with CIFAR-100: public data for CIFAR-10")
    parser.add_argument("--part", choices=PARTS, default="global", help="one model for all, or one for each client")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/study"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, help="fewer rounds, to check that everything runs")
    parser.add_argument("--finished", action="store_true", help="run nothing: only write the tables of finished runs")
    parser.add_argument("--write", type=pathlib.Path, help="a page with the part's two marks: the tables go between")
    parser.add_argument("--record", type=pathlib.Path, help="a JSON file for the runs' summaries")
    args = parser.parse_args()
    mark, cases, tables = PARTS[args.part]
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
        put(args.write, mark, text)
    if args.record:
        kept = ("digest", "models", "ensembles", "personal", "personal_stages", "bytes", "seconds")
        runs = {name: {key: run[key] for key in kept if run.get(key)} for name, run in found.items()}
        args.record.parent.mkdir(parents=True, exist_ok=True)
        args.record.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
