"""Clients in actors of Ray: on this machine, or on the machines of a cluster.

The host (client data and model templates) is put into Ray's object store, fetched once by every machine, and its large
tensors are shared by all workers there. A message is put into the store once for all calls that send it. Client state
travels with the call and back, so machines need no disk in common. An actor that dies or overstays its deadline costs
one client's reply, and Ray starts it again.

Ray listens on all interfaces of a machine and unpickles what it receives there: a program that reaches its ports can
run code. So it is for clusters whose network is trusted.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import platform
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from ray.util import deregister_serializer, register_serializer
from torch import Tensor

from ..core import __version__
from ..core.calls import Call, Host, Reply
from ..core.errors import PORTABLE, ConfigError, SoleraError, one_line
from ..core.plugins import files_of_code, take_over
from ..core.settings import show
from ..core.stopping import check_stop
from ..core.task import TASKS
from ..core.tensors import from_bytes, to_bytes
from ..core.wire import Packed
from ..place.devices import AUTO, CPU, FINDERS, Compute
from ..place.fingerprint import fingerprint
from ..place.placement import TRICKS
from .pool import LOOK_S, Pool, Seat, default_workers
from .serve import Held, serve
from .states import Carried, ClientStates, StateError

log = logging.getLogger("solera")
START_S = 120.0  # until the first worker must be there: importing torch on many workers of one machine takes its time
SOON_S = 0.02  # how often new calls are looked for while some workers are idle and others are not
SAY_AGAIN_S = 60.0  # how often it is said that no worker is there
LONGEST_FOLDER = 32  # Ray keeps sockets below it, and the system limits the length of their names


def connect(address: str, cpus: int) -> Callable[[], None]:
    """Connect to a cluster, or start Ray here. Returns a function that disconnects, unless it was connected before."""
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("", AUTO, here):
            raise ConfigError(
                f"engine.address = {show(address)}: this program is connected to the Ray cluster at {here}; leave "
                "engine.address out to use that one, or call ray.shutdown() first"
            )
        return lambda: None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray announces that this will be so one day
    given: dict[str, Any] = {"address": address}
    if not address:
        usual = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="solera-ray-", dir=usual if len(usual) < LONGEST_FOLDER else "/tmp")  # noqa: S108
        given = {"address": "local", "num_cpus": cpus, "include_dashboard": False, "_temp_dir": folder}
        given["_node_ip_address"] = "127.0.0.1"

    def disconnect() -> None:
        ray.shutdown()
        if not address:
            shutil.rmtree(folder, ignore_errors=True)

    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**given, log_to_driver=False, configure_logging=False)
    except BaseException as e:
        disconnect()
        if not isinstance(e, Exception):  # Ctrl-C; Ray raises whatever it likes, a plain Exception for a slow start
            raise
        if not address:
            raise SoleraError(f"Ray does not start on this machine: {one_line(e)}") from None
        raise ConfigError(f"engine.address = {show(address)}: Ray does not connect: {one_line(e)}") from None
    finally:
        for number, handler in handlers.items():  # Ray sets its own
            signal.signal(number, handler)
    return disconnect


def room(need: dict[str, float], workers: int) -> int:
    """The number of workers with these resources, `workers` or as many as fit; refused if the cluster is too small."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = sum(min(int(machine.get(r, 0) / n + 1e-6) for r, n in need.items()) for machine in machines)
    if most < max(workers, 1):
        each = ", ".join(f"{n:g} {r}" for r, n in need.items())
        raise ConfigError(
            f"engine.workers = {workers}: the cluster of {len(machines)} machine{'s' * (len(machines) > 1)} has room "
            f"for {most} workers with {each} each; lower it, or add machines (`ray status` lists them)"
        )
    return workers or most


