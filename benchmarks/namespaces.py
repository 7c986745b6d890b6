"""Programs in a network namespace of their own. It has nothing but loopback: nobody else reaches what listens there."""

import functools
import os
import subprocess
from pathlib import Path

LOOPBACK = 'ip link set lo up && exec "$@"'


@functools.cache
def _unshare() -> tuple[str, ...]:
    """The command that makes a namespace here; () if none can be made."""
    for way in (("unshare", "-n"), ("unshare", "-r", "-n")):  # the latter without being root, where the system lets
        try:
            tried = subprocess.run([*way, "sh", "-c", LOOPBACK, "sh", "true"], capture_output=True)  # noqa: S603
            if tried.returncode == 0:
                return way
        except FileNotFoundError:
            break
    return ()


def why_not() -> str:
    """Why a test that needs a namespace is skipped; "" if it is not."""
    return "" if _unshare() else "no network namespace can be made here: it takes root (or user namespaces) and `ip`"


def inside(*command: object) -> list[str]:
    """A command, as it is run in a namespace of its own."""
    return [*_unshare(), "sh", "-c", LOOPBACK, "sh", *map(str, command)]


def mine() -> set[int]:
    """The processes in the namespace of this process."""

    def namespace(pid: object) -> str:
        try:
            return os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            return ""

    here = namespace("self")
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and namespace(p.name) == here}
