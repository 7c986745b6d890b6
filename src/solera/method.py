"""What a method is, and the table of methods by name.

A method is a frozen dataclass: its fields are its hyper-parameters, `State` is exactly what a checkpoint holds, and
`round` maps one state to the next without touching it. Methods of other packages are found through the entry-point
group `solera.methods`.
"""

import dataclasses
import difflib
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from .errors import ConfigError
from .federation import Federation
from .parts.local import Score
from .server import Server
from .settings import checks_itself
from .task import TASKS, Client, Task
from .tensors import Weights
from .wire import check_type, sized


@dataclasses.dataclass(frozen=True)
class Info:
    """What `solera ls methods` prints: what a user must know before choosing."""

    title: str
    paper: str
    models: str  # "any mix" or "one architecture", and what is refused
    wire: str  # what crosses it, per active client and round
    public: str  # who needs public data, labelled or not
    state: str  # what a client keeps between rounds
    privacy: str  # "means only" (fits secure aggregation) or "individual replies"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to evaluate and to ship."""

    architecture: str
    weights: Weights


class Method(Protocol):
    """The shape of a method. Optional beside these: `finish(state, fed, server) -> State`, run once at the end,
    `personal`, a task that scores each client's own model on its own test split, `needs`, a tuple of what the
    method asks of the models (see NEEDS): a run without it is refused, `describe() -> Info`, where `info` depends on
    the settings, and `ensemble_models(state) -> [(Model, share)]`, an ensemble that is saved with the models
    (`ensemble_rule`: how its members are joined, avg_logits unless given)."""

    State: ClassVar[type]
    info: ClassVar[Info]

    def init(self, fed: Federation, server: Server) -> Any: ...

    def round(self, state: Any, fed: Federation, server: Server) -> Any: ...

    def models(self, state: Any) -> dict[str, Model]: ...


NEEDS = {
    "split": "every model comes in body, adapter and head (solera.models.SplitModel)",
    "shared head": "they do, and the heads of all of them have the same shape",
    "large": "the server has a model of its own, larger than the clients' (models.server)",
    "no BatchNorm": "no model keeps running statistics: their weights are parameters and nothing else",
    "chain": "every model is a plain chain: Conv2d and Linear layers, one after the other, without norm layers",
    "labels": "the public samples have labels (public.labels)",
    "shared features": "what the body and the adapter of every model give has one shape (the method checks it)",
    "K clients": "K clients of each architecture can be active in a round (the method checks it)",
}

M = TypeVar("M", bound=type)
METHODS: dict[str, type] = {}


def register(name: str) -> Callable[[M], M]:
    """Make a method available by name, in configurations and on the command line; it then checks its settings."""

    def add(cls: M) -> M:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} must be a dataclass: its fields are its hyper-parameters")
        for part in ("State", "init", "round", "models", "info"):
            if not hasattr(cls, part):
                raise TypeError(f"method {name!r} ({cls.__name__}) lacks {part!r}")
        needs = getattr(cls, "needs", ())
        if unknown := (set(needs) if isinstance(needs, tuple) else set()) - set(NEEDS):
            raise TypeError(f"method {name!r} needs {sorted(unknown)}; what can be needed: {list(NEEDS)}")
        check_type(cls.__dict__["State"], f"{cls.__name__}.State")
        METHODS[name] = checks_itself(cls)
        return cls

    return add


def find_method(name: str) -> type:
    """The method called `name`; looks at other packages' entry points before giving up."""
    if name not in METHODS:
        load_plugins()
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(sorted(METHODS))
        raise ConfigError(f"method.name = {name!r} is not a method; {hint}")
    return METHODS[name]


def load_plugins() -> None:
    """Import the methods that installed packages declare under the entry-point group `solera.methods`."""
    for point in importlib.metadata.entry_points(group="solera.methods"):
        if point.name not in METHODS:
            cls = point.load()
            if point.name not in METHODS:
                register(point.name)(cls)


def name_of(method: Any) -> str:
    """The registered name of a method object, or its class name."""
    return next((n for n, cls in METHODS.items() if cls is type(method)), type(method).__name__)


def info_of(method: Any) -> Info:
    """What a user must know of a method with these settings."""
    return method.describe() if hasattr(method, "describe") else type(method).info


def needs_of(method: Any) -> set[str]:
    """What a method asks of the models: keys of NEEDS. It may depend on its settings (a property)."""
    return set(getattr(method, "needs", ()))


@dataclasses.dataclass(frozen=True)
class MeanScore:
    """A client's score in a form of which a mean can be taken. Without test samples all of it is 0."""

    scored: Tensor = sized(dtype=torch.float64)  # 1 with test samples
    accuracy: Tensor = sized(dtype=torch.float64)
    squared: Tensor = sized(dtype=torch.float64)  # the accuracy's square: its mean gives the spread
    correct: Tensor = sized(dtype=torch.float64)
    total: Tensor = sized(dtype=torch.float64)


def personal_task(method: Any) -> Task | None:
    """The task that scores a client's own model, if the method has personal models.

    Its replies are single clients' scores (`Score`) where the server sees single replies anyway. From a method that
    declares less than that, the server gets the mean over clients (of `MeanScore`) and nothing else.
    """
    found = getattr(method, "personal", None)
    if not isinstance(found, Task):
        return None
    return found if info_of(method).privacy.startswith("individual") else _averaged(found)


def _averaged(scoring: Task) -> Task:
    """The same task with a reply of which a mean can be taken; registered beside it, as NAME.mean."""
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
