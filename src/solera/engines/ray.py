"""Clients in actors of Ray: on this machine, or on the machines of a cluster.

The data reaches the workers once: the host (client data and model templates) is put into Ray's object store, fetched
once by every machine, and its large tensors are then shared by all workers there. A message is put into the store once
for all calls that send it; a call carries its address. Client state stays in the run directory: it travels with the
call, and what the client leaves travels back, so machines need no disk in common. A worker that dies or overstays its
deadline costs one client's reply, and is replaced.

Ray listens on all interfaces of a machine and unpickles what it receives there: whoever reaches its ports can run code.
So it is for clusters whose network is trusted. What this module hands to Ray, Ray serialises.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import platform
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..core.calls import Call, Engine, Host, Reply, Roster, Version
from ..core.errors import PORTABLE, ConfigError, SoleraError
from ..core.plugins import files_of_code, take_over
from ..core.randomness import OURS
from ..core.settings import PositiveInt, Problem, settings, show
from ..core.stopping import check_stop
from ..core.task import TASKS, Task
from ..core.version import __version__
from ..core.wire import Packed
from ..place.devices import AUTO, Compute, Share, compute_of
from ..place.fingerprint import fingerprint
from ..place.placement import TRICKS, Precision
from .base import Backlog, Exchange, ThreadCount, WorkerCount, check_workers, default_workers
from .serve import KEEP_MESSAGES, Received, serve
from .states import ClientStates, StateError

log = logging.getLogger("solera")
ANSWER_S = 5.0  # until an address must have answered
START_S = 120.0  # until the first worker must be there: importing torch on many workers of one machine takes its time
GRACE_S = 1.0  # beside a deadline, for the way there and back
LOOK_S = 0.5  # how often a wait for a reply looks whether the run was asked to stop
SAY_AGAIN_S = 60.0  # how often it is said that no worker is there
ATTEMPTS = 3  # in a row at starting a worker
LARGE = 1 << 16  # bytes from which on a tensor of the host is shared by the workers of a machine, not copied
RESOURCES = {"cpu": "", "cuda": "GPU"}  # what Ray calls the devices that it can give to a worker
LONGEST = 300  # characters of an error
LONGEST_FOLDER = 32  # Ray's sockets are files below it, and the system limits the length of their names
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise Ray announces that this will be so one day
}
# How HTTP/2, which Ray's servers speak, begins: each side sends its settings, here none.
GREETING, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", b"\4"
Resources = Mapping[str, float]


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
    device: str = AUTO  # of the server and of all workers: "cpu", "cuda"; auto: "cpu"
    per_device: PositiveInt = 1  # clients at once on one accelerator: a worker has that share of one
    precision: Precision = "float32"  # of products on an accelerator; bf16: mixed precision
    deterministic: bool = True  # on an accelerator: only algorithms that repeat their bits
    resident: Share = 0.5  # share of an accelerator's memory for data that stays there
    portable: bool = False  # the same bits on any x86 CPU with AVX2, at a price

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the address."""
        if self.address.startswith("ray://"):
            yield (
                f"address = {show(self.address)}: start the run on a machine of the cluster, with its "
                "address 'HOST:PORT' or 'auto'; Ray's client connection is not used"
            )
        elif self.address not in ("", AUTO) and _endpoint(self.address) is None:
            yield f"address = {show(self.address)}: expected 'HOST:PORT', such as '10.0.0.1:6379', 'auto' or nothing"
        kind = self.device.partition(":")[0]
        if ":" in self.device and kind in RESOURCES:
            yield f"device = {show(self.device)}: Ray chooses the devices of a machine; write {kind!r}"

    def require(self) -> None:
        """Refuse, before any work, what cannot be: no Ray here, no server at the address."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("engine.name = 'ray' needs the package ray: pip install 'solera[ray]'")
        if where := _endpoint(self.address):
            _greet(self.address, where)

    def open(self, host: Host, states: ClientStates) -> Engine:
        """Connect to the cluster, or start Ray here, and start the workers."""
        self.require()
        compute = compute_of(self)
        if compute.kind not in RESOURCES:
            raise ConfigError(f"engine.device = {show(compute.kind)}: Ray gives its workers 'cpu' or 'cuda'")
        need = resources_of(compute, self.threads)
        wanted = self.workers or compute.at_once or default_workers()
        disconnect = _connect(self.address, wanted * self.threads)
        try:
            return Ray(host, states, _room(need, self.workers), need, compute, self.threads, disconnect)
        except BaseException:
            disconnect()
            raise


def resources_of(compute: Compute, threads: int) -> Resources:
    """What one worker asks of Ray: a CPU for each thread, and its share of an accelerator."""
    device = RESOURCES[compute.kind]
    return {"CPU": float(threads), **({device: 1 / compute.per_device} if device else {})}


def fitting(need: Resources, machines: Sequence[Resources]) -> int:
    """How many workers that need this much the machines have room for."""
    return sum(min(int(machine.get(r, 0) / n + 1e-6) for r, n in need.items()) for machine in machines)


def _room(need: Resources, workers: int) -> int:
    """The number of workers; refused if the cluster is too small for it."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = fitting(need, machines)
    each = ", ".join(f"{n:g} {r}" for r, n in need.items())
    if most < max(workers, 1):
        raise ConfigError(
            f"engine.workers = {workers}: the cluster of {len(machines)} machine{'s' * (len(machines) > 1)} has room "
            f"for {most} workers with {each} each; lower it, or add machines (`ray status` lists them)"
        )
    return workers or most


