"""Every method on the same federation: accuracy, bytes and seconds side by side, three seeds, equal rounds.

    python benchmarks/baselines.py                          # all methods; call it again to continue after a stop
    python benchmarks/baselines.py --only fedavg ditto      # some of them
    python benchmarks/baselines.py --write docs/results.md  # put the tables into the results page

Twenty clients hold parts of the embedded Fashion-MNIST sample (Dirichlet, alpha 0.1), all of them take part in every
round, ten rounds. A method that can handle different models gets three architectures, the others LeNet-5.

Every method gets its own learning rate for local training, each with the same budget: three rates, one seed, all
rounds. The trials use another half of the training samples, with a part of that half for validation. So no sample of a
trial is in a run of the tables, neither for training nor for testing. The best rate has the highest mean accuracy over
the last three rounds (of the models of a method, or of the clients' own); a run that ends early does not count. All
other settings are the common ones below, or else the methods' defaults. The results of the trials are written to
benchmarks/results/baselines-rates.json.

Every run uses one core, as many run at a time as there are cores. Accuracies are means over the last three rounds, then
over seeds with the standard deviation. There are 129 trials and 129 runs, of 5 to 80 CPU seconds
each: 38 CPU minutes for the runs, about as many for the trials.
"""

import argparse
import json
import os
import pathlib
import statistics
import struct
from typing import Any

import torch
from torch import Tensor

from grid import Tables, cpu_seconds, merged, put, run_grid, spread
from solera.data import load
from solera.runs.read import read_run
from solera.runs.record import RoundRecord

SEEDS = (0, 1, 2)
TRIAL_SEED = 100
RATES = (0.01, 0.03, 0.1)  # of SGD
ADAM_RATES = (0.0003, 0.001, 0.003)  # of clients that train with Adam
NOTED = pathlib.Path(__file__).parent / "results" / "baselines-rates.json"
BASE: Tables = {
    "run": {"rounds": 10},
    "data": {"name": "fashion-mnist", "train_size": 3000, "test_size": 1000, "client_test": 0.25},
    "partition": {"kind": "dirichlet", "variant": "equal", "clients": 20, "alpha": 0.1},
    "public": {"source": "held-out", "size": 300},
    "models": {"clients": ["lenet5"]},
}
MIX: Tables = {"models": {"clients": ["mlp", "lenet5", "tiny-cnn"]}}
SHARED: Tables = merged(MIX, {"models": {"head": "shared"}})
LABELS: Tables = {"public": {"labels": True}}
LARGE: Tables = {"models": {"server": "fedet-cnn"}}

LOCAL: Tables = {"epochs": 2, "batch": 32}
STEPS: Tables = {"steps": 8, "batch": 32}  # as many as two epochs have for a client of mean size
ADAM: Tables = {"steps": 50, "batch": 64, "optimizer": "adam", "lr": 0.001}
TOWARDS: Tables = {"epochs": 1, "batch": 64, "lr": 0.05}
REVISIT: Tables = {"epochs": 2, "batch": 32}
TAUGHT: Tables = {"distill": TOWARDS, "temperature": 1.0}


def method(name: str, *tables: Tables, local: Tables | None = LOCAL, **settings: Any) -> Tables:
    return merged(*tables, {"method": {"name": name, **({"local": local} if local else {}), **settings}})


def adam() -> Tables:
    return {"fusion": dict(ADAM)}


