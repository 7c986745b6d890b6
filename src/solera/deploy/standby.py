"""A site's process that has loaded Flower, torch, Solera and the site, and splits off a new process for each message.

Flower starts a program for every message, and a new Python with torch takes seconds of a core to get ready. Here it
starts a few lines (`handover.py`) that ask this process for a copy of itself. The copy does what the program would have
done, with the program's arguments, environment and output, behind the same gate, and ends. So every message still has a
process of its own, which nothing outlives. The site's files, code, data and model are read once, before the first
message (`site.keep_site`). When any of them has changed, this process starts itself anew before the next message.

Linux only, like everything here that forks. Nothing listens on a network: the socket is a file in the site's folder,
which only its owner can enter.
"""

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.flower_inside import GATED
from .gate import main as behind_the_gate
from .handover import SOCKET
from .programs import FOLDER, die_with_parent

PROGRAM = "flwr-clientapp"
LOAD = ("solera.deploy.site", "solera.deploy.clientapp", *GATED[PROGRAM][:2])
MOST_BYTES = 1 << 22  # of a request: arguments and environment
AGAIN = ("-m", "solera.deploy.standby")  # what this process is, for starting it anew
LOOK_S = 0.05  # how often it is seen that a copy has ended


class Standby:
    """Answers requests at a socket in `folder`, one copy each. `listener`: the socket, where it is open already."""

    def __init__(self, folder: Path, listener: int | None = None):
        self.folder = folder
        os.chdir(folder)  # the path of a socket must be short
        self.listener = socket.socket(socket.AF_UNIX, fileno=listener)
        if listener is None:
            Path(SOCKET).unlink(missing_ok=True)
            self.listener.bind(SOCKET)
            os.chmod(SOCKET, 0o600)
            self.listener.listen()
        os.set_inheritable(self.listener.fileno(), False)
        self.changed: Callable[[], bool] = lambda: False  # whether what the copies begin with is out of date
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(self.listener, selectors.EVENT_READ)
        self.copies: dict[int, socket.socket] = {}  # by process

    def run(self) -> None:
        """Serve until killed."""
        while True:
            for key, _ in self.waiting.select(LOOK_S if self.copies else None):
                if key.fileobj is not self.listener:
                    self.abandon(key.data)
                elif not self.changed():
                    self.begin(self.listener.accept()[0])
                elif not self.copies:
                    self.start_anew()
                else:  # the request waits until the others are done
                    time.sleep(LOOK_S)
            self.collect()

    def start_anew(self) -> None:
        """Become a new process that listens at the same socket, where the request waits."""
        print("the site has changed: starting anew", flush=True)
        os.set_inheritable(self.listener.fileno(), True)
        os.chdir(os.environ[FOLDER])
        os.execv(sys.executable, [sys.executable, *AGAIN, str(self.folder), str(self.listener.fileno())])  # noqa: S606

    def begin(self, connection: socket.socket) -> None:
        """Read a request and split off a copy that does it."""
        connection.settimeout(10.0)
        fds: list[int] = []
        try:
            size, fds, _, _ = socket.recv_fds(connection, 4, 3)
            request = _read(connection, int.from_bytes(size, "big"))
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                self.listener.close()
                _become(request, fds)
        except (OSError, ValueError) as e:
            print(f"a request is refused: {e}", flush=True)
            connection.close()
            return
        finally:
            for fd in fds:
                os.close(fd)
        self.copies[pid] = connection
        self.waiting.register(connection, selectors.EVENT_READ, pid)

    def abandon(self, pid: int) -> None:
        """The caller has disconnected: end its worker."""
        self.waiting.unregister(self.copies[pid])
        os.kill(pid, signal.SIGKILL)

    def collect(self) -> None:
        """Tell how copies have ended."""
        for pid in list(self.copies):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                connection = self.copies.pop(pid)
                if connection in self.waiting.get_map():
                    self.waiting.unregister(connection)
                    code = os.waitstatus_to_exitcode(status)
                    try:
                        connection.sendall(bytes([code if 0 <= code < 256 else 1]))
                    except OSError:
                        print(f"nobody waits for process {pid} any more", flush=True)
                connection.close()


def _read(connection: socket.socket, size: int) -> dict[str, Any]:
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"{size} bytes")
    content = b""
    while len(content) < size:
        if not (more := connection.recv(size - len(content))):
            raise ValueError("it ends in the middle")
        content += more
    return json.loads(content)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """In the copy: be the program that Flower meant to start. Does not return."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = request["argv"]
        behind_the_gate(PROGRAM)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)


def main(folder: str, listener: str | None = None) -> None:
    """Load everything, then wait for requests."""
    standby = Standby(Path(folder), None if listener is None else int(listener))  # early requests wait in line
    for name in LOAD:
        importlib.import_module(name)
    from .site import keep_site  # torch takes seconds to load

    standby.changed = keep_site(Path(os.environ[FOLDER]))
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the copies
    print("ready", flush=True)
    standby.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
