"""Everything of flwr beyond its public interface that is used: modules, commands, printed texts, codes, its database.

A version of flwr may change any of it without notice, so all of it is here, and two versions are supported: the current
one and the one before. `tests/unit/deploy/test_flower_inside.py` compares this file with the flwr that is installed.
To take up a new version, put it into TRIED and pyproject.toml and run `make versions`.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..core.errors import ConfigError, SoleraError

TRIED = ("1.41", "1.42")


def check_version() -> None:
    """Refuse a flwr that was not tried. A warning is not enough: the gate keeps foreign code out only if flwr unpacks
    apps where the gate expects it, which may differ in another version."""
    try:
        found = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        found = "of an unknown version"
    if ".".join(found.split(".")[:2]) not in TRIED:
        first, last = TRIED[0], TRIED[-1].split(".")
        bounds = f"flwr>={first},<{last[0]}.{int(last[1]) + 1}"
        raise ConfigError(
            f"flwr {found} is installed, and deployments are tried with {' and '.join(TRIED)} only: "
            f"pip install '{bounds}'"
        )


# ---- messages ---------------------------------------------------------------------------------------

TOO_LATE, GONE = 3, 5  # error codes: the message has expired; the node left while it had the message
CODES = {
    1: "its program could not be loaded",
    2: "its program raised an error",
    4: "its reply was lost on the way",
    7: "it refuses the app",
    8: "its process died",
}

# ---- programs that run an app -----------------------------------------------------------------------

GATED = {  # the programs that run an app: the module that unpacks it, the module of the command, the command
    "flwr-serverapp": ("flwr.superlink.runtime.run_serverapp", "flwr.superlink.cli", "flwr_serverapp"),
    "flwr-clientapp": ("flwr.supernode.runtime.run_clientapp", "flwr.supernode.cli", "flwr_clientapp"),
}
UNUSED = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")  # others that a SuperExec would start
INSTALL = "install_from_fab"  # the function in the first of the two modules that unpacks an app
OWN_NOTES = re.compile(r"\.info/[A-Z]+")  # what flwr adds when it packs an app: hashes, nothing that runs

# ---- programs that run for long ---------------------------------------------------------------------

SAFE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; by default 1
}
HOME = "FLWR_HOME"  # in the environment: where flwr keeps its own files
CONNECTED, TRYING = "SuperNode ID:", "Connection attempt failed"  # what a SuperNode prints
NOT_ACTIVATED, NO_KEYS_HERE = "[code: 2004]", "[code: 2001]"  # the reason of a refusal


def program(name: str) -> str:
    """The path of one of Flower's programs, which are installed beside Python."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not installed: pip install 'solera[flower]'")
    return found


def superlink(folder: Path, host: str, port: int, database: Path, insecure: bool) -> list[str]:
    """The command of the server's SuperLink. The program that runs apps is started separately, with the secret."""
    tls = ["--insecure"] if insecure else [
        "--ssl-ca-certfile", str(folder / "ca.crt"),
        "--ssl-certfile", str(folder / "server.crt"),
        "--ssl-keyfile", str(folder / "server.key"),
        "--enable-supernode-auth",
    ]  # fmt: skip
    return [
        program("flower-superlink"), *tls, "--host", host, "--port", str(port), "--isolation", "process",
        "--database", str(database), "--disable-runtime-dependency-installation",
        "--superexec-auth-secret-file", str(folder / "secret"),
    ]  # fmt: skip


def superexec(folder: Path, link: str, insecure: bool) -> list[str]:
    """The command of the program that starts the server's apps, for the SuperLink at the address `link`."""
    root = ["--insecure"] if insecure else ["--root-certificates", str(folder / "ca.crt")]
    secret = ["--superexec-auth-secret-file", str(folder / "secret")]
    return [program("flower-superexec"), "--runtime-api-address", link, *root, *secret]


