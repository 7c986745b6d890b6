"""What `solera deploy server|client|submit|status` do: Flower's programs, with safe settings."""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ..errors import ConfigError, RunError, SoleraError
from .journal import keep_journal, lines_from, read_lines
from .keys import expiry
from .programs import (
    INSECURE,
    Program,
    Reason,
    Supervisor,
    environment,
    flower,
    free_port,
    is_loopback,
    reachable,
    split,
    wait_for_port,
)
from .templates import CONNECTION, NO_TASKS

log = logging.getLogger("solera")
REASONS = (
    Reason(
        "[code: 2004]",
        "the server does not know this site's key (node.pub must be among its keys when it starts), or a node with the "
        "same key is connected (a copy of this folder)",
    ),
    Reason("[code: 2001]", "the server wants a key, and --insecure shows none"),
    Reason("certificate has expired", "the server's certificate has expired: it needs `solera deploy renew`"),
    Reason(
        "CERTIFICATE_VERIFY_FAILED",
        "whoever answers at the server's address has no certificate for it that this site's ca.crt trusts",
        final=True,
    ),
)
CONNECTED, TRYING = "SuperNode ID:", "Connection attempt failed"  # what a SuperNode prints
SAY_AGAIN_S = 60.0  # how often it is said that the server cannot be reached
REGISTERED, JOURNAL = "registered.json", Path("log", "server.jsonl")
LOOK_S, ASK_S = 0.5, 30.0  # while a run is waited for: at its log, and at Flower's list of runs


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
    keep_journal(folder / JOURNAL)
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
    if not database.is_file():  # it is new, or somebody has removed it
        (folder / "state" / REGISTERED).unlink(missing_ok=True)
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
        env | ({INSECURE: "1"} if insecure else {}), folder / "log" / "superexec.log",
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
    """Make the sites' public keys known to the SuperLink, which keeps them in its database."""
    known = registered(folder)
    new = {key.stem: key for key in sorted((folder / "keys").glob("*.pub"))}
    new = {k: key for k, key in new.items() if known.get(k, {}).get("key") != key.read_text().strip()}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # each is a program that takes seconds to start
        for k, node in zip(new, pool.map(lambda k: _register(k, new[k], env), new), strict=True):
            known[k] = {"key": new[k].read_text().strip(), "node": node}
            log.info("%s is registered", k)
    (folder / "state" / REGISTERED).write_text(json.dumps(known))


def _register(k: str, key: Path, env: dict[str, str]) -> str:
    out = flwr(["supernode", "register", str(key), CONNECTION, "--format", "json"], env, check=False)
    said = _json_in(out)
    if not said.get("success") and "already" not in out.lower():
        raise SoleraError(f"the key of {k} cannot be registered: {' '.join(out.split())[-300:]}")
    return str(said.get("node-id", ""))


def registered(folder: Path) -> dict[str, dict[str, str]]:
    """The sites whose keys the SuperLink knows: each one's key, and its node where Flower has said it."""
    file = folder / "state" / REGISTERED
    return json.loads(file.read_text()) if file.is_file() else {}


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
    _check_tasks(folder / "site.toml", given["name"])
    keep_journal(folder / "log" / "site.jsonl", site=given["name"])
    if insecure and not is_loopback(address):
        raise ConfigError(f"--insecure to {address}: only on the loopback interface")
    how = ["--insecure"] if insecure else [  # Flower uses keys with TLS only
        "--root-certificates", str(folder / "ca.crt"), "--auth-supernode-private-key", str(folder / "node.key"),
    ]  # fmt: skip
    forks = sys.platform == "linux"
    env = environment(folder, standby=forks)
    ready = Program(
        "standby", [sys.executable, "-m", "solera.deploy.standby", str(folder / "state" / "bin")], env,
        folder / "log" / "standby.log",
    )  # fmt: skip
    node = Program(
        "supernode",
        [flower("flower-supernode"), *how, "--superlink", address, "--host", "127.0.0.1", "--port", str(free_port())],
        env,
        folder / "log" / "supernode.log",
        reasons=REASONS,
    )
    with Supervisor() as programs:
        if forks:
            programs.start(ready)
        programs.start(node)
        programs.watch(_Connection(node, address).look)
    log.info("%s has left", given["name"])


