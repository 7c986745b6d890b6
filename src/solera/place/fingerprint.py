"""The numeric fingerprint of a machine: a short hash of the results of small computations.

torch and the libraries under it choose kernels by the processor, its maker and its caches, and each adds up in an order
of its own. No list of names tells which kernels these are, so some are run. Two machines with one fingerprint are
expected to compute the same bits; with two fingerprints they do not.

The numbers that go in come from integers, so that they are the same everywhere, and no generator of the program is
used.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .placement import TRICKS, numerics

SHAPES = ((1, 7, 3), (5, 3, 2), (29, 2, 17), (32, 784, 10), (33, 65, 129), (10, 2000, 10), (128, 512, 256))
STEPS = 2  # of each training: the second one has what the first one's backward pass came to


@functools.cache
def fingerprint(portable: bool = False) -> str:
    """16 hexadecimal digits: what this process computes on the CPU with one thread for each piece of work, as runs do.

    `portable`: as runs with `engine.portable` do. The settings of the program do not matter, nor does the number of
    its threads. It is computed once in a process.
    """
    found = hashlib.sha256()
    with numerics(threads=1, portable=portable):
        for result in (*_products(), *_functions(), *_draws(), *_trainings()):
            found.update(result.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Numbers in [-1, 1) that look random: a hash of their places, in integers and exact divisions."""
    h = (torch.arange(torch.Size(shape).numel()) + 7919 * seed + 1) * 2654435761 & 0xFFFFFFFF
    h = ((h >> 16) ^ h) * 73244475 & 0xFFFFFFFF
    return ((((h >> 16) ^ h) & 0xFFFF).to(torch.float32) / 0x8000 - 1).reshape(shape)


def _products() -> Iterator[Tensor]:
    for m, k, n in SHAPES:
        a, b, c = numbers(m, k), numbers(k, n, seed=1), numbers(n, seed=2)
        yield from (a @ b, a.double() @ b.double(), F.linear(a, b.T, c), a.T @ numbers(m, n, seed=3), a @ b[:, 0])
        yield torch.bmm(numbers(3, m, k), numbers(3, k, n, seed=4))


def _functions() -> Iterator[Tensor]:
    for shape in ((3, 10), (17, 1001), (128, 10)):
        for x in (8 * numbers(*shape), 8 * numbers(*shape).double()):
            yield from (x.exp(), x.tanh(), x.sigmoid(), x.sin(), F.gelu(x), F.softplus(x))
            positive = x.abs() + 1e-3
            yield from (positive.log(), positive.sqrt(), positive.rsqrt(), positive**0.37, 1 / positive)
            yield from (x.softmax(1), x.log_softmax(1), x.logsumexp(1), x.cumsum(0), torch.cdist(x, x))
            for along in ((0,), (1,), (0, 1)):
                yield from (x.sum(along), x.mean(along), x.var(along), x.norm(dim=along))


def _draws() -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(0)
    yield from (torch.randn(1003, generator=g), torch.rand(1003, generator=g), torch.randperm(1003, generator=g))
    yield torch.empty(33, 65).exponential_(generator=g)
    yield nn.init.kaiming_uniform_(torch.empty(33, 65), generator=g)


# ---- trainings ------------------------------------------------------------------------------------------

Weights = Sequence[Tensor]


def _perceptron(x: Tensor, w: Weights) -> Tensor:
    x = F.linear(x, w[0], w[1]).relu()
    return F.linear(F.linear(x, w[2]).tanh(), w[3])


def _convolutions(x: Tensor, w: Weights) -> Tensor:
    """Convolutions as in LeNet: 5x5, with bias and pooling."""
    x = F.max_pool2d(F.conv2d(x, w[0], w[1], padding=2).relu(), 2)
    return F.linear(F.max_pool2d(F.conv2d(x, w[2], w[3]).relu(), 2).flatten(1), w[4])


