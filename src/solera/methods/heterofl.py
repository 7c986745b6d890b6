"""HeteroFL (Diao, Ding, Tarokh; ICLR 2021): clients with different resources train sub-networks of one model.

A client of rate r receives the first ceil(r * width) channels of every hidden layer, trains them and sends them back.
The server averages every weight over the clients that hold it. Different architectures share nothing; each has its own
clients of every rate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor, nn

from ..core.federation import Federation, per_client
from ..core.settings import Problem
from ..core.task import Client, task
from ..core.tensors import Shapes, Weights, weights_of
from ..core.wire import like
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.aggregate import by_row
from ..train.chain import read, resized
from ..train.fitting import Local, Objective, cross_entropy, fit
from ..train.norms import batchnorms, parameter_names, reestimate
from .steps.training import label_counts


@dataclass(frozen=True)
class PartUpdate:
    """A sub-network after local training; with masking, also which classes the client has (as 0 and 1)."""

    weights: Weights = like("weights")
    held: Tensor = like("classes")

    def __post_init__(self) -> None:
        if bool(((self.held < 0) | (self.held > 1)).any()):
            raise ValueError("the classes a client has must be numbers from 0 to 1")


@dataclass(frozen=True)
class PartStatistics:
    """The running statistics of a sub-network on a client's data."""

    statistics: Weights = like("statistics")


@task("train_part")
def train_part(
    client: Client,
    weights: Weights,
    classes: Tensor,  # one entry per class; empty: no masking
    rows: list[str],  # the tensors with a row for each class
    local: Local,
    rate: float,  # activations are divided by it
    static: bool,
) -> PartUpdate:
    """Train the received sub-network. With masking, rows of classes that the client lacks are sent back as zeros."""
    data = client.train
    model = resized(client.template, weights, buffers=not static)
    for layer in batchnorms(model):
        layer.track_running_stats = not static
    scale_in_training(model, client.template, rate)
    held = label_counts(client)[: len(classes)] > 0
    objective = masked_cross_entropy(client.bring(held)) if len(held) else cross_entropy
    fit(model, data.inputs, data.labels, local, client.seed, objective)
    trained = {name: t for name, t in weights_of(model).items() if name in weights}
    if len(held):
        trained |= {name: trained[name] * by_row(held, trained[name]) for name in rows}
    return PartUpdate(trained, held.to(classes.dtype))


@task("part_statistics")
def part_statistics(client: Client, weights: Weights, statistics: Weights) -> PartStatistics:
    """The statistics of BatchNorm after one pass of the client's data through the received sub-network."""
    model = resized(client.template, weights | statistics)
    reestimate(model, client.train.inputs)
    return PartStatistics({name: t for name, t in weights_of(model).items() if name in statistics})


Part = tuple[str, str]  # architecture and rate as text: ("resnet8", "0.5")

Rates = list[Annotated[float, Gt(0), Le(1)]]


