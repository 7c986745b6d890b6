"""Each defence against Byzantine clients, with and without them: the tables of docs/robustness.md.

    python benchmarks/liar.py                                   # call it again to continue after a stop
    python benchmarks/liar.py --only feddf feddf-clip           # some rows
    python benchmarks/liar.py --finished --write docs/robustness.md

Ten clients hold the embedded Fashion-MNIST sample (2,500 training samples and 500 public ones, partition "equal"), five
with an MLP and five with a small CNN. All take part in each of the rounds. Of the same clients none, one or three are
malicious, in one of two ways:

    lies    they do not train; the last layer of their model is zero, with a bias of 10,000 for class 0
    flips   they train on wrong labels: 9 - y instead of y

Both pass every check of a reply. The accuracy is that of the method's models on the 1,000 test samples, the mean over
the last two rounds and the models. Every run is written to benchmarks/results/robustness.json when it ends. Runs
without malicious clients come first. It uses one process and one core: about half an hour of CPU time.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

from grid import Tables, merged, put, spread
from solera.core.federation import QuorumNotMet
from solera.core.task import Client, Data
from solera.core.tensors import Weights
from solera.engines import ClientStates, InProcess
from solera.place.placement import Placement
from solera.runs.config import load_config
from solera.runs.loop import federation_of
from solera.scenario.scenario import Scenario
from solera.train.fitting import evaluate

NOTED = pathlib.Path(__file__).parent / "results" / "robustness.json"
MARK = "robustness"
SEEDS, ALPHAS, ROUNDS, CLIENTS, BIAS = (0, 1, 2), (1.0, 0.1), 5, 10, 1e4
SCORED = 2  # rounds, the last ones
BASE: Tables = {
    "data": {"name": "fashion-mnist", "train_size": 3000, "test_size": 1000},
    "partition": {"kind": "dirichlet", "variant": "equal", "clients": CLIENTS},
    "public": {"source": "held-out", "size": 500},
    "models": {"clients": ["mlp", "tiny-cnn"]},
}
LOCAL: Tables = {"epochs": 3, "batch": 16, "lr": 0.05}
ADAM: Tables = {"steps": 60, "batch": 64, "optimizer": "adam", "lr": 0.001, "schedule": "cosine"}
VALIDATION: Tables = {"data": {"validation": 0.1}}
SHARED: Tables = {"models": {"head": "shared", "server": "lenet5"}}
LIES = {"clean": (0, ""), "flip-3": (3, "flips"), "lie-3": (3, "lies"), "lie-1": (1, "lies")}
WORDS = {"clean": "none", "flip-3": "3 of 10 flip labels", "lie-3": "3 of 10 lie", "lie-1": "1 of 10 lies"}


def feddf(*tables: Tables, **settings: Any) -> Tables:
    method = {"name": "feddf", "local": LOCAL, "fusion": ADAM, "report_ensemble": False, **settings}
    return merged(*tables, {"method": method})


def fedet(**settings: Any) -> Tables:
    local = {**LOCAL, "steps": "none"}
    return merged(SHARED, {"method": {"name": "fedet", "local": local, "report_ensemble": False, **settings}})


def fedeed(**settings: Any) -> Tables:
    method = {"name": "fedeed", "K": 2, "R": 1, "local": LOCAL, "fusion": ADAM, "report_ensemble": False}
    return {"method": {**method, **settings}}


def dsfl(aggregation: str) -> Tables:
    distill = {"epochs": 3, "batch": 25, "lr": 0.05}
    method = {"name": "dsfl", "local": LOCAL, "distill": distill, "aggregation": aggregation, "judge_clients": False}
    return {"method": method}


# name -> (title, settings). The rows with a validation set train on 270 samples less.
ROWS: dict[str, tuple[str, Tables]] = {
    "feddf": ("FedDF", feddf()),
    "feddf-clip": ("FedDF, `update_clip = 2`", feddf(screen={"kind": "robust", "update_clip": 2.0})),
    "feddf-medians": (
        'FedDF, `ensemble = "median_probs"`, `average = "median"`',
        feddf(ensemble="median_probs", screen={"kind": "robust", "average": "median"}),
    ),
    "feddf-krum": (
        'FedDF, `teachers` and `average = "multi_krum"`',
        feddf(screen={"kind": "robust", "teachers_by": "multi_krum", "average": "multi_krum"}),
    ),
    "feddf-validation": ("FedDF, with a validation set", feddf(VALIDATION)),
    "feddf-drop": (
        "FedDF, with a validation set, `drop_worst = true`",
        feddf(VALIDATION, screen={"kind": "robust", "drop_worst": True}),
    ),
    "fedeed": ("FedEED", fedeed()),
    "fedeed-medians": (
        'FedEED, `rule = "median_probs"`, `screen.average = "median"`',
        fedeed(rule="median_probs", screen={"kind": "robust", "average": "median"}),
    ),
    "fedeed-clip": ("FedEED, `screen.update_clip = 2`", fedeed(screen={"kind": "robust", "update_clip": 2.0})),
    "fedet": ("Fed-ET", fedet()),
    "fedet-median": ('Fed-ET, `average = "median"`', fedet(screen={"kind": "robust", "average": "median"})),
    "dsfl-era": ("DS-FL", dsfl("era")),
    "dsfl-sa": ('DS-FL, `aggregation = "sa"`', dsfl("sa")),
}


class Lying:
    """A scenario in which some clients are malicious."""

    def __init__(self, scenario: Scenario, liars: list[str], how: str):
        self.scenario, self.liars, self.how, self.roster = scenario, liars, how, scenario.roster

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement) -> Client:
        c = self.scenario.client(k, seed, state, place)
        if k in self.liars and self.how == "flips":
            c.train = Data(c.train.inputs, c.classes - 1 - c.train.labels)
        elif k in self.liars:
            truth = c.model
            c.train = Data(c.train.inputs[:0], c.train.labels[:0])  # this one does not train
            c.model = lambda weights=None: claim(truth(weights), BIAS)  # type: ignore[method-assign]
        return c


def claim(model: nn.Module, bias: float) -> nn.Module:
    """The model, changed so that it predicts class 0 for every sample."""
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.eye(len(last.bias))[0] * bias)
    return model


def malicious(scenario: Scenario, count: int) -> list[str]:
    """The first clients of the architectures in turn: of three, two have an MLP and one a CNN."""
    roster = scenario.roster
    by_model: dict[str, list[str]] = {}
    for k in roster:
        by_model.setdefault(roster[k].architecture, []).append(k)
    return [k for turn in zip(*by_model.values(), strict=True) for k in turn][:count]


def run(tables: Tables, liars: int, how: str) -> dict[str, Any]:
    """One run: the accuracy of every model, and the CPU seconds."""
    began, cfg = time.process_time(), load_config(tables)
    scenario = Scenario(cfg.data, cfg.models, cfg.partition, cfg.public, seed=cfg.run.seed, workers=1)
    server, method, test, void = scenario.server, cfg.method, scenario.test, 0
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as tmp:
        engine = InProcess(Lying(scenario, malicious(scenario, liars), how), ClientStates(tmp))
        fed = federation_of(engine, server, method, cfg.federation)
        fed.begin(0)
        state = method.init(fed, server)
        for t in range(cfg.run.rounds):
            fed.begin(t)
            server.begin()
            try:
                state = method.round(state, fed, server)
            except QuorumNotMet:
                fed.void()
                void += 1
            for name, m in method.models(state).items() if t >= cfg.run.rounds - SCORED else ():
                model = server.model(m.architecture, m.weights)
                found.setdefault(name, []).append(evaluate(model, test.inputs, test.labels).accuracy)
    if server.large is not None and server.large in found:  # Fed-ET: what it is for
        found = {server.large: found[server.large]}
    last = {name: round(statistics.fmean(seen), 4) for name, seen in found.items()}
    accuracy = round(statistics.fmean(last.values()), 4)
    return {"accuracy": accuracy, "models": last, "void": void, "cpu_s": round(time.process_time() - began, 1)}


def cases(
    seeds: list[int], only: list[str], alphas: list[float], attacks: list[str]
) -> dict[str, tuple[Tables, int, str]]:
    """Every run by name, in the order of the attacks: those without malicious clients first."""
    found = {}
    for attack, seed, alpha, name in itertools.product(attacks, seeds, alphas, only):
        same = {"run": {"seed": seed, "rounds": ROUNDS}, "partition": {"alpha": alpha}}
        found[f"{name}/a{alpha:g}/{attack}/s{seed}"] = (merged(BASE, ROWS[name][1], same), *LIES[attack])
    return found


def tables_of(noted: dict[str, Any], seeds: list[int]) -> str:
    """The tables in Markdown, one for each alpha; a cell with fewer seeds says how many."""
    lines = []
    for alpha in ALPHAS:
        lines += [f"alpha = {alpha:g}:", "", f"| | {' | '.join(WORDS.values())} |", f"|---|{'---|' * len(WORDS)}"]
        for name, (title, _) in ROWS.items():
            cells = []
            for attack in LIES:
                names = [f"{name}/a{alpha:g}/{attack}/s{seed}" for seed in seeds]
                seen = [noted[n]["accuracy"] for n in names if n in noted]
                few = f" ({len(seen)} of {len(seeds)} seeds)" if len(seen) < len(seeds) else ""
                one = spread(seen) if len(seen) > 1 else "".join(f"{100 * x:.1f}" for x in seen)
                cells.append(one + few if seen else "not run")
            lines.append(f"| {title} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS), help="some rows of the tables")
    parser.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--attacks", choices=LIES, nargs="+", default=list(LIES))
    parser.add_argument("--finished", action="store_true", help="run nothing: only the tables of finished runs")
    parser.add_argument("--write", type=pathlib.Path, help="a page with the two marks: the tables go between")
    parser.add_argument("--record", type=pathlib.Path, default=NOTED, help="the file with the finished runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    noted = json.loads(args.record.read_text()) if args.record.is_file() else {}
    wanted = cases(args.seeds, args.only, args.alphas, args.attacks)
    todo = {n: case for n, case in wanted.items() if n not in noted}
    for name, case in {} if args.finished else todo.items():
        noted[name] = run(*case)
        beside = args.record.with_suffix(".part")  # a stop while it is written leaves the file of the run before
        beside.write_text(json.dumps(noted, indent=1) + "\n")
        beside.replace(args.record)
        print(f"{name}: {noted[name]}", flush=True)
    text = tables_of(noted, args.seeds)
    print(text)
    if args.write:
        put(args.write, MARK, text)


if __name__ == "__main__":
    main()
