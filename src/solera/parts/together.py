"""Several trainings of one architecture at once: their weights in one stack, one batched pass a step.

Ten small models cost a GPU ten times the launches of one, and most of the device idles. Stacked, a layer of all of them
is one operator (`torch.func.stack_module_state` and `vmap`). Every model still sees its own minibatches, in its own
order, with its own optimizer's memory: what comes out is what `fit` gives, as far as sums in another order allow.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ..devices import full_precision, pieces, tricks_of
from ..tensors import Inputs, device_of, sent
from .local import (
    TOO_LARGE,
    Correct,
    Diverged,
    Fitted,
    Local,
    diverged_at,
    make_optimizer,
    minibatches,
    planned_steps,
    rate_at,
    sum_of_rates,
    with_model,
)
from .norms import has_batchnorm
from .objectives import Objective, Proximal, cross_entropy, log_loss


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """The arguments of one call of `fit`."""

    model: nn.Module
    inputs: Inputs
    labels: Tensor
    cfg: Local
    seed: int
    objective: Objective = cross_entropy
    correct: Correct | None = None

    def why_alone(self) -> str:
        """Why it cannot be batched with others; nothing: it can."""
        base = self.objective.objective if isinstance(self.objective, Proximal) else self.objective
        if base is not cross_entropy:
            return "the method's own loss"
        if pieces(device_of(self.model)) > 1:
            return "too little memory"
        if len(self.labels) == 0:
            return "no samples"
        return why_not_batched(self.model)

    def kind(self) -> Hashable:
        """Trainings of one kind can be batched."""
        tensors = [(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in self.model.named_parameters()]
        tensors += [(n, tuple(t.shape), t.dtype, False) for n, t in self.model.named_buffers()]
        mu = self.objective.mu if isinstance(self.objective, Proximal) else 0.0
        planned = 0 if self.cfg.schedule == "constant" else self.planned  # they share the step size
        return repr(self.model), tuple(tensors), self.cfg, mu, planned

    @property
    def planned(self) -> int:
        """How many steps it takes."""
        return planned_steps(self.cfg, len(self.labels), normalised=False)


def why_not_batched(model: nn.Module) -> str:
    """Why a model cannot be trained in one pass with others; nothing: it can, as far as its layers tell."""
    if has_batchnorm(model):
        return "BatchNorm in training changes its statistics at every pass"
    if drops := [type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]:
        return f"{drops[0]} draws other numbers for models in a batch"
    return ""


def try_batched(model: nn.Module, inputs: Tensor, labels: Tensor) -> str:
    """Why a batched pass of two copies of `model` fails on these samples; nothing: it works."""
    if why := why_not_batched(model):
        return why
    try:
        stacked = _stack([model, model])
        _losses(model, stacked, torch.stack([inputs, inputs]), torch.stack([labels, labels]))
    except Exception as e:  # a model may be anything
        return f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
    return ""


def fit_together(trainings: Sequence[Training]) -> list[Fitted | Diverged]:
    """What `fit` gives for each of these trainings, which are of one kind; their models are trained in place."""
    device, cfg = device_of(trainings[0].model), trainings[0].cfg
    models = [t.model for t in trainings]
    for model in models:
        model.train()
    stacked = _stack(models)
    trained = {n: p for n, p in stacked[0].items() if p.requires_grad}
    own = [dict(model.named_parameters()) for model in models]
    for i, parameters in enumerate(own):  # from here on a model's parameters are slices of the stack
        for name, p in parameters.items():
            p.data = stacked[0][name].detach()[i]
    received = _received(trainings, trained)
    optimizer = make_optimizer(
        cfg.optimizer, [o[n] for o in own for n in trained], cfg.lr, cfg.momentum, cfg.weight_decay
    )
    watched = _Watched(device, len(trainings))
    batches = {i: minibatches(*with_model(t.model, t.inputs, t.labels), cfg, t.seed) for i, t in enumerate(trainings)}
    step = 0
    while batches:
        drawn = {i: xy for i, it in batches.items() if (xy := next(it, None)) is not None}
        drawn = {i: drawn[i] for i in watched.going(drawn)}
        batches = {i: batches[i] for i in drawn}
        for stack in trained.values():
            stack.grad = None
        optimizer.zero_grad()
        for rows in _of_one_shape(drawn):
            x, y = (torch.stack([drawn[i][side] for i in rows]) for side in (0, 1))
            at = None if len(rows) == len(models) else sent(torch.tensor(rows), device)
            losses = _losses(models[0], (_some(stacked[0], at), _some(stacked[1], at)), x, y)
            if received:
                losses = losses + _pull(trainings[0], _some(trained, at), _some(received, at))
            with full_precision(device):
                losses.sum().backward()
            watched.add(rows, at, losses.detach())
        moving = watched.going(drawn)
        for i in moving:
            _amend(trainings[i], own[i], {n: p.grad[i] for n, p in trained.items() if p.grad is not None})
        if moving:
            optimizer.lr = rate_at(cfg, step, trainings[moving[0]].planned)
            optimizer.step()
        step += 1
    optimizer.zero_grad()
    for model in models:
        model.eval()
    return watched.outcomes(trainings, {n: p.detach() for n, p in stacked[0].items()})


Stack = tuple[dict[str, Tensor], dict[str, Tensor]]


def _stack(models: Sequence[nn.Module]) -> Stack:
    """Parameters and buffers, each with a first dimension for the models."""
    parameters, buffers = stack_module_state(list(models))
    for name, p in models[0].named_parameters():
        parameters[name].requires_grad_(p.requires_grad)
    return parameters, buffers


def _some(stacked: dict[str, Tensor], at: Tensor | None) -> dict[str, Tensor]:
    """Of some of the models; None: of all."""
    return stacked if at is None else {n: t.index_select(0, at) for n, t in stacked.items()}


def _losses(model: nn.Module, stacked: Stack, inputs: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of each model on its own minibatch. [models]"""

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return log_loss(functional_call(model, (parameters, buffers), (x,)), y)

    return vmap(loss)(*stacked, inputs, labels)


