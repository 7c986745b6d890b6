"""Flower's programs as a deployment starts them: safe settings, a state folder of their own, and a supervisor. A
program that ends by itself is started again; all of them end together."""

import contextlib
import ctypes
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..core.errors import PORTABLE, ConfigError, SoleraError
from .flower_inside import HOME, SAFE
from .gate import write_programs

log = logging.getLogger("solera")
FOLDER = "SOLERA_DEPLOYMENT"  # in the environment: the folder of the server or the site
INSECURE = "SOLERA_INSECURE"  # in the environment of a server that was started with --insecure
READY_S = 120.0  # timeout for a program to accept connections
END_S = 15.0  # between asking a program to end and ending it
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # before a program is restarted; the last value repeats
MOST_PRINTED = 1 << 20  # bytes of a program's output that are searched
QUICKLY_S = 60.0  # a program that ran longer than this did not fail at once


def environment(folder: Path, standby: bool = False) -> dict[str, str]:
    """The environment of Flower's programs: no telemetry, no installation, state in `folder`, and the gate.

    `standby`: the programs of a site are handed over to a process that has loaded everything.
    """
    bin_ = folder / "state" / "bin"
    write_programs(bin_, standby)
    path = os.pathsep.join([str(bin_), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    home = folder / "state" / "flwr"
    home.mkdir(parents=True, exist_ok=True)
    ours = next((file for file in (folder / "server.toml", folder / "site.toml") if file.is_file()), None)
    engine = {} if ours is None else tomllib.loads(ours.read_text()).get("engine", {})
    own = {"PATH": path, HOME: str(home), FOLDER: str(folder), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **SAFE, **own, **(PORTABLE if engine.get("portable") is True else {})}


_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up here: not between fork and exec


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel end this process when its parent ends, for whatever reason."""
    if _PRCTL is not None:
        _PRCTL(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG


@dataclasses.dataclass(frozen=True)
class Reason:
    """A text that a program prints before it ends, and its meaning. Flower's programs all end with code 1."""

    prints: str
    means: str
    final: bool = False  # starting it again cannot help


@dataclasses.dataclass
class Program:
    """One program that is kept running."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    reasons: Sequence[Reason] = ()
    process: subprocess.Popen[bytes] = dataclasses.field(init=False)
    failures: int = 0
    started: float = 0.0
    printed_from: int = 0  # position in `log` of its output since it was started

    def start(self) -> None:
        """Start it, in its own session: its children end with it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self.printed_from = out.tell()
            self.process = subprocess.Popen(  # noqa: S603  (the commands are this package's own)
                list(self.command),
                env=dict(self.env),
                cwd=self.env.get(FOLDER),  # relative paths in its configuration start there
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.started = time.monotonic()
        log.info("%s started (pid %d)", self.name, self.process.pid)

    def signal(self, number: int) -> None:
        """Send a signal to it and to its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def printed(self, since: int | None = None) -> str:
        """The text that it has printed since it was started, or from that place in its log on."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self.printed_from if since is None else since)
            return file.read(MOST_PRINTED).decode(errors="replace")
        return ""

    def tail(self, lines: int = 3) -> str:
        """The end of its output."""
        return " | ".join(self.printed().split("\n")[-1 - lines :]).strip(" |")

    def reason(self) -> Reason | None:
        """The reason why it ended, if known."""
        text = self.printed()
        return next((r for r in self.reasons if r.prints in text), None)


class Supervisor:
    """Keeps programs running until a signal comes."""

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.stopping = False

    def __enter__(self) -> "Supervisor":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        return self

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True

    def __exit__(self, *_: object) -> None:
        for program in reversed(self.programs):
            program.signal(signal.SIGTERM)
        end = time.monotonic() + END_S
        for program in reversed(self.programs):
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.process.wait(max(0.0, end - time.monotonic()))
            program.signal(signal.SIGKILL)
            program.process.wait()

    def start(self, program: Program) -> None:
        """Start a program and keep it running from now on."""
        program.start()
        self.programs.append(program)

    def watch(self, tick: Callable[[], None] = lambda: None) -> None:
        """Restart programs that end, until a signal comes. Raises if a restart cannot help."""
        again: dict[str, float] = {}
        while not self.stopping:
            for p in [p for p in self.programs if p.process.poll() is not None]:
                if p.name not in again:
                    again[p.name] = time.monotonic() + self._pause(p)
                elif time.monotonic() >= again[p.name]:
                    del again[p.name]
                    p.start()
            tick()
            time.sleep(0.2)

    def _pause(self, p: Program) -> float:
        """Seconds until a program that has ended starts again."""
        why = p.reason()
        if why is not None and why.final:
            raise SoleraError(f"{p.name} ended: {why.means}")
        p.signal(signal.SIGKILL)  # its remaining children
        p.failures = 0 if time.monotonic() - p.started > QUICKLY_S else p.failures + 1
        pause = PAUSES_S[min(p.failures, len(PAUSES_S) - 1)]
        said = f"ended with code {p.process.returncode} ({p.tail(1)})" if why is None else f"ended: {why.means}"
        log.warning("%s %s; it starts again in %g s", p.name, said, pause)
        return pause


def wait_for_port(address: str, program: Program, stop: Callable[[], bool] = lambda: False) -> None:
    """Wait until the program listens at `address`."""
    end = time.monotonic() + READY_S
    while not stop():
        if (code := program.process.poll()) is not None:
            raise SoleraError(f"{program.name} ended at once, with code {code}: {program.tail()}")
        with contextlib.suppress(OSError), socket.create_connection(split(address), timeout=1.0):
            return
        if time.monotonic() > end:
            raise SoleraError(f"{program.name} does not listen at {address} after {READY_S:g} s: {program.tail()}")
        time.sleep(0.1)


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"address {address!r}: expected HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def reachable(address: str) -> str:
    """The address at which programs on this machine reach a server that listens at `address`."""
    host, port = split(address)
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "::") else address  # noqa: S104


def free_port() -> int:
    """A port on the loopback interface that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def is_loopback(address: str) -> bool:
    """True if only this machine reaches the address."""
    host = split(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(address: str, behind_firewall: bool = False, proxy: str | None = None) -> None:
    """Refuse a server at an address that others reach, unless the operator has named what protects it."""
    if is_loopback(address):
        return
    if not behind_firewall and not proxy:
        raise ConfigError(
            f"address {address}: Flower's control interface is there, too, and has no login: a stranger who reaches it "
            "can stop runs and lock sites out for good. Listen on 127.0.0.1 behind a proxy that passes on /v1/fleet/ "
            "alone (one on another machine is named in deploy.toml: proxy = 'HOST:PORT'), or say that a firewall lets "
            "in nothing but sites that you trust with this: --behind-firewall"
        )
    allowed = f"the proxy {proxy}" if proxy else "sites that you trust with the control interface"
    log.warning("%s can be reached from other machines: it is for you to see that only %s can", address, allowed)
