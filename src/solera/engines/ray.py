"""Clients in actors of Ray: on this machine, or on the machines of a cluster.

The data reaches the workers once: the host (client data and model templates) is put into Ray's object store, fetched
once by every machine, and its large tensors are then shared by all workers there. A message is put into the store once
for all calls that send it. Client state stays in the run directory: it travels with the call, and what the client
leaves travels back, so machines need no disk in common. An actor that dies or overstays its deadline costs one client's
reply, and Ray starts it again.

Ray listens on all interfaces of a machine and unpickles what it receives there: a program that reaches its ports can
run code. So it is for clusters whose network is trusted.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..core.calls import Call, Engine, Host, Reply, Version
from ..core.errors import PORTABLE, ConfigError, SoleraError
from ..core.plugins import files_of_code, take_over
from ..core.settings import PositiveInt, Problem, settings, show
from ..core.stopping import check_stop
from ..core.task import TASKS, Task
from ..core.version import __version__
from ..core.wire import Packed
from ..place.devices import AUTO, FINDERS, Compute, Share, compute_of
from ..place.fingerprint import fingerprint
from ..place.placement import TRICKS, Precision
from .pool import LOOK_S, Pool, Seat, ThreadCount, WorkerCount, default_workers
from .serve import KEEP_MESSAGES, Received, serve
from .states import ClientStates, StateError

log = logging.getLogger("solera")
ANSWER_S = 5.0  # until an address must have answered
START_S = 120.0  # until the first worker must be there: importing torch on many workers of one machine takes its time
SOON_S = 0.02  # how often new calls are looked for while some workers are idle and others are not
SAY_AGAIN_S = 60.0  # how often it is said that no worker is there
LARGE = 1 << 16  # bytes from which on a tensor of the host is shared by the workers of a machine, not copied
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
    device: str = AUTO  # of all workers, and of the server if it has one: "cpu", "cuda"; auto: "cpu"
    per_device: PositiveInt = 1  # clients at once on one accelerator: a worker has that share of one
    precision: Precision = "float32"  # of products on an accelerator; bf16: mixed precision
    deterministic: bool = True  # on an accelerator: only algorithms that repeat their bits
    resident: Share = 0.5  # share of an accelerator's memory for data that stays there
    portable: bool = False  # the same bits on any x86 CPU with AVX2, at a price

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the address or the device."""
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
        """Refuse, before any work, what cannot be: no Ray here, no server at the address."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("engine.name = 'ray' needs the package ray: pip install 'solera[ray]'")
        if where := _endpoint(self.address):
            _greet(self.address, where)

    def open(self, host: Host, states: ClientStates) -> Engine:
        """Connect to the cluster, or start Ray here, and start the workers."""
        self.require()
        here = compute_of(self)
        cuda = self.device == "cuda"
        compute = dataclasses.replace(here, devices=("cuda:0" if cuda else "cpu",), precision=self.precision)
        need = {"CPU": float(self.threads), **({"GPU": 1 / self.per_device} if cuda else {})}
        disconnect = _connect(self.address, (self.workers or here.at_once or default_workers()) * self.threads)
        try:
            return Ray(host, states, _room(need, self.workers), need, compute, self.threads, disconnect)
        except BaseException:
            disconnect()
            raise


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
    """What must be the same everywhere: other versions may compute other bits. What follows a "+" in torch's is how it
    was built: with CUDA or without."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "solera": __version__,
    }


def environment(compute: Compute) -> dict[str, str]:
    """The environment of the workers: the folders of this program's own modules, and what must be there before torch
    is loaded. Ray puts the other machine's value in the place of ${NAME}."""
    installed = (sys.prefix, sys.base_prefix)
    own = [p for p in sys.path if p and not p.startswith(installed)]
    return {
        "PYTHONPATH": os.pathsep.join([*own, "${PYTHONPATH}"]),
        **(PORTABLE if compute.portable else {}),
        **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if compute.kind == "cuda" and compute.deterministic else {}),
    }


def modules_of_tasks() -> list[str]:
    """The modules that register the tasks of this process, but the program itself: a worker imports them."""
    return sorted({t.fn.__module__ for t in TASKS.values()} - {"__main__"})


def to_bytes(t: Tensor) -> Any:
    """A tensor as Ray passes it on without a copy: an array of bytes, and how to look at it.

    Ray's own way of passing tensors loses their strides, and the order in memory decides how kernels add up.
    """
    if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized or not t.numel():
        return t.__reduce_ex__(2)[:2]
    plain = t.detach()
    if _span(plain) > t.numel():  # with gaps: a part of something larger
        plain = plain.contiguous()
    array = plain.as_strided((_span(plain),), (1,)).view(torch.uint8).numpy()
    return array, t.dtype, tuple(t.shape), plain.stride(), t.requires_grad


