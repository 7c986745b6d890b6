"""The structure of a model: which layer feeds which, so that neurons can be removed, added or permuted.

A hidden neuron (or channel) is a row of one layer and a column of the next; both must change together. The model is
traced symbolically (torch.fx), without data. Nothing is guessed from names or shapes; an unsupported step is refused.
Tracing patches torch for a moment: do it while no other thread computes.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..core.tensors import Weights, copy_of
from .norms import BATCHNORM

# Modules and functions that apply the same operation to each channel independently.
KEEPING = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout,
    nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
KEEPING_FUNCTIONS = (
    F.relu, torch.relu, F.leaky_relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.dropout, F.max_pool2d, F.avg_pool2d,
    F.adaptive_avg_pool2d,
)  # fmt: skip
KEEPING_METHODS = ("relu", "tanh", "sigmoid", "contiguous")
ADDING = (operator.add, operator.iadd, torch.add)
NORMS = (*BATCHNORM, nn.GroupNorm)
PIXELS = ({2, 3}, {-2, -1})


@dataclass(frozen=True)
class Layer:
    """A layer with weights. `reads` and `writes` are indices into `Structure.widths`."""

    name: str  # its path in the model
    kind: Literal["conv", "linear", "norm"]
    reads: int
    writes: int  # a norm writes what it reads
    block: int  # inputs for each channel it reads: the pixels of a channel in the first Linear after a convolution

    @property
    def weight(self) -> str:
        """The name of its weight in the model's weights."""
        return f"{self.name}.weight"

    def own(self, weights: Iterable[str]) -> list[str]:
        """The given names that belong to this layer."""
        return [name for name in weights if name.rpartition(".")[0] == self.name]


@dataclass(frozen=True)
class Structure:
    """The layers of a model in the order of execution, and the number of channels between them.

    Index 0 is the model's input, whose width is not known (0 here). Channels that are added up share one index.
    """

    layers: list[Layer]
    widths: list[int]
    output: int


