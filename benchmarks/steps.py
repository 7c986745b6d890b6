"""The cost of a training step and of a forward pass, implemented in other ways: two tables of docs/performance.md.

    python benchmarks/steps.py                               # about two minutes on one core
    python benchmarks/steps.py --write docs/performance.md

One thread, minibatches of 32, plain SGD. All ways are timed in turn, and a ratio compares times of the same lap: how
many times as long as ours (`solera.train.fitting.fit` and `logits_of`) a way takes for the same number of samples.
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from grid import put
from solera.models import build
from solera.place.placement import TRICKS, keep_freed_memory
from solera.train.fitting import Local, fit, logits_of

BATCH, LR, TOGETHER = 32, 0.05, 4
Way = Callable[[nn.Module, Tensor, Tensor], object]
MODELS = {
    "mlp": ("batch", (1, 28, 28), 600),
    "lenet5": ("batch", (1, 28, 28), 600),
    "mcmahan-cnn": ("batch", (1, 28, 28), 300),
    "resnet8": ("none", (3, 32, 32), 200),  # vmap cannot do BatchNorm's statistics, nor GroupNorm in this layout
}


def usual(model: nn.Module) -> nn.Module:
    """The model in torch's usual memory layout."""
    return model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def ours(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """As a client trains."""
    fit(model, x, y, Local(epochs=1, batch=BATCH, lr=LR), 0)


def usual_layout(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The same in torch's usual layout (contiguous, channels first)."""
    ours(usual(model), x, y)


def as_first_written(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A DataLoader, torch's optimizer, the usual layout."""
    model = usual(model)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for xs, ys in DataLoader(TensorDataset(x, y), BATCH, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(xs), ys).backward()
        optimizer.step()


def torchs_optimizer(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Ours, but with torch's fused optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), LR, fused=True)
    for xs, ys in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(xs), ys).backward()
        optimizer.step()


def flat(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """All parameters in one buffer and all gradients in another: an update is one operation."""
    parameters = list(model.parameters())
    values = torch.cat([p.detach().reshape(-1) for p in parameters])
    slopes = torch.zeros_like(values)
    start = 0
    for p in parameters:
        end = start + p.numel()
        p.data, p.grad = values[start:end].view(p.shape), slopes[start:end].view(p.shape)
        start = end
    for xs, ys in zip(x.split(BATCH), y.split(BATCH), strict=True):
        slopes.zero_()
        F.cross_entropy(model(xs), ys).backward()
        values.add_(slopes, alpha=-LR)


def together(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Several clients as one vectorised computation (torch.func.vmap), each with its share of the samples."""
    weights = {n: torch.stack([p.detach()] * TOGETHER) for n, p in model.named_parameters()}

    def loss(w: dict[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, w, (xs,)), ys)

    slopes_of = torch.func.vmap(torch.func.grad(loss))
    share = len(y) // TOGETHER
    xs, ys = x[: share * TOGETHER].view(TOGETHER, share, *x.shape[1:]), y[: share * TOGETHER].view(TOGETHER, share)
    for i in range(0, share, BATCH):
        slopes = slopes_of(weights, xs[:, i : i + BATCH], ys[:, i : i + BATCH])
        weights = {n: w - LR * slopes[n] for n, w in weights.items()}


WAYS: dict[str, Way] = {
    "the usual memory layout": usual_layout,
    "torch's own optimizer, fused": torchs_optimizer,
    "one flat buffer of parameters": flat,
    f"{TOGETHER} clients vectorised (`torch.func.vmap`)": together,
    "as first written: DataLoader, torch's SGD, usual layout": as_first_written,
}


def ask(batch: int, layout: Callable[[nn.Module], nn.Module] = lambda model: model) -> Way:
    """A forward pass without gradients, with this batch size."""
    return lambda model, x, y: logits_of(layout(model), x, batch)


ASKING: dict[str, Way] = {
    "32 samples at a time": ask(32),
    "512 samples at a time": ask(512),
    "128, the usual memory layout": ask(TRICKS["cpu"].asked, usual),
}


def seconds(way: Way, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Seconds of one lap, per sample."""
    began = time.perf_counter()
    way(model, x, y)
    return (time.perf_counter() - began) / len(y)


def measure(name: str, ways: dict[str, Way], reference: Way, times: int, laps: int) -> list[str]:
    """How many times as long as the reference each way takes: median and quartiles."""
    norm, shape, samples = MODELS[name]
    # Complete minibatches for each of the clients that are trained together.
    samples = times * -(-samples // (BATCH * TOGETHER)) * BATCH * TOGETHER
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples, *shape, generator=g), torch.randint(10, (samples,), generator=g)
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for lap in range(laps + 1):
        mine = seconds(reference, build(name, 10, shape, norm), x, y)  # type: ignore[arg-type]
        for way, work in ways.items():
            ratio = seconds(work, build(name, 10, shape, norm), x, y) / mine  # type: ignore[arg-type]
            if lap:  # the first is for warming up
                ratios[way].append(ratio)
    quartiles = {way: statistics.quantiles(r, n=4) for way, r in ratios.items()}
    return [f"{q[1]:.2f} ({q[0]:.2f}–{q[2]:.2f})" for q in quartiles.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laps", type=int, default=9)
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="put the table into this page")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for mark, ways, reference, times in (("tried", WAYS, ours, 1), ("asking", ASKING, ask(TRICKS["cpu"].asked), 4)):
        columns = {name: measure(name, ways, reference, times, asked.laps) for name in MODELS}
        rows = [f"| {way} | " + " | ".join(c[i] for c in columns.values()) + " |" for i, way in enumerate(ways)]
        head = "| way | " + " | ".join(MODELS) + " |\n|---|" + "---|" * len(MODELS)
        table = "\n".join([head, *rows]) + "\n"
        print(table)
        if asked.write:
            put(asked.write, mark, table)


if __name__ == "__main__":
    main()