# ---- connecting -------------------------------------------------------------------------------------


def _endpoint(address: str) -> tuple[str, int] | None:
    """Host and port of an address; None if it has none."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() and int(port) < 1 << 16 else None


def _unreachable(address: str, why: str) -> str:
    return (
        f"engine.address = {show(address)}: no Ray cluster answers there ({why}); see `ray status` on its head, or "
        "leave engine.address out to start Ray on this machine"
    )


def _greet(address: str, where: tuple[str, int]) -> None:
    """Refuse an address that does not answer as a server of Ray would: Ray itself would try for minutes."""
    try:
        with socket.create_connection(where, ANSWER_S) as line:
            line.settimeout(ANSWER_S)
            line.sendall(GREETING)
            kind = line.recv(9, socket.MSG_WAITALL)[3:4]
    except OSError as e:
        raise ConfigError(_unreachable(address, e.strerror or str(e))) from None
    if kind != SETTINGS:
        raise ConfigError(_unreachable(address, "what answers is something else"))


def _connect(address: str, cpus: int) -> Callable[[], None]:
    """Connect to a cluster, or start Ray on this machine. What is returned undoes it, and nothing else: a program
    that has connected itself stays connected."""
    import ray

    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("", AUTO, here):
            raise ConfigError(
                f"engine.address = {show(address)}: this program is connected to the Ray cluster at {here}; leave "
                "engine.address out to use that one, or call ray.shutdown() first"
            )
        return lambda: None
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    folder = "" if address else _short_folder()

    def disconnect() -> None:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)

    try:
        with _own_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if address:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            else:
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=folder,
                    _node_ip_address="127.0.0.1",
                )
    except BaseException as e:
        disconnect()
        if not isinstance(e, Exception):  # Ctrl-C; Ray raises whatever it likes, a plain Exception for a slow start
            raise
        if not address:
            raise SoleraError(f"Ray does not start on this machine: {_one_line(e)}") from None
        raise ConfigError(f"engine.address = {show(address)}: Ray does not connect: {_one_line(e)}") from None
    return disconnect


def _short_folder() -> str:
    """Where a Ray of this run keeps its files; removed with it."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="solera-ray-", dir=usual if len(usual) < LONGEST_FOLDER else "/tmp")  # noqa: S108


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put back what answers to SIGTERM and Ctrl-C: Ray sets handlers of its own when it connects."""
    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _one_line(e: BaseException) -> str:
    """What an error of Ray says, in one line; the cause of a long story comes last."""
    lines = [" ".join(line.split()) for line in str(e).splitlines() if line.strip()]
    whole = " ".join(lines) or type(e).__name__
    return whole if len(whole) <= LONGEST else lines[-1][:LONGEST]


# ---- what is sent once ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Baggage:
    """What a worker has before its first call."""

    host: Host
    tasks: list[Task]  # those of the program itself, which no other process can import
    compute: Compute
    threads: int


def versions() -> dict[str, str]:
    """What must be the same everywhere: other versions may compute other bits."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "solera": __version__,
    }


