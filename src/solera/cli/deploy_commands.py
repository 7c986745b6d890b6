"""`solera deploy`: a federation on a real network, through Flower."""

import importlib.util
import json as json_
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ..core.errors import ConfigError, SoleraError
from .console import EXIT_CODES, Json, emit, reported

app = typer.Typer(
    help="""Run a federation of real sites over a network, with Flower, TLS and authentication.

    Example: [bold]solera deploy init hospitals.toml -o deployment[/bold] writes folders for all parties.""",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=EXIT_CODES,
)
ServerFolder = Annotated[Path, Argument(metavar="FOLDER", help="The server's folder.")]
Insecure = Annotated[
    bool, Option("--insecure", help="Without TLS and authentication: on this machine only, to try things out.")
]
Firewall = Annotated[
    bool, Option("--behind-firewall", help="At an address that others reach: a firewall lets in sites only.")
]


class DeploymentFailed(SoleraError):
    """A run on a network that did not finish."""

    exit_code = 4


def _needs_flower(log_to_stderr: bool = False) -> None:
    """Refuse to go on without Flower; with `log_to_stderr`, also show the log of the library there."""
    if missing := [name for name in ("flwr", "cryptography") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"a deployment needs {missing[0]}: pip install 'solera[flower]'")
    if not log_to_stderr:
        return
    log, handler = logging.getLogger("solera"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


@app.command(epilog=EXIT_CODES)
@reported
def init(
    config: Annotated[Path, Argument(metavar="FILE.toml", help="A configuration with a table for each site.")],
    out: Annotated[Path, Option("--out", "-o", help="The folder to write.")] = Path("deployment"),
    address: Annotated[str, Option(help="Where the server listens, HOST:PORT.")] = "127.0.0.1:8000",
    host: Annotated[
        list[str] | None, Option(help="Another name or address under which sites reach it. Repeatable.")
    ] = None,
    proxy: Annotated[str | None, Option(help="Where sites reach the proxy in front of the server, HOST:PORT.")] = None,
    behind_firewall: Firewall = False,
    systemd: Annotated[bool, Option("--systemd", help="Also write systemd units.")] = False,
    compose: Annotated[bool, Option("--compose", help="Also write a compose file.")] = False,
) -> None:
    """Write a folder for the server and one for each site: configuration, certificates, keys, commands.

    Example: [bold]solera deploy init hospitals.toml --proxy fl.example.org:443 -o deployment[/bold]
    """
    _needs_flower()
    from ..deploy.init import init as write
    from ..deploy.programs import check_exposure

    check_exposure(address, behind_firewall, proxy)
    sites = write(config, out, address, host or [], systemd, compose, behind_firewall, proxy)
    typer.echo(f"{out}: the server and {len(sites)} sites ({', '.join(sites)}); {out / 'README.md'} says how to go on")


@app.command(epilog=EXIT_CODES)
@reported
def renew(
    folder: Annotated[Path, Argument(metavar="DEPLOYMENT", help="The folder that `init` has written.")],
    host: Annotated[list[str] | None, Option(help="Another name or address of the server. Repeatable.")] = None,
) -> None:
    """Make a new certificate for the server. Sites need nothing new.

    Example: [bold]solera deploy renew deployment[/bold]
    """
    _needs_flower()
    from ..deploy.init import renew as write

    typer.echo(f"server.crt is valid until {write(folder, host or [])}; restart the server")


@app.command(epilog=EXIT_CODES)
@reported
def rekey(
    folder: Annotated[Path, Argument(metavar="SITE", help="The folder of the site.")],
) -> None:
    """Make a new key for a site whose key was stolen, lost or locked out. To be run at the site.

    Example: [bold]solera deploy rekey deployment/sites/hospital-a[/bold]
    """
    _needs_flower()
    from ..deploy.commands import rekey as renewed

    typer.echo(renewed(folder))


@app.command(epilog=EXIT_CODES)
@reported
def server(
    folder: ServerFolder,
    address: Annotated[str | None, Option(help="Where to listen, HOST:PORT. Default: in deploy.toml.")] = None,
    insecure: Insecure = False,
    behind_firewall: Firewall = False,
) -> None:
    """Run the server until it is stopped: a Flower SuperLink with TLS, known keys only, and a database.

    Example: [bold]solera deploy server deployment/server[/bold]
    """
    _needs_flower(log_to_stderr=True)
    from ..deploy.commands import serve

    serve(folder, address, insecure, behind_firewall)


@app.command(epilog=EXIT_CODES)
@reported
def client(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="This site's folder.")],
    server: Annotated[str | None, Option(help="Where the server is, HOST:PORT. Default: in deploy.toml.")] = None,
    insecure: Insecure = False,
) -> None:
    """Run this site's node until it is stopped. It connects to the server and opens no port to others.

    Example: [bold]solera deploy client deployment/sites/hospital-a[/bold]
    """
    _needs_flower(log_to_stderr=True)
    from ..deploy.commands import attend

    attend(folder, server, insecure)