@register("heterofl")
@dataclass(frozen=True)
class HeteroFL(Method):
    """Sub-networks of one model, sized for each client's resources."""

    local: Local = field(default_factory=lambda: Local(clip=1.0))  # clipped: the scaler makes gradients large
    rates: Rates = field(default_factory=lambda: [1.0, 0.5, 0.25, 0.125, 0.0625])  # repeat one: more clients
    assignment: Literal["fixed", "dynamic"] = "fixed"  # assigned to clients in turn, or sampled each round
    average: Literal["uniform", "weighted"] = "uniform"  # equal weights, or by number of examples
    scaler: bool = True  # divide activations by the rate in training
    static_norm: bool = True  # BatchNorm tracks no statistics in training; clients compute them for the averaged model
    masked: bool = True  # classes a client lacks have logit 0 in its loss, and its rows of the last layer are ignored

    about: ClassVar[About] = About(
        title="HeteroFL",
        paper="Diao et al., ICLR 2021",
        wire="the client's part of the model down and up; with BatchNorm once more down, and statistics up",
        state="nothing",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # of the full model; with static_norm without running statistics
        statistics: dict[str, dict[str, Weights]]  # architecture -> rate -> its running statistics
        shapes: dict[str, dict[str, Shapes]]  # architecture -> rate -> shapes of its tensors
        rows: dict[str, list[str]]  # the tensors with a row for each class

    def traits(self) -> Traits:
        return Traits(split="cut", replies="means")

    def problems(self) -> Iterator[Problem]:
        if not self.rates or self.rates[0] != 1:
            yield f"rates = {self.rates}: the first must be 1 (the whole model)"

    def fits(self, server: Server) -> Iterator[str]:
        for A in server.architectures:
            try:
                for rate in self.rates:
                    sub_shapes(server.template(A), rate)
            except ValueError as e:
                yield f"heterofl: {A!r} cannot be cut to rate {rate:g}: {e}"

    def init(self, fed: Federation, server: Server) -> State:
        models = {A: server.template(A) for A in server.architectures}
        shapes = {A: {_text(r): sub_shapes(model, r) for r in self.used(A, fed)} for A, model in models.items()}
        x, statistics = {}, {}
        for A, model in models.items():
            w = server.init(A)
            static = set(w) - set(parameter_names(model)) if self.static_norm else set()
            x[A] = {name: t for name, t in w.items() if name not in static}
            statistics[A] = {r: cut({n: w[n] for n in w if n in static}, shapes[A][r]) for r in shapes[A]}
        return self.State(x, statistics, shapes, {A: output_tensors(model) for A, model in models.items()})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x, S = dict(state.weights), fed.sample()
        rate = self.rates_of(S, fed)
        part = {k: (fed.architecture(k), _text(rate[k])) for k in S}
        W = {(A, r): cut(x[A], state.shapes[A][r]) for A, r in set(part.values())}
        mean = fed.mean(
            train_part,
            S,
            by=part.__getitem__,
            uniform=self.average == "uniform",
            weights=per_client(lambda k: W[part[k]]),
            classes=torch.ones(server.num_classes if self.masked else 0),
            rows=per_client(lambda k: state.rows[fed.architecture(k)]),
            local=self.local,
            rate=per_client(lambda k: rate[k] if self.scaler else 1.0),
            static=self.static_norm,
        )
        for A in sorted({A for A, _ in mean}):
            parts = [p for p in mean if p[0] == A]
            held = {name: [mean[p].held for p in parts] for name in state.rows[A]} if self.masked else {}
            x[A] = mean_over_holders(x[A], [(mean[p].weights, self.total(p, part, fed)) for p in parts], held)
        statistics = self.post_hoc(x, state, part, fed)
        return self.State(x, statistics, state.shapes, state.rows)

    def post_hoc(
        self, x: dict[str, Weights], state: State, part: dict[str, Part], fed: Federation
    ) -> dict[str, dict[str, Weights]]:
        """Static BatchNorm: after averaging, the clients that trained a sub-network compute its statistics."""
        new = {A: dict(by_rate) for A, by_rate in state.statistics.items()}
        asked = [k for k, (A, r) in part.items() if new[A][r] and k in fed.answered and fed.num_examples(k) > 1]
        if not asked:
            return new
        W = {(A, r): cut(x[A], state.shapes[A][r]) for A, r in {part[k] for k in asked}}
        now = per_client(lambda k: state.statistics[part[k][0]][part[k][1]])
        weights = per_client(lambda k: W[part[k]])
        means = fed.mean(part_statistics, asked, by=part.__getitem__, min_replies=0, weights=weights, statistics=now)
        for (A, r), mean in means.items():  # a sub-network without a reply keeps its statistics
            new[A][r] = mean.statistics
        return new

    def total(self, p: Part, part: dict[str, Part], fed: Federation) -> float:
        """The total weight of the clients that replied for a sub-network."""
        who = [k for k in part if part[k] == p and k in fed.answered]
        return sum(fed.copies.get(k, 1) * (fed.num_examples(k) if self.average == "weighted" else 1) for k in who)

    # -- rates --

    def rates_of(self, S: list[str], fed: Federation) -> dict[str, float]:
        """The rate of each client in this round."""
        if self.assignment == "dynamic":
            drawn = {k: torch.Generator().manual_seed(fed.seed("rate", k)) for k in S}
            return {k: self.rates[int(torch.randint(len(self.rates), (), generator=g))] for k, g in drawn.items()}
        of = fed.clients.architecture_of
        place = torch.zeros_like(of)  # of each client among the clients of its architecture that can be sampled
        for p in of.unique():
            mine = (of == p) & (fed.clients.sizes > 0)
            place[mine] = torch.arange(int(mine.sum()))
        return {k: self.rates[int(place[fed.clients.index(k)]) % len(self.rates)] for k in S}

    def used(self, A: str, fed: Federation) -> list[float]:
        """The rates that clients of architecture A can have, largest first."""
        mine = (fed.clients.architecture_of == fed.clients.architectures.index(A)) & (fed.clients.sizes > 0)
        given = self.rates if self.assignment == "dynamic" else self.rates[: max(1, int(mine.sum()))]
        return sorted(set(given), reverse=True)

    def models(self, state: State) -> dict[str, Model]:
        """The full model under the name of its architecture; sub-networks as the name followed by their rate."""
        found = {}
        for A, by_rate in state.shapes.items():
            for r, shapes in by_rate.items():
                weights = cut(state.weights[A], shapes) | state.statistics[A][r]
                found[A if r == "1" else f"{A}-{r}"] = Model(A, weights, "model" if r == "1" else "part")
        return found


def _text(rate: float) -> str:
    return f"{rate:g}"


# ---- sub-networks: the first channels of every hidden layer ------------------------------------------

# A rate r keeps the first ceil(r * width) channels of each hidden layer, and all inputs and logits of the model. The
# sub-network of a smaller rate is contained in that of a larger one, so one set of weights serves devices of different
# resources. Every tensor of a sub-network is the leading block of the full model's tensor.


def kept(rate: float, width: int) -> int:
    """ceil(rate * width), robust to rounding of the product: 0.07 of 100 channels are 7."""
    return math.ceil(rate * width - 1e-9)


def sub_shapes(model: nn.Module, rate: float) -> Shapes:
    """The shape of every tensor of the sub-network with this rate; ValueError if the model has none."""
    structure, weights = read(model), model.state_dict()
    whole = (0, structure.output)  # the model's input and its logits
    width = [w if i in whole else kept(rate, w) for i, w in enumerate(structure.widths)]
    shapes = {name: list(t.shape) for name, t in weights.items()}
    for layer in structure.layers:
        for name in layer.own(weights):
            size = shapes[name]
            if layer.kind != "norm" and size:
                size[0] = width[layer.writes]
            if layer.reads not in whole and layer.kind == "norm" and size:
                size[0] = width[layer.reads] * layer.block
            elif layer.reads not in whole and len(size) > 1:
                size[1] = width[layer.reads] * layer.block
        norm = model.get_submodule(layer.name)
        if isinstance(norm, nn.GroupNorm) and shapes[layer.weight][0] % norm.num_groups:
            raise ValueError(
                f"its layer {layer.name!r} has {norm.num_groups} groups, which do not divide the "
                f"{shapes[layer.weight][0]} channels that rate {rate:g} leaves"
            )
    return shapes


def output_tensors(model: nn.Module) -> list[str]:
    """The tensors with a row for each class: those of the layers that output the logits."""
    structure = read(model)
    last = [layer for layer in structure.layers if layer.writes == structure.output and layer.kind != "norm"]
    return [name for layer in last for name in layer.own(model.state_dict())]


def cut(weights: Weights, shapes: Mapping[str, Sequence[int]]) -> Weights:
    """The leading block of every tensor, with these shapes."""
    return {name: _leading(t, shapes[name]).clone(memory_format=torch.contiguous_format) for name, t in weights.items()}


def mean_over_holders(
    old: Weights, groups: Sequence[tuple[Weights, float]], held: Mapping[str, Sequence[Tensor]]
) -> Weights:
    """The element-wise mean over the groups that hold an element; elements that no group holds do not change.

    A group is the mean of its members' weights and their total weight. For the tensors named in `held`, that mean had
    zeros for members without the class of a row, and held[name][g] is the share of group g with the class.
    """
    new = {}
    for name, t in old.items():
        if not t.is_floating_point():  # counters
            new[name] = torch.stack([t, *(weights[name] for weights, _ in groups)]).amax(0)
            continue
        total, count = (torch.zeros_like(t, dtype=torch.float64) for _ in range(2))
        for g, (weights, n) in enumerate(groups):
            part = weights[name]
            _leading(total, part.shape).add_(part.double() * n)
            _leading(count, part.shape).add_(n * by_row(held[name][g].double(), part) if name in held else n)
        new[name] = torch.where(count > 0, total / count.where(count > 0, 1.0), t.double()).to(t.dtype)
    return new


def scale_in_training(model: nn.Module, whole: nn.Module, rate: float) -> None:
    """The scaler: divides the output of a narrowed layer by the rate while the model trains.

    Fewer channels have a smaller sum. Without the scaler, later layers would be trained on smaller inputs than they get
    in the full model, which predicts without a scaler.
    """
    layers = dict(whole.named_modules())
    if rate == 1:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear) and len(layer.weight) < len(layers[name].weight):
            layer.register_forward_hook(lambda m, _, output: output / rate if m.training else output)


def masked_cross_entropy(held: Tensor) -> Objective:
    """Cross-entropy with the logits of classes that are not `held` (a mask of all classes) set to 0."""

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).masked_fill(~held, 0.0), labels)

    return loss


def _leading(t: Tensor, shape: Sequence[int]) -> Tensor:
    return t[tuple(slice(s) for s in shape)]