def _span(t: Tensor) -> int:
    """The number of elements from a tensor's first place in memory to its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))


def from_bytes(told: Any) -> Tensor:
    """The tensor again. A large one looks at memory that the workers of a machine share: it is never written to."""
    if len(told) == 2:
        make, arguments = told
        return make(*arguments)
    array, dtype, shape, strides, requires_grad = told
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only
        t = torch.from_numpy(array).view(dtype).as_strided(shape, strides)
    return (t if array.nbytes >= LARGE else t.clone()).requires_grad_(requires_grad)


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
    """An actor: serves one call after another, in a process of its own. Ray makes it anew after a crash."""

    def __init__(self, wanted: dict[str, str], modules: list[str], files: dict[str, bytes], box: list[Any]) -> None:
        self.held: dict[str, Packed] = {}
        self.step = -1
        self.told = self._begin(wanted, modules, files, box)

    def about(self) -> Any:
        """What this worker is, or a text that says why it cannot be one."""
        return self.told

    def _begin(self, wanted: dict[str, str], modules: list[str], files: dict[str, bytes], box: list[Any]) -> Any:
        """Get ready. Nothing is unpacked before versions agree."""
        import ray

        here = socket.gethostname()
        if (mine := versions()) != wanted:
            what = next(name for name in wanted if mine[name] != wanted[name])
            return (
                f"{here} has {what} {mine[what]}, this machine {wanted[what]}: install the same versions on every "
                "machine of the cluster"
            )
        try:
            take_over(files)
            for name in modules:
                importlib.import_module(name)
            luggage: Baggage = ray.get(box[0])
        except Exception as e:  # a user's modules may raise anything
            return (
                f"{here} cannot load the run's code: {type(e).__name__}: {_one_line(e)}; install on every machine what "
                "your models and tasks import"
            )
        compute = luggage.compute
        for device in [] if compute.on_cpu else FINDERS[compute.kind].look()[:1]:
            if compute.precision not in device.precisions:
                has = ", ".join(device.precisions)
                return f"engine.precision = {show(compute.precision)}: {device.title} on {here} has {has}"
        TASKS.update({t.name: t for t in luggage.tasks})
        TRICKS["cpu"].set_allocator()
        torch.set_num_threads(luggage.threads)
        self.host, self.place = luggage.host, compute.place()
        return {"machine": here, "pid": os.getpid(), "fingerprint": fingerprint(self.place.portable)}

    def serve(self, facts: dict[str, Any], box: list[Any], state: Any) -> tuple[dict[str, Any], Any, Any]:
        """One call. Its message is in the store: `box` has its address, so that it is fetched only if it is new."""
        import ray

        if facts["step"] != self.step:
            self.held, self.step = {}, facts["step"]
        if (name := box[0].hex()) not in self.held:
            self.held[name] = Received(ray.get(box[0]), facts["task"])
            for old in list(self.held)[:-KEEP_MESSAGES]:
                del self.held[old]
        states = Carried(None if state is None else bytes(state))
        reply = serve(Call.of(facts, self.held[name]), self.host, states, self.place)
        body = _as_array(reply.message.blob) if isinstance(reply.message, Packed) else None
        return reply.facts(), body, _as_array(states.left) if states.left else None


def _as_array(content: bytes) -> Any:
    """Bytes in the form that Ray moves with one copy."""
    return np.frombuffer(content, dtype=np.uint8)


# ---- the engine -------------------------------------------------------------------------------------


class _Seat(Seat):
    """The server's end of one actor. `reference` is what it does now: a call, or getting ready."""

    def __init__(self, number: int, actor: Any):
        super().__init__(number)
        self.actor, self.reference, self.about = actor, None, dict[str, Any]()

    @property
    def machine(self) -> str:
        return str(self.about.get("machine", "an unknown machine"))


