"""Low-bit clients (FedDF, section 4.3 and Table 4): a few bits for each weight, and one number for each output filter.

    1 bit      Q(w) = s sign(w),               s = mean |w| of the filter (XNOR-Net's weights), sign(0) = +1
    q bits     Q(w) = s round(n w / s) / n,    s = max |w| of the filter, n = 2^(q-1) - 1

Weights are parameters of two or more dimensions; their first dimension is the output filters. Biases, the parameters
of normalisation layers and all buffers are not rounded. Q(Q(w)) = Q(w) to the bit: rounded weights can be packed and
unpacked without loss.

Activations (optional) are the inputs of layers with weights, except of the first one, whose input is the sample. They
are rounded to 2^q levels between the smallest and the largest value of the sample, so that the answer to a sample does
not depend on the rest of the batch:

    q bits     A(a) = lo + (hi - lo) round(N (a - lo) / (hi - lo)) / N,    N = 2^q - 1

Behind a ReLU lo is 0, and with one bit A(a) is 0 or hi. Gradients ignore A.

Precision may differ between architectures (`models.options.NAME.bits`, Algorithm 3): all clients still answer in one
exchange. An upload has q n_w + 32 (n_scale + n_rest) bits: q for each of the n_w rounded weights, a float for each of
their filters, and the rest (biases, normalisation layers, buffers) unchanged. Downloads have full precision.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...core.federation import Federation, Replies, per_client
from ...core.settings import Problem, settings
from ...core.task import Client, task
from ...core.tensors import Inputs, Shapes, Weights, beside, weights_of
from ...core.wire import like, sized
from ...place.placement import finest, finest_type
from ...scenario.server import Server
from ...train.aggregate import by_row
from ...train.fitting import Fitted, Local, Objective, cross_entropy, fit, log_loss, proximal
from ...train.norms import parameter_names
from ...train.teachers import Build
from .training import Sent, Update, Upload

OFF = 32  # bits of a weight that is not rounded


@settings
class LowBit:
    """The precision of clients' weights, in local training and upload. The server's weights are not rounded."""

    bits: int = OFF  # of a weight, 1 to 8; 32: not rounded at all
    activations: int = OFF  # bits of a layer's inputs, 1 to 8; 32: not rounded
    training: Literal["ste", "error_feedback"] = "ste"  # straight-through, or carry the rounding error over
    mask: bool = True  # ste only: weights outside [-1, 1] get no gradient
    standardise: bool = False  # first scale each filter to mean 0 and deviation 1, and clip it to [-1, 1]
    skip_ends: bool = False  # do not round the first and the last weight tensor

    def problems(self) -> Iterator[Problem]:
        for what in ("bits", "activations"):
            bits = getattr(self, what)
            if bits != OFF and not 1 <= bits <= 8:
                yield f"{what} = {bits}: 1 to 8, or {OFF} for numbers that are not rounded"
        if self.training == "error_feedback" and not self.mask:
            yield "mask = false: only for training = 'ste'; error feedback has no mask"


# ---- the quantiser ----------------------------------------------------------------------------------


def steps_of(bits: int) -> int:
    """n: the number of steps from 0 to the largest value."""
    return max(1, 2 ** (bits - 1) - 1)


def to_levels(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The weights as whole numbers from -n to n (int8), and the scale of each filter."""
    size = w.detach().abs().flatten(1)
    if bits == 1:
        # In float64, so that the mean of equal numbers is that number and Q(Q(w)) = Q(w) to the bit.
        scales = size.mean(1, dtype=finest_type(w.device)).to(w.dtype)
        return torch.where(w.detach() >= 0, 1, -1).to(torch.int8), scales
    scales = size.amax(1)
    by = finest(by_row(scales, w))
    levels = finest(w.detach()) / torch.where(by == 0, 1, by) * steps_of(bits)
    return levels.round().to(torch.int8), scales