def modules_of_tasks() -> list[str]:
    """The modules that register the tasks of this process, but the program itself: a worker imports them."""
    return sorted({t.fn.__module__ for t in TASKS.values()} - {"__main__"})


def to_bytes(t: Tensor) -> Any:
    """A tensor as Ray passes it on without a copy: an array of bytes, and how to look at it."""
    if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized or not t.numel():
        return t.__reduce_ex__(2)[:2]
    plain, strides = t.detach(), None
    if _is_dense(plain):
        plain, strides = torch.as_strided(plain, (t.numel(),), (1,)), t.stride()
    array = plain.contiguous().view(-1).view(torch.uint8).numpy()
    return array, t.dtype, tuple(t.shape), strides, t.requires_grad


def from_bytes(told: Any) -> Tensor:
    """The tensor again. A large one looks at memory that the workers of a machine share: it is never written to."""
    if len(told) == 2:
        make, arguments = told
        return make(*arguments)
    array, dtype, shape, strides, requires_grad = told
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only
        flat = torch.from_numpy(array).view(dtype)
    t = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
    return (t if array.nbytes >= LARGE else t.clone()).requires_grad_(requires_grad)


def _is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without a gap, in whatever order (channels last, say)."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _put(baggage: Baggage) -> Any:
    """Put what all workers need into Ray's store."""
    import ray
    from ray.util import deregister_serializer, register_serializer

    register_serializer(Tensor, serializer=to_bytes, deserializer=from_bytes)
    try:
        return ray.put(baggage)
    except (TypeError, AttributeError, RuntimeError) as e:  # what Ray and models raise for what cannot be serialised
        raise ConfigError(
            f"engine.name = 'ray': the clients' data and models cannot be sent to its workers: "
            f"{_one_line(e.__cause__ or e)}; see docs/howto/ray.md, or choose engine.name = 'processes'"
        ) from None
    finally:
        deregister_serializer(Tensor)


# ---- the worker's side ------------------------------------------------------------------------------


class Carried(ClientStates):
    """The state of one client for one call: it came with the call, and what the client leaves goes with the reply."""

    def __init__(self, content: bytes | None):
        super().__init__("carried")
        self.given, self.left = content, b""

    def content(self, client: str, version: Version) -> bytes:
        """What came with the call; the server has compared it with its hash."""
        if self.given is None:
            raise StateError(f"the state of {client} did not come with the call")
        return self.given

    def store(
        self, client: str, version: Version, content: bytes, keep: Collection[Version] = (), keep_from: int = 0
    ) -> None:
        """To be sent back."""
        self.left = content


