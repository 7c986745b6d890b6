"""Trust in the code that a run directory names: whether it may be imported.

A run directory may come from another person, and a path in its config.toml is code. So a run that names code records in
run.json the paths, the sha256 of their files, and a proof over both: an HMAC with a key that only this user can read
(`$XDG_STATE_HOME/solera/key`, by default `~/.local/state/solera/key`). If the proof is valid and covers every path that
config.toml names now, the run is this user's own. Otherwise nothing is imported until the user allows it. Other
settings are not part of the proof: the user may increase `run.rounds` to run longer. This module does not import torch.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import RunError
from ..core.files import MOST_TOML, open_file, read_file
from ..core.plugins import code_allowed, label, paths_in, sha256_of, sha256_of_file
from .read import read_json

KEY_BYTES = 32
SENDS = "track.mlflow"
ENGINE = "engine.name"  # an engine's code may change: it does not change the bits
log = logging.getLogger("solera")


def key_file() -> Path:
    """The path of this user's key."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "solera", "key")


def prove(code: Mapping[str, str]) -> str | None:
    """The proof that this user's run names this code (path -> sha256). None, with a warning, if there is no key."""
    try:
        return _hmac(_make_key(), code)
    except OSError as e:
        log.warning("no key in %s (%s): resuming this run will need --trust-code", key_file(), e.strerror)
        return None


@contextlib.contextmanager
def code_of_run(home: Path, trust_code: bool = False) -> Iterator[None]:
    """Allow the code that the run in `home` names, if the run is this user's own or the user trusts it."""
    named = _named(home)
    if not named:
        yield
        return
    if not trust_code and (why := _not_ours(home, set(named))):
        told = ", ".join(f"{key} = {path!r}" for path, key in named.items())
        raise RunError(
            f"{home} names code to import: {told}. It may not be a run of yours: {why}. Read the code; if you trust "
            "it, add --trust-code (in Python, trust_code=True)"
        )
    with code_allowed(home):
        yield


def refuse_sending(home: Path, uri: str | None, trusted: bool = False) -> None:
    """Refuse to continue a run whose results go elsewhere, unless this user began it so or trusts it."""
    facts = read_json(home / "run.json", []) or {}
    if uri is not None and not trusted and _doubt(facts.get("sends"), {uri: SENDS}):
        raise RunError(
            f"{home} sends its settings and results to {uri} ({SENDS}), and it may not be a run of yours: run.json has "
            "no proof of it made with your key. If you want that, add --trust-code (in Python, trust_code=True)"
        )


def refuse_changed_files(home: Path) -> None:
    """Refuse to continue a run if its code files have changed, before any of them is imported."""
    named = {path: sha256_of_file(path, home) for path, key in _named(home).items() if key != ENGINE}
    refuse_changes(home, {path: sha256 for path, sha256 in named.items() if sha256 is not None})


def refuse_changes(home: Path, now: Mapping[str, str]) -> None:
    """Refuse to continue a run with code (path -> sha256) that differs from the code it was started with."""
    if changed := _changed(home, now):
        raise RunError(
            f"{changed[0]!r} is not the code that {home} was started with (its sha256 is now {now[changed[0]][:16]}...)"
            ", so the result could differ: restore the code, or start a new run with another --out"
        )


def warn_if_changed(home: Path, name: str) -> None:
    """Log a warning if the code of a run's models or data has changed since the run."""
    sha256 = sha256_of(name)
    if sha256 is not None and _changed(home, {name: sha256}):
        log.warning("%s: %s has changed since the run was started; results may differ", home, label(name))


def _changed(home: Path, now: Mapping[str, str]) -> list[str]:
    """The paths whose code has changed since the run was started.

    The folder of a file does not count: on another machine the code may be in another place.
    """
    then = {(label(path), sha256) for path, sha256 in _recorded(read_json(home / "run.json", [])).items()}
    return [path for path, sha256 in now.items() if (label(path), sha256) not in then]


def _named(home: Path) -> dict[str, str]:
    """The paths in config.toml. Other problems of the file are reported when it is loaded."""
    try:
        return paths_in(tomllib.loads(read_file(home / "config.toml", MOST_TOML).decode()))
    except (OSError, ValueError, RecursionError):
        return {}


def _recorded(facts: dict[str, Any] | None) -> dict[str, str]:
    """The code in run.json: path -> sha256."""
    code = (facts or {}).get("code")
    return code if isinstance(code, dict) and all(isinstance(v, str) for v in code.values()) else {}


def _not_ours(home: Path, named: set[str]) -> str:
    """The reason to doubt that a run belongs to this user; "" if it does."""
    facts = read_json(home / "run.json", []) or {}
    code = _recorded(facts)
    if doubt := _doubt(facts.get("proof"), code):
        return doubt
    return f"it was started without {min(named - set(code))!r}" if named - set(code) else ""


def _doubt(proof: Any, code: Mapping[str, str]) -> str:
    """The reason why a proof over `code` does not hold; "" if it does."""
    if not isinstance(proof, str) or not proof or not proof.isascii():
        return "its run.json has no proof"
    try:
        right = hmac.compare_digest(proof.encode(), _hmac(_read_key(), code).encode())
    except OSError as e:
        return f"the key {key_file()} cannot be used ({e.strerror})"
    return "" if right else "the proof in its run.json was not made with your key"


def _hmac(key: bytes, code: Mapping[str, str]) -> str:
    return hmac.new(key, b"solera code\n" + json.dumps(dict(code), sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes:
    """The key. Raises OSError if there is none, or if other users could have read or written it."""
    with open_file(key_file(), KEY_BYTES) as file:
        found = os.fstat(file.fileno())
        key = file.read()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(0, "other users have access to it: remove it, and a new one is created", str(key_file()))
    if len(key) != KEY_BYTES:
        raise OSError(0, f"it is not {KEY_BYTES} bytes long: remove it, and a new one is created", str(key_file()))
    return key


def _make_key() -> bytes:
    """The key, created if there is none. If two processes create one at the same time, both use the first."""
    file = key_file()
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=file.parent)  # readable only by this user
        try:
            with open(handle, "wb") as out:
                out.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)
        finally:
            os.unlink(draft)
    return _read_key()
