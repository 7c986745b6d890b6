"""Your own models and your own data in one file: three different networks learn together without sharing data.

Run it with `python examples/own_models_and_data.py`; it takes a few seconds.
"""

import torch
from torch import nn

import solera
from solera.methods import FedAvg, FedDF
from solera.train.distill import Distill
from solera.train.fitting import Local


# Any nn.Module works. It needs no particular names and no particular structure.
class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)
    )


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))


def spirals(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three arms of a spiral, one class each."""
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    radius = torch.rand(n, generator=g) * 2 + 0.2
    angle = radius * 1.5 + label * 2 * torch.pi / 3 + 0.15 * torch.randn(n, generator=g)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label


def main(out: str = "runs/own") -> dict[str, float]:
    data = solera.from_tensors(train=spirals(1800, 1), test=spirals(600, 2), classes=3, name="spirals")
    scenario = solera.Scenario(
        data,
        models={"small": Small, "deep": deep, "smooth": smooth},
        partition=solera.PartitionConfig(clients=12, alpha=0.3),
        public=solera.PublicConfig(source="held-out", size=300),  # unlabelled, on the server
        seed=0,
    )
    rounds = solera.RunConfig(rounds=8)
    local = Local(epochs=5, batch=16, lr=0.1)
    averaged = solera.simulate(scenario, FedAvg(local=local), f"{out}/fedavg", rounds)
    fused = solera.simulate(scenario, FedDF(local=local, fusion=Distill(steps=200)), f"{out}/feddf", rounds)
    for name in fused.models:
        before, after = (r.summary["models"][name]["accuracy"] for r in (averaged, fused))
        print(f"{name:8} averaging {before:.1%}   FedDF {after:.1%}")
    return {name: m["accuracy"] for name, m in fused.summary["models"].items()}


if __name__ == "__main__":
    main()