def versions() -> dict[str, str]:
    """Versions that must be the same everywhere, for equal bits. The "+cpu" of a torch only says how it was built."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "solera": __version__,
    }


def environment(compute: Compute) -> dict[str, str]:
    """The environment of the workers: the folders of this program's own modules, and what must be there before torch
    is loaded. Ray replaces ${NAME} by the other machine's value."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = [p for p in sys.path if p and not p.startswith(installed)]
    return {
        "PYTHONPATH": os.pathsep.join([*own, "${PYTHONPATH}"]),
        **(PORTABLE if compute.portable else {}),
        **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if compute.kind == "cuda" and compute.deterministic else {}),
    }


def luggage(host: Host, compute: Compute, threads: int) -> tuple[Any, ...]:
    """The arguments of a worker: versions, code, and the address of the data in Ray's store."""
    tasks = [t for t in TASKS.values() if t.fn.__module__ == "__main__"]  # no other process can import them
    modules = sorted({t.fn.__module__ for t in TASKS.values()} - {"__main__"})
    register_serializer(Tensor, serializer=to_bytes, deserializer=from_bytes)
    try:
        return versions(), modules, files_of_code(), [ray.put((host, tasks, compute, threads))]
    except (TypeError, AttributeError, RuntimeError) as e:  # what Ray and models raise for what cannot be serialised
        raise ConfigError(
            f"engine.name = 'ray': the clients' data and models cannot be sent to its workers: "
            f"{one_line(e.__cause__ or e)}; see docs/howto/ray.md, or choose engine.name = 'processes'"
        ) from None
    finally:
        deregister_serializer(Tensor)


class Worker:
    """An actor: serves one call after another, in a process of its own. Ray restarts it after a crash."""

    def __init__(self, wanted: dict[str, str], modules: list[str], files: dict[str, bytes], box: list[Any]) -> None:
        self.held = Held()
        self.told = self._begin(wanted, modules, files, box)

    def about(self) -> Any:
        """Facts about this worker, or the reason why it cannot be one."""
        return self.told

    def _begin(self, wanted: dict[str, str], modules: list[str], files: dict[str, bytes], box: list[Any]) -> Any:
        """Prepare this worker. Nothing is unpacked before versions agree."""
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
            self.host, tasks, compute, threads = ray.get(box[0])
        except Exception as e:  # a user's modules may raise anything
            return (
                f"{here} cannot load the run's code: {type(e).__name__}: {one_line(e)}; install on every machine what "
                "your models and tasks import"
            )
        if not compute.on_cpu and compute.precision not in (device := FINDERS[compute.kind].look()[0]).precisions:
            has = ", ".join(device.precisions)
            return f"engine.precision = {show(compute.precision)}: {device.title} on {here} has {has}"
        TASKS.update({t.name: t for t in tasks})
        TRICKS["cpu"].set_allocator()
        torch.set_num_threads(threads)
        self.place = compute.place()
        return {"machine": here, "pid": os.getpid(), "fingerprint": fingerprint(self.place.portable)}

    def serve(self, facts: dict[str, Any], box: list[Any], state: Any) -> tuple[dict[str, Any], Any, Any]:
        """One call. Its message is in the store: `box` has its address, so that it is fetched only if it is new."""
        message = self.held.message(box[0].hex(), facts, lambda: ray.get(box[0]))
        states = Carried(None if state is None else bytes(state))  # arrays: Ray moves them with one copy
        reply = serve(Call.of(facts, message), self.host, states, self.place)
        body = np.frombuffer(reply.message.blob, np.uint8) if isinstance(reply.message, Packed) else None
        return reply.facts(), body, np.frombuffer(states.left, np.uint8) if states.left else None


class _Seat(Seat):
    """The server's end of one actor. `reference` is its current work: a call, or its start."""

    def __init__(self, number: int, actor: Any):
        super().__init__(number)
        self.actor, self.reference, self.about = actor, None, {"machine": "an unknown machine"}


