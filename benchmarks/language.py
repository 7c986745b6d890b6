"""Pretrained encoders of different depths teach each other: MiniLM cut to 1, 2 and 3 layers, and whole on the server.

    python benchmarks/language.py --sst2 DIR --ag-news DIR                               # parquet folders
    python benchmarks/language.py ... --record benchmarks/results/language.json          # the runs, as they end
    python benchmarks/language.py ... --finished --write docs/results.md                 # the tables of what is there

Six methods, two degrees of skew, three seeds. The rates of local training and of distillation are chosen first, in
shorter runs with a seed of their own, by their accuracy on validation samples (a part of the training texts): the test
texts are not looked at. What these trials found is written to benchmarks/results/language-rates.json.

Call it again to continue after a stop: finished runs are not repeated, and runs are ordered by seed, so that a part of
them is also a comparison. Every run uses one core. Minutes are those of the processor. Needs the extras `text` and
`minilm`; nothing is downloaded.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import peft  # noqa: F401  (both now, not in every process of the grid)
import transformers  # noqa: F401

from grid import Tables, cpu_seconds, merged, put, run_grid, spread
from solera.runs.read import read_run

SEEDS, ALPHAS = (0, 1, 2), (0.1, 1.0)
CLIENTS = ["minilm-l1", "minilm-l2", "minilm-l3"]
LARGE = "minilm-l6"
ROUNDS = 3
FUSION: Tables = {"steps": 25, "batch": 16, "optimizer": "adam", "schedule": "constant", "clip": "none"}
BASE: Tables = {
    "run": {"rounds": ROUNDS, "eval_every": ROUNDS},
    "data": {"train_size": 1600, "test_size": 400, "length": 24},
    "partition": {"kind": "dirichlet", "variant": "equal", "clients": 6},
    "public": {"source": "held-out", "size": 400, "per_round": 200},
    "models": {"clients": CLIENTS, "head": "shared", "lora": {"rank": 8}},
    "method": {"local": {"steps": 20, "batch": 16, "optimizer": "adam"}},
}

RATES = (0.0005, 0.0015, 0.005)  # of Adam: those that are tried
TRIAL_SEED = 9
LOCAL_TRIAL, FUSION_TRIAL = 3, 2  # rounds
NOTED = pathlib.Path(__file__).parent / "results" / "language-rates.json"


def trial(rounds: int) -> Tables:
    """Settings of a shorter run that is scored on validation samples."""
    stop = {"patience": rounds, "metric": "accuracy", "split": "validation"}  # which ends no run
    run = {"rounds": rounds, "eval_every": rounds, "seed": TRIAL_SEED, "stop": stop}
    return {"run": run, "data": {"train_size": 2000, "validation": 0.2}}


def method(name: str, **settings: Any) -> Tables:
    return {"method": {"name": name, **settings}}


def with_server(name: str, **settings: Any) -> Tables:
    return merged({"models": {"server": LARGE}}, method(name, fusion=FUSION, **settings))


METHODS: dict[str, tuple[str, Tables]] = {
    "local": ("local training only", merged({"data": {"client_test": "common"}}, method("local"))),
    "fedavg": ("averaging, each depth by itself (FedAvg)", method("fedavg")),
    "feddf": ("FedDF", method("feddf", fusion=FUSION, report_ensemble=False)),
    "fedeed": ("FedEED (K 2, R 2)", method("fedeed", K=2, R=2, fusion=FUSION, report_ensemble=False)),
    "fedet": ("Fed-ET", with_server("fedet", report_ensemble=False)),
    "fusionlarge": ("large server model by soft targets", with_server("fusionlarge", report_ensemble=False)),
}
DISTILLED = {"feddf": "feddf", "fedeed": "feddf", "fusionlarge": "feddf", "fedet": "fedet"}  # whose rate each takes


def data_sets(sst2: str, ag_news: str) -> dict[str, Tables]:
    return {"ag-news": {"data": {"name": "ag-news", "path": ag_news}}, "sst2": {"data": {"name": "sst2", "path": sst2}}}


def local_rate(lr: float) -> Tables:
    return {"method": {"local": {"lr": lr}}}


def fusion_rate(lr: float) -> Tables:
    return {"method": {"fusion": {"lr": lr}}}


def judged(home: pathlib.Path) -> float:
    """The accuracy of a trial on validation samples: of the server's model, or the mean over the clients'."""
    found = read_run(home).rounds[-1].of("validation")
    return found[LARGE]["accuracy"] if LARGE in found else statistics.fmean(s["accuracy"] for s in found.values())


def chosen(sets: dict[str, Tables], out: pathlib.Path, workers: int, run: bool) -> dict[str, Any]:
    """The best rates and the trials: of local training for each data set and skew, by averaging; then of distillation
    for each method, at the milder skew, by the mean over the data sets."""

    def tried(cells: dict[str, Tables], rate: Callable[[float], Tables]) -> dict[str, dict[str, float]]:
        trials = {f"trials/{c}/lr{lr:g}": merged(t, rate(lr)) for c, t in cells.items() for lr in RATES}
        if run:
            run_grid(trials, out, workers)
        return {c: {f"{lr:g}": round(judged(out / f"trials/{c}/lr{lr:g}"), 4) for lr in RATES} for c in cells}

    def cell(data: str, alpha: float, name: str, rounds: int) -> Tables:
        return merged(BASE, trial(rounds), sets[data], METHODS[name][1], {"partition": {"alpha": alpha}})

    def best(found: dict[str, float]) -> float:
        return float(max(found, key=lambda lr: found[lr]))

    local = tried({f"{d}/a{a}": cell(d, a, "fedavg", LOCAL_TRIAL) for d in sets for a in ALPHAS}, local_rate)
    rates: dict[str, Any] = {"local": {c: {"accuracy": found, "chosen": best(found)} for c, found in local.items()}}
    mild = max(ALPHAS)
    given = {d: local_rate(rates["local"][f"{d}/a{mild}"]["chosen"]) for d in sets}
    methods = sorted(set(DISTILLED.values()))
    fusion = tried(
        {f"{d}/{m}": merged(cell(d, mild, m, FUSION_TRIAL), given[d]) for m in methods for d in sets}, fusion_rate
    )
    mean = {
        m: {lr: statistics.fmean(fusion[f"{d}/{m}"][lr] for d in sets) for lr in map("{:g}".format, RATES)}
        for m in methods
    }
    rates["fusion"] = {m: {"accuracy": {d: fusion[f"{d}/{m}"] for d in sets}, "chosen": best(mean[m])} for m in methods}
    return rates


def cases(sets: dict[str, Tables], rates: dict[str, Any]) -> dict[str, Tables]:
    """Every run by its name, seed after seed."""

    def rated(data: str, alpha: float, name: str) -> Tables:
        local = local_rate(rates["local"][f"{data}/a{alpha}"]["chosen"])
        return merged(local, fusion_rate(rates["fusion"][DISTILLED[name]]["chosen"])) if name in DISTILLED else local

    return {
        f"{data}/a{alpha}/{name}/s{seed}": merged(
            BASE, sets[data], settings, rated(data, alpha, name), {"partition": {"alpha": alpha}, "run": {"seed": seed}}
        )
        for seed in SEEDS
        for alpha in reversed(ALPHAS)
        for data in sets
        for name, (_, settings) in METHODS.items()
    }


def scores(run: dict[str, Any]) -> dict[str, float]:
    """What a run reached on the test set: the clients' models on average, and the server's own model."""
    if run.get("personal"):
        return {"clients": run["personal"]["mean"]}
    small = [run["models"][A]["accuracy"] for A in CLIENTS if A in run["models"]]
    large = {"server": run["models"][LARGE]["accuracy"]} if LARGE in run["models"] else {}
    return {"clients": statistics.fmean(small), **large} if small else large


def summary(home: pathlib.Path) -> dict[str, Any]:
    """What is kept of a finished run."""
    run = json.loads((home / "summary.json").read_text())
    facts = {"digest": run["digest"], "bytes": sum(run["bytes"].values()), "cpu_s": round(cpu_seconds(home), 1)}
    return {**{where: round(value, 4) for where, value in scores(run).items()}, **facts}


def tables(sets: dict[str, Tables], found: dict[str, dict[str, Any]]) -> str:
    """Accuracies, megabytes and minutes in Markdown. If seeds are missing, a cell says how many there are."""
    lines: list[str] = []

    def cell(runs: list[dict[str, Any]], where: str) -> str:
        values = [run[where] for run in runs if where in run]
        if not values:
            return "–" if runs else "not run"
        shown = spread(values) if len(values) > 1 else f"{100 * values[0]:.1f}"
        return shown if len(values) == len(SEEDS) else f"{shown} ({len(values)} of {len(SEEDS)} seeds)"

    for data in sets:
        head = [f"{who}, alpha {alpha:g}" for alpha in ALPHAS for who in ("clients' models", "server's model")]
        lines += [f"### {data}", "", "| method | " + " | ".join(head) + " | MB both ways | minutes |"]
        lines.append("|---" * (len(head) + 3) + "|")
        for name, (title, _) in METHODS.items():
            by_alpha = {a: [found[n] for s in SEEDS if (n := f"{data}/a{a}/{name}/s{s}") in found] for a in ALPHAS}
            row = [title, *(cell(runs, where) for runs in by_alpha.values() for where in ("clients", "server"))]
            every = [run for runs in by_alpha.values() for run in runs]
            if every:
                row.append(f"{statistics.fmean(run['bytes'] for run in every) / 1e6:.1f}")
                row.append(f"{statistics.fmean(run['cpu_s'] for run in every) / 60:.1f}")
            lines.append("| " + " | ".join(row + ["–"] * (len(head) + 3 - len(row))) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sst2", required=True, help="folder with SST-2")
    parser.add_argument("--ag-news", required=True, help="folder with AG News")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/language"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rates", action="store_true", help="choose the rates anew, although they are recorded")
    parser.add_argument("--rounds", type=int, help="fewer rounds, to check that everything runs")
    parser.add_argument("--finished", action="store_true", help="run nothing: only write the tables of finished runs")
    parser.add_argument("--write", type=pathlib.Path, help="a page with the marks `language`: the tables go between")
    parser.add_argument("--record", type=pathlib.Path, help="a JSON file for what the runs reached")
    args = parser.parse_args()
    sets = data_sets(args.sst2, args.ag_news)
    if args.rates or not NOTED.is_file():
        NOTED.write_text(json.dumps(chosen(sets, args.out, args.workers, not args.finished), indent=1) + "\n")
    grid = cases(sets, json.loads(NOTED.read_text()))
    if args.rounds:
        grid = {n: merged(t, {"run": {"rounds": args.rounds, "eval_every": args.rounds}}) for n, t in grid.items()}
    names, found = list(grid), {}
    for start in range(0, len(names), len(METHODS)):  # one comparison at a time, and what it found is kept
        some = {n: grid[n] for n in names[start : start + len(METHODS)]}
        if not args.finished:
            run_grid(some, args.out, args.workers)
        done = (n for n in some if (args.out / n / "summary.json").is_file())
        found |= {n: summary(args.out / n) for n in done}
        if args.record:
            args.record.parent.mkdir(parents=True, exist_ok=True)
            args.record.write_text(json.dumps(found, indent=1) + "\n")
    text = tables(sets, found)
    print(text)
    if args.write:
        put(args.write, "language", text)


if __name__ == "__main__":
    main()