# name of the row -> (title, settings). The models of a row are those of its settings.
GLOBAL: dict[str, tuple[str, Tables]] = {
    "centralised": ("centralised training (upper bound)", method("centralised")),
    "fedavg": ("FedAvg", method("fedavg")),
    "fedprox": ("FedProx", method("fedprox")),
    "fedavgm": ("FedAvgM", method("fedavgm")),
    "scaffold": ("SCAFFOLD", method("scaffold")),
    "moon": ("MOON", method("moon", {"models": {"head": "projection"}}, mu=1.0)),
    "fedma": ("FedMA (five trainings a round)", method("fedma", local={**LOCAL, "epochs": 1})),
    "heterofl": ("HeteroFL (rates 1, 1/2, 1/4)", method("heterofl", rates=[1.0, 0.5, 0.25])),
    "fedbe": ("FedBE", method("fedbe", fusion={**ADAM, "momentum": 0.0})),
    "feddistill": ("FedDistill (SWAG)", method("feddistill", **adam())),
    "fedensemble": ("Fed-ensemble", method("fedensemble")),
    "codistillation": ("codistillation (from round 3 on)", method("codistillation", W=3, **adam())),
    "fedeed": ("FedEED (K 4, R 2)", method("fedeed", K=4, R=2, **adam())),
    "fedavg-mix": ("FedAvg, per architecture", method("fedavg", MIX)),
    "feddf": ("FedDF", method("feddf", MIX, **adam())),
    "fedgen": ("FedGen", method("fedgen", SHARED, generated_weight=1.0)),
    "fedftg": ("FedFTG", method("fedftg", MIX, tune={"steps": 10, "batch": 50, "features": 16})),
    "fedet": ("Fed-ET", method("fedet", merged(SHARED, LARGE), local={**LOCAL, "steps": "none"})),
    "fusionlarge": ("large server model by fusion", method("fusionlarge", merged(MIX, LARGE), **adam())),
    "dsfl": ("DS-FL", method("dsfl", merged(MIX, LARGE), distill=TOWARDS)),
    "fedgems": ("FedGEMS", method("fedgems", merged(MIX, LARGE, LABELS), distill=TOWARDS)),
}
PERSONAL: dict[str, tuple[str, Tables]] = {
    "local": ("local training only", method("local", MIX)),
    "fd": ("FD", method("fd", MIX, local=STEPS, gamma=1.0)),
    "fedmd": ("FedMD", method("fedmd", merged(MIX, LABELS), local=None, revisit=REVISIT)),
    "fedmd-unlabelled": (
        "FedMD, no pre-training",
        method("fedmd", MIX, local=None, revisit=REVISIT),
    ),
    "cronus": ("Cronus", method("cronus", MIX)),
    "fedgkt": ("FedGKT", method("fedgkt", SHARED, local={"batch": 32})),
    "mnfl": ("MNFL", method("mnfl", MIX, **TAUGHT)),
    "uniform": ("uniform averaging (FedMD-style)", method("mnfl", MIX, rule="uniform", **TAUGHT)),
    "simpfl": ("Sim-pFL", method("simpfl", MIX, **TAUGHT)),
    "topkpfl": ("TopK-pFL", method("topkpfl", MIX, **TAUGHT)),
    "pfeddf": ("pFedDF", method("pfeddf", MIX, **adam())),
    "mnflparam": ("MNFL for one architecture", method("mnflparam")),
    "fedavgft": ("FedAvg + fine-tuning", method("fedavgft")),
    "perfedavg": ("Per-FedAvg", method("perfedavg", local=STEPS, alpha=0.05)),
    "perfedavg-hf": (
        "Per-FedAvg (HF, gradients clipped to 1)",
        method("perfedavg", local={**STEPS, "clip": 1.0}, alpha=0.05, mode="hf"),
    ),
    "pfedme": ("pFedMe", method("pfedme", local=STEPS)),
    "ditto": ("Ditto", method("ditto")),
    "fedamp": ("FedAMP", method("fedamp")),
    "fedamp-heuristic": ("HeurFedAMP", method("fedamp", heuristic=True, sigma=10.0)),
    "fedfomo": ("FedFomo", method("fedfomo")),
    "pfedhn": ("pFedHN", method("pfedhn", local=STEPS)),
    "ifca": ("IFCA (k 2)", method("ifca", local=STEPS, k=2)),
}
ROWS = GLOBAL | PERSONAL


# ---- learning rates ---------------------------------------------------------------------------------


