"""Engines by name, and the settings of those that come with the library.

An engine is a settings class, like a method: its fields are the keys of [engine], and `open(host, states)` starts what
moves the messages (`base.Engine`). `host` is where the clients live, `states` what they keep between rounds.
"""

import dataclasses
import difflib
import importlib.util
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from annotated_types import Ge, Le

from ..core.calls import Engine, Host
from ..core.errors import ConfigError
from ..core.plugins import Registry
from ..core.settings import Hint, Positive, PositiveInt, Problem, checks_itself, hints, settings, show
from ..place.devices import AUTO, Compute, Share, can_fork, check_fork, compute_of
from ..place.placement import Precision
from .pool import ThreadCount, WorkerCount, default_workers
from .processes import Processes
from .states import ClientStates
from .threads import InProcess, Threads

log = logging.getLogger("solera")
ANSWER_S = 5.0  # until an address must have answered
# How HTTP/2, which Ray's servers speak, begins: each side sends its settings, here none.
GREETING, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", b"\4"


class EngineSettings(Protocol):
    """The settings of an engine, as a run uses them."""

    @property
    def workers(self) -> int:
        """Clients at once, and models that the server trains at once; 0: one for each core."""
        ...

    @property
    def threads(self) -> int:
        """torch's threads within one client's or the server's work: it may change the bits."""
        ...

    def open(self, host: Host, states: ClientStates) -> Engine:
        """Start it. The run closes what is returned."""
        ...


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """A row of `solera ls engines`."""

    name: str
    title: str
    crash: str


OPENED: dict[str, Callable[[Host, ClientStates, int, Compute], Engine]] = {
    "inprocess": InProcess,
    "threads": Threads,
    "processes": Processes,
}
INFO = {
    "inprocess": EngineInfo("inprocess", "one client after another in this process; the reference", "ends the run"),
    "threads": EngineInfo("threads", "as many clients at once as workers, in threads", "ends the run"),
    "processes": EngineInfo("processes", "as many clients at once as workers, in forked processes", "one client"),
    "ray": EngineInfo("ray", "as many clients at once as workers, on this machine or on a Ray cluster", "one client"),
    "flower": EngineInfo(
        "flower", "sites on other machines, through a Flower SuperLink: `solera deploy`", "one client"
    ),
}


