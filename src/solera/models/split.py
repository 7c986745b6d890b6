"""Split models: a body that computes features, an adapter, and a head that computes logits.

Methods that exchange heads or compare representations (Fed-ET, MOON) need split models; all others accept any module.
"""

from __future__ import annotations

import copy
from typing import Literal, TypeGuard, get_args

from torch import Tensor, nn

from solera.core.errors import ConfigError
from solera.models.probe import run_once
from solera.models.zoo.layers import he_initialise, positive

Head = Literal["plain", "shared", "projection"]

SHARED_WIDTH = 128  # Fed-ET: "small MLP with dimension 128"
PROJECTION_WIDTH = 256  # MOON's projection head


class SplitModel(nn.Module):
    """head(adapter(body(x))).

    The body computes `feature_dim` features per sample. The adapter maps them to the representation, whose width may be
    the same for all architectures. The head classifies. The parameters' names begin with body., adapter. and head.
    """

    def __init__(self, body: nn.Module, adapter: nn.Module, head: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.body = body
        self.adapter = adapter
        self.head = head
        self.feature_dim = feature_dim

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.represent(x))
        return logits

    def features(self, x: Tensor) -> Tensor:
        """The body's output: [n, feature_dim]."""
        features: Tensor = self.body(x)
        return features

    def represent(self, x: Tensor) -> Tensor:
        """The head's input: the features after the adapter."""
        representation: Tensor = self.adapter(self.features(x))
        return representation


def as_split(
    body: nn.Module,
    feature_dim: int,
    classes: int,
    head: Head = "shared",
    representation: int | None = None,
    head_hidden: int = SHARED_WIDTH,
) -> SplitModel:
    """A SplitModel from a module that turns a batch into features [n, feature_dim].

    `head` says what comes after the features:

    * "plain": nothing but a linear classifier.
    * "shared": Fed-ET's representation layer. Adapter Linear(feature_dim, 128) + ReLU, head Linear(128, 128) + ReLU +
      Linear(128, classes): the head has the same shape whatever the body. `representation` replaces the first 128,
      `head_hidden` the second; `head_hidden=0` makes the head linear.
    * "projection": MOON's. Adapter Linear(feature_dim, feature_dim) + ReLU + Linear(feature_dim, 256), head linear;
      `representation` replaces the 256.
    """
    positive("feature_dim", feature_dim)
    positive("classes", classes)
    _check_head(head, representation, head_hidden)
    if head == "plain":
        return SplitModel(body, nn.Identity(), nn.Linear(feature_dim, classes), feature_dim)
    adapter: nn.Module
    last: nn.Module
    if head == "shared":
        width = SHARED_WIDTH if representation is None else representation
        adapter = nn.Sequential(nn.Linear(feature_dim, width), nn.ReLU())
        he_initialise(adapter)
        if head_hidden:
            last = nn.Sequential(nn.Linear(width, head_hidden), nn.ReLU(), nn.Linear(head_hidden, classes))
            he_initialise(last[0])
        else:
            last = nn.Linear(width, classes)
    else:
        width = PROJECTION_WIDTH if representation is None else representation
        adapter = nn.Sequential(nn.Linear(feature_dim, feature_dim), nn.ReLU(), nn.Linear(feature_dim, width))
        he_initialise(adapter[0])
        last = nn.Linear(width, classes)
    return SplitModel(body, adapter, last, feature_dim)


def wrap(
    model: nn.Module,
    classifier: str,
    head: Head = "shared",
    classes: int | None = None,
    representation: int | None = None,
    head_hidden: int = SHARED_WIDTH,
    shape: tuple[int, ...] | None = None,
) -> SplitModel:
    """A SplitModel from a whole model, cut before its last layer.

    `classifier` is the path of that layer, which must be a Linear: "fc", or "classifier.6". The model is copied and
    yours is unchanged; the copy keeps the weights of everything before the layer. head="plain" keeps the layer too
    (a new one is made if `classes` asks for another number of classes); other heads replace it, see `as_split`.
    Nothing may follow the layer in the model's forward; give the `shape` of one input to have that checked.
    """
    linear = _linear_layers(model)
    layer = linear.get(classifier)
    if layer is None:
        there = ", ".join(f"{path!r}" for path in linear) or "none"
        raise ConfigError(
            f"classifier = {classifier!r} is not a Linear layer inside the {type(model).__name__}; its Linear layers: "
            f"{there}. A model without a last Linear layer is split with as_split(body, feature_dim, classes)"
        )
    if shape is not None:
        _check_is_last(model, classifier, layer, shape)
    outputs = layer.out_features if classes is None else classes
    body = copy.deepcopy(model)
    kept = body.get_submodule(classifier)
    body.set_submodule(classifier, nn.Identity())
    if head == "plain" and outputs == layer.out_features:
        _check_head(head, representation, head_hidden)
        return SplitModel(body, nn.Identity(), kept, layer.in_features)
    return as_split(body, layer.in_features, outputs, head, representation, head_hidden)


def is_split(model: nn.Module) -> TypeGuard[SplitModel]:
    """True if the model is split into body, adapter and head."""
    return isinstance(model, SplitModel)


def require_split(model: nn.Module, needed_by: str, name: str | None = None) -> SplitModel:
    """Return the model if it is split; otherwise raise ConfigError: which method needs it and how to split it."""
    if is_split(model):
        return model
    linear = list(_linear_layers(model))
    likely = linear[-1] if linear else "fc"
    raise ConfigError(
        f"{needed_by} needs models made of a body, an adapter and a head, but {name or 'the model'!r} is a plain "
        f"{type(model).__name__}. Every model of `solera ls models` is made so. Split your own with "
        f"solera.models.wrap(model, classifier={likely!r}), naming its last Linear layer, or with "
        f"solera.models.as_split(body, feature_dim, classes) from a module that returns features"
    )


def _check_head(head: str, representation: int | None, head_hidden: int) -> None:
    if head not in get_args(Head):
        raise ConfigError(f"head = {head!r} is unknown; choose one of {', '.join(get_args(Head))}")
    if representation is not None:
        positive("representation", representation)
        if head == "plain":
            raise ConfigError(
                f"representation = {representation} has no effect with head = 'plain'; "
                f"drop it, or choose head = 'shared' or 'projection'"
            )
    if head_hidden != 0:
        positive("head_hidden", head_hidden)
    if head != "shared" and head_hidden != SHARED_WIDTH:
        raise ConfigError(f"head_hidden = {head_hidden} has no effect with head = {head!r}; it is for head = 'shared'")


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: layer for path, layer in model.named_modules() if path and isinstance(layer, nn.Linear)}


def _check_is_last(model: nn.Module, path: str, layer: nn.Linear, shape: tuple[int, ...]) -> None:
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        output = run_once(model, shape, type(model).__name__)
    finally:
        hook.remove()
    if not (len(seen) == 1 and isinstance(output, Tensor) and output.equal(seen[0])):
        raise ConfigError(
            f"classifier = {path!r} of the {type(model).__name__} is not its last step: what the model returns is not "
            f"that layer's output. Return the layer's output from forward (losses here take logits, not softmax or "
            f"log_softmax), or split it with as_split(body, feature_dim, classes)"
        )
