"""`solera deploy init`: a folder for the server and one for each site, with keys, certificates and commands."""

import getpass
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ..core.errors import ConfigError
from ..core.plugins import code_allowed, is_path
from ..core.settings import hints
from ..core.wire import safe_name
from ..engines.engine_settings import FlowerConfig
from ..models.hf import PREFIX as ENCODER
from ..models.hub import SMALL
from ..runs.config import load_config
from . import templates
from .agreed import asked_by
from .keys import expiry, make_authority, make_node_key, make_secret, make_server_certificate
from .programs import split

LOCAL = ("localhost", "127.0.0.1")  # the server's own programs reach it there
SERVER_TABLES = ("run", "data", "public", "models", "federation", "method", "track")
SITE_TABLES = ("data", "public", "models", "method")


def init(
    config: Path,
    target: Path,
    address: str,
    hosts: Sequence[str] = (),
    systemd: bool = False,
    compose: bool = False,
    behind_firewall: bool = False,
    proxy: str | None = None,
) -> list[str]:
    """Write the folders of a deployment of `config`, whose [sites] are the clients; returns their names.

    `hosts` are more names and addresses under which sites reach the server; the certificate is valid for those. With a
    `proxy`, HOST:PORT, sites get its address.
    """
    tables = _read(config)
    with code_allowed(config.parent):  # the user who deploys it named this code
        loaded = load_config(config, trusted=True)  # report problems now, not on each machine
    models = loaded.models
    # A site knows its own model only, so it could not find out which head all models need.
    tables["models"] = {"norm": models.norm, "head": models.head, **tables.get("models", {})}
    tables["public"] = {"where": "server", **tables.get("public", {})}  # sites get what they need of it from the server
    sites = {safe_name(name, "site name"): dict(table) for name, table in tables["sites"].items()}
    host, _ = split(address)
    outside = [split(proxy)[0]] if proxy else []
    names = list(dict.fromkeys([*outside, *([] if host in ("0.0.0.0", "::") else [host]), *hosts, *LOCAL]))  # noqa: S104
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} exists and is not empty: keys are never overwritten; name another folder")
    with code_allowed(config.parent):
        tasks, bounds = asked_by(loaded)
    for site in sites.values():  # values in the configuration take precedence
        site.update({"tasks": tasks, "bounds": bounds} | site)
    (target / "ca").mkdir(parents=True)
    (target / "ca").chmod(0o700)
    make_authority(target / "ca")
    _server(config, target, tables, sites, address, names)
    guard: dict[str, Any] = {"behind_firewall": True} if behind_firewall else {}
    guard |= {"proxy": proxy} if proxy else {}
    with (target / "server" / "deploy.toml").open("a") as file:
        file.write(tomli_w.dumps(guard))
    for name, site in sites.items():
        _site(config, target, tables, name, site, proxy or f"{names[0]}:{split(address)[1]}")
    if systemd:
        _units(target, list(sites))
    if compose:
        _compose(target, list(sites), split(address)[1])
    until = expiry(target / "server" / "server.crt").date().isoformat()
    rows = "\n".join(f"| `sites/{n}/` | the site {n} | `node.key` |" for n in sites)
    text = templates.README.format(rows=rows, address=address, names=", ".join(names), until=until)
    (target / "README.md").write_text(text)
    return list(sites)


def renew(target: Path, hosts: Sequence[str] = ()) -> str:
    """A new certificate for the server, from the same authority; the sites need nothing new. Returns its last day."""
    ca, server = target / "ca", target / "server"
    if not (ca / "ca.key").is_file() or not server.is_dir():
        raise ConfigError(f"{target} needs ca/ca.key and server/: renew where the deployment was made")
    names = list(dict.fromkeys([*hosts, *_names_in(server / "server.crt"), *LOCAL]))
    for old in ("server.key", "server.crt"):
        (server / old).rename(server / f"{old}.old")
    make_server_certificate(ca, server, names)
    return expiry(server / "server.crt").date().isoformat()


