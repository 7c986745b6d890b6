"""A site's process that has loaded Flower, torch, Solera and the site, and forks a new process for each message.

Flower starts a program for every message, and a new Python with torch takes seconds of a core to get ready. Here it
starts a few lines (`handover.py`) that ask this process to fork. The copy does the work of the program, with the
program's arguments, environment and output, behind the same gate, and ends. So every message still has its own
process, and nothing outlives it. The site's files, code, data and model are read once, before the first
message (`site.keep_site`). If any of them changes, this process restarts itself before the next message.

Linux only, like everything here that forks. Nothing listens on a network: the socket is a file in the site's folder,
which only its owner can enter.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .flower_inside import GATED
from .gate import main as behind_the_gate
from .handover import SOCKET
from .programs import FOLDER, die_with_parent

PROGRAM = "flwr-clientapp"
LOAD = ("solera.deploy.site", "solera.deploy.clientapp", *GATED[PROGRAM][:2])
MOST_BYTES = 1 << 22  # of a request: arguments and environment
AGAIN = ("-m", "solera.deploy.standby")  # the command of this process, to restart it
PATIENCE_S = 10.0  # timeout for a complete request


class Copy(socketserver.BaseRequestHandler):
    """One request, in a copy of the standby: it becomes the program that Flower meant to start."""

    server: socketserver.UnixStreamServer

    def handle(self) -> None:
        """Do the work and report the exit code to the caller."""
        die_with_parent(signal.SIGKILL)
        self.server.socket.close()
        self.request.settimeout(PATIENCE_S)
        try:
            size, streams, _, _ = socket.recv_fds(self.request, 4, 3)
            asked = _read(self.request, int.from_bytes(size, "big"))
        except (OSError, ValueError) as e:
            print(f"a request is refused: {e}", flush=True)
            return
        self.request.settimeout(None)
        threading.Thread(target=self._end_with_caller, daemon=True).start()
        code = _become(asked, streams)
        with contextlib.suppress(OSError):
            self.request.sendall(bytes([code & 255]))

    def _end_with_caller(self) -> None:
        """End this copy when its caller disconnects."""
        with contextlib.suppress(OSError):
            self.request.recv(1)
        os._exit(1)


class Standby(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Answers requests at a socket in `folder`, one copy each. `listener`: the socket, if it is already open."""

    request_queue_size = 128

    def __init__(self, folder: Path, listener: int | None = None):
        os.chdir(folder)  # the path of a socket must be short
        self.folder = folder
        self.changed: Callable[[], bool] = lambda: False  # true: the loaded site is out of date
        if listener is None:
            Path(SOCKET).unlink(missing_ok=True)
        super().__init__(SOCKET, Copy, bind_and_activate=listener is None)
        if listener is None:
            os.chmod(SOCKET, 0o600)
        else:
            self.socket.close()
            self.socket = socket.socket(fileno=listener)
            os.set_inheritable(listener, False)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next request; if the site has changed, a new process at the same socket takes it."""
        if self.changed():
            print("the site has changed: starting anew", flush=True)
            self.collect_children(blocking=True)
            os.set_inheritable(self.fileno(), True)
            os.chdir(os.environ[FOLDER])
            os.execv(sys.executable, [sys.executable, *AGAIN, str(self.folder), str(self.fileno())])  # noqa: S606
        return super().get_request()


def _read(connection: socket.socket, size: int) -> dict[str, Any]:
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"{size} bytes")
    content = b""
    while len(content) < size:
        if not (more := connection.recv(size - len(content))):
            raise ValueError("it ends in the middle")
        content += more
    return json.loads(content)


def _become(asked: dict[str, Any], streams: list[int]) -> int:
    """Become the requested program, and return its exit code."""
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = asked["argv"]
        behind_the_gate(PROGRAM)
        return 0
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main(folder: str, listener: str | None = None) -> None:
    """Load everything, then wait for requests."""
    standby = Standby(Path(folder), None if listener is None else int(listener))  # an early request waits in line
    for name in LOAD:
        importlib.import_module(name)
    from .site import keep_site  # torch takes seconds to load

    standby.changed = keep_site(Path(os.environ[FOLDER]))
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the copies
    print("ready", flush=True)
    standby.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