class Worker:
    """An actor: serves one call after another, in a process of its own."""

    def __init__(self) -> None:
        self.held: dict[int, Packed] = {}
        self.step = -1

    def begin(
        self, wanted: dict[str, str], paths: list[str], modules: list[str], files: dict[str, bytes], box: list[Any]
    ) -> Any:
        """Get ready: who this is, or a text that says why it cannot be. Nothing is unpacked before versions agree."""
        import ray

        if (mine := versions()) != wanted:
            what = next(name for name in wanted if mine[name] != wanted[name])
            return (
                f"{socket.gethostname()} has {what} {mine[what]}, this machine {wanted[what]}: install the same "
                "versions on every machine of the cluster"
            )
        sys.path += [path for path in paths if path not in sys.path]  # on this machine, or with a disk in common
        try:
            take_over(files)
            for name in modules:
                importlib.import_module(name)
            luggage: Baggage = ray.get(box[0])
        except Exception as e:  # a user's modules may raise anything
            return (
                f"{socket.gethostname()} cannot load the run's code: {type(e).__name__}: {_one_line(e)}; install on "
                "every machine what your models and tasks import"
            )
        TASKS.update({t.name: t for t in luggage.tasks})
        TRICKS["cpu"].set_allocator()
        torch.set_num_threads(luggage.threads)
        self.host, self.place = luggage.host, luggage.compute.place()
        return {"machine": socket.gethostname(), "pid": os.getpid(), "fingerprint": fingerprint(self.place.portable)}

    def serve(self, call: Call, number: int, box: list[Any], state: Any) -> tuple[Reply, Any, Any]:
        """One call without its message, which is in the store: in `box`, so that it is fetched only if it is new."""
        import ray

        if call.step != self.step:
            self.held, self.step = {}, call.step
        if number not in self.held:
            self.held[number] = Received(ray.get(box[0]), call.task)
            for old in list(self.held)[:-KEEP_MESSAGES]:
                del self.held[old]
        states = Carried(None if state is None else bytes(state))
        reply = serve(dataclasses.replace(call, message=self.held[number]), self.host, states, self.place)
        body = _as_array(reply.message.blob) if isinstance(reply.message, Packed) else None
        return dataclasses.replace(reply, message=b""), body, _as_array(states.left) if states.left else None


def _as_array(content: bytes) -> Any:
    """Bytes in the form that Ray moves with one copy."""
    return np.frombuffer(content, dtype=np.uint8)


# ---- the engine -------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Seat:
    """The server's end of one worker."""

    number: int
    actor: Any
    ready: bool = False
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exchange: Exchange | None = None  # what it is busy with
    position: int = 0
    call: Call | None = None
    ends: float | None = None  # the deadline of its call
    gone: bool = False  # replaced: what still comes from it is ignored

    @property
    def idle(self) -> bool:
        return self.ready and self.call is None

    @property
    def machine(self) -> str:
        return str(self.about.get("machine", "an unknown machine"))


class _Messages:
    """The messages of calls that are under way or still to come, in Ray's store: each is put there once."""

    def __init__(self) -> None:
        self._there: dict[int, list[Any]] = {}  # by identity: a number of its own, its address, calls that need it
        self._count = 0

    def expect(self, calls: Sequence[Call]) -> None:
        """These calls will come."""
        for call in calls:
            if id(call.message) not in self._there:
                self._count += 1
                self._there[id(call.message)] = [self._count, None, 0]
            self._there[id(call.message)][2] += 1

    def sent_with(self, call: Call) -> tuple[int, list[Any]]:
        """The number of the call's message, and a box with its address."""
        import ray

        entry = self._there[id(call.message)]
        if entry[1] is None:
            entry[1] = ray.put(call.message.blob)
        return entry[0], [entry[1]]

    def over(self, call: Call) -> None:
        """A call is answered: a message that no other needs leaves the store."""
        entry = self._there[id(call.message)]
        entry[2] -= 1
        if not entry[2]:
            del self._there[id(call.message)]


