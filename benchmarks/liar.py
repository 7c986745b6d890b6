"""The effect of one overconfident malicious client on FedDF, and which settings help: the table of docs/robustness.md.

    python benchmarks/liar.py               # about three minutes on one core
    python benchmarks/liar.py --seeds 0     # one seed

It uses the toy federation of solera.testing: eight clients, four of each of two architectures, full participation,
eight rounds, no validation set (except for drop_worst, which needs one). The reply of a malicious client is finite and
passes every check of shape and type: its last layer is zero, with a bias only for class 0.
"""

import argparse
import statistics
import tempfile

import torch
from torch import nn

from solera.devices import Placement
from solera.engines import ClientStates, InProcess
from solera.federation import Federation
from solera.methods.feddf import FedDF
from solera.parts.distill import Distill
from solera.parts.local import Local, evaluate
from solera.scenario import Scenario
from solera.task import Client, Data
from solera.tensors import Weights
from solera.testing import toy

ROUNDS = 8
SETTINGS: dict[str, dict] = {
    "the paper's: `avg_logits`, mean": {},
    '`average = "median"` alone': {"average": "median"},
    '`ensemble = "median_probs"` alone': {"ensemble": "median_probs"},
    "`avg_probs`, median": {"ensemble": "avg_probs", "average": "median"},
    "`confidence`, median": {"ensemble": "confidence", "average": "median"},
    "`clipped_logits`, median": {"ensemble": "clipped_logits", "average": "median"},
    "`standardised_logits`, median": {"ensemble": "standardised_logits", "average": "median"},
    "`median_probs`, median": {"ensemble": "median_probs", "average": "median"},
    "`update_clip = 1.0`": {"update_clip": 1.0},
    "`update_clip = 2.0`": {"update_clip": 2.0},
    "`drop_worst = true`": {"drop_worst": True},
}
ATTACKS = {"clean": (0, 0.0), "1 liar, 10": (1, 10.0), "1 liar, 1e4": (1, 1e4), "2 liars, 1e4": (2, 1e4)}
LIARS = ("c02", "c05")  # one of each architecture


class Lying:
    """A scenario in which some clients are malicious."""

    def __init__(self, scenario: Scenario, liars: tuple[str, ...], bias: float):
        self.scenario, self.liars, self.bias, self.roster = scenario, liars, bias, scenario.roster

    def client(self, k: str, seed: int, state: dict[str, Weights], place: Placement) -> Client:
        c = self.scenario.client(k, seed, state, place)
        if k in self.liars:
            truth = c.model
            c.train = Data(c.train.inputs[:0], c.train.labels[:0])  # a malicious client does not train
            c.model = lambda weights=None: claim(truth(weights), self.bias)  # type: ignore[method-assign]
        return c


def claim(model: nn.Module, bias: float) -> nn.Module:
    """The model, changed so that it predicts class 0 for every sample."""
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.eye(len(last.bias))[0] * bias)
    return model


def accuracy(settings: dict, liars: int, bias: float, seed: int) -> float:
    """Mean test accuracy of the two fused models after the last round."""
    scenario = toy(seed=seed, validation=0.1 if "drop_worst" in settings else 0.0)
    local, fusion = Local(epochs=5, batch=16), Distill(steps=60, batch=32, lr=0.02)
    method = FedDF(local, fusion, report_ensemble=False, **settings)
    with tempfile.TemporaryDirectory() as tmp:
        fed = Federation(InProcess(Lying(scenario, LIARS[:liars], bias), ClientStates(tmp)), seed)
        state = method.init(fed, scenario.server)
        for t in range(ROUNDS):
            fed.begin(t)
            scenario.server.begin()
            state = method.round(state, fed, scenario.server)
    test, server = scenario.test, scenario.server
    return statistics.fmean(
        evaluate(server.model(P, w), test.inputs, test.labels).accuracy for P, w in state.weights.items()
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="FedDF with one overconfident malicious client.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print(f"| FedDF with | {' | '.join(ATTACKS)} |\n|---|{'---|' * len(ATTACKS)}")
    for name, settings in SETTINGS.items():
        cells = []
        for liars, bias in ATTACKS.values():
            found = [accuracy(settings, liars, bias, seed) for seed in seeds]
            spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
            cells.append(f"{statistics.fmean(found):.2f}{spread}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
