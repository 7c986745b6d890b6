"""Clients in worker processes: real parallelism, dropout that repeats, and a crash that costs one client.

The data is shared, not copied: workers are forked from a small process that holds the host (client data and model
templates) and nothing else, so its pages are common to all and a user's own objects need not be pickled. Messages
are the bytes of `wire`, each sent once to a worker however many clients need it, through memory both can see. A
worker that dies or overstays its deadline is replaced.
"""

import contextlib
import ctypes
import errno
import itertools
import json
import logging
import os
import pathlib
import queue
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..core.calls import SHA256, Call, Host, Reply, Roster, Version
from ..core.errors import SoleraError
from ..core.randomness import OURS, fingerprint, one_thread
from ..core.wire import Limits, Packed
from ..place.devices import Compute
from ..place.placement import Placement
from .base import Backlog, Exchange, check_workers
from .serve import KEEP_MESSAGES, Received, serve
from .states import ClientStates

HEADER_LIMIT = 1 << 20
BEHIND = 3  # how nice workers are: where the server works beside them, all wait for it in the end
PATIENCE_S = 5.0  # with a system that gives no new thread or process just now
QUIET_S = 10.0  # until a process that was forked must have said that it works
ATTEMPTS = 3  # at forking while no other thread holds a lock
LOOK_S = 0.3  # how often the fork server looks whether the server is still there
NO_PROCESS = -1  # in place of a process id
log = logging.getLogger("solera")
T = TypeVar("T")
PIECE = 1 << 30  # bytes read at a time: the system gives no more than two of these at once