@app.command(epilog=EXIT_CODES)
@reported
def submit(
    folder: ServerFolder,
    name: Annotated[str, Option(help="The run's name: its directory is FOLDER/runs/NAME.")] = "run",
    config: Annotated[str, Option(help="The configuration, a file in FOLDER.")] = "server.toml",
    wait: Annotated[bool, Option("--wait", help="Return when the run has ended.")] = False,
    timeout: Annotated[float | None, Option(help="With --wait: for at most so many seconds.")] = None,
    json: Json = False,
) -> None:
    """Begin a run on the server, or go on with the one of that name.

    Example: [bold]solera deploy submit deployment/server --name first --wait[/bold]
    """
    _needs_flower()
    from ..deploy.commands import logs as lines
    from ..deploy.commands import submit as send
    from ..deploy.commands import wait_for

    run = send(folder, name, config)
    outcome: dict[str, Any] = {"name": run.name, "id": run.id, "out": str(run.out)}
    if wait:
        outcome["status"] = wait_for(folder, run, timeout, lambda text: typer.echo(text, err=True))
        summary = run.out / "summary.json"
        if outcome["status"] != "finished:completed" or not summary.is_file():
            last = [line["says"] for line in lines(folder, 50) if line.get("level") in ("error", "warning")]
            raise DeploymentFailed(
                f"the run {name} ended as {outcome['status']}: {last[-1] if last else 'see solera deploy logs'}"
            )
        outcome["digest"] = json_.loads(summary.read_text())["digest"]
    digest = f", digest {outcome['digest'][:16]}" if "digest" in outcome else ""
    emit(outcome, json, lambda: f"{run.out}: {outcome.get('status', 'submitted')}{digest}")


@app.command(epilog=EXIT_CODES)
@reported
def status(folder: ServerFolder, json: Json = False) -> None:
    """Show which sites are connected, and how far runs are.

    Example: [bold]solera deploy status deployment/server[/bold]
    """
    _needs_flower()
    from ..deploy.commands import status as look

    found = look(folder)
    lines = [f"server at {found['address']}: {'reachable' if found['reachable'] else 'not reachable'}"]
    for node in found["nodes"]:
        out = ": locked out, it needs `solera deploy rekey`" if node.get("status") == "unregistered" else ""
        lines.append(f"  {node['site'] or 'node'} ({node.get('node-id')}): {node.get('status')}{out}")
    lines += [f"  run {run}: {rounds} rounds done" for run, rounds in found["directories"].items()]
    emit(found, json, lambda: "\n".join(lines))


@app.command(epilog=EXIT_CODES)
@reported
def logs(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The folder of the server or of a site.")],
    last: Annotated[int, Option("--last", "-n", help="How many lines.")] = 50,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Show what a server or a site has logged; at a site, also what it was asked and how many bytes left it.

    Example: [bold]solera deploy logs deployment/sites/hospital-a[/bold]
    """
    from ..deploy.commands import logs as lines

    seen: set[str] = set()
    while True:
        for line in lines(folder, last):
            key = json_.dumps(line)
            if key not in seen:
                seen.add(key)
                typer.echo(key if json else _text(line))
        if not follow:
            return
        time.sleep(1.0)


def _text(line: dict[str, Any]) -> str:
    if line.get("log") == "asked":
        said = f"asked for {line.get('task')}, {line.get('bytes_in')} bytes in, {line.get('bytes_out')} bytes out, "
        return f"{line.get('time')} {line.get('seconds')} s: {said}{line.get('outcome')}"
    return f"{line.get('time')} {line.get('level', '')} {line.get('says', '')}"
