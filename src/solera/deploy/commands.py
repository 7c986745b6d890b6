"""The commands `solera deploy server|client|submit|status`: Flower's programs, with safe settings."""

import base64
import concurrent.futures
import dataclasses
import hashlib
import logging
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from ..core.errors import ConfigError, RunError, SoleraError
from . import flower_inside
from .flower_inside import CONNECTED, NO_KEYS_HERE, NOT_ACTIVATED, TRYING, UNREGISTERED, Node
from .journal import keep_journal, lines_from, read_lines
from .keys import expiry, fingerprint, make_node_key
from .programs import (
    INSECURE,
    Program,
    Reason,
    Supervisor,
    check_exposure,
    environment,
    free_port,
    is_loopback,
    reachable,
    split,
    wait_for_port,
)
from .templates import NO_TASKS

log = logging.getLogger("solera")
REASONS = (
    Reason(
        NOT_ACTIVATED,
        "the server refuses this site's key: node.pub was not among its keys when it started, or another node is there "
        "with a copy of the key, or the key was taken off the list; `solera deploy status` at the server tells which",
    ),
    Reason(NO_KEYS_HERE, "the server wants a key, and --insecure shows none"),
    Reason("certificate has expired", "the server's certificate has expired: it needs `solera deploy renew`"),
    Reason(
        "CERTIFICATE_VERIFY_FAILED",
        "what answers at the server's address has no certificate for it that this site's ca.crt trusts",
        final=True,
    ),
)
SAY_AGAIN_S = 60.0  # between two reports that the server cannot be reached
DATABASE, JOURNAL = Path("state", "superlink.db"), Path("log", "server.jsonl")
ROLL_S = 30.0  # between two checks that all sites are still on the list
LOOK_S, ASK_S = 0.5, 30.0  # while waiting for a run: between two looks at its log, and at Flower's list of runs


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The content of deploy.toml in a server's or a site's folder: the server's address and how to reach it."""
    if not (folder / "deploy.toml").is_file():
        raise ConfigError(f"{folder} is not the folder of a {name}: there is no deploy.toml in it")
    tables = _tables(folder / "deploy.toml")
    if tables.get("role") != name:
        raise ConfigError(f"{folder} is the folder of a {tables.get('role')!r}, not of a {name}")
    return tables


def _tables(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from None


# ---- the server -------------------------------------------------------------------------------------


def serve(folder: Path, address: str | None = None, insecure: bool = False, behind_firewall: bool = False) -> None:
    """Run the SuperLink and the programs that execute runs, until a signal comes."""
    folder = folder.absolute()
    given = settings_of(folder, "server")
    flower_inside.check_version()
    address = address or given["address"]
    host, port = split(address)
    keep_journal(folder / JOURNAL)
    if insecure:
        log.warning("--insecure: no TLS, no authentication; others who reach %s can take part and read along", address)
        if not is_loopback(address):
            raise ConfigError(f"--insecure at {address}: only on the loopback interface, such as 127.0.0.1:8000")
    else:
        check_exposure(address, behind_firewall or given.get("behind_firewall") is True, given.get("proxy"))
        _check_certificate(folder)
    env, here = environment(folder), reachable(address)
    told = flower_inside.connection(here, None if insecure else folder / "ca.crt")
    (folder / "state" / "flwr" / "config.toml").write_text(tomli_w.dumps(told))  # for the command `flwr`
    database = folder / ("state/insecure.db" if insecure else DATABASE)
    link = Program(
        "superlink", flower_inside.superlink(folder, host, port, database, insecure), env,
        folder / "log" / "superlink.log",
    )  # fmt: skip
    execute = Program(
        "superexec", flower_inside.superexec(folder, here, insecure), env | ({INSECURE: "1"} if insecure else {}),
        folder / "log" / "superexec.log",
    )  # fmt: skip
    roll = _Roll(folder)
    with Supervisor() as programs:
        programs.start(link)
        wait_for_port(here, link, lambda: programs.stopping)
        if not insecure and not programs.stopping:
            roll.call(env)
        if not programs.stopping:
            programs.start(execute)
            log.info("the server listens at %s%s", address, " without TLS" if insecure else "")
            programs.watch((lambda: None) if insecure else roll.look)
    log.info("the server has ended")


def _check_certificate(folder: Path) -> None:
    try:
        left = expiry(folder / "server.crt").timestamp() - time.time()
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder / 'server.crt'} cannot be read: {e}") from None
    if left < 0:
        raise ConfigError(f"{folder / 'server.crt'} has expired: renew it with `solera deploy renew`")
    if left < 30 * 86400:
        log.warning("server.crt expires in %.0f days: renew it with `solera deploy renew`", left / 86400)


