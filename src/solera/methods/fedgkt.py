"""FedGKT (He, Annavaram, Avestimehr, NeurIPS 2020): group knowledge transfer between small clients and a large server.

A client trains a small model and sends the extracted features of each training sample, with its logits and the label.
The server trains a large model, here called its tower, on the features of all clients. The tower's logits teach the
clients, and the clients' logits teach the tower. No weights are sent.

If only some clients take part in a round, the server's logits follow the adaptation of Cho et al. (Fed-ET, IJCAI 2022,
appendix B).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import ConfigError, DataError
from ..core.federation import Federation, Replies, per_client
from ..core.randomness import repeatable, seed_from
from ..core.settings import NonNegative, NonNegativeInt, Positive, PositiveInt, Problem
from ..core.task import Client, task
from ..core.tensors import Inputs, Weights, rows_of, weights_of
from ..core.wire import sized
from ..method import About, Exchange, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.distill import kd_loss
from ..train.fitting import Diverged, Local, Objective, Score, evaluate, fit, logits_of
from ..train.teachers import soft_targets
from .steps.fusion import outcome_of
from .steps.personal import scored
from .steps.predictions import finite

# ---- the clients' features --------------------------------------------------------------------------


class _Tapped(nn.Module):
    """A model that also returns the output of one of its layers: flattened features, then logits."""

    def __init__(self, model: nn.Module, layer: str):
        super().__init__()
        self.model, self.layer = model, layer
        self.seen: list[Any] = []
        self.shape: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        hook = self.model.get_submodule(self.layer).register_forward_hook(lambda _, i, out: self.seen.append(out))
        try:
            logits = self.model(x)
        finally:
            hook.remove()
        fine = len(self.seen) == 1 and isinstance(self.seen[0], Tensor) and len(self.seen[0]) == len(x)
        if not fine or self.seen[0].ndim < 2 or not self.seen[0].is_floating_point():
            raise ValueError(f"the layer {self.layer!r} does not give one row of features per sample")
        features = self.seen.pop()
        self.shape = tuple(features.shape[1:])
        return torch.cat([features.flatten(1), logits], 1)


def extract(model: nn.Module, inputs: Inputs, layer: str) -> tuple[Tensor, Tensor]:
    """The output of the layer named `layer` and of the whole model, in evaluation mode: (features, logits)."""
    tapped = _Tapped(model, layer)
    rows = logits_of(tapped, inputs)
    size = torch.Size(tapped.shape).numel()
    return rows[:, :size].reshape(-1, *tapped.shape), rows[:, size:].contiguous()


# ---- the server's model -----------------------------------------------------------------------------


class _Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.layers(x)
        return x + change


class _PixelMean(nn.Module):
    """Mean over height and width: [n, C, H, W] -> [n, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


Kind = Literal["residual", "vgg19"]
VGG19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)  # widths; a halving ends each group


def tower(shape: Sequence[int], classes: int, hidden: int, layers: int, kind: Kind = "residual") -> nn.Module:
    """A network from features of one `shape` to logits: residual (see `_residual`), or a VGG-19 on feature maps."""
    check_shape(shape)
    return _residual(shape, classes, hidden, layers) if kind == "residual" else _vgg19(shape, classes)


def _vgg19(shape: Sequence[int], classes: int) -> nn.Module:
    """The convolutions of a VGG-19 without normalisation, their mean over pixels, and a classifier."""
    if len(shape) != 3:
        raise ValueError(f"a VGG-19 takes feature maps (channels, height, width), not features of shape {tuple(shape)}")
    found, channels = nn.Sequential(), shape[0]
    for widths in VGG19:
        for width in widths:
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            found.extend([convolution, nn.ReLU()])
            channels = width
        found.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*found, _PixelMean(), nn.Linear(channels, classes))