def rates_of(name: str) -> dict[float, Tables]:
    """The rates that are tried for a row, each with the settings that set it."""
    kind = ROWS[name][1]["method"]["name"]
    if kind == "fedmd":  # the authors train everything with Adam
        return {lr: {"method": {"private": {"lr": lr}, "revisit": {"lr": lr}}} for lr in ADAM_RATES}
    return {lr: {"method": {"local": {"lr": lr}}} for lr in (ADAM_RATES if kind == "fedgkt" else RATES)}


def halves(out: pathlib.Path) -> tuple[Tables, Tables]:
    """The embedded samples in two disjoint parts, as folders: for trials, and for the tables."""
    data = load("fashion-mnist")
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    middle, end = len(order) * 4 // 10, len(order) // 2
    parts = {
        "trials": {"train": (data.train, order[:middle]), "t10k": (data.train, order[middle:end])},
        "tables": {"train": (data.train, order[end:]), "t10k": (data.test, torch.arange(len(data.test)))},
    }
    for part, splits in parts.items():
        folder = out / "data" / part
        folder.mkdir(parents=True, exist_ok=True)
        for split, (source, rows) in splits.items():
            write_idx(folder / f"{split}-images-idx3-ubyte", source.inputs[rows].squeeze(1))
            write_idx(folder / f"{split}-labels-idx1-ubyte", source.labels[rows].to(torch.uint8))
    trials, final = ({"data": {"path": str((out / "data" / part).resolve())}} for part in parts)
    return trials, final


def write_idx(path: pathlib.Path, values: Tensor) -> None:
    """Write bytes in MNIST's format. An existing file is kept: stopped runs have already read it."""
    if not path.exists():
        header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        path.write_bytes(header + values.contiguous().numpy().tobytes())


def reached(name: str, home: pathlib.Path) -> float:
    """The score of a trial; 0 if it ended early."""
    if not (home / "summary.json").is_file():
        return 0.0
    rounds = last_rounds(home)
    if name in PERSONAL:
        return statistics.fmean(r.own["mean"] for r in rounds)
    return of_models(rounds, ROWS[name][1])[1] or 0.0


def tuned(names: list[str], half: Tables, more: Tables, out: pathlib.Path, workers: int) -> dict[str, float]:
    """The best rate of each row. The results of all trials are recorded."""
    seed: Tables = {"run": {"seed": TRIAL_SEED}}
    cases = {
        f"trials/{name}/lr{lr:g}": merged(BASE, half, ROWS[name][1], settings, seed, more)
        for name in names
        for lr, settings in rates_of(name).items()
    }
    run_grid(cases, out, workers, may_fail=True)
    found = {name: {lr: reached(name, out / f"trials/{name}/lr{lr:g}") for lr in rates_of(name)} for name in names}
    best = {name: max(tried, key=lambda lr: tried[lr]) for name, tried in found.items()}
    noted = json.loads(NOTED.read_text()) if NOTED.is_file() else {}
    noted |= {
        name: {"accuracy": {f"{lr:g}": round(a, 4) for lr, a in tried.items()}, "chosen": best[name]}
        for name, tried in found.items()
    }
    if not more:  # a shortened trial does not count
        NOTED.parent.mkdir(exist_ok=True)
        NOTED.write_text(json.dumps({name: noted[name] for name in ROWS if name in noted}, indent=1) + "\n")
    return best


# ---- tables -----------------------------------------------------------------------------------------


def last_rounds(home: pathlib.Path) -> list[RoundRecord]:
    return read_run(home).rounds[-3:]


def models_of(tables: Tables) -> str:
    chosen = merged(BASE, tables)["models"]
    return ", ".join(chosen["clients"]) + (f"; server {chosen['server']}" if "server" in chosen else "")