def registered(folder: Path) -> dict[str, Node]:
    """The sites whose keys the SuperLink has on its list, or has had: by name, as its database has them."""
    names = _keys(folder)
    return {names[key]: node for key, node in _nodes(folder) if key in names}


def _keys(folder: Path) -> dict[str, str]:
    """The names of the sites by their keys, those in `keys`."""
    return {fingerprint(f.read_bytes(), str(f)): f.stem for f in sorted((folder / "keys").glob("*.pub"))}


def _nodes(folder: Path) -> list[tuple[str, Node]]:
    """All nodes that the SuperLink has ever known, each with the fingerprint of its key."""
    found = []
    for node in flower_inside.nodes_in(folder / DATABASE):
        try:
            found.append((fingerprint(node.key, f"node {node.id}"), node))
        except ConfigError:  # anyone can add nodes
            found.append(("", node))
    return found


class _Roll:
    """The nodes on the SuperLink's list. `keys` are those that should be there. The control interface has no login, so
    others can change the list: it is read anew each time."""

    def __init__(self, folder: Path):
        self.folder, self.next = folder, 0.0
        self.struck: set[str] = set()  # nodes that were already reported

    def call(self, env: dict[str, str]) -> None:
        """Register new keys, and remove those that are no longer in `keys`."""
        names, known, nodes = _keys(self.folder), registered(self.folder), _nodes(self.folder)
        new = sorted(set(names.values()) - set(known))
        old = [n.id for key, n in nodes if key not in names and n.status != UNREGISTERED]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # each is a program that takes seconds to start
            added = pool.map(lambda k: flower_inside.register(env, self.folder / "keys" / f"{k}.pub"), new)
            struck = pool.map(lambda node: flower_inside.unregister(env, node), old)
            for k, _ in zip(new, added, strict=True):
                log.info("%s is registered", k)
            for node, _ in zip(old, struck, strict=True):
                log.warning("node %s is taken off the list: its key is not, or no longer, in keys", node)
        self.look()

    def look(self) -> None:
        """Report, once each, the sites that cannot come back."""
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + ROLL_S
        try:
            known = registered(self.folder)
        except SoleraError as e:  # the server goes on
            log.warning("the list of nodes cannot be compared with keys: %s", e)
            return
        for k, node in known.items():
            if node.status == UNREGISTERED and node.id not in self.struck:
                self.struck.add(node.id)
                log.error(
                    "%s is locked out: its key was taken off the list through the control interface, at %s, and Flower "
                    "takes no key twice; run `solera deploy rekey` at the site, and keep others away from /v1/control/",
                    k, node.struck_at,
                )  # fmt: skip


# ---- a site -----------------------------------------------------------------------------------------