def _names_in(certificate: Path) -> list[str]:
    from cryptography import x509

    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _read(config: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{config} cannot be read: {e}") from None
    if not isinstance(tables.get("sites"), dict) or not tables["sites"]:
        raise ConfigError(f"{config} names no sites: a deployment needs a table [sites.NAME] for each of them")
    return tables


def _server(
    config: Path,
    target: Path,
    tables: Mapping[str, Any],
    sites: Mapping[str, Mapping[str, Any]],
    address: str,
    names: list[str],
) -> None:
    """The server knows the models and the keys of its sites, not their data."""
    folder = target / "server"
    (folder / "keys").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "runs").mkdir()
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(templates.APP)
    make_server_certificate(target / "ca", folder, names)
    make_secret(folder / "secret")
    shutil.copy(target / "ca" / "ca.crt", folder / "ca.crt")
    kept = {k: tables[k] for k in SERVER_TABLES if k in tables}
    given = {k: v for k, v in tables.get("engine", {}).items() if k in hints(FlowerConfig)}
    kept["engine"] = {**given, "name": "flower", "address": address}
    kept["sites"] = {
        name: {**{k: v for k, v in site.items() if k == "model"}, "key": f"keys/{name}.pub"}
        for name, site in sites.items()
    }
    (folder / "server.toml").write_text(templates.SERVER_TOML + tomli_w.dumps(_located(kept)))
    (folder / "deploy.toml").write_text(templates.DEPLOY_SERVER.format(address=address))
    _copy_code(kept, config.parent, folder)


def _site(config: Path, target: Path, tables: Mapping[str, Any], name: str, site: dict[str, Any], server: str) -> None:
    folder = target / "sites" / name
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    make_node_key(folder, name)
    shutil.copy(target / "ca" / "ca.crt", folder / "ca.crt")
    shutil.copy(folder / "node.pub", target / "server" / "keys" / f"{name}.pub")
    kept = {k: tables[k] for k in SITE_TABLES if k in tables}
    kept["models"] = {k: v for k, v in tables.get("models", {}).items() if k not in ("server", "options")}
    if (own := tables.get("models", {}).get("options", {}).get(site.get("model"))) is not None:
        kept["models"]["options"] = {site["model"]: own}  # options of other sites' models, which are not here
    kept["method"] = {"name": tables["method"]["name"]}  # its settings arrive with each message
    kept["sites"] = {name: site}
    if tables.get("engine", {}).get("portable"):  # all or none
        kept["engine"] = {"portable": True}
    (folder / "site.toml").write_text(templates.SITE_TOML + tomli_w.dumps(_located(kept)))
    (folder / "deploy.toml").write_text(templates.DEPLOY_SITE.format(name=name, address=server))
    _copy_code(kept, config.parent, folder)


def _located(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with absolute paths of data. Code is copied, so its paths stay relative to the tables."""
    out: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            out[key] = _located(value)
        elif key in ("path", "data") and isinstance(value, str) and not is_path(value):
            out[key] = str(Path(value).expanduser().absolute())
        else:
            out[key] = value
    return out


def _copy_code(tables: Mapping[str, Any], beside: Path, folder: Path) -> None:
    """The files of code and the folders of encoders that tables name, beside the new TOML."""
    for value in tables.values():
        if isinstance(value, Mapping):
            _copy_code(value, beside, folder)
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name.startswith((f"{ENCODER}./", f"{ENCODER}../")):
                _copy_encoder(name, beside, folder)
            origin = name.rpartition(":")[0] if is_path(name) else ""
            if origin.endswith(".py") and not Path(origin).is_absolute():
                if not (beside / origin).is_file():
                    raise ConfigError(f"{name!r}: there is no {origin} beside the configuration")
                (folder / origin).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(beside / origin, folder / origin)


def _copy_encoder(name: str, beside: Path, folder: Path) -> None:
    """The encoder `hf:./FOLDER`, which both ends need: without files that are never read, such as pickles and code."""
    where = Path(name.removeprefix(ENCODER))
    if ".." in where.parts:
        raise ConfigError(f"{name!r}: put the encoder into a folder beside the configuration, or give its whole path")
    for pattern in (*SMALL, "*.safetensors", "1_Pooling/*.json"):  # no pickles, no code
        for file in sorted((beside / where).glob(pattern)):
            target = folder / file.relative_to(beside)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def _units(target: Path, sites: list[str]) -> None:
    about = {"user": getpass.getuser(), "solera": Path(sys.executable).parent / "solera"}
    places = [("server", "server", target / "server", "the server")]
    places += [("site", "client", target / "sites" / n, f"the site {n}") for n in sites]
    for role, command, folder, what in places:
        text = templates.UNIT.format(what=what, command=command, folder=folder.absolute(), **about)
        (folder / f"solera-{role}.service").write_text(text)


def _compose(target: Path, sites: list[str], port: int) -> None:
    more = f', "--address", "0.0.0.0:{port}", "--behind-firewall"'  # no port is published
    text = templates.COMPOSE_HEAD + templates.COMPOSE_SERVICE.format(
        service="server", command="server", folder="server", more=more
    )
    for name in sites:
        text += templates.COMPOSE_SERVICE.format(
            service=f"site-{name}", command="client", folder=f"sites/{name}", more=f', "--server", "server:{port}"'
        )
    (target / "compose.yaml").write_text(text)
