"""The gate in front of Flower's app processes: an app that brings code of its own is refused.

Everyone who can reach a SuperLink's control interface can submit an app, and Flower runs its code on the server and on
every node. A deployment of Solera does not need this: its app is one `pyproject.toml` that names two installed modules.
So `solera deploy` puts programs of its own first on the path of what it starts. `flwr-serverapp` and `flwr-clientapp`
are Flower's, with one step before an app is unpacked: it must be exactly that file, or nothing runs. The others that
Flower would start for an app (agents, simulations) refuse.

The step replaces a function inside flwr (`deploy/flower_inside.py`). If the function is not found, or
the version of flwr was not tried, the programs refuse to start.
"""

import importlib
import io
import os
import stat
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import SoleraError
from . import handover
from .flower_inside import GATED, INSTALL, OWN_NOTES, UNUSED, check_version

COMPONENTS = {"serverapp": "solera.deploy.serverapp:app", "clientapp": "solera.deploy.clientapp:app"}
ALLOWED = {"pyproject.toml"}
MOST_BYTES = 1 << 16


class AppRefused(SoleraError):
    """An app that is not the one of a Solera deployment."""


def check_app(content: bytes) -> None:
    """Raise AppRefused unless this bundle is one pyproject.toml that names the two modules of Solera."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            names = [n for n in bundle.namelist() if not OWN_NOTES.fullmatch(n)]
            if set(names) != ALLOWED or len(names) != 1:
                strange = sorted(set(names) - ALLOWED)
                raise AppRefused(f"the app brings files of its own ({', '.join(strange)[:200] or 'none'}): refused")
            if bundle.getinfo("pyproject.toml").file_size > MOST_BYTES:
                raise AppRefused("the app's pyproject.toml is too large: refused")
            tables = tomllib.loads(bundle.read("pyproject.toml").decode())
        named = tables["tool"]["flwr"]["app"]["components"]
    except AppRefused:
        raise
    except Exception as e:  # any error is the sender's fault
        raise AppRefused(f"not an app: {type(e).__name__}: {str(e)[:100]}") from None
    if named != COMPONENTS:
        raise AppRefused(f"the app names {str(named)[:200]}, expected {COMPONENTS}: refused")


def guarded(install: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's function that unpacks an app, with the check before it."""

    def checked(fab_file: Path | bytes, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(fab_file, bytes):
            raise AppRefused("an app arrives as bytes")
        check_app(fab_file)
        return install(fab_file, *args, **kwargs)

    return checked


def main(program: str) -> None:
    """Run Flower's program of that name behind the gate."""
    if program not in GATED:
        sys.exit(f"solera: a deployment has no use for {program}: refused")
    try:
        check_version()
    except SoleraError as e:
        sys.exit(f"solera: {e}")
    where, cli, entry = GATED[program]
    module = importlib.import_module(where)
    if not callable(getattr(module, INSTALL, None)):
        sys.exit(f"solera: {where} of this flwr has no {INSTALL}: apps cannot be checked")
    setattr(module, INSTALL, guarded(getattr(module, INSTALL)))
    getattr(importlib.import_module(cli), entry)()


def write_programs(folder: Path, standby: bool = False) -> None:
    """Write the programs into a folder that comes first on the path. `standby`: a site's program is `handover.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*GATED, *UNUSED):
        file = folder / name
        text = f"#!{sys.executable}\nfrom solera.deploy.gate import main\n\nmain({name!r})\n"
        if standby and name == "flwr-clientapp":
            text = f"#!{sys.executable} -S\n" + Path(handover.__file__).read_text()
        if not file.is_file() or file.read_text() != text:
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_text(text)
            draft.chmod(stat.S_IRWXU)
            draft.replace(file)
