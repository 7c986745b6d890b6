"""The zoo by name: what there is, how to build one, how to add one's own."""

from __future__ import annotations

import difflib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal, TypeVar

from torch import nn

from solera.core.errors import ConfigError
from solera.core.plugins import Registry
from solera.data.encodings import Encoding
from solera.models.split import SHARED_WIDTH, Head, as_split, require_split
from solera.models.zoo.layers import DEFAULT_GROUPS, Norm, NormKind, positive
from solera.place.placement import TRICKS

Builder = Callable[..., Any]
BuilderT = TypeVar("BuilderT", bound=Builder)

# Values that `build` passes to builders with a parameter of that name.
_GIVEN = ("classes", "shape", "norm", "head", "vocabulary")


Kind = Literal["image", "text", "causal-lm"]


@dataclass(frozen=True)
class ModelInfo:
    """A line of `solera ls models`."""

    name: str
    title: str
    source: str  # the paper, its venue and year
    kind: Kind
    notes: str
    builder: Builder
    own: bool = True  # added by a user, not part of the zoo
    encoding: Callable[[], Encoding] | None = None  # a tokenizer of its own; None: the data set's

    @property
    def has_norm(self) -> bool:
        """True if the architecture has normalisation layers, which the `norm` setting then chooses."""
        return "norm" in inspect.signature(self.builder).parameters

    @property
    def options(self) -> dict[str, Any]:
        """The model's own options and their defaults (inspect.Parameter.empty: it must be given)."""
        parameters = inspect.signature(self.builder).parameters.values()
        return {p.name: p.default for p in parameters if p.name not in _GIVEN and p.kind is not p.VAR_KEYWORD}


def _entry(builder: Any, name: str) -> ModelInfo:
    """The entry of a builder without a description: one with a parameter `vocabulary` takes texts."""
    if not callable(builder):
        raise TypeError(f"expected a function or class that builds a model, got a {type(builder).__name__}")
    known = next((info for info in MODELS.values() if info.builder is builder), None)
    if known is not None:  # registered with its title and kind, and now found by its path
        return replace(known, name=name)
    kind: Kind = "text" if "vocabulary" in inspect.signature(builder).parameters else "image"
    own = getattr(builder, "encoding", None)
    return ModelInfo(name, name, "", kind, "", builder, encoding=(lambda: own) if isinstance(own, Encoding) else None)


MODELS: Registry[ModelInfo] = Registry("model", "solera.models", _entry)


def register_model(
    name: str,
    title: str = "",
    source: str = "",
    kind: Kind = "image",
    notes: str = "",
    encoding: Callable[[], Encoding] | None = None,
) -> Callable[[BuilderT], BuilderT]:
    """Add a builder to the zoo: `@register_model("my-net")` above a function or a module class.

    The builder is called with those of `classes`, `shape`, `norm`, `head` and `vocabulary` that are among its
    parameters, and with the options given to `build`. It returns a whole model, or the pair (body, feature_dim), to
    which `build` adds the head of the settings. `norm` is a `Norm`: `norm(64)` is the normalisation layer for
    64 channels. `encoding` makes the tokenizer by which it reads texts, if it brings one. Registering a name of one's
    own again replaces the builder; the names of the zoo are taken.
    """

    def add(builder: BuilderT) -> BuilderT:
        MODELS.add(name, ModelInfo(name, title or name, source, kind, notes, builder, encoding=encoding))
        return builder

    return add


ABOUT: dict[str, dict[str, Any]] = tomllib.loads((resources.files("solera.models.zoo") / "zoo.toml").read_text("utf-8"))


def zoo_model(name: str, encoding: Callable[[], Encoding] | None = None) -> Callable[[BuilderT], BuilderT]:
    """`register_model` for the models that come with the library: zoo.toml describes each of them."""
    about = {key: ABOUT[name].get(key, "image") for key in ("title", "source", "kind", "notes")}

    def add(builder: BuilderT) -> BuilderT:
        MODELS.add(name, ModelInfo(name, **about, builder=builder, own=False, encoding=encoding), ours=True)
        return builder

    return add