def from_levels(levels: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The weights from levels and scales: the same bits on server and client."""
    return levels.to(scales.dtype) / steps_of(bits) * by_row(scales, levels)


def quantise(w: Tensor, bits: int, standardise: bool = False) -> Tensor:
    """Q(w), in the shape and type of `w`."""
    return from_levels(*to_levels(standardised(w) if standardise else w, bits), bits)


def standardised(w: Tensor) -> Tensor:
    """Each filter minus its mean, divided by its standard deviation, clipped to [-1, 1]. Equal weights become 0."""
    flat = w.detach().flatten(1)
    spread = flat.std(1, keepdim=True, correction=min(1, flat.shape[1] - 1))
    centred = flat - flat.mean(1, keepdim=True)
    return (centred / torch.where(spread == 0, 1, spread)).clamp(-1, 1).reshape(w.shape)


def coarse_names(model: nn.Module, cfg: LowBit) -> list[str]:
    """Names of the parameters of `model` that are rounded."""
    if cfg.bits == OFF:
        return []
    found = [name for name in parameter_names(model) if model.get_parameter(name).ndim >= 2]
    ends = {id(model.get_parameter(name)) for name in (*found[:1], *found[-1:])} if cfg.skip_ends else set()
    return [name for name in found if id(model.get_parameter(name)) not in ends]


# ---- activations ------------------------------------------------------------------------------------


def quantise_activations(a: Tensor, bits: int) -> Tensor:
    """A(a) of the samples in the first dimension, each with its own range. A constant sample is unchanged."""
    flat = a.detach().flatten(1)
    lo, hi = (by_row(t, a) for t in (flat.amin(1), flat.amax(1)))
    span, n = torch.where(hi == lo, 1, hi - lo), 2**bits - 1
    return lo + span * (((a.detach() - lo) / span * n).round() / n)


class RoundedActivations(torch.autograd.Function):
    """A(a) in the forward pass; in the backward pass the gradient ignores A (a lies inside its range everywhere)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, bits: int) -> Tensor:
        return quantise_activations(a, bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def round_activations(model: nn.Module, cfg: LowBit) -> Callable[[], None]:
    """Make `model` round the inputs of its layers from now on; returns a function that ends it.

    The layers are those that hold weights (see above) and are given floats. The first, whose input is the sample, is
    left out, and the last one too with `skip_ends`.
    """
    if cfg.activations == OFF:
        return lambda: None
    found = [name.rpartition(".")[0] for name in parameter_names(model) if model.get_parameter(name).ndim >= 2]
    inner = list(dict.fromkeys(found))[1 : -1 if cfg.skip_ends else None]

    def rounded(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        a = inputs[0]
        if not isinstance(a, Tensor) or not a.is_floating_point():
            return inputs
        return (RoundedActivations.apply(a, cfg.activations), *inputs[1:])

    hooks = [model.get_submodule(name).register_forward_pre_hook(rounded) for name in inner]

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


# ---- training ---------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """Q(w) in the forward pass. In the backward pass the gradient ignores Q, where |w| <= 1 (or everywhere)."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, cfg: LowBit) -> Tensor:
        if cfg.mask:
            ctx.save_for_backward(w.abs() <= 1)
        return quantise(w, cfg.bits, cfg.standardise)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        passes = ctx.saved_tensors
        return (gradient * passes[0] if passes else gradient), None


class ErrorFeedback:
    """u = w + e; w <- Q(u); e <- u - Q(u), for each parameter in place. e starts at 0."""

    def __init__(self, parameters: Iterable[nn.Parameter], cfg: LowBit):
        self.cfg = cfg
        self.parameters = list(parameters)
        self.memory = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def __call__(self) -> None:
        """Round the current parameters plus the error of earlier roundings."""
        for p, e in zip(self.parameters, self.memory, strict=True):
            wanted = p + e
            p.copy_(quantise(wanted, self.cfg.bits, self.cfg.standardise))
            e.copy_(wanted - p)


def fit_coarse(
    model: nn.Module,
    inputs: Inputs,
    labels: Tensor,
    local: Local,
    seed: int,
    cfg: LowBit,
    around: Callable[[Objective], Objective] = lambda objective: objective,
) -> Fitted:
    """Train `model` in place, like `fit`, with rounded weights and activations: it ends with Q(w).

    ste: forward with Q(w), and w itself is updated. error_feedback: w is rounded before the first step and after each
    step, and gradients are those at the rounded weights. `around` may add to the objective (a proximal term).
    """
    chosen = set(coarse_names(model, cfg))
    coarse = {name: p for name, p in model.named_parameters() if name in chosen}
    end = round_activations(model, cfg)
    try:
        if cfg.training == "ste":

            def rounded_forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                rounded = {name: StraightThrough.apply(p, cfg) for name, p in coarse.items()}
                return log_loss(functional_call(model, rounded, (x,)), y)

            fitted = fit(model, inputs, labels, local, seed, around(rounded_forward))
            with torch.no_grad():
                for p in coarse.values():
                    p.copy_(quantise(p, cfg.bits, cfg.standardise))
            return fitted

        feedback, objective = ErrorFeedback(coarse.values(), cfg), around(cross_entropy)

        def rounded_first(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            feedback()  # after the previous step
            return objective(model, x, y)

        fitted = fit(model, inputs, labels, local, seed, rounded_first)
        feedback()
        return fitted
    finally:
        end()


# ---- packing ----------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """Packed weights, as they are sent."""

    codes: Weights  # of each rounded tensor: `bits` bits per weight, packed into bytes, low bits first
    scales: Weights  # of each rounded tensor: one number per filter
    rest: Weights  # tensors that are not rounded


def pack(weights: Weights, names: Iterable[str], bits: int) -> Packing:
    """Pack the tensors `names`, which are already rounded to `bits`."""
    codes, scales, rest = {}, {}, dict(weights)
    for name in names:
        levels, scales[name] = to_levels(rest.pop(name), bits)
        codes[name] = _to_bytes(levels, bits)
    return Packing(codes, scales, rest)


@dataclass(frozen=True)
class Sizes:
    """The sizes of packed weights: shapes, and the names of the tensors that are not packed."""

    codes: Shapes
    scales: Shapes
    rest: list[str]


def packed_sizes(weights: Weights, names: Iterable[str], bits: int) -> Sizes:
    """The sizes that `pack` gives the tensors `names` of these weights."""
    codes = {name: [-(-weights[name].numel() * bits // 8)] for name in names}
    scales = {name: [len(weights[name])] for name in codes}
    return Sizes(codes, scales, [name for name in weights if name not in codes])


def unpack(packing: Packing, like: Weights, names: Iterable[str], bits: int) -> Weights:
    """The unpacked weights. They must have the names, shapes and dtypes of `like`; ValueError if not."""
    codes, scales, rest = packing
    names = list(names)
    for kind, got, wanted in (("codes", codes, names), ("scales", scales, names), ("rest", rest, set(like) - {*names})):
        if odd := sorted(set(got) ^ set(wanted)):
            raise ValueError(f"{kind}: names differ from what was sent: {odd[:3]}")
    weights = {}
    for name, t in like.items():
        if name in rest:
            _same(f"rest.{name}", rest[name], t.shape, t.dtype)
            weights[name] = rest[name]
        else:
            _same(f"scales.{name}", scales[name], t.shape[:1], t.dtype)
            _same(f"codes.{name}", codes[name], torch.Size([-(-t.numel() * bits // 8)]), torch.uint8)
            levels = _from_bytes(codes[name], bits, t.numel()).reshape(t.shape)
            if bits > 1 and bool((levels > steps_of(bits)).any()):
                raise ValueError(f"codes.{name}: a level above {steps_of(bits)}")
            weights[name] = from_levels(levels, scales[name], bits)
    return weights


def _same(what: str, got: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if got.shape != shape or got.dtype != dtype:
        raise ValueError(f"{what}: {tuple(got.shape)} {got.dtype}, expected {tuple(shape)} {dtype}")


def _to_bytes(levels: Tensor, bits: int) -> Tensor:
    n = steps_of(bits)
    codes = (levels.flatten() > 0).to(torch.uint8) if bits == 1 else (levels.flatten().short() + n).to(torch.uint8)
    single = codes.numpy()[:, None] >> np.arange(bits, dtype=np.uint8) & 1
    return torch.from_numpy(np.packbits(single.reshape(-1), bitorder="little"))


def _from_bytes(packed: Tensor, bits: int, count: int) -> Tensor:
    single = np.unpackbits(packed.numpy(), count=count * bits, bitorder="little").reshape(count, bits)
    codes = (single.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(1, dtype=np.int16)
    levels = codes * 2 - 1 if bits == 1 else codes - steps_of(bits)
    return torch.from_numpy(levels.astype(np.int16))


# ---- the upload -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedUpdate:
    """Parameters and buffers after local training; see `Packing`."""

    codes: Weights = sized("sizes.codes", dtype=torch.uint8)
    scales: Weights = sized("sizes.scales")
    rest: Weights = like("weights", only="sizes.rest")


@task("lowbit_update")
def lowbit_update(
    client: Client, weights: Weights, local: Local, mu: float, quantise: LowBit, sizes: Sizes
) -> PackedUpdate:
    """Like `local_update`, with weights of a few bits: Q(w) is trained and sent."""
    model = client.model(weights)
    around = partial(proximal, mu, beside(model, weights))
    fit_coarse(model, client.train.inputs, client.train.labels, local, client.seed, quantise, around)
    return PackedUpdate(*pack(weights_of(model), coarse_names(model, quantise), quantise.bits))


@settings
class LowBitUpload(LowBit, Upload):
    """Clients train and send weights of a few bits; the server's copies of their models also round activations."""

    kind: str = field(default="low-bit", init=False)
    bits: int = 1  # of a weight, 1 to 8; 32: not rounded at all

    precision = "mixed"

    def fits(self, server: Server) -> Iterator[str]:
        own = [self.of(A, server) for A in server.architectures]
        if all((cfg.bits, cfg.activations) == (OFF, OFF) for cfg in own):
            yield f"bits = {OFF}: it rounds no weight; set bits from 1 to 8, here or in models.options.NAME"

    def of(self, A: str, server: Server) -> "LowBitUpload":
        """The precision of architecture A: its own (`models.options`), or the common one."""
        own = server.precision.get(A, {})
        return replace(self, bits=own.get("bits", self.bits), activations=own.get("activations", self.activations))

    def ask(self, x_0: Sent, S: list[str], local: Local, mu: float, fed: Federation, server: Server) -> Replies:
        M = {fed.architecture(k): x_0(k) for k in S}  # shapes and types of each architecture
        cfg = {A: self.of(A, server) for A in M}
        names = {A: coarse_names(server.template(A), cfg[A]) for A in M}
        packed = {A: packed_sizes(w, names[A], cfg[A].bits) for A, w in M.items()}
        sent, sizes = per_client(x_0), per_client(lambda k: packed[fed.architecture(k)])
        rounding = per_client(lambda k: cfg[fed.architecture(k)].plain)
        replies = fed.map(lowbit_update, S, weights=sent, local=local, mu=mu, quantise=rounding, sizes=sizes)
        x = {}
        for k, reply in list(replies.items()):
            A = fed.architecture(k)
            try:
                packing = Packing(reply.codes, reply.scales, reply.rest)
                x[k] = Update(unpack(packing, M[A], names[A], cfg[A].bits))
            except ValueError as e:  # levels out of range
                fed.reject(replies, k, str(e))
        return replies.read_as(x)

    @property
    def plain(self) -> LowBit:
        """The settings that the task receives."""
        return LowBit(self.bits, self.activations, self.training, self.mask, self.standardise, self.skip_ends)

    def build(self, server: Server) -> Build:
        def build(A: str, weights: Weights) -> nn.Module:
            model = server.model(A, weights)
            round_activations(model, self.of(A, server))
            return model

        return build