def supernode(folder: Path, link: str, port: int, insecure: bool) -> list[str]:
    """The command of a site's node; `port` is for its own programs, on the loopback interface."""
    how = ["--insecure"] if insecure else [
        "--root-certificates", str(folder / "ca.crt"), "--auth-supernode-private-key", str(folder / "node.key"),
    ]  # fmt: skip
    return [program("flower-supernode"), *how, "--superlink", link, "--host", "127.0.0.1", "--port", str(port)]


# ---- the command flwr -------------------------------------------------------------------------------

CONNECTION = "solera"  # its name of the server
UNREGISTERED = "unregistered"  # the status of a node that was removed from the list; flwr never accepts its key again


def connection(link: str, ca: Path | None) -> dict[str, Any]:
    """config.toml of flwr's home, with the server's address."""
    how: dict[str, Any] = {"address": link, **({"insecure": True} if ca is None else {"root-certificates": str(ca)})}
    return {"superlink": {"default": CONNECTION, CONNECTION: how}}


def flwr(env: Mapping[str, str], *words: str) -> tuple[dict[str, Any], str]:
    """Run the command `flwr`: the JSON object in what it printed (empty if there is none), and all that it printed."""
    done = subprocess.run(  # noqa: S603  (the program is found beside Python)
        [program("flwr"), *words, "--format", "json"], env=dict(env), capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    text = done.stdout + done.stderr
    start = text.find("{")
    while start >= 0:
        with contextlib.suppress(ValueError):
            found, _ = json.JSONDecoder().raw_decode(text[start:])
            if isinstance(found, dict):
                return found, text
        start = text.find("{", start + 1)
    return {}, text


def _done(what: str, told: tuple[dict[str, Any], str]) -> dict[str, Any]:
    said, text = told
    if not said.get("success"):
        raise SoleraError(f"{what}: {' '.join(text.split())[-400:]}")
    return said


def start_run(env: Mapping[str, str], app: Path, settings: Mapping[str, str]) -> int:
    """Submit the app; the number of the run."""
    chosen = " ".join(f'{k}="{v}"' for k, v in settings.items())
    told = flwr(env, "run", str(app), CONNECTION, "--run-config", chosen)
    return int(_done("the server does not take the run", told)["run-id"])


def run_status(env: Mapping[str, str], run_id: int) -> str:
    """flwr's status of a run, such as `running` or `finished:completed`."""
    runs = flwr(env, "list", CONNECTION, "--run-id", str(run_id))[0].get("runs") or [{}]
    return str(runs[0].get("status", "unknown"))


def runs_and_nodes(env: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The runs and nodes that the SuperLink knows; None in place of nodes if it cannot be reached."""
    nodes = flwr(env, "supernode", "list", CONNECTION)[0]
    runs = flwr(env, "list", CONNECTION)[0]
    return runs.get("runs", []), nodes.get("nodes", []) if nodes.get("success") else None


def register(env: Mapping[str, str], key: Path) -> None:
    """Put the public key of a node on the SuperLink's list."""
    _done(f"{key.name} cannot be registered", flwr(env, "supernode", "register", str(key), CONNECTION))


def unregister(env: Mapping[str, str], node: str) -> None:
    """Remove a node from the SuperLink's list for good."""
    _done(f"node {node} cannot be taken off the list", flwr(env, "supernode", "unregister", node, CONNECTION))


@dataclasses.dataclass(frozen=True)
class Node:
    """A node as the SuperLink's database has it."""

    id: str
    key: bytes  # PEM
    status: str
    struck_at: str | None  # when it was removed from the list


def nodes_in(database: Path) -> list[Node]:
    """All nodes that a SuperLink has ever known, with their keys, which no command prints."""
    if not database.is_file():
        return []
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=30)) as db:
            rows = db.execute("SELECT node_id, public_key, status, unregistered_at FROM node").fetchall()
    except sqlite3.Error as e:
        raise SoleraError(f"{database}: the list of nodes cannot be read: {e}") from None
    return [Node(str(n % (1 << 64)), bytes(key), str(status), at) for n, key, status, at in rows]