def _residual(shape: Sequence[int], classes: int, hidden: int, layers: int) -> nn.Module:
    """A residual network from features of one `shape` to logits, of width `hidden`, with `layers` residual blocks.

    Feature vectors (one number in `shape`) get dense blocks, feature maps (channels, height, width) 3x3 convolutions
    at half the resolution. Normalisation is by sample, never by batch: one batch mixes clients whose extractors differ
    in scale, and a prediction must not depend on the rest of the batch.
    """
    if len(shape) == 1:
        blocks = [
            _Residual(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
            for _ in range(layers)
        ]
        return nn.Sequential(
            nn.LayerNorm(shape[0]), nn.Linear(shape[0], hidden), *blocks, nn.LayerNorm(hidden), nn.ReLU(),
            nn.Linear(hidden, classes),
        )  # fmt: skip

    def convolution(inputs: int, stride: int = 1) -> nn.Module:
        return nn.Conv2d(inputs, hidden, 3, stride=stride, padding=1)

    maps = [
        _Residual(nn.GroupNorm(1, hidden), convolution(hidden), nn.ReLU(), convolution(hidden)) for _ in range(layers)
    ]
    return nn.Sequential(
        nn.GroupNorm(1, shape[0]), convolution(shape[0], stride=2), *maps, nn.GroupNorm(1, hidden), nn.ReLU(),
        _PixelMean(), nn.Linear(hidden, classes),
    )  # fmt: skip


def tower_with(
    weights: dict[str, Tensor], shape: Sequence[int], classes: int, hidden: int, layers: int, kind: Kind = "residual"
) -> nn.Module:
    """A `tower` with copies of these weights. No random initialisation is computed."""
    with torch.device("meta"):
        made = tower(shape, classes, hidden, layers, kind)
    made.load_state_dict({name: t.clone() for name, t in weights.items()}, assign=True)
    return made


def check_shape(shape: Sequence[int]) -> None:
    """Refuse features of an unsupported shape."""
    if len(shape) not in (1, 3) or min(shape) < 1:
        raise ValueError(f"features are vectors or maps (channels, height, width), not of shape {tuple(shape)}")


# ---- distillation in both directions ----------------------------------------------------------------


def transfer_loss(logits: Tensor, labels: Tensor, teacher: Tensor, alpha: float, temperature: float) -> Tensor:
    """CE(logits, labels) + alpha T^2 KL(softmax(teacher / T) || softmax(logits / T)), mean over the batch."""
    return F.cross_entropy(logits, labels) + alpha * kd_loss(logits, teacher, temperature, t_squared=True)


def taught(labels: Tensor, teacher: Tensor | None, alpha: float, temperature: float) -> Objective:
    """`transfer_loss` as a function of (model, inputs, their positions in the data); without a teacher, CE alone.

    Row i of `labels` and of `teacher` belongs to sample i of the data, for any order of samples and batches.
    """

    rows = rows_of(labels) if teacher is None else rows_of(labels, teacher)

    def objective(model: nn.Module, inputs: Tensor, positions: Tensor) -> Tensor:
        if teacher is None:
            return F.cross_entropy(model(inputs), rows(positions)[0])
        y, said = rows(positions)
        return transfer_loss(model(inputs), y, said, alpha, temperature)

    return objective


def epochs_at(round: int, first: int, rounds: Sequence[int], epochs: Sequence[int]) -> int:
    """The number of epochs in a round: `first`, and from round `rounds[i]` on `epochs[i]`."""
    return [first, *(e for begin, e in zip(rounds, epochs, strict=True) if round >= begin)][-1]


# ---- the method ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """The output of a layer of the client's model for its training samples."""

    features: Tensor = sized("examples", "shape")


@dataclass(frozen=True)
class Extracted:
    """The same, and the model's logits and the label of each sample."""

    features: Tensor = sized("examples", "shape")
    logits: Tensor = sized("examples", "classes")
    labels: Tensor = sized("examples", dtype=torch.int32)


# ---- the client's half ------------------------------------------------------------------------------


@task("extract_features")
def extract_features(client: Client, layer: str, examples: int, shape: list[int]) -> Features:
    """The features from the model that the client kept."""
    return Features(_extracted(client, client.model(client.state.get("model")), layer)[0])


@task("train_and_extract")
def train_and_extract(
    client: Client,
    local: Local,
    teacher: Tensor,
    alpha: float,
    temperature: float,
    layer: str,
    examples: int,
    shape: list[int],
    classes: int,
) -> Extracted:
    """Train on the labels and on the server's logits of each sample (no row: on the labels alone), then extract."""
    inputs, labels = client.train.inputs, client.train.labels
    if len(teacher) not in (0, len(labels)):
        raise DataError(f"{client.id} has {len(labels)} samples and was sent the logits of {len(teacher)}")
    model = client.model(client.state.get("model"))
    objective = taught(labels, teacher if len(teacher) else None, alpha, temperature)
    fit(model, inputs, torch.arange(len(labels)), local, client.seed, objective)
    features, logits = _extracted(client, model, layer)
    client.state["model"] = weights_of(model)
    return Extracted(features, logits, labels.int())


def _extracted(client: Client, model: nn.Module, layer: str) -> tuple[Tensor, Tensor]:
    features, logits = extract(model, client.train.inputs, layer)
    return finite(features), finite(logits)


@task("score_with_tower")
def score_with_tower(
    client: Client, weights: Weights, hidden: int, layers: int, kind: Kind, layer: str, alone: bool
) -> Score:
    """The client's extractor and the server's tower on the client's test samples; `alone`: its own small model.

    A client that was never sampled has no extractor: none of its samples count.
    """
    inputs, labels = client.test.inputs, client.test.labels
    if alone or len(labels) == 0 or "model" not in client.state:
        return scored(client, client.state.get("model"))
    model = client.model(client.state["model"])
    features, _ = extract(model, inputs, layer)
    top = tower_with(weights, features.shape[1:], client.classes, hidden, layers, kind)
    return evaluate(top, features, labels)


# ---- the server's half ------------------------------------------------------------------------------


def feature_shape(name: str, layer: str, server: Server) -> tuple[int, ...]:
    """The shape of the output of `layer`, the same in every client architecture; otherwise a ConfigError."""
    if server.shape is None:
        raise ConfigError(f"{name}: the server must know the shape of an input: give it (Server(shape=...))")
    blank = torch.zeros(1, *server.shape, dtype=torch.int64 if server.tokens else torch.float32)
    shapes = {}
    for A in server.architectures:
        model = server.model(A, server.init(A))
        layers = [n for n, _ in model.named_modules() if n]
        if layer not in layers:
            near = get_close_matches(layer, layers, 1) or layers[:1]
            raise ConfigError(f"{name}: features = {layer!r} is no layer of {A!r}; it has, for example, {near[0]!r}")
        try:
            shapes[A] = tuple(extract(model, blank, layer)[0].shape[1:])
            check_shape(shapes[A])
        except ValueError as e:
            raise ConfigError(f"{name}: features = {layer!r} in {A!r}: {e}; choose another layer") from None
    if len(set(shapes.values())) > 1:
        raise ConfigError(
            f"{name}: all clients' features must have one shape, but {layer!r} gives "
            + ", ".join(f"{shape} in {A!r}" for A, shape in shapes.items())
            + ": set features = 'representation' and models.head = 'shared'"
        )
    return shapes[server.architectures[0]]


def usable(replies: Replies, top: nn.Module, temperature: float, fed: Federation, server: Server) -> dict[str, Any]:
    """The valid replies; the others are rejected.

    Labels must be of the task's classes. Finite numbers may still be so large that the loss of `top`, the server's
    tower, is not finite.
    """
    fine = {}
    for k, reply in list(replies.items()):
        if reason := _wrong(reply, top, temperature, server.num_classes):
            fed.reject(replies, k, reason)
        else:
            fine[k] = reply
    return fine


def _wrong(reply: Features | Extracted, top: nn.Module, temperature: float, classes: int) -> str | None:
    if isinstance(reply, Extracted) and not bool(((reply.labels >= 0) & (reply.labels < classes)).all()):
        return f"labels that are not of the classes 0 to {classes - 1}"
    if not bool(torch.isfinite(logits_of(top, reply.features)).all()):
        return "features for which the tower's logits are not finite"
    # The entropy over C classes is at most log C. If rounding makes it larger, the softmax is wrong too.
    if isinstance(reply, Extracted) and not bool(
        (soft_targets(reply.logits, temperature)[1].abs() <= math.log(classes) + 1).all()
    ):
        return "logits too large for a softmax"
    return None


LAYERS = {"representation": "adapter", "body": "body"}  # the layer of a split model with this output


@register("fedgkt")
@dataclass(frozen=True)
class FedGKT(Method):
    """A large server model on the features of small clients' models; each side teaches the other."""

    local: Local = field(default_factory=lambda: Local(epochs=1, batch=256, lr=1e-3, optimizer="adam"))
    server: Local = field(default_factory=lambda: Local(epochs=20, batch=256, lr=1e-3, optimizer="adam"))
    server_rounds: list[NonNegativeInt] = field(default_factory=lambda: [20, 30, 40, 100, 150])  # from these rounds on
    server_epochs: list[NonNegativeInt] = field(
        default_factory=lambda: [15, 10, 5, 3, 1]
    )  # this many epochs, not server.epochs
    server_model: Kind = "residual"  # the tower; vgg19: Fed-ET's server model, on feature maps; ignores the two below
    server_hidden: PositiveInt = 256  # width of the tower: of dense layers, or channels of convolutions
    server_layers: NonNegativeInt = 4  # residual blocks of the tower
    features: str = "representation"  # what is sent for a sample: "representation", "body", or the name of a layer
    alpha: NonNegative = 1.0  # weight of the other side's logits, in addition to the labels
    temperature: Positive = 3.0  # T
    partial: Literal["on_the_fly", "cached"] = "on_the_fly"  # partial participation: source of the server's logits
    judged: Literal["together", "alone"] = "together"  # personal accuracy: extractor and tower, or the small model

    about: ClassVar[About] = About(
        title="FedGKT",
        paper="He et al., NeurIPS 2020",
        wire="features, logits and labels of the training samples up, logits down",
        state="its model",
    )

    @dataclass(frozen=True)
    class State:
        weights: Weights  # of the tower
        trained: bool  # whether the tower was trained: an untrained tower teaches nothing
        kept: dict[str, Tensor]  # by client, of its last upload: the tower's logits, or ("cached") the features

    def traits(self) -> Traits:
        return Traits(across="knowledge", split="shared features", server_model="own", personal=True)

    def remarks(self, server: Server) -> Iterator[str]:
        yield "FedGKT shows the server the features and the label of every training sample of its clients"

    def problems(self) -> Iterator[Problem]:
        rounds, epochs = self.server_rounds, self.server_epochs
        if len(rounds) != len(epochs) or sorted(set(rounds)) != rounds:
            yield f"server_rounds = {rounds}: they must rise, and server_epochs = {epochs} have one for each"
        if self.server.steps is not None and rounds:
            yield f"server_rounds = {rounds}: to train by server.steps, set server_rounds = [] and server_epochs = []"

    @property
    def layer(self) -> str:
        """The layer of a client's model that gives the features."""
        return LAYERS.get(self.features, self.features)

    @property
    def tower(self) -> tuple[int, int, Kind]:
        """Width, number of blocks and kind of the tower."""
        return self.server_hidden, self.server_layers, self.server_model

    def fits(self, server: Server) -> Iterator[str]:
        try:
            shape = feature_shape("fedgkt", self.layer, server)
        except ConfigError as e:
            yield str(e)
        else:
            if self.server_model == "vgg19" and len(shape) != 3:
                yield f"method.server_model = 'vgg19' takes feature maps; features = {self.features!r} are vectors"

    def init(self, fed: Federation, server: Server) -> State:
        shape = feature_shape("fedgkt", self.layer, server)
        build = partial(tower, shape, server.num_classes, *self.tower)
        top = repeatable(seed_from(server.run_seed, "init", "fedgkt"), build)
        return self.State(weights_of(top), False, {})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        shape = feature_shape("fedgkt", self.layer, server)
        top = tower_with(state.weights, shape, server.num_classes, *self.tower)
        S, taught_by = self.teachers(fed.sample(), state, top, shape, fed, server)
        nothing = torch.empty(0, server.num_classes)
        how: dict[str, Any] = {"local": self.local, "alpha": self.alpha, "temperature": self.temperature}
        teacher = per_client(lambda k: taught_by.get(k, nothing))
        how |= {"layer": self.layer, "classes": server.num_classes, **self.rows(shape, fed)}
        sent = fed.map(train_and_extract, S, teacher=teacher, **how)
        x = usable(sent, top, self.temperature, fed, server)
        if not self.trained(top, x, fed, server):
            return state
        kept = {}
        if self.mode(fed) == "cached":
            kept = state.kept | {k: x[k].features for k in x}
        elif self.mode(fed) == "all":
            kept = state.kept | {k: logits_of(top, x[k].features) for k in x}
        return self.State(weights_of(top), True, kept)

    def rows(self, shape: tuple[int, ...], fed: Federation) -> dict[str, Any]:
        """The size of a client's reply: features of this shape for each of its samples."""
        return {"examples": per_client(fed.num_examples), "shape": list(shape)}

    def mode(self, fed: Federation) -> Literal["all", "on_the_fly", "cached"]:
        """The source of the server's logits: "all" if all clients take part in every round, otherwise `partial`."""
        everybody = fed.config.cohort(len(fed.clients)) == len(fed.clients) and not fed.config.replacement
        return "all" if everybody else self.partial

    def teachers(
        self, S: list[str], state: State, top: nn.Module, shape: tuple[int, ...], fed: Federation, server: Server
    ) -> tuple[list[str], dict[str, Tensor]]:
        """The clients that continue the round, and the server's logits for those that have any."""
        if not state.trained:
            return S, {}
        if self.mode(fed) == "on_the_fly":
            sent = fed.map(extract_features, S, layer=self.layer, **self.rows(shape, fed))
            now = usable(sent, top, self.temperature, fed, server)
            return list(now), {k: logits_of(top, now[k].features) for k in now}
        known = {k: state.kept[k] for k in S if k in state.kept}
        return S, {k: logits_of(top, H) for k, H in known.items()} if self.mode(fed) == "cached" else known

    def trained(self, top: nn.Module, x: dict[str, Any], fed: Federation, server: Server) -> bool:
        """Train the tower on all received features, in the order of the clients; False if it diverged."""
        received = [x[k] for k in x for _ in range(fed.copies.get(k, 1))]  # with replacement, S is a multiset
        H, z, y = (torch.cat([getattr(r, part) for r in received]) for part in ("features", "logits", "labels"))
        epochs = epochs_at(fed.round, self.server.epochs, self.server_rounds, self.server_epochs)
        how = replace(self.server, epochs=epochs)
        objective = taught(y.long(), z, self.alpha, self.temperature)
        server.worked(how.visits(len(y)))
        done = outcome_of(lambda: fit(top, H, torch.arange(len(y)), how, fed.seed("server"), objective))
        if isinstance(done, Diverged):
            server.event("server_diverged", samples=len(y), steps=done.steps, reason=str(done))
            return False
        server.event("server_trained", samples=len(y), steps=done.steps, loss=done.loss if done.steps else None)
        return True

    def personal(self, state: State, fed: Federation) -> Exchange:
        size = dict(zip(("hidden", "layers", "kind"), self.tower, strict=True)) | {"layer": self.layer}
        return Exchange(score_with_tower, {"weights": state.weights, "alone": self.judged == "alone", **size})

    def models(self, state: State) -> dict[str, Model]:
        return {}
