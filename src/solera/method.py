"""What a method is, what it says about itself, and the table of methods by name.

A method is a frozen dataclass derived from `Method`: its fields are its hyper-parameters, `State` is exactly what a
checkpoint holds, and `round` maps one state to the next without touching it. `Traits` are what programs ask about a
method, `About` is what people read; what can be said of both is made from the traits (`described`), so that nothing
ever has to read prose. Methods of other packages are found through the entry-point group `solera.methods`.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from .federation import Federation
from .parts.local import Score
from .plugins import Registry, label
from .server import EnsembleReport, Server
from .settings import checks_itself, settings
from .task import TASKS, Client, Task
from .tensors import Weights
from .wire import check_type, sized

# ---- what a method says about itself ----------------------------------------------------------------


@settings
class Traits:
    """What a method needs and allows: data for programs. A run without what is needed is refused; in a configuration
    it is supplied where nobody has decided (`supply.py`)."""

    architectures: Literal["any", "one"] = "any"  # of the clients' models
    across: Literal["nothing", "predictions", "knowledge"] = "nothing"  # what passes from one architecture to another
    public: Literal["none", "server", "everywhere"] = "none"  # who needs the public samples
    public_labels: Literal["unused", "used", "needed"] = "unused"  # used: where there are any
    # What every model must be: in body, adapter and head ("split"); that, with features or heads of one shape in all of
    # them; a plain chain of Conv2d and Linear layers; or such that it can be cut to a part (the method checks it).
    split: Literal["none", "split", "shared features", "shared head", "chain", "cut"] = "none"
    server_model: Literal["none", "own", "larger"] = "none"  # the server trains one; larger: models.server names it
    batchnorm: bool = True  # models may keep running statistics
    replies: Literal["none", "means", "individual", "data"] = "individual"  # what the server sees of a client
    personal: bool = False  # judged by each client's own model, on its own test split
    bytes_vary: str = ""  # why the bytes of a run depend on what is learned, in words; empty: they do not
    groups: str = ""  # the setting that says how many clients of each architecture must be active in a round


@dataclasses.dataclass(frozen=True)
class About:
    """What people read in `solera ls methods` and in the docs, beside what the traits say."""

    title: str
    paper: str
    wire: str  # what crosses it, per active client and round
    state: str  # what a client keeps between rounds
    models: str = ""  # what more there is to say of the models
    privacy: str = ""  # what more there is to say of what the server sees


class Described(NamedTuple):
    """A method in words: the columns of `solera ls methods`."""

    title: str
    paper: str
    models: str
    wire: str
    public: str
    state: str
    privacy: str


def described(method: "Method") -> Described:
    """What a user must know of a method with these settings before choosing it."""
    a, t = method.about, method.traits()
    privacy = SEEN[t.replies] + (f" ({a.privacy})" if a.privacy else "")
    return Described(a.title, a.paper, _models_in_words(a, t), a.wire, _public_in_words(t), a.state, privacy)


SEEN = {
    "none": "nothing leaves the client",
    "means": "means only",
    "individual": "individual replies",
    "data": "none: the data itself leaves the clients",
}
KINDS = {
    "none": "",
    "split": " of split models",
    "shared features": " with features of one shape",
    "shared head": " with heads of one shape",
    "chain": " of plain chains (no norm layers, no residuals)",
    "cut": " of models that can be cut",
}
PLACES = {"server": "on the server", "everywhere": "the same on the server and on every client"}


def _models_in_words(a: About, t: Traits) -> str:
    mix = ("any mix" if t.architectures == "any" else "one architecture") + KINDS[t.split]
    mix += "" if t.batchnorm else " without BatchNorm"
    mix += "" if t.server_model == "none" else ", and a model of the server's own"
    apart = t.architectures == "any" and t.across == "nothing" and t.replies in ("means", "individual")
    notes = (a.models, f"{t.groups} groups in each architecture" if t.groups else "", ONLY_SAME if apart else "")
    return "; ".join([mix, *(note for note in notes if note)])


ONLY_SAME = "only clients of the same architecture share"


def _public_in_words(t: Traits) -> str:
    if t.public == "none":
        return "none"
    labels = {"unused": "unlabelled", "used": "labelled if possible", "needed": "labelled"}[t.public_labels]
    return f"{labels}, {PLACES[t.public]}"


# ---- what a method is -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to evaluate and to ship."""

    architecture: str
    weights: Weights