class Ray(Pool):
    """Actors of a Ray cluster; `workers` = 0: as many as it has room for. `compute` is the server's."""

    GRACE_S = 1.0

    def __init__(self, host: Host, states: ClientStates, address: str, workers: int, threads: int, compute: Compute):
        self._seats: list[_Seat] = []
        self._disconnect = connect(address, (workers or compute.at_once or default_workers()) * threads)
        try:
            on_cpu = (compute.workers_on or compute.kind) == CPU
            there = dataclasses.replace(compute, devices=(CPU if on_cpu else "cuda:0",))
            gpu = {} if on_cpu else {"GPU": 1 / compute.per_device}
            super().__init__(host, room({"CPU": float(threads), **gpu}, workers))
            self.states, self._portable = states, compute.portable
            self._references: weakref.WeakKeyDictionary[Packed, Any] = weakref.WeakKeyDictionary()  # of messages
            self._news, self._said = threading.Event(), time.monotonic()
            self._luggage = luggage(host, there, threads)
            make = ray.remote(
                num_cpus=threads,
                num_gpus=gpu.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=-1,  # so a call waits for an actor that is restarting; `give` has none repeated
                runtime_env={"env_vars": environment(there)},
            )(Worker)
            self._seats = [_Seat(number, make.remote(*self._luggage)) for number in range(self.count)]
            for seat in self._seats:
                self.replace(seat)
            self._await_workers()
            self.begin()
        except BaseException:
            self.end()
            raise

    def _await_workers(self) -> None:
        """Wait until all workers are ready, or those that are ready in time."""
        end = time.monotonic() + START_S
        while self.busy and time.monotonic() < end:
            check_stop()
            self.listen(LOOK_S)
        if not self.idle:
            raise ConfigError(
                f"engine.name = 'ray': no worker started within {START_S:g} s; is the cluster busy with other work? "
                "(`ray status`)"
            )
        if self.busy:
            log.warning("%d of %d workers are there; the others join in as there is room", len(self.idle), self.count)

    def give(self, seat: _Seat) -> None:
        """Send the call. Its message is put into the store once for all calls that share it."""
        call = seat.call
        assert call is not None
        state = None if call.after is None else np.frombuffer(self.states.content(call.client, call.after), np.uint8)
        if (message := self._references.get(call.message)) is None:
            message = self._references[call.message] = ray.put(call.message.blob)
        seat.reference = seat.actor.serve.options(max_task_retries=0).remote(call.facts(), [message], state)

    def wait(self, seconds: float | None) -> list[_Seat]:
        """The workers that have finished their call or their start."""
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
        """The reply of an actor, or its facts after a start. A worker that can never work ends the run."""
        call, machine = seat.call, seat.about["machine"]
        try:
            told = ray.get(seat.reference)
        except Exception as e:  # Ray raises whatever it likes
            if call is None:
                raise ConfigError(f"engine.name = 'ray': a worker did not start: {one_line(e)}") from None
            if isinstance(e, ray.exceptions.RayTaskError):  # the worker goes on
                return Reply(call.client, error=f"its worker on {machine} failed: {one_line(e)}")
            seat.gone = True
            return Reply(call.client, error=f"its process died (worker {seat.number} on {machine})")
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
                "bits only on the same machines", told["machine"], told["fingerprint"], ours,
            )  # fmt: skip
        return None

    def kill(self, seat: _Seat) -> None:
        """End it; Ray restarts it."""
        with contextlib.suppress(Exception):  # it is dead already, or the cluster is gone
            ray.kill(seat.actor, no_restart=False)

    def replace(self, seat: _Seat) -> None:
        """Use the same actor again, once Ray has restarted it."""
        seat.gone, seat.reference = False, seat.actor.about.remote()
        self.busy.append(seat)

    def wake(self) -> None:
        """End a wait for calls; waits for workers are short."""
        self._news.set()

    def end(self) -> None:
        """End the workers, and Ray if this run has started it."""
        for seat in self._seats:
            with contextlib.suppress(Exception):  # a worker that is dead already, or a cluster that is gone
                ray.kill(seat.actor)
        self._seats, self._luggage = [], ()
        self._disconnect()