def _normalised(x: Tensor, w: Weights) -> Tensor:
    """Layers as in ResNets: batch and group norm, a stride, a shortcut, a grouped convolution, a mean over pixels."""
    x = F.batch_norm(F.conv2d(x, w[0], padding=1), None, None, w[1], w[2], training=True).relu()
    y = F.group_norm(F.conv2d(x, w[3], stride=2, padding=1), 4, w[4]).relu()
    y = y + F.conv2d(x, w[5], stride=2)
    return F.linear(F.adaptive_avg_pool2d(F.conv2d(y, w[6], padding=1, groups=8), 1).flatten(1), w[7])


def _words(x: Tensor, w: Weights) -> Tensor:
    """An embedding, then an LSTM."""
    x = F.embedding((x * 50).long().abs(), w[0])
    zero = x.new_zeros(1, len(x), w[2].shape[1])
    read = torch.lstm(x, (zero, zero), list(w[1:5]), True, 1, 0.0, True, False, True)[0]
    return F.linear(read[:, -1], w[5])


def _attention(x: Tensor, w: Weights) -> Tensor:
    """Attention as in a transformer: two heads, layer norm, GELU."""
    heads = F.linear(x, w[0]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2]).transpose(1, 2).flatten(2)
    y = F.layer_norm(x + y, x.shape[-1:], w[1])
    return F.linear(F.gelu(F.linear(y, w[2])).mean(1), w[3])


Model = Callable[[Tensor, Weights], Tensor]
# By what it is: the inputs' shape, and those of the weights.
MODELS: tuple[tuple[Model, tuple[int, ...], Sequence[tuple[int, ...]]], ...] = (
    (_perceptron, (10, 2), [(16, 2), (16,), (8, 16), (3, 8)]),
    (_perceptron, (128, 784), [(100, 784), (100,), (50, 100), (10, 50)]),
    (_convolutions, (9, 1, 28, 28), [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (10, 400)]),
    (_convolutions, (32, 3, 32, 32), [(16, 3, 5, 5), (16,), (32, 16, 5, 5), (32,), (10, 1152)]),
    *(
        (_normalised, (rows, 3, 8, 8), [
            (16, 3, 3, 3), (16,), (16,), (32, 16, 3, 3), (32,), (32, 16, 1, 1), (64, 4, 3, 3), (10, 64)
        ])
        for rows in (5, 32)  # few samples may be given to other kernels
    ),
    (_words, (8, 11), [(50, 12), (80, 12), (80, 20), (80,), (80,), (4, 20)]),
    (_attention, (6, 13, 32), [(96, 32), (32,), (64, 32), (4, 64)]),
)  # fmt: skip


def _trainings() -> Iterator[Tensor]:
    for model, shape, kinds in MODELS:
        for move in (_sgd, _adam):
            weights = [
                (numbers(*kind, seed=i) / max(1, kind[-1]) ** 0.5).requires_grad_() for i, kind in enumerate(kinds)
            ]
            memory = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
            for step in range(STEPS):
                out = model(numbers(*shape, seed=step), weights)
                labels = torch.arange(len(out)) % out.shape[1]
                teacher = numbers(*out.shape, seed=9).softmax(1)
                loss = F.cross_entropy(out, labels) + F.kl_div(out.log_softmax(1), teacher, reduction="batchmean")
                gradients = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    move(weights, gradients, memory, step)
                yield loss
            yield from weights


def _sgd(weights: Weights, gradients: Iterable[Tensor], memory: Sequence[list[Tensor]], step: int) -> None:
    TRICKS["cpu"].sgd(
        weights, gradients, memory[0], weight_decay=1e-3, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _adam(weights: Weights, gradients: Iterable[Tensor], memory: Sequence[list[Tensor]], step: int) -> None:
    steps = [torch.tensor(step + 1.0) for _ in weights]
    TRICKS["cpu"].adam(
        weights, gradients, memory[0], memory[1], [], steps, lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.0,
        eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
