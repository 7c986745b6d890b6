"""Why is Fed-ET's server model worse than its own ensemble? One change at a time, at the quickstart's scale.

    python benchmarks/fedet_ablation.py              # the main rows, all cores; call it again to continue after a stop
    python benchmarks/fedet_ablation.py --only fedet adam --seeds 0              # some of them
    python benchmarks/fedet_ablation.py --only all                               # the further ones too
    python benchmarks/fedet_ablation.py --only all --rounds 1 --seeds 0 --out /tmp/smoke   # does everything run?

Twenty clients hold parts of the embedded Fashion-MNIST sample (Dirichlet, alpha 0.1), eight take part in a round, and
each trains mlp (0.24 M parameters), lenet5 (0.09 M) or tiny-cnn (0.05 M). The server's own model is mcmahan-cnn with
1.74 M parameters: 7 to 35 times theirs, and small enough for a laptop's CPU. Data, initial bodies, cohorts, local
training and bytes on the wire are the same in all runs of one seed; only what the server does differs.

Every figure is a mean over the last three rounds, and over seeds with its standard deviation. The table is printed and
written to <out>/ablation.md. The main rows take about half an hour on two cores.
"""

import argparse
import os
import pathlib
import statistics

from grid import Tables, last_accuracy, merged, run_grid, spread
from solera.runs.read import read_run

LARGE, SMALL = "mcmahan-cnn", ("mlp", "lenet5", "tiny-cnn")

BASE: Tables = {
    "data": {"name": "fashion-mnist", "test_size": 1000},
    "partition": {"kind": "dirichlet", "variant": "equal", "clients": 20, "alpha": 0.1},
    "public": {"source": "held-out", "size": 2000},
    "models": {"clients": list(SMALL), "server": LARGE, "head": "shared"},
    "federation": {"fraction": 0.4},
    "method": {"local": {"epochs": 3, "batch": 32, "lr": 0.05}},
}

ADAM: Tables = {"optimizer": "adam", "lr": 0.001, "schedule": "cosine", "clip": 5.0, "steps": 128, "batch": 64}


def fedet(**settings: object) -> Tables:
    local = {"steps": "none"}  # by epochs, as all others
    return {"method": {"name": "fedet", "local": local, "report_ensemble": True, **settings}}


def fusion(**settings: object) -> Tables:
    """`fusionlarge`, by default with Fed-ET's weights for teachers and with its small models."""
    same = {"name": "fusionlarge", "fusion": ADAM, "ensemble": "confidence", "average": "uniform"}
    return {"method": {**same, "report_ensemble": True, **settings}}


# name -> (title, settings). First Fed-ET, then one more change in each row, then single changes undone.
MAIN: dict[str, tuple[str, Tables]] = {
    "fedet": ("Fed-ET as in the paper: 128 steps of SGD, rate 0.005", fedet()),
    "fedet-rate": ("... with a rate of 0.05", fedet(fusion={"lr": 0.05})),
    "fedet-rate-steps": ("... with a rate of 0.05 and 256 steps", fedet(fusion={"lr": 0.05, "steps": 256})),
    "adam": (
        "128 steps of Adam, rate 0.001 with cosine; no diversity term",
        fusion(targets="hard", head="shared", client_models="averaged"),
    ),
    "adam-soft": ("... and soft targets", fusion(head="shared", client_models="averaged")),
    "adam-soft-own": ("... and every model keeps its own head", fusion(client_models="averaged")),
    "distilled": ("... and the small models are distilled too", fusion()),
    "distilled-hard": ("all distilled, from hard labels", fusion(targets="hard")),
    "distilled-logits": ("all distilled, from averaged logits", fusion(ensemble="avg_logits")),
}
FURTHER: dict[str, tuple[str, Tables]] = {
    "fedet-lambda0": ("Fed-ET without its diversity term", fedet(diversity=0.0)),
    "distilled-shared": ("all distilled, with the head passed both ways", fusion(head="shared")),
    "distilled-steps": ("all distilled, in 256 steps", fusion(fusion={**ADAM, "steps": 256})),
    "feddf": ("FedDF: no large model", {"method": {"name": "feddf", "fusion": ADAM, "report_ensemble": True}}),
    "fedavg": ("averaging only", {"method": {"name": "fedavg"}}),
}
CASES = MAIN | FURTHER


def report(homes: dict[str, list[pathlib.Path]]) -> str:
    """The table, in Markdown."""
    lines = [
        "| what | server model | its teachers together | gap | small models |",
        "|---|---|---|---|---|",
    ]
    for name, runs in homes.items():
        large = name not in ("feddf", "fedavg")
        server = [last_accuracy(home, LARGE) for home in runs] if large else []
        teachers = [ensemble_accuracy(home) for home in runs] if name != "fedavg" else []
        gap = [t - s for t, s in zip(teachers, server, strict=True)] if large else []
        small = [statistics.fmean(last_accuracy(home, P) for P in SMALL) for home in runs]
        cells = [spread(v) if v else "" for v in (server, teachers, gap, small)]
        lines.append(f"| {CASES[name][0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ensemble_accuracy(home: pathlib.Path, rounds: int = 3) -> float:
    """Like `last_accuracy`, for the teachers' joint prediction."""
    seen = [found["teachers"]["accuracy"] for r in read_run(home).rounds if (found := r.of("ensemble"))]
    return statistics.fmean(seen[-rounds:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/fedet-ablation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=["all", *CASES], default=list(MAIN), metavar="NAME")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once")
    args = parser.parse_args()
    names = list(CASES) if "all" in args.only else args.only

    cases = {}
    for seed in args.seeds:  # by seed: a stopped study has complete comparisons
        for name in names:
            run = {"run": {"seed": seed, "rounds": args.rounds, "checkpoint_every": args.rounds}}
            cases[f"{name}-{args.rounds}/{seed}"] = merged(BASE, run, CASES[name][1])
    run_grid(cases, args.out, args.workers)
    table = report({name: [args.out / f"{name}-{args.rounds}" / str(seed) for seed in args.seeds] for name in names})
    (args.out / "ablation.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
