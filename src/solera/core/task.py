"""A task is the client's part of an exchange: a plain function `f(client, **inbox) -> outbox`.

Its annotations are the schema of the request and of the reply. Only registered functions can run: a message carries a
task name, the name is looked up in `TASKS`, and nothing is imported on demand.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..place.placement import Placement
from .randomness import seed_from
from .settings import same_source
from .tensors import Brought, Inputs, Weights, copy_of, device_of
from .wire import check_ties, check_type

X = TypeVar("X", bound=Inputs, covariant=True)
M = TypeVar("M", bound=Tensor | nn.Module)
TASKS: dict[str, "Task"] = {}


@dataclasses.dataclass(frozen=True)
class Trains:
    """Marks an argument that says how much a task trains: `Annotated[Local, Trains(on="public")]`.

    Unmarked, everything with a method `visits(rows)` counts: `Local` on the client's own samples, `Distill` on public
    ones. Mark an argument that means something else.
    """

    on: Literal["own", "public"]


class _Rows:
    pass


PublicRows = Annotated[Tensor, _Rows()]  # an argument with a row for each public sample of a call, or their indices


@dataclasses.dataclass(frozen=True)
class Data(Generic[X]):
    """Samples ready for a model: normalised images [n, C, H, W] or tokens [n, L], and labels [n]."""

    inputs: X  # a tensor, or samples that are drawn again at each training step
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, place: Placement) -> "Data[Inputs]":
        """The same samples in `place`: copied there once if they fit, otherwise rows are copied when they are read."""
        return Data(
            brought(self.inputs, place) if isinstance(self.inputs, Tensor) else self.inputs, place.put(self.labels)
        )


def brought(inputs: Tensor, place: Placement, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> Inputs:
    """Samples in `place`, `prepare`d there. If they do not fit, they are copied in blocks of rows."""
    return prepare(place.put(inputs)) if place.fits(inputs) else Brought(inputs, place.device, prepare)


@dataclasses.dataclass
class Client:
    """Everything a task may use. It gives no access to the server, the network or another client."""

    id: str
    architecture: str  # name of this client's architecture
    train: Data[Inputs]
    test: Data[Inputs]
    public: Any  # the public samples every party holds (data.Public), or None
    classes: int
    seed: int  # fixed by (run, round, exchange, client)
    state: dict[str, Weights]  # private to this client, kept between rounds; changes are saved only if the task returns
    template: nn.Module  # an initialised model of this client's architecture; use `model()`

    def model(self, weights: Weights | None = None) -> nn.Module:
        """A fresh copy of this client's model, with `weights` or as initialised."""
        model = copy_of(self.template)
        if weights is not None:
            model.load_state_dict(weights)
        model.train()  # on its own line: a user's model may override train() without returning self
        return model

    def bring(self, what: M) -> M:
        """A module or a tensor on the device of this client's models."""
        return what.to(device_of(self.template))  # type: ignore[return-value]

    @property
    def num_examples(self) -> int:
        return len(self.train)

    def rng(self, purpose: str) -> torch.Generator:
        """A separate random generator for each purpose."""
        return torch.Generator().manual_seed(seed_from(self.seed, purpose))


@dataclasses.dataclass(frozen=True)
class Task:
    """A registered client function with the types of its arguments and its return value."""

    name: str
    fn: Callable[..., Any]
    takes: dict[str, Any]
    returns: Any

    @cached_property
    def inbox(self) -> Any:
        """The type of the request, for `wire.decode`."""
        cls = dataclasses.make_dataclass("Inbox", list(self.takes.items()))
        cls.__annotations__ = dict(self.takes)
        return cls

    @cached_property
    def _counted(self) -> list[tuple[str, str]]:
        return [found for a, hint in self.takes.items() for found in _counted_in(hint, a)]

    def samples(self, sent: Mapping[str, Any], examples: int) -> int:
        """The number of samples that a client with `examples` of its own trains on when it is sent these arguments."""
        there = [(of, v) for path, of in self._counted if (v := _argument(sent, path)) is not None]
        rows = {"own": examples, "public": next((len(v) for of, v in there if of == "rows"), 0)}
        return sum(v.visits(rows[of]) for of, v in there if of != "rows")

    def __call__(self, client: Client, **inbox: Any) -> Any:
        """Call the function directly, without a federation: for tests and for tasks that use other tasks."""
        return self.fn(client, **inbox)


def _counted_in(hint: Any, path: str, trains: Trains | None = None) -> Iterator[tuple[str, str]]:
    """The parts of an argument that are public samples ("rows") or say how much is trained ("own", "public")."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if any(isinstance(mark, _Rows) for mark in args[1:]):
            yield path, "rows"
        yield from _counted_in(args[0], path, next((m for m in args[1:] if isinstance(m, Trains)), trains))
    elif origin in (typing.Union, types.UnionType):  # optional
        for inner in args:
            yield from _counted_in(inner, path, trains)
    elif hasattr(hint, "visits"):
        yield path, trains.on if trains else getattr(hint, "TRAINS_ON", "own")
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        fields = typing.get_type_hints(hint, include_extras=True)
        for f in dataclasses.fields(hint):
            yield from _counted_in(fields[f.name], f"{path}.{f.name}", trains)


def _argument(sent: Mapping[str, Any], path: str) -> Any:
    """The value of an argument, or of a field of one; None if it is left out."""
    name, *fields = path.split(".")
    value = sent[name]
    for f in fields:
        value = getattr(value, f, None)
    return value


def task(name: str) -> Callable[[Callable[..., Any]], Task]:
    """Register a client function under `name`. Its first argument is the `Client`; the others are sent by the server.

    The name is part of the protocol: messages carry it, and the metrics count bytes by it. Keep it when the function
    moves to another file.
    """
    if not isinstance(name, str):
        raise TypeError('a task is registered under a name: @task("my_package.train"), not @task')

    def register(fn: Callable[..., Any]) -> Task:
        hints = typing.get_type_hints(fn, include_extras=True)
        if "return" not in hints:
            raise TypeError(f"task {name} needs a return annotation: it is the schema of the reply")
        returns = hints.pop("return")
        arguments = list(fn.__code__.co_varnames[: fn.__code__.co_argcount + fn.__code__.co_kwonlyargcount])
        hints.pop(arguments[0], None)
        for a in arguments[1:]:
            if a not in hints:
                raise TypeError(f"task {name}: argument {a!r} needs an annotation: it is the schema of the message")
            check_type(hints[a], f"task {name}, argument {a!r}")
        check_type(returns, f"task {name}, its reply")
        takes = {a: hints[a] for a in arguments[1:]}
        check_ties(returns, takes, f"task {name}, its reply")
        made = Task(name, fn, takes, returns)
        counted = {of for _, of in made._counted}
        if "public" in counted and "rows" not in counted:
            raise TypeError(
                f"task {name} trains on public samples, and no argument says on how many: annotate the one that has "
                "a row for each of them, or their indices, as PublicRows"
            )
        known = TASKS.get(name, made)
        there, here = (f"{f.__module__}.{f.__qualname__}" for f in (known.fn, fn))
        if there != here:
            if same_source(known.fn, fn) and known.fn.__code__ == fn.__code__:
                return known  # one file, imported both by name and by path
            there, here = (f"{o} ({t.fn.__code__.co_filename})" for o, t in ((there, known), (here, made)))
            raise TypeError(f"task {name!r} is already {there}: choose another name for {here}")
        TASKS[name] = made
        return made

    return register
