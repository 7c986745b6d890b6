"""Everything that a method of your own needs, in one import: the base class, its description, tasks and training.

    from solera.method import About, Client, Local, Method, Model, Weights, fit, like, register, task, weights_of

A method is a frozen dataclass derived from `Method`. Its fields are its hyper-parameters, `State` is exactly what a
checkpoint holds, and `round` computes the next state without changing the current one. `Traits` describe a method to
programs, `About` describes it to people. Text that follows from the traits is generated from them (`described`), so no
program has to parse text. Methods of other packages are found through the entry-point group `solera.methods`.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from .core.federation import Federation, per_client
from .core.plugins import Registry, label
from .core.settings import Slot, checks_itself, settings
from .core.task import TASKS, Client, PublicRows, Task, Trains, task
from .core.tensors import Weights, weights_of
from .core.wire import at_most, check_type, like, sized
from .scenario.server import EnsembleReport, Server
from .train.distill import Distill, distill
from .train.fitting import Local, Score, evaluate, fit

__all__ = [
    "About",
    "Client",
    "Distill",
    "Exchange",
    "Federation",
    "Local",
    "Method",
    "Model",
    "PublicRows",
    "Score",
    "Server",
    "Trains",
    "Traits",
    "Weights",
    "at_most",
    "distill",
    "evaluate",
    "fit",
    "like",
    "per_client",
    "register",
    "settings",
    "sized",
    "task",
    "weights_of",
]

# ---- what a method says about itself ----------------------------------------------------------------


@settings
class Traits:
    """The needs of a method and what it allows, as data for programs. A run that lacks something is refused; loading a
    configuration gives a value to needed settings that are unset (`supply.py`)."""

    architectures: Literal["any", "one"] = "any"  # of the clients' models
    across: Literal["nothing", "predictions", "knowledge"] = "nothing"  # shared between architectures
    public: Literal["none", "server", "everywhere"] = "none"  # the parties that need the public samples
    public_labels: Literal["unused", "used", "needed"] = "unused"  # used: where there are any
    # What every model must be: split into body, adapter and head ("split"); split, with features or heads of the same
    # shape in all models; a plain chain of Conv2d and Linear layers; or cuttable to a part (the method checks it).
    split: Literal["none", "split", "shared features", "shared head", "chain", "cut"] = "none"
    server_model: Literal["none", "own", "larger"] = "none"  # of the server's own; larger: models.server names it
    may_name_server: bool = False  # models.server is optional
    batchnorm: bool = True  # models may have running statistics
    next_token: bool = False  # also learns language models: data.task = "causal-lm"
    products: bool = False  # averages are of whole models, so that LoRA's products can replace them
    precision: Literal["full", "mixed"] = "full"  # of clients' weights; mixed: a few bits if models.options sets them
    replies: Literal["none", "means", "individual", "data"] = "individual"  # what the method uses of them
    personal: bool = False  # scored by each client's own model, on its own test split
    bytes_vary: str = ""  # the reason why the bytes of a run depend on training results; empty: they do not
    groups: str = ""  # name of the setting for how many clients of each architecture must be active in a round


@dataclasses.dataclass(frozen=True)
class About:
    """Text for `solera ls methods` and the docs, in addition to the traits."""

    title: str
    paper: str
    wire: str  # what is sent, per active client and round
    state: str  # what a client keeps between rounds
    models: str = ""  # a remark on the models
    privacy: str = ""  # a remark on what the method uses of replies


class Described(NamedTuple):
    """A method as text: the columns of `solera ls methods`."""

    title: str
    paper: str
    models: str
    wire: str
    public: str
    state: str
    privacy: str


SEEN = {
    "none": "nothing leaves the client",
    "means": "means only",
    "individual": "individual replies",
    "data": "none: the data itself leaves the clients",
}
SPLIT = {
    "none": "",
    "split": " of split models",
    "shared features": " with features of one shape",
    "shared head": " with heads of one shape",
    "chain": " of plain chains (no norm layers, no residuals)",
    "cut": " of models that can be cut",
}
LABELS = {"unused": "unlabelled", "used": "labelled if possible", "needed": "labelled"}
PLACES = {"server": "on the server", "everywhere": "the same on the server and on every client"}


def described(method: "Method") -> Described:
    """The facts for a user who chooses a method with these settings."""
    a, t = method.about, method.traits()
    mix = ("any mix" if t.architectures == "any" else "one architecture") + SPLIT[t.split]
    mix += "" if t.batchnorm else " without BatchNorm"
    mix += "" if t.server_model == "none" else ", and a model of the server's own"
    apart = t.architectures == "any" and t.across == "nothing" and t.replies in ("means", "individual")
    only = "only clients of the same architecture share" if apart else ""
    models = "; ".join(filter(None, (mix, a.models, t.groups and f"{t.groups} groups in each architecture", only)))
    public = "none" if t.public == "none" else f"{LABELS[t.public_labels]}, {PLACES[t.public]}"
    privacy = SEEN[t.replies] + (f" ({a.privacy})" if a.privacy else "")
    return Described(a.title, a.paper, models, a.wire, public, a.state, privacy)


# ---- what a method is -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to evaluate and to save.

    `kind` says what it is: a "model" for all clients; a "part", which is one of several models of an architecture or a
    part of one; or a model of the "server" alone. Comparisons never mix them. Unset: "server" if no client has the
    architecture, otherwise "model".
    """

    architecture: str
    weights: Weights
    kind: Literal["model", "part", "server"] | None = None