@settings
class EngineConfig:
    """Clients on this machine.

    `name`, `workers`, `per_device` and `resident` never change the bits of a result; others may.
    """

    name: str = AUTO  # which of them
    workers: WorkerCount = 0  # clients at once; 0: one for each core, or `per_device` on each accelerator
    threads: ThreadCount = 1  # torch's threads within one client's or the server's work
    device: str = AUTO  # "cpu", "cuda", "cuda:0,1", "mps"; auto: the CPU
    per_device: PositiveInt = 1  # clients at once on one accelerator
    precision: Precision = "float32"  # of products on an accelerator; bf16: mixed precision
    deterministic: bool = True  # on an accelerator: only algorithms that repeat their bits
    resident: Share = 0.5  # share of an accelerator's memory for data that stays there
    portable: bool = False  # the same bits on any x86 CPU with AVX2, at a price

    def problems(self) -> Iterator[Problem]:
        """Report an unknown name, and settings that contradict each other."""
        if self.name not in (AUTO, *OPENED):
            near = difflib.get_close_matches(self.name, OPENED, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else "an engine of your own has settings of its own"
            yield f"name = {show(self.name)}: expected one of {', '.join((AUTO, *OPENED))}; {hint}"
        elif self.threads > 1 and self.name != "inprocess":
            yield (
                f"threads = {self.threads}: more than 1 only with engine.name = 'inprocess'; "
                "the other engines use the cores for more clients at once"
            )

    def check(self, host: Host) -> None:
        """Refuse settings that cannot work here or with these clients; called before a run writes anything."""
        name, _, compute = self._chosen()
        if name == "threads" and not compute.on_cpu:
            raise ConfigError(
                f"engine.name = 'threads' with engine.device = {show(self.device)}: threads share the random "
                "numbers of a device; use 'processes' or 'inprocess'"
            )
        if name == "processes":
            check_fork(compute)

    def open(self, host: Host, states: ClientStates) -> Engine:
        """Start the engine of that name."""
        name, workers, compute = self._chosen()
        if self.name == AUTO and name == "inprocess" and not can_fork(compute):
            log.warning(
                "this program has used %s already, so processes forked from it cannot: clients are trained one after "
                "another in this process; to have several at once, start the run in a process of its own (solera run)",
                compute.kind,
            )
        return OPENED[name](host, states, workers, compute)

    def _chosen(self) -> tuple[str, int, Compute]:
        """The name of the engine, its workers, and where they compute."""
        compute = compute_of(self)
        workers = self.workers or compute.at_once or default_workers()
        name = self.name
        if name == AUTO:
            name = default_engine(workers) if can_fork(compute) else "inprocess"
        return name, workers, compute


@settings
class RayConfig:
    """Clients in actors of Ray, on this machine or on a cluster.

    `address`, `workers`, `per_device` and `resident` never change the bits of a result; the others may.
    """

    elsewhere: ClassVar[bool] = True  # the devices of this machine are not the workers'

    name: Literal["ray"] = "ray"
    address: str = ""  # "HOST:PORT" of a cluster's head, "auto" on a machine of one; "": Ray is started here
    workers: WorkerCount = 0  # clients at once; 0: as many as the cluster has room for
    threads: ThreadCount = 1  # torch's threads within one client's or the server's work: as many CPUs has a worker
    device: str = AUTO  # of all workers, and of the server if it has one: "cpu", "cuda"; auto: "cpu"
    per_device: PositiveInt = 1  # clients at once on one accelerator: a worker has that share of one
    precision: Precision = "float32"  # of products on an accelerator; bf16: mixed precision
    deterministic: bool = True  # on an accelerator: only algorithms that repeat their bits
    resident: Share = 0.5  # share of an accelerator's memory for data that stays there
    portable: bool = False  # the same bits on any x86 CPU with AVX2, at a price

    def problems(self) -> Iterator[Problem]:
        """Report mistakes in the address or the device."""
        if self.address.startswith("ray://"):
            yield (
                f"address = {show(self.address)}: start the run on a machine of the cluster, with its "
                "address 'HOST:PORT' or 'auto'; Ray's client connection is not used"
            )
        elif self.address not in ("", AUTO) and _endpoint(self.address) is None:
            yield f"address = {show(self.address)}: expected 'HOST:PORT', such as '10.0.0.1:6379', 'auto' or nothing"
        if self.device not in (AUTO, "cpu", "cuda"):
            yield f"device = {show(self.device)}: write 'cpu' or 'cuda'; Ray chooses the devices of a machine"

    def require(self) -> None:
        """Refuse to start, before any work, without Ray or without a server at the address."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("engine.name = 'ray' needs the package ray: pip install 'solera[ray]'")
        if where := _endpoint(self.address):
            _greet(self.address, where)

    def open(self, host: Host, states: ClientStates) -> Engine:
        """Connect to the cluster, or start Ray here, and start the workers."""
        from .ray import Ray

        self.require()
        return Ray(host, states, self.address, self.workers, self.threads, compute_of(self))


def _endpoint(address: str) -> tuple[str, int] | None:
    """Host and port of an address; None if it has none."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() and int(port) < 1 << 16 else None


def _greet(address: str, where: tuple[str, int]) -> None:
    """Refuse an address at which no server of Ray answers: Ray itself would try for minutes."""
    why = "what answers is something else"
    try:
        with socket.create_connection(where, ANSWER_S) as line:
            line.settimeout(ANSWER_S)
            line.sendall(GREETING)
            if line.recv(9, socket.MSG_WAITALL)[3:4] == SETTINGS:
                return
    except OSError as e:
        why = e.strerror or str(e)
    raise ConfigError(
        f"engine.address = {show(address)}: no Ray cluster answers there ({why}); see `ray status` on its head, or "
        "leave engine.address out to start Ray on this machine"
    )


@settings
class FlowerConfig:
    """Sites on other machines, through a Flower SuperLink. A deployment opens it: `solera deploy`."""

    name: Literal["flower"] = "flower"
    workers: Annotated[int, Ge(0), Le(4096), Hint("0: one for each core")] = 0  # models that the server trains at once
    threads: PositiveInt = 1  # torch's threads within the server's work; a site's are its own affair
    address: str = "127.0.0.1:8000"  # where the SuperLink listens, and where the sites find it
    absent: Literal["wait", "skip"] = "wait"  # a site that is not connected: wait for it, or go on without it
    wait_s: Positive = 600.0  # how long a site is waited for before it counts as failed
    grace_s: Positive = 60.0  # time beside federation.deadline_s for the way there and back
    device: str = AUTO  # of the server; each site has its own [engine]
    precision: Precision = "float32"
    deterministic: bool = True
    resident: Share = 0.5
    portable: bool = False

    def require(self) -> None:
        """Refuse this engine: the clients of a simulation are not on a network."""
        raise ConfigError(
            "engine.name = 'flower' reaches sites over a network: prepare them with `solera deploy init`, then start "
            "the run with `solera deploy submit`; to simulate it here, choose another engine (--engine auto)"
        )

    def open(self, host: Host, states: ClientStates) -> Engine:
        """Refuse this engine."""
        self.require()
        raise AssertionError


def check_class(cls: Any, name: str) -> type:
    """Make `cls` check its settings and return it; raise with the missing part if it is no engine."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise TypeError(f"{getattr(cls, '__name__', cls)} must be a dataclass: its fields are the engine's settings")
    fields = {f.name for f in dataclasses.fields(cls)}
    for part in ("workers", "threads", "open"):
        if part not in fields and not hasattr(cls, part):
            raise TypeError(f"engine {name!r} ({cls.__name__}) lacks {part!r}")
    return checks_itself(cls)


ENGINES: Registry[type] = Registry(
    "engine",
    "solera.engines",
    check_class,
    {**dict.fromkeys((AUTO, *OPENED), EngineConfig), "ray": RayConfig, "flower": FlowerConfig},
)
E = TypeVar("E", bound=type)


def register_engine(name: str) -> Callable[[E], E]:
    """Make an engine available as `engine.name`: a settings class like `EngineSettings`."""
    return ENGINES.register(name)


def engine_named(name: str, **given: Any) -> EngineSettings:
    """The settings of the engine called `name`."""
    cls = ENGINES.find(name, "engine.name")
    return cls(**({"name": name} if "name" in hints(cls) else {}), **given)


def engine_of(given: EngineSettings | type[EngineSettings] | str | None) -> EngineSettings:
    """The settings of an engine that is given by its name, its settings or its class; without any, the default."""
    if given is None or isinstance(given, str):
        return engine_named(given or AUTO)
    cls = given if isinstance(given, type) else type(given)
    check_class(cls, cls.__name__)
    return given() if isinstance(given, type) else given


def require(engine: EngineSettings) -> None:
    """Refuse, before any data is read, an engine that cannot be opened. Most have no `require`."""
    getattr(engine, "require", lambda: None)()


def engine_info(name: str) -> EngineInfo:
    """The row of an engine in `solera ls engines`; a user's engine has the first line of its docstring."""
    if name in INFO:
        return INFO[name]
    said = (ENGINES.find(name).__doc__ or "").strip()
    return EngineInfo(name, said.partition("\n")[0], "")


def default_engine(workers: int) -> str:
    """The default: processes if they can be forked safely, because dropout repeats and a crash costs one client."""
    if workers < 2:
        return "inprocess"
    return "processes" if sys.platform == "linux" else "threads"