class Exchange(NamedTuple):
    """A task and what is sent with it, as in `fed.map(task, clients, **payload)`."""

    task: Task
    payload: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Method(ABC):
    """The base of every method. What has a body here may be left out.

    `State` is a frozen dataclass inside the method; the hooks take and return it. (It is not a type parameter: a class
    cannot name what is inside it in its own head.)
    """

    State: ClassVar[type]

    @property
    @abstractmethod
    def about(self) -> About:
        """The words for people: `about: ClassVar[About] = About(...)`, or a property where they follow the settings."""

    def traits(self) -> Traits:
        """What the method needs and allows with these settings. Unless given: any models, no public data, individual
        replies."""
        return Traits()

    def fits(self, server: Server) -> Iterable[str]:
        """Every reason why the method cannot run here, each with its way out. Asked once the traits fit, and before
        any work."""
        return ()

    @abstractmethod
    def init(self, fed: Federation, server: Server) -> Any:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: Any, fed: Federation, server: Server) -> Any:
        """The next state. The one given stays as it is."""

    def finish(self, state: Any, fed: Federation, server: Server) -> Any:
        """The state after the last round: what is to be done once, at the end."""
        return state

    @abstractmethod
    def models(self, state: Any) -> dict[str, Model]:
        """The models to measure and to save, by name; none if they are all on the clients."""

    def ensemble_of(self, state: Any) -> EnsembleReport | None:
        """An ensemble that is saved beside the models, for inference. (`ensemble` is a setting of several methods.)"""
        return None

    def personal(self, state: Any, fed: Federation) -> Exchange | None:
        """How each client's own model is scored on its own test split: a task that returns a `Score`, and what is sent
        with it. None without personal models; `traits().personal` says the same before there is a state."""
        return None


M = TypeVar("M", bound=type[Method])


def check_class(cls: Any, name: str) -> type[Method]:
    """`cls`, if it is a method in form, and from now on it checks its settings; otherwise what is missing."""
    if not isinstance(cls, type) or not issubclass(cls, Method):
        raise TypeError(f"method {label(name)!r}: {getattr(cls, '__name__', cls)!r} does not derive from solera.Method")
    if "__annotations__" in cls.__dict__ and "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__} must be a dataclass: its fields are its hyper-parameters")
    if missing := sorted(cls.__abstractmethods__) or [n for n in ("State",) if not hasattr(cls, n)]:
        raise TypeError(f"method {label(name)!r} ({cls.__name__}) lacks {', '.join(missing)}")
    check_type(cls.State, f"{cls.__name__}.State")
    return checks_itself(cls)


METHODS: Registry[type[Method]] = Registry("method", "solera.methods", check_class)


def register(name: str) -> Callable[[M], M]:
    """Make a method available by name, in configurations and on the command line; it then checks its settings."""
    return METHODS.register(name)


def find_method(name: str) -> type[Method]:
    """The method called `name`: registered, of another package, or at a path to code where that is allowed."""
    return METHODS.find(name, "method.name")


def name_of(method: Method) -> str:
    """What a method object is called: its registered name, where its path leads, or its class name."""
    return label(METHODS.name_of(type(method)) or type(method).__name__)


# ---- personal models --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeanScore:
    """A client's score in a form of which a mean can be taken. Without test samples all of it is 0."""

    scored: Tensor = sized(dtype=torch.float64)  # 1 with test samples
    accuracy: Tensor = sized(dtype=torch.float64)
    squared: Tensor = sized(dtype=torch.float64)  # the accuracy's square: its mean gives the spread
    correct: Tensor = sized(dtype=torch.float64)
    total: Tensor = sized(dtype=torch.float64)


def scoring(method: Method, state: Any, fed: Federation) -> Exchange | None:
    """The exchange that scores each client's own model, if the method has personal models.

    Its replies are single clients' scores (`Score`) where the server sees single replies anyway. From a method that
    declares less than that, the server gets the mean over clients (of `MeanScore`) and nothing else.
    """
    found = method.personal(state, fed)
    if found is None or method.traits().replies == "individual":
        return found
    return Exchange(_averaged(found.task), found.payload)


def prepare_scoring() -> None:
    """Have a mean form of every task that gives a `Score`. To be called before worker processes begin: they know the
    tasks that there were at that time."""
    for known in [t for t in TASKS.values() if t.returns is Score]:
        _averaged(known)


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
