"""New Python processes without the two seconds that importing torch takes.

`run` and `Process` do what `subprocess.run` and `Popen` do with `[sys.executable, *args]`, for `-c` and `-m`. The
process is forked from one that has imported torch and solera and has done nothing else, so what one test imports or
sets, no other finds. It is killed, waited for and read like any other.
"""

import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVER = """
import gc, json, os, runpy, signal, socket, struct, sys
import torch
import solera.runs.loop, solera.testing, solera.report.page, solera.use.predict, solera.lab.sweep
gc.collect()
gc.freeze()

def become(request, fds):
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, number in zip(fds, (1, 2)):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, closefd=False)
    code = 0
    try:
        kind, what, *rest = request["args"]
        paths = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
        if kind == "-c":
            sys.path[:0] = ["", *paths]
            sys.argv = ["-c", *rest]
            import __main__
            vars(__main__).pop("become", None)
            exec(compile(what, "<string>", "exec"), vars(__main__))
        else:
            sys.path[:0] = [request["cwd"], *paths]
            sys.argv = [what, *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.exit(code)

door = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, fds, _, _ = socket.recv_fds(door, 1 << 20, 3)
    if not message:
        os._exit(0)
    keeper = os.fork()
    if keeper == 0:  # waits for the process, and says how it ended
        door.close()
        *outputs, status = fds
        pid = os.fork()
        if pid == 0:
            os.close(status)
            become(json.loads(message), outputs)
        for fd in outputs:
            os.close(fd)
        os.write(status, struct.pack("q", pid))
        os.write(status, struct.pack("q", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    for fd in fds:
        os.close(fd)
    os.waitpid(-1, os.WNOHANG)
"""


@functools.cache
def _door(pid: int) -> socket.socket:
    """The way to the process that is forked; `pid` is this one's, which must have made it itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = [sys.executable, "-c", SERVER, str(theirs.fileno())]
    subprocess.Popen(server, pass_fds=[theirs.fileno()])  # ends when this process does: its door closes
    theirs.close()
    return ours


class Process:
    """A process that is running `python *args`. Its output can be read from `stdout` and `stderr`."""

    def __init__(self, *args: object, cwd: str | os.PathLike[str] = ".", env: dict[str, str] | None = None):
        request = {"args": [*map(str, args)], "cwd": str(Path(cwd).resolve()), "env": dict(env or os.environ)}
        (out, out_end), (err, err_end), (self._status, status_end) = os.pipe(), os.pipe(), os.pipe()
        given = [out_end, err_end, status_end]
        socket.send_fds(_door(os.getpid()), [json.dumps(request).encode()], given)
        for fd in given:
            os.close(fd)
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)  # what is read is not read ahead
        (self.pid,) = struct.unpack("q", os.read(self._status, 8))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that killed it."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fresh process", timeout or 0)
            (self.returncode,) = struct.unpack("q", os.read(self._status, 8))
            os.close(self._status)
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """All that it prints from now on, to its end."""
        said: dict[Any, list[bytes]] = {self.stdout: [], self.stderr: []}
        waiting = [*said]
        while waiting:
            for stream in select.select(waiting, [], [])[0]:
                said[stream].append(stream.read(1 << 16))
                if not said[stream][-1]:
                    waiting.remove(stream)
        texts = [b"".join(parts).decode() for parts in said.values()]
        self.stdout.close()
        self.stderr.close()
        self.wait()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """As `os.kill`."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


def run(
    *args: object, cwd: str | os.PathLike[str] = ".", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python *args` to its end."""
    process = Process(*args, cwd=cwd, env=env)
    out, err = process.communicate()
    return subprocess.CompletedProcess([*map(str, args)], process.wait(), out, err)
