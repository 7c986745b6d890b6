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
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait as wait_for
from typing import Any

from ..core.calls import Call, Host, Reply
from ..core.errors import SoleraError
from ..core.randomness import fingerprint, one_thread
from ..core.wire import Limits, Packed
from ..place.devices import Compute
from ..place.placement import Placement
from .pool import Pool, Seat, patiently
from .serve import KEEP_MESSAGES, Held, serve
from .states import ClientStates

HEADER_LIMIT = 1 << 20
BEHIND = 3  # how nice workers are: where the server works beside them, all wait for it in the end
QUIET_S = 10.0  # until a process that was forked must have said that it works
ATTEMPTS = 3  # at forking while no other thread holds a lock
LOOK_S = 0.3  # how often the fork server looks whether the server is still there
NO_PROCESS = -1  # in place of a process id
log = logging.getLogger("solera")
PIECE = 1 << 30  # bytes read at a time: the system gives no more than two of these at once


class Processes(Pool):
    """Forked workers, one torch thread each."""

    def __init__(
        self,
        host: Host,
        states: ClientStates,
        workers: int = 2,
        compute: Compute | None = None,
        limits: Limits | None = None,
    ):
        super().__init__(host, workers)
        self.states, self.limits = states, limits or Limits()
        self._fork_server = _ForkServer(host, states, compute or Compute())
        self._wake_r, self._wake_w = socket.socketpair()
        self.begin()

    def hire(self) -> "_Worker | None":
        """Start a worker with the lowest free number, which determines its device."""
        number = next(n for n in itertools.count() if all(n != w.number for w in self.busy))
        worker = self._fork_server.worker(number)
        if worker is None:
            if not self.busy:
                raise SoleraError("the system gives no new process: see `ulimit -u`")
            self.count = len(self.busy)
            log.warning(
                "the system gives no more than %d worker processes now (`ulimit -u`): going on with them", self.count
            )
        return worker

    def give(self, seat: "_Worker") -> None:
        """Send the call through the buffer. A message that the worker still holds is not sent again."""
        call = seat.call
        assert call is not None
        # A worker that neither reads nor writes must not hold up the others.
        seat.socket.settimeout(None if seat.ends is None else max(0.001, seat.ends - time.monotonic()))
        if seat.step != call.step:
            seat.known, seat.step = [], call.step
        known = any(m is call.message for m in seat.known)
        if not known:
            seat.known = [*seat.known, call.message][-KEEP_MESSAGES:]
        facts = {**call.facts(), "message": id(call.message), "known": known}
        with contextlib.suppress(ConnectionError, TimeoutError):  # a dead worker shows when its reply is read
            _send(seat.socket, seat.buffer, facts, b"" if known else call.message.blob)

    def wait(self, seconds: float | None) -> "list[_Worker]":
        """The workers whose sockets can be read."""
        ready = wait_for([self._wake_r, *(w.socket for w in self.busy)], seconds)
        if self._wake_r in ready:
            self._wake_r.recv(4096)
        return [w for w in self.busy if w.socket in ready]

    def take(self, seat: "_Worker") -> Reply:
        """Its reply, or the way it ended."""
        assert seat.call is not None
        client = seat.call.client
        try:
            facts, blob = _receive(seat.socket, seat.buffer, self.limits.bytes)
            if "ended" not in facts:
                return Reply.of(facts, client, blob)
            error = str(facts["ended"])
        except (EOFError, ConnectionError):
            seat.close()  # there is nothing to kill, and its number may be another process's by now
            return Reply(client, error="its process died")
        except Exception as e:  # whatever it sent, it is this client's loss
            error = f"its process sent half a reply, or nonsense: {e}"
        self.kill(seat)
        return Reply(client, error=error)

    def kill(self, seat: "_Worker") -> None:
        """End it at once, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(seat.pid, signal.SIGKILL)
        seat.close()

    def wake(self) -> None:
        """End a wait by one more byte to read."""
        self._wake_w.send(b"!")

    def end(self) -> None:
        """End the fork server and with it its workers."""
        self._fork_server.close()
        for worker in (*self.idle, *self.busy):
            worker.close()
        self._wake_r.close()
        self._wake_w.close()


class _Worker(Seat):
    """The server's end of one worker process."""

    def __init__(self, sock: socket.socket, buffer: int, pid: int, number: int):
        super().__init__(number)
        self.socket, self.buffer, self.pid = sock, buffer, pid
        self.known: list[Packed] = []  # messages this worker still holds, all of one exchange
        self.step = -1  # of that exchange

    def close(self) -> None:
        self.gone = True
        self.socket.close()
        os.close(self.buffer)


def _let_threads_end(most_s: float = 1.0) -> None:
    """Wait until the number of threads is stable.

    A thread whose work is over still gives its buffers back, under a lock of the matrix library. A process forked in
    that moment would find the lock taken for good, by a thread that it does not have.
    """
    end, seen = time.monotonic() + most_s, [0]
    while seen[-1] != 1 and seen[-3:] != [seen[-1]] * 3 and time.monotonic() < end:
        time.sleep(0.005 if seen[-1] else 0)
        seen.append(len(os.listdir("/proc/self/task")))


class _ForkServer:
    """A process that is forked early, before other threads start; it forks the workers.

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
        """True if it can run tasks: a process that was forked while another thread held a lock may hang forever."""
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
    """The number of a new worker and its handles; None when the server ends.

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
    """Let the kernel end this process when the thread that forked it ends; a fork server has only one."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # found here: not in the middle of a fork


def _fork() -> int:
    return patiently(os.fork, BlockingIOError)


def _work(sock: socket.socket, buffer: int, host: Host, states: ClientStates, place: Placement) -> None:
    """Run a worker: serve calls until the server closes its end."""
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
    held = Held()
    while True:
        facts, blob = _receive(sock, buffer, Limits().bytes)
        if not facts["known"]:
            held.messages.pop(facts["message"], None)
        message = held.message(facts["message"], facts, lambda: blob)  # noqa: B023
        reply = serve(Call.of(facts, message), host, states, place)
        body = reply.message.blob if isinstance(reply.message, Packed) else b""
        told = reply.facts()
        try:
            _send(sock, buffer, told, body)
        except _BufferFull as e:  # not this client's fault, and on another machine it would have answered
            _send(sock, buffer, told | {"error": str(e), "fatal": "run"}, b"")


# ---- framing: two lengths and JSON facts through the socket, the bytes of the message in the shared buffer --------


def _shared_buffer() -> int:
    """A file in memory, shared by a worker and the server, for the bytes of messages.

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