class Ray:
    """Workers of a Ray cluster. `need` is what each asks of it; `disconnect` ends the connection."""

    def __init__(
        self,
        host: Host,
        states: ClientStates,
        workers: int,
        need: Resources,
        compute: Compute,
        threads: int,
        disconnect: Callable[[], None],
    ):
        import ray

        self.host, self.states, self.count = host, states, check_workers(workers)
        self._disconnect, self._failed = disconnect, dict.fromkeys(range(workers), 0)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._backlog, self._messages, self._said = Backlog(), _Messages(), time.monotonic()
        self._closing, self._broken = False, ""
        own = [t for t in TASKS.values() if t.fn.__module__ == "__main__"]
        on_worker = dataclasses.replace(compute, devices=(compute.kind if compute.on_cpu else f"{compute.kind}:0",))
        self._baggage = _put(Baggage(host, own, on_worker, threads))
        self._begin = versions(), [p for p in sys.path if p], modules_of_tasks(), files_of_code()
        extra = {r: n for r, n in need.items() if r not in ("CPU", "GPU")}
        self._portable = compute.portable
        env = {"env_vars": PORTABLE} if compute.portable else {}
        self._actor = ray.remote(num_cpus=need["CPU"], num_gpus=need.get("GPU", 0), resources=extra, runtime_env=env)(
            Worker
        )
        self._seats = {number: self._start(number) for number in range(workers)}
        try:
            self._await_workers()
        except BaseException:
            self._end_workers()
            raise
        self._thread = threading.Thread(target=self._dispatch, name=f"{OURS}-ray", daemon=True)
        self._thread.start()

    @property
    def roster(self) -> Roster:
        return self.host.roster

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        """Workers begin at once, whether or not replies are being collected."""
        exchange = Exchange(calls)

        def add() -> None:
            self._messages.expect(calls)
            self._backlog.append(exchange)

        self._events.put(add)
        return lambda: (self._next(exchange) for _ in calls)

    def _next(self, exchange: Exchange) -> Reply:
        while True:
            try:
                return exchange.replies.get(timeout=LOOK_S)
            except queue.Empty:
                check_stop()
                if not self._thread.is_alive():
                    raise SoleraError(f"the workers of Ray broke down ({self._broken}); resume the run") from None

    def close(self) -> None:
        """End the workers, and Ray if this run has started it."""
        if not self._closing:
            self._closing = True
            self._events.put(lambda: None)
            self._thread.join()
            self._end_workers()
            self._disconnect()

    def _end_workers(self) -> None:
        for seat in self._seats.values():
            self._end(seat)
        self._baggage = None

    # -- workers --

    def _start(self, number: int) -> _Seat:
        """A new worker. It tells by an event that it is ready, or why it is not."""
        seat = _Seat(number, self._actor.remote())
        self._when_done(seat, seat.actor.begin.remote(*self._begin, [self._baggage]), self._began)
        return seat

    def _when_done(self, seat: _Seat, reference: Any, then: Callable[[_Seat, Future], None]) -> None:
        def happened(done: Future) -> None:
            if not seat.gone:
                then(seat, done)

        reference.future().add_done_callback(lambda done: self._events.put(lambda: happened(done)))

    def _end(self, seat: _Seat) -> None:
        import ray

        seat.gone = True
        with contextlib.suppress(Exception):  # a worker that is dead already, or a cluster that is gone
            ray.kill(seat.actor)

    def _await_workers(self) -> None:
        """Wait until all workers are there, or as many as come in time."""
        end = time.monotonic() + START_S
        while not all(seat.ready for seat in self._seats.values()):
            check_stop()
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=LOOK_S)()
            if time.monotonic() > end:
                there = sum(seat.ready for seat in self._seats.values())
                if not there:
                    raise ConfigError(
                        f"engine.name = 'ray': no worker started within {START_S:g} s; is the cluster busy with "
                        "other work? (`ray status`)"
                    )
                log.warning("%d of %d workers are there; the others join as the cluster has room", there, self.count)
                return

    def _began(self, seat: _Seat, done: Future) -> None:
        """A worker is ready; if it is not and never will be, the run ends here."""
        error = done.exception()
        told = f"a worker did not start: {_one_line(error)}" if error is not None else done.result()
        if isinstance(told, str):
            self._failed[seat.number] += 1
            if error is None or self._failed[seat.number] >= ATTEMPTS:
                raise ConfigError(f"engine.name = 'ray': {told}")
            self._replace(seat)
            return
        self._failed[seat.number] = 0
        seat.ready, seat.about = True, told
        if told["fingerprint"] != (ours := fingerprint(self._portable)):
            log.warning(
                "%s computes other bits than this machine (fingerprint %s there, %s here): a repeated run has the same "
                "bits only on the same machines", seat.machine, told["fingerprint"], ours,
            )  # fmt: skip

    def _replace(self, seat: _Seat) -> None:
        self._end(seat)
        self._seats[seat.number] = self._start(seat.number)

    # -- the dispatcher thread: hands calls to idle workers, replies to the collectors --

    def _dispatch(self) -> None:
        try:
            while not self._closing:
                for seat in list(self._seats.values()):
                    while seat.idle and (exchange := self._backlog.startable()):
                        self._give(seat, exchange)
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=self._patience())()
                now = time.monotonic()
                for seat in [s for s in self._seats.values() if s.ends is not None and now > s.ends]:
                    assert seat.call is not None
                    self._lost(seat, f"no reply within the deadline of {seat.call.deadline_s:g} s")
                if self._backlog and not any(seat.ready for seat in self._seats.values()):
                    self._say_nobody_is_there(now)
        except Exception as e:  # `_next` tells the collector
            self._broken = _one_line(e)

    def _patience(self) -> float:
        """Seconds until the next deadline."""
        ends = [s.ends for s in self._seats.values() if s.ends is not None]
        return min(max(0.0, min(ends, default=SAY_AGAIN_S + time.monotonic()) - time.monotonic()), SAY_AGAIN_S)

    def _say_nobody_is_there(self, now: float) -> None:
        if now - self._said >= SAY_AGAIN_S:
            self._said = now
            log.warning("no worker is there: waiting for the cluster (`ray status`); Ctrl-C stops the run")

    def _give(self, seat: _Seat, exchange: Exchange) -> None:
        """Hand the next call of an exchange to an idle worker."""
        seat.position, call = exchange.next()
        try:
            state = None if call.after is None else _as_array(self.states.content(call.client, call.after))
        except StateError as e:
            self._messages.over(call)
            exchange.answer(seat.position, Reply(call.client, error=str(e), fatal="run"))
            return
        seat.call, seat.exchange = call, exchange
        if call.deadline_s is not None:
            seat.ends = time.monotonic() + call.deadline_s * 1.05 + GRACE_S
        number, box = self._messages.sent_with(call)
        light = dataclasses.replace(call, message=NOTHING)
        self._when_done(seat, seat.actor.serve.remote(light, number, box, state), self._answered)

    def _answered(self, seat: _Seat, done: Future) -> None:
        """A call is over, one way or the other."""
        import ray

        call, error = seat.call, done.exception()
        assert call is not None
        if isinstance(error, ray.exceptions.RayTaskError):  # the worker goes on
            self._answer(seat, Reply(call.client, error=f"its worker on {seat.machine} failed: {_one_line(error)}"))
        elif error is not None:
            log.debug("worker %d on %s: %s", seat.number, seat.machine, error)
            self._lost(seat, f"its process died (worker {seat.number} on {seat.machine})")
        else:
            reply, body, left = done.result()
            try:
                if left is not None and reply.version is not None:
                    self.states.store(call.client, reply.version, bytes(left), call.keep, call.keep_from)
                if body is not None:
                    reply = dataclasses.replace(reply, message=bytes(body))
            except StateError as e:
                reply = Reply(call.client, error=str(e), fatal="run")
            self._answer(seat, reply)

    def _lost(self, seat: _Seat, why: str) -> None:
        """A worker is dead, or has to be: its client is dropped from the exchange, and another worker starts."""
        assert seat.call is not None
        self._answer(seat, Reply(seat.call.client, error=why))
        self._replace(seat)

    def _answer(self, seat: _Seat, reply: Reply) -> None:
        assert seat.exchange is not None
        assert seat.call is not None
        self._messages.over(seat.call)
        seat.exchange.answer(seat.position, reply)
        seat.call = seat.exchange = seat.ends = None


NOTHING = Packed(None)  # in place of a message that travels by itself
