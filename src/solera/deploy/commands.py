"""What `solera deploy server|client|submit|status` do: Flower's programs, with safe settings."""

import contextlib
import dataclasses
import json
import logging
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ..errors import ConfigError, RunError, SoleraError
from ..wire import safe_name
from .journal import keep_journal, read_lines
from .keys import expiry
from .programs import (
    Program,
    Supervisor,
    environment,
    flower,
    free_port,
    is_loopback,
    reachable,
    split,
    wait_for_port,
)
from .templates import APP, CONNECTION

log = logging.getLogger("solera")
REFUSED = "the server refuses this site's key: is it registered there? (its public key is node.pub)"
NO_TLS = "the server uses TLS and this site does not, or the reverse"


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """deploy.toml of a server's or a site's folder: where the server is, and how it is reached."""
    file = folder / "deploy.toml"
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not the folder of a {name}: there is no deploy.toml in it") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file}: {e}") from None
    if tables.get("role") != name:
        raise ConfigError(f"{folder} is the folder of a {tables.get('role')!r}, not of a {name}")
    return tables


# ---- the server -------------------------------------------------------------------------------------


def serve(folder: Path, address: str | None = None, insecure: bool = False) -> None:
    """Run the SuperLink and what executes runs, until a signal comes."""
    folder = folder.absolute()
    given = settings_of(folder, "server")
    address = address or given["address"]
    host, port = split(address)
    keep_journal(folder / "log" / "server.jsonl")
    if insecure:
        _warn_insecure(address)
    else:
        _check_certificate(folder)
    env = environment(folder)
    connect(folder, address, insecure)
    secret = ["--superexec-auth-secret-file", str(folder / "secret")]
    tls = ["--insecure"] if insecure else [
        "--ssl-ca-certfile", str(folder / "ca.crt"),
        "--ssl-certfile", str(folder / "server.crt"),
        "--ssl-keyfile", str(folder / "server.key"),
        "--enable-supernode-auth",
    ]  # fmt: skip
    database = folder / "state" / ("insecure.db" if insecure else "superlink.db")
    link = Program(
        "superlink",
        [
            flower("flower-superlink"), *tls, "--host", host, "--port", str(port), "--isolation", "process",
            "--database", str(database), "--disable-runtime-dependency-installation", *secret,
        ],
        env, folder / "log" / "superlink.log",
    )  # fmt: skip
    root = ["--insecure"] if insecure else ["--root-certificates", str(folder / "ca.crt")]
    here = reachable(address)
    execute = Program(
        "superexec",
        [flower("flower-superexec"), "--runtime-api-address", here, *root, *secret],
        env, folder / "log" / "superexec.log",
    )  # fmt: skip
    with Supervisor() as programs:
        programs.start(link)
        wait_for_port(here, link, lambda: programs.stopping)
        if not insecure and not programs.stopping:
            register(folder, env)
        if not programs.stopping:
            programs.start(execute)
            log.info("the server listens at %s%s", address, " without TLS" if insecure else "")
            programs.watch()
    log.info("the server has ended")


def _warn_insecure(address: str) -> None:
    log.warning("--insecure: no TLS and no authentication; whoever reaches %s can take part and read along", address)
    if not is_loopback(address):
        raise ConfigError(f"--insecure at {address}: only on the loopback interface, such as 127.0.0.1:8000")


def _check_certificate(folder: Path) -> None:
    try:
        left = expiry(folder / "server.crt").timestamp() - time.time()
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder / 'server.crt'} cannot be read: {e}") from None
    if left < 0:
        raise ConfigError(f"{folder / 'server.crt'} has expired: renew it with `solera deploy renew`")
    if left < 30 * 86400:
        log.warning("server.crt expires in %.0f days: renew it with `solera deploy renew`", left / 86400)


def connect(folder: Path, address: str, insecure: bool) -> None:
    """Tell the command `flwr` where this server is."""
    how: dict[str, Any] = {"address": reachable(address)}
    how |= {"insecure": True} if insecure else {"root-certificates": str(folder / "ca.crt")}
    home = folder / "state" / "flwr"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: how}}))


def register(folder: Path, env: dict[str, str]) -> None:
    """Make the sites' public keys known to the SuperLink. It keeps them in its database."""
    known_file = folder / "state" / "registered.json"
    known = json.loads(known_file.read_text()) if known_file.is_file() else {}
    for key in sorted((folder / "keys").glob("*.pub")):
        text = key.read_text().strip()
        if known.get(key.stem) == text:
            continue
        out = flwr(["supernode", "register", str(key), CONNECTION, "--format", "json"], env, check=False)
        said = _json_in(out)
        if not said.get("success") and "already" not in out.lower():
            raise SoleraError(f"the key of {key.stem} cannot be registered: {' '.join(out.split())[-300:]}")
        known[key.stem] = text
        known_file.write_text(json.dumps(known))
        log.info("%s is registered", key.stem)


