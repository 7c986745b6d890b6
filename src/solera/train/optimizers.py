"""SGD and Adam on torch's fused kernels (`placement.TRICKS`), without the hooks and bookkeeping of `torch.optim`.

The bits are those of `torch.optim.SGD` and `torch.optim.Adam` with `fused=True`. Small models take half a millisecond
for a step, of which a tenth would go into hooks and bookkeeping; and the first of torch's optimizers imports its
compiler, which takes a second in every new process.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.stopping import check_stop
from ..place.placement import Tricks, tricks_of


class Optimizer(ABC):
    """Steps of `lr` along the gradients of `parameters`; those without a gradient are unchanged."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, weight_decay: float):
        self.parameters: list[Tensor] = list(parameters)
        self.lr, self.weight_decay = lr, weight_decay
        self._memory: list[dict[Tensor, Tensor]] = []
        # A kernel takes tensors of one type on one device.
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in self.parameters:
            kinds.setdefault((p.device, p.dtype), []).append(p)
        self._kinds = [(tricks_of(device), kind) for (device, _), kind in kinds.items()]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient. Raises if the run is to stop."""
        check_stop()
        for on, kind in self._kinds:
            moving: list[Tensor] = [p for p in kind if p.grad is not None]
            if moving:
                gradients = [p.grad for p in moving if p.grad is not None]
                self._move(on, moving, gradients, [[m[p] for p in moving] for m in self._memory])

    @abstractmethod
    def _move(self, on: Tricks, moving: list[Tensor], gradients: list[Tensor], memory: list[list[Tensor]]) -> None:
        """Move parameters of one kind; `memory` has the state kept for each of them, such as velocities."""


class Sgd(Optimizer):
    """w <- w - lr (g + weight_decay w), through a velocity v <- momentum v + g if there is momentum."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        super().__init__(parameters, lr, weight_decay)
        self.momentum = momentum
        self._memory = [{p: torch.zeros_like(p) for p in self.parameters}] if momentum else []

    def _move(self, on: Tricks, moving: list[Tensor], gradients: list[Tensor], memory: list[list[Tensor]]) -> None:
        on.sgd(
            moving, gradients, memory[0] if memory else [], weight_decay=self.weight_decay, momentum=self.momentum,
            lr=self.lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


class Adam(Optimizer):
    """Kingma and Ba, ICLR 2015, with beta = (0.9, 0.999), epsilon = 1e-8; weight decay is added to the gradient."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, weight_decay: float = 0.0):
        super().__init__(parameters, lr, weight_decay)
        first, second = ({p: torch.zeros_like(p) for p in self.parameters} for _ in range(2))
        steps = {p: torch.zeros((), device=p.device) for p in self.parameters}
        self._memory = [first, second, steps]

    def _move(self, on: Tricks, moving: list[Tensor], gradients: list[Tensor], memory: list[list[Tensor]]) -> None:
        first, second, steps = memory
        torch._foreach_add_(steps, 1)
        on.adam(
            moving, gradients, first, second, [], steps, lr=self.lr, beta1=0.9, beta2=0.999,
            weight_decay=self.weight_decay, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
