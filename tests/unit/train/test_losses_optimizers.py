"""Our optimizers take the steps of torch's own, to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solera.train.losses import Adam, Optimizer, Sgd


def model() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 5, 3)
    whole = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 3))
    return whole.to(memory_format=torch.channels_last)


def walk(net: nn.Sequential, optimizer: Optimizer | torch.optim.Optimizer, steps: int = 7) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = F.cross_entropy(net(torch.randn(16, 2, 8, 8, generator=g)), torch.randint(3, (16,), generator=g))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_sgd_is_torchs(momentum: float, weight_decay: float) -> None:
    ours, theirs = model(), model()
    mine = walk(ours, Sgd(list(ours.parameters()), 0.1, momentum, weight_decay))
    reference = torch.optim.SGD(theirs.parameters(), 0.1, momentum=momentum, weight_decay=weight_decay, fused=True)
    assert all(torch.equal(a, b) for a, b in zip(mine, walk(theirs, reference), strict=True))
    assert not torch.equal(mine[0], model()[0].weight)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adam_is_torchs(weight_decay: float) -> None:
    ours, theirs = model(), model()
    mine = walk(ours, Adam(list(ours.parameters()), 0.01, weight_decay))
    reference = torch.optim.Adam(theirs.parameters(), 0.01, weight_decay=weight_decay, fused=True)
    assert all(torch.equal(a, b) for a, b in zip(mine, walk(theirs, reference), strict=True))


def test_a_step_by_hand() -> None:
    """v = 0.5 v + (g + 0.1 w), w = w - 0.2 v: from w = 1 with g = 2, then g = 4."""
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = Sgd([w], 0.2, momentum=0.5, weight_decay=0.1)
    seen = []
    for g in (2.0, 4.0):
        w.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        seen.append(w.item())
    first = 1 - 0.2 * 2.1
    assert seen == pytest.approx([first, first - 0.2 * (0.5 * 2.1 + 4 + 0.1 * first)], abs=1e-15)


@pytest.mark.parametrize("kind", [Sgd, Adam])
def test_parameters_without_gradient_stay_and_types_may_mix(kind: type[Optimizer]) -> None:
    moved, idle, double = (nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float32, torch.float64))
    optimizer = kind([moved, idle, double], 0.1, weight_decay=0.0)
    moved.grad, double.grad = torch.ones(3), torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert (moved < 1).all()
    assert (double < 1).all()
    assert (idle == 1).all()
    optimizer.zero_grad()
    assert moved.grad is None


def test_training_does_not_import_torchs_compiler() -> None:
    """It takes a second, in every new process."""
    import subprocess
    import sys

    program = (
        "import sys, torch; from torch import nn; from solera.train.fitting import Local, fit\n"
        "fit(nn.Linear(4, 3), torch.rand(8, 4), torch.arange(8) % 3, Local(epochs=1, batch=4, clip=1.0), 0)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"