class Ray(Pool):
    """Actors of a Ray cluster. `need` is what each asks of it; `disconnect` ends the connection."""

    GRACE_S = 1.0

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

        super().__init__(host, workers)
        self.states, self._portable, self._disconnect = states, compute.portable, disconnect
        self._references: weakref.WeakKeyDictionary[Packed, Any] = weakref.WeakKeyDictionary()  # of messages
        self._news, self._said = threading.Event(), time.monotonic()
        own = [t for t in TASKS.values() if t.fn.__module__ == "__main__"]
        self._baggage = _put(Baggage(host, own, compute, threads))
        make = ray.remote(
            num_cpus=need["CPU"],
            num_gpus=need.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=-1,  # so a call waits for an actor that is restarting; `give` asks no call to be repeated
            runtime_env={"env_vars": environment(compute)},
        )(Worker)
        about = versions(), modules_of_tasks(), files_of_code(), [self._baggage]
        self._seats = [_Seat(number, make.remote(*about)) for number in range(workers)]
        try:
            for seat in self._seats:
                self.replace(seat)
            self._await_workers()
        except BaseException:
            self._end_workers()
            raise
        self.begin()

    def _await_workers(self) -> None:
        """Wait until all workers are there, or as many as come in time."""
        end = time.monotonic() + START_S
        while self.busy:
            check_stop()
            for seat in self.wait(LOOK_S):
                self.busy.remove(seat)
                self.take(seat)
                self.idle.append(seat)
            if self.busy and time.monotonic() > end:
                if not self.idle:
                    raise ConfigError(
                        f"engine.name = 'ray': no worker started within {START_S:g} s; is the cluster busy with "
                        "other work? (`ray status`)"
                    )
                there = len(self.idle)
                log.warning("%d of %d workers are there; the others join as the cluster has room", there, self.count)
                return

    def give(self, seat: _Seat) -> None:
        """The message goes into the store, once for all calls that send it."""
        import ray

        call = seat.call
        assert call is not None
        state = None if call.after is None else _as_array(self.states.content(call.client, call.after))
        if (message := self._references.get(call.message)) is None:
            message = self._references[call.message] = ray.put(call.message.blob)
        seat.reference = seat.actor.serve.options(max_task_retries=0).remote(call.facts(), [message], state)

    def wait(self, seconds: float | None) -> list[_Seat]:
        """Those that are through, or that are ready after a start."""
        import ray

        if not self.busy:
            self._news.wait(seconds)
            self._news.clear()
            return []
        none_there = self._backlog and not self.idle and all(s.call is None for s in self.busy)
        if none_there and time.monotonic() - self._said >= SAY_AGAIN_S:
            self._said = time.monotonic()
            log.warning("no worker is there: waiting for the cluster (`ray status`); Ctrl-C stops the run")
        most = SOON_S if self.idle else LOOK_S
        seats = {seat.reference: seat for seat in self.busy}
        done, _ = ray.wait(list(seats), timeout=most if seconds is None else min(seconds, most))
        return [seats[reference] for reference in done]

    def take(self, seat: _Seat) -> Reply | None:
        """The reply of an actor, or what it is after a start; a worker that will never be one ends the run."""
        import ray

        call = seat.call
        try:
            told = ray.get(seat.reference)
        except Exception as e:  # Ray raises whatever it likes
            if call is None:
                raise ConfigError(f"engine.name = 'ray': a worker did not start: {_one_line(e)}") from None
            if isinstance(e, ray.exceptions.RayTaskError):  # the worker goes on
                return Reply(call.client, error=f"its worker on {seat.machine} failed: {_one_line(e)}")
            log.debug("worker %d on %s: %s", seat.number, seat.machine, e)
            seat.gone = True
            return Reply(call.client, error=f"its process died (worker {seat.number} on {seat.machine})")
        if call is not None:
            facts, body, left = told
            reply = Reply.of(facts, call.client, b"" if body is None else bytes(body))
            try:
                if left is not None and reply.version is not None:
                    self.states.store(call.client, reply.version, bytes(left), call.keep, call.keep_from)
            except StateError as e:
                return Reply(call.client, error=str(e), fatal="run")
            return reply
        if isinstance(told, str):
            raise ConfigError(f"engine.name = 'ray': {told}")
        seat.about = told
        if told["fingerprint"] != (ours := fingerprint(self._portable)):
            log.warning(
                "%s computes other bits than this machine (fingerprint %s there, %s here): a repeated run has the same "
                "bits only on the same machines", seat.machine, told["fingerprint"], ours,
            )  # fmt: skip
        return None

    def kill(self, seat: _Seat) -> None:
        """Ray starts it again."""
        import ray

        with contextlib.suppress(Exception):  # it is dead already, or the cluster is gone
            ray.kill(seat.actor, no_restart=False)

    def replace(self, seat: _Seat) -> None:
        """The same actor, once Ray has started it."""
        seat.gone, seat.reference = False, seat.actor.about.remote()
        self.busy.append(seat)

    def wake(self) -> None:
        """End a wait for calls; one for workers is short."""
        self._news.set()

    def end(self) -> None:
        """End the workers, and Ray if this run has started it."""
        self._end_workers()
        self._disconnect()

    def _end_workers(self) -> None:
        import ray

        for seat in self._seats:
            with contextlib.suppress(Exception):  # a worker that is dead already, or a cluster that is gone
                ray.kill(seat.actor)
        self._baggage = None
