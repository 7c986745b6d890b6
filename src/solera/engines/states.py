"""Client state that survives rounds: versioned files, each named by its step and sha256."""

import contextlib
import hashlib
import os
import pathlib
import re
from collections.abc import Collection, Mapping

from ..core.calls import Version
from ..core.errors import RunError
from ..core.tensors import Weights
from ..core.wire import OWN_FILES, WireError, decode, encode, safe_name

VERSION = re.compile(r"(\d{12})\.([0-9a-f]{64})\.safetensors")


class StateError(RunError):
    """Client state that cannot be read or written, or has changed. This is not the client's failure."""


class ClientStates:
    """Client state in files named by step and content, `root/<client>/<step>.<sha256>.safetensors`.

    Which of them a client has is not known here: the caller names a version and gets that one or an error.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = pathlib.Path(root)

    def versions(self, client: str) -> list[Version]:
        """All stored versions, oldest first."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = map(VERSION.fullmatch, os.listdir(self.root / client))
            return sorted(Version(int(m[1]), m[2]) for m in found if m)
        return []

    def path(self, client: str, version: Version) -> pathlib.Path:
        return self.root / safe_name(client, "client id") / f"{version.step:012d}.{version.sha256}.safetensors"

    def load(self, client: str, version: Version | None) -> dict[str, Weights]:
        """The state `version`, bitwise; empty if the client has none yet."""
        if version is None:
            return {}
        content = self.content(client, version)
        try:
            return decode(content, dict[str, Weights], limits=OWN_FILES)
        except WireError as e:  # whole, but not ours
            raise StateError(f"the state of {client} in {self.path(client, version)} is not one: {e}") from None

    def content(self, client: str, version: Version) -> bytes:
        """The bytes of that state, checked by their hash."""
        path = self.path(client, version)
        try:
            if not path.is_file():
                raise StateError(f"the state of {client} is missing: {path}")
            content = path.read_bytes()
        except OSError as e:
            raise StateError(f"the state of {client} cannot be read: {path}: {e.strerror}") from None
        if hashlib.sha256(content).hexdigest() != version.sha256:
            raise StateError(f"the state of {client} is damaged: {path} does not match the sha256 in its name")
        return content

    def check(self, ledger: Mapping[str, Version]) -> None:
        """Raise StateError, with the name of the file, unless every version in `ledger` exists and is intact."""
        for k, version in ledger.items():
            self.content(k, version)

    def save(
        self,
        client: str,
        step: int,
        state: dict[str, Weights],
        keep: Collection[Version] = (),
        keep_from: int = 0,
    ) -> Version:
        """Store the state after `step`. Delete those before `keep_from` that are not in `keep`."""
        content = encode(state)
        version = Version(step, hashlib.sha256(content).hexdigest())
        self.store(client, version, content, keep, keep_from)
        return version

    def store(
        self, client: str, version: Version, content: bytes, keep: Collection[Version] = (), keep_from: int = 0
    ) -> None:
        """Write what `save` has encoded, here or on another machine."""
        path = self.path(client, version)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)
            draft.replace(path)
            for old in self.versions(client):
                if old.step < keep_from and old not in (*keep, version):
                    self.path(client, old).unlink(missing_ok=True)
        except OSError as e:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StateError(
                f"the state of {client} cannot be stored in {path.parent}: {e.strerror}; the last checkpoint is "
                "unharmed: make room (or give the folder back), then resume the run"
            ) from None

    def flush(self, ledger: Mapping[str, Version]) -> None:
        """Write these versions to disk (fsync), so that they survive a power cut."""
        for k, version in ledger.items():
            path = self.path(k, version)
            try:
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as e:
                raise StateError(
                    f"the state of {k} cannot be stored in {path}: {e.strerror}; the last checkpoint is unharmed: make "
                    "room, then resume the run"
                ) from None


class StatesElsewhere(ClientStates):
    """The states of clients that keep them on machines of their own. There, each is checked by its hash when a call
    builds on it, and written before the reply leaves."""

    def check(self, ledger: Mapping[str, Version]) -> None:
        """Do nothing: there is nothing to check here."""

    def flush(self, ledger: Mapping[str, Version]) -> None:
        """Do nothing: there is nothing to flush here."""


class Carried(ClientStates):
    """The state of one client for one call: it arrives with the call, and the new state leaves with the reply."""

    def __init__(self, content: bytes | None):
        super().__init__("carried")
        self.given, self.left = content, b""

    def content(self, client: str, version: Version) -> bytes:
        """The bytes that came with the call; the server has compared them with their hash."""
        if self.given is None:
            raise StateError(f"the state of {client} did not come with the call")
        return self.given

    def store(
        self, client: str, version: Version, content: bytes, keep: Collection[Version] = (), keep_from: int = 0
    ) -> None:
        """Keep the new state for the reply."""
        self.left = content