class Processes:
    """A pool of forked workers, one torch thread each."""

    def __init__(
        self,
        host: Host,
        states: ClientStates,
        workers: int = 2,
        compute: Compute | None = None,
        limits: Limits | None = None,
    ):
        self.host, self.states, self.limits = host, states, limits or Limits()
        self.count = check_workers(workers)
        self._fork_server = _ForkServer(host, states, compute or Compute())
        self._backlog = Backlog()
        self._wake_r, self._wake_w = socket.socketpair()
        self._closing, self._broken = False, ""
        self._thread = threading.Thread(target=self._dispatch, name=f"{OURS}-dispatch", daemon=True)
        try:
            _patiently(self._thread.start, RuntimeError)
        except RuntimeError as e:
            self._fork_server.close()
            raise SoleraError(f"the system gives no new thread ({e}): see `ulimit -u`; resume the run later") from None

    @property
    def roster(self) -> Roster:
        return self.host.roster

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        """Workers begin at once, whether or not replies are being collected."""
        exchange = Exchange(calls)
        self._backlog.append(exchange)
        self._wake_w.send(b"!")
        return lambda: (self._next(exchange.replies) for _ in calls)

    def _next(self, replies: "queue.SimpleQueue[Reply]") -> Reply:
        while True:
            try:
                return replies.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive():
                    raise SoleraError(f"the worker processes broke down ({self._broken}); resume the run") from None

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._wake_w.send(b"!")
            self._thread.join()
            self._fork_server.close()
            self._wake_r.close()
            self._wake_w.close()

    # -- the dispatcher thread: hands calls to idle workers, replies to the collectors --

    def _dispatch(self) -> None:
        idle: list[_Worker] = []
        busy: dict[socket.socket, _Worker] = {}
        try:
            self._serve(idle, busy)
        except Exception as e:  # no fork server, no memory: `_next` tells the collector
            self._broken = str(e) if isinstance(e, SoleraError) else f"{type(e).__name__}: {e}"
        finally:
            for worker in busy.values():
                worker.kill()
            for worker in idle:
                worker.close()

    def _serve(self, idle: "list[_Worker]", busy: "dict[socket.socket, _Worker]") -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._wake_r, selectors.EVENT_READ)
            while not self._closing:
                while (idle or len(busy) < self.count) and (exchange := self._backlog.startable()) is not None:
                    worker = idle.pop() if idle else self._fork_server.worker(_free_number(busy.values()))
                    if worker is None:
                        self._go_on_with(len(busy))
                        break
                    worker.give(exchange)
                    busy[worker.socket] = worker
                    ready.register(worker.socket, selectors.EVENT_READ, worker)
                for key, _ in ready.select(self._patience(busy)):
                    if key.fileobj is self._wake_r:
                        self._wake_r.recv(4096)
                        continue
                    worker = busy.pop(key.data.socket)
                    ready.unregister(worker.socket)
                    if worker.take(self.limits):
                        idle.append(worker)
                for worker in [w for w in busy.values() if w.overdue()]:
                    del busy[worker.socket]
                    ready.unregister(worker.socket)
                    worker.dismiss()

    def _go_on_with(self, workers: int) -> None:
        """The system gives no more processes."""
        if not workers:
            raise SoleraError("the system gives no new process: see `ulimit -u`")
        log.warning("the system gives no more than %d worker processes now (`ulimit -u`): going on with them", workers)
        self.count = workers

    def _patience(self, busy: dict[socket.socket, "_Worker"]) -> float | None:
        ends = [w.deadline for w in busy.values() if w.deadline is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None


class _Worker:
    """The server's end of one worker process. Its number says which device it has."""

    def __init__(self, sock: socket.socket, buffer: int, pid: int, number: int):
        self.socket, self.buffer, self.pid, self.number = sock, buffer, pid, number
        self.known: list[Packed] = []  # messages this worker still holds, all of one exchange
        self.call: Call | None = None
        self.exchange: Exchange | None = None
        self.position = 0  # of its call in the exchange
        self.deadline: float | None = None

    def give(self, exchange: Exchange) -> None:
        """Hand over the next call of an exchange."""
        self.position, call = exchange.next()
        # A little grace: a client that is merely at its deadline is told so by its own clock.
        patience = None if call.deadline_s is None else call.deadline_s * 1.05 + 0.05
        self.deadline = None if patience is None else time.monotonic() + patience
        self.socket.settimeout(patience)  # a worker that neither reads nor writes must not hold up the others
        if self.call is None or self.call.step != call.step:
            self.known = []
        self.call, self.exchange = call, exchange
        if known := any(m is call.message for m in self.known):
            blob = b""
        else:
            blob = call.message.blob
            self.known = [*self.known, call.message][-KEEP_MESSAGES:]
        facts = {
            "client": call.client,
            "task": call.task,
            "step": call.step,
            "seed": call.seed,
            "run_seed": call.run_seed,
            "after": call.after,
            "keep": call.keep,
            "keep_from": call.keep_from,
            "deadline_s": call.deadline_s,
            "message": id(call.message),
            "known": known,
        }
        with contextlib.suppress(ConnectionError, TimeoutError):  # a dead worker shows when its reply is read
            _send(self.socket, self.buffer, facts, blob)

    def take(self, limits: Limits) -> bool:
        """Read the reply and pass it on; False if the worker is no longer usable."""
        assert self.call is not None
        try:
            facts, blob = _receive(self.socket, self.buffer, limits.bytes)
            if "ended" in facts:
                self.kill()
                self._answer(Reply(self.call.client, error=str(facts["ended"])))
                return False
            version, error, fatal = _version(facts["version"]), facts["error"], facts["fatal"]
            if fatal not in ("", "task", "run"):
                raise ValueError(f"fatal = {str(fatal)[:20]!r}")
            reply = Reply(self.call.client, blob, version, error, float(facts["seconds"]), fatal)
        except (EOFError, ConnectionError):
            self.close()  # there is nothing to kill, and its number may be another process's by now
            self._answer(Reply(self.call.client, error="its process died"))
            return False
        except Exception as e:  # whatever it sent, it is this client's loss
            self.kill()
            self._answer(Reply(self.call.client, error=f"its process sent half a reply, or nonsense: {e}"))
            return False
        self._answer(reply)
        return True

    def _answer(self, reply: Reply) -> None:
        assert self.exchange is not None
        self.exchange.answer(self.position, reply)

    def overdue(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def dismiss(self) -> None:
        """The deadline has passed: end the worker, its client is dropped from the exchange."""
        assert self.call is not None
        self.kill()
        self._answer(Reply(self.call.client, error=f"no reply within the deadline of {self.call.deadline_s} s"))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.socket.close()
        os.close(self.buffer)


def _free_number(others: Iterable[_Worker]) -> int:
    """The lowest number that none of the other workers has."""
    taken = {w.number for w in others}
    return next(n for n in itertools.count() if n not in taken)


def _let_threads_end(most_s: float = 1.0) -> None:
    """Wait until the number of threads stands still.

    A thread whose work is over still gives its buffers back, under a lock of the matrix library. A process forked in
    that moment would find the lock taken for ever, by a thread that it does not have.
    """
    end, seen = time.monotonic() + most_s, [0]
    while seen[-1] != 1 and seen[-3:] != [seen[-1]] * 3 and time.monotonic() < end:
        time.sleep(0.005 if seen[-1] else 0)
        seen.append(len(os.listdir("/proc/self/task")))


class _ForkServer:
    """A process forked early, while this one is still quiet; it forks the workers.

    Forking from a process whose other threads hold locks is asking for a deadlock, and a worker may have to be
    replaced in the middle of a round, when the server has many threads.
    """

    def __init__(self, host: Host, states: ClientStates, compute: Compute):
        for _ in range(ATTEMPTS):
            self.control, far = socket.socketpair()
            _let_threads_end()
            parent = os.getpid()
            self.pid = _fork()
            if self.pid == 0:
                try:
                    self.control.close()
                    _fork_workers(far, host, states, compute, parent)
                finally:
                    os._exit(0)
            far.close()
            if self._works():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.close()
        raise SoleraError(
            "worker processes cannot be forked from this program: another thread of it holds a lock of torch or numpy "
            "each time (drawing random numbers?); stop that thread while the run starts, start the run in a process of "
            "its own (solera run), or set engine.name = 'threads'"
        )

    def _works(self) -> bool:
        """Whether it can do what tasks do: one that was forked while another thread held a lock waits for ever."""
        self.control.settimeout(QUIET_S)
        try:
            return _exactly(self.control, 1) == b"!"
        except (TimeoutError, EOFError):
            return False
        finally:
            self.control.settimeout(None)

    def worker(self, number: int) -> _Worker | None:
        """A new worker with this number; None if the system gives no process."""
        near, far = socket.socketpair()
        buffer = _shared_buffer()
        socket.send_fds(self.control, [struct.pack("<H", number)], [far.fileno(), buffer])
        far.close()
        (pid,) = struct.unpack("<q", _exactly(self.control, 8))
        if pid == NO_PROCESS:
            near.close()
            os.close(buffer)
            return None
        return _Worker(near, buffer, pid, number)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.control.send(b"q")  # said, not just closed: a process forked meanwhile may hold this socket too
        self.control.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _fork_workers(control: socket.socket, host: Host, states: ClientStates, compute: Compute, parent: int) -> None:
    """The fork server: forks a worker for every socket that arrives, until the server says that it ends or is gone.

    Then the workers go with it, at once: one that finished its task later would write into a run that has been
    resumed in the meantime.
    """
    os.setpgid(0, 0)
    os.nice(BEHIND)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps dead workers
    one_thread()
    fingerprint()  # takes the locks of the generators, if they can be had
    control.sendall(b"!")
    try:
        while asked := _next_request(control, parent):
            number, (handle, buffer) = asked
            sock = socket.socket(fileno=handle)
            try:
                pid = _fork()
            except OSError:
                pid = NO_PROCESS
            if pid == 0:
                try:
                    _die_with_parent()
                    control.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a task may wait for processes of its own
                    _work(sock, buffer, host, states, compute.place(number))
                finally:
                    os._exit(0)
            sock.close()
            os.close(buffer)
            control.sendall(struct.pack("<q", pid))
    finally:
        os.killpg(0, signal.SIGKILL)


def _next_request(control: socket.socket, parent: int) -> tuple[int, list[int]] | None:
    """The number of a new worker and its handles; none if the server wants no more, or is gone.

    Its end of the socket may outlive it, in a process that it forked: so its number is looked at, too.
    """
    while os.getppid() == parent:
        control.settimeout(LOOK_S)
        try:
            said, handles, _, _ = socket.recv_fds(control, 2, 2)
            return (struct.unpack("<H", said)[0], handles) if handles else None
        except TimeoutError:
            continue
        finally:
            control.settimeout(None)
    return None


def _die_with_parent() -> None:
    """Have the kernel end this process with the thread that forked it; a fork server has but one."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # found here: not in the middle of a fork


def _fork() -> int:
    return _patiently(os.fork, BlockingIOError)


def _patiently(start: Callable[[], T], refused: type[Exception]) -> T:
    """Start a thread or a process; a system that gives none just now is asked again for a while."""
    end, pause = time.monotonic() + PATIENCE_S, 0.01
    while True:
        try:
            return start()
        except refused:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause *= 2


def _work(sock: socket.socket, buffer: int, host: Host, states: ClientStates, place: Placement) -> None:
    """A worker: serves one call after another, until the server closes its end."""
    try:
        _serve_calls(sock, buffer, host, states, place)
    except (EOFError, OSError):
        pass  # the server is gone
    except Exception as e:  # `serve` reports the errors of a task; this one is of what is around it
        where = traceback.extract_tb(e.__traceback__)[-1]
        place_of = f"{pathlib.Path(where.filename).name}:{where.lineno}"
        with contextlib.suppress(OSError):
            _send(sock, buffer, {"ended": f"its process ended with {type(e).__name__}: {e} ({place_of})"}, b"")


def _serve_calls(sock: socket.socket, buffer: int, host: Host, states: ClientStates, place: Placement) -> None:
    held: dict[int, Packed] = {}
    step = -1
    while True:
        facts, blob = _receive(sock, buffer, Limits().bytes)
        if facts["step"] != step:
            held, step = {}, facts["step"]
        if not facts["known"]:
            held.pop(facts["message"], None)
            held[facts["message"]] = Received(blob, facts["task"])
            for old in list(held)[:-KEEP_MESSAGES]:
                del held[old]
        message = held[facts["message"]]
        call = Call(
            facts["client"],
            facts["task"],
            facts["step"],
            facts["seed"],
            facts["run_seed"],
            message,
            _version(facts["after"]),
            tuple(Version(*v) for v in facts["keep"]),
            facts["keep_from"],
            facts["deadline_s"],
        )
        reply = serve(call, host, states, place)
        body = reply.message.blob if isinstance(reply.message, Packed) else b""
        told: dict[str, Any] = {
            "version": reply.version,
            "error": reply.error,
            "fatal": reply.fatal,
            "seconds": reply.seconds,
        }
        try:
            _send(sock, buffer, told, body)
        except _BufferFull as e:  # not this client's fault, and on another machine it would have answered
            _send(sock, buffer, told | {"error": str(e), "fatal": "run"}, b"")


def _version(told: list[Any] | None) -> Version | None:
    """A version as it comes out of JSON; ValueError if it is none."""
    if told is None:
        return None
    step, sha256 = told
    if type(step) is not int or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        raise ValueError(f"version {str(told)[:80]}")
    return Version(step, sha256)


# ---- framing: two lengths and JSON facts through the socket, the bytes of the message in the shared buffer --------


def _shared_buffer() -> int:
    """A file in memory that a worker and the server share: who has something for the other puts it there and says so.

    Their turns alternate, so one place serves both ways. A message of megabytes would go through a socket in small
    pieces, with the two waiting for each other.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("solera")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _BufferFull(SoleraError):
    """The system does not let a file in memory grow to the size of a message."""


def _send(sock: socket.socket, buffer: int, facts: dict[str, Any], blob: bytes) -> None:
    head = json.dumps(facts).encode()
    done = 0
    try:
        while done < len(blob):
            done += os.pwrite(buffer, memoryview(blob)[done:], done)
    except OSError as e:
        limit = "; `ulimit -f` limits it" if e.errno == errno.EFBIG else ""
        raise _BufferFull(f"a message of {len(blob)} bytes cannot be passed on: {e.strerror}{limit}") from None
    sock.sendall(struct.pack("<QQ", len(head), len(blob)) + head)


def _receive(sock: socket.socket, buffer: int, limit: int) -> tuple[dict[str, Any], bytes]:
    head, body = struct.unpack("<QQ", _exactly(sock, 16))
    if head > HEADER_LIMIT or body > limit:
        raise ValueError(f"a message of {body} bytes with {head} bytes of facts is over the limit")
    facts = json.loads(_exactly(sock, head))
    pieces, got = [], 0
    while got < body:
        pieces.append(os.pread(buffer, min(body - got, PIECE), got))
        if not pieces[-1]:
            raise ValueError(f"{body} bytes were announced, {got} are there")
        got += len(pieces[-1])
    return facts, b"".join(pieces)


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = bytearray(n)
    view, got = memoryview(data), 0
    while got < n:
        k = sock.recv_into(view[got:])
        if k == 0:
            raise EOFError
        got += k
    return bytes(data)
