"""Training and distillation written out in plain torch, to compare methods with: nothing here calls the library.

Loops are slow and plain on purpose. Bits differ from the library (other kernels, other orders of sums): results are
compared with `close`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def train(model: nn.Module, x: Tensor, y: Tensor, *, batch: int, lr: float, seed: int, epochs=None, steps=None) -> None:
    """SGD on cross-entropy. An epoch is a new permutation, cut into batches; BatchNorm never sees a single sample."""
    g = torch.Generator().manual_seed(seed)
    alone = any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) and min(batch, len(y)) > 1
    left = epochs * math.ceil(len(y) / batch) if steps is None else steps
    model.train()
    while left > 0:
        for rows in torch.randperm(len(y), generator=g).split(batch):
            if left == 0:
                break
            left -= 1
            if len(rows) == 1 and alone:
                continue
            logits = model(x[rows])
            loss = -torch.stack([logits[i].log_softmax(0)[c] for i, c in enumerate(y[rows])]).mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, d in zip(model.parameters(), gradients, strict=True):
                    p -= lr * d
    model.eval()


def batches(n: int, steps: int, batch: int, seed: int) -> list[list[int]]:
    """Which samples each step sees: from a deck that is shuffled anew when it is used up, none twice in a hand."""
    g, deck, hands = torch.Generator().manual_seed(seed), [], []
    for _ in range(steps):
        hand: list[int] = []
        while len(hand) < min(batch, n):
            deck = deck or torch.randperm(n, generator=g).tolist()
            deck.remove(card := next(c for c in deck if c not in hand))
            hand.append(card)
        hands.append(hand)
    return hands


Loss = Callable[[Tensor, list[int]], Tensor]  # (logits, which samples they are of) -> scalar


def teach(
    student: nn.Module,
    x: Tensor,
    loss: Loss,
    hands: Sequence[list[int]],
    *,
    optimizer: str,
    lr: float,
    cosine: bool = False,
    clip: float | None = None,
) -> None:
    """Steps on `loss`, one for each of `hands`, with SGD or Adam (Kingma and Ba, algorithm 1)."""
    parameters = list(student.parameters())
    m = [torch.zeros_like(p) for p in parameters]
    v = [torch.zeros_like(p) for p in parameters]
    student.train()
    for t, hand in enumerate(hands, 1):
        gradients = list(torch.autograd.grad(loss(student(x[hand]), hand), parameters))
        if clip is not None:
            length = math.sqrt(sum(float(d.double().square().sum()) for d in gradients))
            gradients = [d * min(1.0, clip / (length + 1e-6)) for d in gradients]
        rate = lr * (1 + math.cos(math.pi * (t - 1) / len(hands))) / 2 if cosine else lr
        with torch.no_grad():
            for i, (p, d) in enumerate(zip(parameters, gradients, strict=True)):
                if optimizer == "sgd":
                    p -= rate * d
                    continue
                m[i] = 0.9 * m[i] + 0.1 * d
                v[i] = 0.999 * v[i] + 0.001 * d * d
                p -= rate * (m[i] / (1 - 0.9**t)) / ((v[i] / (1 - 0.999**t)).sqrt() + 1e-8)
    student.eval()


def mean_logits(models: Sequence[nn.Module], x: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """What FedDF's teachers say together: the mean of their logits, weighted."""
    weights = [1.0] * len(models) if weights is None else weights
    with torch.no_grad():
        said = [w * model.eval()(x) for model, w in zip(models, weights, strict=True)]
    return sum(said[1:], said[0]) / sum(weights)


def kl_towards(logits: Tensor, temperature: float = 1.0) -> Loss:
    """KL(softmax(teacher / T) || softmax(student / T)), the mean over the batch."""
    p = (logits / temperature).softmax(-1)

    def loss(z: Tensor, hand: list[int]) -> Tensor:
        q = (z / temperature).log_softmax(-1)
        return torch.stack([(p[i] * (p[i].log() - q[b])).sum() for b, i in enumerate(hand)]).mean()

    return loss


def consensus_loss(
    models: Sequence[nn.Module], x: Tensor, copies: Sequence[int], lam: float, normalise: bool = False
) -> Loss:
    """Fed-ET's eq. 2-10, sample by sample: cross-entropy with the consensus label + lambda times the diversity term."""
    with torch.no_grad():
        probs = [model.eval()(x).double().softmax(-1) for model in models]
    labels, dissents = [], []
    for i in range(len(x)):
        sure = [n * p[i].var(correction=0) for p, n in zip(probs, copies, strict=True)]
        alpha = [float(s / sum(sure)) for s in sure]  # eq. 3 and 8
        s = sum(a * p[i] for a, p in zip(alpha, probs, strict=True))  # eq. 2
        label = int(s.argmax())  # eq. 4
        dissent = sum(
            (a * p[i] for a, p in zip(alpha, probs, strict=True) if int(p[i].argmax()) != label), torch.zeros_like(s)
        )  # eq. 6 and 7
        if normalise and dissent.sum() > 0:
            dissent = dissent / dissent.sum()
        labels.append(label)
        dissents.append(dissent)

    def loss(z: Tensor, hand: list[int]) -> Tensor:
        total = torch.zeros(())
        for b, i in enumerate(hand):
            q, d = z[b].log_softmax(0), dissents[i].to(z.dtype)
            diversity = sum(((d[c] * (d[c].log() - q[c])) for c in range(len(d)) if d[c] > 0), torch.zeros(()))  # eq. 9
            total = total - q[labels[i]] + lam * diversity
        return total / len(hand)  # eq. 10

    return loss


def mean_of(models: Sequence[nn.Module], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The mean of parameters and statistics; counters are the largest."""
    weights = [1.0] * len(models) if weights is None else weights
    states = [m.state_dict() for m in models]
    return {
        name: sum(w * s[name].double() for s, w in zip(states, weights, strict=True)).div(sum(weights)).to(t.dtype)
        if t.is_floating_point()
        else torch.stack([s[name] for s in states]).max()
        for name, t in states[0].items()
    }


# A bias before BatchNorm has no gradient but rounding errors, of which Adam makes full steps.
WITHOUT_GRADIENT = ("0.bias", "1.running_mean")


def close(a: dict[str, Tensor], b: dict[str, Tensor], apart: float = 2e-5, ignoring: Sequence[str] = ()) -> bool:
    """Whether two models are the same but for rounding."""
    kept = [n for n in a if n not in ignoring]
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=1e-4, atol=apart) for n in kept)