def flwr(arguments: Sequence[str], env: dict[str, str], check: bool = True) -> str:
    """Run the command `flwr` and return what it printed."""
    done = subprocess.run(  # noqa: S603  (the program is found beside Python)
        [flower("flwr"), *arguments], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )
    out = done.stdout + done.stderr
    if check and done.returncode != 0:
        raise SoleraError(f"flwr {arguments[0]} failed: {' '.join(out.split())[-400:]}")
    return out


def _json_in(text: str) -> dict[str, Any]:
    """The JSON object in what a command printed."""
    start = text.find("{")
    while start >= 0:
        with contextlib.suppress(ValueError):
            found, _ = json.JSONDecoder().raw_decode(text[start:])
            if isinstance(found, dict):
                return found
        start = text.find("{", start + 1)
    return {}


# ---- a site -----------------------------------------------------------------------------------------


def attend(folder: Path, address: str | None = None, insecure: bool = False) -> None:
    """Run this site's node until a signal comes."""
    folder = folder.absolute()
    given = settings_of(folder, "site")
    address = address or given["address"]
    split(address)
    keep_journal(folder / "log" / "site.jsonl", site=given["name"])
    how = ["--root-certificates", str(folder / "ca.crt"), "--auth-supernode-private-key", str(folder / "node.key")]
    if insecure:
        how = ["--insecure"]
        if not is_loopback(address):
            raise ConfigError(f"--insecure to {address}: only on the loopback interface")
    node = Program(
        "supernode",
        [flower("flower-supernode"), *how, "--superlink", address, "--host", "127.0.0.1", "--port", str(free_port())],
        environment(folder),
        folder / "log" / "supernode.log",
        final={303: NO_TLS, 302: REFUSED, 305: REFUSED},
    )
    with Supervisor() as programs:
        programs.start(node)
        programs.watch()
    log.info("%s has left", given["name"])


# ---- runs -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A run that the server has taken."""

    name: str
    id: int
    out: Path


def submit(folder: Path, name: str, config: str = "server.toml") -> Submitted:
    """Ask the server to begin the run `name`, or to go on with it if its directory is there."""
    folder = folder.absolute()
    settings_of(folder, "server")
    safe_name(name, "run name")
    if not (folder / config).is_file() or Path(config).name != config:
        raise ConfigError(f"{config}: there is no such file in {folder}")
    env = environment(folder)
    with tempfile.TemporaryDirectory() as at:
        app = Path(at) / "solera-app"
        app.mkdir()
        (app / "pyproject.toml").write_text(APP)
        chosen = f'run="{name}" config="{config}"'
        out = flwr(["run", str(app), CONNECTION, "--format", "json", "--run-config", chosen], env, check=False)
    said = _json_in(out)
    if not said.get("success"):
        raise SoleraError(f"the server does not take the run: {' '.join(out.split())[-400:]}")
    return Submitted(name, int(said["run-id"]), folder / "runs" / name)


def wait_for(folder: Path, run: Submitted, patience_s: float | None = None) -> str:
    """Until a run has ended; its last status, as Flower has it."""
    env, end = environment(folder.absolute()), None if patience_s is None else time.monotonic() + patience_s
    while True:
        status = run_status(env, run.id)
        if status.startswith("finished"):
            return status
        if end is not None and time.monotonic() > end:
            raise RunError(f"the run {run.name} has not ended after {patience_s:g} s: its status is {status}")
        time.sleep(2.0)


def run_status(env: dict[str, str], run_id: int) -> str:
    """Flower's status of a run, such as `running` or `finished:completed`."""
    found = _json_in(flwr(["list", CONNECTION, "--run-id", str(run_id), "--format", "json"], env, check=False))
    runs = found.get("runs") or [{}]
    return str(runs[0].get("status", "unknown"))


def status(folder: Path) -> dict[str, Any]:
    """What the server knows now: nodes, runs as Flower sees them, and how far each run directory is."""
    folder = folder.absolute()
    given = settings_of(folder, "server")
    env = environment(folder)
    nodes = _json_in(flwr(["supernode", "list", CONNECTION, "--format", "json"], env, check=False))
    runs = _json_in(flwr(["list", CONNECTION, "--format", "json"], env, check=False))
    return {
        "address": given["address"],
        "reachable": bool(nodes.get("success")),
        "nodes": nodes.get("nodes", []),
        "runs": runs.get("runs", []),
        "directories": {d.name: _rounds(d) for d in sorted((folder / "runs").glob("*")) if d.is_dir()},
    }


def _rounds(run: Path) -> int:
    return len(read_lines(run / "metrics.jsonl", 1 << 30))


def logs(folder: Path, last: int) -> list[dict[str, Any]]:
    """The last lines of what a server or a site has logged, in order of time."""
    folder = folder.absolute()
    if not (folder / "deploy.toml").is_file():
        raise ConfigError(f"{folder} is not the folder of a server or a site: there is no deploy.toml in it")
    found = [
        {"log": file.stem, **line}
        for file in sorted((folder / "log").glob("*.jsonl"))
        for line in read_lines(file, last)
    ]
    return sorted(found, key=lambda line: str(line.get("time")))[-last:]
