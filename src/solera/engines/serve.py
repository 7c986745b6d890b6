"""The client's side of every engine: one call in, one reply out; and the client state that survives rounds."""

import contextlib
import hashlib
import os
import pathlib
import re
import time
import traceback
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..devices import numerics
from ..randomness import SharedGenerator, repeatable
from ..task import TASKS
from ..wire import OWN_FILES, Packed, RunError, SoleraError, Weights, WireError, decode, encode, safe_name
from .base import Call, Reply, Site, Version

VERSION = re.compile(r"(\d{12})\.([0-9a-f]{64})\.safetensors")


class InputModified(SoleraError):
    """A task wrote into a message it shares with other clients."""


class StateError(RunError):
    """Client state that cannot be read or written, or is not what it was. No client is to blame for that."""


def serve(call: Call, site: Site, states: "ClientStates", seed_global: bool = True) -> Reply:
    """Run one call. Whatever goes wrong in it becomes the reply's error; nothing is raised.

    The state loaded is the one the call names, and a new one is saved beside it, so a call can be repeated. Which of
    them counts is the federation's to say: a client whose reply is refused goes on from the one it had.
    `seed_global=False` is for threads, which share the global generators.
    """
    begun = time.monotonic()
    try:
        task = TASKS.get(call.task)
        if task is None:
            raise WireError(f"unknown task {call.task!r}")
        inbox = call.message.memo.get(call.task)
        if inbox is None:  # many clients share one message: look at it once
            inbox = call.message.memo[call.task] = decode(call.message, task.inbox)
        versions = call.message.versions
        arguments = {a: getattr(inbox, a) for a in task.takes}

        def work() -> tuple[Any, dict[str, Weights], Snapshot]:
            loaded = states.load(call.client, call.after)
            client = site.client(call.client, call.seed, loaded)
            before = _snapshot(loaded)
            with numerics():  # what a task sets is not left to the next one
                return task.fn(client, **arguments), client.state, before

        outbox, state, before = repeatable(call.seed, work) if seed_global else work()
        if call.message.versions != versions:
            raise InputModified(f"task {call.task} writes into its arguments; clone them first (t.clone())")
        reply = Packed(outbox)
        seconds = time.monotonic() - begun
        if call.deadline_s is not None and seconds > call.deadline_s:
            raise TimeoutError(f"took {seconds:.1f} s, the deadline is {call.deadline_s} s")
        version = call.after
        if _changed(state, before):
            decode(reply, task.returns, arguments)  # the server will look as closely
            version = states.save(call.client, call.step, state, call.keep, call.keep_from)
        return Reply(call.client, reply, version, seconds=seconds)
    except (InputModified, SharedGenerator) as e:
        return Reply(call.client, error=str(e), fatal="task")
    except StateError as e:
        return Reply(call.client, error=str(e), fatal="run")
    except (Exception, SystemExit) as e:
        return Reply(call.client, error=_reason(e), seconds=time.monotonic() - begun)


Snapshot = dict[str, dict[str, tuple[Tensor, int]]]


def _snapshot(state: dict[str, Weights]) -> Snapshot:
    """What a client's state is now. It holds on to the tensors: an identity says nothing once its object is gone."""
    return {name: {n: (t, t._version) for n, t in weights.items()} for name, weights in state.items()}


def _changed(state: dict[str, Weights], before: Snapshot) -> bool:
    """Whether anything was assigned, removed or written to."""
    if {k: list(v) for k, v in state.items()} != {k: list(v) for k, v in before.items()}:
        return True
    return any(
        t is not old or t._version != version
        for name, weights in before.items()
        for (old, version), t in zip(weights.values(), state[name].values(), strict=True)
    )


def _reason(e: BaseException) -> str:
    """One line that finds the place: the error, and where in whose code it was raised."""
    where = traceback.extract_tb(e.__traceback__)[-1]
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:300]} ({pathlib.Path(where.filename).name}:{where.lineno})"


class ClientStates:
    """Client state in files named by step and content, `root/<client>/<step>.<sha256>.safetensors`.

    Which of them a client has is not known here: whoever loads one names it, and gets that one or an error.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = pathlib.Path(root)

    def versions(self, client: str) -> list[Version]:
        """All that are there, oldest first."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = map(VERSION.fullmatch, os.listdir(self.root / client))
            return sorted(Version(int(m[1]), m[2]) for m in found if m)
        return []

    def path(self, client: str, version: Version) -> pathlib.Path:
        return self.root / safe_name(client, "client id") / f"{version.step:012d}.{version.sha256}.safetensors"

    def load(self, client: str, version: Version | None) -> dict[str, Weights]:
        """The state that `version` names, to the bit; nothing, if the client has none yet."""
        if version is None:
            return {}
        content = self._verified(client, version)
        try:
            return decode(content, dict[str, Weights], limits=OWN_FILES)
        except WireError as e:  # whole, but not ours
            raise StateError(f"the state of {client} in {self.path(client, version)} is not one: {e}") from None

    def _verified(self, client: str, version: Version) -> bytes:
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
        """Raise StateError, with the name of the file, unless every version in `ledger` is there and whole."""
        for k, version in ledger.items():
            self._verified(k, version)

    def save(
        self,
        client: str,
        step: int,
        state: dict[str, Weights],
        keep: Collection[Version] = (),
        keep_from: int = 0,
    ) -> Version:
        """Store the state after `step`. Of those before `keep_from`, the ones that are not in `keep` go."""
        content = encode(state)
        version = Version(step, hashlib.sha256(content).hexdigest())
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
        return version

    def flush(self, ledger: Mapping[str, Version]) -> None:
        """Make these versions survive a power cut."""
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