def read(model: nn.Module) -> Structure:
    """Trace `model` from its input to its logits; a ValueError names a step that is not supported."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception as e:  # fx raises whatever the model's code raises
        raise ValueError(f"its forward cannot be traced ({' '.join(str(e).split())[:100]})") from None
    reader = _Reader(model)
    for node in graph.nodes:
        reader.follow(node)
    known = {name for layer in reader.layers for name in layer.own(model.state_dict())}
    if strange := [name for name in model.state_dict() if name not in known]:
        raise ValueError(f"{strange[0]!r} belongs to no supported layer")
    return reader.structure()


def chain(model: nn.Module) -> list[Layer]:
    """The layers of a plain chain: only convolutions and Linear layers, each reading the layer before it.

    A ValueError names the first layer that does not fit.
    """
    structure = read(model)
    before = 0
    for layer in structure.layers:
        kind = type(model.get_submodule(layer.name)).__name__
        if layer.kind == "norm":
            raise ValueError(f"its layer {layer.name!r} is a {kind}; a plain chain has Conv2d and Linear layers only")
        if layer.reads != before:
            raise ValueError(f"its layer {layer.name!r} ({kind}) does not read the layer before it: no plain chain")
        before = layer.writes
    if not structure.layers or structure.layers[-1].kind != "linear" or structure.output != before:
        raise ValueError("it does not end in a Linear layer")
    if len(structure.layers) != len(structure.widths) - 1:
        raise ValueError("it adds up the outputs of layers: no plain chain")
    return structure.layers


def resized(model: nn.Module, weights: Weights, buffers: bool = True) -> nn.Module:
    """A copy of `model` with these weights, its layers resized to match them.

    With `buffers=False` the weights are parameters only; running statistics then keep as many of their first entries as
    the layer has channels.
    """
    model = copy_of(model)
    for path, layer in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [n for n, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
        given = {n: weights[prefix + n] for n in own if prefix + n in weights}
        if any(t.shape != getattr(layer, n).shape for n, t in given.items()):
            _resize(layer, given, path)
    state = model.state_dict()
    kept = {} if buffers else {n: t for n, t in model.named_buffers() if n in state}
    model.load_state_dict({**kept, **weights})
    return model


def _resize(layer: nn.Module, given: Weights, path: str) -> None:
    """Change the size of one layer; its values are loaded later."""
    if not isinstance(layer, (nn.Linear, nn.Conv2d, *NORMS)):
        raise ValueError(f"a {type(layer).__name__} ({path!r}) cannot be resized")
    size = given["weight"].shape
    for n, p in list(layer.named_parameters(recurse=False)):
        setattr(layer, n, nn.Parameter(p.new_empty(given[n].shape), requires_grad=p.requires_grad))
    for n, b in list(layer.named_buffers(recurse=False)):
        setattr(layer, n, b if b.ndim == 0 else b.new_zeros(size) if n in given else b[: size[0]].clone())
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = size
    elif isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = size[:2]
    elif isinstance(layer, nn.GroupNorm):
        layer.num_channels = size[0]
    elif isinstance(layer, BATCHNORM):
        layer.num_features = size[0]


@dataclass(frozen=True)
class _Flow:
    """The output of a step: channels with one index, with their pixels or flattened."""

    number: int
    flat: bool


class _Reader:
    def __init__(self, model: nn.Module):
        self.model = model
        self.flows: dict[fx.Node, _Flow | None] = {}  # None: a size, not data
        self.layers: list[Layer] = []
        self.widths = [0]
        self.same = [0]  # the index that an index was merged with
        self.output = -1

    def follow(self, node: fx.Node) -> None:
        """Record the output of one step of the model."""
        if node.op == "placeholder":
            if self.flows:
                raise ValueError("it has more than one input")
            self.flows[node] = _Flow(0, flat=True)
        elif node.op == "output":
            self.output = self.data(node, node.args[0]).number
        elif node.op == "call_module":
            self.flows[node] = self.module(node)
        else:
            self.flows[node] = self.step(node)

    def data(self, node: fx.Node, value: object) -> _Flow:
        """The input channels of a step."""
        flow = self.flows.get(value) if isinstance(value, fx.Node) else None
        if flow is None:
            raise ValueError(f"its step {_name(node)} has an input that is not the output of a layer")
        return flow

    def module(self, node: fx.Node) -> _Flow:
        name = str(node.target)
        layer, flow = self.model.get_submodule(name), self.data(node, node.args[0])
        if isinstance(layer, KEEPING):
            return flow
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            return _Flow(flow.number, flat=True)
        if any(name == known.name for known in self.layers):
            raise ValueError(f"its layer {name!r} is used twice")
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            return self.add(name, "conv", flow, layer.in_channels, layer.out_channels)
        if isinstance(layer, nn.Linear) and flow.flat:
            return self.add(name, "linear", flow, layer.in_features, layer.out_features)
        if isinstance(layer, NORMS) and layer.weight is not None:
            return self.add(name, "norm", flow, len(layer.weight), None)
        raise ValueError(f"its layer {name!r} ({layer}) is not supported"[:200])

    def add(
        self, name: str, kind: Literal["conv", "linear", "norm"], flow: _Flow, inputs: int, outputs: int | None
    ) -> _Flow:
        number = self.root(flow.number)
        block, rest = divmod(inputs, self.widths[number] or inputs)
        pixels = any(a.kind == "conv" and self.root(a.writes) == number for a in self.layers)
        if rest or (block != 1 and (kind == "conv" or not pixels)):
            raise ValueError(f"its layer {name!r} takes {inputs} inputs, but receives {self.widths[number]} channels")
        if outputs is not None:
            self.widths.append(outputs)
            self.same.append(len(self.same))
        writes = flow.number if outputs is None else len(self.same) - 1
        self.layers.append(Layer(name, kind, number, writes, block))
        return flow if outputs is None else _Flow(writes, flat=kind == "linear")

    def step(self, node: fx.Node) -> _Flow | None:
        """A step that is not a module: a function, or a method of a tensor."""
        if _is_size(node):
            return None
        keeping = (node.op == "call_function" and node.target in KEEPING_FUNCTIONS) or (
            node.op == "call_method" and node.target in KEEPING_METHODS
        )
        if keeping:
            return self.data(node, node.args[0])
        if _is_flatten(node):
            return _Flow(self.data(node, node.args[0]).number, flat=True)
        if node.op == "call_function" and node.target in ADDING and len(node.args) == 2 and not node.kwargs:
            return self.unite(node, self.data(node, node.args[0]), self.data(node, node.args[1]))
        raise ValueError(f"its step {_name(node)} is not supported")

    def unite(self, node: fx.Node, one: _Flow, other: _Flow) -> _Flow:
        """Channels that are added element by element share one index."""
        a, b = sorted((self.root(one.number), self.root(other.number)))
        if a == 0 or self.widths[a] != self.widths[b] or one.flat != other.flat:
            raise ValueError(f"its step {_name(node)} adds up different channels")
        self.same[b] = a
        return one

    def root(self, number: int) -> int:
        while self.same[number] != number:
            number = self.same[number]
        return number

    def structure(self) -> Structure:
        layers = [Layer(a.name, a.kind, self.root(a.reads), self.root(a.writes), a.block) for a in self.layers]
        return Structure(layers, self.widths, self.root(self.output))


def _is_size(node: fx.Node) -> bool:
    """x.size(0) and x.shape[0], used to flatten a batch with view."""
    if node.op == "call_method":
        return node.target == "size"
    source = node.args[0] if node.args else None
    return node.op == "call_function" and (
        (node.target is getattr and node.args[1] == "shape")
        or (node.target is operator.getitem and isinstance(source, fx.Node) and _is_size(source))
    )


def _is_flatten(node: fx.Node) -> bool:
    """Flattening: the pixels of each channel, channel after channel; or their mean."""
    target, args, options = node.target, node.args[1:], dict(node.kwargs)
    if target is torch.flatten or (node.op == "call_method" and target == "flatten"):
        return (args == (1,) and not options) or (not args and options == {"start_dim": 1})
    if node.op == "call_method" and target in ("view", "reshape"):
        return len(args) == 2 and isinstance(args[0], fx.Node) and bool(args[1] == -1)
    if target is torch.mean or (node.op == "call_method" and target == "mean"):
        over = args[0] if len(args) == 1 and not options else options.get("dim") if not args else None
        return isinstance(over, tuple | list) and set(over) in PIXELS and options.keys() <= {"dim"}
    return False


def _name(node: fx.Node) -> str:
    what = getattr(node.target, "__name__", str(node.target))
    inside = list(node.meta.get("nn_module_stack", ()))
    return f"{what!r} in {inside[-1]!r}" if inside and inside[-1] else repr(what)