def _received(trainings: Sequence[Training], trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the models are pulled towards (FedProx), stacked; nothing without a pull."""
    pulls = [t.objective for t in trainings if isinstance(t.objective, Proximal)]
    return {n: torch.stack([pull.received[n] for pull in pulls]) for n in trained} if pulls else {}


def _pull(one: Training, trained: dict[str, Tensor], received: dict[str, Tensor]) -> Tensor:
    assert isinstance(one.objective, Proximal)
    squares = [(p - received[n]).square().flatten(1).sum(1) for n, p in trained.items()]
    return one.objective.mu / 2 * torch.stack(squares).sum(0)


def _amend(training: Training, parameters: dict[str, nn.Parameter], gradient: dict[str, Tensor]) -> None:
    """Give a model its gradient, clipped and corrected as `fit` does."""
    for name, g in gradient.items():
        parameters[name].grad = g
    if training.cfg.clip is not None:
        nn.utils.clip_grad_norm_([parameters[n] for n in gradient], training.cfg.clip)
    if training.correct is not None:
        for name in gradient:
            found = parameters[name].grad
            assert found is not None
            parameters[name].grad = training.correct(name, found)


def _of_one_shape(drawn: dict[int, tuple[Tensor, Tensor]]) -> list[list[int]]:
    """The trainings whose minibatches can be stacked."""
    shapes: dict[Hashable, list[int]] = {}
    for i, (x, y) in drawn.items():
        shapes.setdefault((x.shape, y.shape), []).append(i)
    return list(shapes.values())


class _Watched:
    """The losses of several trainings, as `losses.Losses` has them of one: on a device they stay there."""

    def __init__(self, device: torch.device, count: int):
        self.every, self.step = tricks_of(device).look_every, 0
        self.steps, self.worst = [0] * count, [math.nan] * count
        self.ended: set[int] = set()  # they have diverged
        self.fine = torch.ones(count, dtype=torch.bool, device=device)
        self.total = torch.zeros(count, device=device)

    def add(self, rows: list[int], at: Tensor | None, losses: Tensor) -> None:
        """Note the losses of a step, of some or (None) all; on the CPU, who diverges takes no further step."""
        if self.every == 1:
            for i, loss in zip(rows, losses.tolist(), strict=True):
                if loss <= TOO_LARGE:
                    continue
                self.worst[i] = loss
                self.ended.add(i)
        fine, losses = losses <= TOO_LARGE, losses.float()
        if at is None:
            self.fine, self.total = self.fine & fine, self.total + losses
        else:
            self.fine = self.fine.index_copy(0, at, self.fine.index_select(0, at) & fine)
            self.total = self.total.index_add(0, at, losses)
        for i in set(rows) - self.ended:
            self.steps[i] += 1

    def going(self, rows: Iterable[int]) -> list[int]:
        """Those of `rows` that go on, as far as is known. A device is asked every so many steps."""
        self.step += 1
        if self.every > 1 and self.step % (2 * self.every) == 0:  # asked before and after a pass
            self.ended |= {i for i, fine in enumerate(self.fine.tolist()) if not fine}
        return [i for i in rows if i not in self.ended]

    def outcomes(self, trainings: Sequence[Training], weights: dict[str, Tensor]) -> list[Fitted | Diverged]:
        """What each training came to: one read."""
        finite = torch.stack([torch.isfinite(t).flatten(1).all(1) for t in weights.values() if t.is_floating_point()])
        told = torch.stack([self.fine.float(), finite.all(0).float(), self.total]).tolist()
        found: list[Fitted | Diverged] = []
        for i, (t, fine, ok, total) in enumerate(zip(trainings, *told, strict=True)):
            steps, way_out = self.steps[i], f"lower lr ({t.cfg.lr:g}) or set clip"
            if not fine and self.every == 1:
                found.append(diverged_at(self.worst[i], steps, t.cfg))
            elif not fine:
                found.append(Diverged(f"a loss above {TOO_LARGE:g} within the first {steps} steps; {way_out}", steps))
            elif steps and not ok:
                found.append(Diverged(f"weights that are not finite after {steps} steps; {way_out}", steps))
            else:
                mean = total / steps if steps else math.nan
                found.append(Fitted(steps, sum_of_rates(t.cfg, steps, t.planned), mean))
        return found