def _check_tasks(file: Path, name: str) -> None:
    """Refuse to start a site that would refuse every task."""
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from None
    if "tasks" not in tables.get("sites", {}).get(name, {}):
        raise ConfigError(NO_TASKS.format(name=name))


class _Connection:
    """Says in the site's own log what its node prints of the way to the server."""

    def __init__(self, node: Program, address: str):
        self.node, self.address = node, address
        self.seen, self.said = node.printed_from, -SAY_AGAIN_S

    def look(self) -> None:
        """What is new."""
        text = self.node.printed(self.seen)
        text = text[: text.rfind("\n") + 1]
        self.seen += len(text.encode())
        if CONNECTED in text:
            self.said = -SAY_AGAIN_S
            log.info("connected to the server at %s", self.address)
        elif TRYING in text and time.monotonic() - self.said >= SAY_AGAIN_S:
            self.said = time.monotonic()
            log.warning("no answer from the server at %s: trying again (is it up, and is TLS on there?)", self.address)


# ---- runs -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A run that the server has taken."""

    name: str
    id: int
    out: Path
    since: int  # where in the server's log it begins


def submit(folder: Path, name: str, config: str = "server.toml") -> Submitted:
    """Ask the server to begin the run `name`, or to go on with it if its directory is there."""
    from ..wire import safe_name  # brings torch, which programs that only look after others do without

    folder = folder.absolute()
    settings_of(folder, "server")
    safe_name(name, "run name")
    since = (folder / JOURNAL).stat().st_size if (folder / JOURNAL).is_file() else 0
    if not (folder / config).is_file() or Path(config).name != config:
        raise ConfigError(f"{config}: there is no such file in {folder}")
    chosen = f'run="{name}" config="{config}"'
    words = ["run", str(folder / "app"), CONNECTION, "--format", "json", "--run-config", chosen]
    out = flwr(words, environment(folder), check=False)
    said = _json_in(out)
    if not said.get("success"):
        raise SoleraError(f"the server does not take the run: {' '.join(out.split())[-400:]}")
    return Submitted(name, int(said["run-id"]), folder / "runs" / name, since)


def wait_for(
    folder: Path, run: Submitted, patience_s: float | None = None, say: Callable[[str], None] = lambda text: None
) -> str:
    """Until a run has ended; its last status, as Flower has it. `say` is told what the server logs of it meanwhile."""
    folder = folder.absolute()
    env, place = environment(folder), run.since
    begun = asked = time.monotonic()

    def news() -> bool:
        """Pass on what is new; whether the run's last line was among it."""
        nonlocal place
        lines, place = lines_from(folder / JOURNAL, place)
        mine = [line for line in lines if line.get("run") == run.name]
        for line in mine:
            say(f"{line.get('time')} {line.get('says')}")
        return any(line.get("ended") for line in mine)

    while True:
        time.sleep(LOOK_S)
        over, now = news(), time.monotonic()
        if over or now - asked >= ASK_S:  # asking starts a program that takes seconds
            status, asked = run_status(env, run.id), now
            while over and not status.startswith("finished") and time.monotonic() - now < ASK_S:
                status = run_status(env, run.id)  # Flower notices a little later
            if status.startswith("finished"):
                news()
                return status
        if patience_s is not None and now - begun > patience_s:
            raise RunError(f"the run {run.name} has not ended after {patience_s:g} s; it goes on")


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
    names = {about["node"]: k for k, about in registered(folder).items()}
    return {
        "address": given["address"],
        "reachable": bool(nodes.get("success")),
        "nodes": [{"site": names.get(str(n.get("node-id"))), **n} for n in nodes.get("nodes", [])],
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