def attend(folder: Path, address: str | None = None, insecure: bool = False) -> None:
    """Run this site's node until a signal comes."""
    folder = folder.absolute()
    given = settings_of(folder, "site")
    flower_inside.check_version()
    address = address or given["address"]
    split(address)
    if "tasks" not in _tables(folder / "site.toml").get("sites", {}).get(given["name"], {}):
        raise ConfigError(NO_TASKS.format(name=given["name"]))  # the site would refuse every task
    keep_journal(folder / "log" / "site.jsonl", site=given["name"])
    if insecure and not is_loopback(address):
        raise ConfigError(f"--insecure to {address}: only on the loopback interface")
    forks = sys.platform == "linux"
    env = environment(folder, standby=forks)
    ready = Program(
        "standby", [sys.executable, "-m", "solera.deploy.standby", str(folder / "state" / "bin")], env,
        folder / "log" / "standby.log",
    )  # fmt: skip
    node = Program(
        "supernode",
        flower_inside.supernode(folder, address, free_port(), insecure),
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


class _Connection:
    """Writes into the site's own log what its node prints about the connection to the server."""

    def __init__(self, node: Program, address: str):
        self.node, self.address = node, address
        self.seen, self.said = node.printed_from, -SAY_AGAIN_S

    def look(self) -> None:
        """Read new output."""
        text = self.node.printed(self.seen)
        text = text[: text.rfind("\n") + 1]
        self.seen += len(text.encode())
        if CONNECTED in text:
            self.said = -SAY_AGAIN_S
            log.info("connected to the server at %s", self.address)
        elif TRYING in text and time.monotonic() - self.said >= SAY_AGAIN_S:
            self.said = time.monotonic()
            log.warning("no answer from the server at %s: trying again (is it up, and is TLS on there?)", self.address)


def rekey(folder: Path) -> str:
    """Make a new key for a site, at the site: the private half is never sent. Returns a text with the next steps."""
    name = settings_of(folder, "site")["name"]
    for file in ("node.key", "node.pub"):
        if (folder / file).exists():
            (folder / file).replace(folder / f"{file}.old")
    make_node_key(folder, name)
    told = hashlib.sha256(base64.b64decode((folder / "node.pub").read_text().split()[1])).digest()
    return (
        f"{name} has a new key, SHA256:{base64.b64encode(told).decode().rstrip('=')}; the old one is in node.key.old\n"
        f"1. Send {folder / 'node.pub'} to the server's people. Only this file: node.key never leaves this machine.\n"
        f"2. On the server: check with `ssh-keygen -lf node.pub` that it is this key, put it in the place of "
        f"keys/{name}.pub\n   in the server's folder, and restart `solera deploy server`: it takes the old key off its "
        f"list. A run goes on.\n"
        f"3. Then restart `solera deploy client {folder}` here."
    )


# ---- runs -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A run that the server has accepted."""

    name: str
    id: int
    out: Path
    since: int  # where in the server's log it begins


def submit(folder: Path, name: str, config: str = "server.toml") -> Submitted:
    """Ask the server to begin the run `name`, or to resume it if its directory exists."""
    from ..core.wire import safe_name  # imports torch, which mere supervisors do not need

    folder = folder.absolute()
    settings_of(folder, "server")
    safe_name(name, "run name")
    since = (folder / JOURNAL).stat().st_size if (folder / JOURNAL).is_file() else 0
    if not (folder / config).is_file() or Path(config).name != config:
        raise ConfigError(f"{config}: there is no such file in {folder}")
    run_id = flower_inside.start_run(environment(folder), folder / "app", {"run": name, "config": config})
    return Submitted(name, run_id, folder / "runs" / name, since)


def wait_for(
    folder: Path, run: Submitted, patience_s: float | None = None, say: Callable[[str], None] = lambda text: None
) -> str:
    """Wait until a run has ended; returns Flower's last status of it. `say` gets the server's log lines about it."""
    folder = folder.absolute()
    env, place = environment(folder), run.since
    begun = asked = time.monotonic()

    def news() -> bool:
        """Pass on new log lines; True if the run's last line was among them."""
        nonlocal place
        lines, place = lines_from(folder / JOURNAL, place)
        mine = [line for line in lines if line.get("run") == run.name]
        for line in mine:
            say(f"{line.get('time')} {line.get('says')}")
        return any(line.get("ended") for line in mine)

    while True:
        time.sleep(LOOK_S)
        over, now = news(), time.monotonic()
        if over or now - asked >= ASK_S:  # each query starts a program that takes seconds
            status, asked = flower_inside.run_status(env, run.id), now
            while over and not status.startswith("finished") and time.monotonic() - now < ASK_S:
                status = flower_inside.run_status(env, run.id)  # Flower notices a little later
            if status.startswith("finished"):
                news()
                return status
        if patience_s is not None and now - begun > patience_s:
            raise RunError(f"the run {run.name} has not ended after {patience_s:g} s; it goes on")


def status(folder: Path) -> dict[str, Any]:
    """The state of the server: nodes, runs as Flower sees them, and the rounds in each run directory."""
    folder = folder.absolute()
    given = settings_of(folder, "server")
    runs, nodes = flower_inside.runs_and_nodes(environment(folder))
    sites = {node.id: k for k, node in registered(folder).items()}
    found = [{"site": sites.get(str(n.get("node-id"))), **n} for n in nodes or []]
    return {
        "address": given["address"],
        "reachable": nodes is not None,
        "nodes": [n for n in found if n["site"] or n.get("status") != UNREGISTERED],
        "runs": runs,
        "directories": {
            d.name: len(read_lines(d / "metrics.jsonl", 1 << 30))
            for d in sorted((folder / "runs").glob("*"))
            if d.is_dir()
        },
    }


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