def of_models(rounds: list[RoundRecord], tables: Tables) -> tuple[str, float | None]:
    """What is in the column, and its accuracy: the server's own model, or the mean over the clients' architectures (of
    HeteroFL's the whole ones); of a method with several models of an architecture, such as Fed-ensemble, their mean.
    """
    chosen = merged(BASE, tables)["models"]
    names = [chosen["server"]] if "server" in chosen else list(dict.fromkeys(chosen["clients"]))
    word = f"server's {names[0]}" if "server" in chosen else names[0] if len(names) == 1 else f"mean of {len(names)}"
    if members := [n for n in rounds[-1].of("model") if n.rpartition(".")[0] in names]:
        names += members
        word = f"mean of {len(names)}, each alone"
    seen = [[found[n]["accuracy"] for n in names if n in found] for found in (r.of("model") for r in rounds)]
    return word, statistics.fmean(statistics.fmean(s) for s in seen) if all(seen) else None


def of_ensemble(rounds: list[RoundRecord]) -> float | None:
    seen = [next(iter(found.values()))["accuracy"] for r in rounds if (found := r.of("ensemble"))]
    return statistics.fmean(seen) if seen else None


def of_clients(rounds: list[RoundRecord], key: str) -> float | None:
    """A number about clients' own models; runs of older versions have no weighted mean."""
    return statistics.fmean(r.own[key] for r in rounds) if all(key in r.own for r in rounds) else None


def cell(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    return spread(known) if known else "–"


def tables(found: dict[str, dict[str, Any]], rates: dict[str, float], out: pathlib.Path) -> str:
    """The two tables in Markdown: one model (or one of each architecture) for all, and a model for each client."""
    lines: list[str] = []
    heads = {
        "One model for all": "measured | accuracy, global test set | its ensemble",
        "A model for each client": "accuracy, own test split | weighted by samples | worst decile",
    }
    for (heading, columns), group in zip(heads.items(), (GLOBAL, PERSONAL), strict=True):
        lines += [f"### {heading}", "", f"| method | models | rate | {columns} | MB up | MB down | CPU seconds |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for name, (title, settings) in group.items():
            runs = [f"{name}/s{seed}" for seed in SEEDS]
            if any(r not in found for r in runs):
                lines.append(f"| {title} | {models_of(settings)} | | not run | | | | | |")
                continue
            rounds = [last_rounds(out / r) for r in runs]
            if group is GLOBAL:
                words, accuracies = zip(*(of_models(m, settings) for m in rounds), strict=True)
                results = [words[0], cell(list(accuracies)), cell([of_ensemble(m) for m in rounds])]
            else:
                keys = ("mean", "weighted_mean", "worst_decile")
                results = [cell([of_clients(run, key) for run in rounds]) for key in keys]
            sent = [statistics.fmean(found[r]["bytes"][way] for r in runs) / 1e6 for way in ("up", "down")]
            seconds = statistics.fmean(cpu_seconds(out / r) for r in runs)
            first = [title, models_of(settings), f"{rates[name]:g}"]
            cells = [*first, *results, *(f"{mb:.1f}" for mb in sent), f"{seconds:.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="some of the methods")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/baselines"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, help="fewer rounds, to check that everything runs")
    parser.add_argument("--write", type=pathlib.Path, help="a page with the two marks: the tables go between")
    args = parser.parse_args()
    rounds = {"run": {"rounds": args.rounds}} if args.rounds else {}
    names = args.only or list(ROWS)
    trials, final = halves(args.out)
    rates = tuned(names, trials, rounds, args.out, args.workers)
    cases = {
        f"{name}/s{seed}": merged(
            BASE, final, ROWS[name][1], rates_of(name)[rates[name]], {"run": {"seed": seed}}, rounds
        )
        for seed in args.seeds  # seed by seed: a stopped grid has whole rows of the first seeds
        for name in names
    }
    text = tables(run_grid(cases, args.out, args.workers), rates, args.out)
    print(text)
    if args.write:
        put(args.write, "baselines", text)


if __name__ == "__main__":
    main()