class Exchange(NamedTuple):
    """A task and its payload, as in `fed.map(task, clients, **payload)`."""

    task: Task
    payload: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Method(ABC):
    """The base class of every method. Hooks with a body here are optional.

    `State` is a frozen dataclass inside the method; the hooks take and return it. (It cannot be a type parameter of
    `Method`: a class statement cannot refer to a class nested in it.)
    """

    State: ClassVar[type]

    @property
    @abstractmethod
    def about(self) -> About:
        """Text for people: `about: ClassVar[About] = About(...)`, or a property if it depends on the settings."""

    def traits(self) -> Traits:
        """The needs of the method with these settings, and what it allows."""
        return Traits()

    def fits(self, server: Server) -> Iterable[str]:
        """Every reason why the method cannot run here, each with a way out: here those of its slots. Called after the
        traits were checked and before any work."""
        for f in dataclasses.fields(self):
            if isinstance(slot := getattr(self, f.name), Slot):
                yield from (f"method.{f.name}.{problem}" for problem in slot.fits(server))

    def for_dry_run(self) -> Self:
        """The method for a dry run, where models are untrained: with `Slot.for_dry_run` of its slots. Override it if
        the method has other rules that drop clients by their models' accuracy."""
        slots = {f.name: s for f in dataclasses.fields(self) if isinstance(s := getattr(self, f.name), Slot)}
        changed = {name: s.for_dry_run() for name, s in slots.items() if s.for_dry_run() is not s}
        return dataclasses.replace(self, **changed) if changed else self

    def remarks(self, server: Server) -> Iterable[str]:
        """Remarks for the user before the first round: what the method leaves out here, or sends beside models and
        predictions."""
        return ()

    @abstractmethod
    def init(self, fed: Federation, server: Server) -> Any:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: Any, fed: Federation, server: Server) -> Any:
        """The next state. `state` itself must not change."""

    def finish(self, state: Any, fed: Federation, server: Server) -> Any:
        """The state after the last round: for work that is done once, at the end."""
        return state

    @abstractmethod
    def models(self, state: Any) -> dict[str, Model]:
        """The models to evaluate and to save, by name; empty if all models are on the clients."""

    def ensemble_of(self, state: Any) -> EnsembleReport | None:
        """An ensemble to save with the models, for inference. (Several methods have a setting called `ensemble`.)"""
        return None

    def personal(self, state: Any, fed: Federation) -> Exchange | None:
        """The task that scores each client's own model on its own test split, with a `Score`, and its payload. None
        without personal models; must agree with `traits().personal`."""
        return None


checks_itself(Method)  # and with it every method, registered or not
M = TypeVar("M", bound=type[Method])


def check_class(cls: Any, name: str) -> type[Method]:
    """Return `cls` and make it check its settings; raise TypeError if it is not a complete method class."""
    if not isinstance(cls, type) or not issubclass(cls, Method):
        own = getattr(cls, "__name__", cls)
        raise TypeError(f"method {label(name)!r}: {own!r} does not derive from solera.method.Method")
    if "__annotations__" in cls.__dict__ and "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__} must be a dataclass: its fields are its hyper-parameters")
    if missing := sorted(cls.__abstractmethods__) or [n for n in ("State",) if not hasattr(cls, n)]:
        raise TypeError(f"method {label(name)!r} ({cls.__name__}) lacks {', '.join(missing)}")
    check_type(cls.State, f"{cls.__name__}.State")
    return checks_itself(cls)


METHODS: Registry[type[Method]] = Registry("method", "solera.methods", check_class)


def register(name: str) -> Callable[[M], M]:
    """Make a method available by name, in configurations and on the command line."""
    return METHODS.register(name)


def find_method(name: str) -> type[Method]:
    """The method called `name`: a registered one, one of another package, or a path to code where that is allowed."""
    return METHODS.find(name, "method.name")


def name_of(method: Method) -> str:
    """The name of a method object: its registered name, its path without folders, or its class name."""
    return label(METHODS.name_of(type(method)) or type(method).__name__)


# ---- personal models --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeanScore:
    """A client's score in a form that can be averaged. Without test samples all fields are 0."""

    scored: Tensor = sized(dtype=torch.float64)  # 1 with test samples
    accuracy: Tensor = sized(dtype=torch.float64)
    squared: Tensor = sized(dtype=torch.float64)  # the accuracy's square: its mean gives the spread
    correct: Tensor = sized(dtype=torch.float64)
    total: Tensor = sized(dtype=torch.float64)


def scoring(method: Method, state: Any, fed: Federation) -> Exchange | None:
    """The exchange that scores each client's own model, if the method has personal models.

    If the method's `replies` are individual, so are the scores (`Score`). Otherwise the server gets only the mean over
    clients (of `MeanScore`).
    """
    found = method.personal(state, fed)
    if found is None or method.traits().replies == "individual":
        return found
    return Exchange(_averaged(found.task), found.payload)


def prepare_scoring() -> None:
    """Register the mean form of every task that returns a `Score`. Call it before worker processes start: they only
    know the tasks registered by then."""
    for known in [t for t in TASKS.values() if t.returns is Score]:
        _averaged(known)


def _averaged(scoring: Task) -> Task:
    """The same task with a reply that can be averaged, registered as NAME.mean."""
    known = TASKS.get(name := f"{scoring.name}.mean")
    if known is None or getattr(known.fn, "__wrapped__", None) is not scoring.fn:

        @functools.wraps(scoring.fn)
        def score(client: Client, **inbox: Any) -> MeanScore:
            found: Score = scoring.fn(client, **inbox)
            a = found.accuracy
            numbers = (float(found.total > 0), a, a * a, float(found.correct), float(found.total))
            return MeanScore(*(torch.tensor(n, dtype=torch.float64) for n in numbers))

        known = TASKS[name] = Task(name, score, scoring.takes, MeanScore)
    return known