def model_info(name: str, key: str | None = None) -> ModelInfo:
    """The entry of that name, or at that path; a ConfigError names the nearest ones. `key`: the setting with the name.

    `hf:...` is an encoder in the format of Hugging Face, from a folder or the hub.
    """
    if name.startswith("hf:"):
        from solera.models.hf import hf_info  # which needs this module

        return hf_info(name, key)
    return MODELS.find(name, key)


def encoding_of(architecture: object) -> Encoding | None:
    """The tokenizer that a model brings: by its name, or the `encoding` of a module or of a function that builds one;
    None if it takes the data set's tokens."""
    if not isinstance(architecture, str):
        return getattr(architecture, "encoding", None)
    own = model_info(architecture).encoding
    return None if own is None else own()


def build(
    name: str,
    classes: int,
    shape: tuple[int, ...],
    norm: NormKind = "batch",
    head: Head = "plain",
    *,
    groups: int = DEFAULT_GROUPS,
    representation: int | None = None,
    head_hidden: int = SHARED_WIDTH,
    vocabulary: int | None = None,
    **options: Any,
) -> nn.Module:
    """A freshly initialised model for inputs of one `shape`: (C, H, W) for images, (L,) for tokens.

    `norm` and `groups` choose the normalisation layers of architectures that have such layers; the others
    (`ModelInfo.has_norm` is False) never have any, whatever `norm` is, so that one setting serves a mix of models.
    `head`, `representation` and `head_hidden` are those of `as_split`. `vocabulary` is the number of token ids, which
    text models need. `options` are the model's own, see `ModelInfo.options`. Weights are drawn from torch's global
    generator.

    Every model of the zoo is a SplitModel. A whole model from a user's builder is returned unchanged; it must be a
    SplitModel if `head` is not "plain".
    """
    info = model_info(name)
    _check_sizes(name, classes, shape)
    _check_vocabulary(info, vocabulary)
    _check_options(info, options)
    given: Mapping[str, Any] = {
        "classes": classes,
        "shape": tuple(shape),
        "norm": Norm(norm, groups),
        "head": head,
        "vocabulary": vocabulary,
    }
    parameters = inspect.signature(info.builder).parameters
    made = info.builder(**{key: value for key, value in given.items() if key in parameters}, **options)
    if isinstance(made, tuple):
        body, feature_dim = made
        model = as_split(body, feature_dim, classes, head, representation, head_hidden)
        # A user's own body might not work in another layout (a `view` needs the usual one): it stays as it was made.
        return model if info.own else model.to(memory_format=TRICKS["cpu"].layout)  # type: ignore[call-overload]
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"the builder of model {name!r} returns a {type(made).__name__}; "
            f"it must return a torch.nn.Module, or the pair (body, feature_dim)"
        )
    if head != "plain":
        require_split(made, f"head = {head!r}", name)
    return made


def _check_sizes(name: str, classes: int, shape: tuple[int, ...]) -> None:
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 2:
        raise ConfigError(f"model {name!r}: classes = {classes!r} must be a whole number of at least 2")
    if not shape or not all(isinstance(side, int) and side > 0 for side in shape):
        raise ConfigError(
            f"model {name!r}: shape = {shape!r} must be positive whole numbers, "
            f"such as (3, 32, 32) for images or (64,) for tokens"
        )


def _check_vocabulary(info: ModelInfo, vocabulary: int | None) -> None:
    if info.kind == "image" and vocabulary is not None:
        text = ", ".join(repr(name) for name, other in MODELS.items() if other.kind == "text")
        raise ConfigError(f"model {info.name!r} takes images, but the task is text; models for text: {text}")
    if info.kind != "image" and vocabulary is None and "vocabulary" in inspect.signature(info.builder).parameters:
        raise ConfigError(
            f"model {info.name!r} needs vocabulary, the number of token ids; if the task is images, use an image model"
        )
    if vocabulary is not None:
        positive("vocabulary", vocabulary)


def _check_options(info: ModelInfo, options: Mapping[str, Any]) -> None:
    known = info.options
    open_ended = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(info.builder).parameters.values())
    for option in options:
        if option not in known and not open_ended:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'no options'}"
            raise ConfigError(f"model {info.name!r} has no option {option!r}; {hint}")
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f"model {info.name!r} needs the option {option!r}")
